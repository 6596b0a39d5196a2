"""A pool as the model of the real graph: who is asked, for how long, what it costs, what is said of who served."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, BaseMessage

from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Answer, Event, Run
from ci import LocalCi
from conftest import OnVirtualClock
from graph import ask, build_graph
from models.failures import ModelFailed
from models.pool import SERVES_NONE, Pool
from models.readiness import TOOL, Row
from models.test_readiness import CALLS, HANGS, READY, STARVED, Refused, candidate
from sources.jobs import ci_tools
from terminal import answer_dict, show

QUESTION = "Why is CI failing on pull request 415?"
USED: Any = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
SAYS = AIMessage("It failed.", usage_metadata=USED)
ASKS = AIMessage("", tool_calls=[{"name": "list_ci_jobs", "args": {"pr": 415}, "id": "c1"}], usage_metadata=USED)
UNREACHED = httpx.ConnectError("no route")
CHARGED: Any = {"usage_metadata": USED}


class Late:
    """It says this only when it is asked to stop, and so many seconds after."""

    def __init__(self, reply: object, after_s: float) -> None:
        self.reply, self.after_s = reply, after_s


async def play(say: object) -> Any:
    if isinstance(say, Late):
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            await asyncio.sleep(say.after_s)
        say = say.reply
    if say is HANGS:
        await asyncio.sleep(1e9)
    if isinstance(say, BaseException):
        raise say
    return say


class Fake:
    """A candidate that passes its probes unless told otherwise, and then says one thing a call.

    Attributes:
        asked: when it was asked to serve, in seconds.
    """

    def __init__(
        self, *says: object, probe: object = READY, check: object = CALLS, profile: Mapping[str, int] | None = None
    ) -> None:
        self.says, self.probe, self.check, self.profile = deque(says), probe, check, profile
        self.asked: list[float] = []

    def bind_tools(self, tools: Any) -> "_Bound":
        return _Bound(self, probing=list(tools) == [TOOL])

    async def ainvoke(self, messages: list[BaseMessage]) -> Any:
        return await play(self.probe)


class _Bound:
    def __init__(self, fake: Fake, *, probing: bool) -> None:
        self.fake, self.probing = fake, probing

    async def ainvoke(self, messages: list[BaseMessage]) -> Any:
        if self.probing:
            return await play(self.fake.check)
        self.fake.asked.append(asyncio.get_running_loop().time())
        return await play(self.fake.says.popleft())


class Talk:
    """One question to a pool of fakes, named a, b, c in their order, and everything that it left."""

    def __init__(self, *fakes: Fake, serves: Callable[[Row], bool] = lambda row: row.serves, **limits: Any) -> None:
        self.fakes = dict(zip("abcdefghijkl", fakes, strict=False))
        names = [candidate(name) for name in self.fakes]
        self.pool: Any = Pool(names, environment={}, serves=serves, build=lambda each, tokens: self.fakes[each.id])
        self.graph = build_graph(self.pool, ci_tools(LocalCi()), limits=Limits(**limits))
        self.events: list[Event] = []

    async def ask(self, deadline_s: float | None = 120.0, *, interrupt_s: float | None = None) -> Answer:
        interrupt = asyncio.Event()
        if interrupt_s is not None:
            asyncio.get_running_loop().call_later(interrupt_s, interrupt.set)
        run = Run(model="pool", observe=self.events.append)
        given: dict[str, Any] = {"deadline_s": deadline_s, "interrupt": interrupt, "first": self.pool.make_ready}
        answer = await ask(self.graph, QUESTION, run=run, **given)
        await asyncio.sleep(2000)  # for whatever comes late
        return answer

    @property
    def asked(self) -> list[list[float]]:
        return [fake.asked for fake in self.fakes.values()]

    def facts(self, kind: str) -> list[Mapping[str, Any]]:
        return [event.facts for event in self.events if event.kind == kind]


Asked = OnVirtualClock[Answer]


def test_a_model_call_goes_to_the_first_ready_candidate(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(probe=Refused(401)), Fake(ASKS, SAYS), Fake())
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.text, answer.reason) == (Outcome.ANSWERED, "It failed.", None)
    assert (answer.known_subtotal, answer.usage_known, answer.model_calls) == (20, True, 2)
    assert answer.served == {"b": 2}
    assert talk.pool.serving == ("b", "c")
    assert [len(times) for times in talk.asked] == [0, 2, 0]
    assert talk.facts("pool_probed")[0]["serving"] == ["b", "c"]


@pytest.mark.parametrize(
    ("failure", "spent"),
    [
        (Refused(503), "nothing"),
        (Refused(401), "nothing"),
        (Refused(302), "nothing"),
        (UNREACHED, "nothing"),
        (ConnectionResetError("x"), "unknown"),
        (httpx.ReadTimeout("x"), "unknown"),
        (TimeoutError("its own"), "unknown"),
        (ValueError("no JSON"), "unknown"),
        (Refused(200), "unknown"),
        (SystemExit(3), "unknown"),
        ("no chat message", "unknown"),
    ],
    ids=repr,
)
def test_what_brings_no_response_is_passed_over_and_only_what_may_have_spent_ends_the_run(
    on_virtual_clock: Asked, failure: object, spent: str
) -> None:
    talk = Talk(Fake(failure), Fake(ASKS, SAYS), Fake())
    if spent == "nothing":
        talk.fakes["a"].says.append(failure)  # the next model call begins with it again
    answer = on_virtual_clock(talk.ask())
    passed_over = talk.facts("model_call_passed_over")
    assert {facts["spent"] for facts in passed_over} == {spent}
    if spent == "nothing":
        assert (answer.outcome, answer.text, answer.usage_fault) == (Outcome.ANSWERED, "It failed.", None)
        assert (answer.known_subtotal, answer.model_calls, answer.served) == (20, 4, {"b": 2})
        assert [facts["call"] for facts in passed_over] == [1, 3]
    else:
        fault = "a candidate that was passed over did not report what it spent"
        assert (answer.outcome, answer.reason, answer.usage_fault) == (Outcome.MISSING_USAGE, fault, fault)
        assert (answer.known_subtotal, answer.usage_known, answer.model_calls) == (10, False, 2)
        assert answer.served == {"b": 1}
        assert [receipt.outcome for receipt in answer.receipts] == ["withheld"]
    assert talk.asked[2] == []


def test_none_gets_more_than_half_of_what_is_left_while_another_waits(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(HANGS), Fake(HANGS), Fake(HANGS), model_timeout_s=60.0)
    answer = on_virtual_clock(talk.ask())
    assert talk.asked == [[0.0], [30.0], [45.0]]
    assert (answer.outcome, answer.seconds) == (Outcome.MODEL_TIMEOUT, 60.0)
    assert answer.reason == "the model did not answer within 60 s"
    assert (answer.model_calls, answer.usage_known, answer.served) == (3, False, {})
    assert [facts["error_type"] for facts in talk.facts("model_call_passed_over")] == ["TimeoutError"] * 2
    assert [(facts["call"], facts["fate"]) for facts in talk.facts("model_call_cut")] == [
        (3, "was ended by its timeout")
    ]


def test_a_nearer_deadline_of_the_run_narrows_what_each_gets(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(HANGS), Fake(HANGS), Fake(HANGS))
    answer = on_virtual_clock(talk.ask(deadline_s=20.0))
    assert talk.asked == [[0.0], [10.0], [15.0]]
    assert (answer.outcome, answer.seconds, answer.model_calls) == (Outcome.DEADLINE, 20.0, 3)


def test_what_does_not_stop_costs_the_next_its_grace_and_no_more(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(Late(SAYS, 100)), Fake(HANGS), Fake(SAYS))
    answer = on_virtual_clock(talk.ask())
    assert talk.asked == [[0.0], [30.25], [45.125]]
    assert (answer.outcome, answer.text, answer.served) == (Outcome.MISSING_USAGE, "It failed.", {"c": 1})


def test_a_slow_reply_of_the_last_still_counts(on_virtual_clock: Asked) -> None:
    class Slow(Fake):
        async def ainvoke(self, messages: list[BaseMessage]) -> Any:
            await asyncio.sleep(9.0)
            return READY

    talk = Talk(Slow(Refused(503)), Fake(SAYS))
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.seconds) == (Outcome.ANSWERED, 9.0)


def test_without_any_bound_a_candidate_gets_all_the_time_it_takes(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(Refused(503)), Fake(SAYS), model_timeout_s=None)
    assert on_virtual_clock(talk.ask(deadline_s=None)).served == {"b": 1}


@pytest.mark.parametrize("after_s", [0.1, 5.0])
@pytest.mark.parametrize(("late", "usage"), [(SAYS, USED), (ValueError("late"), None)])
def test_what_comes_late_is_quarantined_and_never_charged(
    on_virtual_clock: Asked, after_s: float, late: object, usage: object
) -> None:
    talk = Talk(Fake(Late(late, after_s)), Fake(SAYS))
    answer = on_virtual_clock(talk.ask())
    assert (answer.known_subtotal, answer.served) == (10, {"b": 1})
    assert talk.facts("model_call_late") == [{"call": 1, "usage": usage}]
    assert [facts["call"] for facts in talk.facts("model_call_ended")] == [2]


def test_all_fail_is_a_model_error_that_says_why_the_last_did(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(ValueError("no JSON")), Fake(UNREACHED))
    answer = on_virtual_clock(talk.ask())
    assert answer.outcome is Outcome.MODEL_ERROR
    assert answer.reason is not None
    assert "ConnectError" in answer.reason
    assert (answer.model_calls, answer.usage_known, answer.served) == (2, False, {})
    assert [facts["failure"] for facts in talk.facts("model_call_cut")] == ["unreachable"]


@pytest.mark.parametrize(
    "empty",
    [
        STARVED.model_copy(update=CHARGED),
        AIMessage("", additional_kwargs={"reasoning_content": "hm"}, **CHARGED),
        AIMessage([{"type": "text", "text": " "}], **CHARGED),
    ],
)
def test_a_reply_without_text_never_moves_on(on_virtual_clock: Asked, empty: AIMessage) -> None:
    talk = Talk(Fake(empty), Fake(SAYS))
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.known_subtotal, answer.usage_known) == (Outcome.EMPTY_ANSWER, 10, True)
    assert (talk.asked[1], answer.served, answer.model_calls) == ([], {"a": 1}, 1)


def test_a_reply_whose_usage_is_missing_does_not_move_on_either(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(AIMessage("It failed.")), Fake(SAYS))
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.usage_fault, talk.asked[1]) == (
        Outcome.MISSING_USAGE,
        "no usage was reported",
        [],
    )


@pytest.mark.parametrize(
    ("max_steps", "outcome", "asked"),
    [
        (1, Outcome.MODEL_ERROR, [1, 0, 0]),
        (2, Outcome.MODEL_ERROR, [1, 1, 0]),
        (3, Outcome.STEP_LIMIT, [1, 1, 1]),
        (5, Outcome.MODEL_ERROR, [2, 2, 1]),
        (6, Outcome.ANSWERED, [2, 2, 2]),
    ],
)
def test_failovers_never_pass_the_step_limit(
    on_virtual_clock: Asked, max_steps: int, outcome: Outcome, asked: list[int]
) -> None:
    talk = Talk(*(Fake(Refused(503), Refused(503)) for _ in "ab"), Fake(ASKS, SAYS), max_steps=max_steps)
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, [len(times) for times in talk.asked]) == (outcome, asked)
    assert answer.model_calls == max_steps


def test_what_served_stands_in_the_result_in_both_outputs_and_in_the_events(
    on_virtual_clock: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Talk(Fake(ASKS, Refused(503)), Fake(SAYS))
    answer = on_virtual_clock(talk.ask())
    assert answer.served == {"a": 1, "b": 1}
    assert answer_dict(answer)["served"] == {"a": 1, "b": 1}
    show(answer)
    assert "served by: a (1), b (1)\n" in capsys.readouterr().out
    started = [(facts["call"], facts["candidate"]) for facts in talk.facts("model_call_started")]
    ended = [(facts["call"], facts["candidate"]) for facts in talk.facts("model_call_ended")]
    assert started == [(1, "a"), (2, "a"), (3, "b")]
    assert ended == [(1, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("how", "outcome", "seconds"),
    [({"interrupt_s": 3.0}, Outcome.INTERRUPTED, 3.0), ({"deadline_s": 4.0}, Outcome.DEADLINE, 4.0)],
)
def test_a_cut_while_it_probes_ends_the_run_at_once(
    on_virtual_clock: Asked, how: dict[str, float], outcome: Outcome, seconds: float
) -> None:
    talk = Talk(Fake(SAYS), Fake(probe=HANGS), Fake(probe=Late(READY, 100)))
    answer = on_virtual_clock(talk.ask(**how))
    assert answer.outcome is outcome
    assert seconds <= answer.seconds <= seconds + 0.25
    assert (answer.model_calls, answer.served, talk.asked) == (0, {}, [[], [], []])
    assert [facts["error_type"] for facts in talk.facts("probe_ended")] == [None, "CancelledError", "CancelledError"]
    assert talk.facts("pool_probed") == []


@pytest.mark.parametrize("say", [HANGS, Late(SAYS, 100), Late(SAYS, 0.05)])
@pytest.mark.parametrize(
    ("how", "outcome", "others"),
    [({"interrupt_s": 5.0}, Outcome.INTERRUPTED, [Fake(SAYS)]), ({"deadline_s": 5.0}, Outcome.DEADLINE, [])],
)
def test_a_cut_during_a_failover_asks_no_one_further(
    on_virtual_clock: Asked, how: dict[str, float], outcome: Outcome, others: list[Fake], say: object
) -> None:
    talk = Talk(Fake(Refused(503)), Fake(say), *others)
    answer = on_virtual_clock(talk.ask(**how))
    assert (answer.outcome, answer.model_calls, answer.served) == (outcome, 2, {})
    assert (answer.known_subtotal, answer.usage_known) == (0, False)
    assert [facts["call"] for facts in talk.facts("model_call_cut")] == [2]
    assert [facts["call"] for facts in talk.facts("model_call_late")] == ([] if say is HANGS else [2])
    assert 5.0 <= answer.seconds <= 5.25


def test_none_ready_is_a_model_error_that_names_each_candidate(on_virtual_clock: Asked) -> None:
    talk = Talk(Fake(probe=Refused(401)), Fake(probe=AIMessage("")), Fake(probe=UNREACHED))
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.model_calls, answer.usage_known) == (Outcome.MODEL_ERROR, 0, True)
    assert answer.reason == (
        "no candidate of the pool is ready (a: 401; b: invalid_chat_response; c: ConnectError);"
        " python preflight.py, with the same --pool, shows more"
    )
    (probed,) = talk.facts("pool_probed")
    assert (probed["serving"], probed["report"]["ready_count"]) == ([], 0)


@pytest.mark.parametrize(
    "check",
    [
        AIMessage("no", usage_metadata=USED),
        AIMessage("", tool_calls=CALLS.tool_calls),
        AIMessage('{"name": "report_ready", "arguments": {"ready": true}}', usage_metadata=USED),
        HANGS,
    ],
)
def test_a_ready_candidate_without_tools_or_usage_serves_only_whom_it_is_good_enough_for(
    on_virtual_clock: Asked, check: object
) -> None:
    answer = on_virtual_clock(Talk(Fake(SAYS, check=check)).ask())
    assert (answer.outcome, answer.reason) == (Outcome.MODEL_ERROR, SERVES_NONE)
    lenient = Talk(Fake(SAYS, check=check), serves=lambda row: row.ready)
    assert on_virtual_clock(lenient.ask()).served == {"a": 1}


def test_a_pool_that_was_not_made_ready_asks_no_one(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        pool = Pool([candidate("a")], environment={}, build=lambda each, tokens: Fake(SAYS))
        with pytest.raises(ModelFailed, match="make_ready was not called"):
            await pool.route(Run(), [], 12)

    on_virtual_clock(check())


@pytest.mark.parametrize(
    ("file", "profile", "sizes"),
    [
        ({}, {"max_output_tokens": 1000}, [16, 1000, 1000, 1000]),
        ({}, {"max_input_tokens": 1024}, [16, 512, 512, 512]),
        ({"max_output_tokens": 2000}, {"max_output_tokens": 1000}, [16, 2000, 2000, 2000]),
        ({"context_tokens": 600}, {"max_output_tokens": 1000, "max_input_tokens": 9}, [16, 300, 300, 300]),
        ({}, {"max_output_tokens": 10**6}, [16, 4096, 4096, 4096]),
        ({}, None, [16, 4096, 4096, 4096]),
    ],
)
def test_what_the_package_knows_of_a_model_fills_what_the_file_leaves_out(
    on_virtual_clock: OnVirtualClock[None], file: dict[str, int], profile: dict[str, int] | None, sizes: list[int]
) -> None:
    sent: list[int] = []

    class Sized(Fake):
        def __init__(self, tokens: int) -> None:
            super().__init__(SAYS, probe=STARVED if tokens <= 16 else READY, profile=profile)
            self.tokens = tokens

        def bind_tools(self, tools: Any) -> Any:
            sent.append(self.tokens)
            return super().bind_tools(tools)

        async def ainvoke(self, messages: list[BaseMessage]) -> Any:
            sent.append(self.tokens)
            return await super().ainvoke(messages)

    async def check() -> None:
        pool = Pool([candidate("a", **file)], environment={}, build=lambda each, tokens: Sized(tokens))
        await pool.probe(lambda *_, **__: None)
        assert sent == sizes

    on_virtual_clock(check())
