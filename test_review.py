"""A review by a scripted reviewer: its calls are bounded by the one policy, and each of its ends.

python -m pytest -v test_review.py test_episode.py test_episode_receipts.py test_review_command.py
"""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from pydantic import Field

from bounded.deadlines import deadline_scope
from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.timeouts import Bound, ToolTimeouts
from episode import Assignment, Request, ReviewEpisode, Slot
from models.scripted import ScriptedModel
from reviewing import confined, tools
from reviewing.changes import Changes
from reviewing.host import AGAIN
from test_graph import asks, call, says

pytestmark = pytest.mark.slow

WEDGED = "wedged.py"
SHORT_S, LONG_S = 0.3, 30.0


class Reviewer(ScriptedModel):
    """Replays its replies, keeps what it is handed, and before each reply awaits `when_asked` with its number."""

    sent: list[list[BaseMessage]] = Field(default_factory=list)
    schemas: list[Any] = Field(default_factory=list)
    when_asked: Any = None

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        self.schemas = list(tools)
        return self

    async def answer(self, messages: list[BaseMessage]) -> AIMessage:
        self.sent.append(list(messages))
        if self.when_asked is not None:
            await self.when_asked(len(self.sent))
        return await super().answer(messages)

    def told(self, call_id: str = "r1") -> ToolMessage:
        """What the last send had as the result of a call."""
        results = [message for message in self.sent[-1] if isinstance(message, ToolMessage)]
        (result,) = [message for message in results if message.tool_call_id == call_id]
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPath(ToolTimeouts):
    """A policy that gives the wedged path less than all others, and notes what it is asked."""

    short_s: float = SHORT_S
    asked: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)

    def resolve(self, tool_set: str, tool: str, args: Mapping[str, object]) -> Bound:
        self.asked.append((tool_set, tool, dict(args)))
        seconds = self.short_s if args.get("path") == WEDGED else LONG_S
        return Bound(seconds=seconds, source="tool_set")


