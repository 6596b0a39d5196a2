"""A file of scenarios is taken as it is meant, or refused by the name of the scenario and the key."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scenarios
from bounded.limits import Limits
from bounded.timeouts import ToolTimeouts
from scenarios import MAX_SCENARIOS, SCENARIOS, Scenario, ScenarioError, read_scenarios

GOOD = {"name": "a", "question": "Why is 415 red?"}
COUNTS = ("token_budget", "max_steps")
SECONDS = ("model_timeout_s", "deadline_s", "hold_back_s")
KEYS = [field.name for field in fields(Scenario)]


def toml(value: object) -> str:
    """A value as TOML; tables and arrays on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def written(folder: Path, *tables: Mapping[str, object]) -> Path:
    path = folder / "own.toml"
    lines = [line for table in tables for line in ("[[scenario]]", *(f"{key} = {toml(table[key])}" for key in table))]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_every_key_of_a_file_is_taken(tmp_path: Path) -> None:
    whole: dict[str, Any] = {
        "name": "slow-tool_2", "question": "Why? 🙂", "token_budget": 500, "model_timeout_s": 60, "deadline_s": 0.5,
        "max_steps": 1, "hold_back_s": 2, "tool_timeouts_s": {"fetch_job_log": 9},
    }  # fmt: skip
    derived = {"name": "B", "question": "b", "budget_after_first_reply_of": "a"}
    taken = read_scenarios(written(tmp_path, GOOD, whole, derived))
    assert taken == (
        Scenario(name="a", question="Why is 415 red?"),
        Scenario(**whole),
        Scenario(name="B", question="b", budget_after_first_reply_of="a"),
    )
    assert set(KEYS) == {*whole, *derived}


def test_the_form_of_a_file_is_documented_key_by_key() -> None:
    assert [key for key in KEYS if f"\n{key} = " not in (scenarios.__doc__ or "")] == []


def test_the_documented_example_is_a_file_that_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text((scenarios.__doc__ or "").partition("\n\n")[2], encoding="utf-8")
    assert read_scenarios(path) == (
        Scenario(
            name="patient",
            question="Why did job 815 of pull request 418 fail?",
            token_budget=5000,
            model_timeout_s=60,
            deadline_s=120,
            max_steps=12,
            hold_back_s=0.5,
            tool_timeouts_s={"fetch_job_log": 9},
        ),
        Scenario(
            name="derived",
            question="Why is CI failing on pull request 415?",
            budget_after_first_reply_of="patient",
        ),
    )


def test_a_scenarios_own_tool_timeout_beats_that_of_the_tool_set() -> None:
    own = Scenario(name="a", question="b", model_timeout_s=7, max_steps=3, tool_timeouts_s={"fetch_job_log": 9})
    assert own.limits(5, {"ci": {"fetch_job_log": 3.0}}) == Limits(
        token_budget=5,
        model_timeout_s=7,
        max_steps=3,
        tool_timeouts=ToolTimeouts(per_tool={"fetch_job_log": 9}, per_set={"ci": {"fetch_job_log": 3.0}}),
    )


def test_the_five_are_what_a_file_could_hold(tmp_path: Path) -> None:
    tables = [
        {key: value for key in KEYS if (value := getattr(scenario, key)) not in (None, {})} for scenario in SCENARIOS
    ]
    assert read_scenarios(written(tmp_path, *tables)) == SCENARIOS


