"""A model behind an OpenAI-compatible endpoint, through langchain-openai: chat completions with a key, nothing else."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatResult
from langchain_openai import ChatOpenAI
from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import SecretStr

from models.attempts import note_status
from models.factory import OPENAI_ADDRESS, SetUpMissing, openai_endpoint

if TYPE_CHECKING:
    from models.meter import Levers

# Each of these is some library's way to another host, and none is taken: who sets one expects it to hold.
_OTHER_WAYS = ("OPENAI_API_BASE", "OPENAI_PROXY", "LANGSMITH_GATEWAY")
_NO_KEY = "none"  # servers without keys ignore what they are sent, and the SDK sends something


def openai_model(
    name: str,
    *,
    timeout_s: float | None,
    environment: Mapping[str, str],
    levers: "Levers | None" = None,
    max_output_tokens: int | None = None,
) -> "OpenAICompatible":
    """The model that the server at `OPENAI_BASE_URL` knows by that name; `timeout_s` is per read.

    `environment` is the only source: whoever has another address or key puts them there under these two names. The
    address is the provider's own by default. The key is `OPENAI_API_KEY` only; a server elsewhere may do without.

    Args:
        name: as the server knows it, without `openai:`.
        max_output_tokens: of one reply, reasoning included; a probe's `levers` say it themselves.

    Raises:
        SetUpMissing: there is no key, or no address, or a setting asks for another way.
    """
    address = _address(environment)
    way = openai_endpoint(address)
    key = _key(name, environment, way)
    if levers is not None:
        max_output_tokens = levers.max_output_tokens
    client = _client(address, key, timeout_s, levers)
    return OpenAICompatible(
        model=name,
        base_url=address,
        api_key=SecretStr(key),
        root_async_client=client,
        async_client=client.chat.completions,
        client=client.chat.completions,  # else a synchronous one is built, with redirects and proxies
        http_socket_options=(),
        openai_proxy="",
        use_responses_api=False,  # else the names of some models choose another protocol
        output_version="v0",
        disable_streaming=True,  # what merges a stream's chunks invents usage
        **_bound_of_output(max_output_tokens, way),
    )


class ReplyUnreadable(ValueError):
    """A success on the wire that is no chat completion. What it said is not in the message.

    Attributes:
        status_code: of the HTTP response.
    """

    def __init__(self, what: str, status_code: int) -> None:
        super().__init__(f"{what}, HTTP status {status_code}")
        self.status_code = status_code


class ErrorInReply(Exception):
    """The server reported an error under a status that says success, as gateways do when what they ask has failed.

    Attributes:
        status_code: of the HTTP response.
    """

    def __init__(self, status_code: int) -> None:
        super().__init__(f"an error in a reply with HTTP status {status_code}")
        self.status_code = status_code


class OpenAICompatible(ChatOpenAI):
    """`ChatOpenAI` that hands on what was on the wire: the reasoning, and only the counts that were reported.

    The reasoning is `additional_kwargs["reasoning_content"]`, whichever of its two names the server has for it. A 201
    is a reply like any other, as for the SDK; whoever asked sees the status by `note_status`.

    A reply is read here and not by `ChatOpenAI`, which would do that in the loop's default executor. Arguments that did
    not parse are sent back inside an object: llama.cpp answers 500 to a conversation that holds them as they were.
    """

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        for message in payload["messages"]:
            for call in message.get("tool_calls", ()):
                try:
                    json.loads(call["function"]["arguments"])
                except (RecursionError, ValueError):
                    call["function"]["arguments"] = json.dumps({"unparsable": call["function"]["arguments"]})
        return payload

    async def _agenerate(
        self, messages: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        payload = self._get_request_payload(messages, stop=stop, **kwargs)
        try:
            answer = (await self.async_client.with_raw_response.create(**payload)).http_response
        except APIConnectionError as exc:
            if exc.__cause__ is None:
                raise
            raise exc.__cause__ from None  # it wraps whatever the HTTP library raises, which says more
        try:
            return self._chat_result(answer.json(), answer.status_code)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:  # by its shape
            raise ReplyUnreadable(f"no chat completion ({type(exc).__name__})", answer.status_code) from None

    def _generate(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the synchronous side, for which there is no client.

        Raises:
            TypeError: always.
        """
        raise TypeError("an openai model is asynchronous: use ainvoke")

    def _chat_result(self, body: dict[str, Any], status: int) -> ChatResult:
        if body.get("error"):
            raise ErrorInReply(status)
        choice = body["choices"][0]
        said = {**choice["message"], "role": "assistant"}
        reason, served = choice.get("finish_reason"), body.get("model")
        plain: dict[str, Any] = {"choices": [{"message": said, "finish_reason": _word(reason)}]}
        if _word(served):
            plain["model"] = served
        result = self._create_chat_result(plain)
        message = result.generations[0].message
        assert isinstance(message, AIMessage)
        for field in ("reasoning_content", "reasoning", "thinking"):
            if isinstance(said.get(field), str) and said[field].strip():
                message.additional_kwargs.setdefault("reasoning_content", said[field])
        for field in ("reasoning_details", "thinking_blocks"):  # in pieces, or encrypted: that there is some counts
            if said.get(field) and isinstance(said[field], list):
                message.additional_kwargs.setdefault("reasoning_details", said[field])
        message.usage_metadata = _usage(body.get("usage"))  # assigned: a message's constructor converts what is odd
        return result


