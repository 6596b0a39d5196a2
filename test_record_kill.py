"""A batch that is killed, interrupted, stuck or cannot write: no sealed folder is ever wrong, and runs.json is whole.

Run as a program it makes the tries of the first two tests, each try in a folder of its own:

python test_record_kill.py FOLDER random    batches killed at random moments of their lives
python test_record_kill.py FOLDER each      one batch killed before each moment at which its sealing touches the disk
"""

import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import record
from ci import LocalCi
from conftest import ROOT
from evidence.verify import verify
from graph import build_graph
from models.offline import OfflineTriage
from sources.jobs import ci_tools
from test_record import HELD, OLD, QUICK, WORDS, Place, place

__all__ = ["place"]

pytestmark = pytest.mark.slow

TRIES = 50
BEYOND = 1.3  # of a batch's length: up to there it is killed, so that some are not
KINDS = {"random": WORDS + QUICK + WORDS.replace("words", "more"), "each": WORDS}
UNSEALED = "manifest.json: missing: no run folder, or one that is not sealed: its run was killed or is going on"
Count = Callable[[], None]


def nothing() -> None:
    pass


def begin(where: Path, own: str, before: Count = nothing) -> int:
    """Start a batch in a child that has imported everything already; returns its process id."""
    where.mkdir()
    command = Place(path=where).command("--model", "offline", own=own)[1:]
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(silent, descriptor)
        sys.argv = command
        before()
        record.main()
    return child


