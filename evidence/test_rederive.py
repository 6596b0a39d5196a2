"""What follows from events alone: each outcome, each reported total, by rules that agree with the run's own."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounded.outcomes import Outcome
from bounded.usage import judge
from evidence.rederive import MAX_CALLS, derive, known_total
from evidence.test_verify import LIMITS

PARTS = ("input", "output", "total")


def started(*, pause_after: tuple[str, ...] = (), asks_again: bool = False, **limits: Any) -> dict[str, Any]:
    about = {"limits": {**LIMITS, **limits}, "asks_again": asks_again}
    return {"kind": "run_started", "facts": {**about, **({"pause_after": list(pause_after)} if pause_after else {})}}


def ended(call: int = 1, *ids: str | None, total: object = 10, text_chars: int = 0) -> dict[str, Any]:
    proposed = [{"id": identity, "tool": "list_ci_jobs"} for identity in ids]
    usage = {"total_tokens": total}
    return {
        "kind": "model_call_ended",
        "facts": {"call": call, "usage": usage, "text_chars": text_chars, "proposed": proposed},
    }


def cut(fate: str) -> dict[str, Any]:
    return {"kind": "model_call_cut", "facts": {"call": 1, "fate": fate}}


def run_cut(by: str) -> dict[str, Any]:
    return {"kind": "run_cut", "facts": {"by": by}}


def run_ended(outcome: str) -> dict[str, Any]:
    return {"kind": "run_ended", "facts": {"outcome": outcome}}


def host_ended(outcome: str) -> dict[str, Any]:
    return {"kind": "host_ended", "facts": {"outcome": outcome}}


SAID = ended(text_chars=9)
ENDINGS: list[tuple[Outcome | None, list[dict[str, Any]]]] = [
    (Outcome.ANSWERED, [started(), SAID]),
    (Outcome.ANSWERED, [started(), ended(1, "a"), ended(2, "a"), ended(3, text_chars=1)]),
    (Outcome.ANSWERED, [started(token_budget=10, max_steps=1), SAID]),
    (Outcome.ANSWERED, [started(token_budget=11), ended(1, "a"), ended(2, text_chars=1)]),
    (Outcome.ANSWERED, [started(token_budget=1), ended(text_chars=1, total=0)]),
    (Outcome.ANSWERED, [started(), SAID, run_cut("deadline")]),
    (Outcome.PAUSED, [started(pause_after=("tools",)), ended(1, "a")]),
    (Outcome.ANSWERED, [started(pause_after=("tools",)), SAID]),
    (Outcome.TOKEN_BUDGET, [started(pause_after=("tools",), token_budget=10), ended(1, "a")]),
    (None, [started(pause_after=("agent",)), ended(1, "a")]),
    *((Outcome.MISSING_USAGE, [started(), ended(total=total)]) for total in (None, True, 7.0, "9", -1, 2**63)),
    (Outcome.MISSING_USAGE, [started(token_budget=1), ended(1, None, None, total=None)]),
    (Outcome.TOKEN_BUDGET, [started(token_budget=1), ended(1, "a")]),
    (Outcome.TOKEN_BUDGET, [started(token_budget=20, max_steps=2), ended(1, "a"), ended(2, "a")]),
    (Outcome.STEP_LIMIT, [started(token_budget=21, max_steps=2), ended(1, "a"), ended(2, "a")]),
    (Outcome.STEP_LIMIT, [started(token_budget=None, max_steps=1), ended(1, "a")]),
    (Outcome.MODEL_ERROR, [started(), cut("failed")]),
    (Outcome.MODEL_ERROR, [started(), ended(1, None)]),
    (Outcome.MODEL_ERROR, [started(), ended(1, "")]),
    (Outcome.MODEL_ERROR, [started(), ended(1, "a", "a")]),
    (Outcome.MODEL_ERROR, [started(token_budget=1), ended(1, *(f"c{n}" for n in range(MAX_CALLS + 1)))]),
    (Outcome.TOKEN_BUDGET, [started(token_budget=1), ended(1, *(f"c{n}" for n in range(MAX_CALLS)))]),
    (Outcome.MODEL_TIMEOUT, [started(), cut("was ended by its timeout")]),
    (Outcome.EMPTY_ANSWER, [started(), ended(text_chars=0)]),
    (Outcome.DEADLINE, [started(), run_cut("deadline"), cut("was cut off with the run")]),
    (Outcome.DEADLINE, [started(), ended(1, "a"), run_cut("deadline"), SAID]),
    (Outcome.INTERRUPTED, [started(), run_cut("interrupted"), cut("was cut off with the run")]),
    (
        Outcome.ROUND_WITHOUT_PROGRESS,
        [started(asks_again=True), ended(), ended(2), host_ended("round_without_progress")],
    ),
    (Outcome.ANSWERED, [started(asks_again=True), ended(), ended(2, text_chars=1)]),
    (Outcome.STEP_LIMIT, [started(asks_again=True, max_steps=1), ended(), run_ended("step_limit")]),
    (Outcome.TRANSCRIPT_BOUND, [started(asks_again=True, max_steps=1), ended(), host_ended("transcript_bound")]),
    (Outcome.TRANSCRIPT_BOUND, [started(), ended(1, "a"), host_ended("transcript_bound")]),
    (Outcome.BOUND_BELOW_FIRST_SEND, [started(), host_ended("bound_below_first_send")]),
    (Outcome.REGISTRY_UNAVAILABLE, [started(), host_ended("registry_unavailable")]),
    (None, [started(), host_ended("answered")]),
    (None, [started()]),
    (None, [started(), ended(1, "a")]),
    (None, [started(), run_cut("a whim")]),
    (None, [started(), cut("was cut off with the run")]),
]


@pytest.mark.parametrize(("outcome", "events"), ENDINGS)
def test_the_outcome_follows_from_what_happened(outcome: Outcome | None, events: list[dict[str, Any]]) -> None:
    assert derive(events) == outcome


def test_every_outcome_can_follow_from_events() -> None:
    assert {outcome for outcome, _events in ENDINGS} == {None, *Outcome}


@pytest.mark.parametrize(
    ("usage", "total"),
    [
        ({"total_tokens": 0}, 0),
        ({"total_tokens": 7, "input_tokens": 5, "output_tokens": 2}, 7),
        ({"total_tokens": 390, "input_tokens": 40, "output_tokens": 6}, 390),
        ({"total_tokens": 6, "input_tokens": 5, "output_tokens": 2}, None),
        ({"total_tokens": 6, "input_tokens": 5}, 6),
        ({"total_tokens": 0, "input_token_details": {"cache_read": 1}}, None),
        ({"input_tokens": 5, "output_tokens": 2}, None),
        ({}, None),
        (None, None),
        ([7], None),
        ("7", None),
    ],
)
def test_a_total_counts_only_where_it_can_be_true(usage: object, total: int | None) -> None:
    assert known_total(usage) == total


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **{f"{part}_tokens": st.integers(-2, 9) | st.sampled_from([None, True, 7.0, "7", 2**63]) for part in PARTS},
            "input_token_details": st.none() | st.fixed_dictionaries({"cache_read": st.integers(-1, 20)}),
        },
    )
)
@settings(deadline=None, max_examples=300)
def test_the_second_opinion_on_usage_is_the_first(usage: dict[str, Any]) -> None:
    assert known_total(usage) == judge(usage).total
