"""Which candidate models can serve: one small probe of each, raised only on evidence, all of it within a bound.

Two triggers, after `models/attempts.py`. A: no usable response; that says nothing about budgets, so the candidate is
rejected, neither retried nor escalated. B: a response whose budget was too small; the same candidate is asked once more
with a larger one, as long as the whole run has such escalations left.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bounded.deadlines import deadline_scope, time_left
from bounded.usage import judge
from models.attempts import Attempt, Trigger, attempt, facts
from models.catalogue import MAX_CANDIDATES, Candidate
from models.factory import SetUpMissing

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

CONTRACT = "review-preflight-v1"
# A model that is loaded says a word within a second or two; one that is not may take ten, and is then not ready.
PROBE_S = 10.0
# A tool call is read and written in hundreds of tokens: a model of 1.5 billion parameters took 12 s on two busy cores.
CHECK_S = 30.0
# The least that some take: OpenAI's Responses API refuses less (github.com/earendil-works/pi/issues/6265).
FIRST_TOKENS = 16
# What a reasoning model needs to think and then speak, and what small servers still accept.
ESCALATED_TOKENS = 4096
# 12 probes and 4 escalations of 10 s, one after the other, are 160 s: below what a caller waits for the layer.
PRIMARY = 8
MAX_ESCALATIONS = 4
ESCALATIONS = "REVIEW_PREFLIGHT_MAX_ESCALATIONS"
LAYER_S = 180.0
# A few at once: enough that a pool is through in half a minute, few enough for one local server.
AT_ONCE = 4

INVALID = "invalid_chat_response"
REJECTED_ESCALATED = "escalated_probe_rejected"
EXHAUSTED = "escalation_budget_exhausted"
TIME_IS_UP = "deadline_passed"
FALLBACK = "primary_routes_unavailable"

Observe = Callable[..., None]
# Makes the model of a candidate which may be asked for that many output tokens; SetUpMissing where it cannot.
Build = Callable[[Candidate, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one candidate. A field that does not apply is None here and absent from `as_dict`.

    What describes a response describes that of the final attempt.

    Attributes:
        attempts: requests for a text, one or two; the request for a tool call is not one of them.
        trigger: which one fired: A, or B where there was a response and its budget was too small.
        tool_calls: yes, no, as_text (it wrote its call as text) or not_checked.
        usage: reported, missing, inconsistent or not_checked.
        seconds: of all its requests.
    """

    agent_id: str
    provider: str
    model: str
    attempts: int
    status: str
    error_type: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    reasoning_without_content: bool | None = None
    escalated: bool | None = None
    trigger: str | None = None
    tool_calls: str | None = None
    usage: str | None = None
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        return self.status == "ready"

    @property
    def serves(self) -> bool:
        """Whether a pool serves from it unless told otherwise: it calls tools and reports its usage."""
        return self.ready and (self.tool_calls, self.usage) == ("yes", "reported")

    def as_dict(self) -> dict[str, object]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a layer of probes came to. After a fallback it is that stage's, and holds what the primary stage came to.

    Attributes:
        rows: in the order of the catalogue.
        escalations_used: of the whole run, both stages.
    """

    rows: tuple[Row, ...]
    escalations_used: int
    escalation_budget: int
    primary: "Report | None" = field(default=None)

    def as_dict(self) -> dict[str, object]:
        ready = sum(row.ready for row in self.rows)
        report: dict[str, object] = {
            "contract": CONTRACT,
            "probed_count": len(self.rows),
            "ready_count": ready,
            "rejected_count": len(self.rows) - ready,
            "escalations_used": self.escalations_used,
            "escalation_budget": self.escalation_budget,
            "routes": [row.as_dict() for row in self.rows],
        }
        if self.primary is not None:
            report |= {"primary_attempt": self.primary.as_dict(), "fallback_reason": FALLBACK}
        return report


class NoneReady(Exception):
    """No candidate of the pool is ready; `report` says why of each."""

    def __init__(self, report: Report) -> None:
        stages = [report.primary, report] if report.primary else [report]
        why = [f"{row.agent_id}: {_why(row)}" for stage in stages for row in stage.rows]
        more = "python preflight.py, with the same --pool, shows more"
        super().__init__(f"no candidate of the pool is ready ({'; '.join(why)}); {more}")
        self.report = report


def escalations_allowed(environment: Mapping[str, str]) -> int:
    """How many escalations a run may use.

    Raises:
        SetUpMissing: the variable is set, and not to a whole number from 0 to the most candidates there can be.
    """
    text = environment.get(ESCALATIONS, str(MAX_ESCALATIONS))
    if not re.fullmatch(r"0|[1-9][0-9]?", text) or int(text) > MAX_CANDIDATES:
        raise SetUpMissing(
            f"{ESCALATIONS} takes a whole number from 0 to {MAX_CANDIDATES}; for example: {ESCALATIONS}=4"
        )
    return int(text)


async def probe_candidates(
    candidates: Sequence[Candidate], build: Build, *, max_escalations: int = MAX_ESCALATIONS, observe: Observe
) -> Report:
    """Probe a pool: the first `PRIMARY` candidates, and only if each of them is rejected the rest.

    Back within `LAYER_S` seconds, or sooner under a nearer deadline: what there is no time for is not started.

    Args:
        candidates: at most 12, in the order in which they are preferred.
        observe: is told of each probe as it starts and ends.

    Raises:
        NoneReady: no candidate is ready.
        ValueError: there are more candidates than a pool takes, or none.
    """
    if not 0 < len(candidates) <= MAX_CANDIDATES:
        raise ValueError(f"a pool takes 1 to {MAX_CANDIDATES} candidates, not {len(candidates)}")
    with deadline_scope(LAYER_S):
        layer = _Layer(build, max_escalations, observe)
        report = await layer.stage("primary", candidates[:PRIMARY])
        if candidates[PRIMARY:] and not any(row.ready for row in report.rows):
            report = replace(await layer.stage("fallback", candidates[PRIMARY:]), primary=report)
        if not any(row.ready for row in report.rows):
            raise NoneReady(report)
        return replace(report, rows=await layer.check(candidates, report.rows))


class _Layer:
    """What the stages of one run share: how models are made, and how many escalations are left."""

    def __init__(self, build: Build, max_escalations: int, observe: Observe) -> None:
        self._build, self._budget, self._observe = build, max_escalations, observe
        self._used = self._calls = 0
        self._few = asyncio.Semaphore(AT_ONCE)

    async def stage(self, stage: str, candidates: Sequence[Candidate]) -> Report:
        """Base probes a few at once; then escalations one by one in their order, so that speed buys nobody one."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._base(stage, candidate)) for candidate in candidates]
        rows = []
        for candidate, task in zip(candidates, tasks, strict=True):
            first = task.result()
            rows.append(
                await self._escalated(stage, candidate, first)
                if first.trigger is Trigger.BUDGET
                else _row(candidate, first, attempts=0 if isinstance(first.failure, NOT_MADE) else 1)
            )
        for row in rows:
            self._observe("route", stage=stage, **row.as_dict())
        return Report(rows=tuple(rows), escalations_used=self._used, escalation_budget=self._budget)

    async def check(self, candidates: Sequence[Candidate], rows: Sequence[Row]) -> tuple[Row, ...]:
        """Ask each ready candidate for one tool call, and look at the usage that it reports."""
        by_id = {candidate.id: candidate for candidate in candidates}

        async def checked(row: Row) -> Row:
            if not row.ready:
                return row
            checked = await self._check(by_id[row.agent_id], row)
            self._observe("checked", agent_id=row.agent_id, tool_calls=checked.tool_calls, usage=checked.usage)
            return checked

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(checked(row)) for row in rows]
        return tuple(task.result() for task in tasks)

    async def _base(self, stage: str, candidate: Candidate) -> Attempt:
        async with self._few:
            return await self._ask(stage, "base", candidate, min(FIRST_TOKENS, candidate.ceiling or FIRST_TOKENS))

    async def _escalated(self, stage: str, candidate: Candidate, first: Attempt) -> Row:
        tokens = serving_tokens(candidate)
        row = _row(candidate, first, attempts=1, trigger=Trigger.BUDGET.value)
        if tokens <= FIRST_TOKENS:  # its ceiling leaves no larger budget to try
            return replace(row, error_type=INVALID)
        if self._used >= self._budget:
            return replace(row, error_type=EXHAUSTED)
        if time_left() == 0:
            return replace(row, error_type=TIME_IS_UP)
        self._used += 1  # before the call: one that never comes back has used it
        second = await self._ask(stage, "escalated", candidate, tokens)
        row = _row(candidate, second, attempts=2, escalated=True, trigger=Trigger.BUDGET.value)
        return replace(
            row,
            seconds=round(first.seconds + second.seconds, 3),
            error_type=REJECTED_ESCALATED if second.refused and not second.timed_out else row.error_type,
        )

    async def _check(self, candidate: Candidate, row: Row) -> Row:
        from langchain_core.messages import AIMessage

        from models.reply import written_call

        async with self._few:
            asked = await self._ask("check", "tool_call", candidate, serving_tokens(candidate))
        row = replace(row, seconds=round(row.seconds + asked.seconds, 3))
        if asked.reply is None:
            return replace(row, tool_calls="not_checked", usage="not_checked")
        reply: AIMessage = asked.reply
        called = [call["name"] for call in reply.tool_calls] == [TOOL["name"]] and not reply.invalid_tool_calls
        tool_calls = "yes" if called else "as_text" if written_call(reply, [str(TOOL["name"])]) else "no"
        return replace(row, tool_calls=tool_calls, usage=_usage(reply.usage_metadata))

    async def _ask(self, stage: str, purpose: str, candidate: Candidate, tokens: int) -> Attempt:
        try:
            model = self._build(candidate, tokens)
            caller = model.bind_tools([TOOL]) if purpose == "tool_call" else model
        except SetUpMissing as exc:
            self._observe("not_set_up", agent_id=candidate.id, reason=str(exc))  # no provider was asked
            return Attempt(failure=exc)
        left = time_left()
        if left == 0:
            return Attempt(failure=DeadlinePassed())
        self._calls += 1
        bound_s = CHECK_S if purpose == "tool_call" else PROBE_S
        about: dict[str, Any] = {"call": self._calls, "stage": stage, "purpose": purpose, "agent_id": candidate.id}
        self._observe("probe_started", **about, max_output_tokens=tokens)
        done = Attempt(failure=asyncio.CancelledError())  # until it is known better
        try:
            done = await attempt(
                caller,
                _messages(purpose),
                bound_s=bound_s if left is None else min(bound_s, left),
                on_late=lambda late: self._observe("probe_late", **about, **_late(late)),
            )
        finally:
            self._observe("probe_ended", **about, **facts(done))
        return done


