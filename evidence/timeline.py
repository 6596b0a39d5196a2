"""Draw what the runs of a folder did, as one self-contained page: each call as a bar against its bound.

The shape of an event is our own, what it quotes is not: `_say` cleans, cuts and escapes each text where it is read. All
times in here are milliseconds; infinity is no bound.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import inf
from typing import Any

from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.text import MAX_NAME, fit
from bounded.usage import judge

MAX_RUNS = 60
MAX_ROWS = 200
MAX_TEXT = 300
MAX_LISTED = 6
# How many times as long as its run an axis may get, for what lies beyond the run: 60 s would squash a run of 0.3 s.
BOUND_STRETCH = 1.5
LATE_STRETCH = 3.0

Facts = Mapping[str, Any]

_HOW_TO_READ = (
    "A bar is the time that a call took, the outline around it is its bound; an arrow: the bound lies beyond the axis. "
    "Striped: cut. Solid red: failed. Dashed: no end recorded. Diamond: came late. Thin upright line: the run ended."
)
_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1a1e24;--soft:#56606b;--line:#dfe3e8;--edge:#757f8a;
--room:#eef1f4;--model:#2b6cb8;--tool:#0b7a6b;--cut:#b3261e;--late:#7a3bb5}
@media (prefers-color-scheme:dark){:root{--page:#101317;--card:#181c21;--ink:#e7eaee;--soft:#a5afba;--line:#2d343c;
--edge:#87919c;--room:#22282f;--model:#74aef0;--tool:#4fc0ae;--cut:#ff8b7e;--late:#cfa2fb}}
*{box-sizing:border-box;margin:0;padding:0}
body{padding:2.5rem 1.25rem 4rem;background:var(--page);color:var(--ink);overflow-wrap:anywhere;font:15px/1.5
system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:72rem;margin:0 auto}ol{list-style:none}h1{font-size:1.7rem;line-height:1.3}h2{font-size:1.15rem}
a{color:inherit;text-underline-offset:.2em}.soft,dt{color:var(--soft)}.small,.outcome,.label{font-size:.85rem}
.runs{display:flex;flex-wrap:wrap;gap:.2rem 1.75rem;margin:1rem 0}
section{margin-top:1.5rem;padding:1.25rem 1.4rem;background:var(--card);border:1px solid var(--line);border-radius:10px}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.3rem .75rem}
.outcome{padding:.05rem .55rem;border:1px solid;border-radius:1rem;font-weight:600}
dl{margin:.7rem 0 1rem;font-size:.9rem}dl div{display:grid;grid-template-columns:5rem 1fr;gap:0 .75rem}
.calls li{display:grid;grid-template-columns:minmax(9rem,12rem) minmax(0,1fr) minmax(14rem,24rem);gap:0 1.25rem;
padding:.5rem 0;border-top:1px solid var(--line)}
.calls .axis{padding:0;border:0}.axis svg{grid-column:2;height:18px}.label+.words{grid-column:2/4}
.label{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.words{font-size:.9rem}svg{display:block;width:100%;height:26px}text{fill:var(--soft);font-size:11px}
rect{fill:currentColor;stroke:currentColor}.model,.tool,.failed{stroke-width:3}.open{fill:none;stroke-dasharray:3 3}
.model{color:var(--model)}.tool{color:var(--tool)}.failed,.cut,.stopped{color:var(--cut)}.cut{fill:var(--card)}
.bound{fill:var(--room);stroke:var(--edge)}.limit{stroke:var(--edge);stroke-width:3}.grid{stroke:var(--line)}
.beyond{fill:none;stroke:var(--edge);stroke-width:2}.end{stroke:var(--ink);stroke-width:1.5}.late{fill:var(--late)}
.stripes{stroke:var(--cut);stroke-width:7;stroke-dasharray:3 4}
.wait{stroke:var(--late);stroke-width:2;stroke-dasharray:2 4}
@media (max-width:52rem){body{padding:1.5rem .75rem 3rem}section{padding:1rem}
.calls li{grid-template-columns:minmax(0,1fr)}.calls .words,.calls svg{grid-column:1}}
"""


@dataclass(slots=True, kw_only=True)
class _Call:
    """One row. Times count from the run's start; a call without `start` never began and has no bar."""

    label: str
    look: str = "open"
    fate: str = "no end was recorded"
    said: list[str] = field(default_factory=list)
    start: float | None = None
    end: float | None = None
    limit: float = inf
    bound: str = "no bound"
    late: float | None = None

    def begin(self, at: float, bound: float, source: object) -> None:
        self.start, self.limit = at, at + bound
        if bound < inf:
            self.bound = f"bound {_bound(bound)}{f' ({_say(source)})' if source else ''}".replace("_", " ")


