"""How large the next send is, measured as what is sent: messages and tool schemas as serialised; what still fits."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langchain_core.tools import BaseTool

MAX_RESULT = 120_000
# With less room than this a call's result would say nothing.
MIN_ROOM = 256
_NOTICE_SHARE = 0.8
_NOTICE_MARGIN = 2_048


class Transcript:
    """The bound of one conversation, in characters of its JSON.

    Attributes:
        bound: what a send may have at the most.
        notice_at: the size from which on the model is told once that the end is near.
    """

    def __init__(self, bound: int, tools: "Sequence[BaseTool]") -> None:
        from langchain_core.utils.function_calling import convert_to_openai_tool

        self.bound = bound
        self.notice_at = min(int(bound * _NOTICE_SHARE), bound - _NOTICE_MARGIN)
        self._tools = [convert_to_openai_tool(tool) for tool in tools]

    def size(self, messages: "Sequence[BaseMessage]") -> int:
        """Characters of a send of these messages."""
        from langchain_core.messages import convert_to_openai_messages

        sent = {"messages": convert_to_openai_messages(list(messages)), "tools": self._tools}
        # What a provider gets back of its own: thinking, and signatures.
        own = [message.additional_kwargs for message in messages if message.additional_kwargs]
        blocks = [block for message in messages if isinstance(message.content, list) for block in message.content]
        own += [block["extras"] for block in blocks if isinstance(block, dict) and block.get("extras")]
        return len(_serialised(sent)) + (len(_serialised(own)) if own else 0)


def fitted(text: str, room: int) -> str:
    """The longest prefix of `text` that takes at most `room` characters in a send, and has at most `MAX_RESULT`."""
    low, high = 0, min(len(text), MAX_RESULT)
    if serialised_chars(text[:high]) <= room:
        return text[:high]
    while low < high:
        middle = (low + high + 1) // 2
        if serialised_chars(text[:middle]) <= room:
            low = middle
        else:
            high = middle - 1
    return text[:low]


def serialised_chars(text: str) -> int:
    """Characters that a text takes inside a send, without its quotes."""
    return len(_serialised(text)) - 2


def _serialised(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
