"""The preflight's second layer, its endings and its settings: on the virtual clock, and as a process against a server.

python -m pytest -v test_preflight.py
"""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage

import test_preflight_wire as wire
from bounded.run import Event, Run
from command_line import UsageError
from conftest import ROOT, OnVirtualClock, run_graph
from evidence.verify import verify
from models.attempts import Attempt
from models.catalogue import Candidate
from models.pool import SERVES_NONE, Pool
from models.test_pool import ASKS, SAYS, UNREACHED, Fake, Late
from models.test_readiness import HANGS, STARVED, Refused, candidate
from preflight import ATTEMPTS, EndToEnd, Preflight, as_dict, attempts_of, end_to_end, fly, show
from test_preflight_wire import KEY, Server, command, ended, flown, pool_file, started

running, server = wire.running, wire.server

REFUSED_SETTINGS = ["", "x", "0", "00", "01", "-1", "+1", "1.0", "10000", "99999", "٣", "3 ", "3\n"]
WORD = AIMessage("ready")
NAMELESS = type("no identifier", (Exception,), {})("x")


class Flight:
    """Both layers over a pool of fakes, and every event of them."""

    def __init__(self, *fakes: Fake) -> None:
        self.fakes = dict(zip("abc", fakes, strict=False))
        named: list[Candidate] = [candidate(name) for name in self.fakes]
        self.pool = Pool(named, environment={}, build=lambda each, tokens: self.fakes[each.id])
        self.known = Preflight()
        self.events: list[Event] = []

    async def fly(self, max_attempts: int = 3) -> EndToEnd:
        await fly(self.pool, Run(observe=self.events.append), self.known, max_attempts)
        assert self.known.end_to_end is not None
        return self.known.end_to_end

    def facts(self, kind: str) -> list[Mapping[str, Any]]:
        return [event.facts for event in self.events if event.kind == kind]


Flown = OnVirtualClock[EndToEnd]


def of(end: EndToEnd) -> tuple[Any, ...]:
    return (end.status, end.attempts, end.trigger, end.http_status, end.error_code)


def test_one_word_through_the_route_is_ready(on_virtual_clock: Flown) -> None:
    flight = Flight(Fake(SAYS), Fake())
    assert of(on_virtual_clock(flight.fly())) == ("ready", 1, None, None, None)
    assert flight.known.outcome == "ready"
    assert flight.known.end_to_end is not None
    assert flight.known.end_to_end.candidate == "a"


@pytest.mark.parametrize("say", [ASKS, AIMessage("", tool_calls=ASKS.tool_calls), WORD])
def test_a_tool_call_or_a_reply_without_usage_is_a_response_too(on_virtual_clock: Flown, say: object) -> None:
    assert on_virtual_clock(Flight(Fake(say)).fly()).status == "ready"


@pytest.mark.parametrize("say", [HANGS, Late(SAYS, 0.1), Late(SAYS, 900)], ids=["hangs", "obeys late", "stubborn"])
def test_the_worst_case_is_three_attempts_of_120_s(on_virtual_clock: Flown, say: object) -> None:
    flight = Flight(Fake(say, say, say))
    end = on_virtual_clock(flight.fly())
    assert of(end) == ("gateway_transport_exhausted", 3, "A", None, "TimeoutError")
    assert flight.fakes["a"].asked == pytest.approx([0.0, 120.0, 240.0], abs=0.5)
    assert 360.0 <= end.seconds <= 360.75  # each attempt has its grace
    assert [facts["fate"] for facts in flight.facts("model_call_cut")] == ["was ended by its timeout"] * 3


def test_in_an_attempt_a_candidate_that_hangs_leaves_the_next_its_half(on_virtual_clock: Flown) -> None:
    flight = Flight(Fake(HANGS), Fake(SAYS))
    end = on_virtual_clock(flight.fly())
    assert (of(end), end.candidate, end.seconds) == (("ready", 1, None, None, None), "b", 60.0)


