"""What a reply shows: its text, its finish reason, its calls and whether they can be told apart."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call

from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Run
from bounded.usage import judge
from models.reply import (
    MAX_REQUESTED_CALLS,
    call_id_fault,
    finish_reason,
    requested_calls,
    text,
    weigh,
    written_call,
)

TOOLS = ["list_ci_jobs", "fetch_job_log"]
WITHOUT_ID = "the model sent a tool call without an id"
SAME_ID = "the model sent two tool calls with the same id"


def with_ids(calls: list[Any], unparsable: list[Any] | None = None) -> AIMessage:
    """A reply whose calls have these ids."""
    return AIMessage(
        "",
        tool_calls=[tool_call(name="list_ci_jobs", args={"pr": n}, id=i) for n, i in enumerate(calls)],
        invalid_tool_calls=[
            invalid_tool_call(name="list_ci_jobs", args="{broken", id=i, error=None) for i in unparsable or []
        ],
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Job 812 failed.", "Job 812 failed."),
        ("  Job 812 failed.\n", "Job 812 failed."),
        ("", ""),
        (" \n\t", ""),
        ([], ""),
        ([{"type": "text", "text": "", "extras": {"signature": "c2ln"}}], ""),
        ([{"type": "thinking", "thinking": "Hm."}], ""),
        ([{"type": "text", "text": "Job 812 "}, "failed."], "Job 812 failed."),
    ],
)
def test_text_is_what_is_said_whatever_the_shape_of_the_content(content: Any, said: str) -> None:
    found = text(AIMessage(content))
    assert found == said
    assert type(found) is str


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"finish_reason": "MAX_TOKENS"}, "max_tokens"),
        ({"done_reason": "length"}, "length"),
        ({"stop_reason": "end_turn"}, "end_turn"),
        ({"finish_reason": "", "done_reason": "stop"}, "stop"),
        ({"finish_reason": None, "done_reason": "stop"}, "stop"),
        ({"finish_reason": 2}, None),
        ({}, None),
        ({"finish_reason": "STOPSTOP"}, "stop"),
        ({"finish_reason": "STOPMAX_TOKENS"}, "stopmax_tokens"),
        ({"finish_reason": "TIRED"}, "tired"),
    ],
)
def test_finish_reason_is_read_from_whichever_key_has_one(metadata: dict[str, Any], reason: str | None) -> None:
    assert finish_reason(AIMessage("", response_metadata=metadata)) == reason


@given(st.text(st.characters(codec="ascii", categories=["Lu", "Ll"]), min_size=1, max_size=12))
def test_a_doubled_finish_reason_reads_as_the_single_one(word: str) -> None:
    single, double = ({"finish_reason": said} for said in (word, word * 2))
    if word[: len(word) // 2] * 2 != word:  # a word that is itself a doubled one stays ambiguous
        assert finish_reason(AIMessage("", response_metadata=single)) == word.lower()
        assert finish_reason(AIMessage("", response_metadata=double)) == word.lower()


def test_requested_calls_are_all_of_them_and_the_unparsable_ones_come_last() -> None:
    calls = list(requested_calls(with_ids(["a", "b"], ["c"])))
    assert [call["id"] for call in calls] == ["a", "b", "c"]
    assert [call["args"] for call in calls] == [{"pr": 0}, {"pr": 1}, "{broken"]


@pytest.mark.parametrize(
    ("calls", "unparsable", "fault"),
    [
        ([], [], None),
        (["a"], [], None),
        (["a", "b"], ["c"], None),
        (["a", "A"], [], None),
        ([None], [], WITHOUT_ID),
        ([""], [], WITHOUT_ID),
        (["a", None], [], WITHOUT_ID),
        ([], [None], WITHOUT_ID),
        (["a"], [""], WITHOUT_ID),
        (["a", "a"], [], SAME_ID),
        (["a"], ["a"], SAME_ID),
        ([], ["a", "a"], SAME_ID),
        (["a", "b", "a"], [], SAME_ID),
    ],
)
def test_calls_that_cannot_be_told_apart_are_a_fault(calls: list[Any], unparsable: list[Any], fault: str) -> None:
    assert call_id_fault(with_ids(calls, unparsable)) == fault


@pytest.mark.parametrize("identity", [7, True, ["a"], {"id": "a"}])
def test_an_id_that_is_no_text_is_none(identity: Any) -> None:
    reply = with_ids(["a"])
    reply.tool_calls[0]["id"] = identity
    assert call_id_fault(reply) == WITHOUT_ID


@pytest.mark.parametrize(
    "content",
    [
        '{"name": "fetch_job_log", "arguments": {"job_id": 815}}',
        ' {"name": "fetch_job_log", "args": {}}\n',
        '<tool_call>\n{"name": "fetch_job_log", "arguments": {"job_id": 815}}\n</tool_call>',
        '{{"name": "fetch_job_log", "arguments": {"job_id": 815}}}',
        'I will look at the log.\n```json\n{"name": "fetch_job_log", "arguments": {"job_id": 815}}\n```',
        '```json\n{"name": "fetch_job_log", "arguments": {"job_id": 815}}\n```',
        '```\n{"name": "fetch_job_log", "parameters": {}}\n```',
    ],
)
def test_a_call_written_as_text_is_found(content: str) -> None:
    assert written_call(AIMessage(content), TOOLS) == "fetch_job_log"
    assert written_call(AIMessage([{"type": "text", "text": content}]), TOOLS) == "fetch_job_log"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "Job 812 failed.",
        'Job 812 said {"name": "fetch_job_log"}',
        '{"name": "fetch_job_log"',
        '{"name": "another_tool"}',
        '{"name": ["fetch_job_log"]}',
        '{"name": null}',
        '{"tool": "fetch_job_log"}',
        '["fetch_job_log"]',
        '"fetch_job_log"',
        "null",
        "[" * 100_000,
    ],
)
def test_what_calls_no_known_tool_is_no_written_call(content: str) -> None:
    assert written_call(AIMessage(content), TOOLS) is None


def weighed(reply: AIMessage, *, tokens: int | None = 10, budget: int | None = None) -> tuple[bool, Run]:
    """What a run is told of a charged reply to one tool result, and the run."""
    run = Run()
    run.end_model_call(run.start_model_call(), judge(None if tokens is None else {"total_tokens": tokens}))
    run.say(text(reply))
    return weigh(run, reply, [ToolMessage("log", tool_call_id="a")], Limits(token_budget=budget), TOOLS), run


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "thinking", "thinking": "Hm."}]])
def test_a_reply_that_says_nothing_is_left_to_the_host_and_ends_nothing(content: Any) -> None:
    says_something, run = weighed(AIMessage(content))
    assert not says_something
    assert run.outcome is None


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (AIMessage("Job 812 failed."), Outcome.ANSWERED),
        (with_ids(["a"]), None),
        (with_ids([], ["a"]), None),
        (with_ids([None]), Outcome.MODEL_ERROR),
        (with_ids([str(n) for n in range(MAX_REQUESTED_CALLS + 1)]), Outcome.MODEL_ERROR),
    ],
)
def test_a_reply_that_says_something_is_weighed_here(reply: AIMessage, outcome: Outcome | None) -> None:
    says_something, run = weighed(reply)
    assert says_something
    assert run.outcome is outcome


def test_unknown_usage_ends_the_run_before_an_empty_reply_does_and_a_spent_budget_ends_only_what_would_go_on() -> None:
    says_something, run = weighed(AIMessage(""), tokens=None)
    assert (says_something, run.outcome) == (True, Outcome.MISSING_USAGE)
    assert weighed(with_ids(["a"]), budget=10)[1].outcome is Outcome.TOKEN_BUDGET
    assert weighed(AIMessage("Job 812 failed."), budget=10)[1].outcome is Outcome.ANSWERED
    assert weighed(AIMessage(""), budget=10)[0] is False  # where the host asks again, the loop looks at the budget
