"""The words for endings: each once, each with its exit status."""

import json

from bounded.outcomes import Outcome


def test_every_outcome_has_the_exit_status_that_its_meaning_gives_it() -> None:
    statuses = {status: {o.value for o in Outcome if o.exit_status == status} for status in (0, 3, 4, 130)}
    assert statuses == {
        0: {"answered", "paused"},
        3: {"missing_usage", "token_budget", "deadline", "step_limit", "model_timeout"},
        4: {
            "model_error",
            "empty_answer",
            "round_without_progress",
            "transcript_bound",
            "bound_below_first_send",
            "registry_unavailable",
        },
        130: {"interrupted"},
    }
    assert sum(len(words) for words in statuses.values()) == len(Outcome)


def test_an_outcome_is_its_word_in_text_and_json() -> None:
    assert f"{Outcome.DEADLINE}" == "deadline"
    assert json.dumps(Outcome.DEADLINE) == '"deadline"'
    assert {outcome.value: outcome for outcome in Outcome}["deadline"] is Outcome.DEADLINE
