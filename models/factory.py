"""Chat models behind one factory: a name becomes a model. SDKs are imported only where their model is built."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

    from models.meter import Levers

# Reported in public, not seen here: the Gemini service refuses a provider-side deadline below 10 s with a 400.
MIN_PROVIDER_TIMEOUT_S = 10.0
OPENAI_ADDRESS = "https://api.openai.com/v1"
ADDRESS_ENV = {"gemini": "GOOGLE_GEMINI_BASE_URL", "openai": "OPENAI_BASE_URL", "ollama": "OLLAMA_HOST"}
POOL = "pool"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOOK = "look at HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and its address"

Provider = Literal["gemini", "openai", "ollama"]


class SetUpMissing(Exception):
    """The model cannot be built from what the environment holds; the message names the command that mends it."""


def build_model(
    name: str,
    *,
    model_timeout_s: float | None,
    environment: Mapping[str, str],
    levers: "Levers | None" = None,
) -> "BaseChatModel":
    """The chat model of that name: `offline`, `scripted:FILE`, `gemini-*`, `openai:MODEL`, else an Ollama tag.

    The provider's own timeout is max(`MIN_PROVIDER_TIMEOUT_S`, ours), so that ours fires first or with it; no retry
    hides a second paid call. A probe's `levers` bring an HTTP timeout and a bound of the output of their own.

    Raises:
        SetUpMissing: a key, a file or a setting is missing or wrong.
    """
    if name == POOL:
        raise SetUpMissing("a pool serves graph.py only; name one model, of those that python preflight.py finds ready")
    if form := _meant(name):
        raise SetUpMissing(f"there is no model {name!a}; did you mean {form}?")
    if name == "offline":
        from models.offline import OfflineTriage

        return OfflineTriage()
    if name.startswith("scripted:"):
        from models.scripted import ScriptedModel

        return ScriptedModel.from_file(name.removeprefix("scripted:"))
    timeout_s = None if model_timeout_s is None else max(MIN_PROVIDER_TIMEOUT_S, model_timeout_s)
    if levers is not None:
        timeout_s = levers.http_timeout_s
    return build_as(
        provider_of(name),
        name.removeprefix("openai:"),
        timeout_s=timeout_s,
        environment=environment,
        levers=levers,
    )


def build_as(
    provider: Provider,
    model: str,
    *,
    timeout_s: float | None,
    environment: Mapping[str, str],
    levers: "Levers | None" = None,
    max_output_tokens: int | None = None,
) -> "BaseChatModel":
    """The chat model that a provider knows by that name, whatever its name looks like; `timeout_s` is per read.

    Raises:
        SetUpMissing: a key or a setting is missing or wrong.
    """
    how: dict[str, Any] = {"timeout_s": timeout_s, "environment": environment, "levers": levers}
    how["max_output_tokens"] = max_output_tokens
    try:
        if provider == "gemini":
            from models.gemini import gemini_model

            return gemini_model(model, **how)
        if provider == "openai":
            from models.openai import openai_model

            return openai_model(model, **how)
        from models.ollama import ollama_model

        return ollama_model(model, **how)
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError) as exc:  # what a proxy's or a certificate's setting does to an HTTP client
        raise SetUpMissing(f"the client of {model} cannot be built ({type(exc).__name__}: {exc}); {_LOOK}") from exc
    except ValueError as exc:  # so says an SDK of an address, a name or a number; its text may quote a key
        raise SetUpMissing(f"the client of {model} cannot be built ({type(exc).__name__}); {_LOOK}") from None


def endpoint(name: str, environment: Mapping[str, str]) -> str:
    """Where that model's requests go: `in_process`, `provider` (its own), `loopback`, `overridden`, or `pool`."""
    if name == POOL:
        return POOL
    if name == "offline" or name.startswith("scripted:"):
        return "in_process"
    return endpoint_of(provider_of(name), environment)


def provider_of(name: str) -> Provider:
    """Whose model a name is, in-process ones apart."""
    return "gemini" if name.startswith("gemini-") else "openai" if name.startswith("openai:") else "ollama"


def looks_for_proxy(provider: Provider, way: str) -> bool:
    """Whether a provider's client, whose requests go that `way`, takes the environment's proxy."""
    return provider != "ollama" and way != "loopback"


def endpoint_of(provider: Provider, environment: Mapping[str, str]) -> str:
    """The same for all models of a provider."""
    host = environment.get(ADDRESS_ENV[provider], "").strip()
    if provider == "openai":
        return openai_endpoint(host or OPENAI_ADDRESS)
    if provider == "gemini" and not host:
        return "provider"
    return "loopback" if _hostname(host or "127.0.0.1") in _LOOPBACK else "overridden"


def openai_endpoint(address: str) -> str:
    """The same for an address of OpenAI's protocol; the provider's own hosts are its regional ones as well."""
    named = _hostname(address)
    if named == "api.openai.com" or named.endswith(".api.openai.com"):
        return "provider"
    return "loopback" if named in _LOOPBACK else "overridden"


def _hostname(host: str) -> str:
    try:
        return urlsplit(host if "://" in host else f"http://{host}").hostname or ""
    except ValueError:  # no address: whoever builds the model says so
        return ""


def _meant(name: str) -> str | None:
    """What a name that is no model's was probably meant to be; None where it may be one."""
    plain = name.lower().removeprefix("models/")
    for kind, is_one, form in (
        ("offline", name == "offline", "offline"),
        ("scripted", name.startswith("scripted:"), "scripted:FILE"),
        ("gemini", name.startswith("gemini-"), "gemini-3.8-flash"),
        ("openai", name.startswith("openai:") and name.removeprefix("openai:").strip(), "openai:MODEL"),
        (r"gpt-\d|o\d", False, "openai:MODEL"),  # not gpt-oss, which Ollama has
    ):
        tag = ":" in name and kind != "scripted" and not plain.startswith("openai:")  # as Ollama's have it
        if not is_one and not tag and re.match(kind, plain):
            return form
    return None
