"""How the process ends: by `os._exit`, once, whatever is stuck; signals, a watchdog, the status.

A plain return from `main` would wait for every thread that is no daemon, for tasks that do not obey a cancellation and
for the loop's default executor, where a stuck name lookup lives. What ends the process: the main thread after its last
line; a second Ctrl-C; a watchdog thread where the event loop is blocked; where the interpreter lock itself is held,
`faulthandler`, whose thread does not need it (then with status 1, faulthandler's own); and behind all of these,
where even writing is stuck, the kernel's alarm clock (SIGALRM).
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn

from bounded.calls import GRACE_S
from bounded.outcomes import Outcome
from bounded.text import clean, secret_values

# After the deadline and its grace the run still has to say its last words.
WATCHDOG_SLACK_S = 0.25
FAULTHANDLER_AFTER_S = 1.0
ALARM_AFTER_S = 2.0
# A pager may be paused and a terminal stopped, but not for ever.
READER_S = 60.0

_LONGEST_ALARM_S = 1e8
_ending = threading.Lock()
_pressed = threading.Event()


def end_process(status: int, last_words: Callable[[], None] | None = None) -> NoReturn:
    """Say `last_words`, flush, and end the process at once. Whoever comes second waits here for the end.

    Output that can no longer be written (a closed pipe, a full disk) does not keep the process; only the disk is worth
    a word. A reader that does not read keeps it for `READER_S` seconds at the most.
    """
    _ending.acquire()
    faulthandler.cancel_dump_traceback_later()
    _set_alarm(READER_S)
    threading.Thread(target=_lose_patience, args=(status,), name="reader's limit", daemon=True).start()
    try:
        if last_words is not None:
            last_words()
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as exc:
        status = 1 if status == 0 else status
        with contextlib.suppress(OSError):
            sys.stderr.write(f"the output could not be written: {exc.strerror or exc}\n")
    except BaseException:  # a bug in the last words: the process ends all the same, and not as a success
        sys.stderr.write(clean(traceback.format_exc(), secret_values(os.environ)))
        status = 1
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(status)


def run_to_exit(work: Coroutine[Any, Any, NoReturn], secrets: frozenset[str] = frozenset()) -> NoReturn:
    """Run `work`, which ends the process, on a loop of its own; what leaves it nevertheless ends the process as well.

    Not `asyncio.run`: after an exception that would wait for every task that does not obey its cancellation. A
    SystemExit or KeyboardInterrupt in a task that someone else started leaves the loop past every handler in it.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(work)
    except BaseException:
        bug = clean(traceback.format_exc(), secrets)

        def report() -> None:
            sys.stderr.write(f"{bug}ended by the bug above\n")

        end_process(1, report)
    raise AssertionError("unreachable: the process has ended")


def arm_last_resorts(patience_s: float) -> None:
    """End the process after so many seconds although the interpreter lock is held, or although nothing can be written.

    Arming them again, as `arm_watchdog` does, takes the place of the earlier moment.
    """
    faulthandler.dump_traceback_later(patience_s + FAULTHANDLER_AFTER_S, exit=True)
    _set_alarm(patience_s + ALARM_AFTER_S)


def arm_watchdog(deadline_s: float, give_up: Callable[[], int], last_words: Callable[[], None]) -> None:
    """End the process soon after `deadline_s`, in seconds from now, if by then nothing else has.

    Both are called on the watchdog's thread while the event loop's thread is stuck: `give_up` returns the status that
    the process ends with.
    """
    patience = min(deadline_s + GRACE_S + WATCHDOG_SLACK_S, threading.TIMEOUT_MAX / 2)

    def bite() -> None:
        time.sleep(patience)
        if _ending.locked():
            return
        end_process(give_up(), last_words_and_stacks)

    def last_words_and_stacks() -> None:
        last_words()
        sys.stdout.flush()  # before the stacks: writing those may block as well, with the interpreter lock held
        faulthandler.dump_traceback(all_threads=True)

    arm_last_resorts(patience)
    threading.Thread(target=bite, name="watchdog", daemon=True).start()


def _lose_patience(status: int) -> None:
    time.sleep(READER_S)  # a write that is stuck holds no lock
    os._exit(status)


def _set_alarm(seconds: float) -> None:
    if not hasattr(signal, "setitimer"):  # on Windows
        return
    if threading.current_thread() is threading.main_thread():  # whatever was inherited: the alarm has to be deadly
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, min(seconds, _LONGEST_ALARM_S))


def keep_interrupt() -> None:
    """Let a Ctrl-C wait for `on_interrupt`, from before there is something that has to be ended in order."""
    _pressed.clear()
    _handle_interrupt(_pressed.set, pressed=False)


def on_interrupt(interrupt: asyncio.Event) -> None:
    """Let Ctrl-C set `interrupt` in the running loop, and a second one end the process at once.

    A Python-level handler instead of `loop.add_signal_handler`: that one is only called by a loop that still turns.
    """
    loop = asyncio.get_running_loop()
    _handle_interrupt(lambda: loop.call_soon_threadsafe(interrupt.set), pressed=_pressed.is_set())
    if _pressed.is_set():
        _pressed.clear()
        interrupt.set()


def _handle_interrupt(tell: Callable[[], object], *, pressed: bool) -> None:
    interrupted = pressed

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            with contextlib.suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), b"\n")  # off the live line
            os._exit(Outcome.INTERRUPTED.exit_status)
        interrupted = True
        tell()

    signal.signal(signal.SIGINT, handle)
