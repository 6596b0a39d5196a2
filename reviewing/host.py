"""The reviewer's rules around sends and calls: transcript bound, no grace, receipts, coverage, custody of bodies."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage

from bounded.deadlines import now
from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.receipts import Receipt
from bounded.run import Event, Run
from bounded.text import clean, digest
from bounded.toolnode import Delivery, Host
from reviewing.coverage import Coverage
from reviewing.tools import Extent
from reviewing.transcript import MIN_ROOM, Transcript, fitted, serialised_chars

STORE_FAILED = "custody_store_failed"
NOTICE = "Little room is left in this conversation. Stop reading, and give your findings now."
AGAIN = "Your reply held neither text nor a call. Go on, or give your findings."
# Kinds of a failed model call whose send reached nobody.
NEVER_LEFT = ("unreachable", "refused")
CUT_SHORT = ("length", "max_tokens")
_ASKED = ("path", "query", "pattern")
# Kept free for the answer to each call, should it be a refusal; with MIN_ROOM also for an error.
_RESERVED = 300


class ReviewHost(Host):
    """One episode's host.

    Attributes:
        gap: why the sources are not whole, "" while they are. Once set it stays.
        rounds: sends that really left.
        cut_short: the last reply was cut off at its own limit.
    """

    grace_s = 0.0

    def __init__(
        self, *, run: Run, transcript: Transcript, coverage: Coverage, bodies: Path, until: Callable[[], float | None]
    ) -> None:
        """`bodies` is where delivered texts are stored by digest, `until` the seconds that the caller leaves tools."""
        self.run, self.transcript, self.coverage = run, transcript, coverage
        self.bodies, self.until = bodies, until
        self.gap, self.rounds, self.cut_short = "", 0, False
        self._noticed = self._loose = False
        self._nothing = 0
        self._turn = self._base = 0
        self._told: Sequence[Any] = ()  # the system message, which the graph's state does not hold
        self._given = 0  # characters of this turn's results so far
        self._credits: list[tuple[Extent, str, str, Receipt]] = []

    def before_send(self, run: Run, messages: Sequence[Any]) -> list[Any]:
        """Overflow first, then the notice; the clocks come after."""
        self._told = messages[:1]
        size = self.transcript.size(messages)
        if size > self.transcript.bound:
            first = run.model_calls == 0
            outcome = Outcome.BOUND_BELOW_FIRST_SEND if first else Outcome.TRANSCRIPT_BOUND
            facts = {"chars": size, "bound": self.transcript.bound}
            run.end_by_host(outcome, f"the send has {size} characters, the bound is {self.transcript.bound}", **facts)
            return []
        note = HumanMessage(NOTICE)
        if self._noticed or size < self.transcript.notice_at:
            return []
        if self.transcript.size([*messages, note]) > self.transcript.bound:
            return []
        self._noticed = True
        return [note]

    def said_nothing(self, run: Run, finish_reason: str | None) -> list[Any]:
        """Ask once more; the second such reply in a row ends the episode."""
        self._nothing += 1
        if self._nothing > 1:
            why = f"two replies held neither text nor calls; finish reason: {finish_reason or 'not given'}"
            run.end_by_host(Outcome.ROUND_WITHOUT_PROGRESS, why)
            return []
        return [HumanMessage(AGAIN)]

    def time_left(self) -> float | None:
        """The episode's own clock and what the caller leaves, whichever is nearer."""
        left = [seconds for seconds in (super().time_left(), self.until()) if seconds is not None]
        return min(left) if left else None

    def withhold(self, run: Run, receipt: Receipt, messages: Sequence[Any]) -> str | None:
        """A result needs room in the transcript."""
        if receipt.turn != self._turn:
            self._turn, self._given = receipt.turn, 0
            self._base = self.transcript.size([*self._told, *messages, *_answers(messages), HumanMessage(NOTICE)])
        if self._room() < MIN_ROOM:
            return "no room is left in the conversation for its result"
        self._given += MIN_ROOM  # its siblings are admitted before it has its result
        return None

    def deliver(self, run: Run, receipt: Receipt, result: ToolMessage) -> Delivery:
        """Give the uncut prefix that fits, keep its body, and note what a read opened."""
        whole = result.text
        # The tools have cleaned it; where this changes anything after all, it is no prefix, and nothing is credited.
        self._given -= MIN_ROOM
        text = fitted(clean(whole, run.secrets), max(0, self._room()))
        self._given += max(0, serialised_chars(text) - _RESERVED)
        self._store(text)
        more: dict[str, object] = {"result_chars": len(whole)}
        if isinstance(result.artifact, Extent) and not self._loose:
            self._credits.append((result.artifact, text, whole, receipt))
        return Delivery(text=text, more=more)

    def observe(self, event: Event) -> None:
        """What was delivered is known when a send has really left; what is loose, when a call is abandoned."""
        if event.kind in ("model_call_ended", "model_call_cut") and event.facts.get("failure") not in NEVER_LEFT:
            self.rounds += 1
            self._mark_delivered()
        if event.kind == "model_call_ended":
            self.cut_short = event.facts["finish_reason"] in CUT_SHORT
            self._nothing = 0 if event.facts["proposed"] else self._nothing
            for requested in self.run.receipts.all():
                if not requested.more:
                    self.run.receipts.update(requested, more=self._about(requested))
        elif event.kind == "tool_call_ended":
            receipt = event.facts["receipt"]
            if isinstance(receipt, Receipt) and receipt.source_gap is not None:
                self._loose = self._loose or receipt.source_gap is SourceGap.ABANDONED
                self.set_gap(receipt.source_gap)

    def set_gap(self, reason: str) -> None:
        """From here on the sources are not whole; the first reason stays."""
        self.gap = self.gap or reason
        self.coverage.set_gap(reason)

    def _room(self) -> int:
        return self.transcript.bound - self._base - self._given + _RESERVED

    def _about(self, receipt: Receipt) -> dict[str, object]:
        asked = {name: receipt.args[name] for name in _ASKED if name in receipt.args}
        return {"round": receipt.turn, "delivered": False, **asked}

    def _mark_delivered(self) -> None:
        credits, self._credits = self._credits, []
        for extent, given, whole, receipt in credits:
            lines = self.coverage.credit_extent(extent, text_given=given, tool_text=whole)
            if lines or (not extent.total_lines and given == whole):
                self._add(receipt, _credited(extent, lines))
        for receipt in self.run.receipts.all():
            if receipt.outcome is not CallOutcome.WITHHELD and not receipt.more.get("delivered"):
                self._add(receipt, {"delivered": True})

    def _add(self, receipt: Receipt, more: Mapping[str, object]) -> None:
        held = self.run.receipts.current(receipt)
        updated = self.run.receipts.update(held, more={**held.more, **more})
        self.run.emit("tool_call_delivered", receipt=updated)

    def _store(self, text: str) -> None:
        try:
            self.bodies.mkdir(parents=True, exist_ok=True)
            path = self.bodies / digest(text)
            if not path.exists():
                temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
                temporary.write_text(text, encoding="utf-8", errors="replace", newline="")
                temporary.replace(path)
        except OSError:
            self.set_gap(STORE_FAILED)


def _answers(messages: Sequence[Any]) -> list[ToolMessage]:
    """The answers to come to the calls of the last reply, as large as a refusal may be."""
    calls: list[Any] = next((message.tool_calls for message in reversed(messages) if message.type == "ai"), [])
    return [ToolMessage("?" * _RESERVED, name=call["name"], tool_call_id=call["id"]) for call in calls]


def _credited(extent: Extent, lines: range) -> dict[str, object]:
    last = lines.stop - 1
    return {
        "opened_path": extent.opened_path,
        "start_line": lines.start,
        "end_line": last,
        "total_lines": extent.total_lines,
        "eof": last >= extent.total_lines,
        "complete_sha256": extent.complete_sha256,
        "source_bytes": extent.source_bytes,
    }


def until(deadline: float | None, moment: datetime | None) -> Callable[[], float | None]:
    """Seconds before a moment on the monotonic clock or in UTC, whichever is nearer; never below 0."""

    def left() -> float | None:
        seconds = [] if deadline is None else [deadline - now()]
        if moment is not None:
            seconds.append((moment - datetime.now(UTC)).total_seconds())
        return max(0.0, min(seconds)) if seconds else None

    return left
