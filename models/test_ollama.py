"""Ollama on the wire: what the real SDK makes of good and odd streams, and what it sends back, against a loopback."""

from collections.abc import Mapping
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome
from bounded.usage import judge
from ci import LocalCi
from graph import ask, build_graph
from models.conftest import FAKE_KEY, Loopback, Reply, as_json
from models.factory import SetUpMissing, build_model
from models.failures import ModelFailed, call_model
from models.reply import call_id_fault, finish_reason, text, written_call
from sources.jobs import ci_tools

NAME = "gemma4:e2b"
COUNTS = {"prompt_eval_count": 224, "eval_count": 179}
QUESTION = "Why is CI failing on pull request 415?"
TOOLS = ["list_ci_jobs", "fetch_job_log"]


def part(content: str = "", **message: Any) -> dict[str, Any]:
    """One line of a stream that goes on."""
    said = {"role": "assistant", "content": content, **message}
    return {"model": NAME, "created_at": "2026-11-27T09:14:02.118431Z", "message": said, "done": False}


def last(content: str = "", *, reason: str = "stop", counts: Mapping[str, Any] = COUNTS) -> dict[str, Any]:
    """The line that ends a stream."""
    durations = {"total_duration": 9, "load_duration": 1, "prompt_eval_duration": 3, "eval_duration": 5}
    return {**part(content), "done": True, "done_reason": reason, **durations, **counts}


def calling(*calls: tuple[str, Any]) -> dict[str, Any]:
    return part(tool_calls=[{"function": {"name": name, "arguments": arguments}} for name, arguments in calls])


def build(loopback: Loopback) -> Any:
    return build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)


async def reply_to(loopback: Loopback, *lines: Any) -> AIMessage:
    """What the SDK hands over for one stream."""
    loopback.say(as_json(*lines))
    return await call_model(build(loopback).bind_tools(ci_tools(LocalCi())), [HumanMessage(QUESTION)])


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        (COUNTS, 403),
        ({"prompt_eval_count": 0, "eval_count": 0}, 0),  # reported, and so not missing
        ({"prompt_eval_count": "224", "eval_count": 179.0}, 403),  # the SDK reads these itself
    ],
)
async def test_reported_counts_are_a_known_total(loopback: Loopback, counts: Any, total: int) -> None:
    usage = judge((await reply_to(loopback, part("Job 812 "), last("failed.", counts=counts))).usage_metadata)
    assert (usage.total, usage.fault) == (total, None)


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        pytest.param({}, "no usage was reported", id="none"),
        pytest.param({"eval_count": 179}, "no usage was reported", id="no count of a cached prompt"),
        pytest.param({"prompt_eval_count": 224}, "no usage was reported", id="no count of the answer"),
        pytest.param({**COUNTS, "eval_count": None}, "no usage was reported", id="null"),
        pytest.param({"prompt_eval_count": -3, "eval_count": 2}, "the reported total is malformed", id="-3 and 2"),
    ],
)
async def test_what_nobody_reported_is_unknown(loopback: Loopback, counts: Any, fault: str) -> None:
    reply = await reply_to(loopback, part("Job 812 "), last("failed.", counts=counts))
    usage = judge(reply.usage_metadata)
    assert (usage.total, usage.fault, usage.storable()) == (None, fault, None)
    assert text(reply) == "Job 812 failed."


async def test_a_stream_that_ends_before_it_is_done_has_text_but_no_usage_and_no_reason(loopback: Loopback) -> None:
    reply = await reply_to(loopback, part("Job 812 "), part("fai"))
    assert (text(reply), finish_reason(reply), judge(reply.usage_metadata).total) == ("Job 812 fai", None, None)


@pytest.mark.parametrize("count", ["many", 2.5, [], {}])
async def test_a_count_that_the_sdk_cannot_read_fails_the_call(loopback: Loopback, count: Any) -> None:
    with pytest.raises(ModelFailed) as failed:
        await reply_to(loopback, last("Job 812 failed.", counts={**COUNTS, "eval_count": count}))
    assert failed.value.kind == "bad_reply"


