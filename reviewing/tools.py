"""The read-only inspection tools over one root, and what a read of theirs opened.

    tools = inspection_tools(root, await changes_since(root, None))

What a tool will not serve it refuses in ordinary returned text, without an extent.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bounded.text import MASK, clean, fit, visible
from reviewing.changes import MAX_NAMES_BYTES, Changes, ReviewError, run_git, top_of
from reviewing.confined import parts_of, read_inside, resolve_inside

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

TOOL_SET = "review"
MAX_READ_LINES = 2_000
MAX_LINE = 2_000
MAX_HIT = 500
MAX_LISTED = 1_000
MAX_ASKED = 500
MAX_QUERY_BYTES = 200_000
_MAX_NAMED = 50
_MAX_WALKED = 100_000
_MAX_REFUSAL = 1_000
# Bytes that are not UTF-8: ten, or one in a hundred characters. Old sources have an accent or two.
_MAX_UNDECODABLE = 10
_LINE_BREAK = "\N{SYMBOL FOR NEWLINE}"
_HIT = re.compile(rb"([^\0]*)\0(\d+)[:\0]([^\n]*)\n")
_KEY = "PRIVATE KEY-----"
_MAX_KEY = 8_000
# Only what no line of code is: whatever follows a key's first line would else be hidden, and count as read.
_KEY_BODY = re.compile(r"[\s\"'(#*]*+[A-Za-z0-9+/]{16,}+={0,2}+(?:\\[nr])*+[\s\"'),;+\\]*+")

_DESCRIPTIONS = {
    "list_files": f"List the files, at most {MAX_LISTED:,}. pattern: a part of a path, or a path in which * stands for"
    " anything.",
    "read_file": f"Read lines of a file, each after its number, at most {MAX_READ_LINES:,} a call. end_line 0 is the"
    " last line.",
    "query_code": "Find the lines that hold query: a literal, or if regex is true an extended regular expression. glob:"
    " where to look, as in src/*.py.",
    "show_diff": "Show the unified diff of one changed file.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What one read opened: made by control flow, handed over as the tool's artifact, never read from text.

    A line over `MAX_LINE` characters is shown cut and is in no extent: the extent ends before it and the read ends with
    it, so that a further call, from the line behind it, can be credited.

    Attributes:
        opened_path: relative to the root, POSIX, links followed.
        start_line: the first line returned, from 1.
        end_line: the last line returned whole, `start_line - 1` for none.
        total_lines: of the file.
        eof: the file's last line is within.
        complete_sha256: of all bytes of the file, as this very call has read them.
        source_bytes: how many these are.
        line_ends: for each line the offset in the tool's text after which it is whole, with its newline if one follows.
    """

    opened_path: str
    start_line: int
    end_line: int
    total_lines: int
    eof: bool
    complete_sha256: str
    source_bytes: int
    line_ends: tuple[int, ...]


def inspection_tools(root: Path, changes: Changes, *, secrets: frozenset[str] = frozenset()) -> "list[BaseTool]":
    """`list_files`, `read_file`, `query_code` and `show_diff` over `root`; each returns text, and an Extent or None.

    Args:
        secrets: masked in all that is returned. What masks the text later has to know the same ones, or it moves the
            offsets of the extent.

    Raises:
        ReviewError: `root` is no folder that can be read.
    """
    from langchain_core.tools import StructuredTool

    try:
        top = root.resolve(strict=True)
        os.scandir(top).close()
    except OSError as exc:
        raise ReviewError(fit(f"{root} cannot be read: {exc.strerror}", _MAX_REFUSAL, secrets)) from exc

    def refused(fault: ReviewError) -> tuple[str, None]:
        return fit(str(fault), _MAX_REFUSAL, secrets), None

    async def list_tracked(pattern: str = "") -> tuple[str, None]:
        try:
            return _listed(await _tracked(top), pattern, secrets), None
        except ReviewError as fault:
            return refused(fault)

    def list_all(pattern: str = "") -> tuple[str, None]:
        try:
            return _listed(_walked(top), pattern, secrets), None
        except ReviewError as fault:
            return refused(fault)

    def read_file(path: str, start_line: int = 1, end_line: int = 0) -> tuple[str, Extent | None]:
        try:
            return _read(top, path, start_line, end_line, secrets)
        except ReviewError as fault:
            return refused(fault)

    async def query_code(query: str, glob: str = "", regex: bool = False) -> tuple[str, None]:
        try:
            return await _query(top, query, glob, "-E" if regex else "-F", secrets), None
        except ReviewError as fault:
            return refused(fault)

    def show_diff(path: str) -> tuple[str, None]:
        try:
            return _diff(changes, path, secrets), None
        except ReviewError as fault:
            return refused(fault)

    listing: dict[str, Any] = {"coroutine": list_tracked} if top_of(top) else {"func": list_all}
    bodies = {
        "list_files": listing,
        "read_file": {"func": read_file},
        "query_code": {"coroutine": query_code},
        "show_diff": {"func": show_diff},
    }
    return [
        StructuredTool.from_function(
            **body, name=name, description=_DESCRIPTIONS[name], response_format="content_and_artifact"
        )
        for name, body in bodies.items()
    ]


