"""What follows from the probes of a pool: its report, who serves, how a preflight and a run with a pool ended."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from bounded.outcomes import Outcome
from evidence.accounting import accounting
from evidence.rederive import accounts, derive, outcome_review
from evidence.test_rederive import ended, started

USED = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}


def event(kind: str, run: str | None = None, /, **facts: Any) -> dict[str, Any]:
    return {"run": run, "kind": kind, "elapsed_ms": 0, "facts": facts}


def probe(agent_id: str, purpose: str = "base", /, **facts: Any) -> dict[str, Any]:
    """A probe that brought text, but for what is said otherwise."""
    plain = {"error_type": None, "has_text": True, "finish_reason": "stop", "reasoned": False}
    return event("probe_ended", agent_id=agent_id, purpose=purpose, **{**plain, **facts})


def row(agent_id: str, status: str, attempts: int) -> dict[str, Any]:
    return {"agent_id": agent_id, "status": status, "attempts": attempts}


def report(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    ready = sum(each["status"] == "ready" for each in rows)
    counts = {"probed_count": len(rows), "ready_count": ready, "rejected_count": len(rows) - ready}
    return {**counts, "routes": list(rows), **more}


STARVED: dict[str, Any] = {"has_text": False, "finish_reason": "length"}
THOUGHT: dict[str, Any] = {"has_text": False, "reasoned": True}
REFUSED: dict[str, Any] = {"has_text": False, "error_type": "Refused", "finish_reason": None}


def flight() -> list[dict[str, Any]]:
    """One with a fallback: p is refused, a ready, b ready when asked again, c starved for good, d not set up."""
    primary = report(row("p", "rejected", 1))
    rows = [row("a", "ready", 1), row("b", "ready", 2), row("c", "rejected", 2), row("d", "rejected", 0)]
    return [
        event("record_started", kind="preflight"),
        probe("p", **REFUSED),
        probe("a"),
        probe("b", **STARVED),
        probe("c", **THOUGHT),
        probe("b", "escalated"),
        probe("c", "escalated", **STARVED),
        probe("a", "tool_call", has_text=False),
        event("pool_probed", serving=["a"], report=report(*rows, escalations_used=2, primary_attempt=primary)),
        event("end_to_end_attempt", number=1, has_text=True, has_calls=False, http_status=200),
        event("record_ended", outcome="ready"),
    ]


def found(events: list[dict[str, Any]]) -> list[str]:
    (pool,) = [run for run in outcome_review(events)["runs"] if run["run"] == "pool"]
    return list(pool["disagreements"])


def test_a_report_that_follows_from_its_probes_holds() -> None:
    review = outcome_review(flight())
    assert (review["claimed"], review["derived"]) == ("ready", "ready")
    assert found(flight()) == []


def said(events: list[dict[str, Any]]) -> Any:
    return next(each["facts"] for each in events if each["kind"] == "pool_probed")


def route(number: int, **facts: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: said(events)["report"]["routes"][number].update(facts)


def of_report(**facts: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: said(events)["report"].update(facts)


def of_primary(**facts: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: said(events)["report"]["primary_attempt"].update(facts)


def serving(*names: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: said(events).update(serving=list(names))


def of_probe(place: int, **facts: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: events[place]["facts"].update(facts)


def without(place: int) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: events.__delitem__(place)


def with_one_more(more: dict[str, Any]) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: events.insert(7, copy.deepcopy(more))


COUNTS = "the counts of the report are not those of its routes"
ESCALATIONS = "the escalations of the report are not those of the events"
TAMPERED: list[tuple[Callable[[list[dict[str, Any]]], None], str]] = [
    (of_report(probed_count=5), COUNTS),
    (of_report(ready_count=3), COUNTS),
    (of_report(rejected_count=1), COUNTS),
    (of_primary(ready_count=1), COUNTS),
    (of_primary(routes=[]), COUNTS),
    (route(0, status="rejected"), "a: rejected, and its probes say otherwise"),
    (route(2, status="ready"), "c: ready, and its probes say otherwise"),
    (route(3, status="ready"), "d: ready, and its probes say otherwise"),
    (of_primary(routes=[row("p", "ready", 1)]), "p: ready, and its probes say otherwise"),
    (of_probe(2, has_text=False), "a: ready, and its probes say otherwise"),
    (of_probe(5, has_text=False), "b: ready, and its probes say otherwise"),
    (of_probe(6, has_text=True), "c: rejected, and its probes say otherwise"),
    (without(2), "a: ready, and its probes say otherwise"),
    (route(0, attempts=2), "a: its attempts are not those of the events"),
    (route(1, attempts=1), "b: its attempts are not those of the events"),
    (route(3, attempts=1), "d: its attempts are not those of the events"),
    (of_primary(routes=[row("p", "rejected", 2)]), "p: its attempts are not those of the events"),
    (with_one_more(probe("d", **REFUSED)), "d: its attempts are not those of the events"),
    (of_probe(3, finish_reason="stop"), "b: escalated without a sign that its budget was too small"),
    (of_probe(3, error_type="Refused"), "b: escalated without a sign that its budget was too small"),
    (of_probe(3, has_text=True), "b: escalated without a sign that its budget was too small"),
    (of_probe(4, reasoned=False), "c: escalated without a sign that its budget was too small"),
    (without(3), "b: escalated without a sign that its budget was too small"),
    (with_one_more(probe("a", "escalated")), "a: escalated without a sign that its budget was too small"),
    (of_report(escalations_used=1), ESCALATIONS),
    (without(5), ESCALATIONS),
    (serving("a", "c"), "c: serves, and is not ready"),
    (serving("a", "p"), "p: serves, and is not ready"),
    (serving("ghost"), "ghost: serves, and is not ready"),
]


@pytest.mark.parametrize(("tamper", "fault"), TAMPERED)
def test_a_tampered_report_or_probe_is_found(tamper: Callable[[list[dict[str, Any]]], None], fault: str) -> None:
    events = flight()
    tamper(events)
    assert fault in found(events)


def test_the_probes_of_a_question_are_reviewed_beside_its_run() -> None:
    opened = [event("record_started", kind="question"), {**started(), "run": "r", "elapsed_ms": 0}]
    probes = [{**each, "run": "r"} for each in flight()[1:9]]
    served = {**ended(text_chars=9), "run": "r", "elapsed_ms": 0}
    served["facts"]["candidate"] = "a"
    calls = [
        event("model_call_started", "r", call=1, candidate="a"),
        served,
        event("run_ended", "r", outcome="answered"),
    ]
    stop = {"outcome": "answered", "answer": "x" * 9, "known_subtotal": 10, "usage_known": True, "served": {"a": 1}}
    events = [*opened, *probes, *calls, event("stop", "r", **stop, model_calls=1, receipts=[])]
    review = outcome_review([*events, event("record_ended", outcome="answered")])
    assert [(run["run"], run["disagreements"]) for run in review["runs"]] == [("r", []), ("pool", [])]
    assert (review["claimed"], review["derived"]) == ("answered", "answered")


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        ({}, "ready"),
        ({"has_text": False}, "not_ready"),
        ({"has_text": False, "has_calls": True}, "ready"),
        ({"http_status": 201}, "not_ready"),
        ({"http_status": 503}, "not_ready"),
        ({"error_code": "ReplyUnreadable"}, "not_ready"),
    ],
)
def test_a_preflight_is_ready_by_its_last_attempt_alone(facts: dict[str, Any], outcome: str) -> None:
    events = flight()
    events[9]["facts"].update(facts)
    assert outcome_review(events)["derived"] == outcome
    events.insert(9, event("end_to_end_attempt", number=1, has_text=False, has_calls=False, http_status=503))
    assert outcome_review(events)["derived"] == outcome
    assert outcome_review(events[:9])["derived"] == "not_ready"
    events.insert(10, event("interrupted"))
    assert outcome_review(events)["derived"] == "interrupted"


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([event("pool_probed", serving=[])], Outcome.MODEL_ERROR),
        ([event("pool_probed", serving=["a"])], None),
        ([event("model_call_passed_over", call=1, spent="nothing"), ended(2, text_chars=1)], Outcome.ANSWERED),
        ([event("model_call_passed_over", call=1, spent="unknown"), ended(2, text_chars=1)], Outcome.MISSING_USAGE),
        ([event("model_call_passed_over", call=1, spent="unknown"), ended(2, "a")], Outcome.MISSING_USAGE),
        ([event("model_call_passed_over", call=1, spent="unknown")], None),
    ],
)
def test_the_end_of_a_run_with_a_pool_follows_from_its_events(
    events: list[dict[str, Any]], outcome: Outcome | None
) -> None:
    assert derive([started(), *events]) == outcome


@pytest.mark.parametrize("kind", ["probe_ended", "model_call_passed_over"])
@pytest.mark.parametrize(
    ("spent", "usage", "rows"), [("nothing", None, 0), ("unknown", None, 1), ("as reported", USED, 1)]
)
def test_what_was_not_served_has_no_row_and_what_may_have_been_has_one(
    kind: str, spent: str, usage: object, rows: int
) -> None:
    first = event("record_started", kind="preflight", endpoint="pool")
    events = [first, event(kind, call=1, spent=spent, **({} if usage is None else {"usage": usage}))]
    book = accounting(events, None)
    assert (len(book["calls"]), book["usage_known"]) == (rows, spent != "unknown")
    assert book["known_subtotal"] == (0 if usage is None else 5)
    assert list(accounts(book, events)) == []
    assert list(accounts({**book, "calls": [{**each, "call": 2} for each in book["calls"]]}, events)) == (
        ["its calls are not those of the events"] if rows else []
    )
