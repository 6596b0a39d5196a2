"""The faults themselves: each is told apart, says how all of its calls end, and is as wrong as its name says."""

import asyncio
import contextlib
import socket
import threading
from urllib.parse import urlsplit

import pytest

from bounded.outcomes import CallOutcome, SourceGap
from fault_cases import (
    FAULTS,
    INTERPRETER_HELD,
    INTERRUPTED,
    LATE,
    LOOP_BLOCKED,
    PROVIDER_FAULTS,
    Fault,
    Gate,
    Tools,
    provider,
)

ALL = (*FAULTS, *INTERRUPTED, *PROVIDER_FAULTS, LOOP_BLOCKED, INTERPRETER_HELD)


def test_each_fault_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL)


@pytest.mark.parametrize("fault", [fault for fault in ALL if fault is not INTERPRETER_HELD], ids=str)
def test_a_fault_says_how_each_of_its_calls_ends(fault: Fault) -> None:
    assert len(fault.endings) == len(fault.tools)
    words = {word for ending in fault.endings for word in ending.split()[:1]}
    assert words <= {outcome.value for outcome in CallOutcome}


def test_every_way_for_a_call_to_end_is_among_the_faults() -> None:
    said = {word for fault in ALL for ending in fault.endings for word in ending.split()}
    assert {*(outcome.value for outcome in CallOutcome), *(gap.value for gap in SourceGap)} <= said


async def test_what_swallows_a_cancellation_goes_on_until_its_gate_opens() -> None:
    gate = Gate()
    stubborn = asyncio.create_task(Tools(gate).swallow_cancellation())
    await asyncio.sleep(0)
    for _ in range(3):
        stubborn.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not stubborn.done()
    gate.open()
    assert await stubborn == LATE


@pytest.mark.slow
def test_a_tool_asleep_in_a_thread_holds_it_until_its_gate_opens() -> None:
    gate, values = Gate(), []
    worker = threading.Thread(target=lambda: values.append(Tools(gate).sleep_in_thread()), daemon=True)
    worker.start()
    worker.join(0.1)
    assert (worker.is_alive(), values) == (True, [])
    gate.open()
    worker.join(10)
    assert values == [LATE]


@pytest.mark.slow
def test_a_provider_that_never_answers_lets_go_with_its_gate() -> None:
    gate = Gate()
    with contextlib.ExitStack() as stack:
        with provider(gate, [b""]) as url:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=10))
            client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
        client.settimeout(10)
        assert client.recv(1) == b""