NO_SECONDS = "must be a number of seconds above 0 (or None for unlimited), not "
NO_COUNT = "must be a whole number above 0, not "
BAD_SECONDS: list[object] = [0, -1, 0.0, math.nan, math.inf, True, "5", {}]
BAD_COUNTS: list[object] = [0, -1, True, 1.5, math.nan, "5", []]


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"name": None}, "name is missing"),
        ({"question": None}, "question is missing"),
        *[
            ({"name": name}, "name must be letters, digits, - and _, at most 64 of them")
            for name in ("", " ", "a b", "-a", "a/1", "a\n", "é", "x" * 65, 5, True, ["a"])
        ],
        *[({"question": question}, "question must be a text") for question in ("", " \n", 415, ["Why?"])],
        *[({key: value}, f"{key} {NO_COUNT}{value!r}") for key in COUNTS for value in BAD_COUNTS],
        *[({key: value}, f"{key} {NO_SECONDS}{value!r}") for key in SECONDS for value in BAD_SECONDS],
        ({"tool_timeouts_s": 5}, "tool_timeouts_s must be a table of tool names and seconds"),
        ({"tool_timeouts_s": {"x": 1, "fetch": 0}}, f"tool_timeouts_s.fetch {NO_SECONDS}0"),
        ({"tool_timeouts_s": {"fetch": "9"}}, f"tool_timeouts_s.fetch {NO_SECONDS}'9'"),
        ({"token_budgets": 5}, f"unknown key 'token_budgets'; the keys are {', '.join(KEYS)}"),
        ({"name": "first"}, "name stands twice"),
        (
            {"token_budget": 5, "budget_after_first_reply_of": "first"},
            "has token_budget and budget_after_first_reply_of: one of them",
        ),
        *[
            (
                {"budget_after_first_reply_of": other},
                f"budget_after_first_reply_of must name a scenario before it that is not derived itself, not {other!r}",
            )
            for other in ("nobody", "a", "derived", "later", 5, ["first"])
        ],
    ],
)
def test_each_fault_names_its_scenario_and_its_key(table: dict[str, object], fault: str, tmp_path: Path) -> None:
    first = {"name": "first", "question": "Why?"}
    derived = {"name": "derived", "question": "Why?", "budget_after_first_reply_of": "first"}
    faulty = {key: value for key, value in {**GOOD, **table}.items() if value is not None}
    path = written(tmp_path, first, derived, faulty, {"name": "later", "question": "Why?"})
    with pytest.raises(ScenarioError) as caught:
        read_scenarios(path)
    named = f" ({faulty['name']!a})" if "name" in faulty else ""
    assert str(caught.value) == f"{path}, scenario 3{named}: {fault}"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", ": must hold 1 to 100 tables [[scenario]] and nothing else"),
        (b"scenario = []", ": must hold 1 to 100 tables"),
        (b"scenario = 5", ": must hold 1 to 100 tables"),
        (b"[scenario]\nname = 'a'\nquestion = 'b'", ": must hold 1 to 100 tables"),
        (b"title = 'x'\n[[scenario]]\nname = 'a'\nquestion = 'b'", ": must hold 1 to 100 tables"),
        (b"scenario = [5]", ", scenario 1: must be a table"),
        (b"[[scenario]\nname = 'a'", ": no TOML: "),
        (b"\xff\xfe", ": no TOML: "),
        (b"x = " + b"[" * 100_000, ": no TOML: "),
        (b"x = " + b"1" * 5_000, ": no TOML: "),
    ],
)
def test_a_file_that_holds_something_else_is_refused(content: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        read_scenarios(path)
    assert str(caught.value).startswith(f"{path}{fault}")


def test_there_may_be_a_hundred_scenarios_and_no_more(tmp_path: Path) -> None:
    tables = [{"name": f"s{number}", "question": "Why?"} for number in range(MAX_SCENARIOS + 1)]
    assert len(read_scenarios(written(tmp_path, *tables[:-1]))) == MAX_SCENARIOS
    with pytest.raises(ScenarioError, match="must hold 1 to 100 tables"):
        read_scenarios(written(tmp_path, *tables))


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"/none\.toml: No such file or directory"):
        read_scenarios(tmp_path / "none.toml")
    with pytest.raises(ScenarioError, match=": Is a directory"):
        read_scenarios(tmp_path)


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
# Mostly what could be, so that every check is reached.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "name": NAMES, "question": st.just("Why?"), "budget_after_first_reply_of": NAMES,
    "token_budget": st.integers(-1, 9), "max_steps": st.integers(-1, 9),
    "tool_timeouts_s": st.dictionaries(NAMES, st.floats(), max_size=2),
    **{key: st.floats() for key in SECONDS},
}  # fmt: skip
TABLES = st.fixed_dictionaries(
    {key: LIKELY[key] for key in ("name", "question")},
    optional={**{key: LIKELY[key] | VALUES for key in KEYS if key not in ("name", "question")}, "other": VALUES},
) | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)


@settings(deadline=None)
@given(tables=st.lists(TABLES, min_size=1, max_size=4))
def test_any_tables_are_scenarios_or_a_fault_that_names_one(
    tables: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.getbasetemp(), *tables)
    try:
        taken, fault = read_scenarios(path), None
    except ScenarioError as exc:
        taken, fault = (), str(exc)
    if fault is not None:
        assert fault.startswith(f"{path}, scenario ")
        return
    assert [scenario.name for scenario in taken] == [table["name"] for table in tables]
    for scenario, table in zip(taken, tables, strict=True):
        assert {key: getattr(scenario, key) for key in table} == table
        scenario.limits(scenario.token_budget, {})


PIECES = ["[", "]", "[[", "]]", "scenario", "name", " = ", "'a'", '"', ".", ",", "{", "}", "\n", "1", "\\"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=30).map("".join)


@settings(deadline=None)
@given(text=TEXTS)
def test_any_text_is_refused_and_never_a_bug(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(text.encode())
    with pytest.raises(ScenarioError):
        read_scenarios(path)
