"""What the scripts share of their command lines: flags and their environment twins, progress, the printed answer."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    import asyncio

    from bounded.receipts import Receipt
    from bounded.run import Answer, Event

USAGE_STATUS = 2
SCHEMA_VERSION = 1
EXAMPLE = 'python graph.py "Why is CI failing on pull request 415?"'
TICK_S = 0.2

EXIT_STATUS = """\
exit status: 0 answered or paused; 2 bad arguments or missing set-up; 3 ended by a bound;
4 the model failed or said nothing; 130 interrupted.
Each flag but --json and --quiet can be set in the environment: --tool-timeout is REVIEW_TOOL_TIMEOUT (there with
commas between values), and so on; the flag wins. A .env file is not read."""


class UsageError(Exception):
    """What was typed cannot be taken; the message names it and shows what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, read and checked. Durations in seconds.

    Attributes:
        all_tools_s: one timeout for all tools; None leaves each tool its own.
        per_tool_s: tool name -> timeout.
    """

    question: str
    model: str
    token_budget: int | None
    all_tools_s: float | None
    per_tool_s: Mapping[str, float]
    model_timeout_s: float
    deadline_s: float
    max_steps: int
    json: bool
    quiet: bool


def seconds(text: str) -> float:
    """A length of time as a user types it.

    Raises:
        UsageError: it is no finite number above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"takes a number of seconds above 0, not {text[:40]!a}")
    return value


def count(text: str) -> int:
    """A whole number as a user types it.

    Raises:
        UsageError: it is no whole number above 0.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise UsageError(f"takes a whole number above 0, not {text[:40]!a}")
    return value


def tool_timeout(text: str) -> dict[str | None, float]:
    """`SECONDS` for all tools (key None) or `NAME=SECONDS`; several with commas between.

    Raises:
        UsageError: one of them is neither.
    """
    found: dict[str | None, float] = {}
    for item in text.split(","):
        name, equals, value = item.rpartition("=")
        if equals and not name.strip():
            raise UsageError(f"takes SECONDS or NAME=SECONDS, not {item[:40]!a}")
        found[name.strip() or None] = seconds(value)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag with an environment twin. `default` is what the twin would hold, None for no value."""

    name: str
    metavar: str
    default: str | None
    help: str
    read: Callable[[str], Any]

    @property
    def twin(self) -> str:
        return "REVIEW_" + self.name.removeprefix("--").replace("-", "_").upper()


FLAGS = (
    Flag(
        name="--model",
        metavar="NAME",
        default="gemini-3.8-flash",
        help="gemini-*, an Ollama tag, offline (no language model, no key) or scripted:FILE",
        read=str.strip,
    ),
    Flag(
        name="--token-budget",
        metavar="TOKENS",
        default=None,
        help="start no further call once this many tokens are spent; one call may overshoot (default: none)",
        read=count,
    ),
    Flag(
        name="--tool-timeout",
        metavar="[NAME=]SECONDS",
        default=None,
        help="for all tools, or for the one named; repeatable (default: 10 s, fetch_job_log 3 s)",
        read=tool_timeout,
    ),
    Flag(name="--model-timeout", metavar="SECONDS", default="60", help="for one model call, in seconds", read=seconds),
    Flag(name="--deadline", metavar="SECONDS", default="120", help="for the whole run, in seconds", read=seconds),
    Flag(name="--max-steps", metavar="CALLS", default="12", help="model calls in one run", read=count),
)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read a command line.

    Raises:
        UsageError: in one line, what was wrong and what is right.
        SystemExit: `--help` was asked for, and printed.
    """
    parser = _Parser(
        prog="graph.py",
        description="Ask why CI fails on a pull request.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("question", nargs="*", help="for example: Why is CI failing on pull request 415?")
    for flag in FLAGS:
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(flag.name, metavar=flag.metavar, action="append", help=flag.help + default)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    typed = parser.parse_args(arguments)
    values = {flag.name: _value(flag, getattr(typed, flag.name[2:].replace("-", "_")), environment) for flag in FLAGS}
    question = " ".join(typed.question).strip()
    if not question:
        raise UsageError(f"there is no question; for example: {EXAMPLE}")
    timeouts = dict(values["--tool-timeout"] or {})
    return Options(
        question=question,
        model=values["--model"],
        token_budget=values["--token-budget"],
        all_tools_s=timeouts.pop(None, None),
        per_tool_s=timeouts,
        model_timeout_s=values["--model-timeout"],
        deadline_s=values["--deadline"],
        max_steps=values["--max-steps"],
        json=typed.json,
        quiet=typed.quiet,
    )


def steady_streams() -> None:
    """Make stdout and stderr such that writing to them cannot fail for what is written, or for their being closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # started with it closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open for as long as the process lives
        else:
            stream.reconfigure(errors="backslashreplace")


def complain(message: str) -> int:
    """One line on stderr about what was typed or set up; returns the exit status."""
    sys.stderr.write(f"graph.py: {message}\n")
    return USAGE_STATUS


