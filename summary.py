"""What a batch came to, in short, and what has changed since another one; both read what runs.json holds."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.folder import recordable

Saved = Mapping[str, Any]


def in_short(row: Mapping[str, Any]) -> str:
    """What a run came to, on one line."""
    if "failed" in row:
        return f"not run: {row['failed']}"
    unknown = "" if row["usage_known"] else " and an unknown rest"
    return f"{row['outcome']}, {row['known_subtotal']} tokens{unknown}, {row['seconds']:.2f} s"


def summary(record: Saved) -> str:
    """A few short lines for each scenario, its repeats taken together: one figure, or least/median/most."""
    lines = []
    for scenario in record["scenarios"]:
        runs = [run for run in scenario["runs"] if "failed" not in run]
        lines.append(f"{scenario['name']}: {_outcomes(scenario)}")
        if runs:
            unknown = "" if all(run["usage_known"] for run in runs) else ", rest unknown"
            lines.append(f"  tokens: {_spread([run['known_subtotal'] for run in runs])}{unknown}")
            lines.append(f"  calls: {_shares(_calls(run) for run in runs)}")
            lines.append(f"  seconds: {_spread([run['seconds'] for run in runs], '.2f')}")
        lines += [
            f"  not run: {why}" for why in dict.fromkeys(run["failed"] for run in scenario["runs"] if "failed" in run)
        ]
    return "\n".join(lines)


def changes(old: Saved, new: Saved) -> str:
    """What differs between two batches, scenario by scenario. Answers and seconds, which always may, are left out."""
    before, after = ({scenario["name"]: scenario for scenario in record["scenarios"]} for record in (old, new))
    lines = ["what changed (answers and seconds are not compared):"]
    if old["model"] != new["model"]:
        lines.append(f"  model: {old['model']} -> {new['model']}")
    for name in dict.fromkeys([*before, *after]):
        if name not in after or name not in before:
            lines.append(f"  {name}: {'only now' if name in after else 'only then'}")
            continue
        then, now = _facts(before[name]), _facts(after[name])
        facts = dict.fromkeys([*then, *now])
        differing = [f"{fact} {then.get(fact)} -> {now.get(fact)}" for fact in facts if then.get(fact) != now.get(fact)]
        lines.append(f"  {name}: {'; '.join(differing) or 'nothing'}")
    return "\n".join(lines)


def read_saved(path: Path) -> dict[str, Any]:
    """An earlier runs.json.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    try:
        old: dict[str, Any] = recordable(json.loads(path.read_text(encoding="utf-8")))  # a terminal will show it
        changes(old, old)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as exc:
        raise ValueError(f"{path} is not a file that record.py has saved") from exc
    return old


def _facts(scenario: Saved) -> dict[str, object]:
    runs = [run for run in scenario["runs"] if "failed" not in run]
    return {
        "question": scenario["question"],
        **{name: value for name, value in scenario["limits"].items() if name != "tool_timeouts_s"},
        **{f"{tool} timeout": seconds for tool, seconds in scenario["limits"]["tool_timeouts_s"].items()},
        "derived": _shares(run.get("derived", "none") for run in runs),
        "injected": _shares(run.get("injected", "none") for run in runs),
        "token_budget": _shares(str(run["token_budget"] or "none") for run in runs),
        "outcome": _outcomes(scenario),
        "tokens": _spread([run["known_subtotal"] for run in runs]),
        "usage_known": _shares("yes" if run["usage_known"] else "no" for run in runs),
        "model_calls": _spread([run["model_calls"] for run in runs]),
        "calls": _shares(", ".join(f"{call['tool']} {_fate(call)}" for call in run["receipts"]) for run in runs),
    }


def _calls(run: Saved) -> str:
    counted = Counter(_fate(call) for call in run["receipts"])
    return ", ".join(f"{n} {fate}" for fate, n in counted.items()) or "none"


def _fate(call: Saved) -> str:
    if "source_gap" in call:
        return "abandoned" if call["source_gap"] == "native_tool_abandoned" else "timed out"
    return str(call["outcome"])


def _outcomes(scenario: Saved) -> str:
    return _shares(run.get("outcome", "not run") for run in scenario["runs"])


def _shares(words: Iterable[str]) -> str:
    """The one word of all runs, or each with its share."""
    counted = Counter(words)
    if len(counted) == 1:
        return next(iter(counted)) or "none"
    most_first = sorted(counted.items(), key=lambda item: (-item[1], item[0]))  # however they were ordered
    return ", ".join(f"{word or 'none'} {n}/{counted.total()}" for word, n in most_first) or "-"


def _spread(values: Sequence[float], form: str = ".15g") -> str:  # what plain "g" leaves of 1234567 is 1.23457e+06
    if not values:
        return "-"
    least, middle, most = min(values), statistics.median(values), max(values)
    figures = [least] if least == most else [least, middle, most]
    return "/".join(format(value, form) for value in figures)
