"""What is printed where: answers on stdout, progress and complaints on stderr, none of it able to do harm."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.receipts import Receipt
from bounded.run import Answer, Event
from conftest import ROOT, run_graph
from terminal import Progress, answer_dict, call_label, fate, show

QUESTION = "Why is CI failing on pull request 415?"


@pytest.mark.slow
def test_an_answer_goes_to_stdout_and_progress_to_stderr() -> None:
    done = run_graph(QUESTION, REVIEW_MODEL="offline")
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
def test_the_readme_shows_what_is_really_printed() -> None:
    printed = run_graph("--quiet", QUESTION, REVIEW_MODEL="offline").stdout
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    timeless = re.compile(r"after \d\.\d s")
    assert timeless.sub("", printed) in timeless.sub("", shown)


@pytest.mark.slow
def test_the_readmes_program_runs() -> None:
    program = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("outcome: answered\n")


@pytest.mark.slow
def test_json_is_one_object_without_nulls_and_quiet_is_quiet() -> None:
    done = run_graph("--json", "--quiet", "Why did job 815 of pull request 418 fail?", REVIEW_MODEL="offline")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["schema_version"], answer["outcome"], answer["usage_known"]) == (1, "answered", True)
    (receipt,) = answer["receipts"]
    assert (receipt["source_gap"], receipt["bound_s"]) == ("native_tool_timeout", 3.0)
    assert answer["quotes"]["total"] == 0
    assert "null" not in done.stdout


@pytest.mark.slow
def test_a_bound_gives_status_3_and_text_of_unknown_cost_is_marked(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"content": "Because of \x1b[31mred\x1b[0m."}]))
    done = run_graph("--quiet", QUESTION, REVIEW_MODEL=f"scripted:{script}")
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
    done = run_graph("--quiet", "job 815", REVIEW_MODEL="offline", PYTHONIOENCODING="ascii", REVIEW_TOOL_TIMEOUT="0.2")
    assert done.returncode == 0
    assert "TOOL_TIMEOUT" in done.stdout


def test_what_a_library_logs_is_one_clean_line() -> None:
    code = (
        "import logging, warnings\n"
        "from terminal import clean_logs\n"
        "clean_logs(frozenset({'fake-secret'}))\n"
        "logging.getLogger('lib').warning('a\\x1b[31m fake-secret\\nb' + 'x' * 999)\n"
        "warnings.warn('odd \\x07 reason fake-secret')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    first, second = done.stderr.splitlines()
    assert first.startswith("lib: a [masked] bx")
    assert second.startswith("py.warnings: ")
    assert "odd reason [masked]" in second
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_closed_streams_do_not_keep_a_run_from_ending_well() -> None:
    command = f"{sys.executable} graph.py 'PR 416' --model offline >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=60).returncode == 0


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


def an_answer(**fields: Any) -> Answer:
    known: dict[str, Any] = {
        "outcome": Outcome.ANSWERED, "text": "t", "reason": None, "known_subtotal": 1, "usage_known": True,
        "usage_fault": None, "model": "m", "model_calls": 1, "receipts": (), "served": {}, "seconds": 0.5,
    }  # fmt: skip
    return Answer(**known | fields)


def test_a_field_that_does_not_apply_is_absent() -> None:
    assert set(answer_dict(an_answer(text=""))) == {
        "schema_version", "outcome", "known_subtotal", "usage_known", "model", "model_calls", "receipts", "seconds",
    }  # fmt: skip


def test_an_answer_that_rests_on_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show(an_answer())
    assert capsys.readouterr().out.endswith("\nbased on: no tool call\n")


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        size = super().write(text)
        if "fetch_job_log" in text:
            self.written.set()
        return size


def test_a_terminal_gets_one_live_line_that_is_taken_away_at_the_end() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress(Event(kind="tool_call_started", facts={"receipt": _receipt(bound_s=3.0)}))
    assert stream.written.wait(10)
    progress.close()
    assert "\r0 s fetch_job_log(815), at most 3.0 s\x1b[K" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_a_watcher_that_has_gone_does_not_stop_the_run() -> None:
    stream = Terminal()
    progress = Progress(stream)
    stream.close()
    progress(Event(kind="model_call_started", facts={"call": 1}))
    progress.close()


@pytest.mark.slow
def test_a_stderr_that_no_one_reads_holds_neither_the_run_nor_its_end() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    command = [sys.executable, "graph.py", "--model", "offline", QUESTION]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=writer, text=True, timeout=30)
    os.close(reader)
    os.close(writer)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "outcome: answered")
