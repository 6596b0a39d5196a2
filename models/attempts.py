"""One request to one model within its bound, and what it shows: no usable response, a budget too small, or neither.

A probe and the pool share this. Nothing here reads the text of a reply or of an error: a reply that has text has it,
and a failure is known by its class and its HTTP status alone.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from bounded.calls import Call, Ending, OnLate, bounded_call, guarded
from bounded.deadlines import now
from bounded.lookups import own_lookups

if TYPE_CHECKING:
    from langchain_core.messages import AIMessage, BaseMessage

# How providers say that the budget ended a reply, in lower case: Ollama and OpenAI, Gemini and Anthropic, the OpenAI
# Responses API, gateways that hand on a parameter's name, Mistral.
LENGTH_LIKE = frozenset(
    {"length", "max_tokens", "max_output_tokens", "max_completion_tokens", "token_limit", "model_length"}
)
UNKNOWN = "unknown"
PROVIDER_ERROR = "provider_error"

_WORD = re.compile(r"\A[a-z_]{1,32}\Z")
_IDENTIFIER = re.compile(r"\A[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_MAY_HAVE_SERVED = frozenset({408, 499, 502, 504})
_OF_GATEWAYS = range(520, 600)  # in no standard: each gateway has its own meaning for these
_NOT_REACHED = frozenset({"ConnectError", "ConnectTimeout", "ConnectionRefusedError", "SetUpMissing"})
_ON_THE_WAY = frozenset({"TransportError", "APIConnectionError", "ConnectionError", "TimeoutError"})
_statuses: ContextVar[list[int] | None] = ContextVar("statuses", default=None)


class Trigger(StrEnum):
    """What an attempt without a usable answer shows."""

    NO_RESPONSE = "A"  # timeout, connection failure, a status that is not 2xx, an exception
    BUDGET = "B"  # a response that has no text and shows that the budget was too small


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one request came to: a reply or a failure.

    Attributes:
        http_status: of the last response of this request; None where none came, or none was seen.
        seconds: how long it was waited for; `timed_out` says that its bound ended it.
    """

    reply: "AIMessage | None" = field(default=None, repr=False)
    failure: BaseException | None = field(default=None, repr=False)
    http_status: int | None = None
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def error_type(self) -> str | None:
        """The class of its failure, if that is an identifier; never what it says."""
        if self.failure is None:
            return None
        name = type(self.failure).__name__
        return name if _IDENTIFIER.match(name) else PROVIDER_ERROR

    @property
    def refused(self) -> bool:
        """Whether a status says that nothing was served."""
        return self.http_status is not None and not 200 <= self.http_status < 300

    @property
    def spent_nothing(self) -> bool:
        """Whether it can have spent nothing: its provider was not reached, or said by a status that it did not serve.

        Google says of a 400 and a 500 that they are not charged (ai.google.dev/gemini-api/docs/billing), and a 503 that
        it cannot serve. A 502, a 504 or a 408 may come from in front of a model that served: that is unknown, as is
        whatever else brought no reply.
        """
        if self.failure is None or self.timed_out:
            return False
        if self.http_status is not None:
            return self.refused and self.http_status not in _MAY_HAVE_SERVED and self.http_status not in _OF_GATEWAYS
        return _is_any(self.failure, _NOT_REACHED)

    @property
    def broke_off(self) -> bool:
        """Whether it failed on the way, be it that a status had come already: in time, or by the connection."""
        return self.failure is not None and (self.timed_out or _is_any(self.failure, _ON_THE_WAY))

    @property
    def has_text(self) -> bool:
        """Whether its reply says anything to be seen. Content may be a list of blocks that is truthy and blank."""
        return self.reply is not None and any(
            character.isprintable() and character != " " for character in str(self.reply.text)
        )

    @property
    def finish_reason(self) -> str | None:
        """Why the reply ended, as one plain word in lower case; `unknown` where it does not say; None without one."""
        from models.reply import finish_reason

        if self.reply is None:
            return None
        reason = finish_reason(self.reply) or UNKNOWN
        return reason if _WORD.match(reason) else UNKNOWN

    @property
    def reasoned(self) -> bool:
        """Whether the reply shows that the model reasoned: in a field of its own, a block, or a count of tokens."""
        return self.reply is not None and _shows_reasoning(self.reply)

    @property
    def trigger(self) -> Trigger | None:
        """What it shows; None where it has text, or has none and nothing that says why."""
        if self.reply is None:
            return Trigger.NO_RESPONSE
        if not self.has_text and (self.finish_reason in LENGTH_LIKE or self.reasoned):
            return Trigger.BUDGET
        return None


