"""A name that is never found holds up neither another lookup nor the end of the loop."""

import asyncio
import os
import socket
import threading
from typing import Any

import pytest

from bounded.deadlines import deadline_scope
from bounded.lookups import own_lookups

pytestmark = pytest.mark.slow


def test_more_lookups_that_hang_than_an_executor_has_threads_hold_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release, really = threading.Event(), socket.getaddrinfo

    def looked_up(host: Any, *args: Any, **hints: Any) -> Any:
        if host == "hung.invalid":
            release.wait(30)
        return really("127.0.0.1", *args, **hints)

    async def check() -> int:
        own_lookups()
        own_lookups()
        loop = asyncio.get_running_loop()
        hung = [asyncio.create_task(loop.getaddrinfo("hung.invalid", 80)) for _ in range((os.cpu_count() or 1) + 40)]
        await asyncio.sleep(0)
        found = await loop.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
        assert not any(task.done() for task in hung)
        return len(found)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    try:
        assert asyncio.run(check()) == 1  # and the loop has ended, with all of these still waiting
        assert not release.is_set()
    finally:
        release.set()


async def test_what_a_lookup_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    own_lookups()
    with deadline_scope(5.0), pytest.raises(socket.gaierror):
        await asyncio.get_running_loop().getaddrinfo("nowhere.invalid", 80)
