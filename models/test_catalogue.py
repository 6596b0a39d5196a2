"""The pool's file: what is taken, in which order, and that a refusal names the key and never a value."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import MAX_CANDIDATES, Candidate, read_catalogue
from models.factory import SetUpMissing

ROOT = Path(__file__).parent.parent
KEY = "sk-fake-key-for-tests"
LEAST = 'id = "a"\nprovider = "ollama"\nmodel = "m"\ncost_rank = 1\n'


def read(tmp_path: Path, text: str | bytes) -> list[Candidate]:
    file = tmp_path / "pool.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_catalogue(file)


def tables(*bodies: str) -> str:
    return "\n".join(f"[[candidate]]\n{body}" for body in bodies)


def table(name: str, **more: Any) -> str:
    rows = {"id": f'"{name}"', "provider": '"ollama"', "model": '"m"', "cost_rank": 1, **more}
    return "".join(f"{key} = {value}\n" for key, value in rows.items())


def test_the_example_is_a_pool() -> None:
    assert {candidate.provider for candidate in read_catalogue(ROOT / "models.toml")} == {"gemini", "ollama", "openai"}


def test_the_example_says_what_each_key_means() -> None:
    text = (ROOT / "models.toml").read_text(encoding="utf-8")
    assert [key for key in Candidate.model_fields if f"#   {key} " not in text] == []


def test_what_a_file_leaves_out_is_unknown(tmp_path: Path) -> None:
    (candidate,) = read(tmp_path, tables(LEAST))
    assert (candidate.base_url, candidate.api_key_env, candidate.max_output_tokens, candidate.context_tokens) == (
        None,
    ) * 4
    assert candidate.zero_retention is False
    assert candidate.ceiling is None


def test_the_order_is_cost_then_attested_then_provider_then_model(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        tables(
            table("dear", cost_rank=2, zero_retention="true"),
            table("openai", provider='"openai"'),
            table("b", model='"b"'),
            table("a", model='"a"'),
            table("gemini", provider='"gemini"'),
            table("attested", provider='"openai"', zero_retention="true"),
        ),
    )
    assert [candidate.id for candidate in found] == ["attested", "gemini", "a", "b", "openai", "dear"]


@pytest.mark.parametrize(
    ("ceilings", "ceiling"),
    [
        ({"max_output_tokens": 100}, 100),
        ({"context_tokens": 100}, 50),
        ({"context_tokens": 1}, 1),
        ({"max_output_tokens": 30, "context_tokens": 100}, 30),
        ({"max_output_tokens": 90, "context_tokens": 100}, 50),
    ],
)
def test_the_lower_ceiling_holds_and_half_a_context_is_for_reading(ceilings: dict[str, int], ceiling: int) -> None:
    assert Candidate(id="a", provider="ollama", model="m", cost_rank=0, **ceilings).ceiling == ceiling  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (LEAST.replace('"a"', '"a b"'), "'id': takes up to 64 letters"),
        (LEAST.replace('"a"', "7"), "'id': takes up to 64 letters"),
        (LEAST.replace('"ollama"', '"azure"'), "'provider': Input should be 'gemini', 'ollama' or 'openai'"),
        (LEAST.replace('"m"', '""'), "'model'"),
        (LEAST.replace('"m"', r'"m\u001b[31m"'), "'model'"),
        (LEAST.replace("1", "-1"), "'cost_rank'"),
        (LEAST.replace("1", '"1"'), "'cost_rank'"),
        (LEAST.replace("1", "true"), "'cost_rank'"),
        (LEAST.replace("1", "1.0"), "'cost_rank'"),
        (LEAST.replace("cost_rank = 1", ""), "'cost_rank': is needed"),
        (LEAST + "max_output_tokens = 0", "'max_output_tokens'"),
        (LEAST + "context_tokens = 1e9", "'context_tokens'"),
        (LEAST + 'zero_retention = "yes"', "'zero_retention'"),
        (LEAST + "zero_retention = 1", "'zero_retention'"),
        (LEAST + "max_tokens = 9", "'max_tokens': there is no such key; there are id, provider,"),
        (LEAST + f'api_key = "{KEY}"', "'api_key': there is no such key"),
        (LEAST + f'api_key_env = "{KEY}"', "'api_key_env': takes the name of an environment variable, never a key"),
        (LEAST + f'base_url = "http://user:{KEY}@h/v1"', "'base_url': takes an http or https address without user"),
        (LEAST + f'base_url = "http://h/v1?key={KEY}"', "'base_url': takes an http or https address without user"),
        (LEAST + 'base_url = "ftp://h"', "'base_url'"),
        (LEAST + 'base_url = "http://"', "'base_url'"),
        (LEAST + 'base_url = "http://[::1"', "'base_url'"),
        (LEAST + 'base_url = "http://h:x/"', "'base_url'"),
    ],
)
def test_a_value_that_cannot_be_taken_is_refused_by_its_key(tmp_path: Path, body: str, names: str) -> None:
    with pytest.raises(SetUpMissing) as raised:
        read(tmp_path, tables(table("first"), body))
    assert f"candidate 2: {names}" in str(raised.value)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a pool needs at least one"),
        ("candidate = 7", "a pool needs at least one"),
        ("candidate = []", "a pool needs at least one"),
        ("candidate = [1]", "a pool needs at least one"),
        (f"key = '{KEY}'\n" + tables(LEAST), "there is no key 'key'"),
        (tables(LEAST, LEAST), "there are two candidates a"),
        (tables(*[table(f"c{n}") for n in range(MAX_CANDIDATES + 1)]), "13 candidates; a pool takes at most 12"),
        (f"[[candidate]]\nid = {KEY}", "no TOML (at line 2"),
        (b"\xff\xfe", "no TOML (no UTF-8)"),
        ("candidate = " + "[" * 5_000, "nested too deeply"),
        ("candidate = " + "9" * 5_000, "a number is too long"),
        (b"#" * (256 * 1024 + 1), "larger than"),
    ],
)
def test_a_file_that_is_no_pool_is_refused_in_one_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(SetUpMissing) as raised:
        read(tmp_path, text)
    assert says in str(raised.value)
    assert KEY not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_told_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(SetUpMissing, match=r"No such file or directory; --pool names a file such as models\.toml"):
        read_catalogue(tmp_path / "none.toml")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(SetUpMissing, match="no plain file"):
            read_catalogue(path)


def test_twelve_candidates_are_a_pool(tmp_path: Path) -> None:
    assert len(read(tmp_path, tables(*[table(f"c{n}") for n in range(MAX_CANDIDATES)]))) == MAX_CANDIDATES


def test_a_candidate_is_built_with_its_own_address_and_key() -> None:
    about: dict[str, Any] = {"id": "a", "model": "m", "cost_rank": 0, "base_url": "http://h/v1", "api_key_env": "MINE"}
    outside = {"MINE": f" {KEY} ", "OPENAI_API_KEY": "other", "OPENAI_BASE_URL": "http://other"}
    own = Candidate(provider="openai", **about).environment(outside)
    assert (own["OPENAI_API_KEY"], own["OPENAI_BASE_URL"]) == (KEY, "http://h/v1")
    own = Candidate(provider="gemini", **about).environment(outside)
    assert (own["GOOGLE_API_KEY"], own["GOOGLE_GEMINI_BASE_URL"]) == (KEY, "http://h/v1")
    assert outside["OPENAI_API_KEY"] == "other"


@pytest.mark.parametrize(
    ("provider", "usual"), [("openai", "OPENAI_API_KEY"), ("gemini", "GOOGLE_API_KEY"), ("ollama", "OLLAMA_API_KEY")]
)
def test_the_usual_key_is_sent_to_no_other_address(provider: Any, usual: str) -> None:
    elsewhere = Candidate(id="a", provider=provider, model="m", cost_rank=0, base_url="http://h/v1")
    assert KEY not in elsewhere.environment({usual: KEY}).values()
    at_home = Candidate(id="a", provider=provider, model="m", cost_rank=0)
    assert at_home.environment({usual: KEY})[usual] == KEY


def test_a_key_that_is_not_there_is_told_by_the_candidate() -> None:
    lost = Candidate(id="a", provider="openai", model="m", cost_rank=0, api_key_env="MINE")
    with pytest.raises(SetUpMissing, match="candidate a: the variable that its api_key_env names holds no key"):
        lost.environment({"MINE": " "})


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: tables(text).encode("utf-8", "replace")))
def test_whatever_a_file_holds_it_is_a_pool_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    try:
        found = read(tmp_path_factory.mktemp("pool"), data)
    except SetUpMissing:
        return
    assert found