async def test_a_reply_that_only_loaded_the_model_is_a_bad_reply(loopback: Loopback) -> None:
    with pytest.raises(ModelFailed, match="No data received") as failed:
        await reply_to(loopback, last(reason="load", counts={}))
    assert failed.value.kind == "bad_reply"


@pytest.mark.parametrize("said_before", [(), (part("Job 812 "),)])
async def test_an_error_in_the_stream_fails_the_call(loopback: Loopback, said_before: tuple[Any, ...]) -> None:
    with pytest.raises(ModelFailed, match="out of memory") as failed:
        await reply_to(loopback, *said_before, {"error": "out of memory"})
    assert failed.value.kind == "server_error"


async def test_a_stream_that_breaks_off_inside_a_line_fails_the_call(loopback: Loopback) -> None:
    whole = as_json(part("Job 812 "))
    loopback.say(Reply(pieces=(*whole.pieces, b'{"message": {"rol')))
    with pytest.raises(ModelFailed) as failed:
        await call_model(build(loopback), [HumanMessage(QUESTION)])
    assert failed.value.kind == "bad_reply"


async def test_a_model_that_is_not_there_is_not_found_and_the_message_says_how_to_pull(loopback: Loopback) -> None:
    loopback.say(as_json({"error": f"model '{NAME}' not found"}, status=404))
    with pytest.raises(ModelFailed, match="ollama pull") as failed:
        await call_model(build(loopback), [HumanMessage(QUESTION)])
    assert failed.value.kind == "not_found"


async def test_rambling_until_the_cap_is_seen_by_its_done_reason(loopback: Loopback) -> None:
    ramble = [part("The job failed because the job failed. ") for _ in range(50)]
    reply = await reply_to(
        loopback, *ramble, last(reason="length", counts={"prompt_eval_count": 224, "eval_count": 2048})
    )
    assert finish_reason(reply) == "length"
    assert text(reply).endswith("the job failed.")
    assert judge(reply.usage_metadata).total == 224 + 2048


async def test_a_starved_reasoning_model_shows_no_thinking_only_length_and_a_count(loopback: Loopback) -> None:
    loopback.say(as_json(part(thinking="Let me see."), last(reason="length")))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.text, answer.known_subtotal) == (Outcome.EMPTY_ANSWER, "", 403)
    assert answer.reason == "the model said nothing; finish reason: length"


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        ('{"name": "fetch_job_log", "arguments": {"job_id": 815}}', "fetch_job_log"),
        ('```json\n{"name": "list_ci_jobs", "arguments": {"pr": 415}}\n```', "list_ci_jobs"),
        ('```\n{"name": "list_ci_jobs", "arguments": {"pr": 415}}\n```', "list_ci_jobs"),
        ('{"name": "rm_rf", "arguments": {}}', None),
        ("Job 812 failed.", None),
    ],
)
async def test_a_call_that_is_written_as_text_is_found(loopback: Loopback, content: str, tool: str | None) -> None:
    """In a stream the text comes in pieces, and the SDK makes no call of it."""
    half = len(content) // 2
    reply = await reply_to(loopback, part(content[:half]), part(content[half:]), last())
    assert (reply.tool_calls, text(reply)) == ([], content)
    assert written_call(reply, TOOLS) == tool


async def test_a_written_call_is_shown_as_the_answer_that_it_is_and_named_in_the_reason(loopback: Loopback) -> None:
    written = '{"name": "fetch_job_log", "arguments": {"job_id": 815}}'
    loopback.say(as_json(last(written)))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.text, answer.receipts) == (Outcome.ANSWERED, written, ())
    assert "fetch_job_log as text" in (answer.reason or "")


async def test_the_same_call_twice_in_one_reply_has_two_ids(loopback: Loopback) -> None:
    same = ("list_ci_jobs", {"pr": 415})
    reply = await reply_to(loopback, calling(same, same), last())
    assert len(reply.tool_calls) == 2
    assert call_id_fault(reply) is None


