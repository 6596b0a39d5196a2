"""The table of failures is total, and whatever a provider does on the wire becomes a `ModelFailed`, asked for once."""

import asyncio
import importlib
import importlib.util
import socket
import time
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from pydantic import ValidationError

from bounded.limits import Limits
from bounded.outcomes import Outcome
from graph import ask, build_graph
from models.conftest import FAKE_KEY, Ending, Loopback, Reply, as_json, point_gemini_at
from models.factory import build_model
from models.failures import FAILURES, ModelFailed, call_model, failed
from models.gemini import gemini_model
from models.ollama import ollama_model
from models.openai import openai_model

GEMINI, OLLAMA, OPENAI = "gemini-3.8-flash", "gemma4:e2b", "openai:gpt-5.1"
QUESTION: list[BaseMessage] = [HumanMessage("Why is CI failing on pull request 415?")]
HTML = {"content-type": "text/html"}
MARGIN_S = 1.0

# What an SDK may let out: what these modules export. httpx2 is what openai speaks through, and google-genai where it is
# installed.
SOURCES = [
    name
    for name in (
        "httpx",
        "httpx2",
        "ollama",
        "google.genai.errors",
        "langchain_core.exceptions",
        "langchain_google_genai.chat_models",
        "langchain_openai.chat_models.base",
        "openai._exceptions",
    )
    if importlib.util.find_spec(name.partition(".")[0]) is not None
]


def exported(source: str) -> list[type[Exception]]:
    """The exception classes of a module; of langchain_core those for models only."""
    found = [kind for kind in vars(importlib.import_module(source)).values() if isinstance(kind, type)]
    wanted = [kind for kind in found if issubclass(kind, Exception) and not issubclass(kind, Warning)]
    if source == "langchain_core.exceptions":
        return [kind for kind in wanted if kind.__name__.startswith(("Model", "Context", "Output"))]
    return wanted


def instance(kind: type[Exception]) -> Exception:
    """An exception of that class without its constructor, which differs from class to class."""
    if kind is ValidationError:
        return ValidationError.from_exception_data("boom", [])
    exc = kind.__new__(kind)
    vars(exc).update(error="boom", status_code=-1)
    return exc


def refusal(model: str, status: int) -> Reply:
    """The body in which each provider puts an error."""
    said = "boom" if model == OLLAMA else {"code": status, "message": "boom", "status": "SAID"}
    return as_json({"error": said}, status=status)


@pytest.fixture(params=[GEMINI, OLLAMA, OPENAI])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, loopback: Loopback) -> BaseChatModel:
    return build_model(name, model_timeout_s=60.0, environment=loopback.environment)


async def failure_of(model: BaseChatModel) -> ModelFailed:
    with pytest.raises(ModelFailed) as caught:
        await call_model(model, QUESTION)
    return caught.value


@pytest.mark.parametrize("row", [row[0] for row in FAILURES])
@pytest.mark.parametrize("successor", ["", "2"])
def test_every_row_names_a_class_that_exists_and_is_not_shadowed(row: str, successor: str) -> None:
    qualified, _, status = row.replace("*", successor).partition(":")
    module, _, class_name = qualified.rpartition(".")
    kind = getattr(importlib.import_module(module), class_name)
    assert issubclass(kind, Exception)
    assert f"{kind.__module__}.{kind.__qualname__}" == qualified
    made = instance(kind)
    if status:
        vars(made).update(status_code=int(status))
    assert failed(made).kind == next(known[1] for known in FAILURES if known[0] == row)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=f"{source}-{kind.__name__}") for source in SOURCES for kind in exported(source)]
)
def test_every_exception_that_an_sdk_exports_has_a_kind(kind: type[Exception]) -> None:
    assert failed(instance(kind)).kind != "unexpected"


def test_what_is_in_no_row_is_unexpected_and_named_by_its_type() -> None:
    failure = failed(LookupError("boom"))
    assert (failure.kind, str(failure)) == ("unexpected", "the model call failed (LookupError: boom)")


def test_a_subclass_that_nobody_has_heard_of_is_what_its_ancestor_is() -> None:
    class Sulking(ConnectionError):
        pass

    assert failed(Sulking("boom")).kind == "unreachable"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (-1, "server_error"),
        (400, "bad_request"),
        (401, "unauthorized"),
        (403, "unauthorized"),
        (404, "not_found"),
        (429, "rate_limited"),
        (500, "server_error"),
    ],
)
def test_status_tells_what_ollamas_one_class_does_not(status: int, kind: str) -> None:
    from ollama import ResponseError

    assert failed(ResponseError("boom", status)).kind == kind


