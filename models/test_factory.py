"""A name becomes a model, or a refusal in one line that says what mends it; only that model's SDK is imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import Runnable
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_ollama import ChatOllama

from models.conftest import FAKE_KEY
from models.factory import MIN_PROVIDER_TIMEOUT_S, SetUpMissing, build_as, build_model, endpoint
from models.offline import OfflineTriage
from models.openai import OpenAICompatible
from models.scripted import ScriptedModel

ROOT = Path(__file__).resolve().parent.parent
KEY = {"GOOGLE_API_KEY": FAKE_KEY}


def build(name: str, environment: dict[str, str], *, model_timeout_s: float | None = 60.0) -> Any:
    return build_model(name, model_timeout_s=model_timeout_s, environment=environment)


def refusal(name: str, environment: dict[str, str]) -> str:
    """What the user is told; one line of it."""
    with pytest.raises(SetUpMissing) as refused:
        build(name, environment)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_the_default_is_a_gemini_model() -> None:
    assert isinstance(build("gemini-3.8-flash", KEY), ChatGoogleGenerativeAI)


def test_offline_needs_nothing() -> None:
    assert isinstance(build("offline", {}), OfflineTriage)


def test_a_script_is_read_from_the_file_that_the_name_names(tmp_path: Path) -> None:
    script = tmp_path / "a:b.json"
    script.write_text('[{"content": "Hello."}]')
    model = build(f"scripted:{script}", {})
    assert isinstance(model, ScriptedModel)
    assert model.replies == [{"content": "Hello."}]


@pytest.mark.parametrize("name", ["gpt-5.1", "o4-mini", "Qwen/Qwen3-8B", "llama3:8b"])
def test_what_follows_openai_is_the_name_as_the_server_knows_it(name: str) -> None:
    model = build(f"openai:{name}", {"OPENAI_API_KEY": FAKE_KEY})
    assert isinstance(model, OpenAICompatible)
    assert model.model_name == name


@pytest.mark.parametrize(
    "name",
    [
        *("openai", "OpenAI", "openai:", "openai: ", "OpenAI:gpt-5.1", "OPENAI:x", "openai/gpt-5.1", "models/openai"),
        *("gpt-5.1", "GPT-4o", "gpt-4.1-mini", "o4-mini", "o3"),
    ],
)
def test_a_name_that_is_nearly_one_of_openais_is_refused_with_its_form(name: str) -> None:
    assert "did you mean openai:MODEL?" in refusal(name, KEY)


OLLAMAS = ["gemma4:e2b", "qwen3", "offline:7b", "hf.co/some/model:Q4_K_M"]
ODD_OLLAMAS = ["gpt-oss", "gpt-oss:20b", "gpt-5:mine", "openai-like:7b", "openai/gpt-oss:20b", "olmo2", "orca-mini"]


@pytest.mark.parametrize("name", OLLAMAS + ODD_OLLAMAS)
def test_anything_else_is_an_ollama_tag(name: str) -> None:
    model = build(name, KEY)
    assert isinstance(model, ChatOllama)
    assert model.model == name


@pytest.mark.parametrize(
    "environment", [{}, {"GOOGLE_API_KEY": ""}, {"GOOGLE_API_KEY": "  "}, {"GEMINI_API_KEY": FAKE_KEY}]
)
def test_without_a_key_in_its_one_place_the_message_names_both_ways_out(environment: dict[str, str]) -> None:
    message = refusal("gemini-3.8-flash", environment)
    assert "GOOGLE_API_KEY" in message
    assert "REVIEW_MODEL=offline" in message
    assert "REVIEW_MODEL=gemma4:e2b" in message
    assert FAKE_KEY not in message


def test_a_key_that_stands_only_in_the_process_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(name, FAKE_KEY)
    assert "GOOGLE_API_KEY" in refusal("gemini-3.8-flash", {})


def test_blanks_around_a_key_are_no_part_of_it() -> None:
    key = build("gemini-3.8-flash", {"GOOGLE_API_KEY": f" {FAKE_KEY}\n"}).google_api_key
    assert key.get_secret_value() == FAKE_KEY


@pytest.mark.parametrize(
    "key", ["fake-key\nfor-tests", "fake-key\x00for-tests", "fake-key\u2019for-tests", "ключ-ключ"]
)
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(key: str) -> None:
    """Let through, it fails in the HTTP client, whose message holds it escaped, where no mask finds it."""
    message = refusal("gemini-3.8-flash", {"GOOGLE_API_KEY": key})
    assert "GOOGLE_API_KEY" in message
    assert key[:8] not in message


@pytest.mark.parametrize("setting", ["GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_ENTERPRISE"])
@pytest.mark.parametrize("value", ["true", "True", "1", "yes", " TRUE "])
def test_another_cloud_backend_is_refused_with_the_command_that_mends_it(setting: str, value: str) -> None:
    assert f"unset {setting}" in refusal("gemini-3.8-flash", {**KEY, setting: value})


@pytest.mark.parametrize("value", ["true", "1", "https://gateway.example", " "])
def test_a_gateway_in_between_is_refused_with_the_command_that_mends_it(value: str) -> None:
    """A blank is one as well: the adapter takes any text but a no for an address."""
    assert "unset LANGSMITH_GATEWAY" in refusal("gemini-3.8-flash", {**KEY, "LANGSMITH_GATEWAY": value})


@pytest.mark.parametrize("setting", ["GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_ENTERPRISE", "LANGSMITH_GATEWAY"])
@pytest.mark.parametrize("value", ["", "false", "False", "0", "no"])
def test_a_setting_that_says_no_is_no_backend(setting: str, value: str) -> None:
    assert isinstance(build("gemini-3.8-flash", {**KEY, setting: value}), ChatGoogleGenerativeAI)


def test_cloud_settings_do_not_concern_the_other_models() -> None:
    everything = {"GOOGLE_GENAI_USE_VERTEXAI": "true", "LANGSMITH_GATEWAY": "true"}
    assert isinstance(build("gemma4:e2b", everything), ChatOllama)
    assert isinstance(build("offline", everything), OfflineTriage)


OPENAI, OPENAI_KEY = "openai:gpt-5.1", {"OPENAI_API_KEY": FAKE_KEY}


@pytest.mark.parametrize("setting", ["OPENAI_API_BASE", "OPENAI_PROXY", "LANGSMITH_GATEWAY"])
def test_another_way_to_openai_is_refused_with_the_command_that_mends_it(setting: str) -> None:
    assert f"unset {setting}" in refusal(OPENAI, {**OPENAI_KEY, setting: "https://elsewhere.example/v1"})
    assert isinstance(build(OPENAI, {**OPENAI_KEY, setting: ""}), OpenAICompatible)


@pytest.mark.parametrize("setting", [{}, {"OPENAI_API_KEY": " "}, {"OPENAI_BASE_URL": "https://eu.api.openai.com/v1"}])
def test_openai_itself_needs_a_key_in_its_one_place(setting: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, FAKE_KEY)
    message = refusal(OPENAI, {**KEY, **setting})
    assert "OPENAI_API_KEY" in message
    assert "REVIEW_MODEL=offline" in message


@pytest.mark.parametrize("key", ["fake-key\nfor-tests", "fake-key\u2019for-tests"])
def test_a_key_for_openai_that_no_header_can_hold_is_refused_without_showing_it(key: str) -> None:
    message = refusal(OPENAI, {"OPENAI_API_KEY": key})
    assert "export OPENAI_API_KEY" in message
    assert key[:8] not in message


@pytest.mark.parametrize("host", ["http://127.0.0.1:8000/v1", "http://gpu-box:8000/v1", "https://gateway.example/v1"])
def test_another_server_may_do_without_a_key(host: str) -> None:
    assert isinstance(build(OPENAI, {"OPENAI_BASE_URL": host}), OpenAICompatible)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:8000/v1", "localhost", "ftp://a.example", "http://", "http://[::1", "http://127.0.0.1:99999"),
        *("http://user:pass@a.example/v1", "http://a.example/v1?key=pass", "http://a b/v1", "http://a\x00.example"),
        *("http://a.example\\.api.openai.com", "http://a.example/v1#x", "http://ä.example"),
    ],
)
def test_an_address_for_openai_that_is_none_is_refused_in_words_of_ours(address: str) -> None:
    message = refusal(OPENAI, {**OPENAI_KEY, "OPENAI_BASE_URL": address})
    assert "OPENAI_BASE_URL=http://127.0.0.1:8000/v1" in message
    assert "pass" not in message


@pytest.mark.parametrize(
    ("name", "address", "way"),
    [
        (OPENAI, "", "provider"),
        (OPENAI, "https://api.openai.com/v1", "provider"),
        (OPENAI, "https://EU.api.openai.com/v1/", "provider"),
        (OPENAI, "https://api.openai.com.example/v1", "overridden"),
        (OPENAI, "https://notapi.openai.com.example/v1", "overridden"),
        (OPENAI, "http://[::1", "overridden"),
        (OPENAI, "http://localhost:8000/v1", "loopback"),
        (OPENAI, "http://[::1]:8000/v1", "loopback"),
        ("gemma4:e2b", "https://gateway.example/v1", "loopback"),  # not its setting
        ("gemini-3.8-flash", "https://gateway.example/v1", "provider"),
        ("offline", "https://gateway.example/v1", "in_process"),
    ],
)
def test_the_endpoint_is_known_before_the_model_is_built(name: str, address: str, way: str) -> None:
    assert endpoint(name, {"OPENAI_BASE_URL": address}) == way


@pytest.mark.parametrize(
    ("ours", "provider"), [(0.5, MIN_PROVIDER_TIMEOUT_S), (10.0, 10.0), (60.0, 60.0), (None, None)]
)
def test_provider_timeout_is_ours_but_never_below_its_minimum(ours: float | None, provider: float | None) -> None:
    assert build("gemini-3.8-flash", KEY, model_timeout_s=ours).timeout == provider
    assert build("gemma4:e2b", {}, model_timeout_s=ours).client_kwargs["timeout"] == provider
    assert build(OPENAI, OPENAI_KEY, model_timeout_s=ours).root_async_client.timeout == provider


def test_a_name_that_looks_like_another_providers_is_built_as_what_it_is_said_to_be() -> None:
    how: dict[str, Any] = {"timeout_s": 60.0, "environment": {**KEY, **OPENAI_KEY}}
    assert isinstance(build_as("ollama", "gemini-distilled", **how), ChatOllama)
    assert isinstance(build_as("openai", "gemini-3.8-flash", **how), OpenAICompatible)
    assert isinstance(build_as("gemini", "gemma-4", **how), ChatGoogleGenerativeAI)


def test_a_bound_of_the_output_reaches_each_provider() -> None:
    how: dict[str, Any] = {"timeout_s": 60.0, "environment": {**KEY, **OPENAI_KEY}, "max_output_tokens": 64}
    providers: list[Any] = ["gemini", "ollama", "openai"]
    gemini, ollama, openai = (build_as(provider, "m", **how) for provider in providers)
    assert [getattr(gemini, "max_output_tokens", 0), getattr(ollama, "num_predict", 0)] == [64, 64]
    assert getattr(openai, "max_tokens", 0) == 64


def test_the_first_try_is_the_only_one() -> None:
    assert build("gemini-3.8-flash", KEY).max_retries == 1
    assert build(OPENAI, OPENAI_KEY).root_async_client.max_retries == 0


@pytest.mark.parametrize("name", ["gemini-3.8-flash", "gemma4:e2b", "offline", OPENAI])
def test_every_model_takes_tools(name: str) -> None:
    assert isinstance(build(name, {**KEY, **OPENAI_KEY}).bind_tools([]), Runnable)


@pytest.mark.parametrize("host", ["", " "])
def test_without_a_host_the_server_of_this_machine_is_meant(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", host)  # as on the command line: the SDK looks there as well
    client = build("gemma4:e2b", {"OLLAMA_HOST": host})._async_client._client
    assert str(client.base_url) == "http://127.0.0.1:11434"


@pytest.mark.parametrize(
    "host", ["127.0.0.1:notaport", "http://127.0.0.1:99999", "http://[::1", "http://user:pass@[::1"]
)
def test_a_host_that_is_no_address_is_refused_in_words_of_ours(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", host)  # as on the command line: the SDK looks there as well
    message = refusal("gemma4:e2b", {"OLLAMA_HOST": host})
    assert "OLLAMA_HOST=http://127.0.0.1:11434" in message
    assert "pydantic" not in message
    assert "pass" not in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("offline", set()),
        ("gemini-3.8-flash", {"langchain_google_genai", "google.genai"}),
        ("gemma4:e2b", {"langchain_ollama", "ollama"}),
        (OPENAI, {"langchain_openai", "openai"}),
    ],
)
def test_only_the_sdk_of_the_model_that_is_built_is_imported(name: str, imported: set[str]) -> None:
    sdks = ["langchain_google_genai", "google.genai", "langchain_ollama", "ollama", "langchain_openai", "openai"]
    code = (
        "import sys; from models.factory import build_model\n"
        f"build_model({name!r}, model_timeout_s=60.0, environment={ {**KEY, **OPENAI_KEY}!r})\n"
        f"print(*(sdk for sdk in {sdks!r} if sdk in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == imported


@pytest.mark.slow
def test_importing_the_factory_imports_no_model_at_all() -> None:
    ours = "sorted(name for name in sys.modules if name.startswith(('lang', 'models.')))"
    code = f"import sys, models.factory; print(*{ours})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["models.factory"]
