"""Every kind of tool, and whatever one returns, is bounded and receipted alike."""

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackManagerForToolRun, CallbackManagerForToolRun
from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, Tool, tool
from langgraph.types import Command, interrupt
from pydantic import PrivateAttr

from bounded.deadlines import time_left
from bounded.outcomes import CallOutcome, SourceGap
from bounded.test_toolnode import SECRET, Round, sleeper
from bounded.timeouts import ToolTimeouts
from conftest import OnVirtualClock


@tool
def sync_echo(text: str) -> str:
    """Return the text from a thread."""
    return text


def test_a_tool_may_not_write_the_runs_state(on_virtual_clock: OnVirtualClock[Round]) -> None:
    @tool
    async def commander() -> Command[Any]:
        """Try."""
        return Command(update={"outcome": "answered", "messages": [ToolMessage("done", tool_call_id="c0")]})

    seen = on_virtual_clock(Round([commander]).run(("commander", {})))
    assert seen.receipts["c0"].outcome is CallOutcome.ERROR
    assert seen.messages["c0"].text == "commander failed: TypeError: a tool returns text, not Command"


def test_a_body_can_tell_how_much_time_its_call_has_left(on_virtual_clock: OnVirtualClock[Round]) -> None:
    left: list[float | None] = []

    @tool
    async def asks() -> str:
        """Tell."""
        left.append(time_left())
        return "told"

    with_policy = Round([asks], timeouts=ToolTimeouts(default_s=2.5))
    on_virtual_clock(with_policy.run(("asks", {})))
    assert left == [2.5]


class Subclass(BaseTool):
    name: str = "subclass"
    description: str = "A tool with a body of its own."
    _times: int = PrivateAttr(default=1)

    def _run(self, text: str) -> str:
        return text.upper() * self._times


class WithManager(BaseTool):
    name: str = "subclass"
    description: str = "A tool that wants what langchain-core injects."

    def _run(self, text: str, config: RunnableConfig, run_manager: CallbackManagerForToolRun) -> str:
        assert isinstance(run_manager, CallbackManagerForToolRun)
        assert "callbacks" in config
        return text.upper()


class AsyncOnly(BaseTool):
    name: str = "subclass"
    description: str = "A tool without a sync body."

    def _run(self, text: str) -> str:
        raise AssertionError("the sync body ran, although there is an async one")

    async def _arun(self, text: str, run_manager: AsyncCallbackManagerForToolRun | None = None) -> str:
        assert run_manager is not None
        return text.upper()


async def _async_upper(text: str) -> str:
    return text.upper()


@pytest.mark.parametrize(
    "made",
    [
        Subclass(),
        WithManager(),
        AsyncOnly(),
        Tool(name="subclass", description="d", func=str.upper),
        StructuredTool.from_function(func=lambda text: text.upper(), name="subclass", description="d"),
        StructuredTool.from_function(coroutine=_async_upper, name="subclass", description="d"),
    ],
)
async def test_every_kind_of_tool_is_bounded_alike(made: BaseTool) -> None:
    argument = next(iter(made.args))
    seen = await Round([made]).run(("subclass", {argument: "loud"}))
    assert seen.messages["c0"].text == "LOUD"
    assert seen.receipts["c0"].outcome is CallOutcome.EXECUTED


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "properties": {"text": True}}])
async def test_a_tool_with_a_json_schema_is_bounded_alike(schema: dict[str, Any]) -> None:
    async def body(**arguments: Any) -> str:
        return f"{len(arguments)} arguments"

    made = StructuredTool(name="schema", description="d", args_schema=schema, coroutine=body)
    seen = await Round([made]).run(("schema", {"text": "x"} if "properties" in schema else {}))
    assert seen.receipts["c0"].outcome is CallOutcome.EXECUTED
    assert seen.messages["c0"].text.endswith(" arguments")


def test_an_error_that_cannot_be_shown_is_a_failure_all_the_same(on_virtual_clock: OnVirtualClock[Round]) -> None:
    class Unshowable(Exception):
        def __str__(self) -> str:
            raise RuntimeError(SECRET)

    @tool
    async def own() -> str:
        """Raise."""
        raise Unshowable

    seen = on_virtual_clock(Round([own]).run(("own", {})))
    assert seen.messages["c0"].text == "own failed: Unshowable: an error that cannot be shown (RuntimeError)"


def test_a_value_that_is_slow_to_become_text_is_late(on_virtual_clock: OnVirtualClock[Round]) -> None:
    class Slow:
        def __str__(self) -> str:
            loop: Any = asyncio.get_running_loop()
            loop._virtual.clock += 5.0  # as time.sleep does
            return "late"

    @tool
    async def own() -> Any:
        """Return it."""
        return Slow()

    seen = on_virtual_clock(Round([own]).run(("own", {})))
    assert (seen.receipts["c0"].source_gap, seen.receipts["c0"].text_sha256) == (SourceGap.STOPPED, None)


def test_a_message_of_the_tools_own_answers_its_own_call_and_no_other(on_virtual_clock: OnVirtualClock[Round]) -> None:
    @tool
    async def own() -> Any:
        """Answer another call."""
        return ToolMessage("text", tool_call_id="another", name="x\x1b[31m", additional_kwargs={"k": SECRET})

    message = on_virtual_clock(Round([own]).run(("own", {}))).messages["c0"]
    assert (message.content, message.name, message.additional_kwargs) == ("text", "own", {})


def test_a_tool_that_interrupts_the_graph_has_failed_alone(
    on_virtual_clock: OnVirtualClock[Round],
) -> None:
    @tool
    async def own() -> str:
        """Pause the graph."""
        return str(interrupt("may I?"))

    seen = on_virtual_clock(Round([own, sleeper]).run(("own", {}), ("sleeper", {"seconds": 1.0})))
    assert [receipt.outcome for receipt in seen.receipts.values()] == [CallOutcome.ERROR, CallOutcome.EXECUTED]
    assert seen.receipts["c0"].error_type is not None


async def test_a_sync_tool_runs_and_keeps_its_name() -> None:
    seen = await Round([sync_echo]).run(("sync_echo", {"text": "hi"}))
    assert (seen.messages["c0"].text, seen.messages["c0"].name) == ("hi", "sync_echo")


class OverridesArun(StructuredTool):
    async def _arun(self, *args: Any, **kwargs: Any) -> str:
        return "LOUD"


class OverridesAinvoke(AsyncOnly):
    async def ainvoke(self, *args: Any, **kwargs: Any) -> str:
        return "past every bound"


async def test_a_subclass_of_a_generic_tool_does_not_run_past_its_guard() -> None:
    made = OverridesArun.from_function(func=lambda text: "never", name="subclass", description="d")
    seen = await Round([made]).run(("subclass", {"text": "x"}))
    assert (seen.messages["c0"].text, seen.receipts["c0"].outcome) == ("LOUD", CallOutcome.EXECUTED)


async def test_a_tool_that_could_run_past_its_guard_is_refused_when_the_node_is_built() -> None:
    with pytest.raises(TypeError, match="only a body in _run or _arun can be bounded"):
        await Round([OverridesAinvoke()]).run(("subclass", {"text": "x"}))


async def test_an_async_function_in_the_sync_place_has_failed() -> None:
    made = StructuredTool.from_function(func=_async_upper, name="subclass", description="d")
    seen = await Round([made]).run(("subclass", {"text": "x"}))
    assert seen.messages["c0"].text.startswith("subclass failed: TypeError: a sync function returned a coroutine")
