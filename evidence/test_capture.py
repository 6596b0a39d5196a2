"""Recordings hold the very bytes that went out, whatever becomes of the reader; frames show the last screen of them."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from evidence.capture import CUT, MAX_BYTES, MAX_ROWS, frames

ROOT = Path(__file__).parent.parent
BOTH = pytest.mark.parametrize("capture", ["tee", "pseudo_terminal"])
WIDTHS = [1440, 390, 320]

SETTINGS = os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": ""}
# A child's stdout is what went out of it, its stderr is what it recorded of that.
BEGIN = """
import os, sys, threading, time
from evidence import capture
finish = capture.{capture}()
"""
END = """
recorded = finish()
print("later", flush=True)
assert finish() == recorded
sys.stderr.buffer.write(recorded)
sys.stderr.flush()
os._exit(0)
"""
PRINTS = r"""
print("plain, é → ⚠️ and", "\udcff")
sys.stdout.flush()
sys.stdout.buffer.write(bytes(range(256)))
sys.stdout.write("no line end")
"""
PRINTED = "plain, é → ⚠️ and \\udcff\n".encode() + bytes(range(256)) + b"no line end"
# Below the text layer: of what threads write to that at once, Python 3.11 and early ones of 3.12 lose some themselves.
WRITES_FROM_THREADS = """
def say(name):
    for number in range(500):
        sys.stdout.buffer.write(f"{name} {number} {'x' * 100}\\n".encode())
