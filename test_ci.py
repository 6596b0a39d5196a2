"""The stub: frozen records, fixed delays, nothing random."""

import asyncio

import pytest

from ci import LocalCi
from conftest import OnVirtualClock
from sources.jobs import JobSource, JobState, SourceError


def test_the_stub_is_a_job_source() -> None:
    source: JobSource = LocalCi()
    assert source.timeouts == {"fetch_job_log": 3.0}


@pytest.mark.parametrize(
    ("pr", "jobs"),
    [
        (415, [(810, "lint", "passed"), (811, "build", "passed"), (812, "unit tests", "failed")]),
        (416, [(813, "lint", "passed"), (814, "build", "passed")]),
        (417, []),
        (418, [(815, "integration tests", "failed")]),
    ],
)
async def test_the_recorded_pull_requests(pr: int, jobs: list[tuple[int, str, str]]) -> None:
    assert [(job.job_id, job.name, job.state) for job in await LocalCi().jobs(pr)] == jobs


@pytest.mark.parametrize(("job_id", "seconds", "cause"), [(812, 0.1, "assert 2268 == 2520"), (815, 8.0, "refused")])
def test_a_log_takes_its_fixed_time_and_holds_its_cause(
    job_id: int, seconds: float, cause: str, on_virtual_clock: OnVirtualClock[float]
) -> None:
    async def fetch() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert cause.encode() in (await LocalCi().log(job_id)).read()
        return loop.time() - start

    assert on_virtual_clock(fetch()) == seconds


@pytest.mark.parametrize("pr", [0, -415, 999, 10**30])
async def test_an_unknown_pull_request_is_named_with_those_there_are(pr: int) -> None:
    with pytest.raises(SourceError, match=rf"no pull request {pr}; this source has 415, 416, 417, 418$"):
        await LocalCi().jobs(pr)


async def test_a_question_without_a_number_is_told_which_there_are() -> None:
    with pytest.raises(SourceError, match=r"^not_named: name a pull request; this source has 415, 416, 417, 418$"):
        await LocalCi().jobs(None)


async def test_an_older_attempt_is_said_to_be_none() -> None:
    assert await LocalCi().jobs(415, 1) == await LocalCi().jobs(415)
    with pytest.raises(SourceError, match="there is no attempt 2"):
        await LocalCi().jobs(415, 2)


async def test_an_unknown_job_is_named_with_those_there_are() -> None:
    with pytest.raises(SourceError, match=r"no job 1; this source has 810, 811, 812, 813, 814, 815$"):
        await LocalCi().log(1)


async def test_two_readings_are_the_same() -> None:
    assert (await LocalCi().log(812)).read() == (await LocalCi().log(812)).read()
    assert [job for job in await LocalCi().jobs(415) if job.state is JobState.FAILED]