class Held:
    """Every read of the wedged path waits until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.workers: list[threading.Thread] = []

    def read_inside(self, root: Path, path: str) -> bytes:
        if path == WEDGED:
            self.workers.append(threading.current_thread())
            self.gate.wait(LONG_S)
        return confined.read_inside(root, path)

    async def let_go(self) -> None:
        """Until the late worker has ended and the loop has heard of it."""
        self.gate.set()
        for worker in self.workers:
            worker.join(LONG_S)
            assert not worker.is_alive()
        for _ in range(10):
            await asyncio.sleep(0)

    async def when_asked(self, number: int) -> None:
        if number > 1:
            await self.let_go()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(tools, "read_inside", held.read_inside)
    yield held
    held.gate.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A folder under review, and where its custody is."""

    root: Path
    custody: Path

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.root / f"{name}.py").write_text(text, newline="")

    def episode(
        self, model: ScriptedModel, *files: str, surface: Any = "multi_model_review", **given: Any
    ) -> ReviewEpisode:
        """An episode over these changed files (a.py for none)."""
        request = Request(goal="Review.", task="Look.", subject_root=self.root, surface=surface, task_id="t1")
        assignment = Assignment(request=request, slot=Slot(model="scripted"), call_id="c", custody_root=self.custody)
        given.setdefault("limits", Limits(tool_timeouts=ByPath()))
        given.setdefault("changes", Changes(files=dict.fromkeys(files or ("a.py",), ""), against="0" * 40))
        return ReviewEpisode(assignment, model=model, **given)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What the custody says of the episodes."""
        return [json.loads(line) for line in (self.custody / "episodes.jsonl").read_text().splitlines()]


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    subject = Subject(root=tmp_path / "subject", custody=tmp_path / "custody")
    subject.root.mkdir()
    subject.write(a="one\ntwo\n", wedged="LATE = 1\n")
    return subject


def read(path: str = "a.py", call_id: str = "r1", **lines: int) -> dict[str, Any]:
    return call("read_file", {"path": path, **lines}, call_id)


def finds(*findings: Mapping[str, object], **more: Any) -> dict[str, Any]:
    """A last reply: findings over these fields, or none."""
    usual = {"severity": "major", "file": "a.py", "line": 1, "text": "Wrong.", "receipts": ["r1"]}
    return says(json.dumps([usual | dict(finding) for finding in findings])) | more


async def test_a_wedged_read_is_abandoned_and_the_episode_goes_on_to_its_verdict_in_round_2(
    subject: Subject, held: Held
) -> None:
    model = Reviewer(replies=[asks(read(WEDGED)), finds({"file": WEDGED})], when_asked=held.when_asked)
    episode = subject.episode(model, WEDGED)
    review = await episode.execute()
    (receipt,) = review.native_tool_receipts
    assert (review.answer.outcome, review.usage["native_rounds"], len(review.findings or ())) == (
        Outcome.ANSWERED,
        2,
        1,
    )
    assert (receipt["outcome"], receipt["source_gap"]) == ("error", "native_tool_abandoned")
    assert SHORT_S <= receipt["duration_sec"] < SHORT_S + 0.2  # type: ignore[operator]  # without a grace
    told = model.told()
    assert told.status == "error"
    assert told.text.startswith(f"⚠️ TOOL_TIMEOUT (read_file): exceeded {SHORT_S}s limit.")
    assert review.native_source_gap == "native_tool_abandoned"
    # The late worker had ended before the second reply, and what it returned sources nothing.
    assert len(held.workers) == 1
    assert "late" in receipt
    assert receipt.keys().isdisjoint({"opened_path", "start_line", "complete_sha256", "text_sha256", "result_chars"})
    assert not any("LATE" in message.text for send in model.sent for message in send)
    assert review.coverage["missing_ranges"] == {WEDGED: [[1, 1]]}
    assert (review.coverage["state"], review.coverage["read_ranges"]) == ("incomplete", {})
    assert not (review.findings or ())[0].supported
    assert not (subject.custody / "bodies").exists()


async def test_a_quick_read_is_untouched_and_has_an_aware_start_and_a_float_duration(
    subject: Subject, held: Held
) -> None:
    model = Reviewer(replies=[asks(read()), finds({})])
    review = await subject.episode(model).execute()
    (receipt,) = review.native_tool_receipts
    assert (receipt["outcome"], "source_gap" in receipt, review.native_source_gap) == ("executed", False, "")
    assert datetime.fromisoformat(str(receipt["started_at"])).utcoffset() == timedelta(0)
    assert type(receipt["duration_sec"]) is float
    assert model.told().text.splitlines()[1:] == ["1| one", "2| two"]
    assert (review.coverage["state"], (review.findings or ())[0].supported) == ("complete", True)


async def test_the_bound_is_what_the_policy_says_for_this_tool_set_and_these_arguments(
    subject: Subject, held: Held
) -> None:
    policy = ByPath(short_s=0.2)
    replies = [asks(read(WEDGED), read(call_id="r2", end_line=1)), finds()]
    model = Reviewer(replies=replies, when_asked=held.when_asked)
    review = await subject.episode(model, limits=Limits(tool_timeouts=policy)).execute()
    assert policy.asked == [  # once for each call, with the call's own arguments
        ("review", "read_file", {"path": WEDGED}),
        ("review", "read_file", {"path": "a.py", "end_line": 1}),
    ]
    bounds = [(receipt["bound_s"], receipt["bound_source"]) for receipt in review.native_tool_receipts]
    assert bounds == [(0.2, "tool_set"), (LONG_S, "tool_set")]
    assert [receipt["outcome"] for receipt in review.native_tool_receipts] == ["error", "executed"]


async def test_an_inherited_deadline_narrows_the_wait_and_the_second_send_still_happens(
    subject: Subject, held: Held
) -> None:
    policy = ByPath(short_s=LONG_S)
    model = Reviewer(replies=[asks(read(WEDGED)), finds()], when_asked=held.when_asked)
    with deadline_scope(1.0):
        review = await subject.episode(model, limits=Limits(tool_timeouts=policy)).execute()
    (receipt,) = review.native_tool_receipts
    assert (receipt["source_gap"], receipt["bound_source"]) == ("native_tool_abandoned", "deadline")
    assert 0 < receipt["bound_s"] <= 1.0  # type: ignore[operator]
    assert (review.answer.outcome, review.usage["native_rounds"]) == (Outcome.ANSWERED, 2)


async def test_without_an_inherited_deadline_the_same_call_is_executed(subject: Subject, held: Held) -> None:
    policy = ByPath(short_s=LONG_S)
    model = Reviewer(replies=[asks(read(WEDGED)), finds()], when_asked=held.when_asked)
    asyncio.get_running_loop().call_later(1.1, held.gate.set)  # when the scope of the other test has passed
    review = await subject.episode(model, WEDGED, limits=Limits(tool_timeouts=policy)).execute()
    (receipt,) = review.native_tool_receipts
    assert (receipt["outcome"], receipt["bound_s"], review.coverage["state"]) == ("executed", LONG_S, "complete")


async def test_after_an_abandonment_a_later_executed_read_earns_no_extent(subject: Subject, held: Held) -> None:
    replies = [asks(read(WEDGED)), asks(read(call_id="r2")), asks(read(call_id="r3")), finds({})]
    model = Reviewer(replies=replies, when_asked=held.when_asked)
    review = await subject.episode(model).execute()
    wedged, *later = review.native_tool_receipts
    assert wedged["source_gap"] == "native_tool_abandoned"
    for receipt in later:
        assert (receipt["outcome"], receipt["delivered"]) == ("executed", True)
        assert receipt.keys().isdisjoint({"opened_path", "start_line", "end_line", "eof", "complete_sha256"})
        assert "1| one" in model.told(str(receipt["call_id"])).text
    assert review.coverage == {
        "state": "incomplete",
        "reason": "native_tool_abandoned",
        "missing_ranges": {"a.py": [[1, 2]]},
        "read_ranges": {},
    }
    assert (review.native_source_gap, (review.findings or ())[0].supported) == ("native_tool_abandoned", False)


@pytest.mark.parametrize("how", ["scope", "moment"])
async def test_a_deadline_that_has_passed_abandons_at_once_and_sends_go_on(
    how: str, subject: Subject, held: Held
) -> None:
    model = Reviewer(replies=[asks(read(WEDGED)), finds()], when_asked=held.when_asked)
    passed = datetime.now(UTC) - timedelta(hours=1)
    with deadline_scope(0.0 if how == "scope" else None):
        review = await subject.episode(model, tools_until=passed if how == "moment" else None).execute()
    (receipt,) = review.native_tool_receipts
    assert (receipt["outcome"], receipt["source_gap"]) == ("error", "native_tool_abandoned")
    assert (receipt["bound_s"], receipt["bound_source"]) == (0.0, "deadline")
    assert receipt["duration_sec"] < 0.2  # type: ignore[operator]
    assert (review.answer.outcome, review.usage["native_rounds"]) == (Outcome.ANSWERED, 2)


@pytest.mark.parametrize(("outer", "inner", "moment"), [(5, 9, 9), (9, 5, 9), (9, 9, 5), (5, None, None), (9, 9, None)])
async def test_of_scopes_and_a_moment_the_nearest_narrows(
    outer: float, inner: float | None, moment: float | None, subject: Subject
) -> None:
    until = None if moment is None else datetime.now(UTC) + timedelta(seconds=moment)
    model = Reviewer(replies=[asks(read()), finds()])
    with deadline_scope(outer), deadline_scope(inner):
        review = await subject.episode(model, tools_until=until).execute()
    (receipt,) = review.native_tool_receipts
    nearest = min(seconds for seconds in (outer, inner, moment) if seconds is not None)
    assert nearest - 2 < receipt["bound_s"] <= nearest  # type: ignore[operator]
    assert (receipt["outcome"], receipt["bound_source"]) == ("executed", "deadline")


async def test_two_replies_in_a_row_that_say_nothing_end_it(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read()), says(""), says(" \n"), finds()])
    review = await subject.episode(model).execute()
    assert (review.answer.outcome, review.native_incomplete) == (
        Outcome.ROUND_WITHOUT_PROGRESS,
        "round_without_progress",
    )
    assert (review.usage["native_rounds"], len(model.sent)) == (3, 3)
    assert model.sent[-1][-1].text == AGAIN


async def test_a_call_between_two_empty_replies_is_progress(subject: Subject) -> None:
    model = Reviewer(replies=[says(""), asks(read()), says(""), finds()])
    review = await subject.episode(model).execute()
    assert (review.answer.outcome, len(model.sent)) == (Outcome.ANSWERED, 4)


async def test_a_bound_below_the_first_send_ends_it_before_that(subject: Subject) -> None:
    model = Reviewer(replies=[finds()])
    review = await subject.episode(model, transcript_chars=500).execute()
    assert (review.answer.outcome, review.usage["native_rounds"]) == (Outcome.BOUND_BELOW_FIRST_SEND, 0)
    assert (model.sent, review.native_incomplete) == ([], "bound_below_first_send")
    assert (review.findings, len(subject.rows)) == (None, 1)


async def test_a_send_that_would_not_fit_is_not_made(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read()) | {"content": "x" * 20_000}, finds()])
    review = await subject.episode(model, transcript_chars=20_000).execute()
    (receipt,) = review.native_tool_receipts
    assert (review.answer.outcome, review.usage["native_rounds"]) == (Outcome.TRANSCRIPT_BOUND, 1)
    assert (len(model.sent), review.native_incomplete) == (1, "transcript_bound")
    assert (receipt["outcome"], receipt["delivered"]) == ("withheld", False)


@pytest.mark.parametrize("root", ["nowhere", "a.py"])
async def test_where_no_tools_can_be_made_for_the_root_nothing_is_sent(root: str, subject: Subject) -> None:
    gone = Subject(root=subject.root / root, custody=subject.custody)
    model = Reviewer(replies=[finds()])
    events: list[str] = []
    review = await gone.episode(model, observe=lambda event: events.append(event.kind)).execute()
    assert (review.answer.outcome, review.usage["native_rounds"]) == (Outcome.REGISTRY_UNAVAILABLE, 0)
    assert (model.sent, review.native_incomplete, len(gone.rows)) == ([], "registry_unavailable", 1)
    assert (review.coverage["state"] == "complete", events) == (False, ["host_ended", "run_ended"])
