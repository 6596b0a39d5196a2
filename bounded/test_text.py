"""Untrusted text: no control sequence, no secret and no size gets through."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounded.text import MASK, cap, clean, digest, fit, mask, safe_arguments, safe_name, secret_values

ESC = "\x1b"


@pytest.mark.parametrize(
    "sequence",
    [
        "\x1b[31m",
        "\x1b[?25l",
        "\x1b[38:2::1:2:3m",
        "\x1b[2J",
        "\x1b[>4;2m",
        "\x9b31m",
        "\x1b]8;;http://x\x07",
        "\x1b]0;title\x1b\\",
        "\x1b]52;c;aGk=\x9c",
        "\x9d0;title\x07",
        "\x1bP1$r0m\x1b\\",
        "\x1b_apc\x1b\\",
        "\x1b(B",
        "\x1b#8",
        "\x1bc",
        "\x1b=",
        "\x07",
        "\x08",
        "\x00",
        "\x7f",
        "\x8e",
        "\u202e",
        "\u2066",
        "\ufeff",
        "\u200b",
        "\u061c",
        "\U000e0041",
    ],
)
def test_terminal_control_is_stripped_and_the_text_around_it_stays(sequence: str) -> None:
    assert clean(f"before{sequence}after") == "beforeafter"


def test_a_string_sequence_without_an_end_loses_its_introducer_only() -> None:
    assert clean("a\x1b]8;;http://x and the rest") == "a8;;http://x and the rest"


def test_a_sequence_that_appears_when_another_is_taken_out_is_harmless() -> None:
    assert ESC not in clean("\x1b\x1b[31m[32mred")


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029"])
def test_every_line_break_becomes_one(line_break: str) -> None:
    assert clean(f"a{line_break}b") == "a\nb"


def test_tabs_and_letters_of_all_scripts_stay() -> None:
    text = "\tnaïve Ω 漢字 🎉 ⚠️ e\u0301"
    assert clean(text) == text


@given(st.text(alphabet=st.characters(codec=None), max_size=200))
def test_cleaned_text_can_be_encoded_and_holds_no_control(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    assert not any(ord(c) < 32 and c not in "\n\t" for c in cleaned)
    assert not any(0x7F <= ord(c) <= 0x9F for c in cleaned)


@pytest.mark.parametrize(
    "unit", ["\x1b]", "\x9d", "\x1bP\x1b", "\x1b[", "\x9b0", "token=", "-----BEGIN PRIVATE KEY-----", "eyJ"]
)
def test_cleaning_takes_time_in_proportion_to_the_text(unit: str) -> None:
    # A pattern that goes back over its input would take minutes for this; the margin is for a busy machine.
    start = time.monotonic()
    clean(unit * (400_000 // len(unit)))
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "secret",
    [
        "AIza" + "x" * 35,
        "ghp_" + "a1" * 18,
        "github_pat_" + "b2" * 20,
        "glpat-" + "c3" * 10,
        "sk-proj-" + "d4" * 20,
        "AKIA" + "ABCD" * 4,
        "xoxb-1234567890-abc",
        "npm_" + "e5" * 18,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIfake\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_the_key_shapes_of_known_issuers_are_masked(secret: str) -> None:
    assert clean(f"before {secret} after") == f"before {MASK} after"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://ci:hunter2hunter2@host/x", f"https://ci:{MASK}@host/x"),
        ("Authorization: Bearer abcdef0123456789", f"Authorization: Bearer {MASK}"),
        ("https://ci:p4ssw@rd@host/x", f"https://ci:{MASK}@host/x"),
        ("https://abcdef0123456789@host/x", f"https://{MASK}@host/x"),
        ("Authorization: token abcdef0123456789", f"Authorization: token {MASK}"),
        ("Set-Cookie: session=abc; path=/\nnext", f"Set-Cookie: {MASK}\nnext"),
        ("AccountKey=abcdef0123456789", f"AccountKey={MASK}"),
        ("GET /v1/x?key=fakefakefake&alt=json", f"GET /v1/x?key={MASK}&alt=json"),
        ("api_key = 'fakefakefake'", f"api_key = '{MASK}'"),
        ("DB_PASSWORD=fakefakefake", f"DB_PASSWORD={MASK}"),
        ('{"access_token": "fakefakefake"}', f'{{"access_token": "{MASK}"}}'),
    ],
)
def test_what_stands_in_a_secrets_place_is_masked(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.parametrize(
    "text", ["tokens: 415 (known)", "the token is missing", "E  assert secret == 3", "max_tokens=4096", "key: value"]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert clean(text) == text


def test_known_secret_values_are_masked_wherever_they_stand_longest_first() -> None:
    secrets = {"fake-secret", "fake-secret-longer"}
    assert clean("x fake-secret-longer y fake-secret z", secrets) == f"x {MASK} y {MASK} z"


def test_a_secret_split_by_control_sequences_is_masked_too() -> None:
    assert clean("fake-\x1b[0msecret", {"fake-secret"}) == MASK


def test_an_environment_names_its_own_secrets() -> None:
    environment = {
        "GOOGLE_API_KEY": "fake-key-0123",
        "GITHUB_TOKEN": "fake-token-0123",
        "SIGNING_KEY": "fake+key/0123",
        "DB_PASSWORD": "short",
        "REVIEW_TOKEN_BUDGET": "100000000",
        "HOME": "/home/someone",
        "KEYBOARD": "us-international",
    }
    secrets = secret_values(environment)
    assert {"fake-key-0123", "fake-token-0123", "fake+key/0123", "fake%2Bkey%2F0123"} <= secrets
    assert not {"short", "100000000", "/home/someone", "us-international"} & secrets


@pytest.mark.parametrize(
    "form",
    [
        r"""fake \"pass\"\\word\u00e9""",
        'fake "pass"\\\\word\xe9',
        "fake+%22pass%22%5Cword%C3%A9",
        "fake%20%22pass%22%5Cword%C3%A9",
        "ZmFrZSAicGFzcyJcd29yZMOp",
        "fake%20%22pass%22%5cword%c3%a9",
        "fake &quot;pass&quot;\\word\xe9",
    ],
)
def test_a_secret_is_masked_in_the_forms_that_others_give_it(form: str) -> None:
    assert clean(f"< {form} >", secret_values({"DB_PASSWORD": 'fake "pass"\\word\xe9'})) == f"< {MASK} >"


