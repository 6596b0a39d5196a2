"""OpenAI's protocol on the wire: what the real SDK makes of good and odd replies, and what it sends, on a loopback."""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from bounded.outcomes import CallOutcome, Outcome
from bounded.usage import judge
from ci import LocalCi
from graph import ask, build_graph
from models.attempts import attempt
from models.conftest import FAKE_KEY, Loopback, Reply, as_json
from models.factory import build_model
from models.failures import ModelFailed, call_model
from models.meter import Levers, Meter, RequestRefused, lacking
from models.openai import openai_model
from models.reply import call_id_fault, finish_reason, text
from sources.jobs import ci_tools

NAME = "openai:gpt-5.1"
COUNTS = {"prompt_tokens": 224, "completion_tokens": 179, "total_tokens": 403}
QUESTION = "Why is CI failing on pull request 415?"
SAID = {"role": "assistant", "content": "Job 812 failed."}
CREATED = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1796000000, "model": "gpt-5.1-2026-02-01"}
HTML = {"content-type": "text/html"}


def completion(message: Any = SAID, *, usage: Any = COUNTS, reason: Any = "stop", **more: Any) -> dict[str, Any]:
    """The body of one reply."""
    return {**CREATED, "choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage, **more}


def calling(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    """The body of a reply that asks for calls; arguments that are no text are written as JSON."""
    asked = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for index, (name, given) in enumerate(calls)
    ]
    return completion({"role": "assistant", "content": content, "tool_calls": asked}, reason="tool_calls")


def build(loopback: Loopback, name: str = NAME) -> Any:
    return build_model(name, model_timeout_s=60.0, environment=loopback.environment)


async def reply_to(loopback: Loopback, body: Any, name: str = NAME) -> AIMessage:
    """What the SDK hands over for one body."""
    loopback.say(body if isinstance(body, Reply) else as_json(body))
    return await call_model(build(loopback, name).bind_tools(ci_tools(LocalCi())), [HumanMessage(QUESTION)])


async def test_reported_counts_are_a_known_total_with_its_cached_and_its_reasoning_part(loopback: Loopback) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 128, "audio_tokens": 0}}
    details["completion_tokens_details"] = {"reasoning_tokens": 170}
    reply = await reply_to(loopback, completion(usage={**COUNTS, **details}))
    usage = judge(reply.usage_metadata)
    assert (usage.total, usage.input, usage.output, usage.thinking) == (403, 224, 179, 170)
    parts = {"input_token_details": {"cache_read": 128}, "output_token_details": {"reasoning": 170}}
    assert reply.usage_metadata == {"input_tokens": 224, "output_tokens": 179, "total_tokens": 403, **parts}
    zero = await reply_to(loopback, completion(usage=dict.fromkeys(COUNTS, 0)))
    assert judge(zero.usage_metadata).total == 0  # reported, and so not missing


@pytest.mark.parametrize(
    ("usage", "handed_on", "fault"),
    [
        (None, None, "no usage was reported"),
        ({}, {}, "no usage was reported"),
        ([], [], "the reported usage is malformed"),
        ("many", "many", "the reported usage is malformed"),
        ({"prompt_tokens": 3}, {"input_tokens": 3}, "the reported total is missing"),
        (
            {**COUNTS, "total_tokens": None},
            {"input_tokens": 224, "output_tokens": 179},
            "the reported total is missing",
        ),
        ({"total_tokens": True}, {"total_tokens": True}, "the reported total is malformed"),
        ({"total_tokens": "9"}, {"total_tokens": "9"}, "the reported total is malformed"),
        ({"total_tokens": 7.0}, {"total_tokens": 7.0}, "the reported total is malformed"),
        ({"total_tokens": -5}, {"total_tokens": -5}, "the reported total is malformed"),
        ({"total_tokens": 2**70}, {"total_tokens": 2**70}, "the reported total is malformed"),
        (
            {**COUNTS, "total_tokens": 0},
            {"input_tokens": 224, "output_tokens": 179, "total_tokens": 0},
            "the reported total is below its parts",
        ),
    ],
)
async def test_nothing_that_was_not_reported_becomes_a_number(
    loopback: Loopback, usage: Any, handed_on: Any, fault: str
) -> None:
    reply = await reply_to(loopback, completion(usage=usage))
    assert repr(reply.usage_metadata) == repr(handed_on)  # 7 and True equal what they are not
    assert (judge(reply.usage_metadata).fault, text(reply)) == (fault, "Job 812 failed.")


