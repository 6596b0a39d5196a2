"""The summary of a batch, and what has changed since another one: their exact text for small records."""

import json
from pathlib import Path
from typing import Any

import pytest

from summary import changes, in_short, read_saved, summary


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
    return {
        "name": name,
        "question": question,
        "limits": {"max_steps": 12, "tool_timeouts_s": {}, **limits},
        "runs": list(runs),
    }


def record(*scenarios: dict[str, Any], model: str = "offline") -> dict[str, Any]:
    return {"schema_version": 1, "model": model, "evidence": "x", "scenarios": list(scenarios)}


FIRST = "what changed (answers and seconds are not compared):"
NOT_RUN = {"failed": "its budget is derived from the first reply of a, whose usage is not known"}


@pytest.mark.parametrize(
    ("saved", "lines"),
    [
        (record(), [""]),
        (record(scenario()), ["a: -"]),
        (record(scenario(run())), ["a: answered", "  tokens: 10", "  calls: 1 executed", "  seconds: 0.50"]),
        (
            record(
                scenario(run("model_timeout", 0, 0.52, usage_known=False, receipts=[]), name="a-longer-name"),
                scenario(run("deadline", 12345, 120.04, receipts=[call(), call("withheld"), call()])),
                scenario(run(receipts=[gap("native_tool_timeout"), gap("native_tool_abandoned")]), name="b"),
            ),
            [
                "a-longer-name: model_timeout",
                "  tokens: 0, rest unknown",
                "  calls: none",
                "  seconds: 0.52",
                "a: deadline",
                "  tokens: 12345",
                "  calls: 2 executed, 1 withheld",
                "  seconds: 120.04",
                "b: answered",
                "  tokens: 10",
                "  calls: 1 timed out, 1 abandoned",
                "  seconds: 0.50",
            ],
        ),
        (
            record(scenario(run(tokens=7), run(tokens=11, seconds=1.5), run(tokens=8, seconds=1.0))),
            ["a: answered", "  tokens: 7/8/11", "  calls: 1 executed", "  seconds: 0.50/1.00/1.50"],
        ),
        (
            record(scenario(run(tokens=7), run(tokens=8))),
            ["a: answered", "  tokens: 7/7.5/8", "  calls: 1 executed", "  seconds: 0.50"],
        ),
        (
            record(scenario(run(), run(receipts=[]))),
            ["a: answered", "  tokens: 10", "  calls: 1 executed 1/2, none 1/2", "  seconds: 0.50"],
        ),
        (
            record(scenario(run("deadline"), run(), run(tokens=12), {"failed": "A: b"}, run(usage_known=False))),
            [
                "a: answered 3/5, deadline 1/5, not run 1/5",
                "  tokens: 10/10/12, rest unknown",
                "  calls: 1 executed",
                "  seconds: 0.50",
                "  not run: A: b",
            ],
        ),
        (
            record(scenario(NOT_RUN, {"failed": "A: b"}, NOT_RUN), scenario({"failed": "A: b"}, name="b")),
            [
                "a: not run",
                "  not run: its budget is derived from the first reply of a, whose usage is not known",
                "  not run: A: b",
                "b: not run",
                "  not run: A: b",
            ],
        ),
    ],
    ids=["none", "empty", "one", "several", "spread", "half", "calls", "mixed", "failed"],
)
def test_the_summary_has_a_few_lines_for_each_scenario(saved: dict[str, Any], lines: list[str]) -> None:
    assert summary(saved).split("\n") == lines


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (run(), "answered, 10 tokens, 0.50 s"),
        (run("deadline", 7, 120.045, usage_known=False), "deadline, 7 tokens and an unknown rest, 120.05 s"),
        (NOT_RUN, f"not run: {NOT_RUN['failed']}"),
    ],
)
def test_a_run_fits_on_one_line(row: dict[str, Any], line: str) -> None:
    assert in_short(row) == line


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
                "a: token_budget none -> 3; outcome answered -> token_budget; tokens 10 -> 4; model_calls 2 -> 1; "
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
            ["a: calls list_ci_jobs timed out, list_ci_jobs refused -> list_ci_jobs abandoned"],
        ),
        (record(scenario(run())), record(scenario(run(usage_known=False))), ["a: usage_known yes -> no"]),
        (
            record(scenario(run(), tool_timeouts_s={"fetch_job_log": 3.0, "other": 1.0})),
            record(scenario(run(), tool_timeouts_s={"fetch_job_log": 9.0, "new": 2.0})),
            ["a: fetch_job_log timeout 3.0 -> 9.0; other timeout 1.0 -> None; new timeout None -> 2.0"],
        ),
        (
            record(scenario(run(derived="from 5", token_budget=6), run(derived="from 5", token_budget=6))),
            record(scenario(run(injected="held"), run(derived="from 7", token_budget=8))),
            [
                "a: derived from 5 -> from 7 1/2, none 1/2; injected none -> held 1/2, none 1/2; "
                "token_budget 6 -> 8 1/2, none 1/2"
            ],
        ),
        (
            record(scenario(run(), run())),
            record(scenario(run(), run("deadline"))),
            ["a: outcome answered -> answered 1/2, deadline 1/2"],
        ),
        (
            record(scenario(run())),
            record(scenario(NOT_RUN)),
            [
                "a: derived none -> -; injected none -> -; token_budget none -> -; outcome answered -> not run; "
                "tokens 10 -> -; usage_known yes -> -; model_calls 2 -> -; calls list_ci_jobs executed -> -"
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
        "tool timeouts",
        "derived and injected",
        "shares",
        "failed",
    ],
)
def test_what_has_changed_is_said_scenario_by_scenario(
    old: dict[str, Any], new: dict[str, Any], lines: list[str]
) -> None:
    assert changes(old, new).split("\n") == [FIRST, *(f"  {line}" for line in lines)]


