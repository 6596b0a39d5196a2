"""Chat models behind one factory: a name becomes a model. SDKs are imported only where their model is built."""

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

    from models.meter import Levers

# Reported in public, not seen here: the Gemini service refuses a provider-side deadline below 10 s with a 400.
MIN_PROVIDER_TIMEOUT_S = 10.0


class SetUpMissing(Exception):
    """The model cannot be built from what the environment holds; the message names the command that mends it."""


def build_model(
    name: str, *, model_timeout_s: float | None, environment: Mapping[str, str], levers: "Levers | None" = None
) -> "BaseChatModel":
    """The chat model of that name: `offline`, `scripted:FILE`, `gemini-*`, else an Ollama tag.

    The provider's own timeout is max(`MIN_PROVIDER_TIMEOUT_S`, ours), so that ours fires first or with it; no retry
    hides a second paid call. A probe's `levers` bring an HTTP timeout of their own.

    Raises:
        SetUpMissing: a key, a file or a setting is missing or wrong.
    """
    timeout_s = None if model_timeout_s is None else max(MIN_PROVIDER_TIMEOUT_S, model_timeout_s)
    if levers is not None:
        timeout_s = levers.http_timeout_s
    for kind, is_one, form in (
        ("offline", name == "offline", "offline"),
        ("scripted", name.startswith("scripted:"), "scripted:FILE"),
        ("gemini", name.startswith("gemini-"), "gemini-3.8-flash"),
    ):
        tag = ":" in name and kind != "scripted"  # as Ollama's have it
        if not is_one and not tag and name.lower().removeprefix("models/").startswith(kind):
            raise SetUpMissing(f"there is no model {name!a}; did you mean {form}?")
    try:
        return _build(name, timeout_s, environment, levers)
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError) as exc:  # what a proxy's or a certificate's setting does to an HTTP client
        raise SetUpMissing(
            f"the client of {name} cannot be built ({type(exc).__name__}: {exc});"
            " look at HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
        ) from exc


def endpoint(name: str, environment: Mapping[str, str]) -> str:
    """Where that model's requests go: `in_process`, `provider` (its own), `loopback` or `overridden`."""
    if name == "offline" or name.startswith("scripted:"):
        return "in_process"
    gemini = name.startswith("gemini-")
    host = environment.get("GOOGLE_GEMINI_BASE_URL" if gemini else "OLLAMA_HOST", "").strip()
    if gemini and not host:
        return "provider"
    try:
        named = urlsplit(host if "://" in host else f"http://{host or '127.0.0.1'}").hostname
    except ValueError:  # no address: whoever builds the model says so
        named = None
    return "loopback" if named in ("127.0.0.1", "localhost", "::1") else "overridden"


def _build(
    name: str, timeout_s: float | None, environment: Mapping[str, str], levers: "Levers | None"
) -> "BaseChatModel":
    if name == "offline":
        from models.offline import OfflineTriage

        return OfflineTriage()
    if name.startswith("scripted:"):
        from models.scripted import ScriptedModel

        return ScriptedModel.from_file(name.removeprefix("scripted:"))
    if name.startswith("gemini-"):
        from models.gemini import gemini_model

        return gemini_model(name, timeout_s=timeout_s, environment=environment, levers=levers)
    from models.ollama import ollama_model

    return ollama_model(name, timeout_s=timeout_s, environment=environment, levers=levers)
