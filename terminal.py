"""What a run shows on a terminal: progress and complaints on stderr, the answer on stdout, all of it cleaned."""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from bounded.outcomes import CallOutcome, SourceGap

if TYPE_CHECKING:
    from bounded.receipts import Receipt
    from bounded.run import Answer, Event

USAGE_STATUS = 2
SCHEMA_VERSION = 1
MAX_LOG_LINE = 300
TICK_S = 0.2
BAR_CELLS = 20
CLOSE_S = 0.5
# LangChain's own tracing would send the question and the logs to one more service, unbounded and unasked for.
TRACING = ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING", "LANGCHAIN_TRACING_V2")


def set_up() -> None:
    """What each script does first: streams to which writing cannot fail for what is written, and no tracing."""
    for name in TRACING:
        os.environ.pop(name, None)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # started with it closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open for as long as the process lives
        else:
            stream.reconfigure(errors="backslashreplace")


def clean_logs(secrets: frozenset[str]) -> None:
    """Let what libraries log or warn of reach stderr as one cleaned line: it may quote a provider's own words."""
    import logging

    from bounded.text import cap, clean

    class Cleaned(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"{record.name}: {_line(cap(clean(record.getMessage(), secrets), MAX_LOG_LINE))}"

    handler = logging.StreamHandler()
    handler.setFormatter(Cleaned())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


def complain(script: str, message: str) -> int:
    """One line on stderr about what was typed or set up; returns the exit status."""
    from bounded.text import clean

    sys.stderr.write(f"{script}: {_line(clean(message))}\n")
    return USAGE_STATUS


def not_installed(missing: ModuleNotFoundError) -> str:
    """What to do about a package that is not there."""
    hint = f"run: make ask, or: {sys.executable} -m pip install -r requirements-lock.txt"
    return f"{missing.name} is not installed for {sys.executable}; {hint}"


def show_json(answer: "Answer", **more: object) -> None:
    """Print what a run came to as one JSON object, and what is said of it besides."""
    import json

    told = {name: value for name, value in more.items() if value is not None}
    print(json.dumps({**answer_dict(answer), **told}, indent=2, allow_nan=False))


def show(answer: "Answer", quotes: str = "") -> None:
    """Print what a run came to as text; `quotes` says whether what the answer quotes was found."""
    print(f"outcome: {answer.outcome}")
    print(f"tokens: {answer.known_subtotal} ({'known' if answer.usage_known else 'unknown'})")
    if answer.model:
        print(f"model: {answer.model}")
    if answer.served:
        served = ", ".join(f"{name} ({count})" for name, count in answer.served.items())
        print(f"served by: {served}")
    if answer.reason:
        print(f"reason: {answer.reason}")
    if not answer.usage_known and answer.usage_fault != answer.reason:
        print(f"usage: {answer.usage_fault}")
    if answer.text:
        print(f"\n{answer.text}")
    if quotes:
        print(f"\n{quotes}")
    print("\nbased on:" if answer.receipts else "\nbased on: no tool call")
    for receipt in answer.receipts:
        print(f"  {call_label(receipt)} {fate(receipt)}")


def answer_dict(answer: "Answer") -> dict[str, object]:
    """The answer as `--json` prints it. A field that does not apply is absent."""
    fields = {
        "schema_version": SCHEMA_VERSION,
        "outcome": answer.outcome,
        "reason": answer.reason,
        "known_subtotal": answer.known_subtotal,
        "usage_known": answer.usage_known,
        "usage_fault": answer.usage_fault,
        "model": answer.model or None,
        "model_calls": answer.model_calls,
        "served": dict(answer.served) or None,
        "answer": answer.text or None,
        "receipts": [receipt.as_dict() for receipt in answer.receipts],
        "seconds": answer.seconds,
    }
    return {name: value for name, value in fields.items() if value is not None}


def call_label(receipt: "Receipt") -> str:
    """A call as one reads it: `fetch_job_log(815)`."""
    shown = ", ".join(ascii(value) for value in receipt.args.values())
    return f"{receipt.tool}({shown if len(shown) <= 60 else shown[:57] + '...'})"


def fate(receipt: "Receipt") -> str:
    """What became of a call, in words and on one line: `timed out after 3.0 s`."""
    took = "" if receipt.duration_sec is None else f" after {receipt.duration_sec:.1f} s"
    if receipt.outcome is CallOutcome.EXECUTED:
        return f"returned {receipt.text_chars} characters{took}"
    if receipt.source_gap is None:
        word = {CallOutcome.ERROR: "failed", CallOutcome.REFUSED: "was refused", CallOutcome.WITHHELD: "was not run"}
        return f"{word[receipt.outcome]}{took}: {_line(receipt.reason or '')}"
    late = "; it may still be running" if receipt.source_gap is SourceGap.ABANDONED else ""
    bound, lasted = receipt.bound_s, receipt.duration_sec
    if bound is None or lasted is None or lasted < bound or receipt.bound_source == "deadline":
        return f"was cut off with the run{took}{late}"
    return f"timed out after {bound:.1f} s{late}"


def _line(text: str) -> str:
    return " ".join(text.split())


class Progress:
    """What a run is doing, on stderr: one live line on a terminal, a line for each event elsewhere.

    It writes on a thread of its own: a stopped terminal or a full pipe must not hold up the run. The live line never
    hides the cursor, so a process that is ended at any moment leaves the terminal as it was.
    """

    def __init__(self, stream: TextIO, *, total: int | None = None) -> None:
        """`total`: how many ends are to come, where that is known; the live line then begins with a bar."""
        self._stream = stream
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._doing: dict[object, tuple[str, float]] = {}
        self._total, self._ended = total, 0
        self._closed = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="progress", daemon=True)
        self._writer.start()

    def __call__(self, event: "Event") -> None:
        """Observe one event of a run."""
        facts: Mapping[str, Any] = event.facts
        if event.kind == "model_call_started":
            self.begin("model", f"model call {facts['call']}")
        elif event.kind == "model_call_ended":
            self.end("model", f"model call {facts['call']} ended")
        elif event.kind == "model_call_cut":
            self.end("model", f"model call {facts['call']} {facts['fate']}")
        elif event.kind == "model_call_passed_over":
            self.end("model", f"model call {facts['call']} brought no response")
        elif event.kind == "not_set_up":
            from bounded.text import clean

            self.end(facts["agent_id"], f"{facts['agent_id']} is not set up: {_line(clean(str(facts['reason'])))}")
        elif event.kind == "probe_started":
            self.begin(f"probe {facts['call']}", f"probe of {facts['agent_id']} ({facts['purpose']})")
        elif event.kind == "probe_ended":
            came = facts["error_type"] or ("a reply" if facts["has_text"] or facts["has_calls"] else "nothing usable")
            self.end(f"probe {facts['call']}", f"probe of {facts['agent_id']} ({facts['purpose']}): {came}")
        elif event.kind == "tool_call_started":
            receipt = facts["receipt"]
            bound = "" if receipt.bound_s is None else f", at most {receipt.bound_s:.1f} s"
            self.begin((receipt.turn, receipt.index), f"{call_label(receipt)}{bound}")
        elif event.kind == "tool_call_ended":
            receipt = facts["receipt"]
            self.end((receipt.turn, receipt.index), f"{call_label(receipt)} {fate(receipt)}")

    def close(self) -> None:
        """Take the live line away, before anything else is printed; what cannot be written soon is let go.

        Where the answer goes to the same terminal there is no use in hurrying: it would have to wait as well.
        """
        self._lines.put(None)
        self._writer.join(None if self._live and sys.stdout.isatty() else CLOSE_S)
        self._closed = True

    def begin(self, key: object, what: str) -> None:
        """Something goes on until `end` is called with the same key."""
        self._doing[key] = (what, time.monotonic())
        if not self._live:
            self._lines.put(f"{what} ...\n")

    def end(self, key: object, what: str) -> None:
        """What `begin` began has ended; `what` says how."""
        self._doing.pop(key, None)
        self._ended += 1
        if not self._live:
            self._lines.put(f"{what}\n")

    def _write_all(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # no one is watching any more
            while (line := self._next()) is not None and not self._closed:
                self._stream.write(self._drawn() if self._live else line)
                self._stream.flush()
            if self._live and not self._closed:
                self._stream.write("\r\x1b[K")
                self._stream.flush()

    def _next(self) -> str | None:
        try:
            return self._lines.get(timeout=TICK_S if self._live else None)
        except queue.Empty:
            return ""

    def _drawn(self) -> str:
        doing = [f"{time.monotonic() - since:.0f} s {what}" for what, since in list(self._doing.values())]
        line = "; ".join(doing[:3]) + (f"; {len(doing) - 3} more" if len(doing) > 3 else "")
        if self._total is not None:
            done = BAR_CELLS * self._ended // self._total
            line = f"[{'#' * done}{'.' * (BAR_CELLS - done)}] {self._ended}/{self._total} {line}"
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            width = 0
        room = (width if width > 0 else 80) - 3  # for the ^C that a terminal echoes
        return f"\r{line[:room]}\x1b[K"
