"""Meter what a probe sends: a transport that lets a given number of requests out, and the levers beside it."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from bounded.text import safe_name

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import BaseMessage
    from langchain_google_genai import ChatGoogleGenerativeAI

MAX_BODY_BYTES = 8 * 1024 * 1024  # of a body once decoded
NOT_AVAILABLE = "not_available"

# What described the body on the wire and does not describe it decoded.
_OF_THE_WIRE = {"content-encoding", "content-length", "transfer-encoding"}

Facts = Mapping[str, Any]


class RequestRefused(Exception):
    """The meter did not let a request out; no socket was touched."""


class BodyTooLarge(ValueError):
    """A reply's body is larger than `MAX_BODY_BYTES`, decoded."""


class Meter:
    """An HTTP transport, for httpx and httpx2 alike, that lets `allowed` requests out in its whole life.

    Every attempt has a number, and retries and redirects are attempts. Each is a connection of its own, directly to the
    host: with a transport given, an HTTP client looks for no proxy. The asynchronous side sends; the synchronous one,
    which some SDKs build as well, is refused.

    A body is read to its end here, decoded once, and handed on as a body that never was encoded.

    Args:
        on_exchange: is told of each attempt once it is settled, in whatever way: `number` (from 1), `method`, `path`
            (never the query, a header or a body), `status`, `content_encoding`, `error_class` and `body_bytes`
            (decoded), each of the last four None where there was none.
    """

    def __init__(self, on_exchange: Callable[[Facts], None], *, allowed: int) -> None:
        self._on_exchange = on_exchange
        self._allowed = allowed
        self._numbers = itertools.count(1)

    async def handle_async_request(self, request: Any) -> Any:
        """Send one request.

        Raises:
            RequestRefused: all that may leave have left.
            BodyTooLarge: the reply is too large.
            Exception: what the HTTP library raises, a body that does not decode included.
        """
        with self._recorded(request) as facts:
            if facts["number"] > self._allowed:
                raise RequestRefused(
                    f"{self._allowed} requests may leave this process, this is number {facts['number']}"
                )
            # The SDKs stand on one library or the other; a request knows which.
            http: Any = sys.modules[type(request).__module__.partition(".")[0]]
            async with http.AsyncHTTPTransport() as wire, aclosing(await wire.handle_async_request(request)) as reply:
                facts["status"] = reply.status_code
                facts["content_encoding"] = reply.headers.get("content-encoding")
                body = await _decoded(reply)
            facts["body_bytes"] = len(body)
        headers = [pair for pair in reply.headers.multi_items() if pair[0].lower() not in _OF_THE_WIRE]
        return http.Response(reply.status_code, headers=headers, stream=http.ByteStream(body))

    def handle_request(self, request: Any) -> NoReturn:
        """Refuse what a synchronous client would send.

        Raises:
            RequestRefused: always.
        """
        with self._recorded(request):
            raise RequestRefused("only the asynchronous client may send")

    async def aclose(self) -> None:
        """Nothing is open between two requests."""

    def close(self) -> None:
        """Nothing is open between two requests."""

    @contextmanager
    def _recorded(self, request: Any) -> Iterator[dict[str, Any]]:
        unknown = dict.fromkeys(("status", "content_encoding", "error_class", "body_bytes"))
        facts = {"number": next(self._numbers), "method": request.method, "path": request.url.path, **unknown}

        # An exit callback sees every ending, a cancellation too, and catches none.
        def settled(error: type[BaseException] | None, *_: object) -> None:
            self._on_exchange({**facts, "error_class": None if error is None else error.__name__})

        with ExitStack() as stack:
            stack.push(settled)
            yield facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """What a probe sets at a provider; see `levers_of` for what a provider has of them.

    Attributes:
        meter: the transport of both the count and the generation.
        max_output_tokens: of one reply, thinking included.
        http_timeout_s: seconds for connecting and for each read; a reply that drips is for the caller's deadline.
    """

    meter: Meter
    max_output_tokens: int
    thinking: Literal["low"]
    http_timeout_s: float
    retries: int


def lacking(name: str) -> frozenset[str]:
    """Which levers the provider of the model of that name has not.

    Few of the models that Ollama or a server of OpenAI's protocol serves know levels of thinking, and which do takes a
    request of its own to learn.
    """
    return frozenset() if name.startswith("gemini-") else frozenset({"token_count", "thinking"})


def levers_of(name: str, levers: Levers) -> Mapping[str, Any]:
    """What is in force at the provider of that model, by name; `NOT_AVAILABLE` for what it lacks."""
    every = {
        "token_count": "available",
        "thinking": levers.thinking,
        "max_output_tokens": levers.max_output_tokens,
        "http_timeout_s": levers.http_timeout_s,
        "retries": levers.retries,
    }
    return {lever: NOT_AVAILABLE if lever in lacking(name) else value for lever, value in every.items()}


async def count_tokens(name: str, model: "BaseChatModel", messages: Sequence["BaseMessage"]) -> int | None:
    """The provider's own count of what `messages` say, in one request without a retry; None where it has none.

    It is no cap, and it is not the whole request: the tools are left out (see `models/gemini.py`). It takes as long as
    the model's HTTP timeout for each read; a bound on the whole is the caller's.

    Raises:
        Exception: what the provider's SDK raises; `models.failures.failed` says what that means.
    """
    if "token_count" in lacking(name):
        return None
    from models.gemini import count_gemini_tokens

    return await count_gemini_tokens(cast("ChatGoogleGenerativeAI", model), messages)


async def _decoded(reply: Any) -> bytes:
    coding = reply.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity", "gzip", "deflate"):  # others, and one in another, make gigabytes of a piece
        raise BodyTooLarge(f"a reply encoded as {safe_name(coding)}: its size cannot be bounded")
    body = bytearray()
    async with aclosing(reply.aiter_bytes()) as pieces:  # the library's own decoders, which it has announced
        async for piece in pieces:
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise BodyTooLarge(f"a reply of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)
