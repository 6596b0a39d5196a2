"""Bounded, credential-safe requests to one server: JSON and files, and what goes wrong in the words of `Fault`:

    async with connect(checked_url(text, "GITHUB_API_URL"), headers={"authorization": ...}) as server:
        build = await get_json(server, "api/v2/builds/3", Build, what="build 3")
        log = await download(server, "api/v2/logs/7/raw", what="the log of job 7")

Headers that `connect` is given go to that server only. Nothing of httpx leaves: every failure is a `SourceError`, and
holds no address and nothing that the server said.
"""

import asyncio
import ipaddress
import re
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from tempfile import SpooledTemporaryFile
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from bounded.calls import Cut, until_cut
from bounded.deadlines import deadline_scope, time_left
from bounded.lookups import own_lookups
from bounded.timeouts import CEILING_S
from sources.jobs import Fault, SourceError

if TYPE_CHECKING:
    import httpx

MAX_JSON = 8 << 20
# What a call of 20 s can both fetch and look through. More is refused, not cut: a cut log has false line numbers, and
# its cause may stand in what is missing.
MAX_FILE = 64 << 20
MAX_REDIRECTS = 3
MAX_WAIT_S = 60.0
_STEP_S = 10.0  # to connect, or without a byte: below a call's bound, so that it is this that reports it
_AT_ONCE = 6
_TRIES = 3
_IN_MEMORY = 4 << 20
_PIECE = 1 << 20
_MAX_REFUSAL = 64 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
_SEE_OTHER = (302, 303)  # what is asked for lies elsewhere, as opposed to: ask there
_NONE: Mapping[Any, Any] = MappingProxyType({})

# An identifier, for the shapes of answers: pydantic would take any size.
Id = Annotated[int, Field(gt=0, lt=2**63)]

T = TypeVar("T")
Read = Callable[["httpx.Response"], Awaitable[T]]

