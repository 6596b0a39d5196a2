"""A pool on the wire: real SDKs against a loopback server, which key goes to whom, and how a failover looks there."""

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest
from langchain_google_genai.data._profiles import _PROFILES

from bounded.outcomes import Outcome
from bounded.run import Answer, Event, Run
from ci import LocalCi
from graph import ask, build_graph
from models.catalogue import Candidate
from models.conftest import FAKE_KEY, Ending, Loopback, Reply, Request, as_json
from models.pool import Pool
from models.readiness import NoneReady, Report
from models.test_gemini import HELLO, calling, said
from models.test_ollama import last, part
from models.test_openai import calling as openai_calling
from models.test_openai import completion
from models.test_readiness import candidate
from sources.jobs import ci_tools

QUESTION = "Why is CI failing on pull request 415?"
ENVIRONMENT_KEY = "fake-key-of-the-environment"
READY = {"ready": True}
# What a healthy server says to a base probe, to the question for a tool call, and to the graph.
OPENAI = (as_json(completion()), as_json(openai_calling(("report_ready", READY))))
GEMINI = (as_json(said(HELLO)), as_json(said(calling("report_ready", args=READY, id="1"))))
OLLAMA = (
    as_json(last("ready")),
    as_json(part(tool_calls=[{"function": {"name": "report_ready", "arguments": READY}}]), last()),
)


@pytest.fixture(autouse=True)
def _keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(name, ENVIRONMENT_KEY)


def at(loopback: Loopback, provider: str, **more: Any) -> Candidate:
    path = "/v1" if provider == "openai" else ""
    model = "gemini-3.8-flash" if provider == "gemini" else "m"
    return candidate(provider, **{"provider": provider, "model": model, "base_url": f"{loopback.url}{path}", **more})


async def probed(*candidates: Candidate, **environment: str) -> Report:
    pool = Pool(candidates, environment=os.environ | environment)
    try:
        return await pool.probe(lambda *_, **__: None)
    except NoneReady as exc:
        return exc.report


def everything(requests: list[Request]) -> str:
    return "".join(f"{request.path}{request.headers}{request.body!r}" for request in requests)


async def test_the_usual_key_goes_to_no_address_of_the_file(loopback: Loopback) -> None:
    loopback.say(*OPENAI)
    (row,) = (await probed(at(loopback, "openai"))).rows
    assert row.serves
    assert [request.headers["authorization"] for request in loopback.requests] == ["Bearer none"] * 2
    assert ENVIRONMENT_KEY not in everything(loopback.requests)


async def test_gemini_at_an_address_of_the_file_is_not_asked_without_a_key_of_its_own(loopback: Loopback) -> None:
    (row,) = (await probed(at(loopback, "gemini"))).rows
    assert (row.error_type, row.attempts) == ("SetUpMissing", 0)
    assert loopback.requests == []


@pytest.mark.parametrize(
    ("provider", "replies", "header", "sent"),
    [
        ("openai", OPENAI, "authorization", f"Bearer {FAKE_KEY}"),
        ("gemini", GEMINI, "x-goog-api-key", FAKE_KEY),
    ],
)
async def test_the_key_that_the_file_names_is_the_one_that_is_sent(
    loopback: Loopback, provider: str, replies: tuple[Reply, ...], header: str, sent: str
) -> None:
    loopback.say(*replies)
    (row,) = (await probed(at(loopback, provider, api_key_env="MY_VARIABLE"), MY_VARIABLE=FAKE_KEY)).rows
    assert row.serves
    assert [request.headers[header] for request in loopback.requests] == [sent] * 2
    assert ENVIRONMENT_KEY not in everything(loopback.requests)


async def test_ollama_is_sent_no_key_at_all(loopback: Loopback) -> None:
    loopback.say(*OLLAMA)
    (row,) = (await probed(at(loopback, "ollama", api_key_env="MY_VARIABLE"), MY_VARIABLE=FAKE_KEY)).rows
    assert row.serves
    assert ENVIRONMENT_KEY not in everything(loopback.requests)
    assert FAKE_KEY not in everything(loopback.requests)


async def test_a_named_variable_that_holds_no_key_lets_nothing_out(loopback: Loopback) -> None:
    (row,) = (await probed(at(loopback, "openai", api_key_env="MY_VARIABLE"), MY_VARIABLE=" ")).rows
    assert (row.error_type, row.attempts, loopback.requests) == ("SetUpMissing", 0, [])


def size_of(request: Request) -> Any:
    body: Mapping[str, Any] = request.json()
    if "generationConfig" in body:
        return body["generationConfig"]["maxOutputTokens"]
    return body["options"]["num_predict"] if "options" in body else body["max_tokens"]


@pytest.mark.parametrize(("provider", "replies"), [("openai", OPENAI), ("gemini", GEMINI), ("ollama", OLLAMA)])
async def test_each_provider_is_asked_for_the_size_that_was_meant(
    loopback: Loopback, provider: str, replies: tuple[Reply, ...]
) -> None:
    loopback.say(*replies)
    await probed(at(loopback, provider, api_key_env="MY_VARIABLE"), MY_VARIABLE=FAKE_KEY)
    assert [size_of(request) for request in loopback.requests] == [16, 4096]


