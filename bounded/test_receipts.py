"""One receipt for each requested call, honest at every moment."""

import json
from datetime import UTC, datetime, timedelta, timezone

from bounded.outcomes import CallOutcome, SourceGap
from bounded.receipts import Anchor, Late, Receipts


def test_a_requested_call_is_withheld_until_its_turn_comes() -> None:
    receipt = Receipts().request(turn=1, call_id="a", tool="fetch_job_log", args={"job_id": 812})
    assert receipt.as_dict() == {
        "call_id": "a",
        "turn": 1,
        "index": 0,
        "tool": "fetch_job_log",
        "args": {"job_id": 812},
        "outcome": "withheld",
        "reason": "the run ended before its turn",
    }


def test_calls_are_told_apart_by_their_place_even_if_their_ids_repeat() -> None:
    ledger = Receipts()
    for turn, call_id in [(1, "a"), (1, None), (1, "a"), (2, "a")]:
        ledger.request(turn=turn, call_id=call_id, tool="t", args={})
    assert [(r.turn, r.index, r.call_id) for r in ledger.all()] == [(1, 0, "a"), (1, 1, None), (1, 2, "a"), (2, 0, "a")]


def test_a_call_is_found_by_its_turn_and_id() -> None:
    ledger = Receipts()
    first = ledger.request(turn=1, call_id="a", tool="t", args={})
    second = ledger.request(turn=2, call_id="a", tool="t", args={})
    assert ledger.find(1, "a") is first
    assert ledger.find(2, "a") is second
    assert ledger.find(2, "b") is None


def test_an_update_keeps_what_it_does_not_name() -> None:
    ledger = Receipts()
    receipt = ledger.request(turn=1, call_id="a", tool="t", args={})
    ledger.update(receipt, outcome=CallOutcome.ERROR, source_gap=SourceGap.ABANDONED, reason="slow")
    ledger.update(receipt, late=Late(at="2026-11-27T09:14:02+00:00", chars=3, text_sha256="abc"))
    (seen,) = ledger.all()
    assert (seen.outcome, seen.source_gap, seen.reason) == ("error", "native_tool_abandoned", "slow")
    assert json.loads(json.dumps(seen.as_dict()))["late"] == {
        "at": "2026-11-27T09:14:02+00:00",
        "chars": 3,
        "text_sha256": "abc",
    }


def test_a_turn_of_ten_thousand_calls_is_entered_in_proportion() -> None:
    ledger = Receipts()
    for place in range(10_000):
        ledger.request(turn=1, call_id=str(place), tool="t", args={})
    found = ledger.find(1, "9999")
    assert found is not None
    assert found.index == 9_999


def test_times_come_from_one_anchor_and_carry_an_offset() -> None:
    anchor = Anchor(wall=datetime(2026, 11, 27, 9, 0, tzinfo=UTC), monotonic=100.0)
    assert anchor.wall_time(101.5) == "2026-11-27T09:00:01.500000+00:00"
    elsewhere = Anchor(wall=datetime(2026, 11, 27, 9, 0, tzinfo=timezone(timedelta(hours=2))), monotonic=0.0)
    assert elsewhere.wall_time(0.0) == "2026-11-27T09:00:00+02:00"


def test_what_the_host_adds_stands_beside_the_other_fields_and_survives_later_updates() -> None:
    ledger = Receipts()
    receipt = ledger.request(turn=1, call_id="a", tool="t", args={})
    assert "more" not in receipt.as_dict()
    ledger.update(receipt, more={"round": 1, "path": "src/a.py", "delivered": False})
    ledger.update(receipt, outcome=CallOutcome.EXECUTED, reason=None)
    seen = ledger.current(receipt)
    assert seen == ledger.all()[0] != receipt
    assert json.loads(json.dumps(seen.as_dict())) == {
        "call_id": "a",
        "turn": 1,
        "index": 0,
        "tool": "t",
        "args": {},
        "outcome": "executed",
        "round": 1,
        "path": "src/a.py",
        "delivered": False,
    }
