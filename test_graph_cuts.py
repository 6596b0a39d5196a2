"""The real compiled graph, cut off from above, paused, resumed, and shared by many questions."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from bounded.deadlines import deadline_scope
from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.run import Answer, Run
from ci import LocalCi
from conftest import OnVirtualClock
from graph import State, ask, build_graph
from models.offline import OfflineTriage
from models.scripted import ScriptedModel
from sources.jobs import ci_tools
from test_graph import QUESTION, Asked, Conversation, asks, call, says


def test_the_deadline_cuts_a_model_call_off(on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation(asks(), says() | {"delay_s": 30}).ask(deadline_s=4.0))
    assert (answer.outcome, answer.seconds, answer.usage_known) == (Outcome.DEADLINE, 4.0, False)
    assert (answer.known_subtotal, answer.receipts[0].outcome) == (10, CallOutcome.EXECUTED)


def test_the_deadline_cuts_a_tool_call_off_and_costs_no_certainty(on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation(asks(call("fetch_job_log", {"job_id": 815}))).ask(deadline_s=2.0))
    (receipt,) = answer.receipts
    assert (answer.outcome, answer.seconds, answer.usage_known) == (Outcome.DEADLINE, 2.0, True)
    assert (receipt.outcome, receipt.source_gap) == (CallOutcome.ERROR, SourceGap.STOPPED)
    assert (receipt.bound_s, receipt.bound_source) == (2.0, "deadline")


def test_a_callers_deadline_narrows_the_runs_own(on_virtual_clock: Asked) -> None:
    async def check() -> Answer:
        with deadline_scope(1.0):
            return await Conversation(says() | {"delay_s": 30}).ask(deadline_s=60.0)

    answer = on_virtual_clock(check())
    assert (answer.outcome, answer.seconds) == (Outcome.DEADLINE, 1.0)


def test_a_deadline_that_has_passed_starts_nothing(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        graph = build_graph(ScriptedModel(replies=[says()]), ci_tools(LocalCi()))
        with deadline_scope(0.0):
            answer = await ask(graph, QUESTION)
            state = await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}, context=Run())
        assert (answer.outcome, answer.model_calls, answer.usage_known) == (Outcome.DEADLINE, 0, True)
        assert (state["outcome"], state["model_calls"]) == ("deadline", 0)

    on_virtual_clock(check())


def test_an_interrupt_ends_the_run_with_what_is_known(on_virtual_clock: Asked) -> None:
    async def check() -> Answer:
        interrupt = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, interrupt.set)
        return await Conversation(asks(call("fetch_job_log", {"job_id": 815}))).ask(interrupt=interrupt)

    answer = on_virtual_clock(check())
    assert (answer.outcome, answer.seconds, answer.known_subtotal) == (Outcome.INTERRUPTED, 1.0, 10)
    assert (answer.receipts[0].outcome, answer.receipts[0].source_gap) == (CallOutcome.ERROR, SourceGap.STOPPED)


def test_a_caller_that_cancels_finds_everything_in_its_run(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        talk = Conversation(asks(), says() | {"delay_s": 30})
        task = asyncio.create_task(talk.ask())
        await asyncio.sleep(2.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        known = talk.run.answer()
        assert (known.known_subtotal, known.usage_known, known.model_calls) == (10, False, 2)

    on_virtual_clock(check())


def test_a_static_breakpoint_pauses_after_the_tools_and_can_be_resumed(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        model = ScriptedModel(replies=[asks(), says()])
        graph = build_graph(model, ci_tools(LocalCi()), checkpointer=InMemorySaver(), interrupt_after=["tools"])
        config: Any = {"configurable": {"thread_id": "t"}}
        paused = await ask(graph, QUESTION, config=config)
        assert (paused.outcome, paused.model_calls, paused.receipts[0].outcome) == (Outcome.PAUSED, 1, "executed")
        state = await graph.ainvoke(None, config, context=Run())
        assert (state["outcome"], state["known_subtotal"], state["model_calls"]) == ("answered", 20, 2)

    on_virtual_clock(check())


def test_a_breakpoint_works_without_a_checkpointer(on_virtual_clock: Asked) -> None:
    graph = build_graph(ScriptedModel(replies=[asks()]), ci_tools(LocalCi()), interrupt_after=["tools"])
    assert on_virtual_clock(ask(graph, QUESTION)).outcome is Outcome.PAUSED


def test_one_graph_serves_many_questions_at_once_and_mixes_nothing_up(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        graph = build_graph(OfflineTriage(), ci_tools(LocalCi()))
        answers = await asyncio.gather(*(ask(graph, f"Why is pull request {415 + n % 2} red?") for n in range(20)))
        assert [len(answer.receipts) for answer in answers] == [2, 1] * 10

    on_virtual_clock(check())


def test_the_loop_keeps_off_the_default_executor_which_a_stuck_name_lookup_may_hold(on_virtual_clock: Asked) -> None:
    class Held(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("something of the graph went to the default executor")

    async def check() -> Answer:
        asyncio.get_running_loop().set_default_executor(Held())
        graph = build_graph(ScriptedModel(replies=[asks(), {"error": "x"}]), ci_tools(LocalCi()))
        return await ask(graph, QUESTION)

    assert on_virtual_clock(check()).outcome is Outcome.MODEL_ERROR


def test_a_second_question_on_a_thread_starts_its_own_count(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        talk = Conversation(asks(), says("First."), says("Second.", total=3))
        first, second = await talk.ask(), await talk.ask()
        assert (first.text, first.known_subtotal, first.model_calls) == ("First.", 20, 2)
        assert (second.text, second.known_subtotal, second.model_calls) == ("Second.", 3, 1)
        assert [message.type for message in talk.messages] == ["human", "ai", "tool", "ai", "human", "ai"]

    on_virtual_clock(check())


@pytest.mark.parametrize("how", ["deadline", "interrupt"])
def test_a_reply_that_comes_within_the_grace_of_a_cut_is_late(how: str, on_virtual_clock: OnVirtualClock[None]) -> None:
    class Stubborn(ScriptedModel):
        async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.1)
            return await super().ainvoke(*args, **kwargs)

    async def check() -> None:
        model, limits = Stubborn(replies=[says("late")]), Limits(model_timeout_s=None)
        interrupt = asyncio.Event()
        if how == "interrupt":
            asyncio.get_running_loop().call_later(1.0, interrupt.set)
        graph = build_graph(model, ci_tools(LocalCi()), limits=limits)
        answer = await ask(graph, QUESTION, deadline_s=1.0 if how == "deadline" else 60.0, interrupt=interrupt)
        assert answer.outcome is (Outcome.DEADLINE if how == "deadline" else Outcome.INTERRUPTED)
        assert (answer.text, answer.known_subtotal, answer.usage_known, answer.seconds) == ("", 0, False, 1.1)

    on_virtual_clock(check())


@pytest.mark.parametrize(
    ("left", "outcome"),
    [
        ({"usage_known": False, "known_subtotal": 5}, Outcome.MISSING_USAGE),
        ({"usage_known": True, "known_subtotal": 50}, Outcome.TOKEN_BUDGET),
        ({"usage_known": True, "known_subtotal": 5, "model_calls": 12}, Outcome.STEP_LIMIT),
    ],
)
def test_a_checkpoint_that_allows_no_further_call_gets_none(
    left: dict[str, Any], outcome: Outcome, on_virtual_clock: OnVirtualClock[None]
) -> None:
    async def check() -> None:
        graph = build_graph(ScriptedModel(replies=[says()]), ci_tools(LocalCi()), limits=Limits(token_budget=50))
        start: State = {"messages": [HumanMessage(QUESTION)], "model_calls": 2, **left}  # type: ignore[typeddict-item]
        state = await graph.ainvoke(start, context=Run())
        assert (state["outcome"], state["model_calls"]) == (outcome.value, left.get("model_calls", 2))

    on_virtual_clock(check())


def test_a_run_is_for_one_question(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        graph, run = build_graph(ScriptedModel(replies=[says(), says()]), ci_tools(LocalCi())), Run()
        await ask(graph, QUESTION, run=run)
        with pytest.raises(ValueError, match="a Run is for one run"):
            await ask(graph, QUESTION, run=run)

    on_virtual_clock(check())


def test_a_reply_that_drowns_its_reader_runs_nothing(on_virtual_clock: Asked) -> None:
    many = asks(*[call(call_id=f"c{n}") for n in range(300)])
    answer = on_virtual_clock(Conversation(many).ask())
    assert (answer.outcome, answer.reason) == (Outcome.MODEL_ERROR, "the model asked for 300 calls in one reply")
    assert {receipt.outcome for receipt in answer.receipts} == {CallOutcome.WITHHELD}
    assert len(answer.receipts) == 300


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), MemoryError()])
def test_whatever_a_model_raises_is_the_models_failure(error: BaseException, on_virtual_clock: Asked) -> None:
    class Raising(ScriptedModel):
        async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
            raise error

    graph = build_graph(Raising(replies=[]), ci_tools(LocalCi()))
    answer = on_virtual_clock(ask(graph, QUESTION))
    assert (answer.outcome, answer.usage_known) == (Outcome.MODEL_ERROR, False)


@pytest.mark.parametrize("how", ["deadline", "interrupt"])
def test_a_cut_gives_each_sibling_its_grace_and_not_only_the_first_that_ends(
    how: str, on_virtual_clock: OnVirtualClock[None]
) -> None:
    cleaned_up: list[str] = []

    @tool
    async def polite() -> str:
        """Stop at once."""
        await asyncio.sleep(60)
        return "late"

    @tool
    async def tidy() -> str:
        """Clean up within the grace."""
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            cleaned_up.append("tidy")
        return "late"

    async def check() -> None:
        replies = [asks(call("tidy", {}, "a"), call("polite", {}, "b"))]
        graph = build_graph(ScriptedModel(replies=replies), [tidy, polite])
        interrupt = asyncio.Event()
        if how == "interrupt":
            asyncio.get_running_loop().call_later(1.0, interrupt.set)
        answer = await ask(graph, QUESTION, deadline_s=1.0 if how == "deadline" else 60.0, interrupt=interrupt)
        assert cleaned_up == ["tidy"]
        assert [(r.source_gap, r.duration_sec) for r in answer.receipts] == [
            (SourceGap.STOPPED, 1.1),
            (SourceGap.STOPPED, 1.0),
        ]
        assert answer.seconds == 1.1

    on_virtual_clock(check())