def show(answer: "Answer", *, as_json: bool) -> None:
    """Print what a run came to."""
    if as_json:
        import json

        print(json.dumps(answer_dict(answer), indent=2, allow_nan=False))
        return
    print(f"outcome: {answer.outcome}")
    print(f"tokens: {answer.known_subtotal} ({'known' if answer.usage_known else 'unknown'})")
    print(f"model: {answer.model}")
    if answer.reason:
        print(f"reason: {answer.reason}")
    if not answer.usage_known and answer.usage_fault != answer.reason:
        print(f"usage: {answer.usage_fault}")
    if answer.text:
        print(f"\n{answer.text}")
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
        "model": answer.model,
        "model_calls": answer.model_calls,
        "answer": answer.text or None,
        "receipts": [receipt.as_dict() for receipt in answer.receipts],
        "seconds": answer.seconds,
    }
    return {name: value for name, value in fields.items() if value is not None}


def call_label(receipt: "Receipt") -> str:
    """A call as one reads it: `fetch_job_log(815)`."""
    shown = ", ".join(ascii(value) if isinstance(value, str) else str(value) for value in receipt.args.values())
    return f"{receipt.tool}({shown if len(shown) <= 60 else shown[:57] + '...'})"


def fate(receipt: "Receipt") -> str:
    """What became of a call, in words: `timed out after 3.0 s`."""
    took = f"{receipt.duration_sec or 0.0:.1f} s"
    if receipt.outcome == "executed":
        return f"returned {receipt.text_chars} characters after {took}"
    if receipt.source_gap is None:
        word = {"error": f"failed after {took}", "refused": "was refused", "withheld": "was not run"}[receipt.outcome]
        return f"{word}: {receipt.reason}"
    late = "; it may still be running" if receipt.source_gap == "native_tool_abandoned" else ""
    if receipt.bound_s is None or (receipt.duration_sec or 0.0) < receipt.bound_s:
        return f"was cut off with the run after {took}{late}"
    return f"timed out after {receipt.bound_s:.1f} s{late}"


class Progress:
    """What a run is doing, on stderr: one live line on a terminal, a line for each event elsewhere.

    The live line never hides the cursor, so a process that is ended at any moment leaves the terminal as it was.
    """

    def __init__(self, stream: TextIO, loop: "asyncio.AbstractEventLoop") -> None:
        self._stream = stream
        self._loop = loop
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._doing: dict[object, tuple[str, float]] = {}
        self._tick: asyncio.TimerHandle | None = None

    def __call__(self, event: "Event") -> None:
        """Observe one event of a run."""
        facts: Mapping[str, Any] = event.facts
        key: object = "model"
        if event.kind == "model_call_started":
            self._begin(key, f"model call {facts['call']}")
        elif event.kind in ("model_call_ended", "model_call_cut"):
            self._end(key, f"model call {facts['call']} {'ended' if event.kind.endswith('ended') else 'was cut off'}")
        elif event.kind == "tool_call_started":
            receipt = facts["receipt"]
            bound = "" if receipt.bound_s is None else f", at most {receipt.bound_s:.1f} s"
            self._begin((receipt.turn, receipt.index), f"{call_label(receipt)}{bound}")
        elif event.kind == "tool_call_ended":
            receipt = facts["receipt"]
            self._end((receipt.turn, receipt.index), f"{call_label(receipt)} {fate(receipt)}")

    def clear(self) -> None:
        """Take the live line away, before anything else is printed."""
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if self._live:
            self._write("\r\x1b[K")

    def _begin(self, key: object, what: str) -> None:
        self._doing[key] = (what, self._loop.time())
        if self._live:
            self._draw()
        else:
            self._write(f"{what} ...\n")

    def _end(self, key: object, what: str) -> None:
        self._doing.pop(key, None)
        if not self._live:
            self._write(f"{what}\n")

    def _draw(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
        doing = [f"{what}: {self._loop.time() - since:.0f} s" for what, since in self._doing.values()]
        line = "; ".join(doing[:3]) + (f"; {len(doing) - 3} more" if len(doing) > 3 else "")
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            width = 80
        self._write(f"\r{line[: width - 1]}\x1b[K")
        self._tick = self._loop.call_later(TICK_S, self._draw)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._live = False  # no one is watching any more


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; python {self.prog} --help lists what there is")


def _value(flag: Flag, typed: list[str] | None, environment: Mapping[str, str]) -> Any:
    name, texts = flag.name, typed
    if texts is None and environment.get(flag.twin, "").strip():
        name, texts = flag.twin, [environment[flag.twin]]
    if texts is None:
        return None if flag.default is None else flag.read(flag.default)
    try:
        values = [flag.read(text) for text in texts]
    except UsageError as exc:
        raise UsageError(f"{name} {exc}") from None
    if isinstance(values[0], dict):
        return {key: value for found in values for key, value in found.items()}
    return values[-1]