def test_an_environment_that_is_not_utf8_and_secrets_of_many_lines_are_taken() -> None:
    assert clean("p4ss-w\ufffdrd!", secret_values({"DB_PASSWORD": "p4ss-w\udce9rd!"})) == MASK
    key = "first-line-0123\r\nsecond-line-0123\n"
    assert clean("x second-line-0123 y", secret_values({"SIGNING_KEY": key})) == f"x {MASK} y"


@pytest.mark.parametrize("secret", ["fake-secret-0123", "correct horse battery staple", "long-" * 700])
def test_no_half_of_a_secret_is_left_at_a_first_cut(secret: str) -> None:
    noise = "\x1b[32m.\x1b[0m" * 3_000  # shrinks tenfold when it is cleaned, and shows what lay at the cut
    edge = 2 * 100 + max(1_000, len(secret))
    for place in (*range(edge - len(secret) - 20, edge + 20, 7), edge):
        for text in (f"{'a' * place}{secret}{noise}", f"{noise}{secret}{'a' * place}"):
            fitted = fit(text, 100, {secret})
            assert not [part for part in ("fake", "0123", "correct", "staple", "long-") if part in fitted]


def test_far_over_the_limit_both_ends_are_shown_and_the_rest_is_counted() -> None:
    fitted = fit("the beginning " + "\x1b[0m" * 1_000_000 + "x" * 2_000 + " the end", 100)
    assert fitted.endswith("x" * 60 + " the end")
    assert "of 4,002,022 characters cut here" in fitted
    assert len(fitted) < 200
    assert fit("y" * 20_000, 500).count("y") == 500


def test_a_cap_keeps_the_beginning_and_more_of_the_end_and_says_what_it_cut() -> None:
    capped = cap("a" * 500 + "b" * 500, 100)
    assert capped == f"{'a' * 25}\n[... 900 of 1,000 characters cut here ...]\n{'b' * 75}"
    assert cap("short", 100) == "short"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("fetch_job_log", "fetch_job_log"),
        ("nope\x1b[31m", "nope\\x1b[31m"),
        ("naïve\n", "na\\xefve\\n"),
        ("x" * 65, "x" * 61 + "..."),
        (None, "None"),
        ("", ""),
    ],
)
def test_a_made_up_name_is_echoed_escaped_and_short(name: object, shown: str) -> None:
    assert safe_name(name) == shown


@pytest.mark.parametrize(
    "args",
    [
        {f"key{n}": n for n in range(100_000)},
        {"k" * 100_000: 1},
        {"list": list(range(100_000))},
        {"text": "x" * 1_000_000},
        {"many": ["x" * 400] * 1_000},
        {"wide": {f"key{n}": {"again": n} for n in range(10_000)}},
        {"odd": [float("nan"), float("inf"), 10**400, b"bytes", object(), {1, 2}, None, True]},
        {1: "a", "1": "b", None: "c"},
    ],
)
def test_any_arguments_become_small_honest_json(args: dict[str, object]) -> None:
    assert len(json.dumps(safe_arguments(args), allow_nan=False)) < 20_000


def test_arguments_of_any_depth_are_cut() -> None:
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"deeper": deep}
    assert json.dumps(safe_arguments(deep)).count("deeper") == 9


@given(
    st.dictionaries(st.text(), st.recursive(st.none() | st.floats() | st.integers() | st.text(), st.lists), max_size=5)
)
@settings(max_examples=50)
def test_whatever_a_model_sends_can_be_recorded(args: dict[str, object]) -> None:
    json.dumps(safe_arguments(args), allow_nan=False).encode("ascii")


def test_arguments_are_masked_by_value_and_by_key_and_cut() -> None:
    shown = safe_arguments(
        {"q": "x fake-secret", "password": "abc", "deep": [[[[[[[[[[1]]]]]]]]]], "big": 10**40, "long": "y" * 9_000},
        {"fake-secret"},
    )
    assert shown["q"] == f"x {MASK}"
    assert shown["password"] == MASK
    assert "[cut]" in str(shown["deep"])
    assert shown["big"] == {"repr": "a large integer"}
    assert len(str(shown["long"])) < 600
    assert safe_arguments({"fake-0123": 1}, {"fake-0123"}) == {MASK: 1}


def test_a_digest_is_the_sha256_of_the_utf8_bytes() -> None:
    assert digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
