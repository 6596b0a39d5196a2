"""What the process wrote to its terminal: the exact bytes, recorded as they go out, and pictures of its last screen.

`tee()` or `pseudo_terminal()` begins a recording; each returns the function that ends it and gives the bytes.
"""

import contextlib
import importlib
import io
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from PIL.ImageFont import FreeTypeFont
    from pyte.screens import Char

Finish = Callable[[], bytes]

# The window of the pseudo-terminal, in cells.
COLUMNS, LINES = 100, 50
DRAIN_S = 5.0

# What a frame shows of a long output is its end. The emulator takes about 3 s for a million bytes of text.
MAX_ROWS = 400
MAX_BYTES = 1_000_000
CUT = "[... earlier output not shown ...]"

# Widths in CSS pixels, each with its font size; there are two pixels of the image for one of these.
FONT_SIZES = {1440: 14, 390: 13, 320: 13}
PADDING = 16
DENSITY = 2
FONT = ("fontpkg_jetbrains_mono", "files/JetBrainsMono[wght].ttf")
REGULAR, BOLD = 400, 700
PAPER, INK = "#16191d", "#d8dce2"
# By the emulator's names: its brown is yellow, and black is drawn on black.
COLOURS = {
    "black": "#7d8590",
    "red": "#f47067",
    "green": "#6bc46d",
    "brown": "#daaa3f",
    "blue": "#6cb6ff",
    "magenta": "#dcbdfb",
    "cyan": "#56d4dd",
}

# Where a row of the emulator says that its line goes on in the next row: beside its cells, so that it scrolls along.
_GOES_ON = -1
_SEQUENCE = re.compile(rb"((?:\x1b\[|\xc2\x9b)[0-?]*[ -/]*[@-~])")