async def test_a_failure_keeps_what_the_sdk_raised_as_its_cause() -> None:
    def fail(_: object) -> AIMessage:
        raise TimeoutError("upstream")

    failed = await failure_of(RunnableLambda(fail))  # type: ignore[arg-type]
    assert (failed.kind, str(failed)) == ("timeout", "the provider did not answer in time (TimeoutError: upstream)")
    assert isinstance(failed.__cause__, TimeoutError)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "bad_request"),
        (401, "unauthorized"),
        (403, "unauthorized"),
        (404, "not_found"),
        (429, "rate_limited"),
        (500, "server_error"),
        (503, "server_error"),
        (504, "server_error"),
    ],
)
async def test_an_http_error_has_its_kind_and_is_not_retried(
    name: str, model: BaseChatModel, loopback: Loopback, status: int, kind: str
) -> None:
    loopback.say(refusal(name, status))
    failed = await failure_of(model)
    assert failed.kind == kind
    assert "boom" in str(failed)
    assert len(loopback.requests) == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        pytest.param(Reply(pieces=(b'{"message": {"content": "he',)), "bad_reply", id="broken JSON"),
        pytest.param(Reply(pieces=(b"<html>who are you</html>",), headers=HTML), "bad_reply", id="HTML"),
        pytest.param(Reply(pieces=(b"<html>bad</html>",), headers=HTML, status=502), "server_error", id="HTML, 502"),
        pytest.param(Reply(status=500), "server_error", id="an empty 500"),
        pytest.param(Reply(pieces=(b'{"mess',), ending=Ending.CUT), "bad_reply", id="closed mid-reply"),
        pytest.param(Reply(pieces=(b'{"mess',), ending=Ending.RESET), "bad_reply", id="reset mid-reply"),
        pytest.param(Reply(ending=Ending.HUNG_UP), "bad_reply", id="closed without a word"),
        pytest.param(Reply(pieces=(b"no gzip",), headers={"content-encoding": "gzip"}), "bad_reply", id="no gzip"),
    ],
)
async def test_a_reply_that_cannot_be_read_is_no_other_exception(
    model: BaseChatModel, loopback: Loopback, reply: Reply, kind: str
) -> None:
    loopback.say(reply)
    failed = await failure_of(model)
    assert failed.kind == kind
    assert len(loopback.requests) == 1


async def test_an_empty_body_from_ollama_is_a_bad_reply(loopback: Loopback) -> None:
    loopback.say(Reply())
    failed = await failure_of(build_model(OLLAMA, model_timeout_s=60.0, environment=loopback.environment))
    assert failed.kind == "bad_reply"


@pytest.mark.parametrize("body", [[], [1], "text", 5, None])
async def test_json_that_is_no_object_never_gets_past_the_one_exception(
    model: BaseChatModel, loopback: Loopback, body: Any
) -> None:
    loopback.say(as_json(body))
    try:
        reply = await call_model(model, QUESTION)
    except ModelFailed:
        return
    # The Gemini adapter makes nothing of some of these, and says nothing about it.
    assert (reply.text, reply.tool_calls, reply.usage_metadata) == ("", [], None)


async def test_a_closed_port_is_unreachable_and_the_message_says_how_to_serve(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can listen there meanwhile
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        point_gemini_at(url, monkeypatch)
        environment = {"GOOGLE_API_KEY": FAKE_KEY, "OLLAMA_HOST": url, "OPENAI_BASE_URL": url}
        failed = await failure_of(build_model(name, model_timeout_s=60.0, environment=environment))
    assert failed.kind == "unreachable"
    assert ("ollama serve" in str(failed)) is (name == OLLAMA)


def impatient(name: str, loopback: Loopback, timeout_s: float) -> BaseChatModel:
    """The model with a provider timeout below what the factory would allow."""
    make = {GEMINI: gemini_model, OLLAMA: ollama_model, OPENAI: openai_model}[name]
    return make(name, timeout_s=timeout_s, environment=loopback.environment)


@pytest.mark.slow
async def test_a_provider_that_never_answers_runs_into_the_clients_timeout(name: str, loopback: Loopback) -> None:
    loopback.say(Reply(ending=Ending.SILENT))
    model = impatient(name, loopback, 0.3)
    started = time.monotonic()
    failed = await failure_of(model)
    assert failed.kind == "timeout"
    assert 0.3 <= time.monotonic() - started < 0.3 + MARGIN_S
    assert len(loopback.requests) == 1


@pytest.mark.slow
async def test_a_dripping_reply_is_ended_by_the_model_node_for_no_client_does(name: str, loopback: Loopback) -> None:
    """Each client's timeout is per read: a byte every 0.2 s never runs into 0.5 s."""
    loopback.say(Reply(ending=Ending.DRIPPING))
    graph = build_graph(impatient(name, loopback, 0.5), [], limits=Limits(model_timeout_s=1.0))
    answer = await ask(graph, "Why?", deadline_s=10.0)
    assert (answer.outcome, answer.usage_known, answer.known_subtotal) == (Outcome.MODEL_TIMEOUT, False, 0)
    assert 1.0 <= answer.seconds < 1.0 + MARGIN_S
    await loopback.until_left()


async def test_cancelling_a_call_is_no_failure_of_the_model_and_closes_the_connection(
    model: BaseChatModel, loopback: Loopback
) -> None:
    loopback.say(Reply(ending=Ending.SILENT))
    call = asyncio.create_task(call_model(model, QUESTION))
    await loopback.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await loopback.until_left()
