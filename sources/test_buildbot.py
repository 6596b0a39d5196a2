"""Buildbot against the wire: a loopback server that answers as a master does, its odd sides included."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sources.buildbot import Buildbot
from sources.conftest import Ending, Said, Site, moved
from sources.jobs import Fault, Job, JobState, SourceError

MAX_PAGE = 3  # a master may give less than it is asked for
FAKE_SECRET = "fake-secret-of-the-worker"


@dataclass(slots=True)
class Master:
    """The REST API of a master, as a test has filled it: path -> what is listed there, or the whole answer."""

    site: Site
    lists: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    answers: dict[str, Said] = field(default_factory=dict)

    @property
    def source(self) -> Buildbot:
        return Buildbot(f"{self.site.url}/ci/")

    def has(self, *builds: Mapping[str, Any], steps: Sequence[Mapping[str, Any]] = ()) -> None:
        """Builds of change 12, the newest of pull request 415, each with these steps."""
        self.lists["changes"] = [{"changeid": 12, "branch": "refs/pull/415/head"}]
        self.lists["builders"] = [{"builderid": 1, "name": "unit tests"}, {"builderid": 2, "name": "lint"}]
        self.lists["changes/12/builds"] = [dict(build) for build in builds]
        for build in builds:
            self.lists[f"builds/{build['buildid']}"] = [dict(build)]
            self.lists[f"builds/{build['buildid']}/steps"] = [dict(step) for step in steps]
        for step in steps:
            self.lists[f"steps/{step['stepid']}/logs"] = []

    def wrote(self, stepid: int, logid: int, kind: str, *lines: str) -> None:
        log = {"logid": logid, "name": "stdio", "num_lines": len(lines), "type": kind, "stepid": stepid}
        self.lists.setdefault(f"steps/{stepid}/logs", []).append(log)
        self.lists[f"logs/{logid}/contents"] = [{"content": f"{line}\n"} for line in lines]

    def answer(self, target: str) -> Said:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = parts.path.removeprefix("/ci/api/v2/")
        if path in self.answers:
            return self.answers[path]
        if path not in self.lists:
            return text(b'{"error": "not found"}', status=404)
        entries, segments = self.lists[path], path.split("/")
        kind = segments[0] if len(segments) == 2 else segments[-1]  # builds/7 is a list of one
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", len(entries)))
        if kind == "contents":
            content = "".join(entry["content"] for entry in entries[offset : offset + limit])
            return listed("logchunks", [{"content": content, "firstline": offset}])
        page = entries[offset : offset + min(limit, MAX_PAGE)]
        return listed(kind, page, total=len(entries) if path.endswith(kind) else None)


def text(body: bytes, *, status: int = 200, ending: Ending = Ending.WHOLE) -> Said:
    return Said(body=body, status=status, headers={"content-type": "text/plain; charset=utf-8"}, ending=ending)


def listed(
    kind: str, entries: Sequence[Mapping[str, Any]], *, total: int | None = None, ending: Ending = Ending.WHOLE
) -> Said:
    meta = {} if total is None else {"total": total}
    return text(json.dumps({kind: list(entries), "meta": meta}, indent=2).encode(), ending=ending)


@pytest.fixture
def master(site: Site) -> Master:
    served = Master(site)
    site.always = served.answer
    return served


def build(buildid: int, results: int | None, says: str = "", *, builder: int = 1) -> dict[str, Any]:
    complete = results is not None
    return {
        "buildid": buildid, "builderid": builder, "complete": complete, "results": results, "state_string": says
    }  # fmt: skip


def step(number: int, results: int | None, says: str, name: str = "make") -> dict[str, Any]:
    complete = results is not None
    return {
        "stepid": 100 + number, "number": number, "name": name, "complete": complete, "results": results,
        "state_string": says,
    }  # fmt: skip


async def log_of(source: Buildbot, job_id: int) -> list[str]:
    with await source.log(job_id) as file:
        return file.read().decode().splitlines()


async def fault_of(work: Any) -> Fault:
    with pytest.raises(SourceError) as caught:
        await work
    assert "127.0.0.1" not in str(caught.value)
    return caught.value.fault


@pytest.mark.parametrize(
    ("results", "state", "note"),
    [
        (None, JobState.RUNNING, "says so"),
        (0, JobState.PASSED, ""),
        (1, JobState.PASSED, "with warnings"),
        (2, JobState.FAILED, "says so"),
        (3, JobState.SKIPPED, "says so"),
        (4, JobState.FAILED, "an exception of Buildbot itself; says so"),
        (5, JobState.RUNNING, "its worker was lost, Buildbot starts it again; says so"),
        (6, JobState.CANCELLED, "says so"),
        (7, JobState.UNKNOWN, "says so"),
    ],
)
async def test_each_result_has_its_state_and_what_explains_it(
    master: Master, results: int | None, state: JobState, note: str
) -> None:
    master.has(build(7, results, "says so"))
    assert await master.source.jobs(415) == [Job(job_id=7, name="unit tests", state=state, note=note)]


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ([(2, "'make test' (failure) (timed out)")], JobState.TIMED_OUT),
        ([(2, "'make test' (failure)")], JobState.FAILED),
        ([(2, "'echo (timed out)' (failure)")], JobState.FAILED),
        ([(0, "'make lint'"), (2, "'make test' (failure) (timed out)")], JobState.TIMED_OUT),
        ([(2, "'make lint' (failure)"), (2, "'make test' (failure) (timed out)")], JobState.FAILED),
        ([(2, "'make test' (failure) (timed out)"), (4, "finished (exception)")], JobState.FAILED),
        ([(2, f"'{'x' * 500}' (failure) (timed out)")], JobState.TIMED_OUT),
    ],
)
async def test_a_time_out_is_told_from_a_failure(master: Master, steps: list[tuple[int, str]], state: JobState) -> None:
    master.has(build(7, 2, "failed"), steps=[step(number, *said) for number, said in enumerate(steps)])
    (job,) = await master.source.jobs(415)
    assert job.state is state
    assert len(job.note) < 500


async def test_the_note_names_the_failed_steps(master: Master) -> None:
    names = ["prepare", "compile", "unit tests", "e2e", "docs", "upload"]
    master.has(
        build(7, 2, "failed"), steps=[step(n, 2 if n else 0, "bad (failure)", name) for n, name in enumerate(names)]
    )
    (job,) = await master.source.jobs(415)
    named = [f"step {n} ({names[n]}): bad (failure)" for n in (1, 2, 3)]
    assert job.note == "; ".join([*named, "2 more failed steps"])


async def test_only_the_newest_change_of_the_pull_request_counts(master: Master) -> None:
    master.has(build(7, 0))
    await master.source.jobs(415)
    first = urlsplit(master.site.paths()[0])
    assert first.path == "/ci/api/v2/changes"
    branches = ["refs/pull/415/head", "refs/pull/415/merge"]
    assert parse_qs(first.query) == {"branch": branches, "order": ["-changeid"], "limit": ["1"]}


async def test_builds_are_asked_for_until_the_total_and_stand_in_the_order_in_which_they_began(master: Master) -> None:
    master.has(*[build(buildid, 0, builder=100 + buildid) for buildid in (9, 8, 3, 7, 5, 4, 6)])
    jobs = await master.source.jobs(415)
    assert [job.job_id for job in jobs] == [3, 4, 5, 6, 7, 8, 9]
    assert jobs[0].name == "builder 103"  # the master no longer knows it
    assert len([target for target in master.site.paths() if "/changes/12/builds" in target]) == 3


async def test_of_a_builders_attempts_the_newest_is_given_and_an_older_one_on_request(master: Master) -> None:
    master.has(build(6, 0), build(4, 0, builder=2), build(3, 2, "bad"), build(5, 2, "bad"))
    jobs = await master.source.jobs(415)
    assert [(job.job_id, job.note) for job in jobs] == [(4, ""), (6, "attempt 3, after job 5 (failed)")]
    assert [job.job_id for job in await master.source.jobs(415, 1)] == [3, 4]
    assert [job.job_id for job in await master.source.jobs(415, 2)] == [5]
    for attempt in (0, 4):
        assert await fault_of(master.source.jobs(415, attempt)) is Fault.NOT_FOUND


async def test_a_change_without_builds_has_no_jobs(master: Master) -> None:
    master.has()
    assert await master.source.jobs(415) == []


async def test_a_pull_request_must_be_named_and_known(master: Master) -> None:
    assert await fault_of(master.source.jobs(None)) is Fault.NOT_NAMED
    master.lists["changes"] = []
    assert await fault_of(master.source.jobs(416)) is Fault.NOT_FOUND


async def test_the_log_is_what_the_failing_steps_wrote_without_the_workers_environment(master: Master) -> None:
    master.has(
        build(7, 2, "failed"), steps=[step(1, 0, "ok"), step(2, 2, "'make' (failure)", "tests"), step(3, 0, "ok")]
    )
    master.wrote(101, 1, "s", "ocompiled")
    master.wrote(
        102, 2, "s", f"h  TOKEN={FAKE_SECRET}", f"h{FAKE_SECRET}", "ofirst", "o", "eE  assert 1", "hexit code 1"
    )
    master.wrote(102, 3, "t", "harmless: a plain line may begin so")
    master.wrote(102, 4, "h", "<html>the same</html>")
    master.wrote(103, 5, "s", "oshell")
    heading = "--- step 2 (tests): 'make' (failure), log stdio ---"
    lines = await log_of(master.source, 7)
    assert lines == [heading, "first", "", "E  assert 1", heading, "harmless: a plain line may begin so"]


async def test_a_stream_that_we_do_not_know_is_not_shown(master: Master) -> None:
    master.has(build(7, 2), steps=[step(1, 2, "bad")])
    master.wrote(101, 1, "s", f"x{FAKE_SECRET}", f"{FAKE_SECRET}", "ogood")
    master.wrote(101, 2, "z", FAKE_SECRET)
    assert (await log_of(master.source, 7))[1:] == ["good"]


async def test_where_no_step_failed_the_log_is_that_of_all_steps_in_order(master: Master) -> None:
    master.has(build(7, 6), steps=[step(1, 0, "ok"), step(2, 6, "stopped (cancelled)"), step(3, None, "waits")])
    master.wrote(102, 2, "s", "osecond")
    master.wrote(101, 1, "s", "ofirst")
    headings = ["--- step 1 (make): ok, log stdio ---", "--- step 2 (make): stopped (cancelled), log stdio ---"]
    assert await log_of(master.source, 7) == [headings[0], "first", headings[1], "second"]


@pytest.mark.parametrize(
    ("results", "fault"), [(2, Fault.NEVER_WRITTEN), (0, Fault.NEVER_WRITTEN), (None, Fault.NOT_YET)]
)
async def test_a_log_that_is_not_there_is_a_reason(master: Master, results: int | None, fault: Fault) -> None:
    master.has(build(7, results), steps=[step(1, results, "says so")])
    assert await fault_of(master.source.log(7)) is fault
    master.wrote(101, 1, "s", "honly the command", "hand its environment")
    assert await fault_of(master.source.log(7)) is fault
    for job_id in (8, 0, -1, 10**30):
        assert await fault_of(master.source.log(job_id)) is Fault.NOT_FOUND


async def test_a_long_log_comes_in_pieces_and_in_smaller_ones_where_its_lines_are_long(master: Master) -> None:
    master.has(build(7, 2), steps=[step(1, 2, "bad")])
    master.wrote(101, 1, "s", *(f"o{number} {'x' * (4000 if number > 5_000 else 1)}" for number in range(9_001)))
    lines = await log_of(master.source, 7)
    assert [int(line.split()[0]) for line in lines[1:]] == list(range(9_001))


async def test_a_log_without_end_is_refused(master: Master) -> None:
    master.has(build(7, 2), steps=[step(1, 2, "bad")])
    master.wrote(101, 1, "s", "o")
    master.lists["steps/101/logs"][0]["num_lines"] = 10**12
    master.answers["logs/1/contents"] = listed("logchunks", [{"content": f"h{'x' * 7_000_000}\n"}])
    assert await fault_of(master.source.log(7)) is Fault.TOO_LARGE


ODD = [
    b"", b"<html>Buildbot</html>", b"[]", b"7", b"{}", b'{"builds": null, "meta": {}}', b'{"builds": {}, "meta": {}}',
    b'{"builds": [7], "meta": {"total": 1}}', b'{"builds": [{}], "meta": {"total": 1}}', b'{"builds": []}',
    b'{"builds": [], "meta": {"total": "many"}}', b"[" * 100_000, b"\xff\xfe", b'{"builds": [' + b"9" * 5_000 + b"]}",
    json.dumps({"builds": [build(1, 2) | {"buildid": "1"}], "meta": {"total": 1}}).encode(),
    json.dumps({"builds": [build(1, 2) | {"results": True}], "meta": {"total": 1}}).encode(),
    json.dumps({"builds": [build(1, 2) | {"state_string": None}], "meta": {"total": 1}}).encode(),
]  # fmt: skip


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
async def test_an_odd_answer_is_unreadable(master: Master, body: bytes) -> None:
    master.has(build(7, 0))
    master.answers["changes/12/builds"] = text(body)
    assert await fault_of(master.source.jobs(415)) is Fault.UNREADABLE


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (401, Fault.UNAUTHORIZED),
        (403, Fault.FORBIDDEN),
        (404, Fault.NOT_FOUND),
        (500, Fault.UNREACHABLE),
    ],
)
async def test_a_refusal_is_told_by_its_status(master: Master, status: int, fault: Fault) -> None:
    master.answers["changes"] = text(b"{}", status=status)
    assert await fault_of(master.source.jobs(415)) is fault


async def test_a_redirect_to_another_place_is_not_followed(master: Master) -> None:
    master.answers["changes"] = moved("http://localhost:9/api/v2/changes")
    assert await fault_of(master.source.jobs(415)) is Fault.UNREADABLE
    assert len(master.site.asked) == 1


async def test_a_cut_answer_is_unreadable(master: Master) -> None:
    master.answers["changes"] = listed("changes", [{"changeid": 12}], ending=Ending.CUT)
    assert await fault_of(master.source.jobs(415)) is Fault.UNREADABLE


async def test_a_master_that_is_not_there_is_unreachable() -> None:
    assert await fault_of(Buildbot("http://127.0.0.1:9").jobs(415)) is Fault.UNREACHABLE


@pytest.mark.parametrize(
    "url",
    [
        *("", "ci.example.org", "127.0.0.1:8010", "ftp://ci.example.org", "http://", "http://ci.example.org:x"),
        *("http://ci example.org", "http://someone:fake-secret@ci.example.org", "https://fake-secret@ci.example.org"),
        *("http://ci.example.org/?a=1", "http://ci.example.org/#/builders"),
    ],
)
def test_an_address_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="the address of a Buildbot") as caught:
        Buildbot(url)
    assert "fake-secret" not in str(caught.value)


def test_http_will_do_for_any_host_since_nothing_secret_is_sent() -> None:
    assert Buildbot("http://ci.example.org:8010/").timeouts == {"list_ci_jobs": 20.0, "fetch_job_log": 20.0}
