"""A pull request on GitHub, replayed: what is listed of it, in which state, with which explanation."""

import logging
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sources.conftest import Ending, Said, Site, as_json, moved
from sources.github import MAX_ANNOTATED, GitHub, origin
from sources.jobs import Fault, Job, JobState, SourceError

FAKE_TOKEN = "fake-token-for-tests"
SHA = "0123456789abcdef0123456789abcdef01234567"
REPO = "/repos/octo/shop"
Json = dict[str, Any]


def github(site: Site, **environment: str) -> GitHub:
    return GitHub("octo/shop", environment={"GITHUB_API_URL": site.url, "GITHUB_TOKEN": FAKE_TOKEN, **environment})


def a_run(run_id: int, conclusion: str | None = "success", **more: Any) -> Json:
    status = "completed" if conclusion else "in_progress"
    return {"id": run_id, "name": "CI", "path": ".github/workflows/ci.yml", "event": "pull_request", "status": status,
            "conclusion": conclusion, "run_attempt": 1, **more}  # fmt: skip


def a_job(job_id: int, conclusion: str | None = "success", *, steps: Sequence[str] = (), **more: Any) -> Json:
    known = {"status": "completed", "conclusion": conclusion} if conclusion else {"status": "in_progress"}
    ended = [
        {"number": at, "name": f"s{at}", "status": "completed", "conclusion": end} for at, end in enumerate(steps, 1)
    ]
    start = f"2026-11-27T09:00:{job_id % 60:02}Z"
    return {"id": job_id, "name": f"job {job_id}", **known, "started_at": start, "steps": ended, **more}


def paged(site: Site, path: str, key: str, items: Sequence[Json], total: int | None = None) -> None:
    """Answers as GitHub does: 30 a page unless asked, 100 at the most."""
    known = site.always

    def answer(asked: str) -> Said:
        parts = urlsplit(asked)
        if parts.path != path:
            return known(asked)
        query = parse_qs(parts.query)
        size, page = min(int(query.get("per_page", ["30"])[0]), 100), int(query.get("page", ["1"])[0])
        part = items[(page - 1) * size : page * size]
        return as_json({"total_count": len(items) if total is None else total, key: part})

    site.always = answer


def a_pull_request(
    site: Site,
    jobs: Mapping[int, Sequence[Json]] | None = None,
    *,
    runs: Sequence[Json] | None = None,
    checks: Sequence[Json] = (),
    statuses: Sequence[Json] = (),
) -> None:
    """Pull request 415 with these runs and their jobs, checks and statuses."""
    jobs = jobs or {}
    site.say(f"{REPO}/pulls/415", as_json({"number": 415, "head": {"sha": SHA, "ref": "fix/a:b 🎉"}}))
    paged(site, f"{REPO}/actions/runs", "workflow_runs", [a_run(run) for run in jobs] if runs is None else runs)
    for run in runs or [a_run(run) for run in jobs]:
        paged(site, f"{REPO}/actions/runs/{run['id']}/jobs", "jobs", jobs.get(run["id"], ()))
    paged(site, f"{REPO}/commits/{SHA}/check-runs", "check_runs", checks)
    paged(site, f"{REPO}/commits/{SHA}/status", "statuses", statuses)


def annotated(site: Site, check_id: int, *messages: str, level: str = "failure") -> None:
    said = [{"annotation_level": level, "path": ".github", "message": message} for message in messages]
    site.say(f"{REPO}/check-runs/{check_id}/annotations", as_json(said))


async def listed(site: Site, attempt: int | None = None, **environment: str) -> dict[int, Job]:
    jobs = await github(site, **environment).jobs(415, attempt)
    assert FAKE_TOKEN not in repr(jobs)
    assert len({job.job_id for job in jobs}) == len(jobs)
    return {job.job_id: job for job in jobs}


async def fault_of(site: Site, pr: int | None = 415, attempt: int | None = None, **environment: str) -> SourceError:
    with pytest.raises(SourceError) as raised:
        await github(site, **environment).jobs(pr, attempt)
    assert FAKE_TOKEN not in str(raised.value) + repr(raised.value)
    return raised.value


