"""The meter on the wire: what leaves the process, what is handed on and what is recorded, under the real SDKs."""

import asyncio
import gzip
import json
import socket
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
import httpx2
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage

from models.conftest import FAKE_KEY, Ending, Loopback, Reply, as_json, point_gemini_at
from models.factory import build_model
from models.failures import ModelFailed, call_model, failed
from models.meter import MAX_BODY_BYTES, BodyTooLarge, Levers, Meter, RequestRefused, count_tokens, lacking, levers_of
from models.reply import text
from models.test_gemini import HELLO, said
from models.test_gemini import NAME as GEMINI
from models.test_ollama import NAME as OLLAMA
from models.test_ollama import last, part

BOTH = pytest.mark.parametrize("name", [GEMINI, OLLAMA])
CODINGS = pytest.mark.parametrize("coding", ["gzip", "deflate", "raw deflate"])
MESSAGES: list[BaseMessage] = [SystemMessage("You find out."), HumanMessage("Why did job 815 fail?")]
GENERATION = {GEMINI: f"/models/{GEMINI}:generateContent", OLLAMA: "/api/chat"}  # what a path ends with
COUNT = f"/models/{GEMINI}:countTokens"
EVERY_LEVER = {
    "token_count": "available",
    "thinking": "low",
    "max_output_tokens": 4096,
    "http_timeout_s": 45.0,
    "retries": 0,
}
COUNTED = as_json({"totalTokens": 31})


@dataclass(slots=True)
class Probe:
    """A metered model and what its meter has recorded."""

    name: str
    model: BaseChatModel
    levers: Levers
    facts: list[Any]

    async def generate(self) -> str:
        return text(await call_model(self.model, MESSAGES))

    async def count(self) -> int | None:
        return await count_tokens(self.name, self.model, MESSAGES)


def probe(name: str, loopback: Loopback, *, http_timeout_s: float = 45.0) -> Probe:
    facts: list[Any] = []
    pulled = Levers(
        meter=Meter(facts.append, allowed=2),
        max_output_tokens=4096,
        thinking="low",
        http_timeout_s=http_timeout_s,
        retries=0,
    )
    model = build_model(name, model_timeout_s=60.0, environment=loopback.environment, levers=pulled)
    return Probe(name, model, pulled, facts)


def reply_of(name: str) -> Reply:
    """A short generation as that provider says it; Ollama's in two lines of a stream."""
    return as_json(said(HELLO)) if name == GEMINI else as_json(part("Job 812 "), last("failed."))


def encode(coding: str, body: bytes) -> bytes:
    if coding == "gzip":
        return gzip.compress(body)
    if coding == "deflate":
        return zlib.compress(body)
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return raw.compress(body) + raw.flush()


def encoded(coding: str, reply: Reply) -> Reply:
    """The same reply under one coding; one that came in several pieces still comes in several."""
    body = encode(coding, b"".join(reply.pieces))
    pieces = (body,) if len(reply.pieces) == 1 else (body[:20], body[20:])
    return Reply(pieces=pieces, status=reply.status, headers={**reply.headers, "content-encoding": coding.split()[-1]})


_connected: list[Any] = []
sys.addaudithook(lambda event, arguments: _connected.append(arguments[1]) if event == "socket.connect" else None)


@pytest.fixture(autouse=True)
def connections() -> Iterator[list[Any]]:
    """Where this process has connected to since the test began."""
    _connected.clear()
    yield _connected
    _connected.clear()


@BOTH
async def test_a_third_request_is_refused_before_any_socket(
    name: str, loopback: Loopback, connections: list[Any]
) -> None:
    loopback.say(*[reply_of(name)] * 3)
    probed = probe(name, loopback)
    assert [await probed.generate() for _ in range(2)] == ["Job 812 failed."] * 2
    assert len(connections) == 2
    for _ in range(2):
        with pytest.raises(ModelFailed, match="2 requests may leave this process"):
            await probed.generate()
    assert (len(connections), len(loopback.requests)) == (2, 2)
    assert [seen["number"] for seen in probed.facts] == [1, 2, 3, 4]
    assert [seen["status"] for seen in probed.facts] == [200, 200, None, None]
    assert [seen["error_class"] for seen in probed.facts] == [None, None, "RequestRefused", "RequestRefused"]


async def test_a_count_and_a_generation_are_two_requests_and_the_count_has_no_third(loopback: Loopback) -> None:
    loopback.say(COUNTED, reply_of(GEMINI), COUNTED)
    probed = probe(GEMINI, loopback)
    assert (await probed.count(), await probed.generate()) == (31, "Job 812 failed.")
    with pytest.raises(RequestRefused):
        await probed.count()
    first, second = loopback.requests
    assert first.path.endswith(COUNT)
    assert second.path.endswith(GENERATION[GEMINI])