def _read(root: Path, path: str, start_line: int, end_line: int, secrets: frozenset[str]) -> tuple[str, Extent]:
    opened = resolve_inside(root, path)
    data = read_inside(root, opened)
    lines = _lines(opened, data)
    total = len(lines)
    if not 1 <= start_line <= max(total, 1) or (end_line != 0 and end_line < start_line):
        raise ReviewError(
            f"{opened} has {total:,} lines: start_line is one of them, end_line is not before it, or 0 for the last"
        )
    asked = total if end_line == 0 else min(end_line, total)
    shown = _part(lines, start_line, min(asked, start_line + MAX_READ_LINES - 1), secrets)
    cut = [len(text) > MAX_LINE for text in shown]
    whole = cut.index(True) if any(cut) else len(shown)
    shown = shown[: whole + len(list(itertools.takewhile(bool, cut[whole:])))]
    last = start_line + len(shown) - 1
    note = f"; over {MAX_LINE:,} characters a line is cut and does not count as read" if len(shown) > whole else ""
    if last < asked:
        note += f"; this call ends here, the next goes on with start_line={last + 1}"
    where = f"{opened}, lines {start_line}-{last} of {total}" if total else f"{opened}, no lines: it is empty"
    rows = [f"{start_line + at}| {_cut(text, MAX_LINE)}" for at, text in enumerate(shown)]
    rows = _settled([where + note, *rows], secrets)
    text = "\n".join(rows)
    ends = itertools.accumulate(len(row) + 1 for row in rows)
    return text, Extent(
        opened_path=opened,
        start_line=start_line,
        end_line=start_line + whole - 1,
        total_lines=total,
        eof=start_line + whole - 1 == total,
        complete_sha256=hashlib.sha256(data).hexdigest(),
        source_bytes=len(data),
        line_ends=tuple(min(end, len(text)) for end in ends)[1 : whole + 1],
    )


