"""Gemini through langchain-google-genai: the Developer API with a key, nothing else."""

from collections.abc import Mapping

from langchain_google_genai import ChatGoogleGenerativeAI
from pydantic import SecretStr

from models.factory import SetUpMissing

# Each of these would send the conversation to another backend than the one we speak of. GOOGLE_GEMINI_BASE_URL, with
# which a user names another host for the same API, is the SDK's own setting and holds.
_OTHER_BACKENDS = ("GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_ENTERPRISE", "LANGSMITH_GATEWAY")


def gemini_model(name: str, *, timeout_s: float | None, environment: Mapping[str, str]) -> ChatGoogleGenerativeAI:
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
    return ChatGoogleGenerativeAI(
        model=name,
        api_key=SecretStr(key),
        vertexai=False,
        timeout=timeout_s,
        max_retries=1,  # the first try only
        client_args={"follow_redirects": False},  # the key's header would travel to wherever a redirect points
    )
