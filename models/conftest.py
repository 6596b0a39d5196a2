"""A tiny loopback HTTP server for wire tests: it records what it is asked and answers what a test has scripted."""

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import pytest_asyncio

from bounded.calls import until_cut
from bounded.deadlines import deadline_scope
from conftest import listening

FAKE_KEY = "fake-key-for-tests"
DRIP_S = 0.2


class Ending(Enum):
    """What becomes of an answer."""

    WHOLE = "whole"
    CUT = "cut"  # the head and the pieces, then the connection is closed although more was promised
    RESET = "reset"  # the same, but the connection is reset
    HUNG_UP = "hung up"  # closed without a word
    SILENT = "silent"  # accepted, and never a word
    DRIPPING = "dripping"  # the head, then one blank every DRIP_S for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One scripted answer. One piece is sent with its length; several, or an answer that stays unfinished, chunked."""

    pieces: tuple[bytes, ...] = (b"",)
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    ending: Ending = Ending.WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One recorded request; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Loopback:
    """The server as a test sees it: script `replies`, read `requests`. One request too many is answered with a 418.

    Attributes:
        asked: set when a request has been read.
        left: set when a client has gone away while an answer was still owed.
    """

    url: str
    replies: deque[Reply] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def environment(self) -> Mapping[str, str]:
        """What the providers need to be set up."""
        return {
            "GOOGLE_API_KEY": FAKE_KEY,
            "OLLAMA_HOST": self.url,
            "OPENAI_API_KEY": FAKE_KEY,
            "OPENAI_BASE_URL": f"{self.url}/v1",
        }

    def say(self, *replies: Reply) -> None:
        self.replies.extend(replies)

    async def until_left(self) -> None:
        with deadline_scope(5.0):
            assert await until_cut(self.left.wait()) is True, "the client is still there"


def as_json(*values: Any, status: int = 200) -> Reply:
    """Each value as one line of JSON: a single one is an ordinary body, several are a stream."""
    return Reply(pieces=tuple(json.dumps(value).encode() + b"\n" for value in values), status=status)


@pytest_asyncio.fixture
async def loopback(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loopback]:
    """A running server, to which the Gemini SDK's own setting points as well."""
    served = Loopback("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _serve(served, reader, writer)
        except ConnectionError:
            served.left.set()

    async with listening(serve) as served.url:
        point_gemini_at(served.url, monkeypatch)
        yield served


def point_gemini_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gemini SDK reads its address from the process environment; no proxy of this machine may stand between."""
    monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


async def _serve(served: Loopback, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        served.requests.append(await _read_request(reader))
    except asyncio.IncompleteReadError:
        return  # a connection that asked nothing
    served.asked.set()
    reply = served.replies.popleft() if served.replies else Reply(status=418)
    if reply.ending is Ending.SILENT:
        await reader.read()
        served.left.set()
    elif reply.ending is not Ending.HUNG_UP:
        await _answer(reply, writer)
    while reply.ending is Ending.DRIPPING:
        if reader.at_eof():
            served.left.set()
            return
        writer.write(b"1\r\n \r\n")
        await writer.drain()
        await asyncio.sleep(DRIP_S)
    if reply.ending is Ending.RESET:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def _read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method=method, path=path, headers=headers, body=body)


async def _answer(reply: Reply, writer: asyncio.StreamWriter) -> None:
    chunked = len(reply.pieces) > 1 or reply.ending is not Ending.WHOLE
    framing = {"transfer-encoding": "chunked"} if chunked else {"content-length": str(len(reply.pieces[0]))}
    headers = {**reply.headers, **framing, "connection": "close"}
    lines = [f"HTTP/1.1 {reply.status} Scripted", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode())
    for piece in reply.pieces:
        if piece:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    if chunked and reply.ending is Ending.WHOLE:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
