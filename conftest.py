"""What every test stands on: a clean environment, no network but loopback, and a clock that tests may drive."""

import asyncio
import os
import re
import selectors
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).parent
T = TypeVar("T")
OnVirtualClock = Callable[[Coroutine[Any, Any, T]], T]

_SETTINGS = re.compile(
    r"REVIEW_|GOOGLE_|GEMINI_|OLLAMA_|OPENAI_|LANGSMITH_|LANGCHAIN_|LANGGRAPH_|.*_(KEY|TOKEN)$", re.I
)


def run_graph(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run graph.py to its end, with these settings only."""
    return subprocess.run(
        [sys.executable, "graph.py", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The address of a loopback server whose every connection is handed to `serve`; none is left afterwards."""
    handlers: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


def under_file_modes(command: list[str]) -> list[str]:
    """The command such that file modes hold for it, be it root who runs it: without root's right to pass over them."""
    if os.geteuid() != 0:
        return command
    drop = "import ctypes, os, sys; prctl = ctypes.CDLL(None, use_errno=True).prctl; PR_CAPBSET_DROP = 24\n"
    drop += (
        "assert [prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) for cap in (1, 2)] == [0, 0]  # DAC_OVERRIDE, DAC_READ_SEARCH\n"
    )
    return [sys.executable, "-c", f"{drop}os.execv(sys.argv[1], sys.argv[1:])", *command]


class _VirtualSelector(selectors.DefaultSelector):
    """Waits for nothing: where the loop would sleep until its next timer, the clock moves there instead."""

    clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)  # no timer is left, only a thread or a socket can go on
        ready = super().select(0)
        if not ready:
            self.clock += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time: exact, instant, without sleeping."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.clock


@pytest.fixture
def on_virtual_clock() -> OnVirtualClock[Any]:
    """Runs a coroutine on a `VirtualClockLoop` and returns what it returns."""

    def run(work: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            return runner.run(work)

    return run


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if _SETTINGS.match(name):
            monkeypatch.delenv(name)


_left_loopback: list[str] = []


def _watch_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("socket.connect", "socket.getaddrinfo"):
        return
    address = arguments[1] if event == "socket.connect" else arguments[:1]
    host = address[0] if isinstance(address, tuple) and address else None
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if isinstance(host, str) and host not in ("127.0.0.1", "::1", "localhost"):
        _left_loopback.append(host)
        raise ConnectionRefusedError(f"a test reached for {host}: only loopback is allowed")


sys.addaudithook(_watch_network)


@pytest.fixture(autouse=True)
def _only_loopback() -> Iterator[None]:
    _left_loopback.clear()
    yield
    assert not _left_loopback, f"a test reached for {_left_loopback}"