threads = [threading.Thread(target=say, args=(name,)) for name in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
# Prints a line, waits until the reader has left, and prints more than any buffer holds.
LOSES_ITS_READER = """
print("before", flush=True)
sys.stdin.read()
try:
    print("x" * 200_000, flush=True)
    print("y" * 200_000, flush=True)
except BrokenPipeError:
    pass
sys.stderr.buffer.write(finish())
sys.stderr.flush()
os._exit(0)
"""
FULL_PIPE = """
import os, sys
from evidence import capture
reader, writer = os.pipe()
os.dup2(writer, 1)
os.set_blocking(1, False)
"""
PARTIAL_WRITE = """
finish = capture.tee()
try:
    sys.stdout.buffer.write(b"x" * 1_000_000)
except BlockingIOError:
    pass
recorded = finish()
assert 0 < len(recorded) < 1_000_000
assert recorded == os.read(reader, 1_000_000)
os._exit(0)
"""
STUCK_READER = """
os.write(1, b"x" * 1_000_000)
os.set_blocking(1, True)
capture.DRAIN_S = 0.2
finish = capture.pseudo_terminal()
print("unread")
assert finish().startswith(b"unread")  # the relay may be stuck before it has read the line's end
os._exit(0)
"""
IN_A_TERMINAL = """
assert sys.stdout.isatty() and os.isatty(1) and sys.stdout.fileno() == 1
assert os.get_terminal_size(1) == (100, 50)
print("shown at once, without a flush")
assert sys.stdin.readline() == "seen\\n"
start = time.monotonic()
finish()
assert time.monotonic() - start < capture.DRAIN_S / 2
assert not sys.stdout.isatty() and not os.isatty(1)
print("still there", flush=True)
os._exit(0)
"""
ON_A_TERMINAL = """
assert sys.stdout.isatty() and sys.stdout.fileno() == 1
print("shown at once, without a flush")
assert sys.stdin.readline() == "seen\\n"
os._exit(0 if finish() == b"shown at once, without a flush\\n" else 1)
"""
WRITES_DIRECTLY = """
os.write(1, b"past Python, ")
print("and through it", flush=True)
"""
OPENED_ANEW = """
import os, sys
from evidence import capture
sys.stdout = open(os.devnull, "w")
finish = capture.tee()
print("x", flush=True)
assert finish() == b"x\\n"
os._exit(0)
"""


def run(
    code: str, stdout: int | IO[bytes] = subprocess.PIPE, **environment: str
) -> "subprocess.CompletedProcess[bytes]":
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=SETTINGS | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done


def as_terminal_gets_it(data: bytes, capture: str) -> bytes:
    return data.replace(b"\n", b"\r\n") if capture == "pseudo_terminal" else data


@pytest.mark.slow
@BOTH
def test_what_is_recorded_is_what_went_out_up_to_the_end_and_nothing_after_it(capture: str) -> None:
    done = run(BEGIN.format(capture=capture) + PRINTS + END)
    assert done.stderr == as_terminal_gets_it(PRINTED, capture)
    assert done.stdout == done.stderr + b"later\n"


@pytest.mark.slow
@BOTH
def test_what_threads_write_is_all_recorded_in_the_order_in_which_they_went_out(capture: str) -> None:
    done = run(BEGIN.format(capture=capture) + WRITES_FROM_THREADS + END)
    assert done.stdout == done.stderr + b"later\n"
    expected = {f"{name} {number} {'x' * 100}".encode() for name in range(8) for number in range(500)}
    assert set(done.stderr.splitlines()) == expected
    assert done.stderr.count(b"\n") == len(expected)


@pytest.mark.slow
@BOTH
def test_a_reader_that_leaves_does_not_end_the_recording_or_fail_it(capture: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(capture=capture) + LOSES_ITS_READER],
        cwd=ROOT,
        env=SETTINGS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        before = process.stdout.readline()
        process.stdout.close()
        process.stdin.close()
        recorded = process.stderr.read()
        assert process.wait(10) == 0
    assert before == as_terminal_gets_it(b"before\n", capture)
    printed_to_no_one = b"x" * 200_000 + b"\r\n" + b"y" * 200_000 + b"\r\n"
    assert recorded == before + (printed_to_no_one if capture == "pseudo_terminal" else b"")


@pytest.mark.slow
def test_of_a_partial_write_the_part_that_was_accepted_is_recorded() -> None:
    run(FULL_PIPE + PARTIAL_WRITE)


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_up_the_end_of_a_recording_for_a_moment_only() -> None:
    run(FULL_PIPE + STUCK_READER)


@pytest.mark.slow
@pytest.mark.parametrize(("unbuffered", "by_line"), [("", b"False"), ("1", b"True")])
def test_what_stdout_was_it_still_is(unbuffered: str, by_line: bytes) -> None:
    says = "print('é →', sys.stdout.isatty(), sys.stdout.fileno(), sys.stdout.line_buffering)"
    code = BEGIN.format(capture="tee") + says + END
    done = run(code, PYTHONIOENCODING="latin-1:strict", PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == b"\xe9 \\u2192 False 1 " + by_line + b"\n"


@pytest.mark.slow
def test_a_stdout_that_the_program_has_opened_itself_is_not_closed_under_the_recording() -> None:
    assert run(OPENED_ANEW).stderr == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capture", "recorded"), [("tee", b"and through it\n"), ("pseudo_terminal", b"past Python, and through it\r\n")]
)
def test_only_a_terminal_sees_who_writes_past_python(capture: str, recorded: bytes) -> None:
    assert run(BEGIN.format(capture=capture) + WRITES_DIRECTLY + END).stderr == recorded


@pytest.mark.slow
def test_the_process_has_a_terminal_until_the_recording_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(capture="pseudo_terminal") + IN_A_TERMINAL],
        cwd=ROOT,
        env=SETTINGS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"shown at once, without a flush\r\n"
        assert process.communicate(b"seen\n", timeout=10)[0] == b"still there\n"
        assert process.returncode == 0


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["", "unbuffered"])
def test_a_stdout_that_is_a_file_gets_what_is_recorded_behind_what_it_held(
    capture: str, unbuffered: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.txt"
    path.write_bytes(b"before\n")
    with path.open("ab") as file:
        done = run(BEGIN.format(capture=capture) + PRINTS + END, stdout=file, PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == as_terminal_gets_it(PRINTED, capture)
    assert path.read_bytes() == b"before\n" + done.stderr + b"later\n"


@pytest.mark.slow
@BOTH
def test_what_goes_to_nobody_is_recorded_all_the_same(capture: str) -> None:
    with open(os.devnull, "wb") as nobody:
        done = run(BEGIN.format(capture=capture) + PRINTS + END, stdout=nobody)
    assert done.stderr == as_terminal_gets_it(PRINTED, capture)


@pytest.mark.slow
def test_a_recorded_terminal_is_still_one() -> None:
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(capture="tee") + ON_A_TERMINAL],
        cwd=ROOT,
        env=SETTINGS,
        stdin=subprocess.PIPE,
        stdout=slave,
    ) as process:
        os.close(slave)
        assert os.read(master, 1000) == b"shown at once, without a flush\r\n"
        process.communicate(b"seen\n", timeout=10)
        assert process.returncode == 0
    os.close(master)


def frame(screen: str | bytes, width: int) -> bytes:
    return frames(screen.encode() if isinstance(screen, str) else screen)[f"completed-end-{width}@2x.png"]


def size(png: bytes) -> tuple[int, int]:
    from PIL import Image

    return Image.open(io.BytesIO(png)).size


def colours(png: bytes) -> set[object]:
    from PIL import Image

    return {colour for _, colour in Image.open(io.BytesIO(png)).getcolors(1_000_000) or []}


