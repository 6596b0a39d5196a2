"""GitHub Actions as a job source: a pull request's jobs, other apps' checks and commit statuses, and a job's log.

    source = GitHub("OWNER/REPO", environment=os.environ)
    jobs = await source.jobs(1234)
    with await source.log(jobs[0].job_id) as log: ...

The token is that of GITHUB_TOKEN or GH_TOKEN, and goes to the API alone; a public repository's jobs can be listed
without. GITHUB_API_URL names another API than github.com's. Names and notes are untrusted text, made safe.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

from bounded.text import fit
from sources.github_answers import (
    UNEXPLAINED,
    Action,
    Annotation,
    App,
    Check,
    Item,
    Output,
    Page,
    Pull,
    Run,
    Stand,
    Status,
    explained,
    reasons,
    stand_of,
)
from sources.http import Server, checked_url, connect, download, get_json, in_time, together
from sources.jobs import Fault, Job, JobState, SourceError

TIMEOUT_S = 20.0
MAX_PAGES = 30
MAX_ANNOTATED = 40  # requests for what is only an explanation; without a token 60 an hour are all there are
MAX_NAME = 200
MAX_NOTE = 400
_GIT_S = 5.0
_PAGE = "per_page=100"
_REMOTE = re.compile(
    r"(?:(?:https|ssh|git)://(?:[^/@]*@)?|(?:[\w.-]+@)?(?!\w+://))(?P<host>[\w.-]+)(?::\d+/|[:/])/?"
    r"(?P<name>[\w.-]+/[\w.-]+?)(?:\.git)?/?",
    re.A,
)
_REFUSED = (Fault.FORBIDDEN, Fault.NOT_FOUND)

T = TypeVar("T", bound=Item)


class GitHub:
    """One repository's pull requests.

    Args:
        repository: `OWNER/REPO`.
        environment: where the token and the API's address are looked for.

    Raises:
        ValueError: the repository is not so written, or a variable holds what it cannot.
    """

    def __init__(self, repository: str, *, environment: Mapping[str, str]) -> None:
        if not re.fullmatch(r"(?!\.\.?/)[\w.-]{1,100}/(?!\.\.?$)[\w.-]{1,100}", repository, re.A):
            raise ValueError(f"a GitHub repository is named OWNER/REPO, not {repository[:60]!a}")
        self.repository = repository
        self._url = checked_url(environment.get("GITHUB_API_URL") or "https://api.github.com", "GITHUB_API_URL")
        name = next((name for name in ("GITHUB_TOKEN", "GH_TOKEN") if environment.get(name, "").strip()), "")
        token = environment.get(name, "").strip()
        if token and not re.fullmatch(r"[!-~]+", token):
            raise ValueError(f"{name} holds a character that no token has")
        self._secrets = frozenset({token} - {""})
        self._headers = {"accept": "application/vnd.github+json", "x-github-api-version": "2022-11-28"}
        self._hints = {
            Fault.EXPIRED: "; GitHub keeps logs for a limited time: run the job again",
            Fault.TOO_LARGE: "; `gh run view --log --job ID > logs/job.log` saves it: then --ci folder:logs",
        }
        if token:
            self._headers["authorization"] = f"Bearer {token}"
            self._hints[Fault.UNAUTHORIZED] = f"; {name} is wrong or has expired"
            self._hints[Fault.FORBIDDEN] = f"; the token in {name} would need the right to read this"
            self._hints[Fault.NOT_FOUND] = f"; or there is no such repository, or the token in {name} may not see it"
        else:
            faults = (Fault.UNAUTHORIZED, Fault.FORBIDDEN, Fault.RATE_LIMITED)
            self._hints |= dict.fromkeys(faults, "; a token in GITHUB_TOKEN would help")
            self._hints[Fault.NOT_FOUND] = "; or it is private, and GITHUB_TOKEN is not set"
        self._logless: dict[int, str] = {}

    @property
    def timeouts(self) -> Mapping[str, float | None]:
        return {"list_ci_jobs": TIMEOUT_S, "fetch_job_log": TIMEOUT_S}

    async def jobs(self, pr: int | None, attempt: int | None = None) -> Sequence[Job]:
        """The jobs of the pull request's head commit, whatever event started them, and other apps' checks of it.

        What a token may not read is left out, and an entry of state `unknown` says so. Of a run that has fewer
        attempts than `attempt` it is the newest.

        Raises:
            SourceError: no pull request was named, there is no such one, or nothing could be read of it.
        """
        if pr is None:
            raise SourceError(Fault.NOT_NAMED, "which pull request? GitHub is asked about one by its number")
        what = f"pull request {pr} of {self.repository}"
        _check_number(pr, what)
        if attempt is not None:
            _check_number(attempt, f"attempt {attempt}")

        async def work() -> Sequence[Job]:
            async with self._connected() as server:
                listing = _Listing(server, f"repos/{self.repository}", what, self._secrets)
                jobs = await listing.jobs(pr, attempt)
                self._logless |= listing.logless
                return jobs

        return await in_time(work(), what)

    async def log(self, job_id: int) -> BinaryIO:
        """The log of a job of GitHub Actions, as it was written.

        Raises:
            SourceError: `not_yet`, `never_written`, `expired`, `gone`, or as for any request.
        """
        what = f"the log of job {job_id}"
        if job_id in self._logless:
            raise SourceError(Fault.NEVER_WRITTEN, f"{what}: {self._logless[job_id]}")
        _check_number(job_id, what)
        return await in_time(self._log(job_id, what), what)

    async def _log(self, job_id: int, what: str) -> BinaryIO:
        async with self._connected() as server:
            base = f"repos/{self.repository}"
            try:
                file = await download(server, f"{base}/actions/jobs/{job_id}/logs", what=what)
            except SourceError as error:
                if error.fault is not Fault.NOT_FOUND:
                    raise
            else:
                if file.read(1):
                    file.seek(0)
                    return file
                file.close()
            try:
                job = await get_json(server, f"{base}/actions/jobs/{job_id}", Action, what=what)
            except SourceError as error:
                if error.fault is not Fault.NOT_FOUND:
                    raise
                raise SourceError(Fault.GONE, f"{what}: there is no such job{self._hints[Fault.NOT_FOUND]}") from None
            if job.status != "completed":
                raise SourceError(
                    Fault.NOT_YET, f"{what}: {stand_of(job.status, None).note}; its log comes when it ends"
                )
            said = await _Listing(server, base, what, self._secrets).annotations(job_id)
            why = _line(said or "GitHub does not say why", MAX_NOTE, self._secrets)
            raise SourceError(Fault.NEVER_WRITTEN, f"{what}: the job ended without one: {why}")

    def _connected(self) -> AbstractAsyncContextManager[Server]:
        return connect(self._url, headers=self._headers, hints=self._hints)


def origin(root: Path, environment: Mapping[str, str] | None = None) -> str | None:
    """`OWNER/REPO` of the checkout's remote `origin`, where that is on GitHub or on the server of GITHUB_SERVER_URL."""
    environment = os.environ if environment is None else environment
    hosts = {"github.com", "www.github.com", "ssh.github.com"}
    with suppress(ValueError):
        hosts.add(urlsplit(environment.get("GITHUB_SERVER_URL", "")).hostname or "github.com")
    # Not the whole environment: its GIT_* may name another repository, and git has no business with its secrets.
    kept = {name: environment[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in environment}
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, env=kept, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _REMOTE.fullmatch(done.stdout.decode("utf-8", "replace").strip())
    return found["name"] if found and found["host"].lower() in hosts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    job: Job
    at: str = ""
    more: str = ""  # what tells it from others of its name
    logless: str = ""


class _Listing:
    """One listing in the making."""

    def __init__(self, server: Server, base: str, what: str, secrets: frozenset[str]) -> None:
        self.logless: dict[int, str] = {}
        self._server, self._base, self._what, self._secrets = server, base, what, secrets
        self._refused: list[SourceError] = []
        self._remarks: list[_Entry] = []
        self._annotated = 0
        self._newest = 0

    async def jobs(self, pr: int, attempt: int | None) -> Sequence[Job]:
        pull = await get_json(self._server, f"{self._base}/pulls/{pr}", Pull, what=self._what)
        sha = pull.head.sha
        actions, checks, statuses = await together(
            [
                self._unless_refused("workflow runs", partial(self._actions, sha, attempt)),
                self._unless_refused("checks by other apps", partial(self._checks, sha)),
                self._unless_refused("commit statuses", partial(self._statuses, sha)),
            ]
        )
        if len(self._refused) >= 3 and not (actions or checks or statuses):
            raise self._refused[0]
        if attempt is not None and 0 < self._newest < attempt:
            raise SourceError(Fault.NOT_FOUND, f"attempt {attempt} of {self._what}: the newest is {self._newest}")
        own = {entry.job.job_id for entry in actions}
        others = [entry for entry in (*checks, *statuses) if entry.job.job_id not in own]
        found = sorted([*actions, *others], key=lambda entry: (entry.at or "~", entry.job.job_id))
        self.logless = {entry.job.job_id: entry.logless for entry in found + self._remarks if entry.logless}
        times = Counter(entry.job.name for entry in found)
        return [
            replace(entry.job, name=f"{entry.job.name} ({entry.more})") if times[entry.job.name] > 1 else entry.job
            for entry in found + self._remarks
        ]

    async def annotations(self, check_id: int) -> str:
        """What the annotations of a job or check say about its failure."""
        path = f"{self._base}/check-runs/{check_id}/annotations?{_PAGE}"
        try:
            found = await get_json(self._server, path, list[Annotation], what=f"the annotations of job {check_id}")
        except SourceError as error:
            if error.fault not in _REFUSED:
                raise
            return f"its annotations could not be read ({error.fault})"
        return reasons(found)

    async def _unless_refused(self, name: str, work: Callable[[], Awaitable[list[_Entry]]]) -> list[_Entry]:
        try:
            return await work()
        except SourceError as error:
            if error.fault not in _REFUSED:
                raise
            self._refused.append(error)
            self._remark(name, f"could not be read: {error}")
            return []

    async def _actions(self, sha: str, attempt: int | None) -> list[_Entry]:
        runs = await self._pages(f"{self._base}/actions/runs?head_sha={sha}&", Run, "workflow runs")
        self._newest = max((run.run_attempt or attempt or 1 for run in runs), default=0)
        each = [self._unless_refused(f"jobs of run {run.id}", partial(self._jobs_of, run, attempt)) for run in runs]
        return [entry for entries in await together(each) for entry in entries]

    async def _jobs_of(self, run: Run, attempt: int | None) -> list[_Entry]:
        older = "" if attempt is None else f"/attempts/{min(attempt, run.run_attempt or attempt)}"
        jobs = await self._pages(f"{self._base}/actions/runs/{run.id}{older}/jobs?", Action, f"jobs of run {run.id}")
        title = f"{run.name or run.path or 'unnamed workflow'}, {run.event or 'unknown event'}"
        if not jobs:
            stand = stand_of(run.status, run.conclusion)
            note = f"no job was started; {stand.note}" if stand.note else "no job was started"
            if stand.state is JobState.FAILED:
                note += f": most likely the workflow file ({run.path or 'its path is unknown'}) is at fault"
            entry = self._entry(run, run.name or run.path, Stand(stand.state, note), title)
            return [replace(entry, logless="it is a workflow run without a job")]
        return await together(self._explained(job, title) for job in jobs)

    async def _explained(self, job: Action, title: str) -> _Entry:
        stand, failed, said = stand_of(job.status, job.conclusion), job.step("failure", "timed_out"), ""
        if job.status == "completed" and stand.state in UNEXPLAINED and not (stand.state is JobState.FAILED and failed):
            said = await self._annotations_of(job)
        return self._entry(job, job.name, explained(job, stand, said), title)

    async def _annotations_of(self, item: Item) -> str:
        self._annotated += 1
        if self._annotated > MAX_ANNOTATED:
            return f"not asked why: {MAX_ANNOTATED} others were"
        return await self.annotations(item.id)

    async def _checks(self, sha: str) -> list[_Entry]:
        checks = await self._pages(f"{self._base}/commits/{sha}/check-runs?", Check, "check runs")
        return await together(self._check(check) for check in checks if not check.is_a_job)

    async def _check(self, check: Check) -> _Entry:
        stand, app, output = stand_of(check.status, check.conclusion), check.app or App(), check.output or Output()
        said = await self._annotations_of(check) if stand.state in UNEXPLAINED and output.annotations_count else ""
        app_name = app.name or app.slug or "an unknown app"
        note = ": ".join(part for part in (f"a check by {app_name}", output.title, stand.note, said) if part)
        entry = self._entry(check, check.name, Stand(stand.state, note), app_name)
        return replace(entry, logless="it is a check by another app, which keeps its log elsewhere")

    async def _statuses(self, sha: str) -> list[_Entry]:
        statuses = await self._pages(f"{self._base}/commits/{sha}/status?", Status, "commit statuses")
        entries = []
        for one in statuses:
            stand = stand_of("pending" if one.state == "pending" else "completed", one.state)
            note = ": ".join(part for part in (one.description, stand.note) if part)
            entry = self._entry(one, one.context, Stand(stand.state, note), "commit status")
            entries.append(replace(entry, logless="it is a commit status, whose log is kept elsewhere"))
        return entries

    async def _pages(self, path: str, shape: type[T], name: str) -> list[T]:
        """All items, by the count that the first page gives. A server may have pages of its own size."""
        what = f"the {name} of {self._what}"

        async def page(number: int) -> Page[T]:
            return await get_json(self._server, f"{path}{_PAGE}&page={number}", Page[shape], what=what)  # type: ignore[valid-type]

        first = await page(1)
        size, total = len(first.items), first.total_count
        if total > MAX_PAGES * size > 0:
            raise SourceError(Fault.TOO_LARGE, f"{what}: {total} are too many")
        last = -(-total // size) if size else 1  # of no items there is no next page, whatever the total says
        rest = await together(page(number) for number in range(2, last + 1))
        items = {item.id: item for each in (first, *rest) for item in each.items}
        if len(items) < total:
            self._remark(name, f"{total} are said to be there, and {len(items)} were given: ask again")
        return list(items.values())

    def _entry(self, item: Item, name: str | None, stand: Stand, more: str) -> _Entry:
        title, note, more = (
            _line(text, limit, self._secrets)
            for text, limit in ((name or "unnamed", MAX_NAME), (stand.note, MAX_NOTE), (more, MAX_NAME))
        )
        job = Job(job_id=item.id, name=title, state=stand.state, note=note)
        return _Entry(job=job, at=item.started_at or item.created_at or "", more=more)

    def _remark(self, name: str, note: str) -> None:
        job = Job(job_id=0, name=name, state=JobState.UNKNOWN, note=note)
        self._remarks.append(_Entry(job=job, logless="it is a remark, not a job"))


def _line(text: str, limit: int, secrets: frozenset[str]) -> str:
    return " ".join(fit(text, limit, secrets).split())


def _check_number(number: int, what: str) -> None:
    if not 0 < number < 2**63:
        raise SourceError(Fault.NOT_FOUND, f"{what}: numbers are from 1 to 2**63 - 1")
