"""record.py as it is run: what it saves and seals, and what is left when something of it fails or a person ends it."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import record
from command_line import UsageError
from conftest import ROOT, under_file_modes
from evidence.verify import document, verify
from models.factory import SetUpMissing
from scenarios import SCENARIOS, ScenarioError
from summary import summary

pytestmark = pytest.mark.slow

OLD = b"what was saved before\n"
QUICK = '[[scenario]]\nname = "quick"\nquestion = "Why is pull request 416 red?"\n'
WORDS = '[[scenario]]\nname = "words"\nquestion = "Why?"\n'
HELD = '[[scenario]]\nname = "held"\nquestion = "Why?"\nhold_back_s = 60\n'
DERIVED = '[[scenario]]\nname = "derived"\nquestion = "Why is #416 red?"\nbudget_after_first_reply_of = "quick"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder of its own for one batch: its scenarios, what it saves, and its evidence."""

    path: Path

    @property
    def out(self) -> Path:
        return self.path / "runs.json"

    @property
    def folder(self) -> Path:
        """The one run folder."""
        (folder,) = (self.path / "evidence").iterdir()
        return folder

    @property
    def saved(self) -> Any:
        return json.loads(self.out.read_bytes())

    @property
    def rows(self) -> dict[str, list[Any]]:
        return {scenario["name"]: scenario["runs"] for scenario in self.saved["scenarios"]}

    def events(self, kind: str) -> list[Any]:
        return [event for event in json.loads((self.folder / "events.json").read_bytes()) if event["kind"] == kind]

    @property
    def manifest(self) -> Any:
        return json.loads((self.folder / "manifest.json").read_bytes())["predicate"]

    def command(self, *arguments: str, own: str = "", program: str = "record.py") -> list[str]:
        """A command line; `own` are scenarios as TOML."""
        self.out.write_bytes(OLD)
        if own:
            (self.path / "own.toml").write_text(own, encoding="utf-8")
            arguments = ("--scenarios", str(self.path / "own.toml"), *arguments)
        into = ["--out", str(self.out), "--evidence", str(self.path / "evidence")]
        return [sys.executable, *(["-c", program] if "\n" in program else [program]), *into, *arguments]

    def start(
        self, *arguments: str, own: str = "", program: str = "record.py", **given: Any
    ) -> "subprocess.Popen[str]":
        settings = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        settings |= {"REVIEW_MODEL": "offline", **given.pop("environment", {})}
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **given}
        command = self.command(*arguments, own=own, program=program)
        return subprocess.Popen(under_file_modes(command), cwd=ROOT, env=settings, text=True, **given)

    def run(self, *arguments: str, **given: Any) -> "subprocess.CompletedProcess[str]":
        with self.start(*arguments, **given) as process:
            stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(path=tmp_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Five:
    """The five scenarios of record.py, run once for all tests of them."""

    place: Place
    done: "subprocess.CompletedProcess[str]"


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Five:
    place = Place(path=tmp_path_factory.mktemp("five"))
    return Five(place=place, done=place.run())


def test_the_five_scenarios_end_as_they_are_meant_to(five: Five) -> None:
    assert five.done.returncode == 0
    assert {name: [run["outcome"] for run in runs] for name, runs in five.place.rows.items()} == {
        "positive": ["answered"],
        "slow-tool": ["answered"],
        "budget-of-one": ["token_budget"],
        "budget-derived": ["token_budget"],
        "model-timeout": ["model_timeout"],
    }
    (slow,) = five.place.rows["slow-tool"][0]["receipts"]
    assert (slow["args"], slow["outcome"], slow["source_gap"]) == ({"job_id": 815}, "error", "native_tool_timeout")
    assert (slow["bound_s"], slow["bound_source"]) == (3.0, "tool_set")


def test_a_budget_of_one_stops_before_the_first_tool_and_the_derived_one_later(five: Five) -> None:
    rows = {name: runs[0] for name, runs in five.place.rows.items()}
    first = five.place.events("model_call_ended")[0]
    assert first["run"] == "positive"
    used = first["facts"]["usage"]["total_tokens"]
    fates = {name: [call["outcome"] for call in row["receipts"]] for name, row in rows.items()}
    assert fates["budget-of-one"] == ["withheld"]
    assert fates["budget-derived"] == ["executed", "withheld"]
    assert (rows["budget-of-one"]["token_budget"], rows["budget-of-one"]["known_subtotal"]) == (1, used)
    later = rows["budget-derived"]
    assert later["token_budget"] == used + 1 <= later["known_subtotal"]
    assert later["derived"] == f"token_budget: the first reply of positive used {used} tokens, and one more"
    assert [name for name, row in rows.items() if "derived" in row] == ["budget-derived"]


def test_what_was_injected_or_derived_is_said_in_the_record_and_in_the_events(five: Five) -> None:
    rows = {name: runs[0] for name, runs in five.place.rows.items()}
    slow = rows["model-timeout"]
    assert slow["injected"] == "the offline model holds each reply back by 5 s"
    assert [name for name, row in rows.items() if "injected" in row] == ["model-timeout"]
    assert 0.5 <= slow["seconds"] < 5.0
    assert (slow["usage_known"], slow["model_calls"], slow["receipts"]) == (False, 1, [])
    started = {event["run"]: event["facts"] for event in five.place.events("run_started")}
    for name, row in rows.items():
        for key in ("injected", "derived"):
            assert started[name].get(key) == row.get(key)
        assert started[name]["limits"]["token_budget"] == row["token_budget"]


def test_runs_json_has_one_form(five: Five) -> None:
    saved = five.place.saved
    assert five.place.out.read_bytes() == document(saved)
    assert set(saved) == {"schema_version", "model", "evidence", "scenarios"}
    assert (saved["schema_version"], saved["model"]) == (1, "offline")
    assert [scenario["name"] for scenario in saved["scenarios"]] == [scenario.name for scenario in SCENARIOS]
    for scenario, meant in zip(saved["scenarios"], SCENARIOS, strict=True):
        assert set(scenario) == {"name", "question", "limits", "runs"}
        assert scenario["question"] == meant.question
        assert scenario["limits"] == {
            "model_timeout_s": meant.model_timeout_s,
            "deadline_s": meant.deadline_s,
            "max_steps": 12,
            "tool_timeouts_s": {"fetch_job_log": 3.0},
        }
        (run,) = scenario["runs"]
        assert {"token_budget", "outcome", "known_subtotal", "usage_known", "receipts", "seconds"} <= set(run)


def test_the_evidence_of_the_batch_is_sealed_and_holds(five: Five) -> None:
    place = five.place
    assert verify(place.folder) == []
    assert (place.manifest["kind"], place.manifest["outcome"]) == ("batch", "complete")
    assert place.saved["evidence"] == place.folder.name
    assert (place.folder / "runs.json").read_bytes() == place.out.read_bytes()
    assert (place.folder / "stdout.txt").read_text(encoding="utf-8") == five.done.stdout
    assert (place.folder / "timeline.html").read_bytes().startswith(b"<!DOCTYPE html>")


def test_stdout_is_the_summary_and_stderr_one_plain_line_for_each_begin_and_end(five: Five) -> None:
    assert five.done.stdout == f"{summary(five.place.saved)}\n"
    lines = five.done.stderr.splitlines()
    names = [scenario.name for scenario in SCENARIOS]
    assert [line for line in lines if line.endswith(" ...")] == [f"{name} ..." for name in names]
    ends = [line.split(": ")[0] for line in lines if not line.endswith(" ...")]
    assert ends == [*names, "saved", "evidence"]
    assert re.fullmatch(r"positive: answered, \d+ tokens, \d+\.\d\d s", lines[1])
    assert lines[-2:] == [f"saved: {five.place.out}", f"evidence: {five.place.folder}"]
    assert "\x1b" not in five.done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "scripted:none.json"], "scripted:none.json cannot be read"),
        (["--scenarios", "none.toml"], "none.toml: No such file or directory"),
        (["--scenarios", "garbage"], "garbage: no TOML"),
        (["--compare", "none.json"], "--compare none.json: No such file or directory"),
        (["--compare", "garbage"], "--compare garbage: garbage is not a file that record.py has saved"),
        (["--out", "."], "--out .: is there and is no plain file"),
        (["--out", "none/runs.json"], "--out none/runs.json: its folder cannot be written to"),
        (["--out", "garbage/runs.json"], "--out garbage/runs.json: its folder cannot be written to"),
        (["--out", ""], "--out takes "),
        (["--evidence", "garbage"], "--evidence garbage: File exists; for example: --evidence runs"),
        (["--repeat", "0"], "--repeat takes a whole number above 0, not '0'"),
        (["--jobs", "x"], "--jobs takes a whole number above 0, not 'x'"),
        (["--jobs"], "argument --jobs: expected one argument"),
        (["--repeats", "3"], "unrecognized arguments: --repeats"),
        (["mine.toml"], "unrecognized arguments: mine.toml"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name_before_anything_is_touched(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"runs.json": OLD, "garbage": b"\xff["}
    for name, content in files.items():
        Path(name).write_bytes(content)
    with pytest.raises((UsageError, SetUpMissing, ScenarioError)) as caught:
        record.prepare(arguments, {"REVIEW_MODEL": "offline"}, frozenset()).close()
    assert message in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def refused(place: Place, *arguments: str, **given: Any) -> str:
    """The one line with which record.py refuses, having touched nothing."""
    done = place.run(*arguments, **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert place.out.read_bytes() == OLD
    assert not (place.path / "evidence").exists()
    assert done.stderr.startswith("record.py: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_without_a_key_it_says_so_in_one_line_and_touches_nothing(place: Place) -> None:
    assert "needs a key in GOOGLE_API_KEY" in refused(place, environment={"REVIEW_MODEL": ""})


def test_an_out_that_is_no_plain_file_is_not_replaced(place: Place) -> None:
    pipe = place.path / "pipe"
    os.mkfifo(pipe)
    assert f"--out {pipe}: is there and is no plain file" in refused(place, "--out", str(pipe), own=WORDS)
    assert pipe.is_fifo()


def test_an_out_in_a_folder_that_takes_no_file_is_refused_before_anything_is_asked(place: Place) -> None:
    (place.path / "locked").mkdir(mode=0o500)
    out = place.path / "locked" / "runs.json"
    assert f"--out {out}: its folder cannot be written to" in refused(place, "--out", str(out), own=WORDS)


def test_where_the_evidence_goes_and_what_serves_the_model_can_be_set_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    twins = {"REVIEW_MODEL": "offline", "REVIEW_EVIDENCE": "kept", "REVIEW_SERVED_BY": "a proxy of ours"}
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards: from then on it is recorded
    record.prepare([], twins, frozenset()).close()
    (folder,) = (tmp_path / "kept").iterdir()
    provenance = json.loads((folder / "provenance.json").read_bytes())
    assert (provenance["model"], provenance["between"]["served_by"]) == ("offline", "a proxy of ours")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_importing_it_imports_nothing_that_only_a_run_needs() -> None:
    loaded = (
        "import sys, record; print([name for name in ('ci', 'sources.jobs', 'models.offline') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_timeout_for_a_tool_that_there_is_not_is_refused(place: Place) -> None:
    line = refused(place, own=f"{WORDS}tool_timeouts_s = {{ fetch = 9 }}\n")
    assert [word for word in ("words", "'fetch'", "fetch_job_log") if word not in line] == []


def test_own_scenarios_run_within_their_own_limits(place: Place) -> None:
    own = f"""
{QUICK}max_steps = 1
{HELD}deadline_s = 0.2
[[scenario]]
name = "own-timeout"
question = "job 815?"
tool_timeouts_s = {{ fetch_job_log = 0.1 }}
"""
    assert place.run(own=own).returncode == 0
    rows = {name: runs[0] for name, runs in place.rows.items()}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "quick": "step_limit",
        "held": "deadline",
        "own-timeout": "answered",
    }
    (receipt,) = rows["own-timeout"]["receipts"]
    assert (receipt["bound_s"], receipt["bound_source"]) == (0.1, "tool")
    assert place.saved["scenarios"][2]["limits"]["tool_timeouts_s"] == {"fetch_job_log": 0.1}
    assert verify(place.folder) == []


def test_repeats_run_side_by_side_and_are_saved_in_their_order(place: Place) -> None:
    held = HELD.replace("60", "0.3").replace("held", "a-bit-held")
    assert place.run("--repeat", "3", "--jobs", "4", own=QUICK + held + DERIVED).returncode == 0
    stops = {event["run"]: event["facts"] for event in place.events("stop")}
    for name, rows in place.rows.items():
        assert len(rows) == 3
        for number, row in enumerate(rows, 1):
            assert row.items() >= stops.pop(f"{name}/{number}").items()
    assert stops == {}
    assert {row["derived"] for row in place.rows["derived"]} == {place.rows["derived"][0]["derived"]}
    going, most = set[str](), 0
    for event in json.loads((place.folder / "events.json").read_bytes()):
        if event["kind"] == "run_started":
            going.add(event["run"])
        elif event["kind"] == "stop":
            going.discard(event["run"])
        most = max(most, len(going))
    assert 2 <= most <= 4
    assert verify(place.folder) == []


def test_each_repeat_of_a_script_starts_at_its_first_reply(place: Place) -> None:
    script = place.path / "script.json"
    script.write_text(json.dumps([{"content": "Because.", "usage_metadata": {"total_tokens": 3}}]))
    place.run("--repeat", "2", "--model", f"scripted:{script}", own=WORDS)
    assert [run["outcome"] for run in place.rows["words"]] == ["answered", "answered"]


@pytest.mark.parametrize("reply", [{"content": "Because."}, {"error": "the provider is down"}])
def test_a_budget_that_cannot_be_derived_loses_its_own_row_only(reply: dict[str, str], place: Place) -> None:
    script = place.path / "script.json"
    script.write_text(json.dumps([reply]))
    done = place.run("--model", f"scripted:{script}", own=QUICK + DERIVED + WORDS)
    assert done.returncode == 1
    why = "its budget is derived from the first reply of quick, whose usage is not known"
    assert place.rows["derived"] == [{"failed": why}]
    assert f"derived: not run: {why}" in done.stderr.splitlines()
    assert f"not run: {why}" in done.stdout
    outcome = "model_error" if "error" in reply else "missing_usage"
    assert [place.rows[name][0]["outcome"] for name in ("quick", "words")] == [outcome, outcome]
    assert [event["facts"]["reason"] for event in place.events("run_failed")] == [why]
    assert (verify(place.folder), place.manifest["outcome"]) == ([], "incomplete")


def test_what_has_changed_is_said_scenario_by_scenario(place: Place) -> None:
    assert place.run(own=QUICK + WORDS).returncode == 0
    (old := place.saved)["scenarios"][1]["runs"][0]["outcome"] = "deadline"
    (place.path / "old.json").write_text(json.dumps(old), encoding="utf-8")
    again = Place(path=place.path / "again")
    again.path.mkdir()
    new = QUICK + WORDS + WORDS.replace('"words"', '"new"')
    done = again.run("--compare", str(place.path / "old.json"), own=new)
    assert done.returncode == 0
    assert done.stdout == (
        f"{summary(again.saved)}\n\n"
        "what changed (answers and seconds are not compared):\n"
        "  quick: nothing\n  words: outcome deadline -> answered\n  new: only now\n"
    )
    assert (again.folder / "stdout.txt").read_text(encoding="utf-8") == done.stdout


def test_an_old_file_puts_no_control_sequence_on_the_terminal(place: Place) -> None:
    row = {"name": "a\x1b[31m", "question": "b", "limits": {"tool_timeouts_s": {}}, "runs": [{"failed": "c"}]}
    old = place.path / "old.json"
    old.write_text(json.dumps({"model": "\x1b]0;title\x07", "scenarios": [row]}), encoding="utf-8")
    done = place.run("--compare", str(old), own=WORDS)
    assert (done.returncode, "only then" in done.stdout) == (0, True)
    assert "\x1b" not in done.stdout


def test_a_secret_of_the_environment_is_written_nowhere(place: Place) -> None:
    secret = f"fake-{uuid4().hex}"
    done = place.run(
        own=f'[[scenario]]\nname = "told"\nquestion = "Is it {secret}?"\n', environment={"CI_TOKEN": secret}
    )
    assert (done.returncode, place.rows["told"][0]["outcome"]) == (0, "answered")
    written = [place.out, *(path for path in place.folder.rglob("*") if path.is_file())]
    assert [path.name for path in written if secret.encode() in path.read_bytes()] == []
    assert secret not in done.stdout + done.stderr


def test_an_absolute_path_stands_nowhere_in_the_evidence(place: Place) -> None:
    script = place.path / "script.json"
    script.write_text(json.dumps([{"error": "down"}]))
    assert place.run("--model", f"scripted:{script}", own=WORDS).returncode == 0
    written = [path for path in place.folder.rglob("*") if path.is_file()]
    assert [path.name for path in written if str(place.path).encode() in path.read_bytes()] == []


def test_frames_are_kept_where_they_are_asked_for(place: Place) -> None:
    assert place.run("--frames", own=WORDS).returncode == 0
    assert len(list((place.folder / "images").iterdir())) == 3
    assert verify(place.folder) == []


def test_a_terminal_shows_a_bar_that_is_taken_away_at_the_end(place: Place) -> None:
    shown, stderr = pty.openpty()
    held = HELD.replace("60", "0.7")
    with place.start(own=held + held.replace("held", "more"), stderr=stderr, environment={"TERM": "xterm"}) as process:
        os.close(stderr)
        screen = b""
        with contextlib.suppress(OSError):  # how the end of a terminal is told
            while piece := os.read(shown, 4096):
                screen += piece
    os.close(shown)
    assert process.returncode == 0
    assert re.search(rb"\r\[\.{20}\] 0/2 \d s held\x1b\[K", screen)
    assert re.search(rb"\r\[#{10}\.{10}\] 1/2 \d s more\x1b\[K", screen)
    bar, erased, rest = screen.rpartition(b"\r\x1b[K")
    assert erased
    assert b"\n" not in bar
    assert rest == f"saved: {place.out}\r\nevidence: {place.folder}\r\n".encode()