def test_the_frames_are_three_of_exact_widths_and_as_high_as_the_lines_used() -> None:
    sizes = {name: size(png) for name, png in frames(b"one\ntwo\nthree\n\n\n").items()}
    assert sizes == {
        "completed-end-1440@2x.png": (2880, 64 + 3 * 36),
        "completed-end-390@2x.png": (780, 64 + 3 * 34),
        "completed-end-320@2x.png": (640, 64 + 3 * 34),
    }


def test_no_output_is_a_blank_frame() -> None:
    assert [len(colours(png)) for png in frames(b"").values()] == [1, 1, 1]


def test_frames_show_what_was_written_and_the_same_bytes_make_the_same_frames() -> None:
    assert frames(b"one") == frames(b"one")
    for one, two in zip(frames(b"one").values(), frames(b"two").values(), strict=True):
        assert one != two
        assert len(colours(one)) > 2


def test_bold_and_colour_are_shown() -> None:
    plain, bold, red = (frame(f"\x1b[{style}mtext", 390) for style in ("0", "1", "31"))
    assert plain != bold
    assert (0xF4, 0x70, 0x67) in colours(red) - colours(plain)


@pytest.mark.parametrize("character", ["\ufe0f", "\ufe0e", "\u200d", "\u200b"])
def test_what_stands_after_a_character_without_width_is_not_lost(character: str) -> None:
    assert frames(f"⚠{character} and more".encode()) == frames("⚠ and more".encode())
    assert frames("⚠ and more".encode()) != frames("⚠".encode())


@pytest.mark.parametrize("redraw", ["\r", "\r\x1b[K"])
def test_a_progress_bar_ends_in_its_last_state_at_each_width(redraw: str) -> None:
    bars = [f"{'#' * done}{'.' * (90 - done)} {done}/90" for done in (30, 60, 90)]
    assert frames(redraw.join(bars).encode()) == frames(bars[-1].encode())


def test_a_line_feed_alone_begins_a_line() -> None:
    assert frames(b"one\n  two\nthree") == frames(b"one\r\n  two\r\nthree\r\n")


def test_a_long_line_wraps_where_the_frame_ends_and_not_where_the_terminal_did() -> None:
    line = "".join(chr(ord("a") + number % 26) for number in range(150))
    assert [size(frame(line, width))[1] for width in WIDTHS] == [64 + 36, 64 + 4 * 34, 64 + 5 * 34]
    assert frame(line, 320) == frame("\n".join(line[start : start + 36] for start in range(0, 150, 36)), 320)


def test_a_wide_character_takes_two_cells_and_is_not_halved_at_the_end_of_a_row() -> None:
    from PIL import Image, ImageChops

    wide, narrow = (Image.open(io.BytesIO(frame(text, 320))) for text in ("漢 after", "xx after"))
    assert ImageChops.difference(wide, narrow).getbbox() is not None
    behind = (32 + 2 * 16, 0, *wide.size)
    assert ImageChops.difference(wide.crop(behind), narrow.crop(behind)).getbbox() is None
    assert frame("x" * 35 + "漢", 320) == frame("x" * 35 + "\n漢", 320)
    assert frame("x" * 99 + "漢", 1440) == frame("x" * 99 + " 漢", 1440)


@pytest.mark.parametrize("character", ["😀", "漢", "\ue000", "\ufffd"])
def test_a_character_that_the_font_lacks_is_seen_to_be_there(character: str) -> None:
    assert frame(character, 390) != frame("", 390)


@pytest.mark.parametrize(
    "sequence",
    [b"\x1b[?5A", b"\x1b[1;2;3A", b"\x1b[25J", b"\xc2\x9b25K", b"\x1b[" + b"9" * 5000 + b"A", b"\x1b]8;;http://x\x07"],
)
def test_a_sequence_that_the_emulator_does_not_know_takes_nothing_with_it(sequence: bytes) -> None:
    assert frames(b"before " + sequence + b"after") == frames(b"before after")


def test_a_long_output_is_shown_from_its_end_and_the_frame_says_so() -> None:
    from PIL import Image

    numbers = [str(number) for number in range(1, MAX_ROWS + 301)]
    whole = frame("\n".join(numbers[:MAX_ROWS]), 320)
    assert size(whole) == (640, 64 + MAX_ROWS * 34)
    first_row = Image.open(io.BytesIO(whole)).crop((0, 0, 640, 32 + 34))
    assert first_row.tobytes() == Image.open(io.BytesIO(frame("1\n\n2", 320))).crop((0, 0, 640, 32 + 34)).tobytes()
    shown = [CUT, *numbers[1 - MAX_ROWS :]]
    assert frame("\n".join(numbers) + "\n", 320) == frame("\n".join(shown), 320)
    assert frame(b"first" + b"\0" * MAX_BYTES + b"last", 320) == frame(f"{CUT}\nlast", 320)