async def test_a_reply_without_the_field_has_no_usage_and_details_of_an_odd_shape_are_left_out(
    loopback: Loopback,
) -> None:
    bare = completion()
    del bare["usage"]
    assert (await reply_to(loopback, bare)).usage_metadata is None
    odd = {**COUNTS, "prompt_tokens_details": 5, "completion_tokens_details": {"reasoning_tokens": None}}
    usage = (await reply_to(loopback, completion(usage=odd))).usage_metadata
    assert usage == {"input_tokens": 224, "output_tokens": 179, "total_tokens": 403}


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter", "LENGTH"])
async def test_the_finish_reason_is_known(loopback: Loopback, reason: str) -> None:
    assert finish_reason(await reply_to(loopback, completion(reason=reason))) == reason.lower()


@pytest.mark.parametrize("reason", [None, 5, "", ["stop"]])
async def test_a_finish_reason_that_is_no_word_is_unknown(loopback: Loopback, reason: Any) -> None:
    assert finish_reason(await reply_to(loopback, completion(reason=reason))) is None


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"reasoning": "Let me see."}, "Let me see."),
        ({"reasoning_content": "Let me see."}, "Let me see."),
        ({"reasoning": "Let me see.", "reasoning_content": None}, "Let me see."),
        ({"reasoning": "another", "reasoning_content": "Let me see."}, "Let me see."),
        ({"reasoning": " ", "reasoning_content": ""}, None),
        ({"reasoning": {"effort": "low"}}, None),
        ({"thinking": "Let me see."}, "Let me see."),
        ({}, None),
    ],
)
async def test_reasoning_is_kept_under_one_name_and_is_no_text(loopback: Loopback, fields: Any, kept: Any) -> None:
    reply = await reply_to(loopback, completion({"content": None, **fields}, reason="length"))
    assert (reply.additional_kwargs.get("reasoning_content"), text(reply)) == (kept, "")


@pytest.mark.parametrize("content", ["", " \n", None, [], [{"type": "text", "text": " "}]])
async def test_a_starved_model_says_nothing_by_its_length(loopback: Loopback, content: Any) -> None:
    loopback.say(as_json(completion({"content": content, "reasoning_content": "Let me see."}, reason="length")))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.text, answer.known_subtotal) == (Outcome.EMPTY_ANSWER, "", 403)
    assert answer.reason == "the model said nothing; finish reason: length"


async def test_text_in_blocks_is_text_and_a_block_of_thinking_is_none(loopback: Loopback) -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Let me see."}]}
    blocks = [thinking, {"type": "text", "text": "Job 812 "}, {"type": "text", "text": "failed."}]
    assert text(await reply_to(loopback, completion({"content": blocks}))) == "Job 812 failed."


async def test_a_reply_is_the_models_whatever_role_the_server_gives_it(loopback: Loopback) -> None:
    assert isinstance(await reply_to(loopback, completion({**SAID, "role": "user"})), AIMessage)


async def test_arguments_that_do_not_parse_are_an_unparsable_call_and_the_model_is_told(loopback: Loopback) -> None:
    loopback.say(as_json(calling(("list_ci_jobs", "{broken"))), as_json(completion()))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.receipts[0].outcome) == (Outcome.ANSWERED, CallOutcome.REFUSED)
    assistant, told = loopback.requests[1].json()["messages"][-2:]
    sent = assistant["tool_calls"][0]["function"]
    assert json.loads(sent["arguments"]) == {"unparsable": "{broken"}  # as it was, llama.cpp answers 500 to it
    assert (told["tool_call_id"], "list_ci_jobs was not run" in told["content"]) == ("call_0", True)


