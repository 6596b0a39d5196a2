"""What goes wrong at a model: one table from what the provider SDKs raise to what the user is told.

Classes are named, not imported: an SDK is imported only where its model is built. httpx and its successor httpx2, whose
classes have the same names, are what the SDKs stand on. What is in no row is "unexpected".
"""

import asyncio
import re
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable

from bounded.calls import asked_to_stop
from bounded.lookups import own_lookups
from bounded.text import said_by

TOO_SLOW = "the provider did not answer in time"
BAD_KEY = "the provider refused the key"
REFUSED = "the provider refused the request"
FAILED = "the provider failed"
UNREADABLE = "the provider's reply could not be read"
CUT_SHORT = "the connection ended before the reply was whole"
UNREACHABLE = "the provider cannot be reached"
NOT_FOUND = "the provider does not have this model"
TOO_MANY = "the provider's rate limit was reached"

# (qualified class name, kind, what it means for the user); the first row that names one of a failure's ancestors holds.
# `httpx*` is either httpx or httpx2; plain httpx is what Ollama's client uses and the others' do not. Ollama's client
# says everything with one class: there the HTTP status tells more.
FAILURES: tuple[tuple[str, str, str], ...] = (
    ("models.scripted.ScriptedFailure", "scripted", "the script made this call fail"),
    ("models.meter.RequestRefused", "refused", "no further request may leave this process"),
    ("langchain_core.exceptions.ModelAuthenticationError", "unauthorized", BAD_KEY),
    ("langchain_core.exceptions.ModelPermissionDeniedError", "unauthorized", BAD_KEY),
    ("langchain_core.exceptions.ModelNotFoundError", "not_found", NOT_FOUND),
    ("langchain_core.exceptions.ModelRateLimitError", "rate_limited", TOO_MANY),
    ("langchain_core.exceptions.ContextOverflowError", "bad_request", "the conversation is too long for this model"),
    ("langchain_core.exceptions.ModelInvalidRequestError", "bad_request", REFUSED),
    ("langchain_core.exceptions.ModelRefusalError", "bad_request", REFUSED),
    ("langchain_core.exceptions.ModelTimeoutError", "timeout", TOO_SLOW),
    ("langchain_core.exceptions.ModelConnectionError", "unreachable", UNREACHABLE),
    ("langchain_core.exceptions.ModelAPIError", "server_error", FAILED),
    ("langchain_core.exceptions.ModelError", "server_error", FAILED),
    ("langchain_core.exceptions.OutputParserException", "bad_reply", UNREADABLE),
    ("langchain_google_genai._common.GoogleGenerativeAIError", "bad_request", REFUSED),
    ("google.genai.errors.ServerError", "server_error", FAILED),
    ("google.genai.errors.ClientError", "bad_request", REFUSED),
    ("google.genai.errors.APIError", "bad_reply", UNREADABLE),
    ("google.genai.errors.UnknownApiResponseError", "bad_reply", UNREADABLE),
    ("google.genai.errors.ContinuationInterruptedError", "bad_reply", CUT_SHORT),
    ("openai.AuthenticationError", "unauthorized", f"{BAD_KEY}, or wants one: OPENAI_API_KEY"),
    ("openai.PermissionDeniedError", "unauthorized", BAD_KEY),
    (
        "openai.NotFoundError",
        "not_found",
        "there is no such model, or OPENAI_BASE_URL does not end where it should: /v1",
    ),
    ("openai.RateLimitError", "rate_limited", TOO_MANY),
    ("openai.InternalServerError", "server_error", FAILED),
    ("openai.APIStatusError", "bad_request", REFUSED),  # a redirect as well
    ("openai.APITimeoutError", "timeout", TOO_SLOW),
    ("openai.APIConnectionError", "unreachable", UNREACHABLE),
    ("openai.APIResponseValidationError", "bad_reply", UNREADABLE),
    ("openai.APIError", "server_error", FAILED),
    ("openai.OpenAIError", "bad_reply", UNREADABLE),
    ("models.openai.ErrorInReply", "server_error", FAILED),
    ("ollama._types.RequestError", "bad_request", "Ollama's client refused the request"),
    ("ollama._types.ResponseError:400", "bad_request", REFUSED),
    ("ollama._types.ResponseError:401", "unauthorized", BAD_KEY),
    ("ollama._types.ResponseError:403", "unauthorized", BAD_KEY),
    ("ollama._types.ResponseError:404", "not_found", "Ollama does not have this model; run: ollama pull NAME"),
    ("ollama._types.ResponseError:429", "rate_limited", TOO_MANY),
    ("ollama._types.ResponseError", "server_error", "Ollama answered with an error"),
    (
        "httpx.ConnectError",
        "unreachable",
        "the model's server does not answer; for Ollama, run: ollama serve, or look at OLLAMA_HOST; for an"
        " OpenAI-compatible server, openai:MODEL",
    ),
    ("httpx*.TimeoutException", "timeout", TOO_SLOW),
    ("httpx*.RemoteProtocolError", "bad_reply", CUT_SHORT),
    ("httpx*.ReadError", "bad_reply", CUT_SHORT),
    ("httpx*.TransportError", "unreachable", UNREACHABLE),
    ("httpx*.HTTPError", "bad_reply", UNREADABLE),
    ("httpx*.StreamError", "bad_reply", UNREADABLE),
    ("httpx*.CookieConflict", "bad_reply", UNREADABLE),
    ("httpx*.InvalidURL", "unreachable", "the provider's address is no URL"),
    ("builtins.TimeoutError", "timeout", TOO_SLOW),
    ("builtins.ConnectionError", "unreachable", UNREACHABLE),
    ("builtins.ValueError", "bad_reply", UNREADABLE),  # broken JSON, bytes, shapes; an adapter's own complaints
)
_UNEXPECTED = ("unexpected", "the model call failed")


class ModelFailed(Exception):
    """A model call failed at the model or on the way to it, not in this program.

    Attributes:
        kind: one word from the table above, or "unexpected".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def call_model(model: Runnable[Any, Any], messages: list[BaseMessage]) -> AIMessage:
    """One call, no retry.

    Raises:
        ModelFailed: for everything that the provider's SDK raises.
    """
    own_lookups()
    try:
        reply: AIMessage = await model.ainvoke(messages)
    except asyncio.CancelledError as exc:
        if asked_to_stop():
            raise
        raise failed(exc) from exc
    except BaseException as exc:
        raise failed(exc) from exc
    return reply


def failed(exc: BaseException) -> ModelFailed:
    """The kind of a provider failure and a sentence about it; the text is not cleaned yet."""
    named = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(exc).__mro__}
    named |= {re.sub(r"^httpx2?\.", "httpx*.", name) for name in named}
    named |= {f"{name}:{exc.status_code}" for name in named if hasattr(exc, "status_code")}
    kind, meaning = next((row[1:] for row in FAILURES if row[0] in named), _UNEXPECTED)
    return ModelFailed(kind, f"{meaning} ({type(exc).__name__}: {said_by(exc)})")
