"""CI from a folder or a zip of logs and JUnit XML reports: each of these files is a job, and nothing needs a network.

    source = Folder("build-logs/")
    await source.jobs(None)

What is listed: `*.log`, `*.txt`, `*.out`, `*.err`, also numbered (`build.log.1`), files without an ending that hold
text, and `*.xml` that are JUnit reports. Of a run-log zip of GitHub (or its files) the jobs, not each step once more.

A report says itself whether its tests passed. Of a log only a failure that stands in it is known: without one its
state is unknown, and the note says how far it was looked at. Links are not followed, hidden files are not looked at.
"""

import io
import itertools
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import BinaryIO

from bounded.calls import off_loop
from sources.archive import members, unpack
from sources.jobs import Fault, Job, JobState, SourceError
from sources.junit import read_report

TIMEOUT_S = 20.0
MAX_FILES = 1_000
MAX_DEPTH = 12
# How much of one log is looked at for its state, and of all of them together: a listing has to come within its bound.
STATE_BYTES = 1 << 20
STATE_TOTAL = 32 << 20
_MAX_LISTED = 20_000
_SNIFFED = 1_024
_EXCERPT = 500
_LOG = re.compile(r".+\.(?:log|txt|out|err)(?:\.[0-9]{1,9})?", re.IGNORECASE)
_JOB_LOG = re.compile(r"-?[0-9]{1,10}_(.+)\.txt")
_STEP_LOG = re.compile(r"(?:-?[0-9]{1,10}_.+|system)\.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file that may be a job.

    Attributes:
        path: below the root.
        title: what its job is called.
        cost: about how many bytes have to be read to learn its state.
        open: raises SourceError where it may not or cannot be opened.
    """

    path: PurePosixPath
    title: str
    cost: int
    open: Callable[[], BinaryIO]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    state: JobState = JobState.UNKNOWN
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    job: Job
    file: _File


class Folder:
    """A directory or a zip as a job source. It is listed once: ids stay what they are while the run goes on.

    To be asked within a bounded call, as the tools are: its files may lie on a disk that does not answer.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._entries: Sequence[_Entry] | None = None
        self._listing = threading.Lock()

    @property
    def timeouts(self) -> Mapping[str, float | None]:
        return MappingProxyType({"list_ci_jobs": TIMEOUT_S, "fetch_job_log": TIMEOUT_S})

    async def jobs(self, pr: int | None, attempt: int | None = None) -> Sequence[Job]:
        """The files, in natural order of their paths, whatever pull request is named.

        Raises:
            SourceError: there is no such path, nothing in it or too much; the zip is refused; an attempt other than the
                first is asked for.
        """
        if attempt not in (None, 1):
            raise SourceError(Fault.NOT_FOUND, f"{self._path} holds a single attempt; there is no attempt {attempt}")
        return [entry.job for entry in await off_loop(self._list)]

    async def log(self, job_id: int) -> BinaryIO:
        """The bytes of a log, or the failures of a report as lines of text.

        Raises:
            SourceError: as `jobs`; there is no such job; its file cannot be read.
        """
        return await off_loop(partial(self._open, job_id))

    def _list(self) -> Sequence[_Entry]:
        with self._listing:
            if self._entries is None:
                self._entries = _entries(self._path)
            return self._entries

    def _open(self, job_id: int) -> BinaryIO:
        entries = self._list()
        if not 1 <= job_id <= len(entries):
            raise SourceError(Fault.NOT_FOUND, f"there is no job {job_id}; {self._path} has 1 to {len(entries)}")
        file = entries[job_id - 1].file
        log = file.open()
        if not _is_xml(file.path):
            return log
        with log:
            report = read_report(log)
        if report is None:
            raise SourceError(Fault.UNREADABLE, f"{file.path} is XML, but no JUnit report")
        return io.BytesIO(report.lines().encode("utf-8", "replace"))


def _entries(root: Path) -> Sequence[_Entry]:
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as exc:
        raise _cannot(exc, root) from exc
    if stat.S_ISDIR(mode):
        files = _without_steps(list(_in_directory(root)))
    elif stat.S_ISREG(mode):
        files = _without_steps(list(_in_zip(root)))
    else:
        raise SourceError(Fault.UNREADABLE, f"{root} is neither a directory nor a zip")
    if len(files) > MAX_FILES:
        raise SourceError(Fault.TOO_LARGE, f"{root} holds {len(files):,} logs and reports; name a part of it")
    entries: list[_Entry] = []
    left = STATE_TOTAL
    for file in sorted(files, key=_natural):
        if file.cost > left:
            standing: _Standing | None = _Standing(note="not looked at: it is more than a listing may read")
        else:
            left -= file.cost
            standing = _standing(file)
        if standing is not None:
            job = Job(job_id=len(entries) + 1, name=file.title, state=standing.state, note=standing.note)
            entries.append(_Entry(job=job, file=file))
    if not entries:
        raise SourceError(Fault.NOT_FOUND, f"{root} holds no logs (*.log, *.txt, ...) and no JUnit XML (*.xml)")
    return entries


def _standing(file: _File) -> _Standing | None:
    """How a file stands by what is in it; None if it turns out to be no job."""
    try:
        with file.open() as content:
            if _is_xml(file.path):
                report = read_report(content)
                return None if report is None else _Standing(state=report.state, note=report.note)
            if not file.path.suffix and b"\0" in content.read(_SNIFFED):
                return None
            return _standing_of_log(content)
    except SourceError as exc:
        return _Standing(note=str(exc))
    except OSError as exc:
        return _Standing(note=str(_cannot(exc, file.path)))


def _standing_of_log(log: BinaryIO) -> _Standing:
    from sources.excerpt import NO_FAILURE, excerpt

    size = log.seek(0, os.SEEK_END)
    if not size:
        return _Standing(note="it is empty")
    log.seek(max(0, size - STATE_BYTES))
    if not excerpt(io.BytesIO(log.read(STATE_BYTES)), _EXCERPT).startswith(NO_FAILURE):
        return _Standing(state=JobState.FAILED)
    where = "it" if size <= STATE_BYTES else f"its last {STATE_BYTES >> 20} MiB"
    return _Standing(note=f"{NO_FAILURE} in {where}")


def _in_zip(root: Path) -> Iterator[_File]:
    for member in members(root):
        path = PurePosixPath(member.name)
        if _may_be_job(path.name) and not any(part.startswith(".") for part in path.parts):
            cost = _cost(path, member.size) + member.size // 8  # unpacking is some ten times as quick as reading
            yield _File(path=path, title=str(path), cost=cost, open=partial(unpack, root, member))


def _in_directory(root: Path) -> Iterator[_File]:
    seen = 0
    waiting = [PurePosixPath()]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(root / folder) as listing:
                found = list(itertools.islice(listing, _MAX_LISTED + 1 - seen))
        except OSError as exc:
            if not folder.parts:
                raise _cannot(exc, root) from exc
            yield _refused(folder, _cannot(exc, folder))
            continue
        seen += len(found)
        if seen > _MAX_LISTED or len(folder.parts) > MAX_DEPTH:
            what = f"more than {_MAX_LISTED:,} files, or folders more than {MAX_DEPTH} deep"
            raise SourceError(Fault.TOO_LARGE, f"{root} holds {what}; name the part of it with the logs")
        for entry in found:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(folder / entry.name)
            elif _may_be_job(entry.name):
                yield _on_disk(root, folder / entry.name)


def _on_disk(root: Path, path: PurePosixPath) -> _File:
    try:
        status = os.lstat(root / path)
    except OSError as exc:
        return _refused(path, _cannot(exc, path))
    if stat.S_ISLNK(status.st_mode):
        return _refused(path, SourceError(Fault.UNREADABLE, f"{path} is a link, and links are not followed"))
    cost = _cost(path, status.st_size)
    return _File(path=path, title=str(path), cost=cost, open=partial(_open_regular, root, path))


def _open_regular(root: Path, path: PurePosixPath) -> BinaryIO:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(root, flags)
        for part in path.parts:
            # Without waiting for the other end of a pipe; and what was a file or a folder may be a link by now.
            folder = opened
            try:
                opened = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
            finally:
                os.close(folder)
    except OSError as exc:
        raise _cannot(exc, path) from exc
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise SourceError(Fault.UNREADABLE, f"{path} is no regular file")
    return os.fdopen(opened, "rb")


def _refused(path: PurePosixPath, why: SourceError) -> _File:
    def refuse() -> BinaryIO:
        raise why

    return _File(path=path, title=str(path), cost=0, open=refuse)


def _cannot(exc: OSError | ValueError, what: object) -> SourceError:
    why = getattr(exc, "strerror", None) or str(exc)
    if isinstance(exc, FileNotFoundError):
        return SourceError(Fault.NOT_FOUND, f"there is no {what}")
    return SourceError(
        Fault.FORBIDDEN if isinstance(exc, PermissionError) else Fault.UNREADABLE, f"{what} cannot be read: {why}"
    )


def _without_steps(files: list[_File]) -> list[_File]:
    """Of a run's logs, one file for each job beside a folder of its steps, only the former, under the jobs' names."""
    jobs = {_run_job(file.path) for file in files}
    runs = {_run_step(file.path) for file in files} & jobs - {None}
    kept: list[_File] = []
    for file in files:
        if _run_step(file.path) in runs:
            continue
        named = _JOB_LOG.fullmatch(file.path.name) if _run_job(file.path) in runs else None
        kept.append(replace(file, title=str(file.path.parent / named[1])) if named else file)
    return kept


def _run_job(path: PurePosixPath) -> str | None:
    named = _JOB_LOG.fullmatch(path.name)
    return _run_key(path.parent, named[1]) if named else None


def _run_step(path: PurePosixPath) -> str | None:
    return _run_key(path.parent.parent, path.parent.name) if _STEP_LOG.fullmatch(path.name) else None


def _run_key(folder: PurePosixPath, name: str) -> str:
    return f"{folder}/{name[:40].strip()}"  # GitHub cuts long names, those of folders shorter


def _may_be_job(name: str) -> bool:
    return bool(_LOG.fullmatch(name)) or "." not in name or name.lower().endswith(".xml")


def _cost(path: PurePosixPath, size: int) -> int:
    return size if _is_xml(path) else min(size, STATE_BYTES)


def _is_xml(path: PurePosixPath) -> bool:
    return path.suffix.lower() == ".xml"


def _natural(file: _File) -> tuple[list[tuple[int, str]], str]:
    """A key by which `job-9` comes before `job-10`; digits are compared as text, since there may be thousands."""
    parts = re.split(r"([0-9]+)", str(file.path))
    digits = [part.lstrip("0") if place % 2 else part for place, part in enumerate(parts)]
    return [(len(part) if place % 2 else 0, part) for place, part in enumerate(digits)], str(file.path)
