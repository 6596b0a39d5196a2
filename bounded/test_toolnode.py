"""The native ToolNode in a real graph: every call bounded, every requested call with one receipt."""

import asyncio
import hashlib
import re
import threading
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import BaseTool, ToolException, tool
from langgraph.graph import END, START, StateGraph

from bounded.deadlines import deadline_scope
from bounded.outcomes import CallOutcome, SourceGap
from bounded.receipts import Receipt
from bounded.run import Event, Run
from bounded.timeouts import ToolTimeouts
from bounded.toolnode import MAX_TOOL_TEXT, Delivery, Host, bounded_tool_node, refuse_unparsable
from conftest import OnVirtualClock

SECRET = "fake-secret-0123"
TIMEOUTS = ToolTimeouts(default_s=3.0)


class State(TypedDict):
    messages: Annotated[list[Any], lambda old, new: old + new]


class Round:
    """One reply's calls, run by the node in a graph of its own."""

    def __init__(self, tools: Sequence[BaseTool], timeouts: ToolTimeouts = TIMEOUTS, host: Host | None = None) -> None:
        self.events: list[Event] = []
        self.tools, self.timeouts, self.host = tools, timeouts, host
        self.messages: dict[str, ToolMessage] = {}
        self.receipts: dict[str, Receipt] = {}

    async def run(self, *calls: tuple[str, dict[str, Any]]) -> "Round":
        graph = StateGraph(State, context_schema=Run)
        node = bounded_tool_node(self.tools, timeouts=self.timeouts, tool_set="test", host=self.host)
        graph.add_node("tools", node)
        graph.add_edge(START, "tools")
        graph.add_edge("tools", END)
        context = Run(secrets=frozenset({SECRET}), observe=self.events.append)
        requested = [{"name": name, "args": args, "id": f"c{n}"} for n, (name, args) in enumerate(calls)]
        reply = AIMessage("", tool_calls=requested)
        try:
            state = await graph.compile().ainvoke({"messages": [reply]}, context=context)
            self.messages = {m.tool_call_id: m for m in state["messages"] if isinstance(m, ToolMessage)}
        finally:
            await asyncio.sleep(0)
            self.receipts = {receipt.call_id or "": receipt for receipt in context.receipts.all()}
        return self


@tool
async def echo(text: str) -> str:
    """Return the text."""
    return text