@pytest.mark.parametrize(
    ("model", "file", "size"),
    [
        ("gemini-small", {}, 700),
        ("gemini-small", {"context_tokens": 400}, 200),
        ("gemini-small", {"max_output_tokens": 900}, 900),
        ("gemini-3.8-flash", {}, 4096),
        ("gemini-of-tomorrow", {}, 4096),
    ],
)
async def test_the_ceilings_that_the_provider_package_knows_are_on_the_wire(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch, model: str, file: dict[str, int], size: int
) -> None:
    monkeypatch.setitem(_PROFILES, "gemini-small", {"max_output_tokens": 700, "max_input_tokens": 8192})
    loopback.say(*GEMINI)
    given = at(loopback, "gemini", model=model, api_key_env="MY_VARIABLE", **file)
    assert (await probed(given, MY_VARIABLE=FAKE_KEY)).rows[0].ready
    assert [size_of(request) for request in loopback.requests] == [16, size]


async def asked(loopback: Loopback, *replies: Reply, events: list[Event]) -> Answer:
    """Ask two candidates of one server, after probes that both pass."""
    loopback.say(*[as_json(completion())] * 2, *[OPENAI[1]] * 2, *replies)
    two = [at(loopback, "openai", id=name, model=name) for name in "ab"]
    pool: Any = Pool(two, environment=os.environ)
    graph = build_graph(pool, ci_tools(LocalCi()))
    return await ask(graph, QUESTION, run=Run(observe=events.append), first=pool.make_ready)


ANSWER = as_json(completion(usage={"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}))


@pytest.mark.parametrize(
    ("reply", "error", "status", "spent"),
    [
        (as_json({"error": {"message": "busy"}}, status=503), "InternalServerError", 503, "nothing"),
        (as_json({"error": {"message": "who?"}}, status=401), "AuthenticationError", 401, "nothing"),
        (as_json({"error": {"message": "slowly"}}, status=429), "RateLimitError", 429, "nothing"),
        (Reply(status=307, headers={"location": "/elsewhere"}), "APIStatusError", 307, "nothing"),
        (Reply(ending=Ending.HUNG_UP), "RemoteProtocolError", None, "unknown"),
        (Reply(ending=Ending.CUT), "RemoteProtocolError", 200, "unknown"),
        (Reply(pieces=(b"<html>",), headers={"content-type": "text/html"}), "ReplyUnreadable", 200, "unknown"),
        (as_json({"error": {"message": "in a success"}}), "ErrorInReply", 200, "unknown"),
    ],
)
async def test_a_failure_on_the_wire_is_one_request_and_then_the_next_candidate(
    loopback: Loopback, reply: Reply, error: str, status: int | None, spent: str
) -> None:
    events: list[Event] = []
    answer = await asked(loopback, reply, ANSWER, events=events)
    assert [request.json()["model"] for request in loopback.requests[4:]] == ["a", "b"]
    (passed_over,) = [event.facts for event in events if event.kind == "model_call_passed_over"]
    assert passed_over == {"call": 1, "spent": spent, "error_type": error, "http_status": status}
    assert (answer.text, answer.served, answer.known_subtotal) == ("Job 812 failed.", {"b": 1}, 10)
    assert answer.outcome is (Outcome.ANSWERED if spent == "nothing" else Outcome.MISSING_USAGE)
    assert answer.usage_known is (spent == "nothing")


async def test_a_candidate_that_nothing_listens_for_has_spent_nothing(loopback: Loopback) -> None:
    events: list[Event] = []
    loopback.say(*OPENAI, ANSWER)
    gone = at(loopback, "openai", id="gone", base_url="http://127.0.0.1:9/v1")
    pool: Any = Pool([gone, at(loopback, "openai", id="there")], environment=os.environ)
    graph = build_graph(pool, ci_tools(LocalCi()))
    answer = await ask(graph, QUESTION, run=Run(observe=events.append), first=pool.make_ready)
    assert (answer.outcome, answer.served) == (Outcome.ANSWERED, {"there": 1})
    (probe,) = [event.facts for event in events if event.kind == "probe_ended" and event.facts["agent_id"] == "gone"]
    assert (probe["error_type"], probe["spent"]) == ("ConnectError", "nothing")


async def test_the_tools_of_the_graph_are_what_a_serving_candidate_is_given(loopback: Loopback) -> None:
    await asked(loopback, ANSWER, events=[])
    served = loopback.requests[-1].json()
    assert sorted(tool["function"]["name"] for tool in served["tools"]) == ["fetch_job_log", "list_ci_jobs"]
    assert served["max_tokens"] == 4096


async def test_no_event_of_a_failover_holds_what_a_server_said(loopback: Loopback) -> None:
    events: list[Event] = []
    await asked(loopback, as_json({"error": {"message": "MARKER"}}, status=500), ANSWER, events=events)
    assert "MARKER" not in json.dumps([[event.kind, repr(event.facts)] for event in events])
