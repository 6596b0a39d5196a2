"""Run one call within its bound: cancel, a grace, walk away, and quarantine what comes late.

`asyncio.wait_for` and `asyncio.timeout` cancel and then wait for as long as the cleanup takes, and hand a value that
comes after the cancellation over as a success. Nothing here waits without a bound, and whether a value counts is
decided by the clock and by who ended the call.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from bounded.deadlines import now, time_left

GRACE_S = 0.25
# A cut from above has started its own grace already: a call below takes half of it, and the rest is for unwinding.
INNER_GRACE_S = GRACE_S / 2
MAX_ABANDONED_WORKERS = 32

T = TypeVar("T")
OnLate = Callable[[object], None]


class Ending(Enum):
    """How a bounded wait ended."""

    SETTLED = "settled"  # returned or raised within the bound
    STOPPED = "stopped"  # the bound or a cut from above ended it, and it has ended
    ABANDONED = "abandoned"  # asked to stop, grace over, may still be running


class Cut(Enum):
    """What ended a whole run from above."""

    DEADLINE = "deadline"
    INTERRUPT = "interrupt"
    CANCELLED = "cancelled"  # by the caller, to whom the cancellation goes on


class BodyFailed(Exception):
    """What a tool's body raised, made an ordinary exception; its cause is the original."""


class WorkersExhausted(Exception):
    """Too many worker threads of abandoned calls are alive: a wedged dependency must not eat the machine."""


class Call:
    """One call in flight, as its body and its bound write it.

    Attributes:
        began: the body has been entered.
        settled_at: the moment at which the body returned or raised, on the loop's clock; None until then.
        failure: what the body, or what stands around it, raised; it counts only where `ending` is `SETTLED`.
        ending: how the bound's wait ended; `ABANDONED` until the call is known to have ended.
    """

    def __init__(self) -> None:
        self.began = False
        self.settled_at: float | None = None
        self.failure: BaseException | None = None
        self.ending = Ending.ABANDONED
        self.worker: _Worker | None = None


@dataclass(frozen=True, slots=True)
class _Worker:
    """The daemon thread of a sync body, and the future that only that thread settles."""

    thread: threading.Thread
    settled: "asyncio.Future[_Settled]"


@dataclass(frozen=True, slots=True)
class _Settled:
    value: Any = None
    error: BaseException | None = None


_CALL: ContextVar[Call] = ContextVar("call")
_abandoned: set[threading.Thread] = set()


async def bounded_call(
    call: Call,
    work: Callable[[], Coroutine[Any, Any, T]],
    *,
    bound_s: float | None,
    on_late: OnLate,
    grace_s: float = GRACE_S,
) -> T | None:
    """Run `work`, whose body is `guarded`, and be back within `bound_s` + `grace_s`, whatever it does.

    Args:
        call: written as the call goes. A value is returned only if `call.ending` is `SETTLED` and it did not fail.
        bound_s: seconds; None is unlimited.
        grace_s: seconds that it has at its bound to stop in; with 0 it is abandoned, be it that it would have stopped.
        on_late: gets what an ended call returned or raised after all, once, whenever that comes.

    Raises:
        asyncio.CancelledError: the caller was cancelled; the call was asked to stop and given `INNER_GRACE_S`.
    """

    async def run() -> T:
        _CALL.set(call)
        return await work()

    deadline = None if bound_s is None else now() + bound_s
    task = asyncio.create_task(run())
    try:
        await asyncio.wait({task}, timeout=bound_s)
    except asyncio.CancelledError:
        await _stop(call, task, INNER_GRACE_S, on_late)
        raise
    if not task.done() and deadline is not None and call.settled_at is not None and call.settled_at <= deadline:
        await asyncio.wait({task}, timeout=GRACE_S)  # it settled in time, and a blocked loop had no turn for it yet
    if task.done() and (deadline is None or call.settled_at is None or call.settled_at <= deadline):
        call.ending = Ending.SETTLED
        raised = asyncio.CancelledError() if task.cancelled() else task.exception()
        if call.failure is None:
            call.failure = raised
        return task.result() if call.failure is None else None
    await _stop(call, task, grace_s, on_late)
    return None


async def guarded(body: Callable[[], Awaitable[T]]) -> T:
    """The one exception ladder: run a tool's body so that whatever it raises is that call's own failure.

    langchain-core runs a body in an inner task, and a SystemExit or KeyboardInterrupt that leaves a task leaves the
    event loop too, past every handler around it. Here it is still inside.

    Raises:
        asyncio.CancelledError: this call was asked to stop.
        BodyFailed: anything else that the body raised.
    """
    call = _CALL.get()
    call.began = True
    try:
        value = await body()
    except asyncio.CancelledError as exc:
        if asked_to_stop():
            raise
        call.failure = exc
        raise BodyFailed from exc
    except BaseException as exc:
        call.failure = exc
        raise BodyFailed from exc
    finally:
        if call.worker is None:  # a thread takes its own time
            call.settled_at = now()
    return value


