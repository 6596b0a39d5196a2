"""The native ToolNode whose every call is bounded and has a receipt.

    node = bounded_tool_node([fetch_job_log, ...], timeouts=ToolTimeouts(), tool_set="ci")

The graph that holds the node is run with a `Run` as LangGraph's `context`.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.messages.tool import ToolOutputMixin
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langgraph.prebuilt import ToolNode
from langgraph.prebuilt.tool_node import ToolCallRequest, ToolInvocationError
from langgraph.types import Command

from bounded.calls import GRACE_S, Call, Ending, bounded_call, check_workers, guarded, in_daemon_thread
from bounded.deadlines import deadline_scope, now, time_left
from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.receipts import BEFORE_ITS_TURN, Late, Receipt
from bounded.run import Run, enter_run
from bounded.text import digest, fit, safe_arguments, safe_name, said_by
from bounded.timeouts import TIMEOUT_ARGUMENT, Bound, ToolTimeouts

MAX_CALLS_PER_REPLY = 16
MAX_TOOL_TEXT = 24_000
MAX_CALL_REASON = 400
RECEIPTED = "receipt"  # in a tool's artifact: facts that its receipt says besides
_NEVER_BEGAN: Mapping[str, None] = dict.fromkeys(
    ("started_at", "duration_sec", "bound_s", "bound_source", "source_gap")
)

Result = ToolMessage | Command[Any]
Execute = Callable[[ToolCallRequest], Awaitable[Result]]
Changes = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What the model is given of a result, and what its receipt says besides."""

    text: str
    more: Mapping[str, object] = field(default_factory=dict)


class Host:
    """What stands around the sends and calls of a graph; a surface with rules of its own has a host of its own.

    Attributes:
        grace_s: seconds that a call has at its bound to stop in; with 0 it is abandoned at once.
    """

    grace_s = GRACE_S

    def before_send(self, run: Run, messages: Sequence[Any]) -> list[Any]:
        """What is said to the model besides `messages`, before it is asked; the run may be ended here as well."""
        return []

    def said_nothing(self, run: Run, finish_reason: str | None) -> list[Any]:
        """End the run for a reply without text and calls, or return what the model is then told."""
        run.end(Outcome.EMPTY_ANSWER, f"the model said nothing; finish reason: {finish_reason or 'not given'}")
        return []

    def time_left(self) -> float | None:
        """Seconds by which a call's bound is narrowed; None for no limit."""
        return time_left()

    def withhold(self, run: Run, receipt: Receipt, messages: Sequence[Any]) -> str | None:
        """Why this call is not to be run, where it is not; `messages` end with the reply that asks for it."""
        return None

    def deliver(self, run: Run, receipt: Receipt, result: ToolMessage) -> Delivery:
        """What the model is given of a call that returned within its bound."""
        told = result.artifact.get(RECEIPTED) if isinstance(result.artifact, dict) else None
        return Delivery(text=fit(result.text, MAX_TOOL_TEXT, run.secrets), more=told if isinstance(told, dict) else {})