@pytest.mark.parametrize("given", ["", "{}", "null"])
async def test_a_call_without_arguments_has_none(loopback: Loopback, given: str) -> None:
    reply = await reply_to(loopback, calling(("list_ci_jobs", given)))
    assert [call["args"] for call in reply.tool_calls] == [{}]


async def test_a_call_without_an_id_is_found(loopback: Loopback) -> None:
    call = {"function": {"name": "list_ci_jobs", "arguments": "{}"}}
    reply = await reply_to(loopback, completion({"content": None, "tool_calls": [call]}))
    assert call_id_fault(reply) == "the model sent a tool call without an id"


ODD_CHOICES: list[Any] = [[], None, "sesame", {}, [None], ["sesame"], [{}]]
ODD_CALLS: list[Any] = [5, "sesame", ["sesame"], [{}], [{"function": None}]]
NO_COMPLETIONS: list[Any] = [5, None, "sesame", ["sesame"], {}, {"object": "sesame"}]
NO_COMPLETIONS += [{**CREATED, "choices": choices} for choices in ODD_CHOICES]
NO_COMPLETIONS += [completion(message) for message in (None, "sesame", 5, ["sesame"])]
NO_COMPLETIONS += [completion({"content": content}) for content in (5, {"sesame": 1}, [5])]
NO_COMPLETIONS += [completion({"tool_calls": calls}) for calls in ODD_CALLS]
NO_COMPLETIONS += [calling(("list_ci_jobs", given)) for given in ("[415]", "5", '"sesame"')]
NO_JSON = [b"<html>sesame</html>", b'{"choices": ["sesame', b'{"sesame": "\xff"}', b"[" * 100_000, b""]


@pytest.mark.parametrize(
    "reply",
    [
        *(Reply(pieces=(body,), headers=HTML) for body in NO_JSON),
        *(as_json(body) for body in NO_COMPLETIONS),
        *(Reply(status=status) for status in (204, 299)),
    ],
)
async def test_what_is_no_completion_is_a_bad_reply_of_which_nothing_is_shown(loopback: Loopback, reply: Reply) -> None:
    with pytest.raises(ModelFailed, match="ReplyUnreadable") as failed:
        await reply_to(loopback, reply)
    assert failed.value.kind == "bad_reply"
    assert "sesame" not in str(failed.value)
    assert getattr(failed.value.__cause__, "status_code", None) == reply.status
    assert len(loopback.requests) == 1


@pytest.mark.parametrize("error", ["sesame", {"message": "sesame", "code": 502}])
async def test_an_error_under_a_success_is_the_providers_failure(loopback: Loopback, error: Any) -> None:
    with pytest.raises(ModelFailed, match="ErrorInReply") as failed:
        await reply_to(loopback, completion(error=error))
    assert (failed.value.kind, "sesame" in str(failed.value)) == ("server_error", False)