def asked_to_stop() -> bool:
    """Whether someone cancelled the current task; a CancelledError without that is the failure of whoever raised it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run the sync body of a `guarded` call on a daemon thread of its own, under the caller's context variables.

    Never on the loop's default executor: its shutdown waits for wedged threads, and a handful of them fills it. A
    cancellation leaves at once; the thread runs on, and the call has stopped only when the thread has.

    Raises:
        BaseException: what `function` raised.
    """
    call, loop, context = _CALL.get(), asyncio.get_running_loop(), contextvars.copy_context()
    settled: asyncio.Future[_Settled] = loop.create_future()

    def run() -> None:
        try:
            end = _Settled(value=context.run(function))
        except BaseException as exc:
            end = _Settled(error=exc)
        call.settled_at = loop.time()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: no one is left to be told
            loop.call_soon_threadsafe(settled.set_result, end)

    thread = threading.Thread(target=run, name="tool call", daemon=True)
    call.worker = _Worker(thread, settled)
    thread.start()
    await asyncio.wait({settled})  # unlike awaiting it, cancels nothing
    end = settled.result()
    if end.error is not None:
        raise end.error
    return end.value  # type: ignore[no-any-return]


async def off_loop(function: Callable[[], T]) -> T:
    """Run a blocking part of an async body on a daemon thread. The body goes on after it, so its end is not the call's.

    Raises:
        BaseException: what `function` raised.
    """
    call = _CALL.get(None) or Call()
    token = _CALL.set(call)
    try:
        return await in_daemon_thread(function)
    finally:
        _CALL.reset(token)
        if call.worker is not None and call.worker.settled.done():  # else it was left, and the thread runs on
            call.worker = call.settled_at = None


def check_workers() -> None:
    """Refuse further sync work while too many abandoned threads are alive in this process.

    Raises:
        WorkersExhausted: there are more than `MAX_ABANDONED_WORKERS`.
    """
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    if len(_abandoned) > MAX_ABANDONED_WORKERS:
        raise WorkersExhausted(f"{len(_abandoned)} earlier sync calls outlived their bounds and are still running")


async def until_cut(
    work: Coroutine[Any, Any, T],
    interrupt: asyncio.Event | None = None,
    *,
    on_cut: Callable[[Cut], None] = lambda cut: None,
    alongside: Collection[asyncio.Task[Any]] = (),
) -> T | Cut:
    """Run `work` until it ends, the nearest deadline passes or `interrupt` is set; be back within `GRACE_S` after.

    Args:
        on_cut: called before `work` is asked to stop, so that nothing which it does from there on counts.
        alongside: tasks that `work` has started and may let go of when it is cancelled, as `asyncio.gather` does with
            the siblings of the first that ends; read at the cut, and given the same grace.

    Raises:
        asyncio.CancelledError: the caller was cancelled; `work` was asked to stop and given the grace.
        Exception: what `work` raised.
    """
    left = time_left()
    if left == 0 or (interrupt is not None and interrupt.is_set()):
        work.close()
        cut = Cut.DEADLINE if left == 0 else Cut.INTERRUPT
        on_cut(cut)
        return cut
    task = asyncio.create_task(work)
    task.add_done_callback(_drain)
    alarm = asyncio.create_task(interrupt.wait()) if interrupt is not None else None
    cut = Cut.CANCELLED
    try:
        await asyncio.wait({task, alarm} if alarm else {task}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        cut = Cut.INTERRUPT if interrupt is not None and interrupt.is_set() else Cut.DEADLINE
    finally:
        if alarm is not None:
            alarm.cancel()
        if not task.done():
            try:
                on_cut(cut)
            finally:
                stopping = {task, *alongside}
                task.cancel()
                await asyncio.wait(stopping, timeout=GRACE_S)
    return cut


async def _stop(call: Call, task: asyncio.Task[Any], grace_s: float, on_late: OnLate) -> None:
    worker = call.worker
    running: set[asyncio.Future[Any]] = {task, worker.settled} if worker else {task}
    task.cancel()
    try:
        await asyncio.wait(running, timeout=grace_s)
    except asyncio.CancelledError:  # a cut from above during the grace: both may come at the same deadline
        await asyncio.wait(running, timeout=INNER_GRACE_S)
        raise
    finally:
        if grace_s and all(future.done() for future in running):
            call.ending = Ending.STOPPED
        elif worker is not None and worker.thread.is_alive():
            _abandoned.add(worker.thread)
        task.add_done_callback(_drain if worker else lambda ended: _hand_over(ended, on_late))
        if worker is not None:
            worker.settled.add_done_callback(lambda ended: _hand_over_settled(ended.result(), on_late))


def _hand_over(ended: asyncio.Future[Any], on_late: OnLate) -> None:
    if not ended.cancelled():
        error = ended.exception()
        cause = error if error is None or error.__cause__ is None else error.__cause__
        on_late(ended.result() if cause is None else cause)


def _hand_over_settled(end: _Settled, on_late: OnLate) -> None:
    on_late(end.value if end.error is None else end.error)


def _drain(ended: asyncio.Future[Any]) -> None:
    """Mark an abandoned task's exception as seen, or asyncio logs it on the user's terminal."""
    if not ended.cancelled():
        ended.exception()