def _address(environment: Mapping[str, str]) -> str:
    for setting in _OTHER_WAYS:
        if environment.get(setting, "").lower() not in ("", "0", "false", "no"):
            raise SetUpMissing(f"{setting} is not honoured, only OPENAI_BASE_URL is; run: unset {setting}")
    address = environment.get("OPENAI_BASE_URL", "").strip() or OPENAI_ADDRESS
    if not _is_address(address):
        raise SetUpMissing("OPENAI_BASE_URL is not an address; for example: OPENAI_BASE_URL=http://127.0.0.1:8000/v1")
    return address


def _key(name: str, environment: Mapping[str, str], way: str) -> str:
    key = environment.get("OPENAI_API_KEY", "").strip()
    if not key and way == "provider":
        raise SetUpMissing(
            f"openai:{name} needs a key in OPENAI_API_KEY (only there), or a server of yours in OPENAI_BASE_URL;"
            " without either, set REVIEW_MODEL=offline"
        )
    if not (key.isascii() and key.isprintable()):  # it would end in an error message, escaped past every mask
        raise SetUpMissing("OPENAI_API_KEY holds characters that no key has; set it again: export OPENAI_API_KEY=...")
    return key or _NO_KEY


def _client(address: str, key: str, timeout_s: float | None, levers: "Levers | None") -> AsyncOpenAI:
    # The key's header would travel to wherever a redirect points. A proxy may be the only way out, and is none to this
    # machine.
    trusted = openai_endpoint(address) != "loopback"
    http: dict[str, Any] = {"timeout": timeout_s, "follow_redirects": False, "trust_env": trusted}
    http["event_hooks"] = {"response": [note_status]}
    if levers is not None:
        http["transport"] = levers.meter
    client = AsyncOpenAI(
        api_key=key,
        base_url=address,
        timeout=timeout_s,
        max_retries=0 if levers is None else levers.retries,
        http_client=DefaultAsyncHttpxClient(**http),
    )
    # The SDK takes these from the process: identities and headers for one host, which would go to any. And it looks for
    # the system's name in the loop's default executor, which a stuck name lookup may hold.
    client.organization = client.project = client.admin_api_key = None
    client._custom_headers, client._platform = {}, "Unknown"
    return client


def _usage(reported: Any) -> Any:
    """What was reported, each count as it came, under the names that a message has for them."""
    if not isinstance(reported, dict):
        return reported
    usage = _renamed(
        reported, prompt_tokens="input_tokens", completion_tokens="output_tokens", total_tokens="total_tokens"
    )
    for details, ours, counts in (
        ("prompt_tokens_details", "input_token_details", {"cached_tokens": "cache_read"}),
        ("completion_tokens_details", "output_token_details", {"reasoning_tokens": "reasoning"}),
    ):
        if isinstance(reported.get(details), dict) and (parts := _renamed(reported[details], **counts)):
            usage[ours] = parts
    return usage


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None  # a checkpointer's serializer takes not everything


def _renamed(reported: dict[str, Any], **names: str) -> dict[str, Any]:
    return {ours: reported[theirs] for theirs, ours in names.items() if reported.get(theirs) is not None}


def _bound_of_output(tokens: int | None, way: str) -> dict[str, Any]:
    """The bound under the name that the server knows.

    The provider's own reasoning models refuse `max_tokens`. Elsewhere it is the one name that all know: llama.cpp took
    no notice of `max_completion_tokens` until 2026 (its issue 13700) and Mistral answers 422, while vLLM takes both.
    """
    if tokens is None:
        return {}
    return {"max_completion_tokens": tokens} if way == "provider" else {"extra_body": {"max_tokens": tokens}}


def _is_address(address: str) -> bool:
    from httpx2 import URL, InvalidURL  # what the SDK's client goes by

    try:
        parts = urlsplit(address)
        URL(address)
        return (
            address.isascii()
            and address.isprintable()
            and not set(address) & set(" @?#\\")  # a name and password in it would be sent instead of the key
            and parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
        )
    except (InvalidURL, ValueError):
        return False