@tool
async def sleeper(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"


@tool
async def raiser(text: str) -> str:
    """Raise."""
    raise RuntimeError(text)


def test_an_executed_call_is_vouched_for_by_the_digest_of_the_text_that_the_model_got(
    on_virtual_clock: OnVirtualClock[Round],
) -> None:
    seen = on_virtual_clock(Round([echo]).run(("echo", {"text": f"\x1b[31mred\x1b[0m {SECRET}\r\n"})))
    message, receipt = seen.messages["c0"], seen.receipts["c0"]
    assert (message.content, message.status, message.name) == ("red [masked]\n", "success", "echo")
    assert receipt.outcome is CallOutcome.EXECUTED
    assert receipt.text_sha256 == hashlib.sha256(message.text.encode()).hexdigest()
    assert (receipt.text_chars, receipt.bound_s, receipt.bound_source) == (13, 3.0, "default")
    assert (receipt.source_gap, receipt.reason, receipt.error_type, receipt.late) == (None, None, None, None)
    assert receipt.args == {"text": "red [masked]\n"}
    assert receipt.duration_sec == 0.0


def test_a_slow_call_is_stopped_told_of_and_never_digested(on_virtual_clock: OnVirtualClock[Round]) -> None:
    seen = on_virtual_clock(Round([sleeper]).run(("sleeper", {"seconds": 8.0})))
    message, receipt = seen.messages["c0"], seen.receipts["c0"]
    assert message.status == "error"
    assert message.text.startswith("⚠️ TOOL_TIMEOUT (sleeper): exceeded 3.0s limit.")
    assert "It was stopped" in message.text
    assert (receipt.outcome, receipt.source_gap) == (CallOutcome.ERROR, SourceGap.STOPPED)
    assert (receipt.duration_sec, receipt.text_sha256, receipt.text_chars) == (3.0, None, None)


def test_an_abandoned_call_is_said_to_run_on_and_its_late_value_is_recorded_beside_it(
    on_virtual_clock: OnVirtualClock[None],
) -> None:
    @tool
    async def stubborn() -> str:
        """Swallow the cancellation."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
        return f"late {SECRET}"

    async def check() -> None:
        round_ = await Round([stubborn]).run(("stubborn", {}))
        receipt = round_.receipts["c0"]
        assert "may still be running, and will not be read" in round_.messages["c0"].text
        assert (receipt.source_gap, receipt.duration_sec, receipt.late) == (SourceGap.ABANDONED, 3.25, None)
        await asyncio.sleep(10)
        (event,) = [event for event in round_.events if event.kind == "tool_call_late"]
        after: Any = event.facts["receipt"]
        assert (after.late.chars, after.late.text_sha256) == (13, hashlib.sha256(b"late [masked]").hexdigest())
        assert (after.outcome, after.text_sha256) == (CallOutcome.ERROR, None)

    on_virtual_clock(check())


def test_siblings_are_untouched_by_one_that_raises_and_one_that_hangs(on_virtual_clock: OnVirtualClock[Round]) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("echo", {"text": "quick"}),
        ("raiser", {"text": f"at https://host/?key={SECRET}"}),
        ("sleeper", {"seconds": 99.0}),
    ]
    seen = on_virtual_clock(Round([echo, raiser, sleeper]).run(*calls))
    assert [seen.receipts[f"c{n}"].outcome for n in range(3)] == ["executed", "error", "error"]
    assert seen.messages["c0"].text == "quick"
    assert seen.messages["c1"].text == "raiser failed: RuntimeError: at https://host/?key=[masked]"
    assert (seen.receipts["c1"].error_type, seen.receipts["c1"].source_gap) == ("RuntimeError", None)
    assert seen.receipts["c2"].source_gap is SourceGap.STOPPED


@pytest.mark.parametrize(
    "error", [TimeoutError("upstream"), ToolException("no"), ValueError("x"), StopAsyncIteration()]
)
def test_a_tools_own_error_is_a_failure_and_no_timeout(
    error: Exception, on_virtual_clock: OnVirtualClock[Round]
) -> None:
    @tool
    async def own() -> str:
        """Raise."""
        raise error

    seen = on_virtual_clock(Round([own]).run(("own", {})))
    assert "TOOL_TIMEOUT" not in seen.messages["c0"].text
    assert seen.receipts["c0"].outcome is CallOutcome.ERROR
    assert seen.receipts["c0"].source_gap is None


def test_an_error_that_only_the_body_could_raise_is_not_taken_for_bad_arguments(
    on_virtual_clock: OnVirtualClock[Round],
) -> None:
    @tool
    async def own() -> str:
        """Fail a validation inside."""
        return str(echo.args_schema.model_validate({}))  # type: ignore[union-attr]

    seen = on_virtual_clock(Round([own]).run(("own", {})))
    assert (seen.receipts["c0"].outcome, seen.receipts["c0"].error_type) == (CallOutcome.ERROR, "ValidationError")


def test_bad_arguments_are_refused_with_what_is_accepted(on_virtual_clock: OnVirtualClock[Round]) -> None:
    seen = on_virtual_clock(Round([sleeper]).run(("sleeper", {"seconds": f"soon {SECRET}"})))
    message, receipt = seen.messages["c0"], seen.receipts["c0"]
    assert message.status == "error"
    assert message.text.startswith("sleeper was not run: ")
    assert message.text.endswith("sleeper accepts: seconds: number.")
    assert SECRET not in message.text + str(receipt)
    assert receipt.outcome is CallOutcome.REFUSED
    assert (receipt.started_at, receipt.duration_sec, receipt.bound_s) == (None, None, None)


def test_an_unknown_tool_is_refused_by_its_escaped_name(on_virtual_clock: OnVirtualClock[Round]) -> None:
    seen = on_virtual_clock(Round([echo]).run(("nope\x1b[31m", {})))
    message, receipt = seen.messages["c0"], seen.receipts["c0"]
    assert message.text == "There is no tool nope\\x1b[31m. The tools are: echo."
    assert (message.name, receipt.tool, receipt.outcome) == ("nope\\x1b[31m", "nope\\x1b[31m", CallOutcome.REFUSED)


def test_at_most_sixteen_calls_of_one_reply_run(on_virtual_clock: OnVirtualClock[Round]) -> None:
    seen = on_virtual_clock(Round([echo]).run(*[("echo", {"text": str(n)}) for n in range(20)]))
    outcomes = [receipt.outcome for receipt in seen.receipts.values()]
    assert outcomes == [CallOutcome.EXECUTED] * 16 + [CallOutcome.REFUSED] * 4
    assert "at most 16 calls" in seen.messages["c19"].text


def test_a_call_with_no_time_left_is_withheld(on_virtual_clock: OnVirtualClock[Round]) -> None:
    async def check() -> Round:
        with deadline_scope(0.0):
            return await Round([echo]).run(("echo", {"text": "x"}))

    seen = on_virtual_clock(check())
    assert seen.receipts["c0"].outcome is CallOutcome.WITHHELD
    assert "was not started" in seen.messages["c0"].text


def test_a_deadline_above_narrows_a_call_and_is_named_as_its_source(on_virtual_clock: OnVirtualClock[Round]) -> None:
    async def check() -> Round:
        with deadline_scope(1.23456):
            return await Round([sleeper]).run(("sleeper", {"seconds": 9.0}))

    seen = on_virtual_clock(check())
    receipt = seen.receipts["c0"]
    assert (receipt.bound_s, receipt.bound_source) == (1.23456, "deadline")
    told = re.search(r"exceeded (\S+)s limit", seen.messages["c0"].text)
    assert told is not None
    assert float(told[1]) == 1.234  # rounded down, never above the bound


def test_a_call_may_bring_its_own_limit_and_reports_it_itself(on_virtual_clock: OnVirtualClock[Round]) -> None:
    @tool
    async def limiting(timeout_s: float) -> str:
        """Keep to its own limit."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(99)
        except TimeoutError:
            return "my own limit"
        return "never"

    seen = on_virtual_clock(Round([limiting]).run(("limiting", {"timeout_s": 5})))
    receipt = seen.receipts["c0"]
    assert (receipt.bound_s, receipt.bound_source, receipt.outcome) == (6.0, "argument", CallOutcome.EXECUTED)
    assert seen.messages["c0"].text == "my own limit"


def test_the_policy_is_asked_once_a_call_with_the_set_the_name_and_the_unmodified_arguments(
    on_virtual_clock: OnVirtualClock[Round],
) -> None:
    asked: list[tuple[str, str, object]] = []

    class Watched(ToolTimeouts):
        def resolve(self, tool_set: str, tool: str, args: Any) -> Any:
            asked.append((tool_set, tool, args))
            return super().resolve(tool_set, tool, args)

    on_virtual_clock(Round([echo], Watched()).run(("echo", {"text": "a\x1b[0m"}), ("echo", {"text": "b"})))
    assert asked == [("test", "echo", {"text": "a\x1b[0m"}), ("test", "echo", {"text": "b"})]


def test_long_text_is_cut_and_says_so(on_virtual_clock: OnVirtualClock[Round]) -> None:
    seen = on_virtual_clock(Round([echo]).run(("echo", {"text": "x" * 100_000})))
    text = seen.messages["c0"].text
    assert "76,000 of 100,000 characters cut here" in text
    assert len(text) < MAX_TOOL_TEXT + 100


def test_a_cut_from_above_leaves_honest_receipts(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        round_ = Round([sleeper, echo])
        task = asyncio.create_task(round_.run(("sleeper", {"seconds": 99.0}), ("echo", {"text": "x"})))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cut, quick = round_.receipts["c0"], round_.receipts["c1"]
        assert (cut.outcome, cut.source_gap, cut.duration_sec) == (CallOutcome.ERROR, SourceGap.STOPPED, 1.0)
        assert quick.outcome is CallOutcome.EXECUTED

    on_virtual_clock(check())


class SlowToStart(AsyncCallbackHandler):
    async def on_tool_start(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(60)


def test_a_call_that_is_cut_before_its_body_began_is_withheld(on_virtual_clock: OnVirtualClock[None]) -> None:
    slow = echo.model_copy(update={"callbacks": [SlowToStart()]})

    async def check() -> None:
        round_ = Round([slow])
        task = asyncio.create_task(round_.run(("echo", {"text": "x"})))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        receipt = round_.receipts["c0"]
        assert (receipt.outcome, receipt.reason) == (CallOutcome.WITHHELD, "the run ended before its turn")
        assert (receipt.started_at, receipt.source_gap, receipt.bound_s) == (None, None, None)
        told = (await Round([slow]).run(("echo", {"text": "x"}))).messages["c0"].text
        assert told.startswith("echo was not run: its time was up before it began")

    on_virtual_clock(check())


def test_unparsable_calls_are_answered_by_texts_that_stand_alone() -> None:
    run = Run()
    calls = [
        {"name": "echo", "args": "{broken", "id": "a", "error": None},
        {"name": "nope\x07", "args": None, "id": "b", "error": None},
    ]
    answers = refuse_unparsable(run, calls, [echo])
    assert [answer.text for answer in answers] == [
        "echo was not run: its arguments are not a JSON object. It accepts: text: string.",
        "nope\\x07 was not run: its arguments are not a JSON object. The tools are: echo.",
    ]
    assert [receipt.outcome for receipt in run.receipts.all()] == [CallOutcome.REFUSED] * 2
    assert run.receipts.all()[0].args == {"unparsed": "{broken"}


class NoGrace(Host):
    """A host under which calls are abandoned at their bounds, which it narrows to `left` seconds."""

    grace_s = 0.0

    def __init__(self, left: float | None = None) -> None:
        self.left = left

    def time_left(self) -> float | None:
        return self.left


@pytest.mark.parametrize(("left", "bound_s"), [(None, 3.0), (1.0, 1.0), (0.0, 0.0)])
def test_without_grace_a_call_is_abandoned_at_its_bound_even_if_it_would_have_stopped(
    left: float | None, bound_s: float, on_virtual_clock: OnVirtualClock[Round]
) -> None:
    seen = on_virtual_clock(Round([sleeper], host=NoGrace(left)).run(("sleeper", {"seconds": 99.0})))
    message, receipt = seen.messages["c0"], seen.receipts["c0"]
    assert message.text.startswith(f"⚠️ TOOL_TIMEOUT (sleeper): exceeded {bound_s}s limit. It may still be running")
    assert (receipt.outcome, receipt.source_gap) == (CallOutcome.ERROR, SourceGap.ABANDONED)
    assert (receipt.bound_s, receipt.duration_sec, receipt.text_sha256) == (bound_s, bound_s, None)


def test_without_grace_a_held_thread_is_walked_away_from_at_once_and_what_it_returns_is_late(
    on_virtual_clock: OnVirtualClock[None],
) -> None:
    held, threads = threading.Event(), list[threading.Thread]()

    @tool
    def wedged() -> str:
        """Wait to be let go."""
        threads.append(threading.current_thread())
        held.wait(30)
        return "too late"

    async def check() -> None:
        round_ = await Round([wedged], host=NoGrace()).run(("wedged", {}))
        receipt = round_.receipts["c0"]
        assert (receipt.source_gap, receipt.duration_sec, receipt.late) == (SourceGap.ABANDONED, 3.0, None)
        held.set()
        threads[0].join(30)
        await asyncio.sleep(0)  # the turn in which the thread's end is heard of
        await asyncio.sleep(0)
        (event,) = [event for event in round_.events if event.kind == "tool_call_late"]
        late: Any = event.facts["receipt"]
        assert (late.outcome, late.text_sha256, late.late.chars) == (CallOutcome.ERROR, None, len("too late"))

    on_virtual_clock(check())


class Picky(Host):
    """A host that withholds what asks for too much, and gives everything else in capitals."""

    def __init__(self) -> None:
        self.delivered: list[str] = []
        self.seen: list[Any] = []

    def withhold(self, run: Run, receipt: Receipt, messages: Sequence[Any]) -> str | None:
        self.seen = list(messages)
        run.receipts.update(receipt, more={"asked": len(receipt.args), "shouted": False})
        return "it asks for too much" if receipt.args.get("text") == "everything" else None

    def deliver(self, run: Run, receipt: Receipt, result: ToolMessage) -> Delivery:
        self.delivered.append(result.text)
        return Delivery(text=result.text.upper(), more={"shouted": True})


def test_what_the_host_withholds_never_runs_and_what_it_delivers_is_what_the_receipt_vouches_for(
    on_virtual_clock: OnVirtualClock[Round],
) -> None:
    host = Picky()
    seen = on_virtual_clock(Round([echo], host=host).run(("echo", {"text": "everything"}), ("echo", {"text": "abc"})))
    message, receipt = seen.messages["c0"], seen.receipts["c0"]
    assert (message.text, message.status) == ("echo was not run: it asks for too much.", "error")
    assert (receipt.outcome, receipt.reason, receipt.started_at) == ("withheld", "it asks for too much", None)
    assert host.delivered == ["abc"]
    assert [call["id"] for call in host.seen[-1].tool_calls] == ["c0", "c1"]
    message, receipt = seen.messages["c1"], seen.receipts["c1"]
    assert (message.text, message.status, message.name) == ("ABC", "success", "echo")
    assert (receipt.text_sha256, receipt.text_chars) == (hashlib.sha256(b"ABC").hexdigest(), 3)
    assert receipt.more == {"asked": 1, "shouted": True}


def test_only_what_returned_within_its_bound_is_handed_to_the_host(on_virtual_clock: OnVirtualClock[Round]) -> None:
    host = Picky()
    calls: list[tuple[str, dict[str, Any]]] = [("raiser", {"text": "x"}), ("sleeper", {"seconds": 99.0}), ("none", {})]
    seen = on_virtual_clock(Round([raiser, sleeper], host=host).run(*calls))
    assert host.delivered == []
    assert [receipt.outcome for receipt in seen.receipts.values()] == ["error", "error", "refused"]
    assert seen.receipts["c0"].more == {"asked": 1, "shouted": False}