def test_the_order_in_which_repeats_ended_differently_is_no_change() -> None:
    one, other = record(scenario(run(), run("deadline"))), record(scenario(run("deadline"), run()))
    assert changes(one, other) == f"{FIRST}\n  a: nothing"


def test_what_was_saved_is_read_back_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(record(scenario(run()), model="a\x1b[31m-model")), encoding="utf-8")
    assert read_saved(path) == record(scenario(run()), model="a-model")


def test_a_file_that_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_saved(tmp_path / "none.json")


@pytest.mark.parametrize(
    "content",
    ["", "5", "[]", "{}", "null", "[" * 100_000, '{"scenarios": []}', '{"model": "m", "scenarios": []} more']
    + [
        f'{{"model": "m", "scenarios": [{{"name": {name}, "question": "b", "limits": {limits}, "runs": {runs}}}]}}'
        for name, limits, runs in (
            ('["a"]', '{"tool_timeouts_s": {}}', "[]"),
            ('"a"', "5", "[]"),
            ('"a"', "{}", "[]"),
            ('"a"', '{"tool_timeouts_s": 5}', "[]"),
            ('"a"', '{"tool_timeouts_s": {}}', "5"),
            ('"a"', '{"tool_timeouts_s": {}}', "[{}]"),
        )
    ],
)
def test_only_what_was_saved_can_be_compared_with(content: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"old\.json is not a file that record.py has saved"):
        read_saved(path)


def test_large_counts_are_shown_and_compared_whole() -> None:
    one, other = (record(scenario(run(tokens=tokens))) for tokens in (1_234_567, 1_234_568))
    assert "  tokens: 1234567" in summary(one).split("\n")
    assert changes(one, other) == f"{FIRST}\n  a: tokens 1234567 -> 1234568"
    assert "  tokens: 1234567/1234567.5/1234568" in summary(
        record(scenario(run(tokens=1_234_567), run(tokens=1_234_568)))
    )
