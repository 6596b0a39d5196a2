"""Buildbot as a job source, through its REST API v2: builds are jobs, and what their failing steps wrote is the log.

    source = Buildbot("http://127.0.0.1:8010")
    await source.jobs(415)

A pull request is found by its branch, `refs/pull/415/head` or `refs/pull/415/merge`. Each commit of it is a change of
its own, and only the newest counts. What waits for a worker has no build yet, so it is not listed.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from tempfile import SpooledTemporaryFile
from types import MappingProxyType
from typing import BinaryIO, Generic, TypeVar, cast
from urllib.parse import urlencode

from pydantic import AliasChoices, BaseModel, Field

from sources.http import MAX_FILE, Id, Server, checked_url, connect, get_json, in_time, together
from sources.jobs import Fault, Job, JobState, SourceError

TIMEOUT_S = 20.0
MAX_ENTRIES = 10_000  # of one list
PAGE = 200  # entries of a list in one request
LINES = 32_000  # lines of a log in one request, fewer where they are long: each request costs the master time
_IN_MEMORY = 4 << 20
_MAX_ID = 2**31 - 1  # in Buildbot's database
_MAX_TEXT = 200
_MAX_STEPS = 3  # failed steps that a note names

_SUCCESS, _WARNINGS, _FAILURE, _SKIPPED, _EXCEPTION, _RETRY, _CANCELLED = range(7)
_STATES = {
    None: JobState.RUNNING,
    _SUCCESS: JobState.PASSED,
    _WARNINGS: JobState.PASSED,
    _FAILURE: JobState.FAILED,
    _SKIPPED: JobState.SKIPPED,
    _EXCEPTION: JobState.FAILED,
    _RETRY: JobState.RUNNING,
    _CANCELLED: JobState.CANCELLED,
}
_NOTES = {
    _WARNINGS: "with warnings",
    _EXCEPTION: "an exception of Buildbot itself",
    _RETRY: "its worker was lost, Buildbot starts it again",
}
_STREAMS, _PLAIN = "s", "t"  # kinds of logs; the third one, pages of HTML, repeats a plain one
_OUTPUT = (b"o", b"e")  # not "h": Buildbot's own lines, which hold the whole environment of the worker

E = TypeVar("E")


class _Change(BaseModel):
    changeid: Id


class _Builder(BaseModel):
    builderid: Id
    name: str


class _Ending(BaseModel):
    """What a build and a step have in common."""

    complete: bool
    results: int | None
    state_string: str

    @property
    def result(self) -> int | None:
        return self.results if self.complete else None

    @property
    def failed(self) -> bool:
        return self.result in (_FAILURE, _EXCEPTION)


class _Build(_Ending):
    buildid: Id
    builderid: Id


class _Step(_Ending):
    stepid: Id
    number: int
    name: str

    def __str__(self) -> str:
        return f"step {self.number} ({_line(self.name)}): {_line(self.state_string)}"


class _Log(BaseModel):
    logid: Id
    name: str
    num_lines: int
    type: str


class _Chunk(BaseModel):
    content: str


class _Meta(BaseModel):
    total: int | None = None  # of a single thing none is said


class _Answer(BaseModel, Generic[E]):
    """A list under the name of what it lists, also where a single thing was asked for."""

    entries: list[E] = Field(
        validation_alias=AliasChoices("builders", "builds", "changes", "logchunks", "logs", "steps")
    )
    meta: _Meta


class Buildbot:
    """A Buildbot master that answers without credentials; `url` is where its web pages begin.

    Raises:
        ValueError: `url` is no address of a master.
    """

    def __init__(self, url: str) -> None:
        # Nothing secret is sent, so http will do for any host: most masters stand within a company.
        checked_url(re.sub("^http:", "https:", url), "the address of a Buildbot")
        self._url = url.rstrip("/")

    @property
    def timeouts(self) -> Mapping[str, float | None]:
        return MappingProxyType({"list_ci_jobs": TIMEOUT_S, "fetch_job_log": TIMEOUT_S})

    async def jobs(self, pr: int | None, attempt: int | None = None) -> Sequence[Job]:
        """The builds of the newest change of a pull request, in the order in which they began.

        Of several builds by one builder the last is given, with a note on the one before it. Of an older `attempt` only
        those builders are given that have one.

        Raises:
            SourceError: no change has this pull request's branch, no builder that attempt, or Buildbot cannot be asked.
        """
        if pr is None:
            raise SourceError(Fault.NOT_NAMED, "which pull request? name one, for example: pull request 415")
        return await in_time(self._jobs(pr, attempt), f"the builds of pull request {pr}")

    async def log(self, job_id: int) -> BinaryIO:
        """The text that the failing steps wrote, or where none failed all steps, in order. The caller closes the file.

        Before each log stands a line of ours: `--- step 2 (tests): 'make test' (failure), log stdio ---`. Buildbot's
        header lines are left out, and so are pages of HTML.

        Raises:
            SourceError: there is no such build, no log of it and why, or Buildbot cannot be asked.
        """
        if not 0 < job_id <= _MAX_ID:
            raise SourceError(Fault.NOT_FOUND, f"build {job_id}: not found")
        return await in_time(self._log(job_id), f"the log of build {job_id}")

    async def _jobs(self, pr: int, attempt: int | None) -> Sequence[Job]:
        async with self._connect() as server:
            runs = await _runs(server, await _newest_change(server, pr))
            if attempt is not None:
                most = max(map(len, runs), default=0)
                runs = [run[:attempt] for run in runs if 0 < attempt <= len(run)]
                if not runs:
                    raise SourceError(Fault.NOT_FOUND, f"attempt {attempt} of pull request {pr}: there are {most}")
            names = await _builder_names(server, [run[-1].builderid for run in runs])
            runs.sort(key=lambda run: run[-1].buildid)  # ids count up as builds begin
            return await together(_job(server, run, names) for run in runs)

    async def _log(self, job_id: int) -> BinaryIO:
        async with self._connect() as server:
            what = f"build {job_id}"
            builds = (await _ask(server, _Build, f"builds/{job_id}", what)).entries
            steps = await _steps(server, job_id)
            with ExitStack() as unfinished:
                file = cast(BinaryIO, unfinished.enter_context(SpooledTemporaryFile(max_size=_IN_MEMORY)))
                await _copy_logs(server, [step for step in steps if step.failed] or steps, file)
                if not file.tell():
                    fault = Fault.NEVER_WRITTEN if all(build.complete for build in builds) else Fault.NOT_YET
                    says = "; ".join(_line(build.state_string) for build in builds)
                    raise SourceError(fault, f"{what} has written nothing: {says}")
                file.seek(0)
                unfinished.pop_all()
                return file

    def _connect(self) -> AbstractAsyncContextManager[Server]:
        return connect(self._url, headers={"accept": "application/json"})


async def _ask(
    server: Server, shape: type[E], path: str, what: str, **query: str | int | Sequence[str] | Sequence[int]
) -> _Answer[E]:
    return await get_json(server, f"api/v2/{path}?{urlencode(query, doseq=True)}", _Answer[shape], what=what)  # type: ignore[valid-type]


async def _all(server: Server, shape: type[E], path: str, order: str, what: str) -> list[E]:
    """Every entry of a list, page by page."""
    entries: list[E] = []
    while True:
        answer = await _ask(server, shape, path, what, order=order, offset=len(entries), limit=PAGE)
        entries += answer.entries
        if not answer.entries or len(entries) == answer.meta.total:
            return entries
        if len(entries) >= MAX_ENTRIES:
            raise SourceError(Fault.TOO_LARGE, f"{what}: more than {MAX_ENTRIES:,}")


async def _newest_change(server: Server, pr: int) -> int:
    branches, what = [f"refs/pull/{pr}/{ref}" for ref in ("head", "merge")], f"pull request {pr}"
    answer = await _ask(server, _Change, "changes", what, branch=branches, order="-changeid", limit=1)
    if not answer.entries:
        raise SourceError(Fault.NOT_FOUND, f"{what}: no change has the branch {' or '.join(branches)}")
    return answer.entries[0].changeid


async def _runs(server: Server, change: int) -> list[list[_Build]]:
    """The builds of a change: of each builder those in the order in which they began."""
    runs: dict[int, dict[int, _Build]] = {}
    for build in await _all(server, _Build, f"changes/{change}/builds", "buildid", f"the builds of change {change}"):
        runs.setdefault(build.builderid, {})[build.buildid] = build
    return [[run[buildid] for buildid in sorted(run)] for run in runs.values()]


async def _builder_names(server: Server, builders: Sequence[int]) -> Mapping[int, str]:
    names: dict[int, str] = {}
    for first in range(0, len(builders), PAGE):
        wanted = builders[first : first + PAGE]
        answer = await _ask(
            server, _Builder, "builders", "the builders' names", builderid=wanted, field=("builderid", "name")
        )
        names |= {builder.builderid: builder.name for builder in answer.entries}
    return names


async def _steps(server: Server, buildid: int) -> list[_Step]:
    return await _all(server, _Step, f"builds/{buildid}/steps", "number", f"the steps of build {buildid}")


async def _job(server: Server, run: Sequence[_Build], names: Mapping[int, str]) -> Job:
    """The last build of one builder; what its failed steps say, and which build came before it, is the note."""
    build = run[-1]
    failed = [step for step in await _steps(server, build.buildid) if step.failed] if build.failed else []
    notes = [_NOTES[build.result]] if build.result in _NOTES else []
    notes += [str(step) for step in failed[:_MAX_STEPS]]
    if len(failed) > _MAX_STEPS:
        notes.append(f"{len(failed) - _MAX_STEPS} more failed steps")
    if not failed and build.result not in (_SUCCESS, _WARNINGS):
        notes.append(_line(build.state_string))
    if len(run) > 1:
        notes.append(f"attempt {len(run)}, after job {run[-2].buildid} ({_state(run[-2])})")
    # A failure must not hide behind a time-out: only where nothing else failed the build has timed out.
    timed_out = build.result == _FAILURE and failed and all(_timed_out(step) for step in failed)
    return Job(
        job_id=build.buildid,
        name=names.get(build.builderid) or f"builder {build.builderid}",
        state=JobState.TIMED_OUT if timed_out else _state(build),
        note="; ".join(notes),
    )


def _state(build: _Build) -> JobState:
    return _STATES.get(build.result, JobState.UNKNOWN)


def _timed_out(step: _Step) -> bool:
    """Nothing else tells a time-out from a failure, and it ends what the step says; a command may hold it too."""
    return step.result == _FAILURE and step.state_string.endswith("(timed out)")


async def _copy_logs(server: Server, steps: Sequence[_Step], file: BinaryIO) -> None:
    """Copy what the steps wrote into `file`."""
    received = 0
    for step in steps:
        what = f"the logs of step {step.number}"
        for log in await _all(server, _Log, f"steps/{step.stepid}/logs", "logid", what):
            if log.type not in (_STREAMS, _PLAIN):
                continue
            heading = f"--- {step}, log {_line(log.name)} ---\n".encode()
            async for content in _contents(server, log, what):
                received += len(content)
                if received > MAX_FILE:
                    raise SourceError(Fault.TOO_LARGE, f"{what}: more than {MAX_FILE >> 20} MiB")
                lines = content.removesuffix(b"\n").split(b"\n")
                if log.type == _STREAMS:  # the first letter of each line names its stream
                    lines = [line[1:] for line in lines if line.startswith(_OUTPUT)]
                if lines:
                    file.write(heading)
                    heading = b""
                    file.writelines(line + b"\n" for line in lines)


async def _contents(server: Server, log: _Log, what: str) -> AsyncIterator[bytes]:
    first, lines = 0, LINES
    while first < log.num_lines:
        try:
            answer = await _ask(server, _Chunk, f"logs/{log.logid}/contents", what, offset=first, limit=lines)
        except SourceError as error:
            if error.fault is not Fault.TOO_LARGE or lines == 1:
                raise
            lines //= 2
            continue
        content = "".join(chunk.content for chunk in answer.entries).encode()
        if not content:  # fewer lines than were promised
            return
        yield content
        first += lines


def _line(text: str) -> str:
    """Untrusted text in one line, cut in its middle: how a step ended stands at the end of what it says."""
    line, half = " ".join(text.split()), _MAX_TEXT // 2
    return line if len(line) <= _MAX_TEXT else f"{line[:half]} ... {line[-half:]}"