async def test_requests_at_the_same_moment_are_counted_one_by_one(loopback: Loopback) -> None:
    loopback.say(*[reply_of(OLLAMA)] * 8)
    probed = probe(OLLAMA, loopback)
    ends = await asyncio.gather(*[probed.generate() for _ in range(8)], return_exceptions=True)
    assert [isinstance(end, ModelFailed) for end in ends] == [False, False] + [True] * 6
    assert len(loopback.requests) == 2


@BOTH
def test_the_synchronous_client_cannot_send(name: str, connections: list[Any]) -> None:
    probed = probe(name, Loopback("http://127.0.0.1:9"))
    with pytest.raises(RequestRefused, match="only the asynchronous client"):
        probed.model.invoke(MESSAGES)
    with pytest.raises(RequestRefused, match="only the asynchronous client"):
        list(probed.model.stream(MESSAGES))
    assert connections == []
    assert [seen["error_class"] for seen in probed.facts] == ["RequestRefused"] * 2


def test_the_synchronous_count_cannot_send(connections: list[Any]) -> None:
    with pytest.raises(RequestRefused):
        probe(GEMINI, Loopback("http://127.0.0.1:9")).model.get_num_tokens("Hello.")
    assert connections == []


@BOTH
@CODINGS
async def test_an_encoded_generation_arrives_decoded(name: str, coding: str, loopback: Loopback) -> None:
    loopback.say(encoded(coding, reply_of(name)))
    probed = probe(name, loopback)
    assert await probed.generate() == "Job 812 failed."
    (seen,) = probed.facts
    assert (seen["status"], seen["content_encoding"]) == (200, coding.split()[-1])
    assert seen["body_bytes"] == len(b"".join(reply_of(name).pieces))


@CODINGS
async def test_an_encoded_count_arrives_decoded(coding: str, loopback: Loopback) -> None:
    loopback.say(encoded(coding, COUNTED))
    assert await probe(GEMINI, loopback).count() == 31


@BOTH
@CODINGS
async def test_an_encoded_stream_arrives_decoded(name: str, coding: str, loopback: Loopback) -> None:
    events = [b"data: " + json.dumps(said({"text": word})).encode() + b"\r\n\r\n" for word in ("Job 812 ", "failed.")]
    loopback.say(encoded(coding, Reply(pieces=tuple(events)) if name == GEMINI else reply_of(name)))
    chunks = [c async for c in probe(name, loopback).model.astream(MESSAGES) if isinstance(c, AIMessageChunk)]
    assert "".join(chunk.text for chunk in chunks) == "Job 812 failed."


@pytest.mark.parametrize("client_class", [httpx.AsyncClient, httpx2.AsyncClient])
@pytest.mark.parametrize("before", [(), (b"",)], ids=["with its length", "chunked"])
async def test_a_body_is_decoded_once_and_no_longer_described_as_encoded(
    client_class: Callable[..., Any], before: tuple[bytes, ...], loopback: Loopback
) -> None:
    inner = gzip.compress(b"Job 812 failed.")
    headers = {"content-encoding": "gzip", "set-cookie": "a=1", "content-type": "text/plain"}
    loopback.say(Reply(pieces=(*before, gzip.compress(inner)), headers=headers))
    facts: list[Any] = []
    async with aclosing(client_class(transport=Meter(facts.append, allowed=1))) as client:
        response = await client.get(f"{loopback.url}/log?key={FAKE_KEY}")
    assert response.content == inner
    assert dict(response.headers) == {"set-cookie": "a=1", "content-type": "text/plain", "connection": "close"}
    sent = {"number": 1, "method": "GET", "path": "/log"}
    assert facts == [{**sent, "status": 200, "content_encoding": "gzip", "error_class": None, "body_bytes": len(inner)}]


async def test_a_badly_encoded_count_is_an_error_and_recorded(loopback: Loopback) -> None:
    loopback.say(Reply(pieces=COUNTED.pieces, headers={**COUNTED.headers, "content-encoding": "gzip"}))
    probed = probe(GEMINI, loopback)
    with pytest.raises(httpx2.DecodingError) as raised:
        await probed.count()
    assert failed(raised.value).kind == "bad_reply"
    (seen,) = probed.facts
    assert seen["path"].endswith(COUNT)
    assert (seen["status"], seen["content_encoding"]) == (200, "gzip")
    assert (seen["error_class"], seen["body_bytes"]) == ("DecodingError", None)
    assert len(loopback.requests) == 1


