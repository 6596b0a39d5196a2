"""How long one tool call may take: an argument of the call, per tool, per tool set, default; one ceiling. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_S = 10.0
CEILING_S = 600.0
TIMEOUT_ARGUMENT = "timeout_s"
# A tool that was given its own limit should be the one to report it: ours fires this much later.
AFTER_THE_TOOLS_OWN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What one call really gets, and which rule said so. `seconds` None is unlimited."""

    seconds: float | None
    source: str

    def narrowed(self, left_s: float | None) -> "Bound":
        """min(this, the time left before a deadline); the deadline is the source only where it is the nearer one."""
        if left_s is None or (self.seconds is not None and self.seconds <= left_s):
            return self
        return Bound(seconds=left_s, source="deadline")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTimeouts:
    """The one timeout policy. All values are seconds; None is unlimited.

    Attributes:
        default_s: for a tool that nothing below names.
        per_tool: tool name -> seconds.
        per_set: tool set -> tool name -> seconds: what a source brings for its own tools.
        self_limiting: names of the tools that declare an argument `timeout_s`, which then beats all of these.

    Raises:
        ValueError: a value is no number, 0, negative, NaN or infinite; the message names it.
    """

    default_s: float | None = DEFAULT_S
    per_tool: Mapping[str, float | None] = field(default_factory=dict)
    per_set: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    self_limiting: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_seconds("default_s", self.default_s)
        for values in (self.per_tool, *self.per_set.values()):
            for tool, seconds in values.items():
                check_seconds(f"the timeout of {tool}", seconds)

    def resolve(self, tool_set: str, tool: str, args: Mapping[str, object]) -> Bound:
        """The bound of one call before any deadline narrows it.

        `args` are the call's own, unmodified. A `timeout_s` that is no positive number is no limit: the tool's
        schema refuses it, and until then the next rule holds.
        """
        asked = args.get(TIMEOUT_ARGUMENT) if tool in self.self_limiting else None
        if isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0:
            return Bound(seconds=float(min(asked, CEILING_S)) + AFTER_THE_TOOLS_OWN_S, source="argument")
        if tool in self.per_tool:
            return Bound(seconds=self.per_tool[tool], source="tool")
        if tool in (brought := self.per_set.get(tool_set, {})):
            return Bound(seconds=brought[tool], source="tool_set")
        return Bound(seconds=self.default_s, source="default")


def check_seconds(name: str, value: float | None) -> None:
    """Refuse what is no length of time, by the name that the user knows it by.

    Raises:
        ValueError: `value` is no number, NaN, infinite, 0 or negative.
    """
    if value is None:
        return
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number of seconds above 0 (or None for unlimited), not {value!r}")