def ended(child: int) -> int:
    """How a child ended: its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_random_moments(folder: Path) -> list[int]:
    ends, moments = [], random.Random(20261130)
    for number in range(2):  # the first one warms up
        start = time.monotonic()
        ends.append(ended(begin(folder / f"whole-{number}", KINDS["random"])))
        length = time.monotonic() - start
    for number in range(TRIES):
        child = begin(folder / f"{number}", KINDS["random"])
        time.sleep(BEYOND * length * (number + moments.random()) / TRIES)
        os.kill(child, signal.SIGKILL)
        ends.append(ended(child))
    return ends


def at_each_moment(folder: Path) -> list[int]:
    ends: list[int] = []
    while 0 not in ends and len(ends) < 200:
        fatal = len(ends) + 1
        ends.append(ended(begin(folder / f"{fatal}", KINDS["each"], lambda fatal=fatal: die_before(fatal))))  # type: ignore[misc]
    return ends


def die_before(fatal: int) -> None:
    """From the stop of the batch's one run on: be killed right before touching the disk for the `fatal`-th time."""
    moments, stopped = itertools.count(1), False

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def touch(*arguments: Any, **named: Any) -> Any:
            nonlocal stopped
            stopped = stopped or any(isinstance(data, bytes) and b'"kind":"stop"' in data for data in arguments)
            if stopped and next(moments) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return touch

    for name in ("write", "fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def tried(folder: Path, how: str) -> list[int]:
    """Make the tries in one child, which imports everything once; returns how each ended."""
    command = [sys.executable, __file__, str(folder), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def sealed(place: Place) -> bool:
    """Whether a try's folder is sealed; it holds then, and is said to be unsealed otherwise; runs.json is whole."""
    saved = place.out.read_bytes()
    folders = sorted(place.path.glob("evidence/*"))
    if saved != OLD:
        assert folders
        assert json.loads(saved)["evidence"] == folders[0].name
        assert saved == (folders[0] / "runs.json").read_bytes()
    for folder in folders:
        if not (folder / "manifest.json").exists():
            assert verify(folder) == [UNSEALED]
        else:
            assert verify(folder) == []
            assert saved != OLD
            return True
    return False


def test_killed_at_random_moments_a_batch_leaves_no_wrong_folder_and_runs_json_whole(tmp_path: Path) -> None:
    ends = tried(tmp_path, "random")
    assert ends[:2] == [0, 0]
    assert set(ends) == {0, -signal.SIGKILL}
    holds = {path.name: sealed(Place(path=path)) for path in tmp_path.iterdir()}
    assert len(holds) == TRIES + 2
    assert set(holds.values()) == {True, False}


def test_killed_before_any_touch_of_the_disk_while_it_seals_it_leaves_nothing_wrong(tmp_path: Path) -> None:
    ends = tried(tmp_path, "each")
    assert ends == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    holds = [sealed(Place(path=tmp_path / f"{number + 1}")) for number in range(len(ends))]
    assert holds == sorted(holds)  # sealed once, and not before
    saved = [(tmp_path / f"{number + 1}" / "runs.json").read_bytes() != OLD for number in range(len(ends))]
    assert saved == sorted(saved)
    assert 0 < saved.index(True) < holds.index(True)
    assert len(ends) > 20


def when(process: "subprocess.Popen[str]", start: str) -> None:
    """Wait for the line of its stderr that starts so."""
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith(start):
        assert line, "it ended before"


def test_ctrl_c_seals_the_folder_as_interrupted_and_leaves_the_saved_file(place: Place) -> None:
    with place.start(own=QUICK + HELD + WORDS) as process:
        when(process, "held ...")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert place.out.read_bytes() == OLD
    assert stderr.splitlines()[-2:] == [
        f"interrupted: {place.out} is left as it was",
        f"evidence: {place.folder}",
    ]
    assert (verify(place.folder), place.manifest["outcome"]) == ([], "interrupted")
    inside = json.loads((place.folder / "runs.json").read_bytes())["scenarios"]
    assert [[run["outcome"] for run in scenario["runs"]] for scenario in inside] == [["answered"], ["interrupted"], []]
    assert [line for line in stdout.splitlines() if not line.startswith("  ")] == [
        "quick: answered",
        "held: interrupted",
        "words: -",
    ]


def full_pipe() -> tuple[int, int]:
    """A pipe that nothing more goes into."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer


def test_a_second_ctrl_c_ends_it_at_once_and_unsealed(place: Place) -> None:
    reader, writer = full_pipe()  # the last words will hang
    with place.start(own=HELD, stdout=writer) as process:
        when(process, "held ...")
        process.send_signal(signal.SIGINT)
        when(process, "held: interrupted")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    os.close(reader)
    os.close(writer)
    assert (place.out.read_bytes(), verify(place.folder)) == (OLD, [UNSEALED])


def test_a_reader_that_left_early_takes_nothing(place: Place) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = place.run(own=QUICK, stdout=writer)
    os.close(writer)
    assert done.returncode == 0
    assert "could not be written" not in done.stderr
    assert (verify(place.folder), place.manifest["outcome"]) == ([], "complete")
    assert place.out.read_bytes() == (place.folder / "runs.json").read_bytes()
    assert (place.folder / "stdout.txt").read_bytes() == b""


def test_what_cannot_be_saved_leaves_the_old_file_and_the_evidence(place: Place) -> None:
    out = place.path / ("o" * 250)  # the name fits, but not that of the temporary file beside it
    out.write_bytes(OLD)
    done = place.run("--out", str(out), own=WORDS)
    assert done.returncode == 1
    assert "the output could not be written: File name too long" in done.stderr.splitlines()
    assert out.read_bytes() == OLD
    assert verify(place.folder) == []
    assert [path.name for path in place.path.iterdir() if path.name.endswith(".tmp")] == []


def test_a_folder_that_became_read_only_leaves_the_old_file_and_the_evidence(place: Place) -> None:
    (place.path / "locked").mkdir()
    out = place.path / "locked" / "runs.json"
    out.write_bytes(OLD)
    with place.start("--out", str(out), own=HELD.replace("60", "1")) as process:
        when(process, "held ...")
        out.parent.chmod(0o500)
        _, stderr = process.communicate(timeout=30)
    out.parent.chmod(0o700)
    assert (process.returncode, out.read_bytes(), verify(place.folder)) == (1, OLD, [])
    assert "the output could not be written: Permission denied" in stderr.splitlines()


def test_a_disk_that_is_full_leaves_the_old_file_and_a_folder_that_says_it_is_unsealed(place: Place) -> None:
    long = WORDS.replace("Why?", "Why? " * 19_000)
    command = shlex.join(place.command("--model", "offline", own=long + long.replace("words", "more")))
    # No file may become longer than this: the events will.
    limited = ["bash", "-c", f"ulimit -f 170; exec {command}"]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "could not be written" in line]
    assert len(told) == 1
    assert "stays unsealed: events.jsonl: File too large" in told[0]
    assert "Traceback" not in done.stderr
    assert (place.out.read_bytes(), verify(place.folder)) == (OLD, [UNSEALED])


# A program in which the question "Why?" meets a bug before anything has been asked.
BUG = """
import sys, time
import record
real = record.ask
async def ask(graph, question, **given):
    if question == "Why?":
        BUG
    return await real(graph, question, **given)
record.ask = ask
sys.argv[0] = "record.py"
record.main()
"""


def test_a_bug_in_one_run_loses_its_own_row_only(place: Place) -> None:
    program = BUG.replace("BUG", 'raise KeyError("odd \\x1b[31m thing")')
    done = place.run(own=QUICK + WORDS + QUICK.replace('"quick"', '"last"'), program=program)
    assert done.returncode == 1
    assert [len(place.rows[name]) for name in ("quick", "words", "last")] == [1, 1, 1]
    assert place.rows["words"] == [{"failed": "KeyError: 'odd \\x1b[31m thing'"}]
    assert [place.rows[name][0]["outcome"] for name in ("quick", "last")] == ["answered", "answered"]
    assert (verify(place.folder), place.manifest["outcome"]) == ([], "incomplete")


def test_a_blocked_loop_is_ended_by_the_watchdog_and_seals_nothing_wrong(place: Place) -> None:
    own = "".join(f"{scenario}deadline_s = 0.2\n" for scenario in (QUICK, WORDS))
    done = place.run(own=own, program=BUG.replace("BUG", "time.sleep(60)"))
    assert done.returncode == 1
    assert (verify(place.folder), place.manifest["outcome"]) == ([], "incomplete")
    assert [len(place.rows[name]) for name in ("quick", "words")] == [1, 1]


if __name__ == "__main__":
    build_graph(OfflineTriage(), ci_tools(LocalCi()))  # imports what every run imports
    made = {"random": at_random_moments, "each": at_each_moment}[sys.argv[2]](Path(sys.argv[1]))
    print(json.dumps(made))