@dataclass(slots=True, kw_only=True)
class _Run:
    """One run, as far as its events have come. `begun` is on the folder's clock, `last` counts from it."""

    name: str
    begun: float
    facts: Facts = field(default_factory=dict)
    calls: dict[Hashable, _Call] = field(default_factory=dict)
    last: float = 0.0
    cut: str = ""
    outcome: str = "unfinished"
    why: str | None = "its stop was not recorded"
    stop: Facts | None = None


def timeline(events: Iterable[Mapping[str, Any]]) -> str:
    """The page, from one folder's events in their order, read once; only the first `MAX_RUNS` runs are kept."""
    record: Facts = {}
    runs: dict[str, _Run] = {}
    left_out: set[str] = set()
    for event in events:
        kind, name, facts, at = event["kind"], event["run"], event["facts"], float(event["elapsed_ms"])
        if kind == "record_started":
            record = {**facts, "at": event["at"]}
        elif name is not None and name not in runs and len(runs) == MAX_RUNS:
            left_out.add(name)
        elif name is not None:
            run = runs.setdefault(name, _Run(name=_say(name, MAX_NAME), begun=at))
            _take(run, kind, at - run.begun, facts)
    return _page(record, list(runs.values()), len(left_out))


def _take(run: _Run, kind: str, at: float, facts: Facts) -> None:
    if run.stop is None:
        run.last = max(run.last, at)
    if kind == "run_started":
        run.facts = facts
    elif kind.startswith("model_call_"):
        _take_model_call(run, kind, at, facts)
    elif kind.startswith("tool_call_"):
        _take_tool_call(run, kind, at, facts["receipt"])
    elif kind == "run_cut":
        run.cut = f"; cut off at {_took(at)} by {'its deadline' if facts['by'] == 'deadline' else 'a person'}"
    elif kind == "run_failed":
        run.outcome, run.why = "failed", facts["reason"]
    elif kind == "stop":
        run.stop, run.outcome, run.why = facts, _say(facts["outcome"]), facts.get("reason")
        for receipt in facts["receipts"]:
            call = run.calls.get((receipt["turn"], receipt["index"]))
            if call is None or call.end is None:
                _take_tool_call(run, kind, at, receipt)


def _take_model_call(run: _Run, kind: str, at: float, facts: Facts) -> None:
    call = run.calls.setdefault(facts["call"], _Call(label=f"model call {facts['call']}"))
    tokens = _tokens(facts.get("usage"))
    if kind == "model_call_started":
        timeout, deadline = (_ms(run.facts.get("limits", {}).get(name)) for name in ("model_timeout_s", "deadline_s"))
        left = max(0.0, deadline - at)
        call.begin(at, min(timeout, left), "about, by the deadline" if left < timeout else None)
    elif kind == "model_call_late":
        call.late = at
        call.said.append(f"a reply came late, at {_took(at)}: recorded, never used, not counted; {tokens}")
    elif call.start is not None:
        call.end, after = at, f"after {_took(at - call.start)}"
        if kind == "model_call_ended":
            asked = _listed([_say(proposed["tool"]) for proposed in facts["proposed"]])
            why = _say(facts["finish_reason"])
            call.look, call.fate = "model", f"replied {after}{', asked for ' if asked else ''}{asked}"
            call.said = [f"{tokens}{'; finish reason ' if why else ''}{why}"]
        else:
            call.look = "failed" if facts["fate"] == "failed" else "cut"
            call.fate, call.said = f"{_say(facts['fate'])} {after}", [tokens]


def _take_tool_call(run: _Run, kind: str, at: float, receipt: Facts) -> None:
    args = ", ".join(ascii(value) for value in receipt["args"].values())
    label = f"{receipt['tool']}({args if len(args) <= 60 else args[:57] + '...'})"
    call = run.calls.setdefault((receipt["turn"], receipt["index"]), _Call(label=_say(label)))
    if kind == "tool_call_started":
        call.begin(at, _ms(receipt.get("bound_s")), receipt.get("bound_source"))
    elif kind == "tool_call_late":
        error, size = receipt["late"].get("error_type"), receipt["late"].get("chars")
        what = f" with {_say(error)}" if error else "" if size is None else f" with {size:,} characters"
        call.late = at
        call.said.append(f"came late, at {_took(at)}{what}: recorded, never used")
    else:
        call.end, (call.look, call.fate) = at, _fate(receipt)
        if "reason" in receipt and "source_gap" not in receipt:
            call.said = [_say(receipt["reason"])]


