"""The native ToolNode whose every call is bounded and has a receipt.

    node = bounded_tool_node([fetch_job_log, ...], timeouts=ToolTimeouts(), tool_set="ci")

The graph that holds the node is run with a `Run` as LangGraph's `context`.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt import ToolNode
from langgraph.prebuilt.tool_node import ToolCallRequest, ToolInvocationError
from langgraph.types import Command

from bounded.calls import Call, Ending, bounded_call, check_workers, guarded, in_daemon_thread
from bounded.deadlines import now, time_left
from bounded.outcomes import CallOutcome, SourceGap
from bounded.receipts import Late, Receipt
from bounded.run import Run
from bounded.text import cap, clean, digest, safe_arguments, safe_name
from bounded.timeouts import TIMEOUT_ARGUMENT, Bound, ToolTimeouts

MAX_CALLS_PER_REPLY = 16
MAX_TOOL_TEXT = 24_000
MAX_REASON = 400
_NEVER_BEGAN: Mapping[str, None] = dict.fromkeys(
    ("started_at", "duration_sec", "bound_s", "bound_source", "source_gap")
)

Result = ToolMessage | Command[Any]
Execute = Callable[[ToolCallRequest], Awaitable[Result]]
Changes = dict[str, Any]


class ToolCallEnded(ToolInvocationError):
    """What the model is told of a call that was not executed: ToolNode makes this its own error message."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.message = message


def bounded_tool_node(tools: Sequence[BaseTool], *, timeouts: ToolTimeouts, tool_set: str) -> ToolNode:
    """A native ToolNode, with its default error handling, over copies of the tools whose bodies run guarded."""
    limiting = frozenset(tool.name for tool in tools if TIMEOUT_ARGUMENT in tool.args)
    policy = replace(timeouts, self_limiting=timeouts.self_limiting | limiting)

    async def bounded_tool_call(request: ToolCallRequest, execute: Execute) -> Result:
        run: Run = request.runtime.context  # type: ignore[assignment]
        call = request.tool_call
        receipt = run.receipts.find(run.model_calls, call["id"] or "") or request_call(run, call)
        if request.tool is None:
            known = ", ".join(tool.name for tool in tools)
            text = refuse(run, receipt, f"There is no tool {receipt.tool}. The tools are: {known}.")
            # ToolNode would echo the name that the model made up as it is.
            return ToolMessage(text, name=receipt.tool, tool_call_id=call["id"], status="error")
        if receipt.index >= MAX_CALLS_PER_REPLY:
            limit = f"{receipt.tool} was not run: at most {MAX_CALLS_PER_REPLY} calls of one reply run."
            raise ToolCallEnded(refuse(run, receipt, limit))
        bound = policy.resolve(tool_set, call["name"], call["args"]).narrowed(time_left())
        if bound.seconds == 0:
            raise ToolCallEnded(f"{receipt.tool} was not started: no time was left before the deadline.")
        return await _run_bounded(run, receipt, request, execute, bound)

    return ToolNode([_prepare(tool) for tool in tools], awrap_tool_call=bounded_tool_call)


def request_call(run: Run, call: Mapping[str, Any]) -> Receipt:
    """Enter a requested call in the run's ledger, under the reply that the run is at."""
    args = call.get("args")
    shown = safe_arguments(args if isinstance(args, dict) else {"unparsed": args}, run.secrets)
    return run.receipts.request(
        turn=run.model_calls, call_id=call.get("id"), tool=safe_name(call.get("name"), run.secrets), args=shown
    )


def refuse(run: Run, receipt: Receipt, reason: str) -> str:
    """Record that the call's body never began, and return what the model is told of it."""
    reason = cap(clean(reason, run.secrets), MAX_REASON)
    receipt = run.receipts.update(receipt, outcome=CallOutcome.REFUSED, reason=reason)
    run.emit("tool_call_ended", receipt=receipt)
    return reason


def refuse_unparsable(run: Run, calls: Sequence[Mapping[str, Any]], tools: Sequence[BaseTool]) -> list[ToolMessage]:
    """Answer the calls of the current reply whose arguments do not parse.

    Each text stands on its own: an adapter may drop the call that it answers.
    """
    if not calls:
        return []  # before the schemas are made, which takes longer than a turn of the loop
    takes = {tool.name: f"It accepts: {accepted(tool)}." for tool in tools}
    known = f"The tools are: {', '.join(takes)}."
    answers = []
    for call in calls:
        receipt = run.receipts.find(run.model_calls, call["id"]) or request_call(run, call)
        fault = f"{receipt.tool} was not run: its arguments are not a JSON object."
        text = refuse(run, receipt, f"{fault} {takes.get(call['name'] or '', known)}")
        answers.append(ToolMessage(text, name=receipt.tool, tool_call_id=call["id"], status="error"))
    return answers


def accepted(tool: BaseTool) -> str:
    """What a tool takes, as its own schema says it: `pr: integer`."""
    return ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in tool.args.items()) or "no arguments"


