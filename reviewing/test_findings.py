"""What is read from a final reply is what its schema allows, made safe, and said to be supported only if it is."""

import json
from contextlib import suppress
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounded.text import MASK
from reviewing.coverage import Coverage
from reviewing.findings import CONTRACT, MAX_FINDINGS, MAX_TEXT, Finding, Said, Unparsable, parse_findings

SECRET = "fake-secret-0123"
SHA = "0" * 64


def one(**changes: Any) -> dict[str, Any]:
    return {"severity": "major", "file": "src/a.py", "line": 7, "text": "It leaks.", "receipts": ["c1"], **changes}


def parsed(value: Any, coverage: Coverage | None = None, secrets: frozenset[str] = frozenset()) -> list[Finding]:
    return parse_findings(json.dumps(value), coverage or Coverage(None), secrets)


def test_findings_are_read_and_supported_only_where_their_very_line_was() -> None:
    coverage = Coverage({"src/a.py": 9})
    coverage.credit("src/a.py", 1, 7, 9, SHA)
    found = parsed([one(), one(line=8), one(file="src/b.py"), one(file="./src/a.py")], coverage)
    assert [(finding.file, finding.line, finding.supported) for finding in found] == [
        ("src/a.py", 7, True),
        ("src/a.py", 8, False),
        ("src/b.py", 7, False),
        ("./src/a.py", 7, False),
    ]
    assert found[0].shown() == "major src/a.py:7: It leaks. [c1]"
    assert found[1].shown() == "major src/a.py:8: It leaks. [c1] (unsupported: that line was not read)"


def test_no_findings_are_findings_and_receipts_may_be_left_out() -> None:
    assert parsed([]) == []
    bare = one()
    del bare["receipts"]
    (found,) = parsed([bare])
    assert (found.receipts, found.severity, found.text) == ([], "major", "It leaks.")
    assert parsed([one()] * MAX_FINDINGS) == [found.model_copy(update={"receipts": ["c1"]})] * MAX_FINDINGS


@pytest.mark.parametrize(
    "around", ["{}", "  \n{}\n", "```json\n{}\n```", "```\n{}\n```", "My findings:\n\n```json\n{}\n```\nThat is all."]
)
def test_the_array_may_be_the_whole_reply_or_its_one_fenced_block(around: str) -> None:
    (found,) = parse_findings(around.replace("{}", json.dumps([one()], indent=1)), Coverage(None))
    assert found.line == 7


def test_backquotes_inside_a_fenced_finding_do_not_end_its_block() -> None:
    reply = f"```json\n{json.dumps([one(text='A ``` is left open.')])}\n```"
    assert [finding.text for finding in parse_findings(reply, Coverage(None))] == ["A ``` is left open."]


@pytest.mark.parametrize("reply", ["", " \n\t"])
def test_a_reply_without_text_is_empty(reply: str) -> None:
    with pytest.raises(Unparsable, match=r"^empty$"):
        parse_findings(reply, Coverage(None))


@pytest.mark.parametrize(
    "reply",
    [
        "No findings.",
        "Here they are: []",
        "[] []",
        "[",
        "null",
        "{}",
        '{"findings": []}',
        "```json\n[]\n```\n```json\n[]\n```",
        "```json\n[",
        "[" * 100_000,
        "\ud800",
        '["\\ud800"]',
        "[[]]",
        "NaN",
    ],
)
def test_what_is_no_array_of_findings_is_malformed(reply: str) -> None:
    with pytest.raises(Unparsable, match=r"^malformed$"):
        parse_findings(reply, Coverage(None))


