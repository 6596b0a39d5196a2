"""Which lines of the changed files were really read, and which were not.

coverage = Coverage(manifest_of(root, changes))
coverage.credit_extent(extent, text_given=delivered, tool_text=text)
coverage.report()
"""

import errno
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from reviewing.changes import Changes, ReviewError
from reviewing.confined import MAX_FILE_BYTES, open_inside
from reviewing.tools import Extent

Manifest = Mapping[str, int | None]


def manifest_of(root: Path, changes: Changes) -> dict[str, int | None]:
    """How many lines of each changed file there are to read, as the files stand now.

    None where there are no lines: a file that is gone. What no tool shows has lines all the same, and stays unread: a
    binary or a huge file those of its first `MAX_FILE_BYTES`, a link or a repository in the repository one.
    """
    top = root.resolve()
    return {path: _lines_to_read(top, path) for path in changes.files}


def credited(extent: Extent, text_given: str, tool_text: str) -> range:
    """The numbers of an extent's lines that lie whole inside what was delivered: an uncut prefix of the tool's text.

    Empty if none does, or if what was delivered is anything else than a prefix.
    """
    whole = bisect_right(extent.line_ends, len(text_given)) if tool_text.startswith(text_given) else 0
    return range(extent.start_line, extent.start_line + whole)


@dataclass(slots=True)
class _Read:
    """What was read of one state of one file: `lines` holds first and last lines, sorted, apart from each other."""

    total_lines: int
    complete_sha256: str
    lines: list[list[int]] = field(default_factory=list)


class Coverage:
    """The ledger of credited lines, over a manifest of what there is to read, or over none.

    Args:
        manifest: path -> lines, None for a file without any; None for the whole of it where no one declared anything.
    """

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest
        self._reads: dict[str, _Read] = {}
        self._gap = ""

    def credit(self, path: str, start: int, end: int, total_lines: int, complete_sha256: str) -> None:
        """Enter the lines from `start` to `end` as read; `end` is `start - 1` for none, as of an empty file.

        A file that is no longer what it was (another digest, another length) loses what was credited before.

        Raises:
            ValueError: these are no lines of a file of that length.
        """
        if not (1 <= start <= end + 1 and end <= total_lines):
            raise ValueError(f"lines {start}-{end} of {total_lines}: a range lies within its file")
        self._observe(path, total_lines, complete_sha256)
        if start <= end or total_lines == 0:
            read = self._reads.setdefault(path, _Read(total_lines, complete_sha256))
            read.lines = _merged([*read.lines, *([[start, end]] if end else [])])

    def credit_extent(self, extent: Extent, *, text_given: str, tool_text: str) -> range:
        """Enter what a delivered read is worth, and return its lines: an empty file has none, and counts as read."""
        lines = credited(extent, text_given, tool_text)
        self._observe(extent.opened_path, extent.total_lines, extent.complete_sha256)
        if extent.total_lines or text_given == tool_text:
            self.credit(extent.opened_path, lines.start, lines.stop - 1, extent.total_lines, extent.complete_sha256)
        return lines

    def set_gap(self, reason: str) -> None:
        """Say that a source is missing something: from here on nothing is complete. The first reason stays."""
        self._gap = self._gap or reason

    def covers(self, path: str, line: int) -> bool:
        """Whether this very line was credited."""
        read = self._reads.get(path)
        return read is not None and any(first <= line <= last for first, last in read.lines)

    def report(self) -> dict[str, Any]:
        """The state, its reason if there is one, and first and last lines per path.

        A path without ranges is an empty file: read, or missing. Bytes of a path that are not UTF-8 are escaped.
        """
        missing = {path: ranges for path in self._manifest or () if (ranges := self._missing(path)) is not None}
        state, reason = "complete", self._gap
        if self._manifest is None:
            state = "unobserved"
        elif missing or self._gap:
            state = "incomplete"
        elif not self._manifest:
            reason = "declared_empty"
        return {
            "state": state,
            **({"reason": reason} if reason else {}),
            "missing_ranges": _storable(missing),
            "read_ranges": _storable({path: read.lines for path, read in self._reads.items()}),
        }

    def _observe(self, path: str, total_lines: int, complete_sha256: str) -> None:
        read = self._reads.get(path)
        if read is not None and (read.total_lines, read.complete_sha256) != (total_lines, complete_sha256):
            del self._reads[path]

    def _missing(self, path: str) -> list[list[int]] | None:
        declared = (self._manifest or {})[path]
        read = self._reads.get(path)
        if declared is None:
            return None
        if read is None or read.total_lines != declared:  # what was read is not the file that was declared
            return [[1, declared]] if declared else []
        gaps, following = [], 1
        for first, last in [*read.lines, [declared + 1, declared + 1]]:
            if following < first:
                gaps.append([following, first - 1])
            following = last + 1
        return gaps or None


def _merged(ranges: Iterable[list[int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = [merged[-1][0], max(last, merged[-1][1])]
        else:
            merged.append([first, last])
    return merged


def _storable(ranges: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    return {
        path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"): [list(pair) for pair in pairs]
        for path, pairs in sorted(ranges.items())
    }


def _lines_to_read(root: Path, path: str) -> int | None:
    try:
        with open_inside(root, PurePosixPath(path).parts) as file:
            data = file.read(MAX_FILE_BYTES)
    except ReviewError:
        return 1
    except OSError as exc:
        # Gone is gone; of what cannot be read, a link or a repository in the repository as well, a line stays unread.
        return None if exc.errno in (errno.ENOENT, errno.ENOTDIR) else 1
    return data.count(b"\n") + (1 if data and not data.endswith(b"\n") else 0)
