"""What a review's receipts, bodies, gaps and coverage say: where the findings come from, and what nobody read."""

import asyncio
import hashlib
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Event
from bounded.timeouts import ToolTimeouts
from reviewing import confined, tools
from reviewing.changes import Changes
from test_graph import asks, call
from test_review import WEDGED, ByPath, Held, Reviewer, Subject, finds, held, read, subject

__all__ = ["held", "subject"]

pytestmark = pytest.mark.slow

EXTENT = {"opened_path", "start_line", "end_line", "total_lines", "eof", "complete_sha256", "source_bytes"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wedged_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that hangs for `grep`, and for nothing else."""
    git = shutil.which("git")
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nfor word; do [ "$word" = grep ] && exec sleep 600; done\nexec {git} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")


async def test_a_credited_read_says_what_it_opened_and_a_later_send_took_it_along(subject: Subject) -> None:
    data = b"one\r\ntwo\r\nthree"
    (subject.root / "a.py").write_bytes(data)
    model = Reviewer(replies=[asks(read(start_line=2)), finds({"line": 3})])
    review = await subject.episode(model).execute()
    (receipt,) = review.native_tool_receipts
    text = model.told().text
    assert receipt == {
        "call_id": "r1",
        "turn": 1,
        "index": 0,
        "tool": "read_file",
        "args": {"path": "a.py", "start_line": 2},
        "outcome": "executed",
        "bound_s": 30.0,
        "bound_source": "tool_set",
        "started_at": receipt["started_at"],
        "duration_sec": receipt["duration_sec"],
        "round": 1,
        "delivered": True,
        "path": "a.py",
        "result_chars": len(text),
        "text_chars": len(text),
        "text_sha256": sha256(text.encode()),
        "opened_path": "a.py",
        "start_line": 2,
        "end_line": 3,
        "total_lines": 3,
        "eof": True,
        "complete_sha256": sha256(data),
        "source_bytes": len(data),
    }
    assert datetime.fromisoformat(str(receipt["started_at"])).tzinfo is not None
    assert (review.coverage["missing_ranges"], (review.findings or ())[0].supported) == ({"a.py": [[1, 1]]}, True)


async def test_receipts_name_their_round_and_what_was_asked_for(subject: Subject) -> None:
    listing, search = call("list_files", {"pattern": "*.py"}, "l"), call("query_code", {"query": "one"}, "q")
    diff, again = call("show_diff", {"path": "a.py"}, "d"), read(call_id="r")
    model = Reviewer(replies=[asks(listing, search), asks(diff, again), finds()])
    review = await subject.episode(model).execute()
    asked = [
        {name: receipt[name] for name in ("round", "path", "query", "pattern") if name in receipt}
        for receipt in review.native_tool_receipts
    ]
    assert asked == [
        {"round": 1, "pattern": "*.py"},
        {"round": 1, "query": "one"},
        {"round": 2, "path": "a.py"},
        {"round": 2, "path": "a.py"},
    ]
    for receipt in review.native_tool_receipts:
        assert (receipt["outcome"], receipt["delivered"]) == ("executed", True)
        assert (receipt.keys() >= EXTENT) == (receipt["tool"] == "read_file")
        assert receipt.keys() >= EXTENT or receipt.keys().isdisjoint(EXTENT)


@pytest.mark.parametrize(
    "path",
    ["../a.py", "/etc/passwd", "nothing.py", "link.py", "a\0.py", "pipe.py", "huge.py", "binary.py", ".git/config"],
)
async def test_a_refusal_of_a_tools_own_is_executed_without_extent(path: str, subject: Subject) -> None:
    (subject.root / "link.py").symlink_to("/etc/passwd")
    os.mkfifo(subject.root / "pipe.py")
    (subject.root / "huge.py").write_bytes(b"x\n" * 1_500_000)
    (subject.root / "binary.py").write_bytes(b"\0\1\2")
    (subject.root / "a.py").write_text("")
    model = Reviewer(replies=[asks(read(path)), finds()])
    review = await subject.episode(model).execute()
    (receipt,) = review.native_tool_receipts
    assert (receipt["outcome"], receipt["delivered"], review.native_source_gap) == ("executed", True, "")
    assert receipt.keys().isdisjoint(EXTENT)
    assert (review.coverage["read_ranges"], "root:" in model.told().text) == ({}, False)


async def test_text_that_looks_like_a_read_is_credited_nothing(subject: Subject) -> None:
    subject.write(a="one\ntwo\n", fake="a.py, lines 1-2 of 2\n1| one\n2| two\n")
    model = Reviewer(replies=[asks(call("query_code", {"query": "a"}, "q"), read("fake.py")), finds({})])
    review = await subject.episode(model).execute()
    assert review.coverage["missing_ranges"] == {"a.py": [[1, 2]]}
    assert (list(review.coverage["read_ranges"]), (review.findings or ())[0].supported) == (["fake.py"], False)


async def test_a_call_that_a_bound_withheld_has_its_round_and_was_not_delivered(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read()), asks(read(call_id="r2"))])
    limits = Limits(token_budget=15, tool_timeouts=ByPath())  # ten tokens a reply
    review = await subject.episode(model, limits=limits).execute()
    assert (review.answer.outcome, len(model.sent)) == (Outcome.TOKEN_BUDGET, 2)
    facts = [(receipt["outcome"], receipt["delivered"]) for receipt in review.native_tool_receipts]
    assert facts == [("executed", True), ("withheld", False)]
    assert [(receipt["round"], receipt["path"]) for receipt in review.native_tool_receipts] == [
        (1, "a.py"),
        (2, "a.py"),
    ]


async def test_a_read_that_returned_before_the_run_was_cut_off_is_not_delivered(subject: Subject) -> None:
    interrupt = asyncio.Event()

    def observe(event: Event) -> None:
        if event.kind == "tool_call_ended":
            interrupt.set()

    model = Reviewer(replies=[asks(read()), finds()])
    review = await subject.episode(model, observe=observe, interrupt=interrupt).execute()
    (receipt,) = review.native_tool_receipts
    assert (review.answer.outcome, len(model.sent), review.usage["native_rounds"]) == (Outcome.INTERRUPTED, 1, 1)
    assert (receipt["outcome"], receipt["delivered"], receipt.keys() & EXTENT) == ("executed", False, set())
    assert (review.coverage["read_ranges"], review.native_source_gap) == ({}, "")


async def test_a_delivery_is_an_event_with_the_receipt_that_says_so(subject: Subject) -> None:
    events: list[Event] = []
    model = Reviewer(replies=[asks(read()), finds()])
    await subject.episode(model, observe=events.append).execute()
    kinds = [event.kind for event in events]
    sent_again = kinds.index("model_call_started", 1)
    assert kinds.index("tool_call_ended") < min(sent_again, kinds.index("tool_call_delivered"))
    last: Any = [event for event in events if event.kind == "tool_call_delivered"][-1].facts["receipt"]
    assert (last.more["delivered"], last.more["opened_path"]) == (True, "a.py")


async def test_delivered_bodies_are_stored_by_their_digest(subject: Subject) -> None:
    subject.write(a="caf\u00e9\r\n\u2028two\n")
    replies = [asks(read(), read("nothing.py", "r2")), asks(read(call_id="r3")), finds()]
    model = Reviewer(replies=replies)
    review = await subject.episode(model).execute()
    bodies = {path.name: path.read_bytes() for path in (subject.custody / "bodies").iterdir()}
    assert {sha256(body) for body in bodies.values()} == bodies.keys()
    assert {receipt["text_sha256"] for receipt in review.native_tool_receipts} == bodies.keys()
    assert len(bodies) == 2  # twice the same read is one body
    for call_id in ("r1", "r2", "r3"):
        assert model.told(call_id).text.encode() in bodies.values()


async def test_a_store_that_fails_is_a_gap_of_its_own(subject: Subject) -> None:
    subject.custody.mkdir()
    (subject.custody / "bodies").write_text("a file")
    model = Reviewer(replies=[asks(read()), asks(read(call_id="r2")), finds({})])
    review = await subject.episode(model).execute()
    assert (review.answer.outcome, review.native_source_gap) == (Outcome.ANSWERED, "custody_store_failed")
    assert (review.coverage["state"], review.coverage["reason"]) == ("incomplete", "custody_store_failed")
    for receipt in review.native_tool_receipts:  # no abandonment: the reads are what they were
        assert (receipt["outcome"], "source_gap" in receipt, receipt["opened_path"]) == ("executed", False, "a.py")
    assert (review.coverage["missing_ranges"], (review.findings or ())[0].supported) == ({}, True)
    assert subject.rows[0]["native_source_gap"] == "custody_store_failed"


async def test_the_first_gap_stays_when_another_follows(subject: Subject, held: Held) -> None:
    subject.custody.mkdir()
    (subject.custody / "bodies").write_text("a file")
    replies = [asks(read()), asks(read(WEDGED, "r2")), finds()]
    review = await subject.episode(Reviewer(replies=replies)).execute()
    assert review.native_tool_receipts[1]["source_gap"] == "native_tool_abandoned"
    assert (review.native_source_gap, review.coverage["reason"]) == ("custody_store_failed", "custody_store_failed")


async def test_an_abandoned_search_is_a_gap_and_later_executed_calls_do_not_clear_it(
    subject: Subject, wedged_search: None
) -> None:
    limits = Limits(tool_timeouts=ToolTimeouts(per_set={"review": {"query_code": 0.3}}))
    search = call("query_code", {"query": "one"}, "q")
    model = Reviewer(replies=[asks(read()), asks(search), asks(read(call_id="r2")), finds({})])
    review = await subject.episode(model, limits=limits).execute()
    read_before, searched, read_after = review.native_tool_receipts
    assert (searched["outcome"], searched["source_gap"]) == ("error", "native_tool_abandoned")
    assert (searched["bound_s"], searched["bound_source"]) == (0.3, "tool_set")
    assert model.told("q").text.startswith("⚠️ TOOL_TIMEOUT (query_code): exceeded 0.3s limit.")
    assert (read_before.keys() >= EXTENT, EXTENT & read_after.keys()) == (True, set())
    assert (review.answer.outcome, review.native_source_gap) == (Outcome.ANSWERED, "native_tool_abandoned")
    # All is read, and with a gap nothing is complete.
    assert (review.coverage["state"], review.coverage["missing_ranges"]) == ("incomplete", {})


@pytest.mark.parametrize("by", ["interrupt", "deadline"])
async def test_a_call_that_is_cut_off_with_the_run_is_a_gap_as_well(
    by: str, subject: Subject, wedged_search: None
) -> None:
    interrupt = asyncio.Event()
    model = Reviewer(replies=[asks(read()), asks(call("query_code", {"query": "one"}, "q")), finds()])

    def observe(event: Event) -> None:
        if by == "interrupt" and event.kind == "tool_call_started" and model.sent[1:]:
            interrupt.set()

    limits = Limits(tool_timeouts=ByPath())
    given: dict[str, Any] = {"deadline_s": 1.0 if by == "deadline" else 30.0, "interrupt": interrupt}
    review = await subject.episode(model, limits=limits, observe=observe, **given).execute()
    searched = review.native_tool_receipts[-1]
    assert searched["outcome"] == "error"
    assert review.native_source_gap == searched["source_gap"]
    assert (review.coverage["state"], review.coverage["missing_ranges"]) == ("incomplete", {})


async def test_a_tool_that_raises_its_own_timeout_has_failed_and_that_is_no_gap(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_disk(root: Path, path: str) -> bytes:
        if path == WEDGED:
            raise TimeoutError("the disk did not answer")
        return confined.read_inside(root, path)

    monkeypatch.setattr(tools, "read_inside", slow_disk)
    model = Reviewer(replies=[asks(read(WEDGED)), asks(read(call_id="r2")), finds({})])
    review = await subject.episode(model).execute()
    failed, executed = review.native_tool_receipts
    assert (failed["outcome"], failed["error_type"], "source_gap" in failed) == ("error", "TimeoutError", False)
    assert (executed["opened_path"], review.native_source_gap, review.coverage["state"]) == ("a.py", "", "complete")
    assert "TOOL_TIMEOUT" not in model.told().text


async def test_a_call_that_settles_after_its_siblings_abandonment_earns_no_extent(subject: Subject, held: Held) -> None:
    second = asks(read(WEDGED), read(call_id="r2"))
    model = Reviewer(replies=[asks(read(WEDGED)), second, finds()])

    async def when_asked(number: int) -> None:
        if number == 2:
            await held.let_go()

    model.when_asked = when_asked
    review = await subject.episode(model).execute()
    assert [receipt["outcome"] for receipt in review.native_tool_receipts] == ["error", "executed", "executed"]
    assert (review.coverage["read_ranges"], len(held.workers)) == ({}, 2)


async def test_an_unknown_tool_and_bad_arguments_are_refused_and_told(subject: Subject) -> None:
    model = Reviewer(replies=[asks(call("write_file", {"path": "a.py"}, "w"), call("read_file", {}, "r")), finds()])
    review = await subject.episode(model).execute()
    assert [receipt["outcome"] for receipt in review.native_tool_receipts] == ["refused", "refused"]
    assert [receipt["delivered"] for receipt in review.native_tool_receipts] == [True, True]
    assert "list_files, read_file, query_code, show_diff" in model.told("w").text
    assert (subject.root / "a.py").read_text() == "one\ntwo\n"


READS = [asks(read()), finds()]
NONE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("files", "replies", "coverage"),
    [
        (("a.py",), READS, {"state": "complete", "missing_ranges": NONE, "read_ranges": {"a.py": [[1, 2]]}}),
        (
            ("a.py", WEDGED),
            READS,
            {"state": "incomplete", "missing_ranges": {WEDGED: [[1, 1]]}, "read_ranges": {"a.py": [[1, 2]]}},
        ),
        (("a.py",), [finds()], {"state": "incomplete", "missing_ranges": {"a.py": [[1, 2]]}, "read_ranges": NONE}),
        (None, READS, {"state": "unobserved", "missing_ranges": NONE, "read_ranges": {"a.py": [[1, 2]]}}),
        (
            (),
            [finds()],
            {"state": "complete", "reason": "declared_empty", "missing_ranges": NONE, "read_ranges": NONE},
        ),
        (("gone.py",), [finds()], {"state": "complete", "missing_ranges": NONE, "read_ranges": NONE}),
    ],
    ids=["all read", "one file unread", "nothing read", "no manifest", "empty manifest", "gone file"],
)
async def test_coverage_is_over_the_manifest_of_changed_files(
    files: tuple[str, ...] | None, replies: list[dict[str, Any]], coverage: dict[str, Any], subject: Subject
) -> None:
    changes = None if files is None else Changes(files=dict.fromkeys(files, ""), against="0" * 40)
    review = await subject.episode(Reviewer(replies=replies), changes=changes).execute()
    assert review.coverage == coverage


async def test_a_gap_takes_complete_from_an_empty_manifest(subject: Subject, held: Held) -> None:
    model = Reviewer(replies=[asks(read(WEDGED)), finds()], when_asked=held.when_asked)
    review = await subject.episode(model, changes=Changes(files={}, against="")).execute()
    assert (review.coverage["state"], review.coverage["reason"]) == ("incomplete", "native_tool_abandoned")


async def test_a_file_that_changes_between_two_reads_loses_what_was_credited_before(subject: Subject) -> None:
    model = Reviewer(replies=[asks(read(end_line=1)), asks(read(call_id="r2", start_line=2)), finds()])

    async def when_asked(number: int) -> None:
        if number == 2:
            subject.write(a="ONE\ntwo\n")

    model.when_asked = when_asked
    review = await subject.episode(model).execute()
    assert (review.coverage["state"], review.coverage["missing_ranges"]) == ("incomplete", {"a.py": [[1, 1]]})
