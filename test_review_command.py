"""The command line of the reviewer against real git repositories: what it prints, refuses, keeps, and ends with."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from evidence.verify import verify
from reviewing.test_changes import git
from test_graph import asks, call, says
from test_review import finds, read

pytestmark = pytest.mark.slow

SECRET = f"ghp_{'f4k3' * 9}"
TASK = "what to look for"
# The command line as it is, but for a shorter bound of its tool calls: the usual one is 10 s.
SHORTER = """\
import functools, sys
import review
from bounded.timeouts import ToolTimeouts
review.Limits = functools.partial(review.Limits, tool_timeouts=ToolTimeouts(default_s=0.5))
review.main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repo:
    """A repository with one commit, and what is typed about it."""

    path: Path
    beside: Path

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, newline="")

    def scripted(self, *replies: dict[str, Any]) -> str:
        """The name of a model that replays these."""
        script = self.beside / "script.json"
        script.write_text(json.dumps(replies))
        return f"scripted:{script}"

    def command(self, *arguments: str, program: str = "", model: str = "offline") -> list[str]:
        run = ["-c", program] if program else ["review.py"]
        return [sys.executable, *run, "--repo", str(self.path), "--model", model, *arguments]

    def review(self, *arguments: str, **given: Any) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | given.pop("environment", {})
        return subprocess.run(
            self.command(*arguments, **given),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def reviewed(self, *arguments: str, **given: Any) -> dict[str, Any]:
        """What `--json` prints of a review that succeeds."""
        done = self.review("--json", "--quiet", *arguments, TASK, **given)
        assert (done.returncode, done.stderr) == (0, "")
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    repo = Repo(path=tmp_path / "repo", beside=tmp_path)
    repo.path.mkdir()
    git(repo.path, "init", "-q", "-b", "main")
    repo.write("a.py", "x = 1\n")
    git(repo.path, "add", "-A")
    git(repo.path, "commit", "-q", "-m", "first")
    return repo


@pytest.fixture
def wedged(tmp_path: Path) -> dict[str, str]:
    """An environment in which git hangs for `grep`, and for nothing else."""
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    script = f'for word; do [ "$word" = grep ] && exec sleep 600; done\nexec {shutil.which("git")} "$@"\n'
    fake.write_text(f"#!/bin/sh\n{script}")
    fake.chmod(0o755)
    return {"PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}"}


def test_the_offline_reviewer_finds_a_few_real_things(repo: Repo) -> None:
    repo.write("conflict.py", "<<<<<<< ours\nx = 1\n=======\nx = 2\n>>>>>>> theirs\n")
    repo.write("broken.py", "x = 1\ndef f(:\n")
    repo.write("broken.json", '{"a": 1,\n "b": }\n')
    repo.write("broken.toml", "a = 1\nb = \n")
    repo.write("left.py", "def f():\n    breakpoint()\n")
    repo.write("left.js", "f();\ndebugger;\n")
    repo.write("token.py", f'"""Fine."""\nHELD = "{SECRET}"\n')
    repo.write("clean.py", "# ======= no marker\nx = 1\n")
    done = repo.review("--quiet", TASK)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, lines[:2]) == (0, "", ["outcome: answered", "findings: 9"])
    found = {" ".join(line.split()[:2]) for line in lines[2:11]}
    assert found == {
        "blocker conflict.py:1:",
        "blocker conflict.py:3:",
        "blocker conflict.py:5:",
        "blocker broken.py:2:",
        "blocker broken.json:2:",
        "blocker broken.toml:2:",
        "minor left.py:2:",
        "minor left.js:2:",
        "major token.py:2:",
    }
    assert "coverage: complete" in lines
    assert "  read: clean.py, lines 1-2" in lines
    assert all("[call-" in line and "unsupported" not in line for line in lines[2:11])
    assert SECRET not in done.stdout


def test_a_long_file_is_read_whole_in_several_calls(repo: Repo) -> None:
    repo.write("long.py", "x = 1\n" * 4_500 + "breakpoint()\n")
    printed = repo.reviewed()
    assert printed["coverage"] == {
        "state": "complete",
        "missing_ranges": {},
        "read_ranges": {"long.py": [[1, 4_501]]},
    }
    (finding,) = printed["findings"]
    assert (finding["file"], finding["line"], finding["supported"]) == ("long.py", 4_501, True)


def test_json_is_one_object_with_the_fields_of_a_review(repo: Repo) -> None:
    repo.write("a.py", "x = 2\n")
    printed = repo.reviewed()
    assert printed.keys() == {
        *("schema_version", "outcome", "known_subtotal", "usage_known", "model", "model_calls", "receipts", "seconds"),
        *("findings", "coverage", "usage", "native_source_gap", "native_incomplete"),
    }
    assert (printed["outcome"], printed["findings"], printed["native_incomplete"]) == ("answered", [], "")
    assert (printed["usage"]["native_rounds"], printed["coverage"]["state"]) == (2, "complete")
    assert (printed["receipts"][0]["opened_path"], printed["receipts"][0]["delivered"]) == ("a.py", True)


