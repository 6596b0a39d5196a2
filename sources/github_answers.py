"""What GitHub's API answers: its shapes, and what a status and a conclusion mean in our words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from pydantic import AliasChoices, BaseModel, Field

from sources.http import Id
from sources.jobs import JobState

_NO_REASON = "The operation was canceled."
_REPLACED = "higher priority waiting request"
_TIME_LIMIT = "exceeded the maximum execution time"


@dataclass(frozen=True, slots=True)
class Stand:
    """How something stands, and what explains it: untrusted text, as long as it came."""

    state: JobState
    note: str = ""


_ENDED = {
    "success": Stand(JobState.PASSED),
    "neutral": Stand(JobState.PASSED, "it counts neither as passed nor as failed (neutral)"),
    "failure": Stand(JobState.FAILED),
    "startup_failure": Stand(JobState.FAILED, "it could not be started"),
    "error": Stand(JobState.FAILED, "it reports an error"),
    "cancelled": Stand(JobState.CANCELLED),
    "skipped": Stand(JobState.SKIPPED, "it did not run: its condition did not hold, or what it needs did not pass"),
    "timed_out": Stand(JobState.TIMED_OUT, "it ran into its time limit"),
    "action_required": Stand(JobState.NEEDS_APPROVAL, "it waits for a maintainer's approval"),
    "stale": Stand(JobState.UNKNOWN, "it was never reported as ended, and GitHub gave up on it (stale)"),
}
_NOT_ENDED = {
    "queued": Stand(JobState.RUNNING, "it waits for a runner"),
    "in_progress": Stand(JobState.RUNNING, "it has not ended"),
    "pending": Stand(JobState.RUNNING, "it waits for its turn"),
    "requested": Stand(JobState.RUNNING, "it is about to be queued"),
    "waiting": Stand(JobState.NEEDS_APPROVAL, "it waits for the rules that protect a deployment, such as a review"),
}
# States that nothing explains by themselves.
UNEXPLAINED = (JobState.FAILED, JobState.CANCELLED, JobState.UNKNOWN)


class Head(BaseModel):
    sha: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")]


class Pull(BaseModel):
    head: Head


class Item(BaseModel):
    id: Id
    name: str | None = None
    status: str | None = None
    conclusion: str | None = None
    started_at: str | None = None
    created_at: str | None = None


class Run(Item):
    path: str | None = None
    event: str | None = None
    run_attempt: Id | None = None


class Step(BaseModel):
    number: int | None = None
    name: str | None = None
    status: str | None = None
    conclusion: str | None = None


class Action(Item):
    steps: list[Step] | None = None

    def step(self, *ends: str) -> str:
        """The first step that ended, or stands, in one of these ways."""
        found = (step for step in self.steps or () if (step.conclusion or step.status) in ends)
        return next((f"step {step.number or '?'} ({step.name or 'unnamed'})" for step in found), "")


class App(BaseModel):
    slug: str | None = None
    name: str | None = None


class Output(BaseModel):
    title: str | None = None
    annotations_count: int | None = None


class Check(Item):
    details_url: str | None = None
    app: App | None = None
    output: Output | None = None

    @property
    def is_a_job(self) -> bool:
        """Whether it is a job of Actions, and not one of the checks that a workflow makes itself."""
        actions = self.app is not None and self.app.slug == "github-actions"
        return actions and (not self.details_url or "/actions/runs/" in self.details_url)


class Status(Item):
    state: str | None = None
    context: str | None = None
    description: str | None = None


class Annotation(BaseModel):
    message: str | None = None
    annotation_level: str | None = None


T = TypeVar("T", bound=Item)


class Page(BaseModel, Generic[T]):
    total_count: Annotated[int, Field(ge=0)]
    items: list[T] = Field(validation_alias=AliasChoices("workflow_runs", "jobs", "check_runs", "statuses"))


def stand_of(status: str | None, conclusion: str | None) -> Stand:
    """What GitHub's two words mean; a word that is not known stays unknown."""
    known = _ENDED.get(conclusion or "") if status == "completed" else _NOT_ENDED.get(status or "")
    return known or Stand(JobState.UNKNOWN, f"GitHub calls it {conclusion or status or 'nothing'}")


def explained(job: Action, stand: Stand, said: str) -> Stand:
    """How a job stands, with the step and the annotations that explain it."""
    failed, last = job.step("failure", "timed_out"), job.step("cancelled", "in_progress")
    where = f", in {last}" if last else ""
    if stand.state is JobState.RUNNING:
        return Stand(stand.state, f"it has not ended{where}" if last else stand.note)
    if stand.state not in UNEXPLAINED:
        return stand
    if _TIME_LIMIT in said:
        return Stand(JobState.TIMED_OUT, f"it ran into its time limit{where}: {said}")
    if failed and stand.state is JobState.FAILED:
        return Stand(stand.state, f"{failed} failed")
    if _REPLACED in said:
        return Stand(stand.state, f"a newer run replaced it: {said}")
    return Stand(stand.state, f"{said or stand.note or 'GitHub does not say why'}{where}")


def reasons(annotations: Iterable[Annotation]) -> str:
    """What annotations say about a failure; the runner's warnings, and that a cancelled job was cancelled, left out."""
    said = (one.message.strip() for one in annotations if one.message and one.annotation_level in ("failure", None))
    return "; ".join(message for message in said if message != _NO_REASON)
