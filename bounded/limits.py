"""What one run may take: the limits, and what they are where no one sets others."""

from dataclasses import dataclass, field

from bounded.timeouts import ToolTimeouts, check_seconds

MODEL_TIMEOUT_S = 60.0
DEADLINE_S = 120.0
MAX_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may take. None is unlimited, where a field allows it.

    Attributes:
        token_budget: tokens known to be spent at which no further call starts; one call may overshoot it.
        model_timeout_s: seconds one model call may take.
        max_steps: model calls.
        tool_timeouts: the one policy for tool calls.

    Raises:
        ValueError: a value is no number, 0, negative, NaN or infinite; the message names it.
        TypeError: `tool_timeouts` is no policy.
    """

    token_budget: int | None = None
    model_timeout_s: float | None = MODEL_TIMEOUT_S
    max_steps: int = MAX_STEPS
    tool_timeouts: ToolTimeouts = field(default_factory=ToolTimeouts)

    def __post_init__(self) -> None:
        if self.token_budget is not None:
            check_count("token_budget", self.token_budget)
        check_seconds("model_timeout_s", self.model_timeout_s)
        check_count("max_steps", self.max_steps)
        if not isinstance(self.tool_timeouts, ToolTimeouts):
            raise TypeError(f"tool_timeouts must be a ToolTimeouts, not {self.tool_timeouts!r}")


def check_count(name: str, value: int) -> None:
    """Refuse what is no positive whole number, by the name that the user knows it by.

    Raises:
        ValueError: `value` is no int, 0 or negative.
    """
    if type(value) is not int or value <= 0:
        raise ValueError(f"{name} must be a whole number above 0, not {value!r}")
