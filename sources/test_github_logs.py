"""A job's log on GitHub, replayed: fetched without credentials, or missing for a reason."""

import pytest

from sources.conftest import Ending, Said, Site, as_json, moved
from sources.jobs import Fault, SourceError
from sources.test_github import FAKE_TOKEN, REPO, a_job, a_pull_request, a_run, annotated, github

LOG = b"\xef\xbb\xbf2026-11-27T09:14:02.1184310Z ##[group]Run pytest\r\nE   assert 1 == 2\n\xff\n"


async def fault_of(site: Site, job_id: int = 11, **environment: str) -> SourceError:
    with pytest.raises(SourceError) as raised:
        await github(site, **environment).log(job_id)
    assert FAKE_TOKEN not in str(raised.value) + repr(raised.value)
    assert str(raised.value).startswith(f"{raised.value.fault}: the log of job {job_id}: ")
    return raised.value


async def log(site: Site) -> bytes:
    with await github(site).log(11) as file:
        return file.read()


async def test_the_log_comes_as_it_was_written_and_no_credential_travels_along(site: Site, elsewhere: Site) -> None:
    site.say(f"{REPO}/actions/jobs/11/logs", moved(f"{elsewhere.url}/blob/11?sig=fake"))
    elsewhere.say("/blob/11?sig=fake", Said(body=LOG))
    assert await log(site) == LOG
    assert site.asked[0].headers["authorization"] == f"Bearer {FAKE_TOKEN}"
    assert elsewhere.paths() == ["/blob/11?sig=fake"]


async def test_the_log_of_a_renamed_repository_is_found(site: Site, elsewhere: Site) -> None:
    site.say(f"{REPO}/actions/jobs/11/logs", moved(f"{site.url}/repositories/7/actions/jobs/11/logs", status=301))
    site.say("/repositories/7/actions/jobs/11/logs", moved(f"{elsewhere.url}/blob"))
    elsewhere.say("/blob", Said(body=LOG))
    assert await log(site) == LOG
    assert {request.headers["authorization"] for request in site.asked} == {f"Bearer {FAKE_TOKEN}"}


@pytest.mark.parametrize("ending", [Ending.CUT, Ending.RESET, Ending.CHUNKED_CUT])
async def test_a_log_that_is_cut_off_is_unreadable(site: Site, elsewhere: Site, ending: Ending) -> None:
    site.say(f"{REPO}/actions/jobs/11/logs", moved(f"{elsewhere.url}/blob"))
    elsewhere.say("/blob", Said(body=LOG, ending=ending))
    assert (await fault_of(site)).fault is Fault.UNREADABLE


@pytest.mark.parametrize("status", ["queued", "in_progress", "waiting"])
async def test_the_log_of_a_job_that_has_not_ended_is_not_there_yet(site: Site, status: str) -> None:
    site.say(f"{REPO}/actions/jobs/11", as_json(a_job(11, None, status=status)))
    assert (await fault_of(site)).fault is Fault.NOT_YET


@pytest.mark.parametrize("empty", [False, True])
async def test_a_log_that_was_never_written_is_explained_by_the_annotation(
    site: Site, elsewhere: Site, empty: bool
) -> None:
    site.say(f"{REPO}/actions/jobs/11/logs", moved(f"{elsewhere.url}/blob"))
    if empty:
        elsewhere.say("/blob", Said(body=b""))
    site.say(f"{REPO}/actions/jobs/11", as_json(a_job(11, "failure")))
    annotated(site, 11, f"The account is locked.\x1b[2J\n{FAKE_TOKEN}")
    error = await fault_of(site)
    assert error.fault is Fault.NEVER_WRITTEN
    assert str(error).endswith("the job ended without one: The account is locked. [masked]")


async def test_a_log_that_was_never_written_may_have_no_reason(site: Site) -> None:
    site.say(f"{REPO}/actions/jobs/11", as_json(a_job(11, "skipped")))
    annotated(site, 11)
    assert str(await fault_of(site)).endswith("GitHub does not say why")


async def test_a_job_that_does_not_exist_is_gone(site: Site) -> None:
    assert (await fault_of(site)).fault is Fault.GONE


@pytest.mark.parametrize("job_id", [0, -3, 2**63, 10**40])
async def test_a_number_that_no_job_has_is_not_asked_for(site: Site, job_id: int) -> None:
    assert (await fault_of(site, job_id)).fault is Fault.NOT_FOUND
    assert site.asked == []


@pytest.mark.parametrize(
    ("answer", "fault", "words"),
    [
        (as_json({}, status=410), Fault.EXPIRED, "run the job again"),
        (as_json({"message": "Must have admin rights"}, status=403), Fault.FORBIDDEN, "GITHUB_TOKEN"),
        (as_json({}, status=403, x_ratelimit_remaining="0", x_ratelimit_reset="9999999999"), Fault.RATE_LIMITED, "UTC"),
        (as_json({}, status=401), Fault.UNAUTHORIZED, "wrong or has expired"),
        (as_json({}, status=500), Fault.UNREACHABLE, "500"),
        (moved("http://logs.example.com/11"), Fault.UNREADABLE, "a place that is not gone to"),
        (Said(body=b"x", headers={"content-length": str(1 << 30)}), Fault.TOO_LARGE, "gh run view"),
    ],
)
async def test_a_missing_log_is_a_reason(site: Site, answer: Said, fault: Fault, words: str) -> None:
    site.say(f"{REPO}/actions/jobs/11/logs", answer)
    error = await fault_of(site)
    assert error.fault is fault
    assert words in str(error)


async def test_without_a_token_what_would_help_is_said(site: Site) -> None:
    site.say(f"{REPO}/actions/jobs/11/logs", as_json({"message": "Must have admin rights"}, status=403))
    assert "a token in GITHUB_TOKEN would help" in str(await fault_of(site, GITHUB_TOKEN=""))


async def test_what_the_storage_refuses_is_not_blamed_on_the_token(site: Site, elsewhere: Site) -> None:
    site.say(f"{REPO}/actions/jobs/11/logs", moved(f"{elsewhere.url}/blob"))
    elsewhere.say("/blob", Said(status=403, body=b"<Error>AuthenticationFailed</Error>"))
    error = await fault_of(site)
    assert error.fault is Fault.FORBIDDEN
    assert "TOKEN" not in str(error)


async def test_what_was_listed_without_a_log_is_not_asked_for_one(site: Site) -> None:
    check, status = a_job(22, "failure", app={"slug": "codecov"}), {"id": 31, "state": "failure", "context": "ci/old"}
    a_pull_request(site, runs=[a_run(1, "action_required")], checks=[check], statuses=[status])
    source = github(site)
    await source.jobs(415)
    site.asked.clear()
    for number, words in ((1, "a workflow run without a job"), (22, "by another app"), (31, "a commit status")):
        with pytest.raises(SourceError, match=words) as raised:
            await source.log(number)
        assert raised.value.fault is Fault.NEVER_WRITTEN
    assert site.asked == []
