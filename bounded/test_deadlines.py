"""Deadlines only narrow, on whichever clock runs."""

import asyncio
import contextvars
import math

import pytest

from bounded.deadlines import deadline_scope, now, outside_deadlines, time_left
from conftest import OnVirtualClock


def test_without_a_scope_time_is_unlimited() -> None:
    assert time_left() is None


def test_an_inner_scope_shortens_what_is_left_and_never_lengthens_it(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        with deadline_scope(10.0):
            with deadline_scope(60.0):
                assert time_left() == 10.0
            with deadline_scope(4.0):
                await asyncio.sleep(1)
                assert time_left() == 3.0
            assert time_left() == 9.0
            with deadline_scope(None):
                assert time_left() == 9.0
        assert time_left() is None

    on_virtual_clock(check())


@pytest.mark.parametrize("passed", [0, 0.0, -5.0, -math.inf])
def test_a_scope_that_has_passed_leaves_nothing(passed: float) -> None:
    with deadline_scope(passed), deadline_scope(60.0):
        assert time_left() == 0.0


def test_what_is_left_is_never_below_zero(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        with deadline_scope(1.0):
            await asyncio.sleep(5)
            assert time_left() == 0.0

    on_virtual_clock(check())


def test_a_task_stands_under_the_scopes_of_the_code_that_started_it(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def left() -> float | None:
        return time_left()

    async def check() -> None:
        with deadline_scope(7.0):
            inside = asyncio.create_task(left())
        outside = asyncio.create_task(left())
        assert (await inside, await outside) == (7.0, None)

    on_virtual_clock(check())


def test_a_copied_context_carries_the_scope_to_another_thread() -> None:
    with deadline_scope(50.0):
        context = contextvars.copy_context()
    assert context.run(time_left) == pytest.approx(50.0, abs=5.0)


def test_a_scope_ends_when_its_body_raises() -> None:
    with pytest.raises(KeyError), deadline_scope(5.0):
        raise KeyError
    assert time_left() is None


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s"), deadline_scope(math.nan):
        pass


def test_the_clock_is_the_running_loops(on_virtual_clock: OnVirtualClock[float]) -> None:
    async def later() -> float:
        start = now()
        await asyncio.sleep(1_000)
        return now() - start

    assert on_virtual_clock(later()) == 1_000


def test_outside_deadlines_only_scopes_of_its_own_count_and_the_callers_come_back_after_it(
    on_virtual_clock: OnVirtualClock[None],
) -> None:
    async def check() -> None:
        with deadline_scope(5.0):
            with outside_deadlines():
                assert time_left() is None
                with deadline_scope(60.0):
                    assert time_left() == 60.0
                await asyncio.sleep(1)
            assert time_left() == 4.0
            with pytest.raises(KeyError), outside_deadlines():
                raise KeyError
            assert time_left() == 4.0

    on_virtual_clock(check())


def test_a_task_that_is_started_outside_deadlines_stands_under_none(
    on_virtual_clock: OnVirtualClock[float | None],
) -> None:
    async def left() -> float | None:
        return time_left()

    async def check() -> float | None:
        with deadline_scope(0.0), outside_deadlines():
            task = asyncio.create_task(left())
        return await task

    assert on_virtual_clock(check()) is None
