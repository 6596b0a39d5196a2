"""Name lookups that hold no one else up: each on a daemon thread of its own.

asyncio looks names up on the loop's default executor, which has a handful of threads: as many lookups that do not
answer fill it, and no other name is found any more, be it one of this machine. They also keep a process from ending.
"""

import asyncio
import contextlib
import socket
import threading
from typing import Any


def own_lookups() -> None:
    """From here on the running loop looks each name up on a thread of its own; a second call changes nothing."""
    loop: Any = asyncio.get_running_loop()
    if "getaddrinfo" not in vars(loop):
        loop.getaddrinfo = _looked_up


async def _looked_up(host: Any, port: Any, **hints: int) -> Any:
    """What `socket.getaddrinfo` returns.

    Raises:
        OSError, UnicodeError: what that raises.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if found.done():  # no one waits for it any more
            return
        if error is None:
            found.set_result(value)
        else:
            found.set_exception(error)

    def look_up() -> None:
        value, failure = None, None
        try:
            value = socket.getaddrinfo(host, port, **hints)
        except (OSError, UnicodeError, ValueError, TypeError) as exc:
            failure = exc
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=look_up, name="name lookup", daemon=True).start()
    return await found
