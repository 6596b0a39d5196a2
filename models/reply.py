"""What a reply shows, and what it means for its run: text, calls that can be told apart, why it ended."""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage

from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Run

_ARGUMENTS = ("arguments", "parameters", "args")
_MAX_BRACES = 20
# At most 16 calls of a reply run; from here on a reply is no reply, but an attempt to drown its reader.
MAX_REQUESTED_CALLS = 256


def weigh(run: Run, reply: AIMessage, before: Sequence[Any], limits: Limits, tools: Sequence[str]) -> bool:
    """Decide what a charged reply means for the run: usage, call ids, ending, budget, steps, in this order.

    `before` are the messages that it answers, `tools` the names of those that it could call. False where the reply says
    nothing at all: what that means is for the run's host.
    """
    calls = sum(1 for _ in requested_calls(reply))
    if not run.usage.known:
        run.end(Outcome.MISSING_USAGE, run.usage.fault)
    elif calls > MAX_REQUESTED_CALLS:
        run.end(Outcome.MODEL_ERROR, f"the model asked for {calls} calls in one reply")
    elif fault := call_id_fault(reply):
        run.end(Outcome.MODEL_ERROR, fault)
    elif calls:
        run.stop_if_spent(limits)
    elif not run.text:
        return False
    elif written := written_call(reply, tools):
        run.end(Outcome.ANSWERED, f"the model wrote a call of {written} as text; nothing was run for it")
    elif not any(message.type == "tool" for message in before):
        run.end(Outcome.ANSWERED, "no tool was called: the answer rests on nothing that was looked up")
    else:
        run.end(Outcome.ANSWERED)
    return True


def text(reply: AIMessage) -> str:
    """The reply's text. Content may be a list of blocks that is truthy and says nothing."""
    return str(reply.text).strip()


def finish_reason(reply: AIMessage) -> str | None:
    """Why the model stopped, in lower case, from whichever key the provider uses; None where it does not say.

    Two merged chunks may give a doubled word ("STOPSTOP"); what is not understood is handed on as it is.
    """
    for key in ("finish_reason", "done_reason", "stop_reason"):
        reason = reply.response_metadata.get(key)
        if isinstance(reason, str) and reason:
            half = reason[: len(reason) // 2]
            return (half if half * 2 == reason else reason).lower()
    return None


def requested_calls(reply: AIMessage) -> Iterator[dict[str, Any]]:
    """Every call that the reply asks for, those whose arguments do not parse last."""
    yield from (dict(call) for call in reply.tool_calls)
    yield from (dict(call) for call in reply.invalid_tool_calls)


def call_id_fault(reply: AIMessage) -> str | None:
    """Why the reply's calls cannot be answered one by one; None where each has an id of its own."""
    seen: set[str] = set()
    for call in requested_calls(reply):
        identity = call["id"]
        if not isinstance(identity, str) or not identity:
            return "the model sent a tool call without an id"
        if identity in seen:
            return "the model sent two tool calls with the same id"
        seen.add(identity)
    return None


def written_call(reply: AIMessage, tools: Collection[str]) -> str | None:
    """The tool that the reply's text calls in JSON instead of calling it, as small models do; None if it does not.

    Seen: the bare object, in a fence, in a tag, after prose, in doubled braces.
    """
    said = text(reply)
    for brace in itertools.islice(re.finditer(r"\{", said), _MAX_BRACES):
        try:
            written, _end = json.JSONDecoder().raw_decode(said, brace.start())
        except (ValueError, RecursionError):
            continue
        name = written.get("name")
        if isinstance(name, str) and name in tools and not written.keys().isdisjoint(_ARGUMENTS):
            return name
    return None