async def test_jobs_are_listed_in_the_order_in_which_they_ran_with_what_explains_them(site: Site) -> None:
    later = a_job(9, None, started_at="2026-11-27T09:30:00Z")
    not_yet = a_job(8, None, started_at=None)
    a_pull_request(site, {1: [not_yet, a_job(13, "failure", steps=["success", "failure"]), a_job(11)], 2: [later]})
    jobs = await listed(site)
    assert [(job.job_id, job.name, job.state) for job in jobs.values()] == [
        (11, "job 11", JobState.PASSED),
        (13, "job 13", JobState.FAILED),
        (9, "job 9", JobState.RUNNING),
        (8, "job 8", JobState.RUNNING),
    ]
    assert jobs[13].note == "step 2 (s2) failed"
    assert jobs[11].note == ""


async def test_the_token_goes_to_the_api_and_nowhere_else(
    site: Site, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    a_pull_request(site, {1: [a_job(11)]})
    source = github(site)
    await source.jobs(415)
    assert {request.headers["authorization"] for request in site.asked} == {f"Bearer {FAKE_TOKEN}"}
    assert {request.headers["x-github-api-version"] for request in site.asked} == {"2022-11-28"}
    assert FAKE_TOKEN not in repr(source) + caplog.text + "".join(capfd.readouterr())


async def test_gh_token_will_do_and_no_token_for_a_public_repository(site: Site) -> None:
    a_pull_request(site, {1: [a_job(11)]})
    assert set(await listed(site, GITHUB_TOKEN=" ", GH_TOKEN="other-fake-token\n")) == {11}
    assert site.asked[0].headers["authorization"] == "Bearer other-fake-token"
    site.asked.clear()
    assert set(await listed(site, GITHUB_TOKEN="")) == {11}
    assert not [request for request in site.asked if "authorization" in request.headers]


@pytest.mark.parametrize(
    ("repository", "environment"),
    [("shop", {}), ("octo/shop/x", {}), ("../shop", {}), ("octo/..", {}), ("octo/shop?x", {}), ("", {}), ("octo/", {}),
     ("octo/shop\n", {}), ("octo/shop", {"GITHUB_API_URL": "http://ghe.example.com"}),
     ("octo/shop", {"GITHUB_API_URL": "https://u:secret-pw@ghe.example.com"}),
     ("octo/shop", {"GITHUB_TOKEN": "fake token"}), ("octo/shop", {"GH_TOKEN": "fäke-token"})],
)  # fmt: skip
def test_a_set_up_that_cannot_work_is_refused_in_one_line(repository: str, environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as raised:
        GitHub(repository, environment=environment)
    assert not [value for value in environment.values() if value in str(raised.value)]
    assert "secret-pw" not in str(raised.value)


async def test_an_enterprise_address_with_a_path_is_honoured(site: Site) -> None:
    site.say("/api/v3/repos/octo/shop/pulls/415", as_json({}, status=401))
    assert (await fault_of(site, GITHUB_API_URL=f"{site.url}/api/v3/")).fault is Fault.UNAUTHORIZED
    assert site.paths() == ["/api/v3/repos/octo/shop/pulls/415"]


async def test_github_itself_is_asked_by_default_through_the_environments_proxy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", site.url)
    assert (await fault_of(site, GITHUB_API_URL="")).fault is Fault.UNREACHABLE
    assert site.paths() == ["api.github.com:443"]
    assert "authorization" not in site.asked[0].headers


def test_both_tools_get_the_time_of_a_real_source(site: Site) -> None:
    assert github(site).timeouts == {"list_ci_jobs": 20.0, "fetch_job_log": 20.0}


async def test_pages_are_read_until_the_count_is_reached(site: Site) -> None:
    a_pull_request(site, {1: [a_job(number) for number in range(1, 251)], 2: [a_job(1000)]})
    assert set(await listed(site)) == {*range(1, 251), 1000}
    assert sum("/runs/1/jobs" in path for path in site.paths()) == 3


async def test_a_list_shorter_than_its_count_says_so(site: Site) -> None:
    a_pull_request(site, {1: [a_job(11)]}, checks=[])
    paged(site, f"{REPO}/commits/{SHA}/status", "statuses", [], total=250)
    jobs = await listed(site)
    assert jobs[11].state is JobState.PASSED
    assert jobs[0].state is JobState.UNKNOWN
    assert "250 are said to be there, and 0 were given" in jobs[0].note


async def test_a_count_without_items_asks_for_no_further_page(site: Site) -> None:
    a_pull_request(site, {1: [a_job(11)]}, checks=[])
    paged(site, f"{REPO}/commits/{SHA}/status", "statuses", [], total=10**18)
    assert "were given" in (await listed(site))[0].note


async def test_more_than_can_be_listed_is_a_fault(site: Site) -> None:
    a_pull_request(site, {1: [a_job(11)]})
    paged(site, f"{REPO}/commits/{SHA}/status", "statuses", [{"id": 5, "state": "success"}], total=10**12)
    assert (await fault_of(site)).fault is Fault.TOO_LARGE


async def test_a_few_requests_run_at_once(site: Site) -> None:
    site.delay_s = 0.02
    a_pull_request(site, {run: [a_job(100 + run)] for run in range(1, 21)})
    await listed(site)
    assert 3 < site.most_at_once <= 6


async def test_jobs_of_one_name_are_told_apart_by_workflow_and_event(site: Site) -> None:
    runs = [a_run(1), a_run(2, event="push")]
    a_pull_request(site, {1: [a_job(11, name="build")], 2: [a_job(12, name="build"), a_job(13)]}, runs=runs)
    names = {job.job_id: job.name for job in (await listed(site)).values()}
    assert names == {11: "build (CI, pull_request)", 12: "build (CI, push)", 13: "job 13"}


async def test_an_older_attempt_is_asked_for_by_its_number(site: Site) -> None:
    a_pull_request(site, runs=[a_run(1, run_attempt=3), a_run(2)])
    paged(site, f"{REPO}/actions/runs/1/attempts/2/jobs", "jobs", [a_job(11, "failure", steps=["failure"])])
    paged(site, f"{REPO}/actions/runs/2/attempts/1/jobs", "jobs", [a_job(12)])
    assert {number: job.state for number, job in (await listed(site, 2)).items()} == {
        11: JobState.FAILED,
        12: JobState.PASSED,
    }
    assert "the newest is 3" in str(await fault_of(site, attempt=4))


async def test_a_cancelled_job_is_explained_by_its_annotation(site: Site) -> None:
    ended = a_job(11, "cancelled", steps=["cancelled", "failure"])
    a_pull_request(site, {1: [ended, *(a_job(number, "cancelled", steps=["cancelled"]) for number in (12, 13, 14))]})
    annotated(
        site, 11, "The job running on runner GitHub Actions 2 has exceeded the maximum execution time of 9 minutes."
    )
    annotated(
        site, 12, "Canceling since a higher priority waiting request for 'ci' exists", "The operation was canceled."
    )
    annotated(site, 13, "Node.js 16 actions are deprecated.", level="warning")
    jobs = await listed(site)
    assert jobs[11].state is JobState.TIMED_OUT
    assert jobs[11].note.startswith("it ran into its time limit, in step 1 (s1): ")
    assert jobs[12].note.startswith("a newer run replaced it")
    assert jobs[13].note == "GitHub does not say why, in step 1 (s1)"
    assert jobs[14].note == "its annotations could not be read (not_found), in step 1 (s1)"
    assert {jobs[number].state for number in (12, 13, 14)} == {JobState.CANCELLED}


async def test_a_job_without_a_step_is_explained_by_its_annotation(site: Site) -> None:
    a_pull_request(site, {1: [a_job(11, "failure")]})
    annotated(site, 11, "The job was not started because its account is locked.")
    assert (await listed(site))[11].note == "The job was not started because its account is locked."


async def test_of_very_many_cancelled_jobs_not_all_are_asked_why(site: Site) -> None:
    numbers = range(1, MAX_ANNOTATED + 6)
    a_pull_request(site, {1: [a_job(number, "cancelled") for number in numbers]})
    jobs = await listed(site)
    assert sum("annotations" in path for path in site.paths()) == MAX_ANNOTATED
    assert sum(job.note == f"not asked why: {MAX_ANNOTATED} others were" for job in jobs.values()) == 5


@pytest.mark.parametrize(
    ("run", "state", "words"),
    [
        (a_run(1, "action_required"), JobState.NEEDS_APPROVAL, "waits for a maintainer's approval"),
        (a_run(1, "failure"), JobState.FAILED, "workflow file (.github/workflows/ci.yml) is at fault"),
        (a_run(1, "startup_failure"), JobState.FAILED, "could not be started"),
        (a_run(1, None, status="queued"), JobState.RUNNING, "waits for a runner"),
        (a_run(1, "cancelled"), JobState.CANCELLED, "no job was started"),
    ],
)
async def test_a_run_without_a_job_is_an_entry_of_its_own(site: Site, run: Json, state: JobState, words: str) -> None:
    a_pull_request(site, runs=[run])
    job = (await listed(site))[1]
    assert (job.name, job.state) == ("CI", state)
    assert words in job.note


async def test_checks_of_other_apps_and_statuses_are_listed_and_the_jobs_own_checks_are_not(site: Site) -> None:
    own, made = ({"slug": "github-actions", "name": "GitHub Actions"} for _ in range(2))
    other, output = {"slug": "codecov", "name": "Codecov"}, {"title": "61% of diff hit", "annotations_count": 1}
    checks = [
        a_job(11, app=None),  # the job itself
        a_job(10, app=own, details_url="https://github.com/octo/shop/actions/runs/1/job/10"),  # of another attempt
        a_job(21, "failure", app=made, details_url="https://github.com/octo/shop/runs/21", name="report"),
        a_job(22, "failure", app=other, name="codecov/patch", output=output),
        a_job(23, "action_required", app=other, output=None),
        a_job(24, None, status="queued", app=None),
    ]  # fmt: skip
    statuses = [{"id": 31, "state": "error", "context": "ci/old: x/y 🎉", "description": "Build errored"},
                {"id": 32, "state": "pending", "context": "ci/slow", "description": None},
                {"id": 33, "state": "success", "context": "ci/good"}]  # fmt: skip
    a_pull_request(site, {1: [a_job(11)]}, checks=checks, statuses=statuses)
    annotated(site, 22, "cart.py was not covered")
    jobs = await listed(site)
    assert {number: job.state.value for number, job in jobs.items()} == {
        11: "passed", 21: "failed", 22: "failed", 23: "needs_approval", 24: "running", 31: "failed", 32: "running",
        33: "passed",
    }  # fmt: skip
    assert jobs[22].note == "a check by Codecov: 61% of diff hit: cart.py was not covered"
    assert jobs[31].name == "ci/old: x/y 🎉"
    assert jobs[31].note == "Build errored: it reports an error"


async def test_a_commit_without_statuses_has_none_although_they_are_called_pending(site: Site) -> None:
    a_pull_request(site)
    site.say(f"{REPO}/commits/{SHA}/status", as_json({"state": "pending", "total_count": 0, "statuses": []}))
    assert await listed(site) == {}


async def test_what_a_token_may_not_read_is_left_out_and_said(site: Site) -> None:
    a_pull_request(site, {1: [a_job(11)], 2: [a_job(12)]})
    refused = as_json({"message": "Resource not accessible by personal access token"}, status=403)
    site.say(f"{REPO}/commits/{SHA}/check-runs", refused)
    site.say(f"{REPO}/actions/runs/2/jobs", refused)
    jobs = await github(site).jobs(415)
    assert [(job.job_id, job.state) for job in jobs[:1]] == [(11, JobState.PASSED)]
    assert sorted(job.name for job in jobs[1:]) == ["checks by other apps", "jobs of run 2"]
    assert all(job.state is JobState.UNKNOWN and "GITHUB_TOKEN would need the right" in job.note for job in jobs[1:])


async def test_where_nothing_may_be_read_it_is_forbidden(site: Site) -> None:
    a_pull_request(site)
    site.always = lambda path: as_json({}, status=403)
    error = await fault_of(site, GITHUB_TOKEN="")
    assert error.fault is Fault.FORBIDDEN
    assert "GITHUB_TOKEN would help" in str(error)


@pytest.mark.parametrize("pr", [None, 0, -1, 2**63])
async def test_a_pull_request_has_a_number(site: Site, pr: int | None) -> None:
    assert (await fault_of(site, pr)).fault is (Fault.NOT_NAMED if pr is None else Fault.NOT_FOUND)
    assert site.asked == []


@pytest.mark.parametrize(
    ("answer", "fault", "words"),
    [
        (as_json({}, status=401), Fault.UNAUTHORIZED, "GITHUB_TOKEN is wrong or has expired"),
        (as_json({}, status=404), Fault.NOT_FOUND, "the token in GITHUB_TOKEN may not see it"),
        (as_json({}, status=429, retry_after="90"), Fault.RATE_LIMITED, "in 90 s"),
        (as_json({}, status=502), Fault.UNREACHABLE, "502"),
        (as_json({"head": {"sha": "../../x"}}), Fault.UNREADABLE, "not what it should be"),
        (Said(body=b"<html>", headers={"content-type": "text/html"}), Fault.UNREADABLE, "not what it should be"),
        (Said(body=b"{}", ending=Ending.CUT), Fault.UNREADABLE, "cut off"),
    ],
)
async def test_a_fault_says_what_was_asked_and_what_to_do(site: Site, answer: Said, fault: Fault, words: str) -> None:
    site.say(f"{REPO}/pulls/415", answer)
    error = await fault_of(site)
    assert error.fault is fault
    assert str(error).startswith(f"{fault}: pull request 415 of octo/shop: ")
    assert words in str(error)


async def test_a_renamed_repository_is_followed(site: Site, elsewhere: Site) -> None:
    a_pull_request(site, {1: [a_job(11)]})
    pull = site.answers.pop(f"{REPO}/pulls/415")
    site.say("/repositories/7/pulls/415", *pull)
    site.say(f"{REPO}/pulls/415", moved(f"{site.url}/repositories/7/pulls/415", status=301))
    assert set(await listed(site)) == {11}
    site.say(f"{REPO}/pulls/415", moved(f"{elsewhere.url}/repositories/7/pulls/415", status=301))
    assert (await fault_of(site)).fault is Fault.UNREADABLE


@pytest.mark.parametrize("number", [-1, 0, 2**63, True, 1.5, "11", None])
async def test_an_id_that_is_none_makes_the_list_unreadable(site: Site, number: object) -> None:
    a_pull_request(site, {1: [{**a_job(11), "id": number}]})
    assert (await fault_of(site)).fault is Fault.UNREADABLE


async def test_names_and_notes_are_made_safe(site: Site) -> None:
    shown = f"\x1b[31mred\x1b[0m\nline two {FAKE_TOKEN} \u202ecod"
    a_pull_request(site, {1: [a_job(11, "failure", name=shown), a_job(12, name="n" * 10_000), a_job(13, name=None)]})
    annotated(site, 11, f"{shown}\r\n" + "x" * 10_000)
    jobs = await listed(site)
    assert jobs[11].name == "red line two [masked] cod"
    assert jobs[11].note.startswith("red line two [masked] cod xxx")
    assert "\n" not in jobs[11].note
    assert max(len(job.name + job.note) for job in jobs.values()) < 1_000
    assert jobs[13].name == "unnamed"


@pytest.mark.parametrize(
    ("url", "name"),
    [("https://github.com/octo/shop.git", "octo/shop"), ("https://github.com/octo/shop/", "octo/shop"),
     ("https://user:pw@github.com/octo/shop", "octo/shop"), ("git@github.com:octo/shop.git", "octo/shop"),
     ("ssh://git@github.com/octo/shop.git", "octo/shop"), ("ssh://git@ssh.github.com:443/octo/shop.git", "octo/shop"),
     ("git@GitHub.com:octo/my.shop", "octo/my.shop"), ("https://ghe.example.com/octo/shop", "octo/shop"),
     ("https://gitlab.com/octo/shop", None), ("https://github.com.example.com/octo/shop", None),
     ("https://github.com/octo", None), ("https://github.com/a/b/c", None), ("/srv/git/shop", None),
     ("https://evil.example.com/github.com:octo/shop", None)],
)  # fmt: skip
def test_a_checkout_is_asked_which_repository_it_comes_from(tmp_path: Path, url: str, name: str | None) -> None:
    for arguments in (["init", "-q"], ["remote", "add", "origin", url]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    assert (
        origin(tmp_path, {"PATH": "/usr/local/bin:/usr/bin:/bin", "GITHUB_SERVER_URL": "https://ghe.example.com"})
        == name
    )


def test_no_checkout_no_remote_and_no_git_have_no_origin(tmp_path: Path) -> None:
    assert origin(tmp_path) is None
    assert origin(tmp_path, {"PATH": str(tmp_path)}) is None
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    assert origin(tmp_path) is None
