"""How much time is left: deadlines as scopes that only narrow.

    with deadline_scope(30.0):      # a moment 30 s from now
        with deadline_scope(60.0):  # changes nothing: 30 s are left
            time_left()

Scopes are context variables, so every task and every worker thread that is started with a copy of its caller's
context stands under its caller's deadlines. Moments are on the running loop's clock (`time.monotonic` without one).
"""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_DEADLINE: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline_scope(timeout_s: float | None) -> Iterator[None]:
    """Let nothing inside start, or be waited for, later than `timeout_s` seconds from now; None adds no deadline.

    0 and negative are legal here, unlike in a setting: the time was up before the scope began.

    Raises:
        ValueError: `timeout_s` is NaN.
    """
    if timeout_s is None:
        yield
        return
    if math.isnan(timeout_s):
        raise ValueError("timeout_s must be a number of seconds or None, not NaN")
    outer = _DEADLINE.get()
    own = now() + timeout_s
    token = _DEADLINE.set(own if outer is None else min(own, outer))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


@contextmanager
def outside_deadlines() -> Iterator[None]:
    """Let what is inside stand under no deadline of its callers: it has to keep one of its own."""
    token = _DEADLINE.set(None)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def time_left() -> float | None:
    """Seconds before the nearest deadline above, never below 0; None where there is none."""
    deadline = _DEADLINE.get()
    return None if deadline is None else max(0.0, deadline - now())


def now() -> float:
    """The monotonic clock in seconds: the running loop's, which a test may drive."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
