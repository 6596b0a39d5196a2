"""The real compiled graph, driven by scripted replies: how a run ends, what it charges, what its receipts say.

python -m pytest -v test_graph.py
"""

import asyncio
import math
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver

from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.run import Answer, Run
from bounded.timeouts import ToolTimeouts
from ci import LocalCi
from conftest import OnVirtualClock
from graph import ask, build_graph
from models.scripted import ScriptedModel
from sources.jobs import TOOL_SET, ci_tools

QUESTION = "Why is CI failing on pull request 415?"
ABSENT = object()


def used(total: object = 10) -> dict[str, Any]:
    return {"usage_metadata": {"input_tokens": 0, "output_tokens": 0, "total_tokens": total}}


def call(name: str = "list_ci_jobs", args: object = None, call_id: object = "c1") -> dict[str, Any]:
    return {"name": name, "args": {"pr": 415} if args is None else args, "id": call_id}


def asks(*calls: dict[str, Any], total: object = 10) -> dict[str, Any]:
    return {"tool_calls": list(calls or (call(),)), **used(total)}


def says(text: str = "Because.", total: object = 10) -> dict[str, Any]:
    return {"content": text, **used(total)}


class Conversation:
    """One question to a script, and everything that it left."""

    def __init__(self, *replies: dict[str, Any], tools: list[BaseTool] | None = None, **limits: Any) -> None:
        self.model = ScriptedModel(replies=list(replies))
        limits.setdefault("tool_timeouts", ToolTimeouts(per_set={TOOL_SET: LocalCi().timeouts}))
        self.saver = InMemorySaver()
        self.graph = build_graph(
            self.model,
            tools or ci_tools(LocalCi()),
            limits=Limits(**limits),
            tool_set=TOOL_SET,
            checkpointer=self.saver,
        )
        self.config: Any = {"configurable": {"thread_id": "t"}}

    async def ask(self, deadline_s: float | None = 120.0, **given: Any) -> Answer:
        self.run = Run(model="scripted")
        answer = await ask(self.graph, QUESTION, deadline_s=deadline_s, run=self.run, config=self.config, **given)
        self.state = (await self.graph.aget_state(self.config)).values
        return answer

    @property
    def messages(self) -> list[Any]:
        return list(self.state["messages"])


Asked = OnVirtualClock[Answer]


def test_a_question_is_answered_from_the_failing_log(on_virtual_clock: Asked) -> None:
    talk = Conversation(
        asks(), asks(call("fetch_job_log", {"job_id": 812})), says("The discount is applied twice.", total=7)
    )
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.text, answer.reason) == (Outcome.ANSWERED, "The discount is applied twice.", None)
    assert (answer.known_subtotal, answer.usage_known, answer.model_calls) == (27, True, 3)
    assert [receipt.outcome for receipt in answer.receipts] == [CallOutcome.EXECUTED] * 2
    assert [receipt.turn for receipt in answer.receipts] == [1, 2]
    assert "E       assert 2268 == 2520" in talk.messages[-2].text
    assert [message.type for message in talk.messages] == ["human", "ai", "tool", "ai", "tool", "ai"]


def test_state_says_what_the_answer_says(on_virtual_clock: Asked) -> None:
    talk = Conversation(asks(), says())
    answer = on_virtual_clock(talk.ask())
    known = {key: value for key, value in talk.state.items() if key != "messages"}
    assert known == {
        "known_subtotal": answer.known_subtotal,
        "usage_known": True,
        "model_calls": 2,
        "outcome": "answered",
        "reason": None,
    }
    assert type(talk.state["outcome"]) is str  # a checkpointer knows no enum of ours


def test_a_slow_log_times_out_and_the_model_is_told(on_virtual_clock: Asked) -> None:
    talk = Conversation(asks(call("fetch_job_log", {"job_id": 815})), says("Its log is missing."))
    answer = on_virtual_clock(talk.ask())
    (receipt,) = answer.receipts
    assert (receipt.outcome, receipt.source_gap) == (CallOutcome.ERROR, SourceGap.STOPPED)
    assert (receipt.bound_s, receipt.bound_source, receipt.duration_sec) == (3.0, "tool_set", 3.0)
    (told,) = [message for message in talk.messages if isinstance(message, ToolMessage)]
    assert told.status == "error"
    assert told.text.startswith("⚠️ TOOL_TIMEOUT (fetch_job_log): exceeded 3.0s limit.")
    assert (answer.outcome, answer.seconds) == (Outcome.ANSWERED, 3.0)


