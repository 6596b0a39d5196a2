"""What the run has spent, and whether that is known. Nothing that a provider did not report is ever a number here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The largest integer that a checkpointer's serializer takes; no provider has ever counted so far.
MAX_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One reply's usage, judged. `total` is None where it is unknown, and `fault` then says why.

    Attributes:
        total, input, output: tokens as reported; a part that was not reported as a valid integer is None.
        thinking: the part of the output that was thinking; None where it was not reported, or is more than the output.
        fault: why the total does not count; None when it does.
        raw: what the adapter handed over, for the record.
    """

    total: int | None
    input: int | None
    output: int | None
    thinking: int | None
    fault: str | None
    raw: object

    def storable(self) -> Mapping[str, Any] | None:
        """The usage as a message in a checkpoint may have it: as it came where it is whole and plain, else nothing.

        A checkpointer's serializer refuses some shapes that a message takes, and a message refuses on the way back one
        without all three counts.
        """
        if self.total is None or self.input is None or self.output is None or not isinstance(self.raw, dict):
            return None
        counts = {"input_tokens": self.input, "output_tokens": self.output, "total_tokens": self.total}
        return self.raw if all(type(key) is str and _plain(value) for key, value in self.raw.items()) else counts


def judge(raw: object) -> Usage:
    """Judge a merged reply's `usage_metadata`: only an int of 0 or more is a total.

    `type(v) is int` leaves out True, 7.0 and "9", which a typed dict lets through when it is assigned. A total above
    input + output is valid (a provider may count thinking apart), one below them, or below the cached part of the
    input, is not: langchain-google-genai 4.4 makes a total of 0 beside real parts when the wire had none.
    """
    if not isinstance(raw, Mapping) or not raw:
        why = "no usage was reported" if raw is None or raw == {} else "the reported usage is malformed"
        return Usage(total=None, input=None, output=None, thinking=None, fault=why, raw=raw)
    total, used, made = (_count(raw.get(key)) for key in ("total_tokens", "input_tokens", "output_tokens"))
    details = raw.get("input_token_details")
    cached = _count(details.get("cache_read")) if isinstance(details, Mapping) else None
    details = raw.get("output_token_details")
    thinking = _count(details.get("reasoning")) if isinstance(details, Mapping) else None
    if thinking is not None and (made is None or thinking > made):
        thinking = None
    fault = None
    if total is None:
        fault = "the reported total is missing" if "total_tokens" not in raw else "the reported total is malformed"
    elif total < max((used or 0) + (made or 0), cached or 0):
        fault = "the reported total is below its parts"
    known = total if fault is None else None
    return Usage(total=known, input=used, output=made, thinking=thinking, fault=fault, raw=raw)


class UsageLedger:
    """Tokens reported so far in one run. `known_subtotal` is the total only while `known` is true."""

    def __init__(self) -> None:
        self.known_subtotal = 0
        self.fault: str | None = None

    @property
    def known(self) -> bool:
        return self.fault is None

    def record(self, usage: Usage) -> None:
        """Charge one reply."""
        if usage.total is None:
            self.lose(usage.fault or "no usage was reported")
        else:
            self.known_subtotal += usage.total

    def lose(self, fault: str) -> None:
        """Something was spent that no one reported; the first such fault is the one kept."""
        self.fault = self.fault or fault

    def remaining(self, token_budget: int | None) -> int | None:
        """Tokens before the soft budget is reached, never below 0; None without a budget."""
        return None if token_budget is None else max(0, token_budget - self.known_subtotal)


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _count(count) is not None for key, count in value.items())
    return _count(value) is not None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None
