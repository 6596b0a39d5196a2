"""The table of a batch, and what has changed since another one: their exact text for small records."""

from typing import Any

import pytest

from summary import changes, table


def call(outcome: str = "executed", **more: Any) -> dict[str, Any]:
    return {"tool": "list_ci_jobs", "outcome": outcome, **more}


def gap(source_gap: str) -> dict[str, Any]:
    return call("error", source_gap=source_gap)


def run(outcome: str = "answered", tokens: int = 10, seconds: float = 0.5, **more: Any) -> dict[str, Any]:
    row = {
        "outcome": outcome, "known_subtotal": tokens, "usage_known": True, "token_budget": None, "model_calls": 2,
        "seconds": seconds, "receipts": [call()],
    }  # fmt: skip
    return row | more


def scenario(*runs: dict[str, Any], name: str = "a", question: str = "Why?", **limits: Any) -> dict[str, Any]:
    return {"name": name, "question": question, "limits": {"max_steps": 12, **limits}, "runs": list(runs)}


def record(*scenarios: dict[str, Any], model: str = "offline") -> dict[str, Any]:
    return {"schema_version": 1, "model": model, "evidence": "x", "scenarios": list(scenarios)}


NOT_RUN = {"failed": "its budget is derived from the first reply of a, which reported no usage"}


@pytest.mark.parametrize(
    ("saved", "lines"),
    [
        (record(), ["scenario  outcome  tokens  calls  seconds"]),
        (record(scenario()), ["scenario  outcome  tokens  calls  seconds", "a         -        -       -      -"]),
        (
            record(scenario(run())),
            ["scenario  outcome   tokens  calls       seconds", "a         answered  10      1 executed  0.5"],
        ),
        (
            record(
                scenario(run("model_timeout", 0, 0.52, usage_known=False, receipts=[]), name="a-longer-name"),
                scenario(run("deadline", 12345, 120.04, receipts=[call(), call("withheld"), call()])),
                scenario(run(receipts=[gap("native_tool_timeout"), gap("native_tool_abandoned")]), name="b"),
            ),
            [
                "scenario       outcome        tokens   calls                   seconds",
                "a-longer-name  model_timeout  0 known  none                    0.5",
                "a              deadline       12345    2 executed, 1 withheld  120.0",
                "b              answered       10       1 stopped, 1 abandoned  0.5",
            ],
        ),
        (
            record(scenario(run(tokens=7), run(tokens=11, seconds=1.5), run(tokens=8, seconds=1.0))),
            [
                "scenario  outcome   tokens  calls       seconds",
                "a         answered  7/8/11  1 executed  0.5/1.0/1.5",
            ],
        ),
        (
            record(scenario(run(tokens=7), run(tokens=8))),
            ["scenario  outcome   tokens   calls       seconds", "a         answered  7/7.5/8  1 executed  0.5"],
        ),
        (
            record(scenario(run("deadline"), run(), run(tokens=12), {"failed": "A: b"}, run(usage_known=False))),
            [
                "scenario  outcome                                  tokens          calls       seconds",
                "a         answered 3/5, deadline 1/5, not run 1/5  10/10/12 known  1 executed  0.5",
                "a: not run: A: b",
            ],
        ),
        (
            record(scenario(NOT_RUN, {"failed": "A: b"}, NOT_RUN), scenario({"failed": "A: b"}, name="b")),
            [
                "scenario  outcome  tokens  calls  seconds",
                "a         not run  -       -      -",
                "b         not run  -       -      -",
                "a: not run: its budget is derived from the first reply of a, which reported no usage",
                "a: not run: A: b",
                "b: not run: A: b",
            ],
        ),
    ],
    ids=["none", "empty", "one", "several", "spread", "half", "mixed", "failed"],
)
def test_the_table_has_a_line_for_each_scenario(saved: dict[str, Any], lines: list[str]) -> None:
    assert table(saved).split("\n") == lines


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (record(), record(), []),
        (record(scenario(run())), record(scenario(run(seconds=9.9))), ["a: nothing"]),
        (record(scenario()), record(scenario()), ["a: nothing"]),
        (
            record(scenario(run())),
            record(scenario(run("token_budget", 4, receipts=[], model_calls=1, token_budget=3))),
            [
                "a: token_budget None -> 3; outcome answered -> token_budget; tokens 10 -> 4; model_calls 2 -> 1; "
                "calls list_ci_jobs executed -> none"
            ],
        ),
        (
            record(scenario(run(), name="kept"), scenario(run(), name="gone")),
            record(scenario(run(), name="new"), scenario(run(), name="kept")),
            ["kept: nothing", "gone: only then", "new: only now"],
        ),
        (
            record(scenario(run()), model="offline"),
            record(scenario(run()), model="gemma4:e2b"),
            ["model: offline -> gemma4:e2b", "a: nothing"],
        ),
        (
            record(scenario(run(), question="Why?", deadline_s=5.0)),
            record(scenario(run(), question="How?", deadline_s=6.0, max_steps=3)),
            ["a: question Why? -> How?; max_steps 12 -> 3; deadline_s 5.0 -> 6.0"],
        ),
        (
            record(scenario(run(receipts=[gap("native_tool_timeout"), call("refused")]))),
            record(scenario(run(receipts=[gap("native_tool_abandoned")]))),
            ["a: calls list_ci_jobs stopped, list_ci_jobs refused -> list_ci_jobs abandoned"],
        ),
        (record(scenario(run())), record(scenario(run(usage_known=False))), ["a: usage_known yes -> no"]),
        (
            record(scenario(run(), run())),
            record(scenario(run(), run("deadline"))),
            ["a: outcome answered -> answered 1/2, deadline 1/2"],
        ),
        (
            record(scenario(run())),
            record(scenario(NOT_RUN)),
            [
                "a: token_budget None -> -; outcome answered -> not run; tokens 10 -> -; usage_known yes -> -; "
                "model_calls 2 -> -; calls list_ci_jobs executed -> -"
            ],
        ),
    ],
    ids=[
        "none",
        "nothing",
        "empty",
        "outcome",
        "added and removed",
        "model",
        "limits",
        "gaps",
        "usage",
        "shares",
        "failed",
    ],
)
def test_what_has_changed_is_said_scenario_by_scenario(
    old: dict[str, Any], new: dict[str, Any], lines: list[str]
) -> None:
    assert changes(old, new).split("\n") == ["changed since then:", *(f"  {line}" for line in lines)]


def test_the_order_in_which_repeats_ended_differently_is_no_change() -> None:
    one, other = record(scenario(run(), run("deadline"))), record(scenario(run("deadline"), run()))
    assert changes(one, other) == "changed since then:\n  a: nothing"