class ToolCallEnded(ToolInvocationError):
    """What the model is told of a call that was not executed: ToolNode makes this its own error message."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.message = message


def bounded_tool_node(
    tools: Sequence[BaseTool], *, timeouts: ToolTimeouts, tool_set: str, host: Host | None = None
) -> ToolNode:
    """A native ToolNode, with its default error handling, over copies of the tools whose bodies run guarded.

    Raises:
        TypeError: a tool overrides what stands around its body.
    """
    limiting = frozenset(tool.name for tool in tools if TIMEOUT_ARGUMENT in _arguments(tool))
    policy = replace(timeouts, self_limiting=timeouts.self_limiting | limiting)
    host = host or Host()

    async def bounded_tool_call(request: ToolCallRequest, execute: Execute) -> Result:
        run: Run = request.runtime.context  # type: ignore[assignment]
        call = request.tool_call
        if isinstance(request.state, dict):
            run.resume_from(request.state)
        receipt = run.receipts.find(run.model_calls, call["id"] or "") or request_call(run, call)
        if request.tool is None:
            known = ", ".join(tool.name for tool in tools)
            text = refuse(run, receipt, f"There is no tool {receipt.tool}. The tools are: {known}.")
            # ToolNode would echo the name that the model made up as it is.
            return ToolMessage(text, name=receipt.tool, tool_call_id=call["id"], status="error")
        if receipt.index >= MAX_CALLS_PER_REPLY:
            limit = f"{receipt.tool} was not run: at most {MAX_CALLS_PER_REPLY} calls of one reply run."
            raise ToolCallEnded(refuse(run, receipt, limit))
        if why := host.withhold(run, receipt, _messages(request.state)):
            run.receipts.update(receipt, reason=why)
            raise ToolCallEnded(f"{receipt.tool} was not run: {why}.")
        bound = policy.resolve(tool_set, call["name"], call["args"]).narrowed(host.time_left())
        if bound.seconds == 0 and host.grace_s:
            raise ToolCallEnded(f"{receipt.tool} was not started: no time was left before the deadline.")
        return await _run_bounded(run, receipt, request, execute, bound, host)

    return ToolNode([_prepare(tool) for tool in tools], awrap_tool_call=bounded_tool_call)


def _messages(state: Any) -> Sequence[Any]:
    return state["messages"] if isinstance(state, dict) else ()


def request_call(run: Run, call: Mapping[str, Any]) -> Receipt:
    """Enter a requested call in the run's ledger, under the reply that the run is at."""
    args = call.get("args")
    shown = safe_arguments(args if isinstance(args, dict) else {"unparsed": args}, run.secrets)
    return run.receipts.request(
        turn=run.model_calls,
        call_id=call.get("id"),
        tool=safe_name(call.get("name"), run.secrets),
        args=shown,
        secrets=run.secrets,
    )


def refuse(run: Run, receipt: Receipt, reason: str) -> str:
    """Record that the call's body never began, and return what the model is told of it."""
    reason = fit(reason, MAX_CALL_REASON, run.secrets)
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
    kinds = {
        name: schema.get("type") if isinstance(schema, dict) else None for name, schema in _arguments(tool).items()
    }
    return ", ".join(f"{name}: {kind or 'any'}" for name, kind in kinds.items()) or "no arguments"


def _arguments(tool: BaseTool) -> Mapping[str, Any]:
    if isinstance(tool.args_schema, dict):  # a JSON Schema, which may leave out what it has none of
        return tool.args_schema.get("properties", {})  # type: ignore[no-any-return]
    return tool.args


async def _run_bounded(
    run: Run, receipt: Receipt, request: ToolCallRequest, execute: Execute, bound: Bound, host: Host
) -> Result:
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
        enter_run(run)
        with deadline_scope(bound.seconds):  # so that the body can tell what it still has
            return await execute(request)

    changes: Changes = {}
    task = asyncio.current_task()
    if task is not None:
        run.in_flight.add(task)
        task.add_done_callback(run.in_flight.discard)
    try:
        result = await bounded_call(
            call,
            work,
            bound_s=bound.seconds,
            on_late=lambda settled: _record_late(run, receipt, settled),
            grace_s=host.grace_s,
        )
        answer, changes = _judge(run, receipt, request, call, result, bound, host)
    except asyncio.CancelledError:
        changes = {"source_gap": _gap(call)}
        if not call.began:
            changes = {**_NEVER_BEGAN, "outcome": CallOutcome.WITHHELD, "reason": BEFORE_ITS_TURN}
        raise
    finally:
        changes = {"duration_sec": round(now() - started, 6), **changes}  # unless it never began
        run.emit("tool_call_ended", receipt=run.receipts.update(receipt, **changes))
    if isinstance(answer, Exception):
        raise answer
    return answer


