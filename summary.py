"""What a batch came to, as a table, and what has changed since another one; both read what runs.json holds."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Saved = Mapping[str, Any]


def table(record: Saved) -> str:
    """One line for each scenario, its repeats taken together: figures as one, or as least/median/most."""
    lines = [("scenario", "outcome", "tokens", "calls", "seconds")]
    notes = []
    for scenario in record["scenarios"]:
        runs = [run for run in scenario["runs"] if "failed" not in run]
        tokens = _spread([run["known_subtotal"] for run in runs])
        if not all(run["usage_known"] for run in runs):
            tokens += " known"
        calls = _shares(_calls(run) for run in runs)
        seconds = _spread([run["seconds"] for run in runs], ".1f")
        lines.append((scenario["name"], _outcomes(scenario), tokens, calls, seconds))
        notes += [f"{scenario['name']}: not run: {run['failed']}" for run in scenario["runs"] if "failed" in run]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*rows, *dict.fromkeys(notes)])


def changes(old: Saved, new: Saved) -> str:
    """What differs between two batches, scenario by scenario; seconds, which always do, are not compared."""
    before, after = ({scenario["name"]: scenario for scenario in record["scenarios"]} for record in (old, new))
    lines = ["changed since then:"]
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


def _facts(scenario: Saved) -> dict[str, object]:
    runs = [run for run in scenario["runs"] if "failed" not in run]
    return {
        "question": scenario["question"],
        **scenario["limits"],
        "token_budget": _shares(str(run["token_budget"]) for run in runs),
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
        return "abandoned" if call["source_gap"] == "native_tool_abandoned" else "stopped"
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


def _spread(values: Sequence[float], form: str = "g") -> str:
    if not values:
        return "-"
    least, middle, most = min(values), statistics.median(values), max(values)
    figures = [least] if least == most else [least, middle, most]
    return "/".join(format(value, form) for value in figures)