class _Recorder(io.FileIO):
    """A stream's descriptor, which keeps what the kernel accepted of every write."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "wb", closefd=False)
        self._stream = stream  # which may close the descriptor when it is collected
        self.kept = bytearray()
        self.sealed = False

    def write(self, data: "ReadableBuffer", /) -> int:
        accepted = super().write(data)
        if accepted and not self.sealed:  # a full pipe that does not block accepts None
            self.kept += memoryview(data)[:accepted]
        return accepted


def tee() -> Finish:
    """Record from here on what goes out through `sys.stdout`; who else writes to its descriptor is not seen.

    The function returned flushes, ends the recording and returns its bytes; what is printed later still goes out.
    It does not raise where the output cannot be written: what is left in the buffer fails at the next flush again.
    """
    before = sys.stdout
    before.flush()
    recorder = _Recorder(before)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(recorder),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=bool(before.line_buffering) or getattr(before, "write_through", False),
    )

    def finish() -> bytes:
        _flush()
        recorder.sealed = True
        return bytes(recorder.kept)

    return finish


def pseudo_terminal() -> Finish:
    """Put a terminal of 100 x 50 cells in the place of stdout, which relays to the stdout there was, and record that.

    The bytes are those that a terminal gets, so lines end in CR LF. The function returned puts the old stdout back,
    waits up to 5 s for the relay, and returns the bytes relayed. A process that ends without it may lose its last
    words. A reader that has left does not end the recording.

    Raises:
        ModuleNotFoundError: the system has no pseudo-terminals (Windows).
        OSError: it has none left.
    """
    import termios

    for name in ("pyte", "PIL", FONT[0]):  # for the frames: now, and not after a run that cannot be repeated
        importlib.import_module(name)
    if isinstance(sys.stdout, io.TextIOWrapper):  # first: where stdout is a file this seeks, as no terminal can
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    sys.stdout.flush()
    descriptor = sys.stdout.fileno()
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (LINES, COLUMNS))
    original = os.dup(descriptor)
    os.dup2(slave, descriptor)
    os.close(slave)  # the relay meets its end when no descriptor of that side is left
    kept = bytearray()
    relay = threading.Thread(target=_relay, args=(master, original, kept), name="pseudo-terminal", daemon=True)
    relay.start()

    def finish() -> bytes:
        _flush()
        os.dup2(original, descriptor)
        relay.join(DRAIN_S)
        return bytes(kept)

    return finish


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def _relay(master: int, original: int, kept: bytearray) -> None:
    watched = True
    with contextlib.suppress(OSError):  # EIO, where Linux has no descriptor left of the other side
        while data := os.read(master, 65_536):
            kept += data
            try:
                while data and watched:
                    data = data[os.write(original, data) :]
            except OSError:
                watched = False
    os.close(master)


def frames(screen: bytes) -> dict[str, bytes]:
    """The last screen that recorded bytes (UTF-8) leave, as PNG images by name, one for each width.

    The bytes are shown to one emulated terminal as wide as the pseudo-terminal; its lines are then laid out anew for
    each width, as terminals do when they are resized. At most 400 rows are shown, with a note where that is not all.
    """
    lines = _lines(screen)
    return {
        f"completed-end-{width}@{DENSITY}x.png": _drawn(lines, width * DENSITY, size * DENSITY)
        for width, size in FONT_SIZES.items()
    }


def _lines(screen: bytes) -> "list[list[Char]]":
    """The lines that an emulated terminal shows in the end, each as its cells, however many rows it took there."""
    import pyte

    class Terminal(pyte.Screen):
        def draw(self, data: str) -> None:
            for char in data:  # one by one: of a run, pyte loses what comes after a character without width, as U+FE0F
                if self.cursor.x + (2 if unicodedata.east_asian_width(char) in "WF" else 1) > self.columns:
                    self.cursor.x = self.columns  # where it wraps; of itself it would halve a wide character
                    self.buffer[self.cursor.y][_GOES_ON] = self.default_char
                super().draw(char)

    terminal = Terminal(COLUMNS, MAX_ROWS + 2)
    stream = pyte.ByteStream(terminal)
    for piece in _SEQUENCE.split(screen[-MAX_BYTES:].replace(b"\n", b"\r\n")):
        with contextlib.suppress(TypeError, ValueError, UnboundLocalError):  # how pyte fails at a sequence it lacks
            stream.feed(piece)

    lines: list[list[Char]] = [[]]
    for row in (terminal.buffer[y] for y in range(terminal.lines)):
        lines[-1] += (row[x] for x in range(terminal.columns))
        if _GOES_ON not in row:
            lines.append([])
    for line in lines:
        while line and line[-1].data == " ":
            line.pop()
    while lines and not lines[-1]:
        lines.pop()
    if terminal.cursor.y > MAX_ROWS or len(screen) > MAX_BYTES:
        lines.insert(0, _note())
    return lines


def _note() -> "list[Char]":
    from pyte.screens import Char

    return [Char(char) for char in CUT]


def _drawn(lines: "list[list[Char]]", width: int, size: int) -> bytes:
    """A PNG image `width` pixels wide of the lines in a font of `size` pixels."""
    from PIL import Image, ImageDraw

    regular, bold = _font(size, REGULAR), _font(size, BOLD)
    cell_width = round(regular.getlength("M"))
    cell_height = round(regular.getbbox("\N{FULL BLOCK}")[3]) - 1  # box drawings overlap from row to row
    padding = PADDING * DENSITY
    rows = [row for line in lines for row in _rows(line, (width - 2 * padding) // cell_width)]
    if len(rows) > MAX_ROWS:
        rows = [_note(), *rows[1 - MAX_ROWS :]]
    image = Image.new("RGB", (width, 2 * padding + max(1, len(rows)) * cell_height), PAPER)
    draw = ImageDraw.Draw(image)
    for y, row in enumerate(rows):
        for x, char in enumerate(row):
            draw.text(
                (padding + x * cell_width, padding + y * cell_height),
                char.data,
                fill=COLOURS.get(char.fg.removeprefix("bright"), INK),
                font=bold if char.bold else regular,
            )
    png = io.BytesIO()
    image.save(png, "PNG")
    return png.getvalue()


def _rows(line: "list[Char]", columns: int) -> "Iterator[list[Char]]":
    start = 0
    while len(line) - start > columns:
        end = start + columns
        if line[end].data == "":  # the second half of a wide character
            end -= 1
        yield line[start:end]
        start = end
    yield line[start:]


def _font(size: int, weight: int) -> "FreeTypeFont":
    from importlib.resources import files

    from PIL import ImageFont

    package, path = FONT
    # Cells are drawn one by one, so the basic layout will do; the other one depends on what the system has installed.
    font = ImageFont.truetype(
        io.BytesIO((files(package) / path).read_bytes()), size, layout_engine=ImageFont.Layout.BASIC
    )
    font.set_variation_by_axes([weight])
    return font
