"""Usage values against verdicts: what nobody reported is unknown, never zero."""

import math
from decimal import Decimal
from typing import Any

import pytest

from bounded.usage import UsageLedger, judge

KNOWN = [
    ({"total_tokens": 0}, 0),
    ({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}, 0),
    ({"input_tokens": 224, "output_tokens": 179, "total_tokens": 403}, 403),
    # A provider may count thinking or tool-use prompts apart from both parts.
    ({"input_tokens": 40, "output_tokens": 6, "total_tokens": 390}, 390),
    ({"total_tokens": 7}, 7),
    ({"total_tokens": 2**63 - 1}, 2**63 - 1),
    ({"input_tokens": "40", "output_tokens": 6, "total_tokens": 9}, 9),
]
UNKNOWN: list[object] = [
    None,
    {},
    [],
    "",
    "9",
    0,
    7,
    True,
    math.nan,
    {"total_tokens": None},
    {"total_tokens": True},
    {"total_tokens": False},
    {"total_tokens": "9"},
    {"total_tokens": {}},
    {"total_tokens": []},
    {"total_tokens": -5},
    {"total_tokens": -1, "input_tokens": -3, "output_tokens": 2},
    {"total_tokens": 7.0},
    {"total_tokens": math.nan},
    {"total_tokens": math.inf},
    {"total_tokens": Decimal(7)},
    {"total_tokens": 2**63},
    {"total_tokens": 10**5_000},
    {"input_tokens": 3, "output_tokens": 4},
    # What langchain-google-genai makes of a wire without a total.
    {"input_tokens": 224, "output_tokens": 179, "total_tokens": 0},
    {"input_tokens": 5, "output_tokens": 5, "total_tokens": 9},
    {"input_tokens": 1000, "total_tokens": 5},
    {"output_tokens": 900, "total_tokens": 0},
]


@pytest.mark.parametrize(("raw", "total"), KNOWN)
def test_a_reported_total_counts(raw: dict[str, Any], total: int) -> None:
    usage = judge(raw)
    assert (usage.total, usage.fault, usage.raw) == (total, None, raw)


@pytest.mark.parametrize("raw", UNKNOWN)
def test_what_is_no_total_is_unknown_and_says_why(raw: object) -> None:
    usage = judge(raw)
    assert usage.total is None
    assert usage.fault
    assert usage.raw is raw


def test_a_part_that_was_not_reported_is_not_invented() -> None:
    usage = judge({"total_tokens": 9, "input_tokens": 4})
    assert (usage.input, usage.output) == (4, None)
    assert usage.storable() is None


@pytest.mark.parametrize(
    ("details", "thinking"),
    [
        ({"reasoning": 159}, 159),
        ({"reasoning": 179}, 179),
        ({"reasoning": 0}, 0),
        ({"reasoning": 180}, None),  # a provider may count it apart from the output
        *(({"reasoning": odd}, None) for odd in (None, True, "159", 159.0, -1)),
        ({}, None),
        (None, None),
        ([159], None),
        (159, None),
    ],
)
def test_thinking_is_a_part_of_the_output_or_unknown(details: object, thinking: int | None) -> None:
    usage = judge({"input_tokens": 224, "output_tokens": 179, "total_tokens": 403, "output_token_details": details})
    assert (usage.thinking, usage.output, usage.total) == (thinking, 179, 403)
    assert judge({"total_tokens": 403, "output_token_details": details}).thinking is None


def test_only_whole_judged_usage_is_stored_with_a_message() -> None:
    counts = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    for odd in ({1, 2}, {"cache_read": object()}, {"cache_read": -1}, 7.0, None):
        assert judge(counts | {"input_token_details": odd}).storable() == counts
    plain = counts | {"input_token_details": {"cache_read": 1}}
    assert judge(plain).storable() is plain
    odd_key: dict[object, object] = {7: 8}
    odd_key.update(plain)
    assert judge(odd_key).storable() == counts
    assert judge({"total_tokens": True}).storable() is None


def test_the_subtotal_stays_when_a_reply_reports_nothing() -> None:
    ledger = UsageLedger()
    ledger.record(judge({"total_tokens": 403}))
    assert (ledger.known_subtotal, ledger.known) == (403, True)
    ledger.record(judge(None))
    ledger.record(judge({"total_tokens": 7}))
    assert (ledger.known_subtotal, ledger.known, ledger.fault) == (410, False, "no usage was reported")


def test_the_first_fault_is_the_one_that_is_kept() -> None:
    ledger = UsageLedger()
    ledger.lose("a call was cut")
    ledger.record(judge({}))
    assert ledger.fault == "a call was cut"


@pytest.mark.parametrize(("budget", "remaining"), [(None, None), (500, 97), (403, 0), (1, 0)])
def test_what_remains_of_a_budget_is_never_negative(budget: int | None, remaining: int | None) -> None:
    ledger = UsageLedger()
    ledger.record(judge({"total_tokens": 403}))
    assert ledger.remaining(budget) == remaining