def _lines(path: str, data: bytes) -> list[str]:
    """The lines of a text: each ends at LF and nothing else, and a CR before that is not shown."""
    text = data.decode("utf-8", "replace")
    undecodable = text.count("\N{REPLACEMENT CHARACTER}") - data.count("\N{REPLACEMENT CHARACTER}".encode())
    if b"\0" in data[:8192] or undecodable > max(_MAX_UNDECODABLE, len(text) // 100):
        raise ReviewError(f"{path} is binary, or not in UTF-8, and is not read; read_file reads text")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if lines:
        lines[0] = lines[0].removeprefix("\ufeff")
    return [line.removesuffix("\r") for line in lines]


def _part(lines: Sequence[str], start_line: int, last: int, secrets: frozenset[str]) -> list[str]:
    """Lines as they may be shown, with a private key masked as well that begins before the first of them."""
    first, reach = start_line - 1, 0
    while first > 0 and reach < _MAX_KEY:
        first -= 1
        reach += len(lines[first]) + 1
    return _shown(lines[first:last], secrets)[start_line - 1 - first :]


def _shown(lines: Iterable[str], secrets: frozenset[str]) -> list[str]:
    """Lines cleaned and masked one by one; of a private key also the lines behind its first.

    Control characters are shown first: in what cleaning takes out code could hide, and would count as read.
    """
    shown, reach = [], 0
    for line in lines:
        reach -= len(line)
        masked = reach > 0 and _KEY_BODY.fullmatch(line)
        shown.append(MASK if masked else clean(visible(line), secrets).replace("\n", _LINE_BREAK))
        if _KEY in line:
            reach = _MAX_KEY if line.rfind("-----BEGIN") > line.rfind("-----END") else 0
    return shown


def _settled(rows: Sequence[str], secrets: frozenset[str]) -> list[str]:
    """Rows such that cleaning them again, one by one or together, changes nothing."""
    rows = [_row(row, secrets) for row in rows]
    if clean("\n".join(rows), secrets) != "\n".join(rows):
        for at, pair in enumerate(itertools.pairwise(rows)):
            if clean("\n".join(pair), secrets) != "\n".join(pair):  # a `cookie:` at its end would take the next row
                rows[at] = _row(rows[at] + MASK, secrets)
    return rows


def _row(text: str, secrets: frozenset[str]) -> str:
    for _ in range(5):
        before, text = text, clean(text, secrets).replace("\n", _LINE_BREAK)
        if text == before:
            return text
    return MASK


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [... {len(text) - limit:,} of {len(text):,} characters cut here ...]"


async def _query(root: Path, query: str, glob: str, kind: str, secrets: frozenset[str]) -> str:
    for asked in (query, glob):
        if len(asked) > MAX_ASKED or re.search(r"[\n\0\ud800-\udfff]", asked):
            raise ReviewError(f"query and glob are one line each, of at most {MAX_ASKED} characters")
    if not query:
        raise ReviewError("query is empty: it is a part of a line, or with regex an extended regular expression")
    # All files as text, or an attribute could hide a source as binary. Both ways git walks the folders, of which a link
    # is none; through the index alone it would follow one that stands where a folder was.
    where = "--untracked" if top_of(root) else "--no-index"
    command = ("grep", where, "-z", "-n", "-a", "--no-color", "--no-column", "--no-textconv", "--no-recurse-submodules")
    # After "./" nothing of a glob is a pathspec's magic, and ** stands for folders in one that has none.
    scope = [f"./{'/'.join(parts_of(glob)).replace('**/', '*')}"] if glob else []
    ran = await run_git(root, *command, kind, "-e", query, "--", *scope, at_most=MAX_QUERY_BYTES)
    if ran.status not in (0, 1) and not ran.cut:
        raise ReviewError(f"git grep cannot do it: {ran.said or f'status {ran.status}'}")
    rows, left = [], 0
    for name, number, line in _HIT.findall(ran.output):
        text = line.decode("utf-8", "replace").removesuffix("\r")
        if "\0" in text or "\N{REPLACEMENT CHARACTER}" in text:
            left += 1
            continue
        shown = _cut(_row(visible(text), secrets), MAX_HIT)
        rows.append(_row(f"{name.decode('utf-8', 'replace')}:{int(number)}: {shown}", secrets))
    head = f"{len(rows):,} lines hold it" if rows else "no line holds it"
    head += f"; {left:,} more are not shown, as they are no text" if left else ""
    head += f"; there is more: the search was ended at {MAX_QUERY_BYTES:,} bytes, ask for less" if ran.cut else ""
    return "\n".join([head, *rows])


def _diff(changes: Changes, path: str, secrets: frozenset[str]) -> str:
    name = "/".join(parts_of(path))
    if name not in changes.files:
        known = ", ".join(sorted(changes.files)[:_MAX_NAMED]) or "none"
        more = f" and {len(changes.files) - _MAX_NAMED:,} more" if len(changes.files) > _MAX_NAMED else ""
        raise ReviewError(f"{path} is not among the changed files; these are: {known}{more}")
    rows = changes.files[name].split("\n")
    if not rows[-1]:
        rows.pop()
    head = f"{name}, against {changes.against}"
    if not rows:
        return _row(f"{head}: git shows no text; if it is text, read_file shows the file", secrets)
    if len(rows) > MAX_READ_LINES:
        head += f", {MAX_READ_LINES:,} of {len(rows):,} lines of the diff; read_file shows the file"
        rows = rows[:MAX_READ_LINES]
    # Without the first character of each row a private key that was taken out is one as well.
    shown = _shown([row[1:].removesuffix("\r") for row in rows], secrets)
    body = [f"{row[:1]}{_cut(text, MAX_LINE)}" for row, text in zip(rows, shown, strict=True)]
    return "\n".join(_settled([head, *body], secrets))


async def _tracked(root: Path) -> list[str]:
    """Files that git knows, and new ones that it is not told to ignore."""
    ran = await run_git(
        root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate", at_most=MAX_NAMES_BYTES
    )
    if ran.status != 0 and not ran.cut:
        raise ReviewError(f"git cannot list the files: {ran.said or f'status {ran.status}'}")
    return ran.names


def _walked(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name.casefold() != ".git"]
        yield from (Path(folder, name).relative_to(root).as_posix() for name in files)


def _listed(paths: Iterable[str], pattern: str, secrets: frozenset[str]) -> str:
    if len(pattern) > MAX_ASKED:
        raise ReviewError(f"a pattern has at most {MAX_ASKED} characters")
    found = sorted(path for path in itertools.islice(paths, _MAX_WALKED) if _matches(path, pattern))
    head = f"{len(found):,} files"
    if len(found) > MAX_LISTED:
        head += f", of which {MAX_LISTED:,} are listed; give a narrower pattern"
    return "\n".join([head, *(_row(path, secrets) for path in found[:MAX_LISTED])])


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern from the model fits: by plain comparisons, so that none can take long."""
    if "*" not in pattern:
        return pattern in path
    first, *middle, last = re.sub(r"\*+", "*", pattern.replace("**/", "*")).split("*")
    at, end = len(first), len(path) - len(last)
    if at > end or not path.startswith(first) or not path.endswith(last):
        return False
    for part in middle:
        at = path.find(part, at, end) + len(part)
        if at < len(part):
            return False
    return True