_BY_STATUS = {
    401: (Fault.UNAUTHORIZED, "the credentials are missing or were not accepted"),
    403: (Fault.FORBIDDEN, "not allowed"),
    404: (Fault.NOT_FOUND, "not found"),
    410: (Fault.EXPIRED, "no longer there"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server that is asked, and a client without credentials for where it sends us.

    Attributes:
        hints: what to do about a fault, added to its message.
    """

    client: "httpx.AsyncClient" = field(repr=False)
    anonymous: "httpx.AsyncClient" = field(repr=False)
    hints: Mapping[Fault, str]


class _Limited(SourceError):
    def __init__(self, wait_s: float, message: str) -> None:
        super().__init__(Fault.RATE_LIMITED, message)
        self.wait_s, self.said = wait_s, message


def checked_url(text: str, name: str) -> str:
    """The address of a server, without a slash at its end: https, or http on this machine.

    Raises:
        ValueError: it is none; the message calls it by `name` and does not repeat it.
    """
    try:
        parts = urlsplit(text)
        host, _port = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or not re.fullmatch(r"[!-~]+", text) or parts.scheme not in ("https", "http"):
        raise ValueError(f"{name} must be an address such as https://ci.example.com")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{name} must be a plain address, without a user, ? or #")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ValueError(f"{name} must begin with https:// (http:// is for this machine only)")
    return text.rstrip("/")


@asynccontextmanager
async def connect(
    url: str, *, headers: Mapping[str, str] = _NONE, hints: Mapping[Fault, str] = _NONE
) -> AsyncIterator[Server]:
    """A server at `url`, which `checked_url` has returned. A few requests at once; more wait for their turn.

    The environment's proxies and certificates are used, as behind a company's firewall they have to be: https goes
    through a proxy unread. This machine is asked directly, for http would hand a proxy the credentials.

    Raises:
        SourceError: the environment's proxy or certificate settings are unusable.
    """
    import httpx

    own_lookups()
    outside, client = not _is_loopback(urlsplit(url).hostname or ""), None
    with suppress(ValueError, OSError, ImportError, httpx.InvalidURL):
        settings: dict[str, Any] = {
            "verify": _certificates(outside),
            "trust_env": outside,
            "timeout": httpx.Timeout(_STEP_S, pool=None),
            "limits": httpx.Limits(max_connections=_AT_ONCE),
            "follow_redirects": False,
        }
        common = {"user-agent": "ci-triage", "accept-encoding": "gzip"}
        anonymous = httpx.AsyncClient(headers=common, **settings)
        client = httpx.AsyncClient(base_url=url, headers={**common, **headers}, **settings)
    if client is None:
        raise SourceError(Fault.UNREACHABLE, "the proxy or certificate settings of the environment cannot be used")
    async with client, anonymous:
        yield Server(client=client, anonymous=anonymous, hints=hints)


async def get_json(server: Server, path: str, shape: type[T], *, what: str) -> T:
    """The JSON at `path`, whatever its content type, in its shape. Redirects are followed within the server only.

    Args:
        path: relative to the server's address, with its query; encoded.
        shape: what pydantic should find there, strictly; keys that it does not name are ignored.
        what: what is asked for, as the messages call it.

    Raises:
        SourceError: no answer, one of another shape, more than `MAX_JSON` bytes, or a refusal, by its status.
    """

    async def read(response: "httpx.Response") -> T:
        body = bytearray()
        async for piece in _pieces(response, what):
            body += piece
            if len(body) > MAX_JSON:
                raise SourceError(Fault.TOO_LARGE, f"{what}: the answer has more than {MAX_JSON >> 20} MiB")
        with suppress(ValidationError):  # which repeats what it was given
            return TypeAdapter(shape).validate_json(bytes(body), strict=True)
        raise SourceError(Fault.UNREADABLE, f"{what}: the answer is not what it should be")

    return await _patiently(server, path, what, read, None)


async def download(server: Server, path: str, *, what: str) -> BinaryIO:
    """The file at `path`, whole, in a temporary file at its start. The caller closes it.

    Where the server says that it lies elsewhere, a client without credentials goes there: by https, or on this machine
    by http if the server is on this machine as well.

    Raises:
        SourceError: as `get_json`; the file is cut or encoded in an unknown way, or has more than `MAX_FILE` bytes.
    """
    with ExitStack() as unfinished:
        file = unfinished.enter_context(SpooledTemporaryFile(max_size=_IN_MEMORY))
        hint = server.hints.get(Fault.TOO_LARGE, "")

        async def keep(response: "httpx.Response") -> None:
            size = _number(response.headers.get("content-length")) or 0  # known before it is fetched, or not
            pieces = _pieces(response, what)
            while size <= MAX_FILE:
                piece = await anext(pieces, None)
                if piece is None:
                    return
                file.write(piece)
                size = file.tell()
            raise SourceError(Fault.TOO_LARGE, f"{what}: more than {MAX_FILE >> 20} MiB{hint}")

        await _patiently(server, path, what, keep, server.anonymous)
        file.seek(0)
        unfinished.pop_all()
        return cast(BinaryIO, file)


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of `works` return, in their order, run at the same time. The first that fails ends the others.

    Raises:
        SourceError: the first that one of them raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        failures = failed.exceptions
        if not all(isinstance(failure, SourceError) for failure in failures):
            raise
    else:
        return [task.result() for task in tasks]
    raise failures[0]


async def in_time(work: Coroutine[Any, Any, T], what: str) -> T:
    """What `work` returns. A server that sends a byte now and then cannot hold it for ever, without any bound above.

    Raises:
        SourceError: the nearest deadline above has passed, or without one the longest time that a tool may take.
    """
    with deadline_scope(CEILING_S):
        done = await until_cut(work)
    if isinstance(done, Cut):
        raise SourceError(Fault.UNREACHABLE, f"{what}: not answered in time")
    return done


async def _patiently(server: Server, path: str, what: str, read: Read[T], elsewhere: "httpx.AsyncClient | None") -> T:
    for chance in range(1, _TRIES + 1):
        try:
            return await _plainly(_request(server, path, what, read, elsewhere), what)
        except _Limited as limited:
            left = time_left()
            # Half a second for the answer itself.
            if chance == _TRIES or limited.wait_s > min(MAX_WAIT_S, MAX_WAIT_S if left is None else left - 0.5):
                raise SourceError(limited.fault, limited.said) from None  # `_Limited` is no word for a user
            wait_s = limited.wait_s
        await asyncio.sleep(wait_s)
    raise AssertionError("the last chance returns or raises")


async def _plainly(work: Awaitable[T], what: str) -> T:
    import httpx

    try:
        return await work
    except httpx.TimeoutException:
        fault, says = Fault.UNREACHABLE, "no answer in time"
    except (httpx.RemoteProtocolError, httpx.ReadError):
        fault, says = Fault.UNREADABLE, "the answer was cut off"
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):  # the last of a host that is no IDNA
        fault, says = Fault.UNREACHABLE, "the server cannot be reached"
    # Outside the handlers: an exception of httpx holds the request with its headers, and would go along as the context.
    raise SourceError(fault, f"{what}: {says}")


async def _request(server: Server, path: str, what: str, read: Read[T], elsewhere: "httpx.AsyncClient | None") -> T:
    client, base = server.client, server.client.base_url
    url: str | httpx.URL = path
    for _ in range(MAX_REDIRECTS + 1):
        async with client.stream("GET", url) as response:
            status = response.status_code
            if status == 200:
                return await read(response)
            if status not in _REDIRECTS or "location" not in response.headers:
                raise await _refusal(response, server.hints if client is server.client else _NONE, what)
            url = response.url.join(response.headers["location"])
        here = (url.scheme, url.host, url.port) == (base.scheme, base.host, base.port)
        if here and (elsewhere is None or status not in _SEE_OTHER):
            continue  # with the same client: no way back from elsewhere regains the credentials
        local = url.scheme == "http" and _is_loopback(url.host) and _is_loopback(base.host)
        if elsewhere is None or url.userinfo or not (local or url.scheme == "https"):
            raise SourceError(Fault.UNREADABLE, f"{what}: the server points to a place that is not gone to")
        client = elsewhere
    raise SourceError(Fault.UNREADABLE, f"{what}: more than {MAX_REDIRECTS} redirects")


async def _refusal(response: "httpx.Response", hints: Mapping[Fault, str], what: str) -> SourceError:
    import httpx

    status, headers = response.status_code, response.headers
    said = b""
    with suppress(httpx.HTTPError, SourceError):
        async for piece in _pieces(response, what):
            said += piece
            if len(said) > _MAX_REFUSAL:
                break
    exhausted = headers.get("x-ratelimit-remaining") == "0"
    if status == 429 or (status == 403 and (exhausted or "retry-after" in headers or b"rate limit" in said.lower())):
        wait_s = _wait_s(headers)
        at = (datetime.now(UTC) + timedelta(seconds=wait_s)).strftime("%Y-%m-%d %H:%M:%S")
        hint = hints.get(Fault.RATE_LIMITED, "")
        return _Limited(wait_s, f"{what}: too many requests; try again at {at} UTC, in {wait_s:.0f} s{hint}")
    fault, says = Fault.UNREADABLE, f"the server answered with status {status}"
    if status in _BY_STATUS:
        fault, says = _BY_STATUS[status]
    elif status == 407 or status >= 500:
        fault = Fault.UNREACHABLE
    return SourceError(fault, f"{what}: {says}{hints.get(fault, '')}")


def _wait_s(headers: Mapping[str, str]) -> float:
    """Seconds until the server wants to be asked again; without a word from it a minute."""
    after = _number(headers.get("retry-after"))
    if after is not None:
        return float(after)
    reset = _number(headers.get("x-ratelimit-reset"))
    # A secondary limit shows the primary one's reset as well, which says nothing while requests remain.
    if reset is not None and headers.get("x-ratelimit-remaining", "0") == "0":
        return min(max(0.0, reset - datetime.now(UTC).timestamp()) + 1.0, 1e9)
    return MAX_WAIT_S


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,10}", text) else None


async def _pieces(response: "httpx.Response", what: str) -> AsyncIterator[bytes]:
    """The body, decoded in pieces of a bounded size: httpx would decode a bomb of 64 KiB at one go."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        async for raw in response.aiter_raw():
            yield raw
        return
    if encoding not in ("gzip", "x-gzip"):
        raise SourceError(Fault.UNREADABLE, f"{what}: encoded in a way that was not asked for")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
    async for raw in response.aiter_raw():
        while raw and not decoder.eof:
            try:
                piece = decoder.decompress(raw, _PIECE)
            except zlib.error:
                break
            raw = decoder.unconsumed_tail
            yield piece
        if raw or decoder.unused_data:
            raise SourceError(Fault.UNREADABLE, f"{what}: its encoding is broken")
    if not decoder.eof:
        raise SourceError(Fault.UNREADABLE, f"{what}: the answer was cut off")


@cache  # reading them takes longer than a request
def _certificates(outside: bool) -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context(trust_env=outside)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
