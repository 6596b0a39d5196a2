"""One run: its clock anchor, its model calls, its usage, its receipts and its end; and what it came to, frozen.

A `Run` is handed to the graph as LangGraph's `context`, not kept in its state: when a bound from above cuts the graph
off, the state is lost and everything here is still known.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bounded.deadlines import now
from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.receipts import Anchor, Receipt, Receipts
from bounded.text import fit
from bounded.usage import Usage, UsageLedger

MAX_REASON = 600
MAX_TEXT = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run, for whoever watches it."""

    kind: str
    facts: Mapping[str, object]


Observer = Callable[[Event], None]


_current: ContextVar["Run | None"] = ContextVar("run", default=None)


def current_run() -> "Run | None":
    """The run whose tool call this is; None outside one."""
    return _current.get()


def enter_run(run: "Run") -> None:
    """Let the current task, and all that it starts, be part of a run."""
    _current.set(run)


def to_all(*observers: Observer | None) -> Observer:
    """One observer that hands each event to all that there are, in their order."""
    there = [observer for observer in observers if observer is not None]

    def observe(event: Event) -> None:
        for observer in there:
            observer(event)

    return observe


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a run came to. `known_subtotal` is the total only while `usage_known` is true.

    Attributes:
        text: the model's last text, "" where it gave none.
        reason: one sentence where there is something to say about the outcome, else None.
        usage_fault: why the total is unknown, None while it is known.
        model_calls: attempts, which is not to say inferences.
        served: of a pool, by candidate, how many replies it gave; empty where there is one model only.
        seconds: from the run's anchor, on the monotonic clock.
    """

    outcome: Outcome
    text: str
    reason: str | None
    known_subtotal: int
    usage_known: bool
    usage_fault: str | None
    model: str
    model_calls: int
    receipts: tuple[Receipt, ...]
    served: Mapping[str, int]
    seconds: float


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class Run:
    """What one run has done so far. Create it inside the loop that runs it.

    Attributes:
        model: the model's name, for the record.
        secrets: values that no text may show.
        observe: called with every event, in order; it must return at once and not raise. On the loop's thread, but for
            the last events of a run whose loop is blocked.
        model_calls: attempts, which is not to say inferences.
        outcome, reason: set once by `end`; a run without an outcome is going on, or paused.
        text: the model's last text, cleaned; `raw_text` as it came, which is for no terminal and no record.
        served: of a pool, by candidate, how many replies it gave.
        in_flight: the tasks of the tool calls that are running.
    """

    model: str = ""
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    observe: Observer | None = None
    anchor: Anchor = field(default_factory=lambda: Anchor(wall=datetime.now(UTC), monotonic=now()), init=False)
    usage: UsageLedger = field(default_factory=UsageLedger, init=False)
    receipts: Receipts = field(default_factory=Receipts, init=False)
    model_calls: int = field(default=0, init=False)
    outcome: Outcome | None = field(default=None, init=False)
    reason: str | None = field(default=None, init=False)
    text: str = field(default="", init=False)
    raw_text: str = field(default="", init=False, repr=False)
    served: dict[str, int] = field(default_factory=dict, init=False)
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set, init=False, repr=False)
    _open_call: int = field(default=0, init=False)

    @property
    def elapsed_s(self) -> float:
        return now() - self.anchor.monotonic

    def wall_time(self) -> str:
        """This moment as ISO 8601 with offset."""
        return self.anchor.wall_time(now())

    def emit(self, kind: str, **facts: object) -> None:
        if self.observe is not None:
            self.observe(Event(kind=kind, facts=facts))

    def resume_from(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier run left in the graph's state; a run that has begun already knows better."""
        if self.model_calls == 0:
            self.model_calls = state.get("model_calls", 0)
            self.usage.known_subtotal = state.get("known_subtotal", 0)
            if not state.get("usage_known", True):
                self.usage.lose("what was spent before the run was resumed is unknown")

    def start_model_call(self, **facts: str) -> int:
        """Count an attempt, which is not to say an inference, and return its number, from 1; `facts` say of whom."""
        self.model_calls += 1
        self._open_call = self.model_calls
        self.emit("model_call_started", call=self.model_calls, **facts)
        return self.model_calls

    def end_model_call(self, call: int, usage: Usage, candidate: str | None = None) -> bool:
        """Charge a reply; False where that call was ended already, and its reply is quarantined uncharged.

        Whoever reads the reply says in the event `model_call_ended` what stood in it.
        """
        if self._open_call != call:
            self.emit("model_call_late", call=call, usage=usage.raw)
            return False
        self._open_call = 0
        self.usage.record(usage)
        if candidate is not None:
            self.served[candidate] = self.served.get(candidate, 0) + 1
        return True

    def pass_over(self, call: int, *, spent: str, **facts: object) -> bool:
        """A candidate gave no usable response, and the next is asked; False where that call was ended already.

        `spent` is "nothing" where its provider was not reached, or said that it did not serve. Else it is "unknown",
        and so is the total from here on: the reply of the next is the last of this run.
        """
        if self._open_call != call:
            return False
        self._open_call = 0
        self.emit("model_call_passed_over", call=call, spent=spent, **facts)
        if spent != "nothing":
            self.usage.lose("a candidate that was passed over did not report what it spent")
        return True

    def cut_model_call(self, fate: str, **facts: object) -> None:
        """A model call that is still open brought no reply: what it spent at the provider is unknown from here on.

        `fate` is what became of it: "failed", "was cut off with the run"; `facts` go into the event besides.
        """
        if self._open_call:
            self.emit("model_call_cut", call=self._open_call, fate=fate, **facts)
            self._open_call = 0
            self.usage.lose(f"a model call {fate}: what it spent was not reported")

    def cut(self, outcome: Outcome, reason: str) -> None:
        """Something from above ends the run: a bound, or a person."""
        self.emit("run_cut", by=outcome)
        self.cut_model_call("was cut off with the run")
        self.end(outcome, reason)

    def stop_if_spent(self, limits: Limits) -> None:
        """End the run where no further call may start: after a reply, and before a call that goes on from elsewhere."""
        if not self.usage.known:
            self.end(Outcome.MISSING_USAGE, self.usage.fault)
        elif self.usage.remaining(limits.token_budget) == 0:
            spent = self.usage.known_subtotal
            self.end(Outcome.TOKEN_BUDGET, f"{spent} tokens are spent, the budget is {limits.token_budget}")
        elif self.model_calls >= limits.max_steps:
            self.end(Outcome.STEP_LIMIT, f"model calls: {self.model_calls} made, {limits.max_steps} allowed")

    def end_by_host(self, outcome: Outcome, reason: str, **facts: object) -> None:
        """The host's own rules end the run; `facts` are what it goes by."""
        self.emit("host_ended", outcome=outcome, **facts)
        self.end(outcome, reason)

    def say(self, text: str) -> None:
        """Keep what the model last said: as it is, and cleaned."""
        self.raw_text = text
        self.text = fit(text.strip(), MAX_TEXT, self.secrets)

    def end(self, outcome: Outcome, reason: str | None = None) -> None:
        """Say how the run ended. Whoever says so first has the last word."""
        if self.outcome is None:
            self.outcome = outcome
            self.reason = None if reason is None else fit(" ".join(reason.split()), MAX_REASON, self.secrets)
            self.emit("run_ended", outcome=outcome, reason=self.reason)

    def answer(self) -> Answer:
        """What the run has come to by now; a run without an outcome is paused."""
        return Answer(
            outcome=self.outcome or Outcome.PAUSED,
            text=self.text,
            reason=self.reason,
            known_subtotal=self.usage.known_subtotal,
            usage_known=self.usage.known,
            usage_fault=self.usage.fault,
            model=self.model,
            model_calls=self.model_calls,
            receipts=self.receipts.all(),
            served=dict(self.served),
            seconds=round(self.elapsed_s, 3),
        )
