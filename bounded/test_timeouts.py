"""The one timeout policy, as a pure function of a call."""

import math
from types import MappingProxyType
from typing import Any

import pytest

from bounded.timeouts import Bound, ToolTimeouts

POLICY = ToolTimeouts(
    default_s=10.0,
    per_tool={"named": 4.0, "patient": None},
    per_set={"ci": {"fetch_job_log": 3.0, "named": 99.0}},
    self_limiting=frozenset({"search"}),
)


@pytest.mark.parametrize(
    ("tool_set", "tool", "args", "seconds", "source"),
    [
        ("ci", "other", {}, 10.0, "default"),
        ("ci", "fetch_job_log", {}, 3.0, "tool_set"),
        ("review", "fetch_job_log", {}, 10.0, "default"),
        ("ci", "named", {}, 4.0, "tool"),
        ("ci", "patient", {}, None, "tool"),
        ("ci", "search", {"timeout_s": 5}, 6.0, "argument"),
        ("ci", "search", {"timeout_s": 0.5}, 1.5, "argument"),
        ("ci", "search", {"timeout_s": 599.5}, 600.5, "argument"),
        ("ci", "search", {"timeout_s": 600}, 601.0, "argument"),
        ("ci", "search", {"timeout_s": 10**400}, 601.0, "argument"),
        ("ci", "search", {"timeout_s": math.inf}, 601.0, "argument"),
        ("ci", "search", {"timeout_s": 0}, 10.0, "default"),
        ("ci", "search", {"timeout_s": -3}, 10.0, "default"),
        ("ci", "search", {"timeout_s": math.nan}, 10.0, "default"),
        ("ci", "search", {"timeout_s": True}, 10.0, "default"),
        ("ci", "search", {"timeout_s": "60"}, 10.0, "default"),
        ("ci", "search", {}, 10.0, "default"),
        # A tool that declares no such argument does not get to set its bound with one.
        ("ci", "other", {"timeout_s": 500}, 10.0, "default"),
    ],
)
def test_the_nearest_rule_holds(
    tool_set: str, tool: str, args: dict[str, Any], seconds: float | None, source: str
) -> None:
    assert POLICY.resolve(tool_set, tool, MappingProxyType(args)) == Bound(seconds=seconds, source=source)


def test_an_argument_beats_the_timeout_of_the_tool() -> None:
    policy = ToolTimeouts(per_tool={"search": 2.0}, self_limiting=frozenset({"search"}))
    assert policy.resolve("ci", "search", {"timeout_s": 30}).seconds == 31.0


@pytest.mark.parametrize(
    ("own", "left", "seconds", "source"),
    [
        (3.0, None, 3.0, "tool"),
        (3.0, 5.0, 3.0, "tool"),
        (3.0, 3.0, 3.0, "tool"),
        (3.0, 1.5, 1.5, "deadline"),
        (None, 1.5, 1.5, "deadline"),
        (None, None, None, "tool"),
        (3.0, 0.0, 0.0, "deadline"),
    ],
)
def test_a_deadline_narrows_a_bound_and_never_widens_it(
    own: float | None, left: float | None, seconds: float | None, source: str
) -> None:
    assert Bound(seconds=own, source="tool").narrowed(left) == Bound(seconds=seconds, source=source)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("place", ["default_s", "per_tool", "per_set"])
def test_a_timeout_that_is_none_is_refused_where_the_policy_is_made(bad: float, place: str) -> None:
    values: dict[str, Any] = {"default_s": bad, "per_tool": {"fetch": bad}, "per_set": {"ci": {"fetch": bad}}}
    with pytest.raises(ValueError, match="default_s" if place == "default_s" else "the timeout of fetch"):
        ToolTimeouts(**{place: values[place]})
