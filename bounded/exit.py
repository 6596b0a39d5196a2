"""How the process ends: by `os._exit`, once, whatever is stuck; signals, a watchdog, the status.

A plain return from `main` would wait for every thread and for the loop's default executor, where a stuck name lookup
lives. Four things end the process here: the main thread after its last line; a second Ctrl-C; a watchdog thread where
the event loop is blocked; and behind it, where the interpreter lock itself is held, `faulthandler`, whose thread does
not need it (then with status 1, which is faulthandler's own).
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from bounded.calls import GRACE_S
from bounded.outcomes import Outcome

# After the deadline and its grace the run still has to say its last words.
WATCHDOG_SLACK_S = 0.25
FAULTHANDLER_AFTER_S = 1.0

_ending = threading.Lock()


def end_process(status: int, last_words: Callable[[], None] | None = None) -> NoReturn:
    """Say `last_words`, flush, and end the process at once. Whoever comes second waits here for the end.

    Output that can no longer be written (a closed pipe, a full disk) does not keep the process; only the disk is worth
    a word.
    """
    _ending.acquire()
    faulthandler.cancel_dump_traceback_later()  # from here on only a slow reader can take time, and a person may wait
    try:
        if last_words is not None:
            last_words()
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as exc:
        status = 1 if status == 0 else status
        with contextlib.suppress(OSError):
            sys.stderr.write(f"the output could not be written: {exc.strerror}\n")
    except BaseException:  # a bug in the last words: the process ends all the same, and not as a success
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


def arm_watchdog(deadline_s: float, last_words: Callable[[], None]) -> None:
    """End the process soon after `deadline_s`, in seconds from now, if by then nothing else has.

    `last_words` is called on the watchdog's thread while the event loop's thread is stuck.
    """
    patience = min(deadline_s + GRACE_S + WATCHDOG_SLACK_S, threading.TIMEOUT_MAX / 2)

    def bite() -> None:
        time.sleep(patience)
        if _ending.locked():
            return
        faulthandler.dump_traceback(all_threads=True)
        end_process(Outcome.DEADLINE.exit_status, last_words)

    faulthandler.dump_traceback_later(patience + FAULTHANDLER_AFTER_S, exit=True)
    threading.Thread(target=bite, name="watchdog", daemon=True).start()


def on_interrupt(interrupt: asyncio.Event) -> None:
    """Let Ctrl-C set `interrupt` in the running loop, and a second one end the process at once.

    A Python-level handler instead of `loop.add_signal_handler`: that one is only called by a loop that still turns.
    """
    loop = asyncio.get_running_loop()
    interrupted = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            os._exit(Outcome.INTERRUPTED.exit_status)
        interrupted = True
        loop.call_soon_threadsafe(interrupt.set)

    signal.signal(signal.SIGINT, handle)
