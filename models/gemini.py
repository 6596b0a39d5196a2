"""Gemini through langchain-google-genai: the Developer API with a key, nothing else."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_google_genai import ChatGoogleGenerativeAI
from pydantic import SecretStr

from models.attempts import note_status
from models.factory import SetUpMissing, endpoint_of

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from models.meter import Levers

# Each of these would send the conversation to another backend than the one we speak of. GOOGLE_GEMINI_BASE_URL, with
# which a user names another host for the same API, is the SDK's own setting and holds.
_OTHER_BACKENDS = ("GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_ENTERPRISE", "LANGSMITH_GATEWAY")


def gemini_model(
    name: str,
    *,
    timeout_s: float | None,
    environment: Mapping[str, str],
    levers: "Levers | None" = None,
    max_output_tokens: int | None = None,
) -> ChatGoogleGenerativeAI:
    """A Gemini model with the key from `GOOGLE_API_KEY` only; `timeout_s` in seconds.

    Raises:
        SetUpMissing: there is no key, or a setting asks for another backend.
    """
    for setting in _OTHER_BACKENDS:
        if environment.get(setting, "").lower() not in ("", "0", "false", "no"):
            raise SetUpMissing(f"{setting} selects a backend other than Gemini's Developer API; run: unset {setting}")
    key = environment.get("GOOGLE_API_KEY", "").strip()
    if not key:
        raise SetUpMissing(
            f"{name} needs a key in GOOGLE_API_KEY (only there); without one, set REVIEW_MODEL=offline, or name an"
            " Ollama model: REVIEW_MODEL=gemma4:e2b"
        )
    if not (key.isascii() and key.isprintable()):  # it would end in an error message, escaped past every mask
        raise SetUpMissing("GOOGLE_API_KEY holds characters that no key has; set it again: export GOOGLE_API_KEY=...")
    # The key's header would travel to wherever a redirect points.
    client: dict[str, Any] = {"follow_redirects": False, "event_hooks": {"response": [note_status]}}
    if endpoint_of("gemini", environment) == "loopback":
        client["trust_env"] = False  # a proxy is no way to this machine, and would read the key in plain http
    if levers is not None:
        client["transport"] = levers.meter
    return ChatGoogleGenerativeAI(
        model=name,
        api_key=SecretStr(key),
        vertexai=False,
        timeout=timeout_s,
        max_retries=1 if levers is None else 1 + levers.retries,  # the first try is one of them
        max_output_tokens=max_output_tokens if levers is None else levers.max_output_tokens,
        base_url=environment.get("GOOGLE_GEMINI_BASE_URL", "").strip() or None,
        thinking_level=None if levers is None else levers.thinking,
        client_args=client,  # of the SDK's two clients, both
    )


async def count_gemini_tokens(model: ChatGoogleGenerativeAI, messages: Sequence["BaseMessage"]) -> int:
    """The service's count of the texts of `messages`, instructions included, in one request without a retry.

    The SDK refuses instructions and tools beside the contents of a count on the Developer API, before it sends
    anything. So the instructions are counted as if the user had said them, and the tools are left out.

    Raises:
        ValueError: the reply holds no count.
        Exception: what the SDK raises.
    """
    from google.genai import types

    parts = [types.Part(text=message.text) for message in messages]
    timeout_ms = None if model.timeout is None else int(model.timeout * 1000)
    once = types.HttpOptions(timeout=timeout_ms, retry_options=types.HttpRetryOptions(attempts=1))
    counted = await model.async_client.models.count_tokens(
        model=model.model,
        contents=[types.Content(role="user", parts=parts)],
        config=types.CountTokensConfig(http_options=once),
    )
    total: int | None = counted.total_tokens
    if total is None or total < 1:
        raise ValueError(f"a count of {total} tokens")
    return total