@BOTH
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_badly_encoded_generation_is_an_error_and_recorded(name: str, coding: str, loopback: Loopback) -> None:
    reply = reply_of(name)
    loopback.say(Reply(pieces=reply.pieces, headers={**reply.headers, "content-encoding": coding}))
    probed = probe(name, loopback)
    with pytest.raises(ModelFailed) as raised:
        await probed.generate()
    assert raised.value.kind == "bad_reply"
    (seen,) = probed.facts
    assert (seen["status"], seen["content_encoding"], seen["error_class"]) == (200, coding, "DecodingError")


@BOTH
@pytest.mark.parametrize("status", [307, 429, 500, 503])
async def test_what_is_no_success_is_recorded_and_neither_retried_nor_followed(
    name: str, status: int, loopback: Loopback
) -> None:
    elsewhere = {"location": f"{loopback.url}/elsewhere", "retry-after": "0"}
    loopback.say(Reply(pieces=(b'{"error": "busy"}',), status=status, headers=elsewhere), reply_of(name))
    probed = probe(name, loopback)
    with pytest.raises(ModelFailed):
        await probed.generate()
    (seen,) = probed.facts
    assert (seen["status"], seen["error_class"], seen["body_bytes"]) == (status, None, 17)
    assert len(loopback.requests) == 1


@pytest.mark.parametrize(
    ("reply", "status", "error_class", "kind"),
    [
        (as_json({"error": {"code": 503, "message": "busy"}}, status=503), 503, None, "server_error"),
        (encoded("gzip", Reply(pieces=(b"busy",), status=503)), 503, None, "server_error"),
        (as_json({"error": {"code": 403, "message": "no"}}, status=403), 403, None, "bad_request"),
        (as_json({}, status=307), 307, None, "bad_reply"),
        (Reply(ending=Ending.HUNG_UP), None, "RemoteProtocolError", "bad_reply"),
        (Reply(pieces=(b'{"to',), ending=Ending.CUT), 200, "RemoteProtocolError", "bad_reply"),
        (Reply(pieces=(b"not JSON",)), 200, None, "bad_reply"),
        (as_json({}), 200, None, "bad_reply"),
        (as_json({"totalTokens": 0}), 200, None, "bad_reply"),
        (as_json({"totalTokens": -5}), 200, None, "bad_reply"),
        (as_json({"totalTokens": "many"}), 200, None, "bad_reply"),
    ],
)
async def test_a_count_that_fails_is_recorded_never_retried_and_has_a_meaning(
    reply: Reply, status: int | None, error_class: str | None, kind: str, loopback: Loopback
) -> None:
    loopback.say(reply, COUNTED)
    probed = probe(GEMINI, loopback)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the SDK's own, of many kinds
        await probed.count()
    assert failed(raised.value).kind == kind
    (seen,) = probed.facts
    assert (seen["status"], seen["error_class"]) == (status, error_class)
    assert len(loopback.requests) == 1