async def test_calls_that_come_in_several_parts_are_all_handed_over(loopback: Loopback) -> None:
    first, second = calling(("list_ci_jobs", {"pr": 415})), calling(("fetch_job_log", {"job_id": 812}))
    reply = await reply_to(loopback, part("I look."), first, second, last())
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [
        ("list_ci_jobs", {"pr": 415}),
        ("fetch_job_log", {"job_id": 812}),
    ]
    assert call_id_fault(reply) is None


async def test_a_call_repeated_for_ever_ends_at_the_step_limit_with_a_receipt_for_each(loopback: Loopback) -> None:
    loopback.say(*[as_json(calling(("list_ci_jobs", {"pr": 415})), last()) for _ in range(3)])
    graph = build_graph(build(loopback), ci_tools(LocalCi()), limits=Limits(max_steps=3))
    answer = await ask(graph, QUESTION)
    assert (answer.outcome, answer.model_calls, len(loopback.requests)) == (Outcome.STEP_LIMIT, 3, 3)
    outcomes = [receipt.outcome for receipt in answer.receipts]
    assert outcomes == [CallOutcome.EXECUTED, CallOutcome.EXECUTED, CallOutcome.WITHHELD]
    assert len({receipt.call_id for receipt in answer.receipts}) == 3


@pytest.mark.parametrize("arguments", ["{broken", '{"pr": 415}', [415], None])
async def test_arguments_that_are_no_object_fail_the_call_and_never_come_out_as_an_unparsable_one(
    loopback: Loopback, arguments: Any
) -> None:
    with pytest.raises(ModelFailed) as failed:
        await reply_to(loopback, calling(("list_ci_jobs", arguments)), last())
    assert failed.value.kind == "bad_reply"


@pytest.mark.parametrize("broken", [{}, {"function": {"name": "list_ci_jobs"}}, {"function": {"arguments": {}}}])
async def test_a_call_without_its_parts_fails_the_call(loopback: Loopback, broken: Any) -> None:
    with pytest.raises(ModelFailed) as failed:
        await reply_to(loopback, part(tool_calls=[broken]), last())
    assert failed.value.kind == "bad_reply"


async def test_an_unparsable_call_is_dropped_by_the_adapter_and_its_answer_is_sent(loopback: Loopback) -> None:
    """So the answer has to stand on its own."""
    loopback.say(as_json(last("Job 812 failed.")))
    fault = "list_ci_jobs was not run: its arguments are not a JSON object. It accepts: pr: integer."
    unparsable = {"type": "invalid_tool_call", "name": "list_ci_jobs", "args": "{broken", "id": "c1", "error": None}
    call = AIMessage("", invalid_tool_calls=[unparsable])
    history = [HumanMessage(QUESTION), call, ToolMessage(fault, tool_call_id="c1", status="error")]
    await call_model(build(loopback), history)
    _, assistant, tool = loopback.requests[0].json()["messages"]
    assert "tool_calls" not in assistant
    assert (tool["role"], tool["content"]) == ("tool", fault)


async def test_an_unknown_tool_named_with_an_escape_is_refused_and_echoed_safely(loopback: Loopback) -> None:
    loopback.say(as_json(calling(("nope\x1b[31m", {})), last()), as_json(last("Sorry.")))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.receipts[0].outcome) == (Outcome.ANSWERED, CallOutcome.REFUSED)
    assert answer.receipts[0].tool == "nope\\x1b[31m"
    assert "\x1b" not in loopback.requests[1].json()["messages"][-1]["content"]