def _fate(receipt: Facts) -> tuple[str, str]:
    """How a tool call ended: its look and its words."""
    outcome, gap, lasted = receipt["outcome"], receipt.get("source_gap"), _ms(receipt.get("duration_sec"))
    after = "" if lasted == inf else f" after {_took(lasted)}"
    if outcome == CallOutcome.EXECUTED:
        return "tool", f"returned {receipt['text_chars']:,} characters{after}"
    if outcome in (CallOutcome.REFUSED, CallOutcome.WITHHELD):
        return "open", f"{outcome}: it never began"
    if gap is None:
        return "failed", f"failed{after}"
    rest = "abandoned, for it did not stop" if gap == SourceGap.ABANDONED else "it stopped"
    bound = _ms(receipt.get("bound_s"))
    if bound <= lasted < inf and receipt.get("bound_source") != "deadline":
        return "cut", f"timed out at its bound of {_bound(bound)}; {rest}"
    return "cut", f"was cut off with the run{after}; {rest}"


def _tokens(raw: object) -> str:
    usage = judge(raw)
    if usage.total is None:
        return f"tokens unknown: {usage.fault}"
    parts = ((usage.input, "in"), (usage.output, "out"), (usage.thinking, "of these thinking"))
    return f"{usage.total:,} tokens: " + ", ".join(f"{count:,} {word}" for count, word in parts if count is not None)


def _limits(limits: Facts) -> str:
    timeouts, named = limits.get("tool_timeouts", {}), dict[str, float | None]()
    for group in (*timeouts.get("per_set", {}).values(), timeouts.get("per_tool", {})):
        named |= group
    tools = [f"{_say(name)} {_bound(_ms(seconds))}" for name, seconds in named.items()]
    budget = limits.get("token_budget")
    return (
        f"{'no token budget' if budget is None else f'token budget {budget:,}'}; "
        f"whole run {_bound(_ms(limits.get('deadline_s')))}; model call {_bound(_ms(limits.get('model_timeout_s')))}; "
        f"at most {_several(limits['max_steps'], 'model call')}; "
        + _listed([*tools, f"any {'other ' if tools else ''}tool {_bound(_ms(timeouts.get('default_s')))}"])
    )


def _page(record: Facts, runs: Sequence[_Run], left_out: int) -> str:
    title = f"{_say(record.get('kind', 'record'))}, {_several(len(runs) + left_out, 'run')}"
    contents = "".join(
        f'<li><a href="#run-{place}">{run.name}</a> <span class="soft">{run.outcome}</span></li>'
        for place, run in enumerate(runs, 1)
    )
    rest = f"<p>{_several(left_out, 'further run')} left out: this page shows the first {MAX_RUNS}.</p>\n"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Timeline: {title}</title><style>{_STYLE}</style></head><body><main>
<h1>Timeline</h1>
<p class="soft">{title}; model {_say(record.get("model"))}; from {_say(record.get("at"))}</p>
<ol class="runs">{contents}</ol>
{rest if left_out else ""}<p class="soft small">{_HOW_TO_READ}</p>
{"".join(_section(place, run) for place, run in enumerate(runs, 1))}</main></body></html>
"""


def _section(place: int, run: _Run) -> str:
    stop = run.stop or {}
    tokens = f"known subtotal {stop['known_subtotal']:,}, " if "known_subtotal" in stop else ""
    tokens += "which is the total" if stop.get("usage_known") is True else "the total is unknown"
    facts = {
        "Why": _say(run.why),
        "Took": _took(run.last) + run.cut,
        "Tokens": f"{tokens}{': ' if 'usage_fault' in stop else ''}{_say(stop.get('usage_fault'))}",
        "Limits": _limits(run.facts["limits"]) if "limits" in run.facts else "",
        "Injected": _say(run.facts.get("injected")),
        "Derived": _say(run.facts.get("derived")),
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{said}</dd></div>" for name, said in facts.items() if said)
    calls, calm = list(run.calls.values()), "" if run.outcome in (Outcome.ANSWERED, Outcome.PAUSED) else "stopped"
    ran = max(1.0, run.last)
    reach = [call.limit for call in calls if call.limit <= BOUND_STRETCH * ran]
    reach += [call.late for call in calls if call.late is not None and call.late <= LATE_STRETCH * ran]
    axis = max([ran, *reach])
    more = f"<p>{_several(len(calls) - MAX_ROWS, 'further call')} left out.</p>" if len(calls) > MAX_ROWS else ""
    return f"""<section aria-labelledby="run-{place}">