class DeadlinePassed(Exception):
    """No time was left for a probe."""


NOT_MADE = (DeadlinePassed, SetUpMissing)
TOOL: dict[str, Any] = {
    "name": "report_ready",
    "description": "Say that you are ready.",
    "parameters": {
        "type": "object",
        "properties": {"ready": {"type": "boolean", "description": "Whether you are ready."}},
        "required": ["ready"],
    },
}


def serving_tokens(candidate: Candidate) -> int:
    """How many output tokens a candidate is asked for when it serves, and when it is escalated to."""
    return min(ESCALATED_TOKENS, candidate.ceiling or ESCALATED_TOKENS)


def _row(candidate: Candidate, done: Attempt, *, attempts: int, **more: Any) -> Row:
    shown: dict[str, Any] = {"status": "rejected", "http_status": done.http_status}
    if done.has_text:
        shown = {"status": "ready"}
    elif done.reply is not None:
        shown["error_type"] = INVALID
    else:
        shown["error_type"] = TIME_IS_UP if isinstance(done.failure, DeadlinePassed) else done.error_type
        shown["trigger"] = Trigger.NO_RESPONSE.value
    if done.reply is not None:
        shown["reasoning_without_content"] = done.reasoned and not done.has_text
    return Row(
        agent_id=candidate.id,
        provider=candidate.provider,
        model=candidate.model,
        attempts=attempts,
        finish_reason=done.finish_reason,
        seconds=done.seconds,
        **{**shown, **more},
    )


def _why(row: Row) -> int | str | None:
    """A status where it says something: a response that was of no use came with a 200."""
    told = row.http_status is not None and not 200 <= row.http_status < 300
    return row.http_status if told else row.error_type


def _usage(raw: object) -> str:
    usage = judge(raw)
    if usage.fault is None:
        return "reported"
    return "missing" if raw is None or raw == {} or "is missing" in usage.fault else "inconsistent"


def _messages(purpose: str) -> "list[BaseMessage]":
    from langchain_core.messages import HumanMessage

    if purpose == "tool_call":
        return [HumanMessage(f"Call the tool {TOOL['name']} with ready set to true.")]
    return [HumanMessage("Reply with the one word: ready")]


def _late(late: object) -> Mapping[str, object]:
    return {"late": type(late).__name__ if isinstance(late, BaseException) else "reply"}