async def attempt(caller: Any, messages: "Sequence[BaseMessage]", *, bound_s: float | None, on_late: OnLate) -> Attempt:
    """Ask once, and be back within `bound_s` seconds and the grace; what hangs is abandoned.

    Args:
        caller: a chat model, be it with tools bound.
        on_late: gets what an abandoned call returned or raised after all.

    Raises:
        asyncio.CancelledError: the caller was cancelled.
    """
    from langchain_core.messages import AIMessage

    own_lookups()  # several candidates are asked at once, and a name that is never found must not hold up the others
    call, started, seen = Call(), now(), list[int]()
    token = _statuses.set(seen)
    try:
        reply = await bounded_call(
            call, lambda: guarded(lambda: caller.ainvoke(list(messages))), bound_s=bound_s, on_late=on_late
        )
    finally:
        _statuses.reset(token)
    took: dict[str, Any] = {"seconds": round(now() - started, 3)}
    if call.ending is not Ending.SETTLED:
        late = TimeoutError("the bound of the call")
        return Attempt(failure=late, http_status=_status(seen, late), timed_out=True, **took)  # a body may drip
    failure = call.failure
    if failure is None and not isinstance(reply, AIMessage):
        failure = TypeError("no chat message")
    status = _status(seen, failure)
    if failure is None and status is not None and not 200 <= status < 300:
        failure = ValueError("a reply with a status that has none")
    if failure is not None:
        return Attempt(failure=failure, http_status=status, **took)
    return Attempt(reply=reply, http_status=status, **took)


def facts(done: Attempt) -> Mapping[str, object]:
    """What a record keeps of an attempt: no text, body, address or key, in whatever way it ended."""
    reply = done.reply
    return {
        "seconds": done.seconds,
        "error_type": done.error_type,
        "http_status": done.http_status,
        "finish_reason": done.finish_reason,
        "has_text": done.has_text,
        "has_calls": bool(reply is not None and (reply.tool_calls or reply.invalid_tool_calls)),
        "reasoned": done.reasoned,
        "usage": None if reply is None else reply.usage_metadata,
        "spent": "nothing" if done.spent_nothing else "unknown" if reply is None else "as reported",
    }


async def note_status(response: Any) -> None:
    """An event hook for httpx and httpx2 clients: tells the attempt that is going on which status came."""
    seen = _statuses.get()
    if seen is not None:
        seen.append(response.status_code)


def _status(seen: list[int], failure: BaseException | None) -> int | None:
    """The last status: from the wire, else as the provider's exception has it."""
    said = [getattr(failure, name, None) for name in ("status_code", "code")]
    known = [status for status in [*seen[-1:], *said] if type(status) is int and 100 <= status <= 599]
    return known[0] if known else None


def _is_any(failure: BaseException, names: Collection[str]) -> bool:
    """Whether a failure, or what it stands on, is of a class of one of these names; no SDK is imported to ask."""
    seen: list[BaseException] = []
    error: BaseException | None = failure
    while error is not None and error not in seen and len(seen) < 8:
        if any(cls.__name__ in names for cls in type(error).__mro__):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _shows_reasoning(reply: "AIMessage") -> bool:
    for name in ("reasoning_content", "reasoning", "reasoning_details", "thinking"):
        held = reply.additional_kwargs.get(name)
        if held and (not isinstance(held, str) or held.strip()):
            return True
    if isinstance(reply.content, list) and any(
        isinstance(block, dict) and block.get("type") in ("thinking", "reasoning", "redacted_thinking")
        for block in reply.content
    ):
        return True
    from bounded.usage import judge

    return bool(judge(reply.usage_metadata).thinking)
