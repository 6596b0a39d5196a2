"""The process ends: once, at once, whatever is stuck. Each in a child process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

STUCK_LOOKUP = """
import asyncio, threading
from bounded.exit import end_process
async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)  # as a stuck name lookup does
    end_process(3, lambda: print("last words"))
asyncio.run(main())
"""
BLOCKED_LOOP = """
import asyncio, time
from bounded.exit import arm_watchdog
async def main():
    arm_watchdog(0.2, lambda: 3, lambda: print("last words"))
    time.sleep(60)
asyncio.run(main())
"""
HELD_LOCK = """
import asyncio, re
from bounded.exit import arm_watchdog
async def main():
    arm_watchdog(0.2, lambda: 3, lambda: print("last words"))
    re.match("(a+)+$", "a" * 40 + "b")
asyncio.run(main())
"""
LEFT_THE_LOOP = """
import asyncio
from bounded.exit import run_to_exit
async def stuck():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
async def leaves():
    raise SystemExit("fake-secret")
async def main():
    tasks = [asyncio.create_task(stuck()), asyncio.create_task(leaves())]
    await asyncio.sleep(60)
run_to_exit(main(), frozenset({"fake-secret"}))
"""
STUCK_READER = """
import os
from bounded import exit
exit.READER_S = 0.5
{before}
reader, writer = os.pipe()
os.dup2(writer, 1)
exit.end_process(4, lambda: print("x" * 10_000_000))
"""
TWO_ENDS = """
import threading
from bounded.exit import end_process
def slow_words():
    threading.Thread(target=end_process, args=(4, lambda: print("second"))).start()
    print("first")
end_process(3, slow_words)
"""
PRINTS_MUCH = """
from bounded.exit import end_process
end_process(3, lambda: print("x" * 1_000_000))
"""
INTERRUPTED = """
import asyncio, time
from bounded.exit import end_process, on_interrupt
async def main():
    interrupt = asyncio.Event()
    on_interrupt(interrupt)
    print("ready", flush=True)
    {wait}
    end_process(130, lambda: print("interrupted"))
asyncio.run(main())
"""


def _run(code: str) -> tuple[int, str, str, float]:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def test_a_stuck_executor_does_not_hold_the_process() -> None:
    status, out, err, took = _run(STUCK_LOOKUP)
    assert (status, out, err) == (3, "last words\n", "")
    assert took < 5


def test_a_blocked_loop_is_ended_by_the_watchdog_after_its_last_words() -> None:
    status, out, err, took = _run(BLOCKED_LOOP)
    assert (status, out) == (3, "last words\n")
    assert "time.sleep(60)" in err or 'File "<string>", line 6' in err
    assert took < 5


def test_a_held_interpreter_lock_is_ended_by_faulthandler() -> None:
    status, out, err, took = _run(HELD_LOCK)
    assert (status, out) == (1, "")
    assert "Timeout" in err
    assert took < 6


def test_a_bug_in_the_last_words_is_neither_lost_nor_a_success() -> None:
    status, out, err, _took = _run("from bounded.exit import end_process; end_process(0, lambda: print(1 / 0))")
    assert (status, out) == (1, "")
    assert "ZeroDivisionError" in err


def test_what_leaves_the_loop_ends_the_process_although_a_task_is_stuck() -> None:
    status, out, err, took = _run(LEFT_THE_LOOP)
    assert (status, out) == (1, "")
    assert "SystemExit" in err
    assert "fake-secret" not in err
    assert took < 5


def test_only_the_first_end_speaks() -> None:
    status, out, err, _took = _run(TWO_ENDS)
    assert (status, out, err) == (3, "first\n", "")


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)",
        "import signal; signal.pthread_sigmask(0, {14})",
    ],
)
def test_a_reader_that_never_reads_is_not_waited_for_for_ever(before: str) -> None:
    status, _out, _err, took = _run(STUCK_READER.format(before=before))
    assert status in (4, -signal.SIGALRM)
    assert took < 5


def test_a_closed_pipe_changes_neither_status_nor_stderr() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS_MUCH], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(10) == 3


def test_output_that_cannot_be_written_is_worth_a_word() -> None:
    with open(os.devnull) as unwritable:
        process = subprocess.run(
            [sys.executable, "-c", "from bounded.exit import end_process; end_process(0, lambda: print('x'))"],
            cwd=ROOT,
            stdout=unwritable,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert process.returncode == 1
    assert process.stderr == "the output could not be written: Bad file descriptor\n"


@pytest.mark.parametrize(
    ("wait", "presses", "out"),
    [
        ("await interrupt.wait()", 1, "interrupted\n"),
        ("time.sleep(60)", 2, ""),  # a blocked loop hears the second one all the same
        ("await asyncio.Event().wait()", 2, ""),
    ],
)
def test_ctrl_c_is_heard_once_and_obeyed_at_once_the_second_time(wait: str, presses: int, out: str) -> None:
    code = INTERRUPTED.format(wait=wait)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)  # two signals that are pending together are delivered as one
        assert process.wait(5) == 130
        assert process.stdout.read() == out