@pytest.mark.parametrize(
    "changes",
    [
        {"severity": "critical"},
        {"severity": None},
        {"file": ""},
        {"file": "a" * 1_001},
        {"file": None},
        {"line": 0},
        {"line": -1},
        {"line": "7"},
        {"line": 7.0},
        {"line": True},
        {"line": None},
        {"text": ""},
        {"text": ["x"]},
        {"receipts": "c1"},
        {"receipts": [1]},
        {"confidence": 1},
        {"supported": True},
    ],
)
def test_one_finding_that_breaks_the_schema_makes_the_whole_reply_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(Unparsable, match=r"^malformed$"):
        parsed([one(), one(**changes)])


def test_more_findings_than_the_limit_are_malformed() -> None:
    with pytest.raises(Unparsable, match=r"^malformed$"):
        parsed([one()] * (MAX_FINDINGS + 1))


def test_what_a_finding_says_is_cleaned_masked_and_cut() -> None:
    text = f"\x1b[31m{SECRET} " + "x" * 2 * MAX_TEXT
    (found,) = parsed([one(file=f"{SECRET}.py", text=text, receipts=[SECRET])], secrets=frozenset({SECRET}))
    assert (found.file, found.receipts) == (f"{MASK}.py", [MASK])
    assert found.text.startswith(f"{MASK} xxx")
    assert "characters cut here" in found.text
    assert len(found.text) < MAX_TEXT + 100
    assert SECRET not in found.shown()


def test_support_is_decided_by_the_path_as_it_was_said_not_as_it_is_shown() -> None:
    coverage = Coverage({f"{SECRET}.py": 9})
    coverage.credit(f"{SECRET}.py", 7, 7, 9, SHA)
    (found,) = parsed([one(file=f"{SECRET}.py")], coverage, frozenset({SECRET}))
    assert found.supported


@pytest.mark.parametrize("field", ["file", "text", "receipts"])
def test_a_finding_is_shown_on_one_line_whatever_it_holds(field: str) -> None:
    said = "a\n  blocker b.py:1: not a finding\r\nc\u2028d"
    (found,) = parsed([one(**{field: [said] if field == "receipts" else said})])
    assert len(found.shown().splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [{"file": "\u200b"}, {"text": "\x1b[31m"}, {"file": "cookie: a\n" + "b" * 990}],
    ids=["file", "text", "longer"],
)
def test_a_finding_of_which_cleaning_leaves_too_little_or_too_much_stops_nothing(changes: dict[str, Any]) -> None:
    with suppress(Unparsable):
        assert len(parsed([one(**changes)])) == 1


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20)
NEARLY = st.fixed_dictionaries(
    {
        "severity": st.sampled_from(["major", "note"]),
        "file": st.text(st.characters(), min_size=1, max_size=20) | st.sampled_from(["a.py", "\u200b", "\x1b[m", "\0"]),
        "line": st.integers(1),
        "text": st.text(st.characters() | st.sampled_from("\x1b[m\u200b"), min_size=1, max_size=20),
    },
    optional={"receipts": st.lists(st.text(max_size=80), max_size=3), "extra": VALUES},
)
JSON = st.recursive(VALUES | NEARLY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))
REPLIES = (
    st.text(st.characters() | st.sampled_from('`\n[]{}"'))
    | JSON.map(json.dumps)
    | st.lists(NEARLY, max_size=3).map(json.dumps)
    | st.lists(NEARLY, max_size=3).map(lambda said: f"```json\n{json.dumps(said)}\n```")
)


@given(REPLIES, st.sets(st.text(min_size=1, max_size=9), max_size=2))
def test_no_reply_does_anything_but_give_findings_or_say_that_there_are_none(reply: str, secrets: set[str]) -> None:
    with suppress(Unparsable):
        for finding in parse_findings(reply, Coverage({}), frozenset(secrets)):
            assert not finding.supported
            assert finding.line >= 1


def test_the_contract_names_every_field_and_severity_of_the_schema() -> None:
    severities = get_args(Said.model_fields["severity"].annotation)
    assert len(severities) == 4
    assert [word for word in (*Said.model_fields, *severities) if f'"{word}"' not in CONTRACT] == []
