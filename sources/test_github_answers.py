"""What GitHub's words mean: every status and conclusion, the step, the annotation."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bounded.deadlines import deadline_scope
from sources.conftest import Site, as_json
from sources.github_answers import Action, Annotation, Check, explained, reasons, stand_of
from sources.jobs import JobState, SourceError
from sources.test_github import REPO, SHA, a_pull_request, annotated, github
from sources.test_github import a_job as a_job_of_a_run

LIMIT = "The job running on runner GitHub Actions 7 has exceeded the maximum execution time of 6 minutes."
REPLACED = "Canceling since a higher priority waiting request for 'ci-415' exists"


def a_job(conclusion: str | None, *ends: str, status: str = "completed") -> Action:
    steps = [
        {"number": at, "name": f"s{at}", "status": "completed", "conclusion": end} for at, end in enumerate(ends, 1)
    ]
    return Action.model_validate({"id": 7, "status": status, "conclusion": conclusion, "steps": steps})


def note_of(job: Action, said: str = "") -> str:
    stand = explained(job, stand_of(job.status, job.conclusion), said)
    return f"{stand.state}: {stand.note}"


@pytest.mark.parametrize(
    ("status", "conclusion", "state"),
    [
        ("completed", "success", JobState.PASSED),
        ("completed", "neutral", JobState.PASSED),
        ("completed", "failure", JobState.FAILED),
        ("completed", "startup_failure", JobState.FAILED),
        ("completed", "cancelled", JobState.CANCELLED),
        ("completed", "skipped", JobState.SKIPPED),
        ("completed", "timed_out", JobState.TIMED_OUT),
        ("completed", "action_required", JobState.NEEDS_APPROVAL),
        ("completed", "stale", JobState.UNKNOWN),
        ("completed", "a new word", JobState.UNKNOWN),
        ("completed", None, JobState.UNKNOWN),
        ("queued", None, JobState.RUNNING),
        ("in_progress", None, JobState.RUNNING),
        ("pending", None, JobState.RUNNING),
        ("requested", None, JobState.RUNNING),
        ("waiting", None, JobState.NEEDS_APPROVAL),
        ("success", None, JobState.UNKNOWN),
        (None, None, JobState.UNKNOWN),
    ],
)
def test_each_word_has_a_state_and_each_state_but_passed_an_explanation(
    status: str | None, conclusion: str | None, state: JobState
) -> None:
    job = Action.model_validate({"id": 7, "status": status, "conclusion": conclusion})
    stand = explained(job, stand_of(status, conclusion), "")
    assert stand.state is state
    assert stand.note or conclusion == "success"


def test_a_failure_is_explained_by_its_first_failed_step() -> None:
    assert note_of(a_job("failure", "success", "failure", "failure", "skipped")) == "failed: step 2 (s2) failed"


def test_a_failure_without_a_failed_step_is_explained_by_what_was_said() -> None:
    assert note_of(a_job("failure"), "The runner has received a shutdown signal.").endswith("a shutdown signal.")
    assert note_of(a_job("failure")) == "failed: GitHub does not say why"


def test_a_job_that_runs_says_in_which_step() -> None:
    assert note_of(a_job(None, "success", "in_progress", status="in_progress")).endswith(
        "has not ended, in step 2 (s2)"
    )


def test_a_cancelled_job_that_ran_into_its_time_limit_is_told_from_others() -> None:
    job = a_job("cancelled", "success", "cancelled")
    assert note_of(job, LIMIT) == f"timed_out: it ran into its time limit, in step 2 (s2): {LIMIT}"
    assert note_of(a_job("cancelled"), "The job has exceeded the maximum execution time of 6m0s").startswith(
        "timed_out"
    )
    assert note_of(job, REPLACED) == f"cancelled: a newer run replaced it: {REPLACED}"
    assert note_of(job) == "cancelled: GitHub does not say why, in step 2 (s2)"


def test_only_what_explains_a_failure_is_a_reason() -> None:
    said = [("failure", LIMIT), ("failure", "The operation was canceled."), ("warning", "Node.js 16 is deprecated"),
            ("notice", "cache hit"), (None, "odd"), ("failure", None)]  # fmt: skip
    found = [Annotation(annotation_level=level, message=message) for level, message in said]
    assert reasons(found) == f"{LIMIT}; odd"


@pytest.mark.parametrize(
    ("slug", "url", "is_a_job"),
    [
        ("github-actions", "https://github.com/o/r/actions/runs/5/job/7", True),
        ("github-actions", None, True),
        ("github-actions", "https://github.com/o/r/runs/7", False),  # a check that a workflow made itself
        ("codecov", "https://github.com/o/r/actions/runs/5", False),
        (None, None, False),
    ],
)
def test_a_job_of_actions_is_told_from_other_checks(slug: str | None, url: str | None, is_a_job: bool) -> None:
    app = {"slug": slug} if slug else None
    assert Check.model_validate({"id": 7, "app": app, "details_url": url}).is_a_job is is_a_job


PATHS = ["pulls/415", "actions/runs", "actions/runs/1/jobs", "check-runs/12/annotations", f"commits/{SHA}/check-runs",
         f"commits/{SHA}/status", "actions/jobs/12"]  # fmt: skip
KEYS = ["id", "name", "status", "conclusion", "started_at", "steps", "number", "total_count", "workflow_runs", "jobs",
        "check_runs", "statuses", "run_attempt", "head", "sha", "app", "output", "title", "annotations_count",
        "message", "context", "state", "annotation_level", "details_url", "slug"]  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([-1, 2**63, 10**30, 1e400, ""]), st.floats(), st.text()
)
ODD = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)


def spoiled(value: Any, key: str, odd: object) -> Any:
    """`value` with what stands at `key`, at any depth, replaced by `odd`; without a key `odd` itself."""
    if not key:
        return odd
    if isinstance(value, dict):
        return {name: odd if name == key else spoiled(inner, key, odd) for name, inner in value.items()}
    return [spoiled(inner, key, odd) for inner in value] if isinstance(value, list) else value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), key=st.sampled_from(["", *KEYS]), odd=ODD)
async def test_any_json_anywhere_gives_jobs_and_a_log_or_a_source_error(
    site: Site, path: str, key: str, odd: object
) -> None:
    site.answers.clear()
    check = {"id": 21, "name": "c", "status": "completed", "conclusion": "failure", "app": {"slug": "s", "name": "n"},
             "details_url": None, "output": {"title": "t", "annotations_count": 1}}  # fmt: skip
    status = {"id": 31, "state": "error", "context": "c"}
    jobs = [a_job_of_a_run(11, "failure", steps=["failure"]), a_job_of_a_run(12, "cancelled")]
    a_pull_request(site, {1: jobs}, checks=[check], statuses=[status])
    annotated(site, 12, "m")
    annotated(site, 21, "m")
    site.say(f"{REPO}/actions/jobs/12", as_json(jobs[1]))
    known = site.answers.get(f"{REPO}/{path}", [site.always(f"{REPO}/{path}")])[0]
    site.say(f"{REPO}/{path}", as_json(spoiled(known.json(), key, odd)))
    source = github(site)
    with deadline_scope(10.0):
        try:
            assert all(0 <= job.job_id < 2**63 and isinstance(job.note, str) for job in await source.jobs(415))
        except SourceError as error:
            assert "\n" not in str(error)  # noqa: PT017 - both ends are right
        with pytest.raises(SourceError):
            await source.log(12)