@pytest.mark.parametrize(
    ("says", "end"),
    [
        ([Refused(503)] * 3, ("gateway_retry_rejected", 3, "A", 503, "Refused")),
        ([Refused(503), Refused(401), Refused(404)], ("gateway_retry_rejected", 3, "A", 404, "Refused")),
        ([Refused(503), HANGS, UNREACHED], ("gateway_transport_exhausted", 3, "A", None, "ConnectError")),
        ([UNREACHED, HANGS, Refused(500)], ("gateway_retry_rejected", 3, "A", 500, "Refused")),
        ([Refused(503), SAYS], ("ready", 2, None, None, None)),
        ([STARVED, SAYS], ("invalid_chat_response", 1, "B", None, None)),
        ([Refused(503), STARVED, SAYS], ("invalid_chat_response", 2, "B", None, None)),
        ([AIMessage(" "), SAYS], ("invalid_chat_response", 1, None, None, None)),
        ([Refused(200), SAYS], ("invalid_chat_response", 1, None, 200, "Refused")),
        ([Refused(201), SAYS], ("ready", 2, None, None, None)),
        ([NAMELESS] * 3, ("gateway_transport_exhausted", 3, "A", None, "provider_error")),
    ],
)  # fmt: skip
def test_what_brings_no_200_is_asked_for_again_and_the_last_attempt_decides(
    on_virtual_clock: Flown, says: list[object], end: tuple[Any, ...]
) -> None:
    flight = Flight(Fake(*says))
    assert of(on_virtual_clock(flight.fly())) == end
    assert len(flight.fakes["a"].asked) == end[1]
    assert [facts["number"] for facts in flight.facts("end_to_end_attempt")] == list(range(1, end[1] + 1))
    assert (flight.known.outcome == "ready") == (end[0] == "ready")


@pytest.mark.parametrize(
    ("max_attempts", "status"),
    [(1, "gateway_rejected"), (2, "gateway_retry_rejected"), (5, "gateway_retry_rejected")],
)
def test_a_refusal_is_told_apart_by_whether_it_could_be_retried(
    on_virtual_clock: Flown, max_attempts: int, status: str
) -> None:
    end = on_virtual_clock(Flight(Fake(*[Refused(429)] * 9)).fly(max_attempts))
    assert (end.status, end.attempts, end.seconds) == (status, max_attempts, 0.0)  # without a pause


def test_with_none_ready_or_none_that_serves_it_is_skipped_and_says_so(on_virtual_clock: Flown) -> None:
    none = Flight(Fake(probe=Refused(401)))
    assert on_virtual_clock(none.fly()) == EndToEnd(status="skipped", why="no candidate is ready")
    mute = Flight(Fake(SAYS, check=AIMessage("no")))
    assert on_virtual_clock(mute.fly()) == EndToEnd(status="skipped", why=SERVES_NONE)
    for flight in (none, mute):
        assert (flight.known.outcome, flight.pool.serving) == ("not_ready", ())
        assert flight.known.report is not None
        assert len(flight.facts("pool_probed")) == len(flight.facts("end_to_end")) == 1
        assert flight.facts("end_to_end_attempt") == []
    assert mute.fakes["a"].asked == []


def test_what_is_cut_off_from_above_is_on_record_as_that(on_virtual_clock: OnVirtualClock[None]) -> None:
    async def check() -> None:
        flight = Flight(Fake(HANGS))
        task = asyncio.create_task(flight.fly())
        await asyncio.sleep(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [facts["fate"] for facts in flight.facts("model_call_cut")] == ["was cut off with the run"]

    on_virtual_clock(check())


def test_the_second_layer_alone_needs_no_more_than_the_pool(on_virtual_clock: Flown) -> None:
    async def check() -> EndToEnd:
        flight = Flight(Fake(SAYS))
        await flight.pool.probe(lambda *_, **__: None)
        return await end_to_end(flight.pool, Run(), 1)

    assert on_virtual_clock(check()).status == "ready"


def test_the_table_shows_both_stages_and_what_was_last_asked(
    on_virtual_clock: Flown, capsys: pytest.CaptureFixture[str]
) -> None:
    flight = Flight(Fake(Refused(503)), Fake(Refused(404), probe=SAYS))
    on_virtual_clock(flight.fly(1))
    show(flight.known, flight.pool.serving)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "outcome: not_ready"
    assert lines[-2:] == [
        "end to end: gateway_rejected, 1 attempt, last asked: b, trigger A, HTTP 404, Refused, 0.0 s",
        "would be asked: a, b",
    ]


def test_what_an_interrupt_leaves_unknown_is_absent() -> None:
    assert as_dict(Preflight(interrupted=True), ()) == {"schema_version": 1, "outcome": "interrupted", "serving": []}


def test_an_attempt_shows_nothing_of_what_an_exception_says() -> None:
    assert "fake-key" not in repr(Attempt(failure=Refused(401)))


@pytest.mark.parametrize("text", REFUSED_SETTINGS)
def test_a_number_of_attempts_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"{ATTEMPTS} takes a whole number from 1 to 9999"):
        attempts_of({ATTEMPTS: text})


def test_the_number_of_attempts_is_three_unless_set() -> None:
    assert [attempts_of(given) for given in ({}, {ATTEMPTS: "1"}, {ATTEMPTS: "9999"})] == [3, 1, 9999]


