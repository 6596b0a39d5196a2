"""Gemini on the wire: what the real SDK makes of good and odd replies, and what it sends back, against a loopback."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage

from bounded.outcomes import CallOutcome, Outcome
from bounded.run import Run
from bounded.usage import judge
from ci import LocalCi
from graph import ask, build_graph
from models.conftest import FAKE_KEY, Loopback, Reply, as_json
from models.factory import build_model
from models.failures import ModelFailed, call_model
from models.reply import call_id_fault, finish_reason, requested_calls, text
from sources.jobs import ci_tools

NAME = "gemini-3.8-flash"
COUNTS = {"promptTokenCount": 224, "candidatesTokenCount": 179, "totalTokenCount": 403}
HELLO = {"text": "Job 812 failed."}
QUESTION = "Why is CI failing on pull request 415?"


def said(
    *parts: Mapping[str, Any], usage: Any = COUNTS, finish: str | None = "STOP", model: str = NAME
) -> dict[str, Any]:
    """One response of generateContent."""
    candidate = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    response = {"candidates": [candidate], "modelVersion": model}
    return response if usage is None else {**response, "usageMetadata": usage}


def calling(name: str, signature: str | None = None, **call: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"functionCall": {"name": name, **call}}
    return part if signature is None else {**part, "thoughtSignature": signature}


async def reply_to(loopback: Loopback, response: Any) -> AIMessage:
    """What the SDK hands over for one response."""
    loopback.say(as_json(response))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    return await call_model(model.bind_tools(ci_tools(LocalCi())), [HumanMessage(QUESTION)])


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        pytest.param(COUNTS, 403, id="the ordinary"),
        pytest.param(
            {"promptTokenCount": 40, "candidatesTokenCount": 6, "thoughtsTokenCount": 344, "totalTokenCount": 390},
            390,
            id="thoughts beside the answer",
        ),
        pytest.param(
            {"promptTokenCount": 40, "candidatesTokenCount": 6, "totalTokenCount": 390},
            390,
            id="a total above its parts",
        ),
        pytest.param({"promptTokenCount": 10, "thoughtsTokenCount": 20, "totalTokenCount": 30}, 30, id="thoughts only"),
        pytest.param({"totalTokenCount": 5}, 5, id="a total alone"),
        pytest.param({**COUNTS, "totalTokenCount": "403"}, 403, id="digits, which the SDK reads itself"),
    ],
)
async def test_a_reported_total_is_known(loopback: Loopback, counts: Any, total: int) -> None:
    usage = judge((await reply_to(loopback, said(HELLO, usage=counts))).usage_metadata)
    assert (usage.total, usage.fault) == (total, None)


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        pytest.param(None, "no usage was reported", id="none"),
        pytest.param({}, "no usage was reported", id="an empty object"),
        pytest.param(
            dict.fromkeys(COUNTS, 0), "no usage was reported", id="all zero, which the adapter takes for none"
        ),
        pytest.param({**COUNTS, "totalTokenCount": None}, "the reported total is below its parts", id="a null total"),
        pytest.param(
            {"promptTokenCount": 224, "candidatesTokenCount": 179},
            "the reported total is below its parts",
            id="no total, of which the adapter makes 0",
        ),
        pytest.param({**COUNTS, "totalTokenCount": True}, "the reported total is below its parts", id="a true total"),
        pytest.param({**COUNTS, "totalTokenCount": -5}, "the reported total is malformed", id="a negative total"),
        pytest.param({**COUNTS, "totalTokenCount": 402}, "the reported total is below its parts", id="one short"),
    ],
)
async def test_what_nobody_reported_is_unknown(loopback: Loopback, counts: Any, fault: str) -> None:
    reply = await reply_to(loopback, said(HELLO, usage=counts))
    usage = judge(reply.usage_metadata)
    assert (usage.total, usage.fault, usage.storable()) == (None, fault, None)
    assert text(reply) == HELLO["text"]


async def test_a_zero_that_the_adapter_makes_beside_a_cache_count_is_unknown(loopback: Loopback) -> None:
    reply = await reply_to(loopback, said(HELLO, usage={"cachedContentTokenCount": 5}))
    assert judge(reply.usage_metadata).total is None


@pytest.mark.parametrize("count", ["many", 403.5, [], {}])
async def test_a_count_that_the_sdk_cannot_read_fails_the_call(loopback: Loopback, count: Any) -> None:
    with pytest.raises(ModelFailed) as failed:
        await reply_to(loopback, said(HELLO, usage={**COUNTS, "totalTokenCount": count}))
    assert failed.value.kind == "bad_reply"


async def test_a_blocked_prompt_says_nothing_and_its_count_is_lost_by_the_adapter(loopback: Loopback) -> None:
    counts = {"promptTokenCount": 10, "totalTokenCount": 10}
    reply = await reply_to(loopback, {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": counts})
    assert (text(reply), reply.tool_calls, finish_reason(reply)) == ("", [], None)
    assert judge(reply.usage_metadata).fault == "no usage was reported"


@pytest.mark.parametrize("reply", [Reply(), as_json({}), as_json({"error": {"code": 500, "message": "boom"}})])
async def test_a_200_that_holds_no_candidate_is_a_reply_without_words_and_without_usage(
    loopback: Loopback, reply: Reply
) -> None:
    """The adapter says nothing of it: unknown usage is what stops the run."""
    loopback.say(reply)
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    answer = await ask(build_graph(model, ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.text, answer.usage_known) == (Outcome.MISSING_USAGE, "", False)
    assert len(loopback.requests) == 1


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("STOP", "stop"),
        ("MAX_TOKENS", "max_tokens"),
        ("SAFETY", "safety"),
        ("MALFORMED_FUNCTION_CALL", "malformed_function_call"),
        (None, None),
    ],
)
async def test_the_finish_reason_is_read(loopback: Loopback, sent: str | None, read: str | None) -> None:
    assert finish_reason(await reply_to(loopback, said(finish=sent))) == read


async def test_a_finish_reason_that_the_sdk_does_not_know_is_left_as_it_is(loopback: Loopback) -> None:
    with pytest.warns(UserWarning, match="not a valid FinishReason"):
        reply = await reply_to(loopback, said(HELLO, finish="TIRED"))
    assert finish_reason(reply) == "tired"


async def test_blocks_that_are_truthy_and_say_nothing_have_no_text(loopback: Loopback) -> None:
    thinking = {"text": "Let me see.", "thought": True}
    reply = await reply_to(loopback, said(thinking, {"text": "", "thoughtSignature": "c2ln"}, finish="MAX_TOKENS"))
    assert isinstance(reply.content, list)
    assert reply.content
    assert text(reply) == ""


async def test_text_is_read_from_blocks_without_what_was_only_thought(loopback: Loopback) -> None:
    parts: tuple[dict[str, Any], ...] = ({"text": "Hm.", "thought": True}, {"text": " Job 812"}, {"text": " failed.\n"})
    assert text(await reply_to(loopback, said(*parts))) == "Job 812 failed."


async def test_text_of_an_older_model_is_read_from_a_string(loopback: Loopback) -> None:
    reply = await reply_to(loopback, said(HELLO, model="gemini-2.5-flash"))
    assert (reply.content, text(reply)) == (HELLO["text"], HELLO["text"])


async def test_calls_without_an_id_get_one_each_and_an_id_of_the_service_is_kept(loopback: Loopback) -> None:
    same = calling("list_ci_jobs", args={"pr": 415})
    reply = await reply_to(loopback, said(same, same, calling("list_ci_jobs", args={"pr": 416}, id="theirs")))
    assert call_id_fault(reply) is None
    assert reply.tool_calls[2]["id"] == "theirs"


async def test_an_id_that_the_service_repeats_is_seen(loopback: Loopback) -> None:
    same = calling("list_ci_jobs", args={"pr": 415}, id="theirs")
    assert call_id_fault(await reply_to(loopback, said(same, same))) == "the model sent two tool calls with the same id"


@pytest.mark.parametrize(
    ("call", "name", "args"),
    [
        ({"args": {"pr": 415.0}}, "list_ci_jobs", {"pr": 415}),
        ({"args": None}, "list_ci_jobs", {}),
        ({}, "list_ci_jobs", {}),
        ({"name": "nope\x1b[31m"}, "nope\x1b[31m", {}),
        ({"name": None}, "", {}),
    ],
)
async def test_a_call_is_handed_over_as(loopback: Loopback, call: Any, name: str, args: dict[str, Any]) -> None:
    (made,) = (await reply_to(loopback, said(calling(**{"name": "list_ci_jobs", **call})))).tool_calls
    assert (made["name"], made["args"]) == (name, args)


@pytest.mark.parametrize("args", ["{broken", '{"pr": 415}', [415], 415])
async def test_arguments_that_are_no_object_fail_the_call_and_never_come_out_as_an_unparsable_one(
    loopback: Loopback, args: Any
) -> None:
    with pytest.raises(ModelFailed) as failed:
        await reply_to(loopback, said(calling("list_ci_jobs", args=args)))
    assert failed.value.kind == "bad_reply"


async def test_a_malformed_call_is_an_empty_answer_that_names_its_finish_reason(loopback: Loopback) -> None:
    loopback.say(as_json(said(finish="MALFORMED_FUNCTION_CALL")))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    answer = await ask(build_graph(model, ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.known_subtotal) == (Outcome.EMPTY_ANSWER, 403)
    assert "malformed_function_call" in (answer.reason or "")


async def test_the_answer_to_an_unparsable_call_is_dropped_by_the_adapter(loopback: Loopback) -> None:
    """Nothing of it reaches the model: only a history from elsewhere can hold such a call."""
    loopback.say(as_json(said(HELLO)))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    fault = "list_ci_jobs was not run: its arguments are not a JSON object."
    unparsable = {"type": "invalid_tool_call", "name": "list_ci_jobs", "args": "{broken", "id": "c1", "error": None}
    call = AIMessage("", invalid_tool_calls=[unparsable])
    assert list(requested_calls(call))
    await call_model(model, [HumanMessage(QUESTION), call, ToolMessage(fault, tool_call_id="c1", status="error")])
    (asked,) = loopback.requests
    assert [content["role"] for content in asked.json()["contents"]] == ["user", "model"]
    assert fault not in asked.body.decode()


async def test_one_question_goes_through_the_graph_and_thought_signatures_go_back_unchanged(
    loopback: Loopback,
) -> None:
    first = [
        {"text": "", "thoughtSignature": "dGV4dA=="},
        calling("list_ci_jobs", signature="Zmlyc3Q=", args={"pr": 415}, id="theirs"),
    ]
    second = [
        calling("fetch_job_log", signature="c2Vjb25k", args={"job_id": 812}),
        calling("fetch_job_log", args={"job_id": 810}),  # the service signs the first of several only
    ]
    loopback.say(*(as_json(said(*parts)) for parts in (first, second, [HELLO])))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)

    answer = await ask(build_graph(model, ci_tools(LocalCi())), QUESTION)

    assert (answer.outcome, answer.text, answer.model_calls) == (Outcome.ANSWERED, HELLO["text"], 3)
    assert (answer.known_subtotal, answer.usage_known) == (3 * 403, True)
    assert [(r.tool, r.args, r.outcome) for r in answer.receipts] == [
        ("list_ci_jobs", {"pr": 415}, CallOutcome.EXECUTED),
        ("fetch_job_log", {"job_id": 812}, CallOutcome.EXECUTED),
        ("fetch_job_log", {"job_id": 810}, CallOutcome.EXECUTED),
    ]
    user, model_1, tool_1, model_2, tool_2 = loopback.requests[-1].json()["contents"]
    assert user["parts"] == [{"text": QUESTION}]
    assert [part.get("thoughtSignature") for part in model_1["parts"]] == ["dGV4dA==", "Zmlyc3Q="]
    assert [part.get("thoughtSignature") for part in model_2["parts"]] == ["c2Vjb25k", None]
    assert [part["functionCall"]["args"] for part in model_2["parts"]] == [{"job_id": 812}, {"job_id": 810}]
    assert "job 812: failed, unit tests" in json.dumps(tool_1)
    assert [part["functionResponse"]["name"] for part in tool_2["parts"]] == ["fetch_job_log", "fetch_job_log"]
    assert "assert 2268 == 2520" in json.dumps(tool_2["parts"][0])


async def test_a_later_reply_without_a_total_stops_the_run_and_keeps_what_is_known(loopback: Loopback) -> None:
    parts = {"promptTokenCount": 300, "candidatesTokenCount": 9}
    loopback.say(as_json(said(calling("list_ci_jobs", args={"pr": 415}))), as_json(said(HELLO, usage=parts)))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    answer = await ask(build_graph(model, ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.text) == (Outcome.MISSING_USAGE, HELLO["text"])
    assert (answer.known_subtotal, answer.usage_known) == (403, False)
    assert len(loopback.requests) == 2


def streamed(*responses: Any) -> Reply:
    pieces = tuple(b"data: " + json.dumps(response).encode() + b"\r\n\r\n" for response in responses)
    return Reply(pieces=pieces, headers={"content-type": "text/event-stream"})


async def test_streamed_counts_are_cumulative_and_only_the_merged_message_counts(loopback: Loopback) -> None:
    earlier = said({"text": "Job "}, usage={"promptTokenCount": 10, "candidatesTokenCount": 1, "totalTokenCount": 11})
    later = said({"text": "812"}, usage={"promptTokenCount": 8, "candidatesTokenCount": 4, "totalTokenCount": 12})
    loopback.say(streamed(earlier, later))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    chunks = [chunk async for chunk in model.astream(QUESTION) if isinstance(chunk, AIMessageChunk)]
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged = merged + chunk
    assert min((chunk.usage_metadata or {"input_tokens": 0})["input_tokens"] for chunk in chunks) == -2
    assert judge(merged.usage_metadata).total == 12
    assert (merged.response_metadata["finish_reason"], finish_reason(merged)) == ("STOPSTOP", "stop")
    assert text(merged) == "Job 812"


async def test_a_graph_that_is_streamed_charges_the_merged_reply_once(loopback: Loopback) -> None:
    """Under `stream_mode="messages"` langchain-core streams where it would have asked for one whole reply."""
    earlier = said({"text": "Job "}, usage={"promptTokenCount": 10, "totalTokenCount": 10}, finish=None)
    loopback.say(streamed(earlier, said({"text": "812"}, usage={**COUNTS})))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    run = Run()
    start: Any = {"messages": [HumanMessage(QUESTION)]}
    async for _ in build_graph(model, []).astream(start, context=run, stream_mode="messages"):
        pass
    assert (run.outcome, run.text, run.usage.known_subtotal) == (Outcome.ANSWERED, "Job 812", 403)
    (request,) = loopback.requests
    assert request.path.endswith(f"/models/{NAME}:streamGenerateContent?alt=sse")


@pytest.mark.parametrize(
    ("model_timeout_s", "header"), [(5.0, "10"), (10.0, "10"), (60.0, "60"), (60.5, "61"), (None, None)]
)
async def test_the_provider_is_told_the_timeout_and_never_one_below_its_minimum(
    loopback: Loopback, model_timeout_s: float | None, header: str | None
) -> None:
    loopback.say(as_json(said(HELLO)))
    model = build_model(NAME, model_timeout_s=model_timeout_s, environment=loopback.environment)
    await call_model(model, [HumanMessage(QUESTION)])
    assert loopback.requests[0].headers.get("x-server-timeout") == header


async def test_the_key_does_not_follow_a_redirect(loopback: Loopback) -> None:
    elsewhere = f"{loopback.url.replace('127.0.0.1', 'localhost')}/elsewhere"
    loopback.say(Reply(status=307, headers={"location": elsewhere}), as_json(said(HELLO)))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment)
    with pytest.raises(ModelFailed):
        await call_model(model, [HumanMessage(QUESTION)])
    assert len(loopback.requests) == 1


async def test_the_key_goes_to_the_developer_api_whatever_cloud_settings_stand_around(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "GEMINI_API_KEY": "another-fake-key",
        "GOOGLE_CLOUD_PROJECT": "a-project",
        "GOOGLE_CLOUD_LOCATION": "europe-west4",
        "GOOGLE_GENAI_USE_VERTEXAI": "false",
        "GOOGLE_GENAI_USE_ENTERPRISE": "0",
        "LANGSMITH_GATEWAY": "no",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    loopback.say(as_json(said(HELLO)))
    model = build_model(NAME, model_timeout_s=60.0, environment={**settings, **loopback.environment})
    await call_model(model, [HumanMessage(QUESTION)])
    (request,) = loopback.requests
    assert request.method == "POST"
    assert request.path.endswith(f"/models/{NAME}:generateContent")
    assert request.headers["x-goog-api-key"] == FAKE_KEY


async def test_a_proxy_does_not_stand_before_this_machine(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    loopback.say(as_json(said({"text": "Job 812 failed."})))
    own = {**loopback.environment, "GOOGLE_GEMINI_BASE_URL": loopback.url}
    model = build_model("gemini-3.8-flash", model_timeout_s=60.0, environment=own)
    assert text(await call_model(model, [HumanMessage(QUESTION)])) == "Job 812 failed."
