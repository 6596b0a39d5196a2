"""What a run with a pool leaves: evidence that holds however it ends, and in which a changed word is found."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from bounded.deadlines import deadline_scope
from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Event
from conftest import OnVirtualClock
from evidence import folder as folder_module
from evidence.verify import verify
from graph import ask
from models.readiness import TIME_IS_UP, NoneReady, probe_candidates
from models.test_pool import ASKS, QUESTION, SAYS, UNREACHED, Fake, Late, Talk
from models.test_readiness import HANGS, READY, STARVED, Model, Refused, candidate
from terminal import answer_dict
from test_recording import Recorded, events_of

Forge = Callable[[Event], Event]


def as_it_is(event: Event) -> Event:
    return event


async def recorded(
    parent: Path,
    monkeypatch: pytest.MonkeyPatch,
    fakes: list[Fake],
    *,
    deadline_s: float = 120.0,
    interrupt_s: float | None = None,
    forge: Forge = as_it_is,
    **limits: Any,
) -> Recorded:
    """Run the real graph with a pool, each event changed by `forge` before it is written; the folder is not sealed."""
    loop, interrupt = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(folder_module, "time", SimpleNamespace(monotonic=loop.time))
    if interrupt_s is not None:
        loop.call_later(interrupt_s, interrupt.set)
    talk, record = Talk(*fakes, **limits), Recorded(parent)
    run = record.run(Limits(**limits), deadline_s, question=QUESTION)
    write = run.observe
    assert write is not None
    run.observe = lambda event: write(forge(event))
    answer = await ask(
        talk.graph, QUESTION, deadline_s=deadline_s, run=run, interrupt=interrupt, first=talk.pool.make_ready
    )
    stop = forge(Event(kind="stop", facts=answer_dict(answer)))
    record.folder.record("stop", "r", **stop.facts)
    await asyncio.sleep(2000)  # what comes late comes after the stop
    return record


ENDINGS: list[tuple[Outcome, list[Fake], dict[str, Any]]] = [
    (Outcome.ANSWERED, [Fake(ASKS, SAYS)], {}),
    (Outcome.ANSWERED, [Fake(Refused(503), UNREACHED), Fake(ASKS, SAYS)], {}),
    (Outcome.ANSWERED, [Fake(probe=Refused(401)), Fake(SAYS)], {}),
    (Outcome.ANSWERED, [*(Fake(probe=Refused(401)) for _ in range(8)), Fake(SAYS)], {}),
    (Outcome.MISSING_USAGE, [Fake(HANGS), Fake(SAYS)], {}),
    (Outcome.MISSING_USAGE, [Fake(Late(SAYS, 0.1)), Fake(SAYS)], {}),
    (Outcome.MISSING_USAGE, [Fake(Late(SAYS, 900)), Fake(SAYS)], {}),
    (Outcome.MISSING_USAGE, [Fake(ValueError("x")), Fake(ASKS)], {}),
    (Outcome.MODEL_TIMEOUT, [Fake(HANGS), Fake(Late(SAYS, 900)), Fake(HANGS)], {}),
    (Outcome.MODEL_ERROR, [Fake(Refused(503)), Fake(ValueError("x"))], {}),
    (Outcome.MODEL_ERROR, [Fake(Refused(503)), Fake(SAYS)], {"max_steps": 1}),
    (Outcome.STEP_LIMIT, [Fake(Refused(503)), Fake(ASKS)], {"max_steps": 2}),
    (Outcome.MODEL_ERROR, [Fake(probe=Refused(401)), Fake(probe=STARVED)], {}),
    (Outcome.MODEL_ERROR, [Fake(check=AIMessage("no"))], {}),
    (Outcome.EMPTY_ANSWER, [Fake(STARVED.model_copy(update={"usage_metadata": SAYS.usage_metadata})), Fake()], {}),
    (Outcome.DEADLINE, [Fake(HANGS), Fake(HANGS)], {"deadline_s": 9.0}),
    (Outcome.DEADLINE, [Fake(probe=HANGS), Fake(probe=STARVED)], {"deadline_s": 4.0}),
    (Outcome.INTERRUPTED, [Fake(Refused(503)), Fake(Late(SAYS, 0.1))], {"interrupt_s": 3.0}),
    (Outcome.INTERRUPTED, [Fake(probe=HANGS), Fake()], {"interrupt_s": 3.0}),
    (Outcome.ANSWERED, [Fake(probe=Late(READY, 900)), Fake(SAYS)], {}),
    (Outcome.INTERRUPTED, [Fake(probe=Late(READY, 900)), Fake(SAYS)], {"interrupt_s": 3.0}),
]


@pytest.mark.parametrize(("outcome", "fakes", "how"), ENDINGS)
def test_a_run_with_a_pool_leaves_evidence_that_holds(
    outcome: Outcome,
    fakes: list[Fake],
    how: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_virtual_clock: OnVirtualClock[Recorded],
) -> None:
    on_virtual_clock(recorded(tmp_path, monkeypatch, fakes, **how)).holds_as(outcome)


def forging(kind: str, **forged: Callable[[Any], Any]) -> Forge:
    """Change these facts of every event of a kind; what becomes None is left out."""

    def forge(event: Event) -> Event:
        if event.kind != kind:
            return event
        facts: Mapping[str, Any] = event.facts
        changed = {name: change(facts.get(name)) for name, change in forged.items()}
        return replace(event, facts={name: value for name, value in {**facts, **changed}.items() if value is not None})

    return forge


FORGED: list[tuple[Forge, str]] = [
    (forging("stop", served=lambda _: {"b": 1}), "served is {'b': 1}, and {'b': 2} by the events"),
    (forging("stop", served=lambda _: {"a": 2}), "served is {'a': 2}, and {'b': 2} by the events"),
    (forging("stop", served=lambda _: None), "served is None, and {'b': 2} by the events"),
    (forging("model_call_ended", candidate=lambda _: None), "served is {'b': 2}, and None by the events"),
    (forging("stop", model_calls=lambda _: 2), "model_calls is 2, and 4 by the events"),
    (forging("pool_probed", serving=lambda names: [*names, "c"]), "c: serves, and is not ready"),
    (forging("pool_probed", serving=lambda _: []), "the events make it model_error, it claims answered"),
    (forging("model_call_passed_over", spent=lambda _: "unknown"), "the events make it missing_usage"),
    (
        forging("pool_probed", report=lambda report: {**report, "ready_count": 3}),
        "the counts of the report are not those of its routes",
    ),
]


@pytest.mark.parametrize(("forge", "fault"), FORGED)
def test_a_forged_word_of_who_was_ready_or_served_is_found(
    forge: Forge,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_virtual_clock: OnVirtualClock[Recorded],
) -> None:
    fakes = [Fake(Refused(503)), Fake(ASKS, SAYS), Fake(probe=Refused(401))]
    fakes[0].says.append(UNREACHED)
    record = on_virtual_clock(recorded(tmp_path, monkeypatch, fakes, forge=forge))
    record.folder.seal("answered", stdout=b"")
    assert any(fault in found for found in verify(record.folder.path)), verify(record.folder.path)


def test_one_who_was_never_ready_cannot_have_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_virtual_clock: OnVirtualClock[Recorded]
) -> None:
    first, then = forging("model_call_ended", candidate=lambda _: "x"), forging("stop", served=lambda _: {"x": 1})
    record = on_virtual_clock(recorded(tmp_path, monkeypatch, [Fake(SAYS)], forge=lambda event: then(first(event))))
    record.folder.seal("answered", stdout=b"")
    assert "outcome-review.json: pool: x: was asked, and does not serve" in verify(record.folder.path)


def test_a_second_probe_that_there_was_no_time_for_is_none(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        purposes: list[Any] = []
        with deadline_scope(4.0), pytest.raises(NoneReady) as raised:
            await probe_candidates(
                [candidate("a"), candidate("b")],
                lambda _, tokens: Model(STARVED if tokens <= 16 else HANGS),
                observe=lambda kind, **facts: purposes.append(facts["purpose"]) if kind == "probe_ended" else None,
            )
        first, second = raised.value.report.rows
        assert purposes == ["base", "base", "escalated"]
        assert (first.error_type, first.attempts, first.seconds) == ("TimeoutError", 2, 4.0)
        assert (second.error_type, second.attempts, second.trigger) == (TIME_IS_UP, 1, "B")
        assert raised.value.report.escalations_used == 1

    on_virtual_clock(check())


def test_a_word_that_is_changed_after_the_seal_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_virtual_clock: OnVirtualClock[Recorded]
) -> None:
    record = on_virtual_clock(recorded(tmp_path, monkeypatch, [Fake(Refused(503)), Fake(SAYS)]))
    record.holds_as(Outcome.ANSWERED)
    kinds = [event["kind"] for event in events_of(record.folder.path)]
    assert (kinds.count("pool_probed"), kinds.count("model_call_passed_over")) == (1, 1)
    events = record.folder.path / "events.json"
    events.write_bytes(events.read_bytes().replace(b'"serving":["a","b"]', b'"serving":["b","a"]'))
    assert verify(record.folder.path) != []
