"""What follows from a record's events alone: outcomes, calls and receipts, sums. The standard library only.

By rules of its own: the code that recorded the events is not asked, and what they claim is compared, not believed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

SCHEMA_VERSION = 1
MAX_CALLS = 256
POOL = "pool"
LENGTH_LIKE = ("length", "max_tokens", "max_output_tokens", "max_completion_tokens", "token_limit", "model_length")
HOST_ENDS = ("round_without_progress", "transcript_bound", "bound_below_first_send", "registry_unavailable")
MAX_ANSWER = 100_000  # a longer one was cut, and is not compared
ENDED_BY_A_BOUND = {"tool_call_timed_out": "native_tool_timeout", "tool_call_abandoned": "native_tool_abandoned"}
AFTER_THE_STOP = (*ENDED_BY_A_BOUND, "tool_call_ended", "tool_call_late", "model_call_late", "probe_late")
# What a probe waits for: this call, ended by its timeout.
TARGET = {"tool": "fetch_job_log", "args": {"job_id": 815}}

Json = Any
Faults = Iterator[str]


def outcome_review(events: Iterable[Json]) -> Json:
    """What `outcome-review.json` holds: what is claimed beside what the events give, run by run and as a whole.

    Of a batch, however long, it holds the runs that are going on, and the few events that belong to no run.
    """
    outer: list[Json] = []
    runs: list[Json] = []
    going: dict[str, list[Json] | None] = {}  # by run: its events so far, None once it has stopped
    for event in events:
        name, kind = event["run"], event["kind"]
        if name is None or outer[0]["facts"]["kind"] != "batch":
            outer.append(event)
        if name is None:
            continue
        if (own := going.setdefault(name, [])) is None:
            if kind not in AFTER_THE_STOP:
                runs.append(_review(name, f"{shown(kind)} after the stop of the run"))
            continue
        own.append(event)
        if kind == "stop":
            claimed, derived, going[name] = event["facts"]["outcome"], derive(own), None
            runs.append(
                _review(name, *_against_the_claim(own, derived), *_calls(own), claimed=claimed, derived=derived)
            )
    if any(event["kind"] == "pool_probed" for event in outer):
        runs.append(_review(POOL, *_against_the_probes(outer)))
    for name, left in going.items():
        if left and all(event["kind"] != "run_failed" for event in left):  # else a bug ended it, and it claims nothing
            runs.append(_review(name, "the run never stopped"))
    claimed, derived = outer[-1]["facts"].get("outcome"), _whole(outer, runs)
    return {"schema_version": SCHEMA_VERSION, "claimed": claimed, "derived": derived, "runs": runs}


def _review(name: str, *faults: str, claimed: Json = None, derived: str | None = None) -> Json:
    return {"run": name, "claimed": claimed, "derived": derived, "disagreements": list(faults)}


def derive(events: Sequence[Json]) -> str | None:
    """How a run ended, from what happened in it and not from what it says; None where nothing ended it."""
    return next(filter(None, _ends(events)), None)


def _ends(events: Sequence[Json]) -> Iterator[str | None]:
    """For each event what it ends the run with, None where it goes on; last, what a breakpoint makes of all that."""
    started, spent, paused, lost = events[0]["facts"], 0, None, False
    budget = started["limits"]["token_budget"]
    asks_again, due = started.get("asks_again"), None
    for event in events:
        kind, facts, end = event["kind"], event["facts"], None
        if kind == "run_cut" and facts["by"] in ("deadline", "interrupted"):
            end = facts["by"]
        elif kind == "host_ended" and facts["outcome"] in HOST_ENDS:
            end = facts["outcome"]
        elif kind == "pool_probed" and not facts["serving"]:
            end = "model_error"
        elif kind == "model_call_passed_over":
            lost = lost or facts["spent"] != "nothing"
        elif kind == "model_call_cut":
            end = {"failed": "model_error", "was ended by its timeout": "model_timeout"}.get(facts["fate"])
        elif kind == "model_call_ended":
            total, ids = known_total(facts["usage"]), [call["id"] for call in facts["proposed"]]
            spent += total or 0
            paused = "paused" if "tools" in started.get("pause_after", []) else None
            if total is None or lost:
                end = "missing_usage"
            elif len(ids) > MAX_CALLS or not all(ids) or len(set(ids)) < len(ids):
                end = "model_error"
            elif not ids and (facts["text_chars"] or not asks_again):
                end = "answered" if facts["text_chars"] else "empty_answer"
            elif budget is not None and spent >= budget:
                end = "token_budget"
            elif facts["call"] >= started["limits"]["max_steps"]:
                end = "step_limit"
            if not ids and end in ("token_budget", "step_limit"):  # before these come the host's own rules
                end, due = None, end
        elif kind == "run_ended":
            end = due
        yield end
    yield paused


def known_total(usage: Json) -> int | None:
    """The total that a reply's usage reports, None where it reports none that can be true."""
    return _reported(usage)["total"]


