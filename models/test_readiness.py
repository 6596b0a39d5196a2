"""The first layer of a preflight: who is asked how often and for how much, on a virtual clock and without a network."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage

from bounded.deadlines import deadline_scope
from conftest import OnVirtualClock, VirtualClockLoop
from models.catalogue import Candidate
from models.factory import SetUpMissing
from models.readiness import (
    EXHAUSTED,
    INVALID,
    REJECTED_ESCALATED,
    TIME_IS_UP,
    NoneReady,
    Report,
    Row,
    escalations_allowed,
    probe_candidates,
)

READY = AIMessage("ready", response_metadata={"finish_reason": "stop"})
STARVED = AIMessage("", response_metadata={"finish_reason": "length"})
SILENT = AIMessage("  ", response_metadata={"finish_reason": "stop"})
THINKING = AIMessage("", additional_kwargs={"reasoning_content": "hm"}, response_metadata={"finish_reason": "odd one"})
USED: Any = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
CALLS = AIMessage("", tool_calls=[{"name": "report_ready", "args": {"ready": True}, "id": "1"}], usage_metadata=USED)
HANGS = object()
STUBBORN = object()  # hangs, and does not obey when it is asked to stop


class Refused(Exception):
    """What an SDK raises for a status."""

    def __init__(self, status_code: int) -> None:
        super().__init__("the body, and a key: fake-key-for-tests")
        self.status_code = status_code


@dataclass
class Model:
    """Answers with what a test has prepared; takes `seconds` for it."""

    say: object
    seconds: float = 0.0

    def bind_tools(self, tools: Any) -> "Model":
        return self

    async def ainvoke(self, messages: list[BaseMessage]) -> AIMessage:
        try:
            await asyncio.sleep(1e9 if self.say in (HANGS, STUBBORN) else self.seconds)
        except asyncio.CancelledError:
            if self.say is HANGS:
                raise
            await asyncio.sleep(1000)
            return READY
        if isinstance(self.say, BaseException):
            raise self.say
        assert isinstance(self.say, AIMessage)
        return self.say


@dataclass
class Pool:
    """Builds models by candidate and size, and remembers for whom and for how much it was asked."""

    first: Mapping[str, object]
    escalated: Mapping[str, object] = field(default_factory=dict)
    check: object = field(default_factory=lambda: CALLS)
    seconds: float = 0.0
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def build(self, candidate: Candidate, tokens: int) -> Any:
        name, pool = candidate.id, self

        class Built(Model):
            tools = False

            def bind_tools(self, tools: Any) -> Model:
                pool.asked[-1] = (name, "tool_call", tokens)
                return Model(pool.check, pool.seconds)

            async def ainvoke(self, messages: list[BaseMessage]) -> AIMessage:
                return await super().ainvoke(messages)

        said = self.first[name] if tokens <= 16 else self.escalated.get(name, READY)
        if isinstance(said, SetUpMissing):
            raise said
        self.asked.append((name, "base" if tokens <= 16 else "escalated", tokens))
        return Built(said, self.seconds)

    async def probed(self, *candidates: Candidate, **options: Any) -> Report:
        def observe(kind: str, **facts: Any) -> None:
            self.events.append((kind, facts))

        named = list(candidates) or [candidate(name) for name in self.first]
        try:
            return await probe_candidates(named, self.build, observe=observe, **options)
        except NoneReady as exc:
            return exc.report

    def calls(self, purpose: str) -> list[str]:
        return [
            facts["agent_id"] for kind, facts in self.events if kind == "probe_started" and facts["purpose"] == purpose
        ]


def candidate(name: str, **more: Any) -> Candidate:
    return Candidate(**{"id": name, "provider": "ollama", "model": f"m-{name}", "cost_rank": 0, **more})


def twelve(said: object) -> dict[str, object]:
    return {f"c{n:02}": said for n in range(12)}


Probed = OnVirtualClock[Report]


def only(report: Report) -> Row:
    (row,) = report.rows
    return row


def test_a_model_that_speaks_is_asked_once_with_the_least_that_works(on_virtual_clock: Probed) -> None:
    pool = Pool({"a": READY})
    row = only(on_virtual_clock(pool.probed()))
    assert pool.asked == [("a", "base", 16), ("a", "tool_call", 4096)]
    assert (row.status, row.attempts, row.escalated, row.trigger) == ("ready", 1, None, None)
    assert (row.finish_reason, row.reasoning_without_content) == ("stop", False)
    assert (row.tool_calls, row.usage, row.serves) == ("yes", "reported", True)


@pytest.mark.parametrize("first", [STARVED, THINKING])
def test_a_budget_that_was_too_small_is_raised_once(on_virtual_clock: Probed, first: AIMessage) -> None:
    pool = Pool({"a": first})
    row = only(on_virtual_clock(pool.probed()))
    assert pool.asked[:2] == [("a", "base", 16), ("a", "escalated", 4096)]
    assert (row.status, row.attempts, row.escalated, row.trigger) == ("ready", 2, True, "B")
    assert (row.finish_reason, row.reasoning_without_content) == ("stop", False)


def test_a_reply_without_text_and_without_a_sign_is_not_asked_again(on_virtual_clock: Probed) -> None:
    pool = Pool({"a": SILENT})
    row = only(on_virtual_clock(pool.probed()))
    assert pool.asked == [("a", "base", 16)]
    assert (row.status, row.error_type, row.attempts, row.trigger) == ("rejected", INVALID, 1, None)


@pytest.mark.parametrize(
    ("said", "error", "status"),
    [
        (HANGS, "TimeoutError", None),
        (Refused(503), "Refused", 503),
        (ConnectionError("u"), "ConnectionError", None),
        (type("not an identifier", (Exception,), {})(), "provider_error", None),
        (type("X" * 65, (Exception,), {})(), "provider_error", None),
    ],
)
def test_no_usable_response_is_neither_retried_nor_escalated(
    on_virtual_clock: Probed, said: object, error: str, status: int | None
) -> None:
    pool = Pool({"a": said})
    row = only(on_virtual_clock(pool.probed()))
    assert pool.asked == [("a", "base", 16)]
    assert (row.status, row.error_type, row.http_status, row.trigger) == ("rejected", error, status, "A")
    assert (row.attempts, row.finish_reason, row.escalated) == (1, None, None)


@pytest.mark.parametrize(
    ("second", "error", "status"),
    [
        (STARVED, INVALID, None),
        (SILENT, INVALID, None),
        (Refused(404), REJECTED_ESCALATED, 404),
        (Refused(500), REJECTED_ESCALATED, 500),
        (HANGS, "TimeoutError", None),
        (ConnectionError("u"), "ConnectionError", None),
    ],
)
def test_an_escalation_that_fails_is_told_apart(
    on_virtual_clock: Probed, second: object, error: str, status: int | None
) -> None:
    pool = Pool({"a": STARVED}, escalated={"a": second})
    row = only(on_virtual_clock(pool.probed()))
    assert (row.status, row.error_type, row.http_status) == ("rejected", error, status)
    assert (row.attempts, row.escalated, row.trigger) == (2, True, "B")
    if not isinstance(second, AIMessage):  # of the final attempt, and not of the first
        assert (row.finish_reason, row.reasoning_without_content) == (None, None)


def test_speed_buys_nobody_an_escalation(on_virtual_clock: Probed) -> None:
    pool = Pool(dict.fromkeys("abcdef", STARVED))
    report = on_virtual_clock(pool.probed(max_escalations=2))
    assert pool.calls("escalated") == ["a", "b"]
    assert [row.error_type for row in report.rows[2:]] == [EXHAUSTED] * 4
    assert (report.escalations_used, report.escalation_budget) == (2, 2)
    assert [row.attempts for row in report.rows] == [2, 2, 1, 1, 1, 1]


def test_without_escalations_none_is_made(on_virtual_clock: Probed) -> None:
    pool = Pool({"a": STARVED})
    row = only(on_virtual_clock(pool.probed(max_escalations=0)))
    assert (row.error_type, row.attempts, row.trigger) == (EXHAUSTED, 1, "B")


def test_the_worst_case_is_sixteen_calls_within_its_time(
    on_virtual_clock: OnVirtualClock[tuple[Report, float]],
) -> None:
    pool = Pool(twelve(STARVED), escalated=twelve(HANGS), seconds=9.99)

    async def timed() -> tuple[Report, float]:
        began = asyncio.get_running_loop().time()
        report = await pool.probed()
        return report, asyncio.get_running_loop().time() - began

    report, seconds = on_virtual_clock(timed())
    assert (len(pool.calls("base")), len(pool.calls("escalated"))) == (12, 4)
    assert len(pool.asked) == 16
    assert seconds <= 160
    assert report.escalations_used == 4


def test_the_fallback_stage_is_run_only_if_every_primary_is_rejected(on_virtual_clock: Probed) -> None:
    pool = Pool({**twelve(Refused(401)), "c07": READY})
    report = on_virtual_clock(pool.probed())
    assert len(pool.calls("base")) == 8
    assert report.primary is None
    assert "fallback_reason" not in report.as_dict()


def test_after_a_fallback_the_report_holds_what_the_primary_stage_came_to(on_virtual_clock: Probed) -> None:
    pool = Pool({**twelve(Refused(401)), "c09": READY})
    said = on_virtual_clock(pool.probed()).as_dict()
    assert (said["contract"], said["probed_count"], said["ready_count"]) == ("review-preflight-v1", 4, 1)
    assert said["fallback_reason"] == "primary_routes_unavailable"
    primary = said["primary_attempt"]
    assert isinstance(primary, dict)
    assert (primary["probed_count"], primary["ready_count"], primary["rejected_count"]) == (8, 0, 8)


def test_the_count_of_escalations_carries_over_into_the_fallback(on_virtual_clock: Probed) -> None:
    first = {**twelve(Refused(401)), "c00": STARVED, "c08": STARVED, "c09": STARVED}
    pool = Pool(first, escalated={"c00": SILENT})
    report = on_virtual_clock(pool.probed(max_escalations=2))
    assert pool.calls("escalated") == ["c00", "c08"]
    assert report.rows[1].error_type == EXHAUSTED


def test_a_hung_probe_holds_no_other_up(on_virtual_clock: OnVirtualClock[float]) -> None:
    pool = Pool({"a": HANGS, "b": STUBBORN, "c": READY, "d": READY, "e": READY})

    async def ended() -> float:
        assert [row.ready for row in (await pool.probed()).rows] == [False, False, True, True, True]
        return asyncio.get_running_loop().time()

    assert on_virtual_clock(ended()) == pytest.approx(10.25)  # the bound and the grace, once


def test_no_more_probes_run_at_once_than_a_few(on_virtual_clock: Probed) -> None:
    running, most = 0, 0

    class Counted(Model):
        async def ainvoke(self, messages: list[BaseMessage]) -> AIMessage:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1
            return READY

    pool = Pool({})
    pool.build = lambda candidate, tokens: Counted(READY)  # type: ignore[method-assign]
    on_virtual_clock(pool.probed(*[candidate(name) for name in "abcdefgh"]))
    assert most == 4


@pytest.mark.parametrize(
    ("ceilings", "tokens"),
    [
        ({}, 4096),
        ({"max_output_tokens": 1000}, 1000),
        ({"context_tokens": 2048}, 1024),
        ({"context_tokens": 10**6}, 4096),
    ],
)
def test_an_escalation_never_passes_a_known_ceiling(
    on_virtual_clock: Probed, ceilings: dict[str, int], tokens: int
) -> None:
    pool = Pool({"a": STARVED})
    on_virtual_clock(pool.probed(candidate("a", **ceilings)))
    assert pool.asked[1] == ("a", "escalated", tokens)


def test_a_ceiling_that_leaves_nothing_to_raise_is_not_probed_twice(on_virtual_clock: Probed) -> None:
    pool = Pool({"a": STARVED})
    row = only(on_virtual_clock(pool.probed(candidate("a", max_output_tokens=16))))
    assert pool.asked == [("a", "base", 16)]
    assert (row.error_type, row.trigger) == (INVALID, "B")


def test_what_is_not_set_up_is_rejected_without_a_call(on_virtual_clock: Probed) -> None:
    pool = Pool({"a": SetUpMissing("no key"), "b": READY})
    first, second = on_virtual_clock(pool.probed()).rows
    assert (first.status, first.error_type, first.attempts) == ("rejected", "SetUpMissing", 0)
    assert second.ready


@pytest.mark.parametrize(
    ("check", "tools", "usage"),
    [
        (CALLS, "yes", "reported"),
        (AIMessage("no", usage_metadata=USED), "no", "reported"),
        (AIMessage('{"name": "report_ready", "arguments": {"ready": true}}'), "as_text", "missing"),
        (AIMessage("", tool_calls=CALLS.tool_calls), "yes", "missing"),
        (HANGS, "not_checked", "not_checked"),
        (Refused(400), "not_checked", "not_checked"),
    ],
)
def test_a_ready_candidate_is_asked_for_a_tool_call_and_its_usage(
    on_virtual_clock: Probed, check: object, tools: str, usage: str
) -> None:
    row = only(on_virtual_clock(Pool({"a": READY}, check=check).probed()))
    assert (row.status, row.tool_calls, row.usage) == ("ready", tools, usage)


@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        ({"input_tokens": 3, "output_tokens": 2, "total_tokens": 0}, "inconsistent"),
        ({"input_tokens": 3}, "missing"),
        ({"total_tokens": True}, "inconsistent"),
        ({}, "missing"),
        ([], "inconsistent"),
    ],
)
def test_odd_usage_has_a_word(on_virtual_clock: Probed, raw: Any, usage: str) -> None:
    check = AIMessage("", tool_calls=CALLS.tool_calls)
    check.usage_metadata = raw
    assert only(on_virtual_clock(Pool({"a": READY}, check=check).probed())).usage == usage


def test_a_nearer_deadline_narrows_the_layer(on_virtual_clock: Probed) -> None:
    pool = Pool({"a": HANGS, "b": HANGS, "c": HANGS, "d": HANGS, "e": READY})

    async def narrowed() -> Report:
        with deadline_scope(4.0):
            return await pool.probed()

    report = on_virtual_clock(narrowed())
    assert [row.seconds for row in report.rows[:4]] == [4.0] * 4
    assert (report.rows[4].error_type, report.rows[4].attempts) == (TIME_IS_UP, 0)


def test_none_ready_is_an_error_that_carries_the_report(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        pool = Pool({"a": Refused(401), "b": SILENT})
        with pytest.raises(NoneReady, match=r"a: 401; b: invalid_chat_response") as raised:
            await probe_candidates([candidate("a"), candidate("b")], pool.build, observe=lambda *_, **__: None)
        assert [row.status for row in raised.value.report.rows] == ["rejected", "rejected"]

    on_virtual_clock(check())


def test_a_call_that_is_cut_off_is_on_record(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        pool = Pool({"a": HANGS})
        task = asyncio.create_task(pool.probed())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (ended,) = [facts for kind, facts in pool.events if kind == "probe_ended"]
        assert (ended["error_type"], ended["spent"]) == ("CancelledError", "unknown")

    on_virtual_clock(check())


SECRET = "fake-key-for-tests"
LEAKY = st.text(max_size=20).map(lambda text: f"{text}{SECRET}{text}")


@st.composite
def something_said(draw: Callable[[Any], Any]) -> object:
    """A reply or a failure that holds the secret wherever a provider can put one."""
    text = draw(LEAKY)
    if draw(st.booleans()):
        status = draw(st.none() | st.integers(-1, 700) | LEAKY)
        failure = type(text.replace("\0", "") or "x", (Exception,), {})(text)
        failure.status_code = status
        return failure
    reply = AIMessage(
        draw(st.sampled_from(["", " ", text])),
        response_metadata={draw(st.sampled_from(["finish_reason", "done_reason", "body"])): draw(LEAKY)},
        additional_kwargs=draw(st.sampled_from([{}, {"reasoning_content": text}])),
    )
    reply.usage_metadata = draw(st.none() | st.just({"total_tokens": text}) | st.just(text))
    return reply


@given(something_said(), something_said(), something_said())
def test_no_secret_and_no_word_of_a_provider_gets_into_a_report(first: object, second: object, check: object) -> None:
    pool = Pool({"a": first}, escalated={"a": second}, check=check)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        report = runner.run(pool.probed())
    assert SECRET not in json.dumps(report.as_dict())
    assert SECRET not in repr(report)


@pytest.mark.parametrize("text", ["", "x", "-1", "13", "00", "4 ", "١", "1e1"])
def test_an_escalation_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SetUpMissing, match="REVIEW_PREFLIGHT_MAX_ESCALATIONS takes"):
        escalations_allowed({"REVIEW_PREFLIGHT_MAX_ESCALATIONS": text})


def test_the_escalation_budget_is_four_unless_set() -> None:
    allowed: Callable[[dict[str, str]], int] = escalations_allowed
    assert (allowed({}), allowed({"REVIEW_PREFLIGHT_MAX_ESCALATIONS": "0"})) == (4, 0)


@pytest.mark.parametrize("count", [0, 13])
def test_a_pool_of_an_impossible_size_is_refused(on_virtual_clock: OnVirtualClock[None], count: int) -> None:
    async def check() -> None:
        with pytest.raises(ValueError, match="takes 1 to 12 candidates"):
            await probe_candidates([candidate(f"c{n}") for n in range(count)], Pool({}).build, observe=lambda *_: None)

    on_virtual_clock(check())