def test_staged_and_base_say_which_change_is_reviewed(repo: Repo) -> None:
    repo.write("staged.py", "x = 1\n")
    git(repo.path, "add", "staged.py")
    repo.write("new.py", "x = 1\n")
    assert list(repo.reviewed()["coverage"]["read_ranges"]) == ["new.py", "staged.py"]
    assert list(repo.reviewed("--staged")["coverage"]["read_ranges"]) == ["staged.py"]
    git(repo.path, "commit", "-q", "-m", "second")
    assert list(repo.reviewed()["coverage"]["read_ranges"]) == ["new.py"]
    assert list(repo.reviewed("--base", "HEAD~1")["coverage"]["read_ranges"]) == ["new.py", "staged.py"]


def test_where_nothing_has_changed_the_empty_list_is_declared(repo: Repo) -> None:
    done = repo.review("--quiet", TASK, model=repo.scripted())  # which could not say a word
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"nothing has changed against [0-9a-f]{12}: no one was asked\n", done.stdout)
    printed = json.loads(repo.review("--json", TASK).stdout)
    assert (printed["findings"], printed["coverage"]["reason"]) == ([], "declared_empty")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say what to look for"),
        (["--base", "nonsense", TASK], "there is no commit 'nonsense'"),
        (["--base=--output=x", TASK], "is no name of a commit"),
        (["--staged", "--base", "HEAD", TASK], "--staged and --base: one of them"),
        (["--repo", "/nowhere", TASK], "/nowhere is no folder"),
        (["--repo", "{beside}", TASK], "not a git repository"),
        (["--model", "scripted:/nowhere", TASK], "scripted:/nowhere cannot be read"),
        (["--deadline", "0", TASK], "--deadline takes a number of seconds above 0"),
        (["--nonsense", TASK], "review.py --help lists what there is"),
    ],
)
def test_what_cannot_be_taken_is_one_line_and_leaves_nothing(arguments: list[str], says: str, repo: Repo) -> None:
    parent = repo.beside / "runs"
    typed = [argument.format(beside=repo.beside) for argument in arguments]
    done = repo.review("--evidence", str(parent), *typed)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("review.py: ")
    assert says in done.stderr
    assert not parent.exists()


def test_a_model_that_is_no_name_is_refused_before_anything_is_sent(repo: Repo) -> None:
    done = repo.review(TASK, model="gemini-nothing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_wedged_search_is_abandoned_and_the_review_goes_on(repo: Repo, wedged: dict[str, str]) -> None:
    repo.write("a.py", "x = 2\n")
    search = call("query_code", {"query": "x"}, "q1")
    model = repo.scripted(asks(search), asks(read()), finds({}))
    parent = repo.beside / "runs"
    given: dict[str, Any] = {"program": SHORTER, "model": model, "environment": wedged}
    done = repo.review("--json", "--evidence", str(parent), TASK, **given)
    assert done.returncode == 0
    printed = json.loads(done.stdout)
    searched, executed = printed["receipts"]
    assert (searched["outcome"], searched["source_gap"]) == ("error", "native_tool_abandoned")
    assert (searched["bound_s"], searched["query"]) == (0.5, "x")
    assert 0.5 <= searched["duration_sec"] < 1.5
    assert (executed["outcome"], "opened_path" in executed) == ("executed", False)
    assert (printed["outcome"], printed["native_source_gap"]) == ("answered", "native_tool_abandoned")
    assert (printed["coverage"]["state"], printed["findings"][0]["supported"]) == ("incomplete", False)
    (folder,) = parent.iterdir()
    assert verify(folder) == []


def test_a_wedged_search_cannot_outlive_the_deadline(repo: Repo, wedged: dict[str, str]) -> None:
    repo.write("a.py", "x = 2\n")
    model = repo.scripted(asks(call("query_code", {"query": "x"}, "q1")), finds())
    done = repo.review("--quiet", "--deadline", "2", TASK, model=model, environment=wedged)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines()[0] == "outcome: deadline"
    assert "findings: none that can be gone by (native_incomplete=deadline)" in done.stdout.splitlines()


def test_a_draft_that_holds_no_findings_is_shown_with_the_reason(repo: Repo) -> None:
    repo.write("a.py", "x = 2\n")
    done = repo.review("--quiet", TASK, model=repo.scripted(asks(read()), says("Looks good.\ncoverage: complete")))
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[1]) == (4, "findings: none that can be gone by (native_incomplete=malformed)")
    at = lines.index("the draft:")
    assert lines[at + 1 : at + 3] == ["  | Looks good.", "  | coverage: complete"]