@pytest.mark.parametrize("status", [200, 201, 203])
async def test_any_success_is_a_reply_as_for_the_sdk_and_an_attempt_sees_its_status(
    loopback: Loopback, status: int
) -> None:
    loopback.say(as_json(completion(error=None), status=status))
    done = await attempt(build(loopback), [HumanMessage(QUESTION)], bound_s=5.0, on_late=lambda late: None)
    assert (done.has_text, done.http_status, done.trigger) == (True, status, None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(402, "bad_request"), (408, "bad_request"), (409, "bad_request"), (422, "bad_request"), (502, "server_error")],
)
async def test_what_the_sdk_would_retry_is_asked_for_once(loopback: Loopback, status: int, kind: str) -> None:
    headers = {"x-should-retry": "true", "retry-after": "0", **HTML}
    with pytest.raises(ModelFailed, match=str(status)) as failed:
        await reply_to(loopback, Reply(pieces=(b"<html>sesame</html>",), status=status, headers=headers))
    assert (failed.value.kind, "sesame" in str(failed.value)) == (kind, False)
    assert len(loopback.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_refused_and_the_key_goes_nowhere(loopback: Loopback, status: int) -> None:
    loopback.replies.append(Reply(status=status, headers={"location": f"{loopback.url}/elsewhere"}))
    with pytest.raises(ModelFailed, match=str(status)) as failed:
        await reply_to(loopback, completion())
    assert (failed.value.kind, len(loopback.requests)) == ("bad_request", 1)


@pytest.mark.parametrize("name", ["gpt-5-pro", "gpt-6", "gpt-5.3-codex", "o4-mini", "o1", "Qwen/Qwen3-8B"])
async def test_every_name_is_asked_by_chat_completions_in_one_piece(loopback: Loopback, name: str) -> None:
    """By their names the SDK would choose the Responses API for some."""
    loopback.say(as_json(completion()))
    model = build(loopback, f"openai:{name}").bind_tools(ci_tools(LocalCi()))
    chunks = [chunk async for chunk in model.astream([SystemMessage("You find out."), HumanMessage(QUESTION)])]
    assert [chunk.text for chunk in chunks] == ["Job 812 failed."]
    (request,) = loopback.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    sent = request.json()
    temperature = ["temperature"] if name == "o1" else []  # the SDK says the one that this model takes
    assert sorted(sent) == sorted(["messages", "model", "stream", "tools", *temperature])
    assert (sent["model"], sent["stream"]) == (name, False)
    assert "tiktoken_ext.openai_public" not in sys.modules  # what would download a vocabulary


async def test_what_the_sdk_reads_from_the_process_goes_nowhere(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("API_KEY", "ADMIN_KEY", "ORG_ID", "ORGANIZATION", "PROJECT_ID", "WEBHOOK_SECRET"):
        monkeypatch.setenv(f"OPENAI_{setting}", "sesame")
    for setting in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_PROXY", "LANGSMITH_GATEWAY"):
        monkeypatch.setenv(setting, "http://127.0.0.1:9/sesame")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Sesame: open\nAuthorization: Bearer sesame\nHost: sesame")
    monkeypatch.setenv("LC_OUTPUT_VERSION", "responses/v1")
    assert (await reply_to(loopback, completion())).content == "Job 812 failed."
    (request,) = loopback.requests
    assert request.headers["authorization"] == f"Bearer {FAKE_KEY}"
    assert "sesame" not in repr(request).lower()
    assert not any(header.startswith("openai-") for header in request.headers)


async def test_a_server_without_keys_is_sent_a_placeholder(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", FAKE_KEY)
    loopback.say(as_json(completion()))
    environment = {"OPENAI_BASE_URL": f"{loopback.url}/v1/"}
    await call_model(build_model(NAME, model_timeout_s=60.0, environment=environment), [HumanMessage(QUESTION)])
    assert (loopback.requests[0].headers["authorization"], loopback.requests[0].path) == (
        "Bearer none",
        "/v1/chat/completions",
    )


async def test_a_proxy_stands_before_the_provider_and_never_before_this_machine(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, loopback.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    await reply_to(loopback, completion())
    provider = build_model(NAME, model_timeout_s=60.0, environment={"OPENAI_API_KEY": FAKE_KEY})
    with pytest.raises(ModelFailed) as failed:
        await call_model(provider, [HumanMessage(QUESTION)])
    assert failed.value.kind == "unreachable"
    asked = [(request.method, request.path) for request in loopback.requests]
    assert asked == [("POST", "/v1/chat/completions"), ("CONNECT", "api.openai.com:443")]
    assert "authorization" not in loopback.requests[1].headers


class Refusing(ThreadPoolExecutor):
    """Holds what a stuck name lookup may hold."""

    def submit(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the loop's default executor was used")


async def test_a_reply_does_not_wait_for_the_loops_default_executor(loopback: Loopback) -> None:
    asyncio.get_running_loop().set_default_executor(Refusing())
    assert text(await reply_to(loopback, completion())) == "Job 812 failed."


def test_the_synchronous_side_cannot_send(loopback: Loopback) -> None:
    for send in (build(loopback).invoke, lambda asked: list(build(loopback).stream(asked))):
        with pytest.raises(TypeError, match="use ainvoke"):
            send([HumanMessage(QUESTION)])
    assert loopback.requests == []


class Taking:
    """A transport that keeps a request and lets none out."""

    async def handle_async_request(self, request: Any) -> NoReturn:
        self.sent = json.loads(request.content)
        raise RequestRefused("kept")


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("", "max_completion_tokens"),
        ("https://eu.api.openai.com/v1", "max_completion_tokens"),
        ("http://127.0.0.1:8080/v1", "max_tokens"),
        ("https://api.mistral.example/v1", "max_tokens"),
    ],
)
async def test_the_bound_of_the_output_has_the_one_name_that_the_server_knows(address: str, word: str) -> None:
    meter: Any = Taking()
    levers = Levers(meter=meter, max_output_tokens=16, thinking="low", http_timeout_s=2.5, retries=0)
    environment = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": FAKE_KEY}
    with pytest.raises(ModelFailed) as failed:
        await call_model(openai_model("m", timeout_s=5.0, environment=environment, levers=levers), [HumanMessage("?")])
    assert failed.value.kind == "refused"
    assert {key: bound for key, bound in meter.sent.items() if key.startswith("max_")} == {word: 16}


async def test_the_bound_of_the_output_can_be_said_without_levers(loopback: Loopback) -> None:
    loopback.say(as_json(completion()))
    model = openai_model("m", timeout_s=60.0, environment=loopback.environment, max_output_tokens=4096)
    await call_model(model, [HumanMessage(QUESTION)])
    assert loopback.requests[0].json()["max_tokens"] == 4096


async def test_a_probe_is_metered_and_a_request_too_many_is_refused(loopback: Loopback) -> None:
    facts: list[Any] = []
    meter = Meter(facts.append, allowed=1)
    levers = Levers(meter=meter, max_output_tokens=16, thinking="low", http_timeout_s=2.5, retries=0)
    loopback.say(as_json(completion()))
    model = build_model(NAME, model_timeout_s=60.0, environment=loopback.environment, levers=levers)
    await call_model(model, [HumanMessage(QUESTION)])
    with pytest.raises(ModelFailed, match="1 requests may leave this process") as failed:
        await call_model(model, [HumanMessage(QUESTION)])
    assert (failed.value.kind, len(loopback.requests)) == ("refused", 1)
    assert [(seen["status"], seen["error_class"]) for seen in facts] == [(200, None), (None, "RequestRefused")]
    assert loopback.requests[0].headers["x-stainless-read-timeout"] == "2.5"
    assert lacking(NAME) == {"token_count", "thinking"}


async def test_one_question_goes_through_the_graph_with_calls_and_results_sent_back(loopback: Loopback) -> None:
    both = calling(("fetch_job_log", {"job_id": 812}), ("fetch_job_log", {"job_id": 1}), content="I fetch both.")
    loopback.say(as_json(calling(("list_ci_jobs", {"pr": 415}))), as_json(both), as_json(completion()))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.text, answer.known_subtotal) == (Outcome.ANSWERED, "Job 812 failed.", 3 * 403)
    outcomes = [(receipt.tool, receipt.outcome) for receipt in answer.receipts]
    assert outcomes == [
        ("list_ci_jobs", CallOutcome.EXECUTED),
        ("fetch_job_log", CallOutcome.EXECUTED),
        ("fetch_job_log", CallOutcome.ERROR),
    ]
    sent = loopback.requests[-1].json()["messages"]
    roles = "system user assistant tool assistant tool tool"
    assert " ".join(message["role"] for message in sent) == roles
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"pr": 415}'
    assert [call["id"] for call in sent[4]["tool_calls"]] == [message["tool_call_id"] for message in sent[5:]]
    assert "assert 2268 == 2520" in sent[5]["content"]


async def test_a_reply_without_a_total_stops_the_run_and_keeps_what_is_known(loopback: Loopback) -> None:
    second = {**calling(("fetch_job_log", {"job_id": 812})), "usage": {"prompt_tokens": 3}}
    loopback.say(as_json(calling(("list_ci_jobs", {"pr": 415}))), as_json(second))
    answer = await ask(build_graph(build(loopback), ci_tools(LocalCi())), QUESTION)
    assert (answer.outcome, answer.known_subtotal, answer.usage_known) == (Outcome.MISSING_USAGE, 403, False)
    assert len(loopback.requests) == 2