def test_a_slow_model_times_out_and_its_spending_is_unknown(on_virtual_clock: Asked) -> None:
    talk = Conversation(asks(), says() | {"delay_s": 30}, model_timeout_s=5.0)
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.reason) == (Outcome.MODEL_TIMEOUT, "the model did not answer within 5 s")
    assert (answer.known_subtotal, answer.usage_known, answer.model_calls) == (10, False, 2)
    assert answer.receipts[0].outcome is CallOutcome.EXECUTED
    assert isinstance(talk.messages[-1], ToolMessage)
    assert (talk.state["outcome"], talk.state["usage_known"]) == ("model_timeout", False)


def test_a_reply_that_comes_after_the_models_timeout_is_charged_nowhere(on_virtual_clock: OnVirtualClock[None]) -> None:
    class Stubborn(ScriptedModel):
        async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(2)
            return await super().ainvoke(*args, **kwargs)

    async def check() -> None:
        run = Run()
        graph = build_graph(Stubborn(replies=[says()]), ci_tools(LocalCi()), limits=Limits(model_timeout_s=1.0))
        answer = await ask(graph, QUESTION, run=run)
        assert (answer.outcome, answer.seconds) == (Outcome.MODEL_TIMEOUT, 1.0)
        await asyncio.sleep(10)
        assert (run.text, run.usage.known_subtotal, run.answer().outcome) == ("", 0, Outcome.MODEL_TIMEOUT)

    on_virtual_clock(check())


@pytest.mark.parametrize(
    ("budget", "outcome", "executed"),
    [
        (11, Outcome.ANSWERED, 1),
        (10, Outcome.TOKEN_BUDGET, 0),
        (1, Outcome.TOKEN_BUDGET, 0),
        (None, Outcome.ANSWERED, 1),
    ],
)
def test_the_budget_is_checked_before_the_next_call(
    budget: int | None, outcome: Outcome, executed: int, on_virtual_clock: Asked
) -> None:
    answer = on_virtual_clock(Conversation(asks(total=10), says(), token_budget=budget).ask())
    assert answer.outcome is outcome
    assert [r.outcome for r in answer.receipts] == [CallOutcome.EXECUTED if executed else CallOutcome.WITHHELD]
    assert answer.usage_known


def test_a_final_answer_may_overshoot_the_budget(on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation(says(total=5_000), token_budget=100).ask())
    assert (answer.outcome, answer.known_subtotal) == (Outcome.ANSWERED, 5_000)


MISSING = [ABSENT, None, {}, [], "9", {"total_tokens": True}, {"total_tokens": "9"}, {"total_tokens": -5},
           {"total_tokens": 7.0}, {"total_tokens": math.nan}, {"input_tokens": 3, "output_tokens": 4},
           {"input_tokens": 224, "output_tokens": 179, "total_tokens": 0}]  # fmt: skip


@pytest.mark.parametrize("usage", MISSING)
def test_usage_that_is_not_reported_stops_the_run_before_another_call(usage: object, on_virtual_clock: Asked) -> None:
    second = {"tool_calls": [call("fetch_job_log", {"job_id": 812}, "c2")]}
    if usage is not ABSENT:
        second["usage_metadata"] = usage  # type: ignore[assignment]
    talk = Conversation(asks(total=10), second, says())
    answer = on_virtual_clock(talk.ask())
    assert answer.outcome is Outcome.MISSING_USAGE
    assert (answer.known_subtotal, answer.usage_known, answer.model_calls) == (10, False, 2)
    assert [r.outcome for r in answer.receipts] == [CallOutcome.EXECUTED, CallOutcome.WITHHELD]
    assert talk.messages[-1].usage_metadata is None  # a checkpointer could not store some of these


def test_an_answer_without_usage_is_shown_and_is_no_answer_of_known_cost(on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation({"content": "Because."}).ask())
    assert (answer.outcome, answer.text) == (Outcome.MISSING_USAGE, "Because.")
    assert (answer.known_subtotal, answer.usage_known) == (0, False)


