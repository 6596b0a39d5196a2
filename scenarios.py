"""The scenarios that `record.py` compares: its own five, or those of a TOML file.

[[scenario]]
name = "patient"           # letters, digits, - and _; each name once
question = "Why did job 815 of pull request 418 fail?"
token_budget = 5000        # this and all below are optional, and as graph.py has them
model_timeout_s = 60
deadline_s = 120
max_steps = 12
hold_back_s = 0.5          # with the offline model only: hold each reply back by so many seconds
tool_timeouts_s = { fetch_job_log = 9 }

[[scenario]]
name = "derived"
question = "Why is CI failing on pull request 415?"
budget_after_first_reply_of = "patient"   # a token budget of what that one's first reply used, and one more
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bounded.limits import DEADLINE_S, MAX_STEPS, MODEL_TIMEOUT_S, Limits, check_count
from bounded.timeouts import ToolTimeouts, check_seconds

MAX_SCENARIOS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class ScenarioError(Exception):
    """A scenario cannot be taken, or not be run as it is meant; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One question under limits of its own. Durations in seconds.

    Attributes:
        budget_after_first_reply_of: the scenario whose first reply, plus one token, is the token budget.
        hold_back_s: how long the offline model holds each reply back; other models are as slow as they are.

    Raises:
        ValueError, TypeError: a value cannot be; the message names its key.
    """

    name: str
    question: str
    token_budget: int | None = None
    budget_after_first_reply_of: str | None = None
    model_timeout_s: float = MODEL_TIMEOUT_S
    deadline_s: float = DEADLINE_S
    max_steps: int = MAX_STEPS
    hold_back_s: float | None = None
    tool_timeouts_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError("name must be letters, digits, - and _, at most 64 of them")
        if not isinstance(self.question, str) or not self.question.strip():
            raise ValueError("question must be a text")
        if self.token_budget is not None:
            check_count("token_budget", self.token_budget)
        check_count("max_steps", self.max_steps)
        for key in ("model_timeout_s", "deadline_s", "hold_back_s"):
            check_seconds(key, getattr(self, key))
        if not isinstance(self.tool_timeouts_s, Mapping):
            raise TypeError("tool_timeouts_s must be a table of tool names and seconds")
        for tool, timeout_s in self.tool_timeouts_s.items():
            check_seconds(f"tool_timeouts_s.{tool}", timeout_s)

    def limits(self, token_budget: int | None, per_set: Mapping[str, Mapping[str, float | None]]) -> Limits:
        """Its limits, beside the timeouts that a tool set brings."""
        return Limits(
            token_budget=token_budget,
            model_timeout_s=self.model_timeout_s,
            max_steps=self.max_steps,
            tool_timeouts=ToolTimeouts(per_tool=dict(self.tool_timeouts_s), per_set=per_set),
        )


_WHY_415 = "Why is CI failing on pull request 415?"
SCENARIOS = (
    Scenario(name="positive", question=_WHY_415),
    Scenario(name="slow-tool", question="Why did job 815 of pull request 418 fail?"),
    Scenario(name="budget-of-one", question=_WHY_415, token_budget=1),
    Scenario(name="budget-derived", question=_WHY_415, budget_after_first_reply_of="positive"),
    Scenario(name="model-timeout", question=_WHY_415, model_timeout_s=0.5, hold_back_s=5.0),
)


def read_scenarios(path: Path) -> tuple[Scenario, ...]:
    """The scenarios of a TOML file.

    Raises:
        ScenarioError: it cannot be read, or one of its scenarios cannot be.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ScenarioError(f"{path}: {exc.strerror if isinstance(exc, OSError) else f'no TOML: {exc}'}") from exc
    found = tables.get("scenario")
    if set(tables) != {"scenario"} or not isinstance(found, list) or not 0 < len(found) <= MAX_SCENARIOS:
        raise ScenarioError(f"{path}: must hold 1 to {MAX_SCENARIOS} tables [[scenario]] and nothing else")
    scenarios: list[Scenario] = []
    for place, table in enumerate(found, 1):
        if fault := _take(table, scenarios):
            named = f" ({table['name']!a})" if isinstance(table, dict) and "name" in table else ""
            raise ScenarioError(f"{path}, scenario {place}{named}: {fault}")
    return tuple(scenarios)


def _take(table: Any, before: list[Scenario]) -> str | None:
    keys = [field.name for field in fields(Scenario)]
    if not isinstance(table, dict):
        return "must be a table"
    if unknown := sorted(set(table) - set(keys)):
        return f"unknown key {unknown[0]!a}; the keys are {', '.join(keys)}"
    if missing := [key for key in ("name", "question") if key not in table]:
        return f"{missing[0]} is missing"
    try:
        scenario = Scenario(**table)
    except (TypeError, ValueError) as exc:
        return str(exc)
    if scenario.name in [other.name for other in before]:
        return "name stands twice"
    if (other := scenario.budget_after_first_reply_of) is not None:
        if scenario.token_budget is not None:
            return "has token_budget and budget_after_first_reply_of: one of them"
        if other not in _independent(before):
            return (
                f"budget_after_first_reply_of must name a scenario before it that is not derived itself, not {other!a}"
            )
    before.append(scenario)
    return None


def _independent(scenarios: Sequence[Scenario]) -> list[str]:
    return [scenario.name for scenario in scenarios if scenario.budget_after_first_reply_of is None]
