"""A model that an Ollama server holds, through langchain-ollama."""

from collections.abc import Mapping

from langchain_ollama import ChatOllama

from models.factory import SetUpMissing

DEFAULT_HOST = "http://127.0.0.1:11434"


def ollama_model(name: str, *, timeout_s: float | None, environment: Mapping[str, str]) -> ChatOllama:
    """The model of that tag on the server that `OLLAMA_HOST` names, else on this machine; `timeout_s` is per read.

    `ChatOllama(timeout=...)` is silently ignored and its client waits for ever by default, so the client's own keyword
    is used. It bounds one read only: a server that drips bytes is for the model node's timeout.

    Raises:
        SetUpMissing: `OLLAMA_HOST` is no address.
    """
    host = environment.get("OLLAMA_HOST", "").strip() or DEFAULT_HOST
    try:
        # No proxy of the environment stands between: the conversation goes to the named host and nowhere else.
        client = {"timeout": timeout_s, "trust_env": False}
        return ChatOllama(model=name, base_url=host, temperature=0, client_kwargs=client)
    except ValueError as exc:
        raise SetUpMissing(f"OLLAMA_HOST is not an address; for example: OLLAMA_HOST={DEFAULT_HOST}") from exc