@pytest.mark.parametrize("usage", [{"total_tokens": 0}, {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}])
def test_an_explicit_zero_is_reported_usage(usage: dict[str, int], on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation({"content": "Because.", "usage_metadata": usage}, token_budget=1).ask())
    assert (answer.outcome, answer.known_subtotal, answer.usage_known) == (Outcome.ANSWERED, 0, True)


@pytest.mark.parametrize(
    "reply",
    [
        asks(call(call_id=None)),
        asks(call(call_id="")),
        asks(call(), call()),
        asks(call()) | {"invalid_tool_calls": [{"name": "list_ci_jobs", "args": "{", "id": "c1"}]},
        {"invalid_tool_calls": [{"name": "list_ci_jobs", "args": "{", "id": None}], **used()},
    ],
)
def test_calls_that_cannot_be_told_apart_do_not_run(reply: dict[str, Any], on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation(reply, says()).ask())
    assert answer.outcome is Outcome.MODEL_ERROR
    assert (answer.known_subtotal, answer.usage_known) == (10, True)
    assert {receipt.outcome for receipt in answer.receipts} == {CallOutcome.WITHHELD}
    assert len(answer.receipts) == len(reply.get("tool_calls", [])) + len(reply.get("invalid_tool_calls", []))


@pytest.mark.parametrize("form", ["{}", "```json\n{}\n```"])
def test_a_call_that_is_written_as_text_is_said_not_to_have_run(form: str, on_virtual_clock: Asked) -> None:
    written = form.replace("{}", '{"name": "fetch_job_log", "arguments": {"job_id": 812}}')
    answer = on_virtual_clock(Conversation(says(written)).ask())
    assert (answer.outcome, answer.receipts) == (Outcome.ANSWERED, ())
    assert answer.reason == "the model wrote a call of fetch_job_log as text; nothing was run for it"


def test_an_answer_that_looked_nothing_up_says_so(on_virtual_clock: Asked) -> None:
    invented = "Let's assume that list_ci_jobs returns a failed build: a syntax error."  # as a real small model wrote
    answer = on_virtual_clock(Conversation(says(invented)).ask())
    assert answer.outcome is Outcome.ANSWERED
    assert answer.reason == "no tool was called: the answer rests on nothing that was looked up"


def test_an_id_may_come_again_in_a_later_reply(on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation(asks(), asks(), says()).ask())
    assert [(r.turn, r.outcome) for r in answer.receipts] == [(1, "executed"), (2, "executed")]


def test_a_reply_id_may_come_again_without_overwriting_the_earlier_reply(
    on_virtual_clock: OnVirtualClock[None],
) -> None:
    class SameId(ScriptedModel):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            result = await super()._agenerate(*args, **kwargs)
            result.generations[0].message.id = "always-the-same"
            return result

    async def check() -> None:
        graph = build_graph(SameId(replies=[asks(), asks(call(call_id="c2")), says()]), ci_tools(LocalCi()))
        state = await graph.ainvoke({"messages": [HumanMessage(QUESTION)]}, context=Run())
        assert [type(m).__name__[:2] for m in state["messages"]] == ["Hu", "AI", "To", "AI", "To", "AI"]

    on_virtual_clock(check())


@pytest.mark.parametrize("content", ["", "  \n", [{"type": "text", "text": "", "extras": {"signature": "x"}}], []])
def test_a_reply_that_says_nothing_is_empty_and_names_its_finish_reason(content: Any, on_virtual_clock: Asked) -> None:
    reply = {"content": content, "response_metadata": {"finish_reason": "MAX_TOKENS"}, **used()}
    answer = on_virtual_clock(Conversation(reply).ask())
    assert answer.outcome is Outcome.EMPTY_ANSWER
    assert answer.reason == "the model said nothing; finish reason: max_tokens"


def test_the_step_limit_is_our_own_count_of_model_calls(on_virtual_clock: Asked) -> None:
    replies = [asks(call(call_id=f"c{n}")) for n in range(9)]
    answer = on_virtual_clock(Conversation(*replies, max_steps=3).ask())
    assert (answer.outcome, answer.model_calls) == (Outcome.STEP_LIMIT, 3)
    assert [r.outcome for r in answer.receipts] == ["executed", "executed", "withheld"]


