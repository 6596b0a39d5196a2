"""The live probe that does not see its target: for the model, the wire, the clock or a person; what is sealed then."""

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evidence.verify import verify
from models import conftest as wires
from models.conftest import Ending, Loopback, Reply, as_json
from models.test_gemini import HELLO, said
from models.test_gemini import NAME as GEMINI
from models.test_gemini import calling as gemini_calling
from models.test_meter import COUNT, COUNTED, GENERATION
from models.test_ollama import NAME as OLLAMA
from models.test_ollama import calling, last
from test_live_probe import KEY, Meanwhile, Probed, probe, start

loopback = wires.loopback

pytestmark = pytest.mark.slow

GZIP = {"content-type": "application/json", "content-encoding": "gzip"}
# Starts main with another plan, for which the guard is then asked.
PLANNED = "import functools, live_probe; live_probe.Plan = functools.partial(live_probe.Plan, {}); live_probe.main()"
# Takes the breakpoint away, so that a follow-up is attempted.
UNPAUSED = """\
import graph, live_probe
live_probe.build_graph = lambda *given, interrupt_after, **more: graph.build_graph(*given, **more)
live_probe.main()
"""
# A call into the system that does not come back, and with it the event loop.
STUCK = "import sys, time; sys.addaudithook(lambda event, _: event == 'socket.connect' and time.sleep(60)); "


async def probe_of(model: str, loopback: Loopback, home: Path, *more: str, **given: Any) -> Probed:
    arguments = ["--model", model, "--guard", "guards:allow", *more]
    return await probe(home, *arguments, env={"OLLAMA_HOST": loopback.url}, **given)


async def test_other_proposals_are_a_target_incomplete_and_not_asked_again(loopback: Loopback, tmp_path: Path) -> None:
    others = calling(("list_ci_jobs", {"pr": 418}), ("fetch_job_log", {"job_id": 812}))
    loopback.say(as_json(others, last()), as_json(last("It failed.")))
    probed = await probe_of(OLLAMA, loopback, tmp_path)
    assert probed.came_to == (4, "target_incomplete")
    assert probed.stop["outcome"] == "paused"
    assert [receipt["outcome"] for receipt in probed.stop["receipts"]] == ["executed", "executed"]
    assert len(loopback.requests) == 1


async def test_frames_are_pictures_of_the_terminal_in_which_an_incomplete_probe_ran(
    loopback: Loopback, tmp_path: Path
) -> None:
    loopback.say(as_json(last(f"It failed: {KEY}.", reason=KEY)), Reply())
    probed = await probe_of(OLLAMA, loopback, tmp_path, "--frames")
    assert (probed.came_to, probed.stop["outcome"]) == ((4, "target_incomplete"), "answered")
    assert probed.stdout.startswith("probe: target_incomplete\r\noutcome: answered\r\n")  # as only a terminal ends them
    assert (probed.stop["answer"], probed.facts("model_call_ended")[0]["finish_reason"]) == (
        "It failed: [masked].",
        "[masked]",
    )
    pictures = {path.name: path.read_bytes() for path in (probed.folder / "images").iterdir()}
    assert {name: int.from_bytes(png[16:20], "big") for name, png in pictures.items()} == {
        "completed-end-1440@2x.png": 2880,
        "completed-end-390@2x.png": 780,
        "completed-end-320@2x.png": 640,
    }
    assert len(loopback.requests) == 1


