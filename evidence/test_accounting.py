"""What the model calls of a record reported: sums, estimates in exact decimals, and what is not known said so."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence.accounting import PRICES, Price, accounting, price_of
from evidence.folder import RunFolder
from evidence.verify import canonical, document, verify

PRICE = Price(
    model="m", input_usd_per_million="0.75", output_usd_per_million="3.75", source="a page", read_on="2026-11-30"
)
# As langchain-google-genai hands over 224 prompt, 20 candidate and 159 thinking tokens.
THOUGHT = {
    "input_tokens": 224,
    "output_tokens": 179,
    "total_tokens": 403,
    "output_token_details": {"reasoning": 159},
}


def ended(usage: object, call: int = 1, run: str = "question") -> dict[str, Any]:
    return {"kind": "model_call_ended", "run": run, "facts": {"call": call, "usage": usage}}


def cut(call: int = 1, run: str = "question") -> dict[str, Any]:
    return {"kind": "model_call_cut", "run": run, "facts": {"call": call, "fate": "failed"}}


def counted(tokens: int | None, run: str = "question") -> dict[str, Any]:
    return {"kind": "token_count", "run": run, "facts": {"status": "counted", "counted": tokens}}


def usage(read: object, written: object, total: object, **more: object) -> dict[str, Any]:
    return {"input_tokens": read, "output_tokens": written, "total_tokens": total, **more}


def row(reported: object) -> dict[str, Any]:
    (only,) = accounting([ended(reported)], None)["calls"]
    return dict(only)


def test_thinking_is_priced_once_and_exactly() -> None:
    book = accounting([ended(THOUGHT)], PRICE)
    assert book["estimate"] == {
        "usd": "0.00083925",
        "covers": "all that was used",
        "calls_without_usage": 0,
        "tokens_without_a_price": 0,
    }
    assert (book["known_subtotal"], book["usage_known"]) == (403, True)


def test_a_row_tells_thinking_from_the_rest_of_the_output() -> None:
    assert row(THOUGHT) == {
        "run": "question",
        "call": 1,
        "reported": THOUGHT,
        "counted_before": None,
        "input": 224,
        "output": 179,
        "thinking": 159,
        "output_without_thinking": 20,
        "total": 403,
        "fault": None,
    }


@pytest.mark.parametrize("details", [None, {}, {"reasoning": None}, {"reasoning": "159"}, {"reasoning": True}, [159]])
def test_thinking_that_was_not_reported_is_null_and_not_zero(details: object) -> None:
    found = row(usage(5, 2, 7, output_token_details=details))
    assert (found["thinking"], found["output_without_thinking"]) == (None, None)


def test_thinking_that_was_reported_as_zero_is_zero() -> None:
    found = row(usage(5, 2, 7, output_token_details={"reasoning": 0}))
    assert (found["thinking"], found["output_without_thinking"]) == (0, 2)


def test_thinking_that_the_output_does_not_hold_is_not_taken_from_it() -> None:
    """A provider may count it apart: then it stands in the total and in what was reported."""
    found = row(usage(224, 20, 403, output_token_details={"reasoning": 159}))
    assert (found["output"], found["thinking"], found["output_without_thinking"]) == (20, None, None)
    assert found["reported"]["output_token_details"] == {"reasoning": 159}


@pytest.mark.parametrize(
    "reported", [None, {}, [], "9", usage(5, 2, None), usage(5, 2, True), usage(5, 2, 7.0), usage(5, 2, -1)]
)
def test_a_total_that_was_not_reported_is_null_and_said_why(reported: object) -> None:
    found = row(reported)
    assert found["total"] is None
    assert found["fault"]
    assert found["reported"] == reported


def test_a_part_that_was_not_reported_is_null_beside_a_total_that_was() -> None:
    found = row({"total_tokens": 7})
    assert (found["input"], found["output"], found["total"], found["fault"]) == (None, None, 7, None)


def test_a_call_that_brought_no_reply_has_a_row_and_makes_the_sum_unknown() -> None:
    book = accounting([ended(usage(5, 2, 7)), cut(call=2)], PRICE)
    assert [(each["call"], each["total"]) for each in book["calls"]] == [(1, 7), (2, None)]
    assert (book["known_subtotal"], book["usage_known"]) == (7, False)


def test_an_estimate_beside_unknown_usage_covers_the_known_part_and_says_so() -> None:
    known = usage(224, 179, 403)
    book = accounting([ended(known), ended(None, call=2), ended(usage(9, 9, 3), call=3), cut(call=4)], PRICE)
    assert book["estimate"] == {
        "usd": "0.00083925",
        "covers": "the known part only",
        "calls_without_usage": 3,
        "tokens_without_a_price": 0,
    }


def test_nothing_known_gives_no_estimate() -> None:
    book = accounting([ended(None), cut(call=2)], PRICE)
    assert (book["estimate"], book["known_subtotal"], book["usage_known"]) == (None, 0, False)


def test_no_call_gives_no_estimate_and_nothing_unknown() -> None:
    book = accounting([{"kind": "run_started", "run": "question", "facts": {}}], PRICE)
    assert (book["calls"], book["estimate"], book["known_subtotal"], book["usage_known"]) == ([], None, 0, True)


def test_no_price_gives_no_estimate() -> None:
    book = accounting([ended(THOUGHT)], None)
    assert (book["price"], book["estimate"], book["known_subtotal"]) == (None, None, 403)


def test_the_price_stands_in_the_book_with_its_source_and_date() -> None:
    book = accounting([ended(THOUGHT)], PRICE)
    assert (book["price"]["source"], book["price"]["read_on"]) == ("a page", "2026-11-30")
    assert any("no invoice" in note for note in book["notes"])
    assert any("no cap" in note for note in book["notes"])


def test_tokens_above_input_and_output_have_no_price_and_are_counted() -> None:
    book = accounting([ended(usage(40, 6, 390)), ended({"total_tokens": 10}, call=2)], PRICE)
    assert (book["estimate"]["tokens_without_a_price"], book["estimate"]["covers"]) == (354, "the known part only")
    assert Decimal(book["estimate"]["usd"]) == (40 * Decimal("0.75") + 6 * Decimal("3.75")) / 1_000_000


@pytest.mark.parametrize(
    ("read", "written", "usd"),
    [(0, 0, "0"), (1, 0, "0.00000075"), (4_000_000, 0, "3"), (40_000_000_000, 0, "30000"), (2**62, 0, None)],
)
def test_an_estimate_is_plain_decimal_digits(read: int, written: int, usd: str | None) -> None:
    estimate = accounting([ended(usage(read, written, read + written))], PRICE)["estimate"]
    assert re.fullmatch(r"\d+(\.\d*[1-9])?", estimate["usd"])
    assert usd is None or estimate["usd"] == usd


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=100)
def test_an_estimate_is_the_exact_sum_of_its_calls(calls: list[tuple[int, int]]) -> None:
    book = accounting((ended(usage(read, made, read + made), call=n) for n, (read, made) in enumerate(calls)), PRICE)
    picodollars = sum(750_000 * read + 3_750_000 * made for read, made in calls)
    assert Decimal(book["estimate"]["usd"]) * 10**12 == picodollars
    assert "E" not in book["estimate"]["usd"]


def test_a_count_stands_beside_the_first_call_after_it_of_its_own_run() -> None:
    events = [counted(230), counted(99, run="other"), ended(THOUGHT), ended(THOUGHT, call=2), ended(None, run="other")]
    assert [each["counted_before"] for each in accounting(events, None)["calls"]] == [230, None, 99]


def test_a_count_that_failed_is_null_beside_its_call() -> None:
    assert accounting([counted(None), ended(THOUGHT)], None)["calls"][0]["counted_before"] is None


def test_events_are_taken_one_by_one() -> None:
    book = accounting((ended(usage(5, 2, 7), call=n) for n in range(3)), None)
    assert book["known_subtotal"] == 21


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["input_tokens", "output_tokens", "total_tokens", "output_token_details", "reasoning"]),
                inner,
            )
        ),
        max_leaves=8,
    )
)
@settings(deadline=None, max_examples=200)
def test_whatever_was_reported_gives_a_book_of_numbers_that_can_be_true(reported: Any) -> None:
    book = accounting([ended(reported)], PRICE)
    canonical(book)
    (only,) = book["calls"]
    for part in ("input", "output", "thinking", "output_without_thinking", "total"):
        assert only[part] is None or (type(only[part]) is int and only[part] >= 0)
    assert (book["estimate"] is None) == (only["total"] is None)
    assert book["estimate"] is None or Decimal(book["estimate"]["usd"]) >= 0


def test_a_price_holds_on_its_own_days() -> None:
    before, after = price_of("gemini-3.8-flash", "2026-12-31"), price_of("gemini-3.8-flash", "2027-01-01")
    assert before is not None
    assert after is not None
    assert (before.input_usd_per_million, before.output_usd_per_million) == ("0.75", "3.75")
    assert (after.input_usd_per_million, after.output_usd_per_million) == ("1.50", "7.50")


@pytest.mark.parametrize("model", ["offline", "gemma4:e2b", "gemini-3.8-flash-lite", "GEMINI-3.8-FLASH", ""])
def test_a_model_that_no_price_names_has_none(model: str) -> None:
    assert price_of(model, "2026-11-30") is None


@pytest.mark.parametrize("day", ["2020-02-29", "2026-12-31", "2027-01-01", "2040-06-01"])
def test_no_two_prices_hold_for_a_model_on_one_day(day: str) -> None:
    holding = [price.model for price in PRICES if (price.first_day or day) <= day and day <= (price.last_day or day)]
    assert len(holding) == len(set(holding))


@pytest.mark.parametrize("price", PRICES, ids=lambda price: f"{price.model} from {price.first_day}")
def test_a_price_names_where_and_when_it_was_read(price: Price) -> None:
    assert price.source.startswith("https://")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", price.read_on)
    assert Decimal(price.input_usd_per_million) > 0
    assert Decimal(price.output_usd_per_million) > 0


@pytest.mark.parametrize(
    ("endpoint", "priced"), [("provider", True), ("loopback", False), ("overridden", False), ("in_process", False)]
)
def test_only_the_providers_own_endpoint_has_a_price(endpoint: str, priced: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "question", model="gemini-3.8-flash", endpoint=endpoint, secrets=frozenset())
    folder.record("model_call_ended", "question", call=1, usage=THOUGHT)
    folder.record("run_failed", "question")
    folder.seal("answered", stdout=b"")
    book = (folder.path / "accounting.json").read_text(encoding="ascii")
    assert ('"price": null' not in book) is priced
    assert ('"estimate": null' not in book) is priced


@pytest.mark.parametrize(
    "reported",
    [
        THOUGHT,
        usage(0, 0, 0),
        {"total_tokens": 7},
        usage(True, 2, 7),
        usage(5.0, 2, 7),
        usage("5", 2, 7),
        usage(40, 6, 390),
        usage(10**9 + 1, 10**9 + 3, 2 * 10**9 + 4),
    ],
)
def test_an_estimate_is_confirmed_by_whoever_checks_the_folder(reported: dict[str, Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "question", model="gemini-3.8-flash", endpoint="provider", secrets=frozenset())
    about: dict[str, Any] = {
        "model": "gemini-3.8-flash",
        "endpoint": "provider",
        "sources": {},
        "commit": None,
        "dirty": None,
    }
    folder.write("provenance.json", document({"schema_version": 1, **about}))
    limits = {"token_budget": None, "max_steps": 9, "deadline_s": None}
    folder.record("run_started", "r", limits=limits, model="gemini-3.8-flash")
    folder.record("model_call_started", "r", call=1)
    folder.record("model_call_ended", "r", call=1, usage=reported, text_chars=1, proposed=[])
    came_to = {"known_subtotal": reported["total_tokens"], "usage_known": True, "model_calls": 1, "receipts": []}
    folder.record("stop", "r", outcome="answered", answer="x", model="gemini-3.8-flash", **came_to)
    folder.seal("answered", stdout=b"")
    assert verify(folder.path) == []
    assert json.loads((folder.path / "accounting.json").read_bytes())["estimate"] is not None