async def _run_bounded(run: Run, receipt: Receipt, request: ToolCallRequest, execute: Execute, bound: Bound) -> Result:
    call, started = Call(), now()
    receipt = run.receipts.update(
        receipt,
        outcome=CallOutcome.ERROR,
        source_gap=SourceGap.ABANDONED,  # true from here on, should nothing below be reached any more
        reason="the run ended while it was running",
        bound_s=bound.seconds,
        bound_source=bound.source,
        started_at=run.anchor.wall_time(started),
    )
    run.emit("tool_call_started", receipt=receipt)

    async def work() -> Result:
        return await execute(request)

    changes: Changes = {}
    try:
        result = await bounded_call(
            call, work, bound_s=bound.seconds, on_late=lambda settled: _record_late(run, receipt, settled)
        )
        answer, changes = _judge(run, request, call, result, bound)
    except asyncio.CancelledError:
        changes = {"source_gap": _gap(call)} if call.began else {**_NEVER_BEGAN, "outcome": CallOutcome.WITHHELD}
        raise
    finally:
        changes = {"duration_sec": round(now() - started, 6), **changes}  # unless it never began
        run.emit("tool_call_ended", receipt=run.receipts.update(receipt, **changes))
    if isinstance(answer, Exception):
        raise answer
    return answer


def _judge(
    run: Run, request: ToolCallRequest, call: Call, result: Result | None, bound: Bound
) -> tuple[ToolMessage | Exception, Changes]:
    """What the model is told, and what the receipt says: from how the call ended, never from reading its text."""
    name = safe_name(request.tool_call["name"], run.secrets)
    if not call.began:
        fault = call.failure or (result.text if isinstance(result, ToolMessage) else "its time was up before it began")
        reason = cap(" ".join(clean(str(fault), run.secrets).split()), MAX_REASON)
        accepts = f" {name} accepts: {accepted(request.tool)}." if request.tool is not None else ""
        told = ToolCallEnded(f"{name} was not run: {reason}{accepts}")
        return told, {**_NEVER_BEGAN, "outcome": CallOutcome.REFUSED, "reason": reason}
    if call.ending is not Ending.SETTLED:
        text = _timeout_text(name, bound, call)
        return ToolCallEnded(text), {"source_gap": _gap(call), "reason": text}
    if isinstance(call.failure, GraphBubbleUp):  # LangGraph's own interrupt(): the call is made again on resuming
        return call.failure, {**_NEVER_BEGAN, "outcome": CallOutcome.WITHHELD, "reason": "the tool paused the run"}
    if call.failure is not None or not isinstance(result, ToolMessage):
        failure = call.failure or TypeError(f"a tool returns text, not {type(result).__name__}")
        reason = cap(clean(f"{type(failure).__name__}: {failure}", run.secrets), MAX_REASON)
        changes = {"source_gap": None, "error_type": type(failure).__name__, "reason": reason}
        return ToolCallEnded(f"{name} failed: {reason}"), changes
    text = cap(clean(result.text, run.secrets), MAX_TOOL_TEXT)
    credit = {"text_sha256": digest(text), "text_chars": len(text)}
    message = result if result.content == text else result.model_copy(update={"content": text})
    return message, {"outcome": CallOutcome.EXECUTED, "source_gap": None, "reason": None, **credit}


def _timeout_text(name: str, bound: Bound, call: Call) -> str:
    # Rounded down: the model and whoever parses this must not read a limit above the real one.
    seconds = 0.0 if bound.seconds is None else math.floor(bound.seconds * 1000) / 1000
    what = "It was stopped" if call.ending is Ending.STOPPED else "It may still be running, and will not be read"
    whose = "the run's deadline" if bound.source == "deadline" else "this program's own"
    # A small model takes a limit of ours for the fault it was asked about, unless it is told otherwise.
    return (
        f"⚠️ TOOL_TIMEOUT ({name}): exceeded {seconds}s limit. {what}: there is no result."
        f" The limit is {whose} and says nothing about what was asked for."
    )


def _gap(call: Call) -> SourceGap:
    return SourceGap.STOPPED if call.ending is Ending.STOPPED else SourceGap.ABANDONED


def _record_late(run: Run, receipt: Receipt, settled: object) -> None:
    value = settled.text if isinstance(settled, ToolMessage) else settled
    if isinstance(value, BaseException):
        late = Late(at=run.wall_time(), error_type=type(value).__name__)
    elif isinstance(value, str):
        text = clean(value, run.secrets)
        late = Late(at=run.wall_time(), chars=len(text), text_sha256=digest(text))
    else:
        late = Late(at=run.wall_time())
    run.emit("tool_call_late", receipt=run.receipts.update(receipt, late=late))


def _prepare(tool: BaseTool) -> BaseTool:
    plain = type(tool) in (StructuredTool, Tool)
    coroutine = getattr(tool, "coroutine", None) if plain else tool._arun if _overrides_arun(tool) else None
    body = coroutine or (getattr(tool, "func", None) if plain else tool._run)
    if body is None:
        raise TypeError(f"the tool {tool.name} has no body")

    @functools.wraps(body)
    async def run(*args: Any, **kwargs: Any) -> Any:
        if coroutine is not None or inspect.iscoroutinefunction(body):
            return await guarded(lambda: body(*args, **kwargs))
        check_workers()  # before the body: what it refuses never began
        return await guarded(lambda: in_daemon_thread(lambda: body(*args, **kwargs)))

    if plain:
        return tool.model_copy(update={"func": None, "coroutine": run})
    same = ("name", "description", "return_direct", "response_format", "tags", "metadata")
    fields = {field: getattr(tool, field) for field in same}
    return StructuredTool(args_schema=tool.args_schema or tool.get_input_schema(), coroutine=run, **fields)


def _overrides_arun(tool: BaseTool) -> bool:
    return type(tool)._arun is not BaseTool._arun
