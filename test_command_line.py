"""The command line: flags, their environment twins, refusals by name, what is printed where."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.receipts import Receipt
from bounded.run import Answer, Event
from command_line import FLAGS, Options, Progress, UsageError, answer_dict, call_label, fate, parse, show

ROOT = Path(__file__).parent
QUESTION = "Why is CI failing on pull request 415?"

BAD_SECONDS = ["0", "-5", "nan", "NaN", "inf", "-inf", "1e999", "soon", "", " ", "5s"]
BAD_COUNTS = ["0", "-5", "1.5", "nan", "1e3", "1e999", "many", ""]


def read(*arguments: str, **environment: str) -> Options:
    return parse([*arguments, QUESTION], environment)


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("REVIEW_", "GOOGLE_"))}
    return subprocess.run(
        [sys.executable, "graph.py", *arguments],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_without_any_setting_the_documented_defaults_hold() -> None:
    assert read() == Options(
        question=QUESTION,
        model="gemini-3.8-flash",
        token_budget=None,
        all_tools_s=None,
        per_tool_s={},
        model_timeout_s=60.0,
        deadline_s=120.0,
        max_steps=12,
        json=False,
        quiet=False,
    )


@pytest.mark.parametrize(
    ("flag", "text", "field", "value"),
    [
        ("--model", "offline", "model", "offline"),
        ("--token-budget", "4096", "token_budget", 4096),
        ("--tool-timeout", "2.5", "all_tools_s", 2.5),
        ("--tool-timeout", "fetch_job_log=9", "per_tool_s", {"fetch_job_log": 9.0}),
        ("--model-timeout", "7", "model_timeout_s", 7.0),
        ("--deadline", "0.5", "deadline_s", 0.5),
        ("--max-steps", "3", "max_steps", 3),
    ],
)
def test_a_flag_and_its_environment_twin_say_the_same_and_the_flag_wins(
    flag: str, text: str, field: str, value: object
) -> None:
    (twin,) = [known.twin for known in FLAGS if known.name == flag]
    assert getattr(read(flag, text), field) == value
    assert getattr(read(**{twin: text}), field) == value
    assert getattr(read(flag, text, **{twin: "1"}), field) == value


def test_tool_timeouts_can_be_given_more_than_once() -> None:
    options = read("--tool-timeout", "5", "--tool-timeout", "fetch_job_log=1")
    assert (options.all_tools_s, options.per_tool_s) == (5.0, {"fetch_job_log": 1.0})
    twin = read(REVIEW_TOOL_TIMEOUT="5, fetch_job_log=1")
    assert (twin.all_tools_s, twin.per_tool_s) == (5.0, {"fetch_job_log": 1.0})


def test_an_empty_environment_twin_is_no_setting() -> None:
    assert read(REVIEW_MODEL="", REVIEW_DEADLINE=" ").deadline_s == 120.0


def test_a_question_needs_no_quotes() -> None:
    assert parse(["Why", "is", "415", "red?", "--model", "offline"], {}).question == "Why is 415 red?"


@pytest.mark.parametrize(
    ("flag", "text"),
    [(flag, text) for flag in ("--tool-timeout", "--model-timeout", "--deadline") for text in BAD_SECONDS]
    + [(flag, text) for flag in ("--token-budget", "--max-steps") for text in BAD_COUNTS]
    + [("--tool-timeout", text) for text in ("=5", "fetch_job_log=", "fetch_job_log=0", "5,", "fetch_job_log=nan")],
)
def test_what_is_no_value_is_refused_by_the_name_that_was_typed(flag: str, text: str) -> None:
    (twin,) = [known.twin for known in FLAGS if known.name == flag]
    with pytest.raises(UsageError, match=f"^{flag} takes "):
        read(f"{flag}={text}")
    if text.strip():
        with pytest.raises(UsageError, match=f"^{twin} takes "):
            read(**{twin: text})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], 'there is no question; for example: python graph.py "Why is CI failing on pull request 415?"'),
        (["  "], "there is no question"),
        ([QUESTION, "--deadlin", "5"], "unrecognized arguments: --deadlin"),
        ([QUESTION, "--deadline"], "argument --deadline: expected one argument"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(arguments, {})
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "there is no question"),
        ([QUESTION], {}, "gemini-3.8-flash needs a key in GOOGLE_API_KEY"),
        ([QUESTION], {"GEMINI_API_KEY": "fake-key-0123"}, "set REVIEW_MODEL=offline"),
        ([QUESTION], {"GOOGLE_API_KEY": "fake-key-0123", "GOOGLE_GENAI_USE_VERTEXAI": "1"}, "unset GOOGLE_GENAI_USE_"),
        ([QUESTION, "--model", "scripted:/nowhere.json"], {}, "scripted:/nowhere.json cannot be read (No such file"),
        (
            [QUESTION, "--model", "offline", "--tool-timeout", "fetch=3"],
            {},
            "the tools are: list_ci_jobs, fetch_job_log",
        ),
        ([QUESTION, "--deadline", "0"], {}, "--deadline takes a number of seconds above 0, not '0'"),
    ],
)
def test_missing_set_up_is_one_line_and_status_2(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = run(*arguments, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("graph.py: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "fake-key" not in done.stderr


@pytest.mark.slow
def test_an_answer_goes_to_stdout_and_progress_to_stderr() -> None:
    done = run(QUESTION, REVIEW_MODEL="offline")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "outcome: answered"
    assert lines[1].startswith("tokens: ")
    assert lines[1].endswith(" (known)")
    assert lines[2] == "model: offline"
    assert "    E       assert 2268 == 2520" in lines
    assert lines[-3] == "based on:"
    assert lines[-1].startswith("  fetch_job_log(812) returned ")
    assert "list_ci_jobs(415), at most 10.0 s ..." in done.stderr.splitlines()
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_json_is_one_object_without_nulls_and_quiet_is_quiet() -> None:
    done = run("--json", "--quiet", "Why did job 815 of pull request 418 fail?", REVIEW_MODEL="offline")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["schema_version"], answer["outcome"], answer["usage_known"]) == (1, "answered", True)
    (receipt,) = answer["receipts"]
    assert (receipt["source_gap"], receipt["bound_s"]) == ("native_tool_timeout", 3.0)
    assert "null" not in done.stdout


@pytest.mark.slow
def test_a_bound_gives_status_3_and_text_of_unknown_cost_is_marked(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"content": "Because of \x1b[31mred\x1b[0m."}]))
    done = run("--quiet", QUESTION, REVIEW_MODEL=f"scripted:{script}")
    assert done.returncode == 3
    assert done.stdout.splitlines()[:4] == [
        "outcome: missing_usage",
        "tokens: 0 (unknown)",
        f"model: scripted:{script}",
        "reason: no usage was reported",
    ]
    assert "Because of red." in done.stdout


@pytest.mark.slow
def test_output_survives_a_terminal_that_knows_only_ascii() -> None:
    done = run("--quiet", "job 815", REVIEW_MODEL="offline", PYTHONIOENCODING="ascii", REVIEW_TOOL_TIMEOUT="0.2")
    assert done.returncode == 0
    assert "TOOL_TIMEOUT" in done.stdout


@pytest.mark.slow
def test_closed_streams_do_not_keep_a_run_from_ending_well() -> None:
    command = f"{sys.executable} graph.py 'PR 416' --model offline >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.slow
def test_help_is_quick_and_names_every_flag_twin_and_status() -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in FLAGS:
        assert flag.name in done.stdout
    assert "exit status: 0 answered" in done.stdout
    probe = (
        "import sys, runpy; sys.argv = ['graph.py', '--help']\ntry: runpy.run_path('graph.py', run_name='__main__')\n"
    )
    probe += (
        "except SystemExit: print([m for m in sys.modules if m.split('.')[0].startswith(('lang', 'google', 'ollama'))])"
    )
    loaded = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert loaded.stdout.splitlines()[-1] == "[]"


def _receipt(**fields: Any) -> Receipt:
    fields = {"outcome": CallOutcome.ERROR, "args": {"job_id": 815}} | fields
    return Receipt(turn=1, index=0, tool="fetch_job_log", call_id="c", **fields)


@pytest.mark.parametrize(
    ("receipt", "words"),
    [
        (
            _receipt(outcome=CallOutcome.EXECUTED, text_chars=12, duration_sec=0.14),
            "returned 12 characters after 0.1 s",
        ),
        (_receipt(source_gap=SourceGap.STOPPED, bound_s=3.0, duration_sec=3.0), "timed out after 3.0 s"),
        (
            _receipt(source_gap=SourceGap.ABANDONED, bound_s=3.0, duration_sec=3.25),
            "timed out after 3.0 s; it may still be running",
        ),
        (_receipt(source_gap=SourceGap.STOPPED, bound_s=3.0, duration_sec=1.0), "was cut off with the run after 1.0 s"),
        (
            _receipt(duration_sec=0.5, reason="fetch_job_log failed: E: x"),
            "failed after 0.5 s: fetch_job_log failed: E: x",
        ),
        (_receipt(outcome=CallOutcome.REFUSED, reason="no such tool"), "was refused: no such tool"),
        (_receipt(outcome=CallOutcome.WITHHELD, reason="the run ended"), "was not run: the run ended"),
    ],
)
def test_each_fate_of_a_call_has_its_words(receipt: Receipt, words: str) -> None:
    assert fate(receipt) == words


def test_a_call_is_shown_as_it_was_made_and_kept_short() -> None:
    assert call_label(_receipt()) == "fetch_job_log(815)"
    assert call_label(_receipt(args={"q": "é\n"})) == "fetch_job_log('\\xe9\\n')"
    assert len(call_label(_receipt(args={"q": "x" * 500}))) == len("fetch_job_log()") + 60


def _answer(**fields: Any) -> Answer:
    known: dict[str, Any] = {
        "outcome": Outcome.ANSWERED, "text": "t", "reason": None, "known_subtotal": 1, "usage_known": True,
        "usage_fault": None, "model": "m", "model_calls": 1, "receipts": (), "seconds": 0.5,
    }  # fmt: skip
    return Answer(**known | fields)


def test_a_field_that_does_not_apply_is_absent() -> None:
    assert set(answer_dict(_answer(text=""))) == {
        "schema_version", "outcome", "known_subtotal", "usage_known", "model", "model_calls", "receipts", "seconds",
    }  # fmt: skip


def test_an_answer_that_rests_on_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show(_answer(), as_json=False)
    assert capsys.readouterr().out.endswith("\nbased on: no tool call\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_terminal_gets_one_live_line_that_is_taken_away_at_the_end() -> None:
    stream = Terminal()
    progress = Progress(stream, asyncio.get_running_loop())
    progress(Event(kind="tool_call_started", elapsed_s=0.0, facts={"receipt": _receipt(bound_s=3.0)}))
    assert stream.getvalue() == "\rfetch_job_log(815), at most 3.0 s: 0 s\x1b[K"
    progress.clear()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


async def test_a_watcher_that_has_gone_does_not_stop_the_run() -> None:
    stream = Terminal()
    progress = Progress(stream, asyncio.get_running_loop())
    stream.close()
    progress(Event(kind="model_call_started", elapsed_s=0.0, facts={"call": 1}))
    progress.clear()


@pytest.mark.slow
def test_the_deadline_of_the_command_line_ends_it() -> None:
    start = time.monotonic()
    done = run("--quiet", "job 815", "--deadline", "0.3", REVIEW_MODEL="offline")
    assert (done.returncode, done.stdout.splitlines()[0]) == (3, "outcome: deadline")
    assert "fetch_job_log(815) timed out after" in done.stdout
    assert time.monotonic() - start < 10