<header><h2 id="run-{place}">{run.name}</h2> <span class="outcome {calm}">{run.outcome}</span></header>
<p>{_say(run.facts.get("question"))}</p>
<dl>{rows}</dl>
<ol class="calls">
{_scale(axis)}
{"".join(_row(call, run, axis) for call in calls[:MAX_ROWS])}</ol>{more}
</section>
"""


def _row(call: _Call, run: _Run, axis: float) -> str:
    said, track = "".join(f"<div>{line}</div>" for line in call.said), ""
    if call.start is not None:
        span = f"from {_took(call.start)}" if call.end is None else f"{_took(call.start)} to {_took(call.end)}"
        beyond = ", beyond the axis" if axis < call.limit < inf else ""
        later = "; what came late lies beyond the axis" if (call.late or 0.0) > axis else ""
        said += f'<div class="soft small">{span}; {call.bound}{beyond}{later}</div>'
        track = _track(call, call.start, run, axis)
    return f'<li><span class="label">{call.label}</span>{track}<div class="words"><b>{call.fate}</b>{said}</div></li>\n'


def _ticks(axis: float) -> list[float]:
    step = next(unit * 10**power for power in itertools.count() for unit in (1, 2, 5) if axis <= 6 * unit * 10**power)
    return [step * place for place in range(int(axis / step) + 1)]


def _scale(axis: float) -> str:
    texts = ""
    for tick in _ticks(axis):
        anchor = "start" if tick == 0 else "end" if tick > 0.95 * axis else "middle"
        words = f"{tick:g} ms" if axis < 1000 else f"{tick / 1000:g} s"
        texts += f'<text x="{_x(tick, axis):.2f}%" y="13" text-anchor="{anchor}">{words}</text>'
    return f'<li class="axis" aria-hidden="true"><svg>{texts}</svg></li>'


def _track(call: _Call, start: float, run: _Run, axis: float) -> str:
    """The picture of a call that began; the words beside it say all of this again."""
    end = run.last if call.end is None else call.end
    parts = [_line("grid", tick, tick, axis) for tick in _ticks(axis)]
    if call.limit < inf:
        parts.append(_bar("bound", start, call.limit, axis, 20))
    parts.append(_bar(call.look, start, end, axis, 8))
    if call.look == "cut":
        parts.append(_line("stripes", start, end, axis))
    if call.limit <= axis:
        parts.append(_line("limit", call.limit, call.limit, axis))
    elif call.limit < inf:
        parts.append('<svg x="100%" overflow="visible"><path class="beyond" d="M-6 8l5 5l-5 5"/></svg>')
    if run.stop is not None:
        parts.append(_line("end", run.last, run.last, axis))
    if call.late is not None:
        parts.append(_line("wait", end, call.late, axis))
        place = f'<svg x="{_x(call.late, axis):.2f}%" overflow="visible">'
        parts.append(f'{place}<path class="late" d="M0 6l6 7l-6 7l-6-7z"/></svg>')
    return f'<svg aria-hidden="true">{"".join(parts)}</svg>'


def _bar(look: str, start: float, end: float, axis: float, height: int) -> str:
    x = _x(start, axis)
    y, width = 13 - height // 2, max(0.05, _x(end, axis) - x)  # without any width even its edge would not be drawn
    return f'<rect class="{look}" x="{x:.2f}%" y="{y}" width="{width:.2f}%" height="{height}"/>'


def _line(look: str, start: float, end: float, axis: float) -> str:
    top, foot = (13, 13) if look in ("stripes", "wait") else (0, 26)
    return f'<line class="{look}" x1="{_x(start, axis):.2f}%" x2="{_x(end, axis):.2f}%" y1="{top}" y2="{foot}"/>'


def _x(at: float, axis: float) -> float:
    # In percent, with room for strokes at both edges; what lies beyond the axis lies outside the picture.
    return 0.5 + 97.5 * at / axis if at <= axis else 110.0


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + rest


def _took(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.{2 if ms < 10_000 else 1}f} s"


def _bound(ms: float) -> str:
    return "unlimited" if ms == inf else f"{round(ms / 1000, 3):g} s"


def _ms(seconds: float | None) -> float:
    return inf if seconds is None else 1000 * seconds


def _say(value: object, limit: int = MAX_TEXT) -> str:
    """A text that someone else wrote, as one short line of HTML."""
    return "" if value is None else escape(" ".join(fit(str(value), limit).split()))
