"""What the model calls of a record reported, added up, and what that is estimated to cost where a price is known."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from bounded.usage import judge
from evidence.rederive import is_charged

SCHEMA_VERSION = 1
NOTES = (
    "counts are what the provider reported; null means that it did not report it, and is not zero",
    "output holds the thinking where the provider counts it so, and is priced whole; cached input is priced as input",
    "a count before a call is no cap on what the call then uses",
    "an estimate is no invoice",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a provider asks for a model on its own endpoint, in US dollars for a million tokens, as decimal strings.

    Attributes:
        source: where it was read, and `read_on` when.
        first_day, last_day: the UTC days on which it holds, as ISO 8601; None is open.
    """

    model: str
    input_usd_per_million: str
    output_usd_per_million: str
    source: str
    read_on: str
    first_day: str | None = None
    last_day: str | None = None


_GEMINI_3_8 = {
    "model": "gemini-3.8-flash",
    "source": "https://github.com/BerriAI/litellm/discussions/39357",
    "read_on": "2026-11-30",
}
PRICES = (
    Price(input_usd_per_million="0.75", output_usd_per_million="3.75", last_day="2026-12-31", **_GEMINI_3_8),
    Price(input_usd_per_million="1.50", output_usd_per_million="7.50", first_day="2027-01-01", **_GEMINI_3_8),
)


def price_of(model: str, day: str) -> Price | None:
    """The price that holds for a model on a UTC day (ISO 8601), None where none is known."""
    for price in PRICES:
        if price.model == model and (price.first_day or day) <= day <= (price.last_day or day):
            return price
    return None


def accounting(events: Iterable[Mapping[str, Any]], price: Price | None) -> dict[str, Any]:
    """What `accounting.json` holds: one row for each model call or probe that ended, their sums, and the estimate.

    A call that brought no reply has a row as well, for what it used was not reported; one that was not served has none.
    """
    counted: dict[str, int] = {}
    rows = []
    for event in events:
        if event["kind"] == "token_count" and event["facts"].get("counted") is not None:
            counted[event["run"]] = event["facts"]["counted"]
        elif is_charged(event):
            rows.append(_row(event, counted.pop(event["run"], None)))
    known = [row for row in rows if row["total"] is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "calls": rows,
        "known_subtotal": sum(row["total"] for row in known),
        "usage_known": len(known) == len(rows),
        "price": None if price is None else asdict(price),
        "estimate": None if price is None or not known else _estimate(known, price, unknown=len(rows) - len(known)),
        "notes": list(NOTES),
    }


def _row(event: Mapping[str, Any], counted: int | None) -> dict[str, Any]:
    reported = event["facts"].get("usage")
    usage = judge(reported)
    return {
        "run": event["run"],
        "call": event["facts"]["call"],
        "reported": reported,
        "counted_before": counted,
        "input": usage.input,
        "output": usage.output,
        "thinking": usage.thinking,
        "output_without_thinking": None
        if usage.output is None or usage.thinking is None
        else usage.output - usage.thinking,
        "total": usage.total,
        "fault": usage.fault,
    }


def _estimate(known: list[dict[str, Any]], price: Price, *, unknown: int) -> dict[str, Any]:
    read, written = (sum(row[part] or 0 for row in known) for part in ("input", "output"))
    usd = read * Decimal(price.input_usd_per_million) + written * Decimal(price.output_usd_per_million)
    unpriced = sum(row["total"] for row in known) - read - written
    whole = unknown == 0 and unpriced == 0
    return {
        "usd": format((usd / 1_000_000).normalize(), "f"),
        "covers": "all that was used" if whole else "the known part only",
        "calls_without_usage": unknown,
        "tokens_without_a_price": unpriced,
    }