def _reported(usage: Json) -> dict[str, int | None]:
    """What a reply's usage says, as `accounting.json` names it; None for what it does not say, or cannot be true."""
    total, read, written = (_count(usage, f"{part}_tokens") for part in ("total", "input", "output"))
    cached = _count(usage, "input_token_details", "cache_read") or 0
    thinking, rest = _count(usage, "output_token_details", "reasoning"), None
    if total is not None and total < max(cached, (read or 0) + (written or 0)):
        total = None
    if written is None or thinking is None or thinking > written:
        thinking = None
    else:
        rest = written - thinking
    return {"input": read, "output": written, "thinking": thinking, "output_without_thinking": rest, "total": total}


def _count(value: Json, *path: str) -> int | None:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int and 0 <= value < 2**63 else None


def _against_the_claim(events: Sequence[Json], derived: str | None) -> Faults:
    started, stop = events[0], events[-1]["facts"]
    if started["kind"] != "run_started":
        yield "the run has no start"
    if derived != stop["outcome"]:
        yield f"the events make it {derived}, it claims {shown(stop['outcome'])}"
    replies = [event["facts"] for event in events if event["kind"] == "model_call_ended"]
    totals = [known_total(reply["usage"]) for reply in replies]
    happened = [event["kind"] for event in events]
    passed_over = [event["facts"]["spent"] for event in events if event["kind"] == "model_call_passed_over"]
    served = Counter(reply["candidate"] for reply in replies if "candidate" in reply)
    said = [event["facts"]["outcome"] for event in events if event["kind"] == "run_ended"]
    chars, answer = replies[-1]["text_chars"] if replies else 0, len(stop.get("answer", ""))
    if answer != chars <= MAX_ANSWER:
        yield f"the answer has {answer} characters, the last reply {shown(chars)}"
    yield from differences(
        stop,
        known_subtotal=sum(filter(None, totals)),
        usage_known=None not in totals and "model_call_cut" not in happened and set(passed_over) <= {"nothing"},
        served=dict(served) or None,
        model_calls=happened.count("model_call_started"),
        model=started["facts"].get("model"),
        outcome=said[0] if said else stop["outcome"],
    )
    over, deadline_s = False, started["facts"]["limits"]["deadline_s"]
    for event, end in zip(events, _ends(events), strict=False):
        took_ms = event["elapsed_ms"] - started["elapsed_ms"]
        if over and event["kind"] in ("model_call_started", "tool_call_started"):
            yield f"{event['kind']} after the run had ended"
        if end == "deadline" and deadline_s is not None and took_ms + 1 < deadline_s * 1000:
            yield f"cut off by its deadline of {deadline_s:g} s after {took_ms} ms"
        over = over or end is not None


def differences(said: Json, **derived: Json) -> Faults:
    for name, value in derived.items():
        if said.get(name) != value:
            yield f"{name} is {shown(said.get(name))}, and {shown(value)} by the events"


def _calls(events: Sequence[Json]) -> Faults:
    """Proposed ids and receipts pair up one to one, and each receipt is what the call's last event said."""
    proposed, last = [], {}
    for event in events:
        facts = event["facts"]
        if event["kind"] == "model_call_ended":
            proposed += [(facts["call"], n, call["id"], call["tool"]) for n, call in enumerate(facts["proposed"])]
        elif "receipt" in facts:
            receipt = facts["receipt"]
            last[receipt["turn"], receipt["index"]] = receipt
            ended = event["kind"] == "tool_call_ended" or event["kind"] in ENDED_BY_A_BOUND
            if ended and receipt.get("source_gap") != ENDED_BY_A_BOUND.get(event["kind"]):
                yield f"{shown(event['kind'])} with a receipt that says otherwise"
    receipts = events[-1]["facts"]["receipts"]
    if proposed != [(each["turn"], each["index"], each.get("call_id"), each["tool"]) for each in receipts]:
        yield "the proposed calls and the receipts do not pair up"
    for receipt in receipts:
        where = f"call {receipt['index'] + 1} of turn {shown(receipt['turn'])}"
        seen = last.pop((receipt["turn"], receipt["index"]), {})
        # A call whose end never came has only its start to go by, and may still be running.
        unended = "outcome" not in seen and receipt.get("source_gap") == "native_tool_abandoned"
        never_began = not seen and receipt["outcome"] == "withheld"
        if receipt != seen and not never_began and not (unended and seen and seen.items() <= receipt.items()):
            yield f"{where}: its receipt is not what its last event says"
        if (receipt["outcome"] == "executed") != ("text_sha256" in receipt):
            yield f"{where}: only a call that was executed has a digest"
    yield from (f"call {index + 1} of turn {shown(turn)}: has an event and no receipt" for turn, index in last)


