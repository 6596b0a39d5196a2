"""A model that an Ollama server holds, through langchain-ollama."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from models.attempts import note_status
from models.factory import SetUpMissing

if TYPE_CHECKING:
    from langchain_ollama import ChatOllama

    from models.meter import Levers

DEFAULT_HOST = "http://127.0.0.1:11434"


def ollama_model(
    name: str,
    *,
    timeout_s: float | None,
    environment: Mapping[str, str],
    levers: "Levers | None" = None,
    max_output_tokens: int | None = None,
) -> "ChatOllama":
    """The model of that tag on the server that `OLLAMA_HOST` names, else on this machine; `timeout_s` is per read.

    `ChatOllama(timeout=...)` is silently ignored and its client waits for ever by default, so the client's own keyword
    is used. It bounds one read only: a server that drips bytes is for the model node's timeout.

    Raises:
        SetUpMissing: `OLLAMA_HOST` is not an address.
    """
    host = environment.get("OLLAMA_HOST", "").strip() or DEFAULT_HOST
    if not _is_address(host):
        raise SetUpMissing(f"OLLAMA_HOST is not an address; for example: OLLAMA_HOST={DEFAULT_HOST}")
    from langchain_ollama import ChatOllama  # only now: the package underneath builds a client while it is imported

    # No proxy of the environment and no redirect: the conversation goes to the named host and nowhere else.
    client: dict[str, Any] = {"timeout": timeout_s, "trust_env": False, "follow_redirects": False}
    client["event_hooks"] = {"response": [note_status]}
    if levers is not None:
        client["transport"], max_output_tokens = levers.meter, levers.max_output_tokens
    model = ChatOllama(model=name, base_url=host, temperature=0, num_predict=max_output_tokens, client_kwargs=client)
    if not environment.get("OLLAMA_API_KEY"):  # the package takes it from the process, and sends it to any host
        for inner in (model._client, model._async_client):
            inner._client.headers.pop("authorization", None)
    return model


def _is_address(host: str) -> bool:
    from httpx import URL, InvalidURL  # what the client underneath goes by

    try:
        if not host.isprintable():
            return False
        parts = urlsplit(host if "://" in host else f"http://{host}")
        URL(parts.geturl())
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not set(host) & set(" \t")
        )
    except (InvalidURL, ValueError):
        return False
