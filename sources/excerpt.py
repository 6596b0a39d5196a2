"""The few lines of a CI log that explain its failure, each with its number: no model, no network, bounded memory.

    gh run view RUN --log-failed -R OWNER/REPO | python -m sources.excerpt -
    python -m sources.excerpt --max-bytes 2000 build.log

A log is read twice: once for the lines that say something by their shape (`sources/shapes.py`), and then around those
few that were chosen. What stands first in the failing step is taken for the cause, if its shape is as sure as any.
"""

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from bounded.text import MASK
from sources.lines import LINE_BYTES, Line, Page, cleaned, count, lines, raw_lines, readable_twice, unstamped
from sources.scan import Mark, Scan, Step, read_through
from sources.shapes import Strength, heads, place, read, runs_on, stops

MAX_BYTES: Final = 4_000
NO_FAILURE: Final = "no failure found"
_USAGE: Final = "python -m sources.excerpt [--max-bytes N] FILE|-"
_BLOCKS: Final = 24
_BLOCK_LINES: Final = 60
_FOUND: Final = 500  # lines that hold a text which are looked at for showing
_BEFORE: Final = 12  # lines before a block that may be shown for context
_BEFORE_THE_END: Final = 40  # and before the end of a step in which nothing has a known shape
_PART = re.compile(r"(head|tail)|around:(\d{1,12})|search:(.+)", re.DOTALL)


@dataclass(slots=True, kw_only=True)
class _Block:
    """Lines that belong together: what states a cause, what stands around it, and what stands before."""

    strength: Strength = Strength.NONE
    core: list[Line] = field(default_factory=list)
    rest: list[Line] = field(default_factory=list)
    before: list[Line] = field(default_factory=list)


def excerpt(log: BinaryIO, max_bytes: int = MAX_BYTES, secrets: Collection[str] = ()) -> str:
    """What explains the failure, in at most `max_bytes` bytes of UTF-8, or `no failure found` and its last lines."""
    with readable_twice(log) as file:
        scan = read_through(file)
        page = Page(max_bytes, scan.total)
        if scan.failed():
            _explain(file, scan, page, secrets)
        else:
            page.head(NO_FAILURE)
            end = scan.cleanup or Mark(number=scan.total + 1, offset=file.seek(0, os.SEEK_END))
            _add(page, reversed(_upto(file, end, secrets)[-5:]), 1.0)
        return page.text()


def part(log: BinaryIO, which: str, max_bytes: int, secrets: Collection[str] = ()) -> str:
    """The lines that `which` names, in the form of an excerpt: `head`, `tail`, `around:LINE` or `search:TEXT`.

    Raises:
        ValueError: `which` is none of these, or names a line that the log does not have.
    """
    found = _PART.fullmatch(which)
    if not found:
        raise ValueError(f"part is head, tail, around:LINE or search:TEXT, not {which[:40]!r}")
    end, around, text = found.groups()
    with readable_twice(log) as file:
        total = count(file)
        page = Page(max_bytes, total)
        if not total:
            page.head("the log is empty")
        file.seek(0)
        if text:
            _search(file, text, page, secrets)
            return page.text()
        middle = int(around) if around else 1 if end == "head" else total
        if around and not 1 <= middle <= total:
            raise ValueError(f"part=around:{middle} names a line that is not there: the log has {total:,}")
        reach = max_bytes // 4  # a line takes four bytes at least
        near = lines(file, middle - reach, middle + reach, secrets)
        _add(page, sorted(near, key=lambda line: abs(line.number - middle)), 1.0)
        return page.text()


def _search(file: BinaryIO, text: str, page: Page, secrets: Collection[str]) -> None:
    first: list[Line] = []
    held = 0
    for line in _holding(file, text, secrets):
        held += 1
        if len(first) < _FOUND:
            first.append(line)
    page.head(f"{held:,} line{'' if held == 1 else 's'} with {text[:60]!r}")
    _add(page, first, 1.0)


def _holding(file: BinaryIO, text: str, secrets: Collection[str]) -> Iterator[Line]:
    plain, needle = re.compile(rb"[\t -~]*"), text.encode("utf-8", "replace")
    for number, raw in enumerate(raw_lines(file), 1):
        # Of plain text cleaning only takes away, but for the mask.
        if needle in raw or not plain.fullmatch(raw) or MASK in text or text in MASK:
            line = Line(number=number, text=cleaned(raw, secrets))
            if text in line.text:
                yield line


def _explain(file: BinaryIO, scan: Scan, page: Page, secrets: Collection[str]) -> None:
    for step in scan.steps():
        for mark in (step.end, step.said, step.title):
            if mark:
                page.add(_at(file, mark, secrets), 0.3)
        end = step.end or step.stop or Mark(number=scan.total + 1, offset=file.seek(0, os.SEEK_END))
        blocks = _blocks(file, step, end.number, secrets)
        tail = _Block(before=_upto(file, end, secrets, _BEFORE if blocks else _BEFORE_THE_END))
        _fill(page, blocks, [_at(file, mark, secrets) for mark in reversed(step.summary)], tail)