def test_evidence_is_a_sealed_folder_with_the_custody_in_it(repo: Repo) -> None:
    repo.write("a.py", "x = 2\nbreakpoint()\n")
    parent = repo.beside / "runs"
    done = repo.review("--evidence", str(parent), TASK)
    (folder,) = parent.iterdir()
    assert (done.returncode, verify(folder)) == (0, [])
    assert (folder / "stdout.txt").read_text() == done.stdout
    events = json.loads((folder / "events.json").read_bytes())
    assert events[0]["facts"]["kind"] == "review"
    assert {"run_started", "tool_call_delivered", "stop", "record_ended"} <= {event["kind"] for event in events}
    (row,) = map(json.loads, (folder / "custody" / "episodes.jsonl").read_text().splitlines())
    (body,) = (folder / "custody" / "bodies").iterdir()
    (receipt,) = next(event["facts"]["receipts"] for event in events if event["kind"] == "stop")
    assert (row["outcome"], body.name) == ("answered", receipt["text_sha256"])


@contextlib.contextmanager
def started(command: list[str], **given: Any) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, **given) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_prints_what_is_known_and_seals_the_folder_as_interrupted(repo: Repo, wedged: dict[str, str]) -> None:
    repo.write("a.py", "x = 2\n")
    model = repo.scripted(asks(read()), asks(call("query_code", {"query": "x"}, "q1")), finds())
    parent = repo.beside / "runs"
    command = repo.command("--evidence", str(parent), TASK, model=model)
    with started(command, env=os.environ | wedged) as process:
        assert process.stderr is not None
        assert any("query_code('x'), at most" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=20)
    (folder,) = parent.iterdir()
    assert (process.returncode, verify(folder)) == (130, [])
    assert printed.startswith("outcome: interrupted\nreason: interrupted by a person\n")
    assert "  r1 read_file('a.py') returned" in printed
    assert (said.splitlines()[-1], "Traceback" in said) == (f"evidence: {folder}", False)
    assert json.loads((folder / "events.json").read_bytes())[-1]["facts"] == {"outcome": "interrupted"}
    assert (folder / "custody" / "episodes.jsonl").exists()


ESCAPES = "\x1b[31m\x1b]0;title\x07\x9b1m\u202e"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_hostile_names_and_contents_reach_no_terminal(form: list[str], repo: Repo) -> None:
    repo.write(f"{ESCAPES}.py", "x = 1\n")
    repo.write("two\nfindings: 0\n.py", "x = 1\n")
    repo.write("content.py", f"breakpoint() # {ESCAPES}\n\x1b[2J\n")
    found = {"file": f"{ESCAPES}.py\nfindings: 0", "text": f"{ESCAPES}\nfindings: 0\x1b[2J", "receipts": [ESCAPES]}
    for model in ("offline", repo.scripted(asks(read(f"{ESCAPES}.py"), read("content.py", "r2")), finds(found))):
        done = repo.review(*form, TASK, model=model)
        assert done.returncode == 0
        assert not set(done.stdout + done.stderr) & set("\x1b\x07\x9b\u202e")
        assert done.stdout.splitlines().count("findings: 0") == 0


def test_a_hostile_draft_reaches_no_terminal(repo: Repo) -> None:
    repo.write("a.py", "x = 2\n")
    done = repo.review(TASK, model=repo.scripted(says(f"No {ESCAPES} findings.")))
    assert (done.returncode, "\n  | No  findings.\n" in done.stdout) == (4, True)


def test_a_git_that_waits_for_a_pipe_is_left_at_the_deadline(repo: Repo) -> None:
    os.mkfifo(repo.path / ".gitignore")
    done = repo.review("--deadline", "1", TASK)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "review.py: git could not say within 1 s what has changed\n"


def test_a_name_that_looks_like_an_entry_of_the_list_hides_nothing(repo: Repo) -> None:
    repo.write("x\n- 1 lines: a.py", "breakpoint()\n")
    printed = repo.reviewed()
    assert printed["coverage"]["state"] == "incomplete"
    assert list(printed["coverage"]["missing_ranges"].values()) == [[[1, 1]]]


def test_without_evidence_nothing_is_left_behind(repo: Repo) -> None:
    repo.write("a.py", "x = 2\n")
    temporary = repo.beside / "tmp"
    temporary.mkdir()
    assert repo.review(TASK, environment={"TMPDIR": str(temporary)}).returncode == 0
    assert list(temporary.iterdir()) == []
    assert git(repo.path, "status", "--porcelain") == " M a.py\n"
