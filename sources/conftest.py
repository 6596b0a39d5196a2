"""Small loopback servers for wire tests: each answers by path, and records what it is asked."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest_asyncio

from conftest import listening

CREDENTIALS = {"authorization", "cookie", "proxy-authorization", "x-github-api-version"}


class Ending(Enum):
    """What becomes of an answer."""

    WHOLE = "whole"
    CUT = "cut"  # one byte more is promised than is sent, then the connection is closed
    RESET = "reset"  # the same, and the connection is reset
    CHUNKED_CUT = "chunked, cut"  # closed before the last chunk
    HUNG_UP = "hung up"  # closed without a word
    SILENT = "silent"  # accepted, and never a word
    DRIPPING = "dripping"  # one header after the other, for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One answer."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: Ending = Ending.WHOLE

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One recorded request; header names in lower case."""

    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class Site:
    """One server. What has no answer is answered with a 404.

    Attributes:
        answers: path with its query, or without, -> what is said; of several the first is used up, the last stays.
        always: what is said to everything that `answers` does not name.
        most_at_once: how many requests have been open at the same time.
    """

    url: str
    answers: dict[str, list[Said]] = field(default_factory=dict)
    always: Callable[[str], Said] = lambda path: as_json({"message": "Not Found"}, status=404)
    asked: list[Asked] = field(default_factory=list)
    delay_s: float = 0.0
    open: int = 0
    most_at_once: int = 0

    def say(self, path: str, *answers: Said) -> None:
        self.answers[path] = list(answers)

    def answer(self, path: str) -> Said:
        said = self.answers.get(path) or self.answers.get(path.partition("?")[0])
        if not said:
            return self.always(path)
        return said.pop(0) if len(said) > 1 else said[0]

    def paths(self) -> list[str]:
        return [request.path for request in self.asked]


def as_json(value: object, *, status: int = 200, **headers: str) -> Said:
    """`value` as JSON; the names of `headers` with `_` for `-`."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Said(body=json.dumps(value).encode(), status=status, headers={"content-type": "application/json", **named})


def moved(url: str, *, status: int = 302) -> Said:
    return Said(status=status, headers={"location": url})


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    """The server that a source is pointed at."""
    async with _running() as served:
        yield served


@pytest_asyncio.fixture
async def elsewhere() -> AsyncIterator[Site]:
    """A second server, of another origin: the test fails if a credential has arrived there."""
    async with _running() as served:
        yield served
    arrived = {name: request.path for request in served.asked for name in request.headers if name in CREDENTIALS}
    assert not arrived, f"credentials arrived at another origin: {arrived}"


@asynccontextmanager
async def _running() -> AsyncIterator[Site]:
    served = Site("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # a client that went away
            await _serve(served, reader, writer)

    async with listening(serve) as served.url:
        yield served


async def _serve(served: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    _method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    served.asked.append(Asked(path=path, headers=headers))
    served.open += 1
    served.most_at_once = max(served.most_at_once, served.open)
    try:
        if served.delay_s:
            await asyncio.sleep(served.delay_s)
        await _answer(served.answer(path), reader, writer)
    finally:
        served.open -= 1


async def _answer(said: Said, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if said.ending is Ending.HUNG_UP:
        return
    if said.ending is Ending.SILENT:
        await reader.read()
        return
    chunked = said.ending is Ending.CHUNKED_CUT
    length = len(said.body) + (said.ending is not Ending.WHOLE)
    framing = {"transfer-encoding": "chunked"} if chunked else {"content-length": str(length)}
    headers = {**framing, **said.headers, "connection": "close"}
    lines = [f"HTTP/1.1 {said.status} Said", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n")
    while said.ending is Ending.DRIPPING and not reader.at_eof():
        writer.write(b"x-drip: 1\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
    writer.write(b"\r\n")
    writer.write(b"%x\r\n%b\r\n" % (len(said.body), said.body) if chunked else said.body)
    await writer.drain()
    if said.ending is Ending.RESET:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
