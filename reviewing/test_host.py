"""The reviewer's host: what fits is given, what is given is receipted, and what is loose sources nothing."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool

from bounded.deadlines import deadline_scope
from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome
from bounded.run import Answer, Event, Run
from bounded.timeouts import ToolTimeouts
from conftest import OnVirtualClock
from episode import SYSTEM
from graph import ask, build_graph
from models.scripted import ScriptedModel
from reviewing.coverage import Coverage
from reviewing.host import AGAIN, NOTICE, STORE_FAILED, ReviewHost, until
from reviewing.tools import Extent
from reviewing.transcript import MAX_RESULT, MIN_ROOM, Transcript

SHA = "0" * 64
USED = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
EMPTY: dict[str, Any] = {"usage_metadata": USED}
DONE: dict[str, Any] = {"content": "[]", "usage_metadata": USED}


def calls(*requested: tuple[str, dict[str, Any]], ids: str = "c") -> dict[str, Any]:
    """A reply that asks for these calls."""
    named = [{"name": name, "args": args, "id": f"{ids}{n}"} for n, (name, args) in enumerate(requested)]
    return {"tool_calls": named, "usage_metadata": USED}


def lines_of(path: str, rows: Sequence[str]) -> tuple[str, Extent]:
    """What a read of a whole file gives."""
    text, ends = f"{path}:", []
    for row in rows:
        text += f"\n{row}"
        ends.append(len(text))
    total = len(rows)
    extent = Extent(
        opened_path=path, start_line=1, end_line=total, total_lines=total, eof=True, complete_sha256=SHA,
        source_bytes=len(text), line_ends=tuple(ends),
    )  # fmt: skip
    return text, extent


@tool(response_format="content_and_artifact")
async def read(path: str, lines: int = 3) -> tuple[str, Extent]:
    """Read a file of so many lines."""
    return lines_of(path, [f'"{n}"' for n in range(lines)])


@tool
async def fail(said: str) -> str:
    """Fail."""
    raise OSError(said)


class Model(ScriptedModel):
    """Keeps what it was sent."""

    sent: list[list[BaseMessage]] = []  # noqa: RUF012 - pydantic copies it

    async def answer(self, messages: list[BaseMessage]) -> AIMessage:
        self.sent.append(messages)
        return await super().answer(messages)


class Episode:
    """A graph with a reviewer's host over these tools, and what comes of it."""

    def __init__(
        self,
        root: Path,
        *replies: dict[str, Any],
        bound: int = 400_000,
        tools: Sequence[BaseTool] = (read, fail),
        manifest: dict[str, int | None] | None = None,
        left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.run, self.model, self.tools, self.events = Run(), Model(replies=list(replies)), tools, list[Event]()
        self.transcript, self.coverage = (
            Transcript(bound, tools),
            Coverage({"a.py": 3} if manifest is None else manifest),
        )
        self.host = ReviewHost(
            run=self.run, transcript=self.transcript, coverage=self.coverage, bodies=root / "bodies", until=left
        )
        self.run.observe = self._observe

    def _observe(self, event: Event) -> None:
        self.host.observe(event)
        self.events.append(event)

    async def execute(self) -> Answer:
        limits = Limits(max_steps=9, tool_timeouts=ToolTimeouts(default_s=3.0))
        graph = build_graph(self.model, self.tools, system=SYSTEM, limits=limits, host=self.host)
        return await ask(graph, "Review it.", run=self.run)

    def receipts(self) -> list[dict[str, Any]]:
        return [receipt.as_dict() for receipt in self.run.receipts.all()]


async def test_a_credited_read_says_what_it_opened_once_it_was_really_sent(tmp_path: Path) -> None:
    episode = Episode(tmp_path, calls(("read", {"path": "a.py"})), DONE)
    assert (await episode.execute()).outcome is Outcome.ANSWERED
    (receipt,) = episode.receipts()
    text, extent = lines_of("a.py", ['"0"', '"1"', '"2"'])
    expected = {
        "round": 1, "delivered": True, "path": "a.py", "result_chars": len(text), "opened_path": "a.py",
        "start_line": 1, "end_line": 3, "total_lines": 3, "eof": True, "complete_sha256": SHA,
        "source_bytes": extent.source_bytes, "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "outcome": CallOutcome.EXECUTED, "turn": 1, "text_chars": len(text),
    }  # fmt: skip
    assert receipt | expected == receipt
    assert (episode.coverage.report()["state"], episode.host.gap, episode.host.rounds) == ("complete", "", 2)


async def test_what_no_later_send_went_out_with_is_not_delivered_and_not_credited(tmp_path: Path) -> None:
    episode = Episode(tmp_path, calls(("read", {"path": "a.py"})), DONE)
    episode.host.before_send = lambda run, messages: (  # type: ignore[method-assign]
        run.end(Outcome.TRANSCRIPT_BOUND) or [] if run.model_calls else []  # type: ignore[func-returns-value]
    )
    await episode.execute()
    (receipt,) = episode.receipts()
    assert (receipt["outcome"], receipt["delivered"]) == (CallOutcome.EXECUTED, False)
    assert "opened_path" not in receipt
    assert episode.coverage.report()["state"] == "incomplete"


async def test_every_receipt_has_its_round_and_says_whether_it_was_delivered(tmp_path: Path) -> None:
    unparsable = {"invalid_tool_calls": [{"name": "read", "args": "{", "id": "u"}], "usage_metadata": USED}
    last = calls(*[("read", {"path": "b.py"})] * 2, ids="l") | {"usage_metadata": None}
    episode = Episode(tmp_path, calls(("none", {}), ("fail", {"said": "no"})), unparsable, last)
    await episode.execute()
    seen = [(receipt["call_id"], receipt.get("round"), receipt.get("delivered")) for receipt in episode.receipts()]
    assert seen == [("c0", 1, True), ("c1", 1, True), ("u", 2, True), ("l0", 3, False), ("l1", 3, False)]


async def test_bodies_are_kept_as_they_were_given_under_their_digests(tmp_path: Path) -> None:
    episode = Episode(tmp_path, calls(("read", {"path": "é\r.py"}), ("read", {"path": "é\r.py"})), DONE)
    await episode.execute()
    (kept,) = (tmp_path / "bodies").iterdir()
    given_texts = {message.text for message in episode.model.sent[-1] if isinstance(message, ToolMessage)}
    assert given_texts == {kept.read_bytes().decode()}
    assert {receipt["text_sha256"] for receipt in episode.receipts()} == {kept.name}
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == kept.name


async def test_a_store_that_fails_is_a_gap_of_its_own_and_the_read_is_still_shown(tmp_path: Path) -> None:
    (tmp_path / "bodies").write_text("in the way")
    episode = Episode(tmp_path, calls(("read", {"path": "a.py"})), DONE)
    await episode.execute()
    (receipt,) = episode.receipts()
    assert (receipt["outcome"], receipt["end_line"], episode.host.gap) == (CallOutcome.EXECUTED, 3, STORE_FAILED)
    report = episode.coverage.report()
    assert (report["state"], report["reason"], report["missing_ranges"]) == ("incomplete", STORE_FAILED, {})


def test_after_an_abandonment_reads_are_shown_and_executed_and_never_credited(
    tmp_path: Path, on_virtual_clock: OnVirtualClock[Answer]
) -> None:
    held = threading.Event()

    @tool(response_format="content_and_artifact")
    def wedged() -> tuple[str, Extent]:
        """Wait to be let go."""
        held.wait(30)
        return lines_of("a.py", ["late"] * 3)

    asked = [calls(("wedged", {})), calls(("read", {"path": "a.py"}), ids="d"), DONE]
    episode = Episode(tmp_path, *asked, tools=[read, wedged])
    try:
        answer = on_virtual_clock(episode.execute())
    finally:
        held.set()
    loose, later = episode.receipts()
    assert answer.outcome is Outcome.ANSWERED
    assert (loose["outcome"], loose["source_gap"], loose["duration_sec"]) == ("error", "native_tool_abandoned", 3.0)
    assert not {"text_sha256", "opened_path", "result_chars"} & set(loose)
    assert (later["outcome"], later["delivered"], "opened_path" in later) == ("executed", True, False)
    assert episode.host.gap == "native_tool_abandoned"
    assert episode.coverage.report()["read_ranges"] == {}


def test_a_gap_once_set_keeps_its_first_reason(tmp_path: Path) -> None:
    episode = Episode(tmp_path)
    episode.host.set_gap(STORE_FAILED)
    episode.host.set_gap("native_tool_abandoned")
    assert (episode.host.gap, episode.coverage.report()["reason"]) == (STORE_FAILED, STORE_FAILED)


async def test_a_first_send_over_the_bound_is_never_made(tmp_path: Path) -> None:
    episode = Episode(tmp_path, DONE, bound=300)
    answer = await episode.execute()
    assert (answer.outcome, answer.model_calls, episode.host.rounds) == (Outcome.BOUND_BELOW_FIRST_SEND, 0, 0)
    (ended,) = [event for event in episode.events if event.kind == "host_ended"]
    assert (ended.facts["bound"], episode.model.sent) == (300, [])


async def test_a_send_of_exactly_the_bound_goes_out_and_one_character_more_does_not(tmp_path: Path) -> None:
    size = Episode(tmp_path).transcript.size([SystemMessage(SYSTEM), HumanMessage("Review it.")])
    assert (await Episode(tmp_path, DONE, bound=size).execute()).outcome is Outcome.ANSWERED
    assert (await Episode(tmp_path, DONE, bound=size - 1).execute()).outcome is Outcome.BOUND_BELOW_FIRST_SEND


async def test_a_later_send_over_the_bound_ends_the_episode(tmp_path: Path) -> None:
    reply = calls(("none", {"padding": "x" * 20_000}))
    answer = await Episode(tmp_path, reply, DONE, bound=20_000).execute()
    assert (answer.outcome, answer.model_calls) == (Outcome.TRANSCRIPT_BOUND, 1)


async def test_the_notice_goes_in_once_and_only_when_it_is_due(tmp_path: Path) -> None:
    far, near = (calls(("none", {"padding": "x" * chars}), ids=ids) for chars, ids in ((1_000, "f"), (16_000, "n")))
    episode = Episode(tmp_path, far, near, calls(("none", {}), ids="z"), DONE, bound=20_000)
    assert (await episode.execute()).outcome is Outcome.ANSWERED
    said = [[str(message.text) for message in sent].count(NOTICE) for sent in episode.model.sent]
    assert said == [0, 0, 1, 1]


async def test_two_empty_replies_in_a_row_end_the_episode_and_one_is_asked_again(tmp_path: Path) -> None:
    episode = Episode(tmp_path, EMPTY, EMPTY, DONE)
    answer = await episode.execute()
    assert (answer.outcome, answer.model_calls) == (Outcome.ROUND_WITHOUT_PROGRESS, 2)
    assert episode.model.sent[1][-1].text == AGAIN


@pytest.mark.parametrize(
    "between",
    [
        calls(("read", {"path": "a.py"})),
        calls(("none", {})),
        {"invalid_tool_calls": [{"name": "read", "args": "{", "id": "u"}], "usage_metadata": USED},
    ],
    ids=["executed", "unknown", "unparsable"],
)
async def test_empty_replies_with_a_call_between_them_are_not_in_a_row(tmp_path: Path, between: dict[str, Any]) -> None:
    answer = await Episode(tmp_path, EMPTY, between, EMPTY, DONE).execute()
    assert (answer.outcome, answer.model_calls) == (Outcome.ANSWERED, 4)


@pytest.mark.parametrize(
    "requested",
    [
        [("read", {"path": "a.py", "lines": 90_000})],
        [("read", {"path": "a.py", "lines": 90_000})] * 5,
        [("read", {"path": "a.py", "lines": 90_000}), *[("fail", {"said": "x" * 900})] * 9],
        [("read", {"path": "a.py", "lines": 90_000}), *[("none", {})] * 9],
    ],
    ids=["one", "five", "failing", "refused"],
)
@pytest.mark.parametrize("ids", ["c", "c" * 500], ids=["short", "long"])
async def test_results_are_cut_so_that_the_next_send_fits(
    tmp_path: Path, requested: list[tuple[str, dict[str, Any]]], ids: str
) -> None:
    episode = Episode(tmp_path, calls(*requested, ids=ids), DONE, bound=40_000)
    assert (await episode.execute()).outcome is Outcome.ANSWERED
    size = episode.transcript.size(episode.model.sent[-1])
    assert 20_000 < size <= 40_000
    assert "characters cut here" not in str(episode.model.sent[-1][3].text)  # the uncut prefix


async def test_a_result_has_at_most_its_own_limit_however_much_room_there_is(tmp_path: Path) -> None:
    episode = Episode(tmp_path, calls(("read", {"path": "a.py", "lines": 90_000})), DONE, bound=10**9)
    await episode.execute()
    (receipt,) = episode.receipts()
    assert (receipt["text_chars"], receipt["eof"]) == (MAX_RESULT, False)
    assert receipt["result_chars"] > MAX_RESULT
    assert episode.coverage.report()["read_ranges"] == {"a.py": [[1, receipt["end_line"]]]}


async def test_without_room_for_its_result_a_call_is_withheld_and_never_runs(tmp_path: Path) -> None:
    reply = calls(("read", {"path": "a.py", "padding": "x" * 19_300}))
    episode = Episode(tmp_path, reply, DONE, bound=20_000)
    await episode.execute()
    (receipt,) = episode.receipts()
    assert (receipt["outcome"], receipt["delivered"]) == (CallOutcome.WITHHELD, False)
    assert receipt["reason"] == "no room is left in the conversation for its result"
    assert not (tmp_path / "bodies").exists()


def delivered(episode: Episode, given_text: tuple[str, Extent], *, used: int) -> dict[str, Any]:
    """The receipt of a read beside another result that takes `used` characters, once both were sent."""
    run, host = episode.run, episode.host
    told: list[Any] = [SystemMessage(SYSTEM), HumanMessage("Review it.")]
    asked = calls(("read", {"path": "a.py"}), ("read", {"path": "b.py"}))["tool_calls"]
    host.before_send(run, told)
    run.start_model_call()
    for call, (text, extent) in zip(asked, [("x" * used, None), given_text], strict=True):
        receipt = run.receipts.request(turn=1, call_id=call["id"], tool="read", args=call["args"])
        host.withhold(run, receipt, [*told[1:], AIMessage("", tool_calls=asked)])
        delivery = host.deliver(run, receipt, ToolMessage(text, artifact=extent, tool_call_id=call["id"], name="read"))
        run.receipts.update(receipt, outcome=CallOutcome.EXECUTED, more={**receipt.more, **delivery.more})
    run.start_model_call()
    run.emit("model_call_ended", call=2, finish_reason="stop", proposed=[])
    return episode.receipts()[1]


def test_an_empty_file_is_credited_only_if_all_that_was_said_of_it_was_delivered(tmp_path: Path) -> None:
    path = "e" * 900
    whole = Episode(tmp_path, manifest={path: 0})
    assert delivered(whole, lines_of(path, []), used=0)["end_line"] == 0
    assert whole.coverage.report()["state"] == "complete"
    cut = Episode(tmp_path, manifest={path: 0}, bound=5_000)
    assert "opened_path" not in delivered(cut, lines_of(path, []), used=10_000)
    assert cut.coverage.report()["state"] == "incomplete"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(rows=st.lists(st.text(st.characters(codec="ascii", categories=["L", "P"]), max_size=60), max_size=20),
       used=st.integers(0, 3_000), bound=st.integers(2_000, 5_000))  # fmt: skip
def test_credited_lines_never_exceed_what_was_delivered(tmp_path: Path, rows: list[str], used: int, bound: int) -> None:
    episode = Episode(tmp_path, bound=bound, manifest={"a.py": len(rows)})
    text, extent = lines_of("a.py", rows)
    receipt = delivered(episode, (text, extent), used=used)
    kept = [path.read_text() for path in (tmp_path / "bodies").iterdir()]
    last = receipt.get("end_line", 0)
    assert not last or any(body.startswith(text[: extent.line_ends[last - 1]]) for body in kept)
    ranges = episode.coverage.report()["read_ranges"].get("a.py", [])
    assert ranges == ([[1, last]] if last else [])


def test_a_tools_time_is_what_the_caller_leaves_or_the_episode_whichever_is_nearer(
    tmp_path: Path, on_virtual_clock: OnVirtualClock[None]
) -> None:
    async def check() -> None:
        episode = Episode(tmp_path, left=until(5.0, None))
        assert episode.host.time_left() == 5.0
        with deadline_scope(2.0):
            assert episode.host.time_left() == 2.0
        with deadline_scope(9.0):
            assert episode.host.time_left() == 5.0
        await asyncio.sleep(7.0)
        assert episode.host.time_left() == 0.0

    on_virtual_clock(check())


def test_until_is_the_nearer_of_both_clocks_and_never_below_nothing(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        far, near = (datetime.now(UTC) + timedelta(seconds=seconds) for seconds in (3_600, -1))
        assert until(None, None)() is None
        assert until(5.0, far)() == 5.0
        assert until(5.0, near)() == until(-5.0, None)() == 0.0
        assert until(None, far)() == pytest.approx(3_600, abs=60)
        assert until(9_999.0, far)() == pytest.approx(3_600, abs=60)

    on_virtual_clock(check())


@pytest.mark.parametrize(("reason", "cut"), [("MAX_TOKENS", True), ("length", True), ("STOP", False), ("", False)])
async def test_a_last_reply_that_was_cut_at_its_own_limit_is_known(tmp_path: Path, reason: str, cut: bool) -> None:
    episode = Episode(tmp_path, DONE | {"response_metadata": {"finish_reason": reason}})
    await episode.execute()
    assert episode.host.cut_short is cut


def test_the_least_room_is_256_characters() -> None:
    assert MIN_ROOM == 256


def test_a_send_that_reached_nobody_delivers_nothing(tmp_path: Path) -> None:
    for failure, rounds in (("unreachable", 0), ("refused", 0), ("server_error", 1), (None, 1)):
        episode = Episode(tmp_path)
        episode.run.emit("model_call_cut", call=1, fate="failed", failure=failure)
        assert (failure, episode.host.rounds) == (failure, rounds)
