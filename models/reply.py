"""What a reply shows: its text, why it ended, and whether its calls can be told apart."""

import itertools
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from langchain_core.messages import AIMessage

_ARGUMENTS = ("arguments", "parameters", "args")
_MAX_BRACES = 20


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