def test_an_answer_in_the_last_step_is_an_answer(on_virtual_clock: Asked) -> None:
    assert on_virtual_clock(Conversation(asks(), says(), max_steps=2).ask()).outcome is Outcome.ANSWERED


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (
            {"invalid_tool_calls": [{"name": "list_ci_jobs", "args": "{pr", "id": "c1"}]},
            "It accepts: pr: integer, attempt",
        ),
        ({"tool_calls": [call("nope\x1b[31m", {})]}, "There is no tool nope\\x1b[31m."),
        (
            {"tool_calls": [call("list_ci_jobs", {"pr": "many"})]},
            "list_ci_jobs accepts: pr: integer, attempt",
        ),
        ({"tool_calls": [call("fetch_job_log", {})]}, "fetch_job_log accepts: job_id: integer, part: string."),
    ],
)
def test_a_call_that_cannot_run_is_explained_and_the_loop_goes_on(
    bad: dict[str, Any], told: str, on_virtual_clock: Asked
) -> None:
    talk = Conversation(bad | used(), asks(), says())
    answer = on_virtual_clock(talk.ask())
    assert (answer.outcome, answer.model_calls) == (Outcome.ANSWERED, 3)
    assert [r.outcome for r in answer.receipts] == [CallOutcome.REFUSED, CallOutcome.EXECUTED]
    assert told in talk.messages[2].text


def test_an_unparsable_call_does_not_keep_its_siblings_from_running(on_virtual_clock: Asked) -> None:
    mixed = asks() | {"invalid_tool_calls": [{"name": "fetch_job_log", "args": "{", "id": "c2"}]}
    answer = on_virtual_clock(Conversation(mixed, says()).ask())
    assert [(r.tool, r.outcome) for r in answer.receipts] == [
        ("list_ci_jobs", "executed"),
        ("fetch_job_log", "refused"),
    ]


def test_an_unknown_pull_request_is_the_tools_failure_and_names_what_there_is(on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation(asks(call(args={"pr": 999})), says()).ask())
    (receipt,) = answer.receipts
    assert (receipt.outcome, receipt.error_type) == (CallOutcome.ERROR, "SourceError")
    assert receipt.reason is not None
    assert receipt.reason.endswith("there is no pull request 999; this source has 415, 416, 417, 418")


def test_a_failing_model_keeps_what_was_known(on_virtual_clock: Asked) -> None:
    answer = on_virtual_clock(Conversation(asks(), {"error": "503 from upstream?key=fakefakefake"}).ask())
    assert answer.outcome is Outcome.MODEL_ERROR
    assert answer.reason is not None
    assert "503 from upstream" in answer.reason
    assert "fakefakefake" not in answer.reason
    assert (answer.known_subtotal, answer.usage_known, len(answer.receipts)) == (10, False, 1)


def test_a_bug_of_ours_is_not_dressed_up_as_the_models(on_virtual_clock: Asked) -> None:
    class Broken(Run):
        def end_model_call(self, call: int, usage: Any, candidate: str | None = None) -> bool:
            raise ZeroDivisionError

    graph = build_graph(ScriptedModel(replies=[says()]), ci_tools(LocalCi()))
    with pytest.raises(ZeroDivisionError):
        on_virtual_clock(ask(graph, QUESTION, run=Broken()))


def test_a_secret_in_the_question_reaches_no_model(on_virtual_clock: OnVirtualClock[None]) -> None:
    @tool
    async def unused() -> str:
        """Nothing."""
        return ""

    async def check() -> None:
        talk = Conversation(says("I was told fake-secret-0123"), tools=[unused])
        run = Run(secrets=frozenset({"fake-secret-0123"}))
        answer = await ask(talk.graph, "use fake-secret-0123", run=run, config=talk.config)
        state = (await talk.graph.aget_state(talk.config)).values
        assert state["messages"][0].text == "use [masked]"
        assert answer.text == "I was told [masked]"

    on_virtual_clock(check())


async def test_a_deadline_that_is_none_is_refused_by_its_name() -> None:
    graph = build_graph(ScriptedModel(replies=[says()]), ci_tools(LocalCi()))
    with pytest.raises(ValueError, match="deadline_s"):
        await ask(graph, QUESTION, deadline_s=0)
