"""A model that replays replies from a JSON file: for tests, demonstrations and bug reports. It is no language model.

The file is a list of objects, one a reply; every key is optional:

    content             text, or a list of blocks
    tool_calls          [{"name": ..., "args": {...}, "id": ...}]
    invalid_tool_calls  [{"name": ..., "args": "text", "id": ..., "error": ...}]
    usage_metadata      any JSON at all, handed over as it is; absent means none
    response_metadata   an object
    delay_s             seconds before the reply
    error               text: the call fails with it
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from pydantic import PrivateAttr, ValidationError

from models.embedded import EmbeddedModel
from models.factory import SetUpMissing

_KEYS = frozenset(
    {"content", "tool_calls", "invalid_tool_calls", "usage_metadata", "response_metadata", "delay_s", "error"}
)
_CALL_KEYS = frozenset({"name", "args", "id", "error", "type"})


class ScriptedFailure(Exception):
    """A reply's `error`, or a list that ran out."""


class ScriptedModel(EmbeddedModel):
    """Replays `replies` in order, each once; a list that runs out is an error."""

    replies: list[dict[str, Any]]
    source: str = "the script"
    _next: int = PrivateAttr(default=0)

    @classmethod
    def from_file(cls, path: str) -> "ScriptedModel":
        """Read a script.

        Raises:
            SetUpMissing: the file cannot be read or is no list of replies; the message names the reply and the key.
        """
        if not path:
            raise SetUpMissing("scripted: needs a file, for example: scripted:replies.json")
        try:
            replies = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else f"not JSON: {exc}"
            raise SetUpMissing(f"scripted:{path} cannot be read ({why}); it must be a JSON list of replies") from exc
        if not isinstance(replies, list):
            raise SetUpMissing(f"scripted:{path} must hold a JSON list of replies, not {type(replies).__name__}")
        for number, reply in enumerate(replies, 1):
            if fault := _fault(reply):
                raise SetUpMissing(f"scripted:{path}, reply {number}: {fault}")
        return cls(replies=replies, source=path)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    async def answer(self, messages: list[BaseMessage]) -> AIMessage:
        """The next reply of the script, whatever the messages are.

        Raises:
            ScriptedFailure: the script says so, or has run out.
        """
        if self._next >= len(self.replies):
            raise ScriptedFailure(f"{self.source} ran out: one reply more than its {len(self.replies)} was asked for")
        reply = self.replies[self._next]
        self._next += 1
        if delay := reply.get("delay_s"):
            await asyncio.sleep(delay)
        if "error" in reply:
            raise ScriptedFailure(str(reply["error"]))
        return _message(reply)


def _message(reply: dict[str, Any]) -> AIMessage:
    message = AIMessage(
        content=reply.get("content", ""),
        tool_calls=[{"args": {}, **call} for call in reply.get("tool_calls", [])],
        invalid_tool_calls=[{"error": None, **call} for call in reply.get("invalid_tool_calls", [])],
        response_metadata=reply.get("response_metadata", {}),
    )
    # Assigned, not constructed: construction would coerce true to 1 and 7.0 to 7.
    message.usage_metadata = reply.get("usage_metadata")
    return message


def _fault(reply: object) -> str | None:
    if not isinstance(reply, dict):
        return f"must be an object, not {type(reply).__name__}"
    if unknown := sorted(set(reply) - _KEYS):
        return f"unknown key {unknown[0]!r}; the keys are {', '.join(sorted(_KEYS))}"
    delay = reply.get("delay_s", 0)
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < float("inf"):
        return f"delay_s must be a number of seconds, not {delay!r}"
    for key in ("tool_calls", "invalid_tool_calls"):
        calls = reply.get(key, [])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return f"{key} must be a list of objects"
        for place, call in enumerate(calls, 1):
            if missing := [field for field in ("name", "id") if field not in call]:
                return f"{key}, call {place}: {missing[0]} is missing (it may be null)"
            if unknown := sorted(set(call) - _CALL_KEYS):
                return f"{key}, call {place}: unknown key {unknown[0]!r}"
    try:
        _message(reply)
    except ValidationError as exc:
        return f"{exc.errors()[0]['loc'][0]}: {exc.errors()[0]['msg']}"
    except (TypeError, ValueError) as exc:
        return str(exc)
    return None
