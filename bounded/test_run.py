"""What a run knows of itself: attempts, charges, endings, events."""

import pytest

from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Event, Run
from bounded.usage import judge

USED = judge({"total_tokens": 10})


def test_a_reply_is_charged_once_and_only_while_its_call_is_open() -> None:
    run = Run()
    call = run.start_model_call()
    assert run.end_model_call(call, USED)
    assert not run.end_model_call(call, USED)
    assert (run.model_calls, run.usage.known_subtotal, run.usage.known) == (1, 10, True)


def test_a_reply_after_its_call_was_cut_is_quarantined() -> None:
    events: list[Event] = []
    run = Run(observe=events.append)
    call = run.start_model_call()
    run.cut_model_call("was ended by its timeout")
    assert not run.end_model_call(call, USED)
    assert (run.usage.known_subtotal, run.usage.known) == (0, False)
    assert run.usage.fault is not None
    assert "was ended by its timeout" in run.usage.fault
    assert [event.kind for event in events] == ["model_call_started", "model_call_cut", "model_call_late"]


def test_cutting_a_run_without_an_open_call_costs_no_certainty() -> None:
    run = Run()
    run.end_model_call(run.start_model_call(), USED)
    run.cut_model_call("failed")
    assert run.usage.known


def test_a_resumed_run_goes_on_from_what_was_known_and_a_running_one_does_not() -> None:
    run = Run()
    run.resume_from({"known_subtotal": 7, "usage_known": False, "model_calls": 2})
    run.resume_from({"known_subtotal": 99, "usage_known": True, "model_calls": 99})
    assert (run.model_calls, run.usage.known_subtotal, run.usage.known) == (2, 7, False)


def test_whoever_ends_a_run_first_has_the_last_word() -> None:
    run = Run(secrets=frozenset({"fake-secret"}))
    run.end(Outcome.MODEL_ERROR, "it said fake-secret\x1b[31m")
    run.end(Outcome.DEADLINE)
    answer = run.answer()
    assert (answer.outcome, answer.reason) == (Outcome.MODEL_ERROR, "it said [masked]")


def test_a_run_without_an_outcome_is_paused() -> None:
    assert Run(model="m").answer().outcome is Outcome.PAUSED


def test_what_the_model_said_is_kept_as_it_came_and_cleaned() -> None:
    run = Run(secrets=frozenset({"fake-secret"}))
    said = " \x1b[31mit is fake-secret\r\n"
    run.say(said)
    assert (run.raw_text, run.text) == (said, "it is [masked]")
    assert run.answer().text == run.text
    assert "fake-secret" not in repr(run)
    run.say("")
    assert (run.raw_text, run.text) == ("", "")


def test_an_end_by_the_host_says_what_it_goes_by_and_ends_the_run_once() -> None:
    events: list[Event] = []
    run = Run(observe=events.append)
    run.end_by_host(Outcome.TRANSCRIPT_BOUND, "too long", chars=11, bound=10)
    run.end(Outcome.ANSWERED)
    assert [(event.kind, dict(event.facts)) for event in events] == [
        ("host_ended", {"outcome": Outcome.TRANSCRIPT_BOUND, "chars": 11, "bound": 10}),
        ("run_ended", {"outcome": Outcome.TRANSCRIPT_BOUND, "reason": "too long"}),
    ]


@pytest.mark.parametrize(
    ("usage", "limits", "outcome"),
    [
        ({"total_tokens": 10}, Limits(token_budget=11, max_steps=2), None),
        ({"total_tokens": 10}, Limits(token_budget=None, max_steps=2), None),
        ({"total_tokens": 10}, Limits(token_budget=11, max_steps=1), Outcome.STEP_LIMIT),
        ({"total_tokens": 10}, Limits(token_budget=10, max_steps=1), Outcome.TOKEN_BUDGET),
        (None, Limits(token_budget=10, max_steps=1), Outcome.MISSING_USAGE),
    ],
)
def test_a_spent_run_is_ended_for_unknown_usage_first_then_tokens_then_steps(
    usage: object, limits: Limits, outcome: Outcome | None
) -> None:
    run = Run()
    run.end_model_call(run.start_model_call(), judge(usage))
    run.stop_if_spent(limits)
    assert run.outcome is outcome