def _fill(page: Page, blocks: list[_Block], summary: list[Line], tail: _Block) -> None:
    """What matters most comes first; each round may use so much of the page that the next has room."""
    first, told = (blocks or [tail])[0], {_gist(block) for block in blocks[:1]}
    others: list[_Block] = []
    weak: list[_Block] = []
    for block in blocks[1:]:
        if _gist(block) not in told:
            told.add(_gist(block))
            (others if block.strength >= Strength.STATED else weak).append(block)
    _add(page, first.core[:12], 0.6)
    _add(page, sorted([*first.core, *first.rest], key=_number)[:20], 0.7)
    _add(page, summary[:3], 0.8)
    for block in others:
        _add(page, block.core[:4], 0.85)
    _add(page, reversed(first.before[-3:]), 0.9)
    _add(page, reversed(tail.before[-3:]), 0.95)
    for block in (first, *others, *weak):
        _add(page, sorted([*block.core, *block.rest], key=_number), 1.0)
        _add(page, reversed(block.before[-3:]), 1.0)
    _add(page, reversed(first.before), 1.0)
    if first.strength < Strength.NAMED:
        _add(page, reversed(tail.before), 1.0)


def _gist(block: _Block) -> tuple[str, ...]:
    """What is the same in an error that is only repeated."""
    return tuple(line.text for line in block.core[:2])


def _number(line: Line) -> int:
    return line.number


def _add(page: Page, some: Iterable[Line], share: float) -> None:
    for line in some:
        if not page.add(line, share):
            return


def _blocks(file: BinaryIO, step: Step, end: int, secrets: Collection[str]) -> list[_Block]:
    """The lines around what states a cause, the likeliest first."""
    clusters: list[list[Mark]] = []
    for mark in sorted({*step.causes, *step.raised}, key=lambda mark: mark.number):
        if clusters and mark.number - clusters[-1][-1].number <= 3:
            clusters[-1].append(mark)
        else:
            clusters.append([mark])
    blocks: list[_Block] = []
    covered: set[int] = set()
    for cluster in sorted(clusters, key=_rank):
        left = [mark for mark in cluster if mark.number not in covered]
        if left and len(blocks) < _BLOCKS:
            block = _block(file, left, end, secrets)
            covered.update(line.number for line in (*block.core, *block.rest))
            blocks.append(block)
    return blocks


def _rank(cluster: list[Mark]) -> tuple[int, int]:
    """The surest first; of equally sure ones the first, but of mere exceptions the last."""
    strength, number = max(mark.strength for mark in cluster), cluster[0].number
    return -min(strength, Strength.NAMED), number if strength >= Strength.STATED else -number


def _block(file: BinaryIO, cluster: list[Mark], end: int, secrets: Collection[str]) -> _Block:
    first, last = cluster[0], cluster[-1].number
    block = _Block(strength=max(mark.strength for mark in cluster), before=_upto(file, first, secrets))
    file.seek(first.offset)
    section, loose, since = False, 0, 9
    blank: list[Line] = []
    for number, raw in zip(range(first.number, end), raw_lines(file), strict=False):
        line = Line(number=number, text=cleaned(raw, secrets))
        reading, goes_on = read(line.text), runs_on(line.text)
        section = section or (number == first.number and heads(line.text))
        if number > last:
            if not line.text and len(blank) < 2:
                blank.append(line)
                continue
            loose += reading.strength < Strength.RAISED and not goes_on and not section
            over = not line.text or heads(line.text) or stops(line.text)
            if over or loose > 2 or number - first.number >= _BLOCK_LINES:
                break
        since = 0 if reading.strength >= Strength.RAISED else since + 1
        block.rest += blank
        blank = []
        (block.core if since == 0 or (since <= 2 and goes_on) else block.rest).append(line)
    return block


def _upto(file: BinaryIO, mark: Mark, secrets: Collection[str], most: int = _BEFORE) -> list[Line]:
    """At most so many lines before a place, back to where a step or its script began."""
    back = min(mark.offset, 4 * LINE_BYTES)
    file.seek(mark.offset - back)
    raws = file.read(back).split(b"\n")
    if not raws[-1]:
        raws.pop()
    whole = raws if back == mark.offset else raws[1:]
    found: list[Line] = []
    for number, raw in zip(range(mark.number - 1, 0, -1), reversed(whole[-most:]), strict=False):
        if place(unstamped(raw.decode("utf-8", "replace"))):
            break
        found.insert(0, Line(number=number, text=cleaned(raw, secrets)))
    return found


def _at(file: BinaryIO, mark: Mark, secrets: Collection[str]) -> Line:
    file.seek(mark.offset)
    return Line(number=mark.number, text=cleaned(next(raw_lines(file), b""), secrets))


def main(arguments: list[str]) -> int:
    """Print the excerpt of a file, `-` being standard input. Status 2 if it cannot be read."""
    max_bytes = MAX_BYTES
    if "--max-bytes" in arguments:
        at = arguments.index("--max-bytes")
        number = "".join(arguments[at + 1 : at + 2])
        if not re.fullmatch(r"[1-9]\d{0,8}", number, re.ASCII):
            return _refuse(f"--max-bytes takes a number from 1 to 999999999, not {number!r}")
        max_bytes, arguments = int(number), arguments[:at] + arguments[at + 2 :]
    if arguments in (["--help"], ["-h"]):
        print(f"usage: {_USAGE}")
        return 0
    if len(arguments) != 1 or (arguments[0].startswith("-") and arguments[0] != "-"):
        return _refuse("it takes one file, or - for standard input")
    try:
        with open(0 if arguments[0] == "-" else arguments[0], "rb", closefd=arguments[0] != "-") as file:
            if arguments[0] == "-" and not file.peek(1):
                return _refuse("standard input is empty: what should have written a log there said why not")
            text = excerpt(file, max_bytes)
    except OSError as exc:
        return _refuse(f"{arguments[0]!r} cannot be read: {exc.strerror or exc}")
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to say, at exit neither
    except OSError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"excerpt: the output could not be written: {exc.strerror or exc}", file=sys.stderr)
        return 1
    return 0


def _refuse(why: str) -> int:
    print(f"excerpt: {why}; usage: {_USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
