"""The limits of a run where no one sets others, and what no limit may be: 0, negative, NaN. `None` is unlimited."""

import math

MODEL_TIMEOUT_S = 60.0
DEADLINE_S = 120.0
MAX_STEPS = 12


def check_seconds(name: str, value: float | None) -> None:
    """Refuse what is no length of time, by the name that the user knows it by.

    Raises:
        ValueError: `value` is no number, NaN, infinite, 0 or negative.
    """
    if value is None:
        return
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number of seconds above 0 (or None for unlimited), not {value!r}")


def check_count(name: str, value: int | None) -> None:
    """Refuse what is no positive whole number, by the name that the user knows it by.

    Raises:
        ValueError: `value` is no int, 0 or negative.
    """
    if value is None:
        return
    if type(value) is not int or value <= 0:
        raise ValueError(f"{name} must be a whole number above 0 (or None for unlimited), not {value!r}")