# As a process.


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "x", "0", "00", "10000", "٣"])
def test_a_refused_setting_ends_it_before_any_request(server: Server, tmp_path: Path, text: str) -> None:
    with started(command(server, tmp_path, ("healthy",), ""), **{ATTEMPTS: text}) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, server.requests) == (2, "", [])
    assert stderr.startswith(f"preflight.py: {ATTEMPTS} takes a whole number from 1 to 9999")
    assert stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attempts", "end", "finish"),
    [
        ("route-503", "3", ("gateway_retry_rejected", 3, "A", 503, "InternalServerError"), None),
        ("route-503", "1", ("gateway_rejected", 1, "A", 503, "InternalServerError"), None),
        ("route-201", "2", ("gateway_retry_rejected", 2, "A", 201, "provider_error"), "stop"),
        ("route-hung-up", "2", ("gateway_transport_exhausted", 2, "A", None, "RemoteProtocolError"), None),
        ("route-starved", "3", ("invalid_chat_response", 1, "B", 200, None), "length"),
        ("route-html", "3", ("invalid_chat_response", 1, None, 200, "ReplyUnreadable"), None),
        ("route-recovers", "3", ("ready", 3, None, 200, None), "stop"),
    ],
)
def test_each_end_of_the_second_layer_is_sealed(
    server: Server, tmp_path: Path, name: str, attempts: str, end: tuple[Any, ...], finish: str | None
) -> None:
    done = flown(server, tmp_path, name, **{ATTEMPTS: attempts})
    said, outcome = done.said["end_to_end"], "ready" if end[0] == "ready" else "not_ready"
    fields = ("status", "attempts", "trigger", "http_status", "error_code")
    assert tuple(said.get(field) for field in fields) == end
    assert (said.get("finish_reason"), said["candidate"]) == (finish, name)
    assert (done.status, done.said["outcome"]) == (0 if outcome == "ready" else 4, outcome)
    assert server.sizes(name) == [16, 4096] + [4096] * end[1]  # each attempt is one request, of the same size
    assert server.of("route") == [name] * end[1]
    done.holds_as(outcome)


@pytest.mark.slow
def test_the_route_goes_on_to_the_next_candidate_within_one_attempt(server: Server, tmp_path: Path) -> None:
    done = flown(server, tmp_path, "route-503", "route-hung-up", "healthy")
    assert (done.status, server.of("route")) == (0, ["route-503", "route-hung-up", "healthy"])
    said = done.said["end_to_end"]
    assert (said["status"], said["attempts"], said["candidate"]) == ("ready", 1, "healthy")
    assert [facts["spent"] for facts in done.events("model_call_passed_over")] == ["nothing", "unknown"]
    done.holds_as("ready")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hang", "route-hang"])
def test_an_interrupt_in_either_layer_is_sealed_as_one(server: Server, tmp_path: Path, name: str) -> None:
    with started(command(server, tmp_path, (name,), "--json")) as process:
        assert server.hanging.wait(30)
        process.send_signal(signal.SIGINT)
        done = ended(process, tmp_path)
    assert (done.status, done.said["outcome"]) == (130, "interrupted")
    assert ("report" in done.said, "end_to_end" in done.said) == (name == "route-hang", False)
    done.holds_as("interrupted")
    checked = subprocess.run([sys.executable, "verify.py", str(done.folder)], cwd=ROOT, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, f"{done.folder} holds\n")


@pytest.mark.slow
def test_a_question_is_answered_by_the_first_that_passed_and_its_evidence_holds(server: Server, tmp_path: Path) -> None:
    pool, runs = str(pool_file(server, tmp_path, "hidden", "as-text", "healthy", "second")), str(tmp_path / "runs")
    given = {"REVIEW_MODEL": "pool", "REVIEW_POOL": pool, "POOL_VARIABLE": KEY}
    done = run_graph("--evidence", runs, wire.QUESTION, **given)
    assert (done.returncode, server.of("route")) == (0, ["healthy"])
    assert "served by: healthy (1)\n" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert verify(folder) == []
    assert KEY not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_key_that_the_pool_names_is_masked_in_what_a_model_says(server: Server, tmp_path: Path) -> None:
    pool = str(pool_file(server, tmp_path, "indiscreet"))
    done = run_graph("--model", "pool", "--pool", pool, wire.QUESTION, POOL_VARIABLE=KEY)
    assert done.returncode == 0
    assert "[masked]" in done.stdout
    assert KEY not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_question_to_a_pool_of_which_none_is_ready_says_why_of_each(server: Server, tmp_path: Path) -> None:
    pool = str(pool_file(server, tmp_path, "hidden", "silent", "html"))
    done = run_graph("--model", "pool", "--pool", pool, wire.QUESTION, POOL_VARIABLE=KEY)
    assert done.returncode == 4
    assert re.search(r"\(hidden: .*502.*; silent: invalid_chat_response.*; html: ReplyUnreadable", done.stdout)