def _against_the_probes(events: Sequence[Json]) -> Faults:
    """The report of a pool's probes, against the probes themselves."""
    probes: dict[tuple[str, str], Json] = {}
    for event in events:
        if event["kind"] == "probe_ended":
            probes[event["facts"]["agent_id"], event["facts"]["purpose"]] = event["facts"]
    said = next(event["facts"] for event in events if event["kind"] == "pool_probed")
    report = said["report"]
    for stage in (report, *filter(None, [report.get("primary_attempt")])):
        ready = _ready(stage)
        counts = (len(stage["routes"]), len(ready), len(stage["routes"]) - len(ready))
        if counts != (stage["probed_count"], stage["ready_count"], stage["rejected_count"]):
            yield "the counts of the report are not those of its routes"
        for row in stage["routes"]:
            name = row["agent_id"]
            first, second = probes.get((name, "base")), probes.get((name, "escalated"))
            last = second or first
            if bool(last and last["has_text"]) != (row["status"] == "ready"):
                yield f"{shown(name)}: {shown(row['status'])}, and its probes say otherwise"
            if row["attempts"] != sum(probe is not None for probe in (first, second)):
                yield f"{shown(name)}: its attempts are not those of the events"
            if second and not (first and not first["has_text"] and _too_small(first)):
                yield f"{shown(name)}: escalated without a sign that its budget was too small"
    if report["escalations_used"] != sum(purpose == "escalated" for _, purpose in probes):
        yield "the escalations of the report are not those of the events"
    for name in said["serving"]:
        if name not in _ready(report):
            yield f"{shown(name)}: serves, and is not ready"
    for event in events:
        name = event["facts"].get("candidate")
        if event["kind"] in ("model_call_started", "model_call_ended") and name not in said["serving"]:
            yield f"{shown(name)}: was asked, and does not serve"


def _too_small(probe: Json) -> bool:
    return probe["error_type"] is None and (probe["finish_reason"] in LENGTH_LIKE or probe["reasoned"])


def _ready(report: Json) -> list[str]:
    return [row["agent_id"] for row in report["routes"] if row["status"] == "ready"]


def _whole(outer: Sequence[Json], runs: Sequence[Json]) -> str | None:
    kind, happened = outer[0]["facts"]["kind"], {event["kind"] for event in outer}
    if kind == "batch":
        if "interrupted" in happened or any(run["derived"] == "interrupted" for run in runs):
            return "interrupted"
        return "complete" if len(runs) == outer[0]["facts"]["planned"] else "incomplete"
    if kind == "preflight":
        if "interrupted" in happened:
            return "interrupted"
        requests = [event["facts"] for event in outer if event["kind"] == "end_to_end_attempt"]
        good = requests and requests[-1].get("http_status", 200) == 200 and "error_code" not in requests[-1]
        return "ready" if good and (requests[-1]["has_text"] or requests[-1]["has_calls"]) else "not_ready"
    own = [run["derived"] for run in runs if run["run"] != POOL]
    derived: str | None = own[0] if len(own) == 1 else None
    if kind != "live-probe":
        return derived
    if "refused" in happened:
        return "refused"
    if "interrupted" in (*happened, derived):
        return "interrupted"
    counts = [event["facts"]["status"] for event in outer if event["kind"] == "token_count"]
    if "model_call_started" in happened and counts not in (["counted"], ["not_available"]):
        return "incomplete_preflight"
    timed_out = [event["facts"]["receipt"] for event in outer if event["kind"] in ENDED_BY_A_BOUND]
    seen = derived == "paused" and any(TARGET.items() <= receipt.items() for receipt in timed_out)
    return "target_seen" if seen else "target_incomplete"


def is_charged(event: Json) -> bool:
    """Whether an event is one for which something may have been spent: a reply, or a call that brought none."""
    if event["kind"] in ("probe_ended", "model_call_passed_over"):
        return bool(event["facts"]["spent"] != "nothing")
    return event["kind"] in ("model_call_ended", "model_call_cut")


def accounts(book: Json, events: Sequence[Json]) -> Faults:
    """The rows, sums and estimate of `accounting.json`, against the events and its own price."""
    rows: list[Json] = []
    for event in events:
        if is_charged(event):
            usage = event["facts"].get("usage")
            rows.append({"run": event["run"], "call": event["facts"]["call"], "reported": usage, **_reported(usage)})
    if rows != [{name: said[name] for name in rows[0]} for said in book["calls"]]:
        yield "its calls are not those of the events"
    known = [row for row in rows if row["total"] is not None]
    spent, unknown, price, estimate = sum(row["total"] for row in known), len(rows) - len(known), book["price"], None
    if price is not None and known:
        read, written = (sum(row[part] or 0 for row in known) for part in ("input", "output"))
        usd = read * Decimal(price["input_usd_per_million"]) + written * Decimal(price["output_usd_per_million"])
        unpriced = spent - read - written
        estimate = {
            "usd": format((usd / 1_000_000).normalize(), "f"),
            "covers": "the known part only" if unknown or unpriced else "all that was used",
            "calls_without_usage": unknown,
            "tokens_without_a_price": unpriced,
        }
    yield from differences(book, known_subtotal=spent, usage_known=unknown == 0, estimate=estimate)
    if price is not None and events[0]["facts"]["endpoint"] != "provider":
        yield "there is a price for what is not the provider's own endpoint"


def shown(name: object) -> str:
    return ascii(name)[1:-1][:200] if isinstance(name, str) else ascii(name)[:200]
