"""One call within its bound: exact on a virtual clock, threads on real time."""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bounded.calls import (
    GRACE_S,
    INNER_GRACE_S,
    MAX_ABANDONED_WORKERS,
    BodyFailed,
    Call,
    Cut,
    Ending,
    WorkersExhausted,
    bounded_call,
    check_workers,
    guarded,
    in_daemon_thread,
    off_loop,
    until_cut,
)
from bounded.deadlines import deadline_scope, now
from conftest import OnVirtualClock

BOUND_S = 3.0


class Bounded:
    """One bounded call of a body, and everything that can be seen of it."""

    def __init__(self) -> None:
        self.call = Call()
        self.late: list[object] = []
        self.came = asyncio.Event()
        self.took = 0.0
        self.value: object = None

    async def run(self, body: Callable[[], Awaitable[Any]], bound_s: float | None = BOUND_S) -> "Bounded":
        async def work() -> Any:
            return await guarded(body)

        start = now()
        try:
            self.value = await bounded_call(self.call, work, bound_s=bound_s, on_late=self._comes_late)
        finally:
            self.took = now() - start
        return self

    def _comes_late(self, settled: object) -> None:
        self.late.append(settled)
        self.came.set()


async def _returns_after(seconds: float, value: str = "value") -> str:
    await asyncio.sleep(seconds)
    return value


async def _swallows_cancellation(seconds: float) -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
    return "late value"


