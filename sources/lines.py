"""A log as numbered, cleaned lines, and a page that shows some of them within a size.

Lines are counted as an editor does: LF or CR LF ends one. What a carriage return inside a line overwrote is not shown.
A byte-order mark, timestamps, the columns of gh and control sequences are taken off; secrets are masked.
"""

import codecs
import re
import tempfile
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, Final

from bounded.text import MASK, clean

CHUNK: Final = 1 << 20
LINE_BYTES: Final = 16_384  # what is looked at of a line
_STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.]{0,12}Z"
_PREFIX = re.compile(
    rf"(?:[^\t]{{1,200}}\t[^\t]{{1,200}}\t(?=\ufeff?{_STAMP}))?"
    rf"\ufeff?(?:{_STAMP}(?: \d\d[OE](?:\+| |$)| |$)|\[{_STAMP}\](?: |$))"
)
# A line of a private key: the key's shape spans lines, and here each is cleaned alone. A digest has one case only.
_KEY_BODY = re.compile(r"(?=[^a-z]{0,75}[a-z])(?=[^A-Z]{0,75}[A-Z])[0-9A-Za-z+/]{60,76}={0,2}")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a log: its number from 1, and its text, cleaned."""

    number: int
    text: str


class Page:
    """Some lines of a log in order, with a line for each cut: never more bytes of UTF-8 than asked."""

    def __init__(self, max_bytes: int, total: int) -> None:
        self._max_bytes, self._total = max_bytes, total
        self._width = max(120, max_bytes // 12) if max_bytes >= 1_000 else max(40, max_bytes // 4)
        self._heading = ""
        self._shown: dict[int, str] = {}
        self._numbers: list[int] = []
        self._used = _size(_cut(total))

    def head(self, heading: str) -> None:
        """Begin with a line that is not the log's."""
        self._heading = f"{heading}\n"
        self._used += _size(self._heading)

    def add(self, line: Line, share: float = 1.0) -> bool:
        """Show a line too, if no more than this share of the size is then used. False if it is not shown."""
        if line.number in self._shown:
            return True
        text = line.text if len(line.text) <= self._width else f"{line.text[: self._width - 1].rstrip()}…"
        shown = f"{line.number}| {text}".rstrip() + "\n"
        at = bisect_left(self._numbers, line.number)
        before = self._numbers[at - 1] if at else 0
        after = self._numbers[at] if at < len(self._numbers) else self._total + 1
        cuts = _size(_cut(line.number - before - 1)) + _size(_cut(after - line.number - 1))
        used = self._used - _size(_cut(after - before - 1)) + cuts + _size(shown)
        if used > self._max_bytes * share:
            return False
        self._used = used
        self._shown[line.number] = shown
        insort(self._numbers, line.number)
        return True

    def text(self) -> str:
        """The page, each of its lines ended by LF."""
        parts, last = [self._heading], 0
        for number in self._numbers:
            parts += _cut(number - last - 1), self._shown[number]
            last = number
        parts.append(_cut(self._total - last))
        # Only the heading and a first cut can be over a very small size.
        return "".join(parts).encode()[: self._max_bytes].decode("utf-8", "ignore")


@contextmanager
def readable_twice(log: BinaryIO) -> Iterator[BinaryIO]:
    """The same log in a file that can seek, at its start. UTF-16 becomes UTF-8; what cannot seek is spooled."""
    first = log.read(2)
    wide = first in _UTF_16
    if log.seekable() and not wide:
        log.seek(0)
        yield log
        return
    decode = codecs.getincrementaldecoder("utf-16")("replace").decode
    with tempfile.TemporaryFile() as file:
        piece = first
        while piece:
            file.write(decode(piece).encode("utf-8", "replace") if wide else piece)
            piece = log.read(CHUNK)
        file.seek(0)
        yield file


def count(log: BinaryIO) -> int:
    """How many lines there are from where the file stands."""
    total, last = 0, b"\n"
    while piece := log.read(CHUNK):
        total, last = total + piece.count(b"\n"), piece[-1:]
    return total + (last != b"\n")


def raw_lines(log: BinaryIO) -> Iterator[bytes]:
    """The lines from where the file stands: of each its last state, and of that at most `LINE_BYTES`."""
    while piece := log.readline(LINE_BYTES):
        whole = piece.endswith(b"\n")
        held = last_state(piece)
        redrawn = piece.endswith(b"\r")
        while not whole and (piece := log.readline(LINE_BYTES)):
            whole = piece.endswith(b"\n")
            if text := piece.rstrip(b"\r\n"):
                begun = redrawn or b"\r" in text
                held = (last_state(text) if begun else held + text)[:LINE_BYTES]
                redrawn = piece.endswith(b"\r")
        yield held


def lines(log: BinaryIO, first: int, last: int, secrets: Collection[str] = ()) -> Iterator[Line]:
    """The lines `first` to `last` by number, of a file that stands at the start of line 1."""
    for number, raw in enumerate(islice(raw_lines(log), max(first, 1) - 1, last), max(first, 1)):
        yield Line(number=number, text=cleaned(raw, secrets))


def last_state(line: bytes) -> bytes:
    """What a line shows after its carriage returns."""
    line = line.rstrip(b"\r\n")
    return line if b"\r" not in line else line[line.rfind(b"\r") + 1 :]


def unstamped(text: str) -> str:
    """`text` without the columns of gh and the timestamp before it."""
    found = _PREFIX.match(text)
    return text[found.end() :] if found else text


def cleaned(raw: bytes, secrets: Collection[str] = ()) -> str:
    """What a line shows: its last state without what stands before it, without control sequences and secrets."""
    text = clean(_decoded(raw), secrets).replace("\n", " ").rstrip()
    return MASK if _KEY_BODY.fullmatch(text.strip()) else text


def unmasked(raw: bytes) -> str:
    """The same with its secrets, at a fraction of the time: for looking at, never for showing."""
    text = _decoded(raw)
    if text.isascii() and text.replace("\t", " ").isprintable():
        return text.rstrip()
    return cleaned(raw)


def _decoded(raw: bytes) -> str:
    return unstamped(last_state(raw)[:LINE_BYTES].decode("utf-8", "replace"))


def _cut(count: int) -> str:
    return f"... {count:,} line{'s' if count > 1 else ''} ...\n" if count else ""


def _size(text: str) -> int:
    return len(text.encode())