@pytest.mark.parametrize(
    ("reply", "status", "error_class"),
    [
        pytest.param(Reply(pieces=COUNTED.pieces, headers=GZIP), 200, "DecodingError", id="badly encoded"),
        pytest.param(Reply(pieces=(b"busy",), status=503, headers={"retry-after": "0"}), 503, None, id="503"),
        pytest.param(as_json({"error": {"code": 400, "message": f"bad key {KEY}"}}, status=400), 400, None, id="400"),
        pytest.param(Reply(pieces=(b"not JSON",)), 200, None, id="no JSON"),
    ],
)
async def test_a_count_that_fails_lets_no_generation_out_and_is_an_incomplete_preflight(
    reply: Reply, status: int, error_class: str | None, loopback: Loopback, tmp_path: Path
) -> None:
    loopback.say(reply, as_json(said(HELLO)))
    probed = await probe_of(GEMINI, loopback, tmp_path)
    assert probed.came_to == (4, "incomplete_preflight")
    (request,) = loopback.requests
    assert request.path.endswith(COUNT)
    (exchange,) = probed.facts("exchange")
    assert (exchange["number"], exchange["status"], exchange["error_class"]) == (1, status, error_class)
    assert exchange["content_encoding"] == reply.headers.get("content-encoding")
    assert probed.facts("token_count") == [{"status": "failed", "counted": None}]
    check_nothing_was_reported(probed, "model_error")
    assert probed.stdout.startswith("probe: incomplete_preflight\noutcome: model_error\ntokens: 0 (unknown)\n")


def check_nothing_was_reported(probed: Probed, outcome: str) -> None:
    """An attempt is no inference, and the zero that is known is no report."""
    stop, book = probed.stop, probed.read("accounting.json")
    assert (stop["outcome"], stop["model_calls"], stop["usage_known"], stop["known_subtotal"]) == (outcome, 1, False, 0)
    (row,) = book["calls"]
    assert (row["reported"], row["input"], row["output"], row["thinking"], row["total"]) == (None,) * 5
    assert (book["known_subtotal"], book["usage_known"], book["estimate"]) == (0, False, None)
    assert "model_call_ended" not in probed.kinds


@pytest.mark.parametrize(
    ("model", "reply", "status", "error_class"),
    [
        pytest.param(
            GEMINI, Reply(pieces=(b"{}",), status=500, headers={"retry-after": "0"}), 500, None, id="500, to be retried"
        ),
        pytest.param(
            GEMINI, Reply(status=307, headers={"location": "/elsewhere"}), 307, None, id="307, to be followed"
        ),
        pytest.param(OLLAMA, Reply(pieces=(b"{}",), headers=GZIP), 200, "DecodingError", id="badly encoded"),
        pytest.param(OLLAMA, Reply(pieces=(b'{"mo',), ending=Ending.RESET), 200, "ReadError", id="a reset"),
    ],
)
async def test_a_generation_that_fails_is_recorded_and_not_asked_again(
    model: str, reply: Reply, status: int, error_class: str | None, loopback: Loopback, tmp_path: Path
) -> None:
    before = [COUNTED] if model == GEMINI else []
    loopback.say(*before, reply, COUNTED, as_json(said(HELLO)))
    probed = await probe_of(model, loopback, tmp_path)
    assert probed.came_to == (4, "target_incomplete")
    assert len(loopback.requests) == len(before) + 1
    assert loopback.requests[-1].path.endswith(GENERATION[model])
    exchange = probed.facts("exchange")[-1]
    assert (exchange["number"], exchange["status"], exchange["error_class"]) == (len(before) + 1, status, error_class)
    check_nothing_was_reported(probed, "model_error")


async def test_where_the_breakpoint_does_not_hold_the_meter_lets_no_third_request_out(
    loopback: Loopback, tmp_path: Path
) -> None:
    loopback.say(COUNTED, as_json(said(gemini_calling("list_ci_jobs", args={"pr": 418}))), COUNTED)
    with start(tmp_path, UNPAUSED, ["--guard", "guards:allow"], {}) as child:  # not verified: it is no probe any more
        await asyncio.to_thread(child.communicate, timeout=60)
    (events,) = (tmp_path / "runs").glob("*/events.json")
    sent = [event["facts"] for event in json.loads(events.read_bytes()) if event["kind"] == "exchange"]
    assert [exchange["error_class"] for exchange in sent] == [None, None, "RequestRefused"]
    assert len(loopback.requests) == 2


