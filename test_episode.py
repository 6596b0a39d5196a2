"""One episode: the bound of its transcript, its verdict or draft, and that it is executed once and leaves one row."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage, convert_to_openai_messages
from langchain_core.utils.function_calling import convert_to_openai_tool

from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Event, Run
from episode import ReviewEpisode, Slot
from graph import State, build_graph
from models.factory import SetUpMissing
from reviewing.changes import Changes
from reviewing.coverage import Coverage
from reviewing.host import AGAIN, NOTICE, ReviewHost, until
from reviewing.tools import inspection_tools
from reviewing.transcript import Transcript
from test_graph import asks, says
from test_review import ByPath, Held, Reviewer, Subject, finds, held, read, subject

__all__ = ["held", "subject"]

pytestmark = pytest.mark.slow

VERDICT = finds({})


def size(model: Reviewer, number: int) -> int:
    """Characters of a send, as what the model was handed is serialised."""
    handed = {
        "messages": convert_to_openai_messages(model.sent[number - 1]),
        "tools": [convert_to_openai_tool(tool) for tool in model.schemas],
    }
    return len(json.dumps(handed, ensure_ascii=False, separators=(",", ":")))


def notices(model: Reviewer) -> list[int]:
    """How many notices each send has."""
    return [sum(message.text == NOTICE for message in send) for send in model.sent]


async def measured(subject: Subject, *replies: dict[str, Any]) -> Reviewer:
    """What is sent where there is room enough."""
    model = Reviewer(replies=list(replies))
    await subject.episode(model, transcript_chars=10_000_000).execute()
    assert NOTICE not in str(model.sent)
    return model


async def test_the_bound_is_measured_exactly_as_what_is_sent(subject: Subject) -> None:
    replies = [says(""), VERDICT]
    second = size(await measured(subject, *replies), 2)
    fits, exceeds = Reviewer(replies=replies), Reviewer(replies=replies)
    events: list[Event] = []
    review = await subject.episode(fits, transcript_chars=second).execute()
    assert (review.answer.outcome, size(fits, 2), fits.sent[-1][-1].text) == (Outcome.ANSWERED, second, AGAIN)
    review = await subject.episode(exceeds, transcript_chars=second - 1, observe=events.append).execute()
    assert (review.answer.outcome, len(exceeds.sent)) == (Outcome.TRANSCRIPT_BOUND, 1)
    (ended,) = [event for event in events if event.kind == "host_ended"]
    assert ended.facts == {"outcome": Outcome.TRANSCRIPT_BOUND, "chars": second, "bound": second - 1}


async def test_the_first_send_is_measured_exactly_too(subject: Subject) -> None:
    first = size(await measured(subject, VERDICT), 1)
    fits = await subject.episode(Reviewer(replies=[VERDICT]), transcript_chars=first).execute()
    exceeds = await subject.episode(Reviewer(replies=[VERDICT]), transcript_chars=first - 1).execute()
    assert [fits.answer.outcome, exceeds.answer.outcome] == [Outcome.ANSWERED, Outcome.BOUND_BELOW_FIRST_SEND]


@pytest.mark.parametrize("lines", [60, 1_500])  # below and above 10,240 characters, where the two rules change places
async def test_the_notice_goes_in_once_at_80_percent_or_2048_before_the_bound(lines: int, subject: Subject) -> None:
    subject.write(a="some text\n" * lines)
    replies = [asks(read()), asks(read(call_id="r2", end_line=1)), VERDICT]
    second = size(await measured(subject, *replies), 2)
    at, after = (
        next(bound for bound in itertools.count(second) if min(bound * 4 // 5, bound - 2_048) == threshold)
        for threshold in (second, second + 1)
    )
    told, later = Reviewer(replies=replies), Reviewer(replies=replies)
    await subject.episode(told, transcript_chars=at).execute()
    assert notices(told) == [0, 1, 1]
    assert told.sent[1][-1].text == NOTICE
    await subject.episode(later, transcript_chars=after).execute()
    assert notices(later) == [0, 0, 1]


@pytest.mark.parametrize("length", [2, 40, 400])
async def test_a_result_that_fills_the_room_leaves_some_for_its_id_and_the_notice(
    length: int, subject: Subject
) -> None:
    subject.write(a='"quoted" \\ text \N{SNOWMAN}\n' * 1_900)
    model = Reviewer(replies=[asks(read(call_id="i" * length)), VERDICT])
    review = await subject.episode(model, transcript_chars=12_000).execute()
    assert (review.answer.outcome, notices(model)) == (Outcome.ANSWERED, [0, 1])
    assert 11_500 < size(model, 2) <= 12_000
    (receipt,) = review.native_tool_receipts
    assert receipt["result_chars"] > receipt["text_chars"] > 1_000  # type: ignore[operator]
    given = model.told("i" * length).text.splitlines()
    assert review.coverage["read_ranges"] == {"a.py": [[1, receipt["end_line"]]]}
    assert int(given[-1].partition("|")[0]) - 1 <= receipt["end_line"] <= len(given) - 1  # type: ignore[operator]
    assert (receipt["start_line"], receipt["total_lines"], receipt["eof"]) == (1, 1_900, False)


@pytest.mark.parametrize(("calls", "bound"), [(2, 14_000), (8, 14_000), (16, 14_000), (16, 10_000), (16, 9_000)])
async def test_results_of_one_reply_share_the_room_and_the_next_send_goes_out(
    calls: int, bound: int, subject: Subject
) -> None:
    subject.write(a="some text\n" * 1_900)
    ids = [f"a-provider-s-own-long-id-{number:012}" for number in range(calls)]
    model = Reviewer(replies=[asks(*[read(call_id=each) for each in ids]), VERDICT])
    review = await subject.episode(model, transcript_chars=bound).execute()
    assert review.answer.outcome is Outcome.ANSWERED
    assert size(model, 2) <= bound
    assert len({model.told(each).tool_call_id for each in ids}) == calls


async def test_a_result_has_at_most_120000_characters(subject: Subject) -> None:
    subject.write(a=f"{'x' * 99}\n" * 1_900)
    model = Reviewer(replies=[asks(read()), VERDICT])
    review = await subject.episode(model).execute()
    (receipt,) = review.native_tool_receipts
    assert (receipt["text_chars"], len(model.told().text)) == (120_000, 120_000)
    assert receipt["result_chars"] > 190_000  # type: ignore[operator]
    assert review.coverage["state"] == "incomplete"


@pytest.mark.parametrize(("room", "outcome"), [(250, "withheld"), (700, "executed")])
async def test_a_call_with_too_little_room_is_withheld_and_the_episode_goes_on(
    room: int, outcome: str, subject: Subject
) -> None:
    subject.write(a="some text\n" * 500)
    asking = asks(read()) | {"content": "I read. " * 500}
    model = await measured(subject, asking, VERDICT)
    model.sent[1].remove(model.told())
    bound = size(model, 2) + room
    model = Reviewer(replies=[asking, VERDICT])
    review = await subject.episode(model, transcript_chars=bound).execute()
    (receipt,) = review.native_tool_receipts
    assert (review.answer.outcome, receipt["outcome"], receipt["delivered"]) == (
        Outcome.ANSWERED,
        outcome,
        outcome == "executed",
    )
    assert ("no room is left" in model.told().text) == (outcome == "withheld")
    assert ("started_at" in receipt) == (outcome == "executed")
    assert size(model, 2) <= bound


@pytest.mark.parametrize(
    ("spare", "outcome"), [(-1, Outcome.TRANSCRIPT_BOUND), (1_000, Outcome.STEP_LIMIT)], ids=["overflow", "notice"]
)
async def test_overflow_comes_before_the_notice_and_the_notice_before_the_clocks(
    spare: int, outcome: Outcome, subject: Subject, tmp_path: Path
) -> None:
    tools = inspection_tools(subject.root, Changes(files={}, against=""))
    model = Reviewer(replies=[says("")])
    for bound in (10_000_000, 0):  # first what the send has that is not made
        run = Run()
        transcript = Transcript(bound or size(model, 1) + len(json.dumps(AGAIN)) + 27 + spare, tools)
        host = ReviewHost(
            run=run, transcript=transcript, coverage=Coverage(None), bodies=tmp_path, until=until(None, None)
        )
        run.observe, model = host.observe, Reviewer(replies=[says("")])
        graph = build_graph(model, tools, host=host, limits=Limits(max_steps=1), system="s")
        start: State = {"messages": [HumanMessage("q")]}
        state = await graph.ainvoke(start, context=run)
    assert (run.outcome, host.rounds) == (outcome, 1)
    assert [message.text for message in state["messages"]].count(NOTICE) == (1 if spare > 0 else 0)


CUT = {"response_metadata": {"finish_reason": "MAX_TOKENS"}}
BROKEN = [
    (VERDICT | CUT, "cut"),
    (VERDICT | {"response_metadata": {"done_reason": "length"}}, "cut"),
    (says("Looks good to me."), "malformed"),
    (says('{"findings": []}'), "malformed"),
    (says(str(VERDICT["content"])[:-5]), "malformed"),
    (finds({"severity": "fatal"}), "malformed"),
    (finds({"line": "1"}), "malformed"),
    (finds({"line": 0}), "malformed"),
    (finds({"extra": 1}), "malformed"),
    (finds(*[{}] * 201), "malformed"),
    ({"error": "gone"}, "model_error"),
    (VERDICT | {"usage_metadata": None}, "missing_usage"),
]


@pytest.mark.parametrize("surface", ["multi_model_review", "report"])
@pytest.mark.parametrize(("reply", "reason"), BROKEN)
async def test_what_falls_short_of_findings_gives_none_with_its_reason_and_its_draft(
    reply: dict[str, Any], reason: str, surface: str, subject: Subject
) -> None:
    model = Reviewer(replies=[asks(read()), reply])
    review = await subject.episode(model, surface=surface).execute()
    assert (review.native_incomplete, review.findings) == (reason, None)
    assert review.raw_text == reply.get("content", "")
    assert review.draft == (review.answer.text if surface == "report" else "")
    assert (subject.rows[0]["native_incomplete"], subject.rows[0]["surface"]) == (reason, surface)


@pytest.mark.parametrize("surface", ["multi_model_review", "report"])
async def test_an_early_end_gives_no_findings_though_the_last_text_is_some(surface: str, subject: Subject) -> None:
    model = Reviewer(replies=[asks(read()) | {"content": VERDICT["content"]}])
    limits = Limits(max_steps=1, tool_timeouts=ByPath())
    review = await subject.episode(model, surface=surface, limits=limits).execute()
    assert (review.answer.outcome, review.findings) == (Outcome.STEP_LIMIT, None)
    assert (review.native_incomplete, review.raw_text) == ("step_limit", VERDICT["content"])


@pytest.mark.parametrize("around", ["{}", "  \n{}\n", "Here they are:\n```json\n{}\n```\nThat is all.", "```\n{}\n```"])
async def test_the_reply_or_the_one_fenced_block_in_it_is_read_and_the_raw_text_kept(
    around: str, subject: Subject
) -> None:
    text = around.format(VERDICT["content"])
    review = await subject.episode(Reviewer(replies=[asks(read()), says(text)])).execute()
    assert (review.raw_text, review.native_incomplete, len(review.findings or ())) == (text, "", 1)


async def test_a_finding_outside_credited_coverage_is_marked_unsupported(subject: Subject) -> None:
    where: list[dict[str, object]] = [{"line": 1}, {"line": 2}, {"line": 3}, {"file": "b.py"}, {"file": "./a.py"}]
    model = Reviewer(replies=[asks(read(end_line=1)), finds(*where)])
    review = await subject.episode(model).execute()
    assert [finding.supported for finding in review.findings or ()] == [True, False, False, False, False]
    assert (review.findings or ())[0].shown() == "major a.py:1: Wrong. [r1]"
    assert (review.findings or ())[1].shown() == "major a.py:2: Wrong. [r1] (unsupported: that line was not read)"


async def test_no_line_is_supported_whose_read_was_never_sent(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read()), {"error": "gone"}])
    limits = Limits(max_steps=1, tool_timeouts=ByPath())
    review = await subject.episode(model, limits=limits).execute()
    assert review.coverage["read_ranges"] == {}


async def test_the_usage_is_what_was_spent_and_the_rounds_are_the_sends(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read(), total=11), finds(**says("", 5) | {"content": "[]"})])
    review = await subject.episode(model).execute()
    assert review.usage == {"known_subtotal": 16, "usage_known": True, "native_rounds": 2}
    assert len(model.sent) == 2


async def test_a_second_execution_gives_the_same_review_and_sends_nothing(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read()), VERDICT, VERDICT])
    episode = subject.episode(model)
    review = await episode.execute()
    assert await episode.execute() is review
    assert (len(model.sent), len(subject.rows)) == (2, 1)


async def test_a_second_execution_raises_the_stored_failure(subject: Subject) -> None:
    episode = subject.episode(Reviewer(replies=[]))
    episode.model, episode.assignment = None, _with_model(episode, "scripted:/nowhere.json")
    raised = []
    for _ in range(2):
        with pytest.raises(SetUpMissing, match="cannot be read") as caught:
            await episode.execute()
        raised.append(caught.value)
    assert raised[0] is raised[1]
    (row,) = subject.rows
    assert row["failure"].startswith("SetUpMissing: scripted:/nowhere.json cannot be read")
    assert (row["outcome"], row["usage"], row["slot"]["model"]) == (None, None, "scripted:/nowhere.json")


def _with_model(episode: ReviewEpisode, name: str) -> Any:
    from dataclasses import replace

    return replace(episode.assignment, slot=Slot(model=name))


async def test_executions_at_once_share_one_review(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read()), VERDICT, VERDICT])
    episode = subject.episode(model)
    first, second = await asyncio.gather(episode.execute(), episode.execute())
    assert first is second
    assert (len(model.sent), len(subject.rows)) == (2, 1)


async def test_one_who_waits_may_leave_without_taking_the_episode_along(subject: Subject) -> None:
    asked = asyncio.Event()

    async def when_asked(number: int) -> None:
        asked.set()
        await asyncio.sleep(0)

    episode = subject.episode(Reviewer(replies=[asks(read()), VERDICT], when_asked=when_asked))
    working, waiting = asyncio.create_task(episode.execute()), asyncio.create_task(episode.execute())
    await asked.wait()
    waiting.cancel()
    assert (await working).answer.outcome is Outcome.ANSWERED
    assert waiting.cancelled()


async def test_a_cancelled_execution_leaves_its_row_and_never_sends_again(subject: Subject) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def when_asked(number: int) -> None:
        asked.set()
        await never.wait()

    model = Reviewer(replies=[VERDICT, VERDICT], when_asked=when_asked)
    episode = subject.episode(model)
    working = asyncio.create_task(episode.execute())
    await asked.wait()
    working.cancel()
    for attempt in (working, episode.execute()):
        with pytest.raises(asyncio.CancelledError):
            await attempt
    (row,) = subject.rows
    assert (row["failure"].startswith("CancelledError"), row["outcome"], len(model.sent)) == (True, None, 1)


async def test_a_row_says_nothing_of_what_its_caller_was_handling(subject: Subject) -> None:
    try:
        raise ValueError("the caller's own")
    except ValueError:
        await subject.episode(Reviewer(replies=[asks(read()), VERDICT])).execute()
    (row,) = subject.rows
    assert (row["outcome"], row["failure"]) == ("answered", None)


async def test_episodes_of_one_custody_leave_a_row_each(subject: Subject) -> None:
    for replies in ([asks(read()), VERDICT], [{"error": "gone"}], [says(""), says("")]):
        await subject.episode(Reviewer(replies=replies)).execute()
    rows = subject.rows
    assert [row["outcome"] for row in rows] == ["answered", "model_error", "round_without_progress"]
    assert [row["usage"]["native_rounds"] for row in rows] == [2, 1, 2]
    for row in rows:
        assert (row["call_id"], row["task_id"], row["failure"]) == ("c", "t1", None)
        assert row["started_at"] < row["ended_at"]
        assert row["no_proxy"] == "the named model answers, or nobody"


async def test_a_custody_that_takes_no_row_is_a_gap_of_the_sources_and_no_failure(subject: Subject) -> None:
    subject.custody.write_text("a file")
    episode = subject.episode(Reviewer(replies=[asks(read()), VERDICT]))
    review = await episode.execute()
    assert (review.native_source_gap, review.coverage["state"]) == ("custody_store_failed", "incomplete")
    assert await episode.execute() is review


async def test_a_custody_that_takes_no_row_does_not_hide_a_failure(subject: Subject) -> None:
    subject.custody.write_text("a file")
    episode = subject.episode(Reviewer(replies=[]))
    episode.model, episode.assignment = None, _with_model(episode, "scripted:/nowhere.json")
    with pytest.raises(SetUpMissing):
        await episode.execute()


async def test_the_task_names_the_changed_files_and_the_contract_of_the_request(subject: Subject) -> None:
    model = Reviewer(replies=[VERDICT])
    await subject.episode(model, "a.py", "gone.py").execute()
    task = next(message.text for message in model.sent[0] if isinstance(message, HumanMessage))
    assert task.startswith(
        "Review.\n\nLook.\n\nThe changed files:\n- 2 lines: a.py\n- 0 lines: gone.py\n\nEnd with a JSON"
    )
    assert not any(isinstance(message, ToolMessage) for message in model.sent[0])


async def test_the_episodes_own_deadline_ends_it_and_narrows_its_tools(subject: Subject, held: Held) -> None:
    model = Reviewer(replies=[asks(read("wedged.py")), VERDICT])
    limits = Limits(tool_timeouts=ByPath(short_s=30.0))
    review = await subject.episode(model, limits=limits, deadline_s=0.5).execute()
    (receipt,) = review.native_tool_receipts
    assert (review.answer.outcome, review.native_incomplete) == (Outcome.DEADLINE, "deadline")
    assert (receipt["outcome"], receipt["delivered"], len(model.sent)) == ("error", False, 1)
    assert receipt["bound_s"] <= 0.5  # type: ignore[operator]