def test_a_quick_call_returns_its_value(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    seen = on_virtual_clock(Bounded().run(lambda: _returns_after(1.0)))
    assert (seen.value, seen.call.ending, seen.took, seen.late) == ("value", Ending.SETTLED, 1.0, [])


def test_an_unlimited_call_is_waited_for(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    seen = on_virtual_clock(Bounded().run(lambda: _returns_after(9_999.0), None))
    assert (seen.value, seen.took) == ("value", 9_999.0)


def test_a_slow_call_is_stopped_at_its_bound(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    seen = on_virtual_clock(Bounded().run(lambda: _returns_after(8.0)))
    assert (seen.value, seen.call.ending, seen.took, seen.late) == (None, Ending.STOPPED, BOUND_S, [])


def test_a_call_that_cleans_up_within_its_grace_has_stopped(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    async def tidy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)

    seen = on_virtual_clock(Bounded().run(tidy))
    assert (seen.call.ending, seen.took) == (Ending.STOPPED, BOUND_S + 0.2)


def test_a_call_that_cleans_up_for_longer_is_abandoned(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    async def untidy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1.0)

    seen = on_virtual_clock(Bounded().run(untidy))
    assert (seen.call.ending, seen.took) == (Ending.ABANDONED, BOUND_S + GRACE_S)


def test_a_value_after_a_swallowed_cancellation_is_late(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    async def check() -> Bounded:
        seen = await Bounded().run(lambda: _swallows_cancellation(0.1))
        await asyncio.sleep(0)
        return seen

    seen = on_virtual_clock(check())
    assert (seen.value, seen.call.ending, seen.late) == (None, Ending.STOPPED, ["late value"])


def test_what_an_abandoned_call_returns_at_last_is_late(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    async def check() -> Bounded:
        seen = await Bounded().run(lambda: _swallows_cancellation(5.0))
        assert (seen.call.ending, seen.late) == (Ending.ABANDONED, [])
        await asyncio.sleep(10)
        return seen

    assert on_virtual_clock(check()).late == ["late value"]


def test_what_an_abandoned_call_raises_at_last_is_late(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    async def raises_late() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(5.0)
            raise KeyError("late") from None

    async def check() -> Bounded:
        seen = await Bounded().run(raises_late)
        await asyncio.sleep(10)
        return seen

    assert [type(late) for late in on_virtual_clock(check()).late] == [KeyError]


def test_a_value_that_took_too_long_on_a_blocked_loop_is_late(on_virtual_clock: OnVirtualClock[Bounded]) -> None:
    async def blocks() -> str:
        loop: Any = asyncio.get_running_loop()
        loop._virtual.clock += 5.0  # as time.sleep does: the clock goes on and no timer is called
        return "late value"

    async def check() -> Bounded:
        seen = await Bounded().run(blocks)
        await asyncio.sleep(0)
        return seen

    seen = on_virtual_clock(check())
    assert (seen.value, seen.call.ending, seen.late) == (None, Ending.STOPPED, ["late value"])


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("upstream"),
        asyncio.CancelledError(),
        SystemExit(3),
        KeyboardInterrupt(),
        RuntimeError("x"),
        GeneratorExit(),
        MemoryError(),
    ],
)
def test_whatever_a_body_raises_is_its_own_failure(
    error: BaseException, on_virtual_clock: OnVirtualClock[Bounded]
) -> None:
    async def fails() -> None:
        raise error

    seen = on_virtual_clock(Bounded().run(fails))
    assert seen.call.failure is error
    assert (seen.value, seen.call.ending, seen.took, seen.late) == (None, Ending.SETTLED, 0.0, [])


def test_a_cut_from_above_propagates_and_leaves_the_call_half_the_grace(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        seen = Bounded()
        task = asyncio.create_task(seen.run(lambda: _swallows_cancellation(5.0)))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (seen.call.ending, seen.took) == (Ending.ABANDONED, 1.0 + INNER_GRACE_S)

    on_virtual_clock(check())


def test_a_call_that_stops_after_a_cut_during_its_grace_has_stopped(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        seen = Bounded()
        task = asyncio.create_task(seen.run(lambda: _swallows_cancellation(0.15)))
        await asyncio.sleep(BOUND_S + 0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (seen.call.ending, seen.took) == (Ending.STOPPED, BOUND_S + 0.15)

    on_virtual_clock(check())


def test_a_second_cut_during_the_grace_does_not_make_the_call_look_stopped(
    on_virtual_clock: OnVirtualClock[None],
) -> None:
    async def check() -> None:
        seen = Bounded()
        task = asyncio.create_task(seen.run(lambda: _swallows_cancellation(5.0)))
        await asyncio.sleep(BOUND_S + 0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen.call.ending is Ending.ABANDONED

    on_virtual_clock(check())


class TestRunsFromAbove:
    """`until_cut`: the one outer bound."""

    def test_work_that_ends_in_time_is_returned(self, on_virtual_clock: OnVirtualClock[object]) -> None:
        assert on_virtual_clock(until_cut(_returns_after(1.0))) == "value"

    def test_the_nearest_deadline_cuts_work_off(self, on_virtual_clock: OnVirtualClock[object]) -> None:
        async def check() -> object:
            with deadline_scope(2.0):
                assert await until_cut(_returns_after(60.0)) is Cut.DEADLINE
            return now()

        assert on_virtual_clock(check()) == 2.0

    def test_stubborn_work_is_walked_away_from_after_the_grace(self, on_virtual_clock: OnVirtualClock[object]) -> None:
        async def check() -> object:
            with deadline_scope(2.0):
                assert await until_cut(_swallows_cancellation(30.0)) is Cut.DEADLINE
            return now()

        assert on_virtual_clock(check()) == 2.0 + GRACE_S

    def test_with_no_time_left_nothing_is_started(self, on_virtual_clock: OnVirtualClock[None]) -> None:
        async def check() -> None:
            started: list[bool] = []

            async def work() -> None:
                started.append(True)

            with deadline_scope(0.0):
                assert await until_cut(work()) is Cut.DEADLINE
            assert not started

        on_virtual_clock(check())

    def test_an_interrupt_cuts_work_off(self, on_virtual_clock: OnVirtualClock[object]) -> None:
        async def check() -> object:
            interrupt = asyncio.Event()
            asyncio.get_running_loop().call_later(1.0, interrupt.set)
            assert await until_cut(_returns_after(60.0), interrupt) is Cut.INTERRUPT
            return now()

        assert on_virtual_clock(check()) == 1.0

    def test_an_error_of_the_work_propagates(self, on_virtual_clock: OnVirtualClock[object]) -> None:
        async def broken() -> None:
            raise KeyError("a bug")

        with pytest.raises(KeyError):
            on_virtual_clock(until_cut(broken()))


def test_guarded_hands_on_a_stop_that_was_asked_for(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        seen = await Bounded().run(lambda: _returns_after(60.0))
        assert seen.call.failure is None
        assert seen.call.settled_at == BOUND_S

    on_virtual_clock(check())


async def test_a_sync_body_runs_on_a_daemon_thread_with_its_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("the caller's")

    def body() -> tuple[str, bool]:
        return variable.get(), threading.current_thread().daemon

    seen = await Bounded().run(lambda: in_daemon_thread(body))
    assert seen.value == ("the caller's", True)
    assert seen.call.settled_at is not None


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), RuntimeError("x"), asyncio.CancelledError()])
async def test_whatever_a_sync_body_raises_is_its_own_failure(error: BaseException) -> None:
    def body() -> None:
        raise error

    seen = await Bounded().run(lambda: in_daemon_thread(body))
    assert seen.call.failure is error


@pytest.mark.slow
async def test_a_sync_call_has_stopped_only_when_its_thread_has() -> None:
    release, started = threading.Event(), threading.Event()

    def body() -> str:
        started.set()
        release.wait()
        return "late value"

    seen = await Bounded().run(lambda: in_daemon_thread(body), 0.2)
    assert started.is_set()
    assert seen.call.ending is Ending.ABANDONED
    assert 0.2 <= seen.took < 2.0
    release.set()
    await seen.came.wait()
    assert seen.late == ["late value"]


@pytest.mark.slow
async def test_a_blocking_part_is_not_the_end_of_its_body() -> None:
    async def body() -> str:
        part = await off_loop(lambda: "part")
        await asyncio.sleep(0.3)
        return f"{part} and more"

    seen = await Bounded().run(body, 0.1)
    assert (seen.call.ending, seen.value) == (Ending.STOPPED, None)  # it came late, whenever its thread had ended
    seen = await Bounded().run(body, 5.0)
    assert (seen.call.ending, seen.value) == (Ending.SETTLED, "part and more")


async def test_a_blocking_part_that_is_stuck_leaves_its_call_abandoned() -> None:
    release = threading.Event()
    seen = await Bounded().run(lambda: off_loop(release.wait), 0.1)
    assert seen.call.ending is Ending.ABANDONED
    release.set()


async def test_a_blocking_part_needs_no_bounded_call() -> None:
    assert await off_loop(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await off_loop(lambda: 1 // 0)


async def test_too_many_abandoned_threads_refuse_further_sync_work_until_they_end() -> None:
    release = threading.Event()
    stuck = [Bounded() for _ in range(MAX_ABANDONED_WORKERS + 1)]
    await asyncio.gather(*(seen.run(lambda: in_daemon_thread(release.wait), 0.2) for seen in stuck))
    with pytest.raises(WorkersExhausted, match="33 earlier sync calls"):
        check_workers()
    release.set()
    await asyncio.gather(*(seen.came.wait() for seen in stuck))
    for thread in threading.enumerate():
        if thread.name == "tool call":
            thread.join(2.0)
    check_workers()


def test_a_failed_body_carries_its_cause(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        caught: list[object] = []

        async def work() -> None:
            async def fails() -> None:
                raise SystemExit(9)

            try:
                await guarded(fails)
            except BodyFailed as exc:
                caught.append(exc.__cause__)

        await bounded_call(Call(), work, bound_s=1.0, on_late=caught.append)
        assert [type(error) for error in caught] == [SystemExit]

    on_virtual_clock(check())