@BOTH
async def test_a_refused_connection_is_recorded(
    name: str, loopback: Loopback, monkeypatch: pytest.MonkeyPatch, connections: list[Any]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listened on
        loopback.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        point_gemini_at(loopback.url, monkeypatch)
        probed = probe(name, loopback)
        with pytest.raises(ModelFailed) as raised:
            await probed.generate()
    assert raised.value.kind == "unreachable"
    (seen,) = probed.facts
    assert seen["path"].endswith(GENERATION[name])
    assert (seen["status"], seen["error_class"]) == (None, "ConnectError")
    assert len(connections) == 1


@BOTH
async def test_a_silent_server_is_left_at_the_http_timeout_and_not_asked_again(name: str, loopback: Loopback) -> None:
    loopback.say(Reply(ending=Ending.SILENT), reply_of(name))
    probed = probe(name, loopback, http_timeout_s=0.2)
    with pytest.raises(ModelFailed) as raised:
        await probed.generate()
    assert raised.value.kind == "timeout"
    assert [(seen["status"], seen["error_class"]) for seen in probed.facts] == [(None, "ReadTimeout")]
    assert len(loopback.requests) == 1


@BOTH
async def test_a_cancellation_is_recorded_and_goes_on(name: str, loopback: Loopback) -> None:
    loopback.say(Reply(ending=Ending.SILENT))
    probed = probe(name, loopback)
    call = asyncio.create_task(probed.generate())
    await loopback.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await loopback.until_left()
    (seen,) = probed.facts
    assert (seen["status"], seen["error_class"], seen["body_bytes"]) == (None, "CancelledError", None)


@BOTH
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
async def test_a_body_beyond_the_limit_is_refused(name: str, coding: str | None, loopback: Loopback) -> None:
    whole = Reply(pieces=(b" " * MAX_BODY_BYTES, b" "), headers={})
    loopback.say(encoded(coding, whole) if coding else whole)
    probed = probe(name, loopback)
    with pytest.raises(ModelFailed, match=BodyTooLarge.__name__) as raised:
        await probed.generate()
    assert raised.value.kind == "bad_reply"
    assert [(seen["status"], seen["error_class"]) for seen in probed.facts] == [(200, "BodyTooLarge")]


async def test_a_body_of_exactly_the_limit_is_handed_on(loopback: Loopback) -> None:
    loopback.say(Reply(pieces=(COUNTED.pieces[0].ljust(MAX_BODY_BYTES),)))
    assert await probe(GEMINI, loopback).count() == 31


async def test_the_key_travels_and_is_in_no_record(loopback: Loopback) -> None:
    loopback.say(COUNTED, as_json({"error": {"code": 400, "message": f"bad key {FAKE_KEY}"}}, status=400))
    probed = probe(GEMINI, loopback)
    await probed.count()
    with pytest.raises(ModelFailed):
        await probed.generate()
    assert [request.headers["x-goog-api-key"] for request in loopback.requests] == [FAKE_KEY] * 2
    assert len(probed.facts) == 2
    assert FAKE_KEY not in repr(probed.facts)


async def test_gemini_is_told_the_levers(loopback: Loopback) -> None:
    loopback.say(COUNTED, reply_of(GEMINI))
    probed = probe(GEMINI, loopback)
    await probed.count()
    await probed.generate()
    count, generation = loopback.requests
    assert count.json() == {
        "contents": [{"role": "user", "parts": [{"text": "You find out."}, {"text": "Why did job 815 fail?"}]}]
    }
    config = generation.json()["generationConfig"]
    assert (config["maxOutputTokens"], config["thinkingConfig"]) == (4096, {"thinking_level": "LOW"})
    assert [request.headers["x-server-timeout"] for request in loopback.requests] == ["45", "45"]


async def test_ollama_is_told_the_levers_that_it_has(loopback: Loopback) -> None:
    loopback.say(reply_of(OLLAMA))
    probed = probe(OLLAMA, loopback)
    await probed.generate()
    sent = loopback.requests[0].json()
    assert sent["options"] == {"num_predict": 4096, "temperature": 0.0}
    assert "think" not in sent


@pytest.mark.parametrize(("name", "lacks"), [(GEMINI, []), (OLLAMA, ["token_count", "thinking"])])
def test_what_a_provider_lacks_is_not_available(name: str, lacks: list[str], loopback: Loopback) -> None:
    probed = probe(name, loopback)
    assert lacking(name) == set(lacks)
    assert levers_of(name, probed.levers) == {**EVERY_LEVER, **dict.fromkeys(lacks, "not_available")}


def test_the_levers_in_force_are_those_that_were_set() -> None:
    meter = Meter(lambda facts: None, allowed=1)
    pulled = Levers(meter=meter, max_output_tokens=64, thinking="low", http_timeout_s=2.5, retries=1)
    changed = {"max_output_tokens": 64, "http_timeout_s": 2.5, "retries": 1}
    assert levers_of(GEMINI, pulled) == {**EVERY_LEVER, **changed}


@pytest.mark.parametrize("allowed", [0, 1, 3])
async def test_as_many_requests_leave_as_are_allowed(allowed: int, loopback: Loopback) -> None:
    loopback.say(*[as_json({})] * 4)
    facts: list[Any] = []
    meter: Any = Meter(facts.append, allowed=allowed)
    async with aclosing(httpx.AsyncClient(transport=meter)) as client:
        for _ in range(allowed):
            await client.get(f"{loopback.url}/log")
        with pytest.raises(RequestRefused, match=f"^{allowed} requests may leave this process, this is number"):
            await client.get(f"{loopback.url}/log")
    assert (len(loopback.requests), len(facts)) == (allowed, allowed + 1)


@pytest.mark.parametrize("name", [OLLAMA, "offline"])
async def test_a_count_that_a_provider_lacks_is_not_asked_for(name: str, loopback: Loopback) -> None:
    probed = probe(name, loopback)
    assert await probed.count() is None
    assert (loopback.requests, probed.facts) == ([], [])


@pytest.mark.parametrize("backend", ["httpx", "httpx2", "auto"])
async def test_whichever_http_library_the_sdk_is_told_to_use_is_metered(
    backend: str, loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_GENAI_HTTP_CLIENT", backend)
    loopback.say(encoded("gzip", COUNTED), encoded("gzip", reply_of(GEMINI)))
    probed = probe(GEMINI, loopback)
    assert (await probed.count(), await probed.generate()) == (31, "Job 812 failed.")
    with pytest.raises(ModelFailed, match="RequestRefused"):
        await probed.generate()
    assert len(loopback.requests) == 2


@BOTH
async def test_no_proxy_stands_between_a_metered_model_and_its_host(
    name: str, loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    loopback.say(reply_of(name))
    assert await probe(name, loopback).generate() == "Job 812 failed."