def _judge(
    run: Run, receipt: Receipt, request: ToolCallRequest, call: Call, result: Result | None, bound: Bound, host: Host
) -> tuple[ToolMessage | ToolCallEnded, Changes]:
    """What the model is told, and what the receipt says: from how the call ended, never from reading its text."""
    name = safe_name(request.tool_call["name"], run.secrets)
    if not call.began and (call.ending is Ending.SETTLED or host.grace_s):
        fault = "its time was up before it began" if call.failure is None else said_by(call.failure)
        if isinstance(result, ToolMessage):  # ToolNode's own words about the arguments
            fault = result.text
        reason = fit(" ".join(fault.split()), MAX_CALL_REASON, run.secrets)
        accepts = f" {name} accepts: {accepted(request.tool)}." if request.tool is not None else ""
        told = ToolCallEnded(f"{name} was not run: {reason}{accepts}")
        return told, {**_NEVER_BEGAN, "outcome": CallOutcome.REFUSED, "reason": reason}
    if call.ending is not Ending.SETTLED:
        text = _timeout_text(name, bound, call)
        return ToolCallEnded(text), {"source_gap": _gap(call), "reason": text}
    if call.failure is not None or not isinstance(result, ToolMessage):
        failure = call.failure
        if failure is None:
            failure = TypeError(f"a tool returns text, not {type(result).__name__}")
        kind = safe_name(type(failure).__name__, run.secrets)
        reason = fit(f"{kind}: {said_by(failure)}", MAX_CALL_REASON, run.secrets)
        return ToolCallEnded(f"{name} failed: {reason}"), {"source_gap": None, "error_type": kind, "reason": reason}
    delivery = host.deliver(run, receipt, result)
    text = delivery.text
    credit = {"text_sha256": digest(text), "text_chars": len(text), "more": {**receipt.more, **delivery.more}}
    identity = request.tool_call["id"]
    if (result.content, result.name, result.tool_call_id) != (text, name, identity):
        kept = {"status": result.status, "artifact": result.artifact}
        result = ToolMessage(text, name=name, tool_call_id=identity, **kept)
    return result, {"outcome": CallOutcome.EXECUTED, "source_gap": None, "reason": None, **credit}


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
        late = Late(at=run.wall_time(), error_type=safe_name(type(value).__name__, run.secrets))
    elif isinstance(value, str):
        text = fit(value, MAX_TOOL_TEXT, run.secrets)
        late = Late(at=run.wall_time(), chars=len(text), text_sha256=digest(text))
    else:
        late = Late(at=run.wall_time())
    run.emit("tool_call_late", receipt=run.receipts.update(receipt, late=late))


def _prepare(tool: BaseTool) -> BaseTool:
    """A copy of the tool, of a class of its own in which the body runs guarded."""
    cls = type(tool)
    own = cls.ainvoke in (BaseTool.ainvoke, StructuredTool.ainvoke, Tool.ainvoke) and cls.arun is BaseTool.arun
    if not own:
        raise TypeError(f"the tool {tool.name} overrides ainvoke or arun: only a body in _run or _arun can be bounded")
    # Of the two generic classes the function decides whether there is an async body, elsewhere the class does.
    generic = cls._arun in (StructuredTool._arun, Tool._arun)
    is_async = tool.coroutine is not None if generic else cls._arun is not BaseTool._arun  # type: ignore[attr-defined]
    body = cls._arun if is_async else cls._run

    async def settle(*args: Any, **kwargs: Any) -> Any:
        return _text(await body(*args, **kwargs))

    def settle_sync(*args: Any, **kwargs: Any) -> Any:
        value = body(*args, **kwargs)
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError("a sync function returned a coroutine; give an async one as coroutine=")
        return _text(value)

    @functools.wraps(body)  # langchain-core reads from the signature what to inject
    async def guarded_arun(*args: Any, **kwargs: Any) -> Any:
        if is_async:
            return await guarded(lambda: settle(*args, **kwargs))
        check_workers()  # before the body: what it refuses never began
        if manager := kwargs.get("run_manager"):
            kwargs["run_manager"] = manager.get_sync()
        return await guarded(lambda: in_daemon_thread(lambda: settle_sync(*args, **kwargs)))

    # The generic classes' own `ainvoke` would take a sync function to the default executor.
    ours = {"_arun": guarded_arun, "ainvoke": BaseTool.ainvoke, "__module__": cls.__module__}
    prepared = copy.copy(tool)
    object.__setattr__(prepared, "__class__", type(cls.__name__, (cls,), ours))
    return prepared


def _text(value: Any) -> Any:
    """What langchain-core would make of a value later, made while the call's clock runs: `__str__` may be slow."""
    if value is None or isinstance(value, str | list | tuple | ToolOutputMixin):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