@pytest.mark.parametrize(
    ("model", "sealed", "count"),
    [(GEMINI, "incomplete_preflight", "failed"), (OLLAMA, "target_incomplete", "not_available")],
    ids=["count", "generation"],
)
async def test_a_model_timeout_ends_the_count_or_the_generation(
    model: str, sealed: str, count: str, loopback: Loopback, tmp_path: Path
) -> None:
    loopback.say(Reply(ending=Ending.SILENT), as_json(said(HELLO)))
    planned = PLANNED.format("model_timeout_s=1.0, max_output_tokens=64")
    probed = await probe_of(model, loopback, tmp_path, code=planned)
    assert probed.came_to == (4, sealed)
    assert len(loopback.requests) == 1
    assert [exchange["error_class"] for exchange in probed.facts("exchange")] == ["CancelledError"]
    assert [fact["status"] for fact in probed.facts("token_count")] == [count]
    check_nothing_was_reported(probed, "model_timeout")
    assert probed.stop["reason"] == "the model did not answer within 1 s"
    assert probed.facts("levers")[0]["max_output_tokens"] == 64  # what the plan says is what the provider is told


async def test_a_loop_that_is_stuck_in_the_count_is_ended_and_sealed_by_the_watchdog(
    loopback: Loopback, tmp_path: Path
) -> None:
    probed = await probe_of(GEMINI, loopback, tmp_path, code=STUCK + PLANNED.format("deadline_s=1.0"))
    assert probed.came_to == (4, "incomplete_preflight")
    check_nothing_was_reported(probed, "deadline")
    assert loopback.requests == []


def when_asked(loopback: Loopback) -> Meanwhile:
    """Ctrl-C, once the server has read a request."""

    async def interrupt(child: "subprocess.Popen[bytes]") -> None:
        await loopback.asked.wait()
        child.send_signal(signal.SIGINT)

    return interrupt


def when_it_says(words: bytes) -> Meanwhile:
    """Ctrl-C, once these words stand on stderr."""

    async def interrupt(child: "subprocess.Popen[bytes]") -> None:
        assert child.stderr is not None
        while words not in await asyncio.to_thread(child.stderr.readline):
            assert child.poll() is None
        child.send_signal(signal.SIGINT)

    return interrupt


async def test_an_interrupt_while_the_provider_is_asked_is_sealed(loopback: Loopback, tmp_path: Path) -> None:
    loopback.say(Reply(ending=Ending.SILENT))
    probed = await probe_of(GEMINI, loopback, tmp_path, meanwhile=when_asked(loopback))
    assert probed.came_to == (130, "interrupted")
    assert [exchange["error_class"] for exchange in probed.facts("exchange")] == ["CancelledError"]
    check_nothing_was_reported(probed, "interrupted")


async def test_an_interrupt_while_the_tool_is_waited_for_is_sealed_with_what_is_known(
    loopback: Loopback, tmp_path: Path
) -> None:
    loopback.say(as_json(calling(("fetch_job_log", {"job_id": 815})), last()))
    probed = await probe_of(OLLAMA, loopback, tmp_path, meanwhile=when_it_says(b"fetch_job_log(815), at most 3.0 s"))
    assert probed.came_to == (130, "interrupted")
    assert (probed.stop["known_subtotal"], probed.stop["usage_known"]) == (403, True)
    assert [receipt["source_gap"] for receipt in probed.stop["receipts"]] == ["native_tool_timeout"]


async def test_an_interrupt_while_the_guard_thinks_is_sealed(loopback: Loopback, tmp_path: Path) -> None:
    probed = await probe(tmp_path, "--guard", "guards:waits", meanwhile=when_it_says(b"the guard is asked"))
    assert probed.came_to == (130, "interrupted")
    assert loopback.requests == []


def test_a_guard_that_holds_the_interpreter_does_not_hold_the_process(tmp_path: Path) -> None:
    bounds = "import authorisation, live_probe; authorisation.GUARD_S = live_probe.START_UP_S = 0.3; live_probe.main()"
    with start(tmp_path, bounds, ["--guard", "guards:backtrack", "--model", OLLAMA], {}) as child:
        try:
            stdout, stderr = child.communicate(timeout=20)
        finally:
            child.kill()
    assert (child.returncode, stdout) == (1, b"")
    assert b"in backtrack" in stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert "not sealed" in verify(folder)[0]