async def test_one_question_goes_through_the_graph_with_calls_and_results_sent_back(loopback: Loopback) -> None:
    loopback.say(
        as_json(calling(("list_ci_jobs", {"pr": "415"})), last()),  # a number as text, as small models write it
        as_json(
            part("I fetch both."), calling(("fetch_job_log", {"job_id": 812}), ("fetch_job_log", {"job_id": 1})), last()
        ),
        as_json(part("Job 812 "), part("failed."), last()),
    )
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)

    assert (answer.outcome, answer.text, answer.model_calls) == (Outcome.ANSWERED, "Job 812 failed.", 3)
    assert (answer.known_subtotal, answer.usage_known) == (3 * 403, True)
    assert [(r.tool, r.args, r.outcome) for r in answer.receipts] == [
        ("list_ci_jobs", {"pr": "415"}, CallOutcome.EXECUTED),
        ("fetch_job_log", {"job_id": 812}, CallOutcome.EXECUTED),
        ("fetch_job_log", {"job_id": 1}, CallOutcome.ERROR),
    ]
    sent = loopback.requests[-1].json()
    assert (loopback.requests[-1].path, sent["model"], sent["options"]) == ("/api/chat", NAME, {"temperature": 0.0})
    assert [tool["function"]["name"] for tool in sent["tools"]] == TOOLS
    assert [message["role"] for message in sent["messages"]] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "tool")
    ]
    assistant = sent["messages"][4]
    assert assistant["content"] == "I fetch both."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"job_id": 812}, {"job_id": 1}]
    assert "job 812: failed, unit tests" in sent["messages"][3]["content"]
    assert "assert 2268 == 2520" in sent["messages"][5]["content"]
    assert "there is no job 1; this source has" in sent["messages"][6]["content"]


async def test_a_later_reply_without_usage_stops_the_run_and_keeps_what_is_known(loopback: Loopback) -> None:
    loopback.say(
        as_json(calling(("list_ci_jobs", {"pr": 415})), last()),
        as_json(calling(("fetch_job_log", {"job_id": 812})), last(counts={"eval_count": 20})),
    )
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.known_subtotal, answer.usage_known) == (Outcome.MISSING_USAGE, 403, False)
    assert [receipt.outcome for receipt in answer.receipts] == [CallOutcome.EXECUTED, CallOutcome.WITHHELD]
    assert len(loopback.requests) == 2


async def test_a_second_call_that_fails_is_a_model_error_and_keeps_what_is_known(loopback: Loopback) -> None:
    loopback.say(as_json(calling(("list_ci_jobs", {"pr": 415})), last()), Reply(status=500))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.known_subtotal, answer.usage_known) == (Outcome.MODEL_ERROR, 403, False)


@pytest.mark.parametrize("form", ["{url}", "{url}/", "{bare}"])
async def test_the_host_is_honoured_in_the_forms_that_users_write(loopback: Loopback, form: str) -> None:
    host = form.format(url=loopback.url, bare=loopback.url.removeprefix("http://"))
    loopback.say(as_json(last("Job 812 failed.")))
    model = build_model(NAME, model_timeout_s=60.0, environment={"OLLAMA_HOST": host})
    await call_model(model, [HumanMessage(QUESTION)])
    assert [request.path for request in loopback.requests] == ["/api/chat"]


async def test_the_key_that_the_package_finds_is_sent_only_where_its_caller_has_it(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_API_KEY", FAKE_KEY)
    await reply_to(loopback, last("x"))
    assert "authorization" not in loopback.requests[-1].headers
    loopback.say(as_json(last("x")))
    own = {**loopback.environment, "OLLAMA_API_KEY": FAKE_KEY}
    await call_model(build_model(NAME, model_timeout_s=60.0, environment=own), [HumanMessage(QUESTION)])
    assert loopback.requests[-1].headers["authorization"] == f"Bearer {FAKE_KEY}"


@pytest.mark.parametrize("host", ["http://[v1.x]", "http://。", f"http://{'a' * 70_000}"])
def test_a_host_that_no_client_takes_is_no_address(host: str) -> None:
    with pytest.raises(SetUpMissing, match="OLLAMA_HOST is not an address"):
        build_model(NAME, model_timeout_s=60.0, environment={"OLLAMA_HOST": host})


async def test_a_proxy_of_this_machine_does_not_stand_between(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert text(await reply_to(loopback, last("Job 812 failed."))) == "Job 812 failed."
