"""What one run may take, and what no limit may be."""

import math
from typing import Any

import pytest

from bounded.limits import Limits, check_count
from bounded.timeouts import check_seconds

NO_SECONDS = [0, 0.0, -1, -0.001, math.nan, math.inf, -math.inf, True, "5", [], 1j]
NO_COUNT = [0, -1, 1.0, True, "5", math.nan, None]


@pytest.mark.parametrize("value", [None, 1, 0.001, 10**400, 1e300])
def test_a_length_of_time_is_taken(value: float | None) -> None:
    check_seconds("--deadline", value)


@pytest.mark.parametrize("value", NO_SECONDS)
def test_no_length_of_time_is_refused_by_its_name(value: float) -> None:
    with pytest.raises(ValueError, match=r"^--deadline must be a number of seconds above 0"):
        check_seconds("--deadline", value)


@pytest.mark.parametrize("value", [1, 10**30])
def test_a_whole_number_is_taken(value: int) -> None:
    check_count("token_budget", value)


@pytest.mark.parametrize("value", NO_COUNT)
def test_no_whole_number_is_refused_by_its_name(value: int) -> None:
    with pytest.raises(ValueError, match=r"^token_budget must be a whole number above 0"):
        check_count("token_budget", value)


@pytest.mark.parametrize("limits", [
    {"token_budget": 0}, {"token_budget": 1.5}, {"model_timeout_s": 0}, {"model_timeout_s": math.nan},
    {"max_steps": 0}, {"max_steps": None},
])  # fmt: skip
def test_a_limit_that_is_none_is_refused_by_its_name(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


def test_a_policy_that_is_none_is_refused() -> None:
    policy: Any = 3.0
    with pytest.raises(TypeError, match="tool_timeouts"):
        Limits(tool_timeouts=policy)
