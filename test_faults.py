"""Every way a call can go wrong, against the whole thing on real time: in this process, and as one whose exit is timed.

python test_faults.py "sync tool asleep"    # one fault, run as graph.py's own main would run it
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.state import CompiledStateGraph

import fault_cases as cases
from bounded.calls import until_cut
from bounded.deadlines import deadline_scope
from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome
from bounded.receipts import Receipt
from bounded.run import Event, Run
from bounded.text import digest
from bounded.timeouts import ToolTimeouts
from ci import LocalCi
from command_line import parse
from fault_cases import BOUND_S, LATE, LONG_S, SECRET, Fault, Gate, Tools, provider
from graph import State, ask, ask_and_exit, build_graph
from models.factory import build_model
from sources.jobs import ci_tools
from terminal import answer_dict

pytestmark = pytest.mark.slow

MARGIN_S = 1.0
GONE_S = 3.0
START_UP_S = 30.0
HERE = Path(__file__).parent
QUESTION = "Why is CI failing on pull request 415?"


def check(fault: Fault, answer: dict[str, Any]) -> None:
    """What has to hold of the answer, in the form that `--json` prints, however the fault was run."""
    assert answer["outcome"] == fault.outcome
    assert fault.says in answer.get("reason", "")
    assert answer["known_subtotal"] == fault.known_subtotal
    assert answer["usage_known"] is not bool(fault.last or fault.answers)
    receipts = answer["receipts"]
    assert [receipt["tool"] for receipt in receipts] == fault.tools
    assert len({receipt["call_id"] for receipt in receipts}) == len(receipts)
    keys = ("outcome", "source_gap", "error_type")
    assert [" ".join(receipt[key] for key in keys if key in receipt) for receipt in receipts] == fault.endings
    assert all(("text_sha256" in receipt) is (receipt["outcome"] == "executed") for receipt in receipts)
    assert answer["seconds"] <= fault.bound_s + MARGIN_S
    assert SECRET not in json.dumps(answer)
    assert LATE not in json.dumps(answer)


def check_messages(fault: Fault, messages: Sequence[BaseMessage], receipts: Sequence[Receipt]) -> None:
    """What has to hold of the messages that the model was given, beside the receipts."""
    assert SECRET not in str(messages)
    assert LATE not in str(messages)
    given = {message.tool_call_id: message for message in messages if isinstance(message, ToolMessage)}
    assert len(given) == len(receipts) or fault.outcome in (Outcome.INTERRUPTED, Outcome.MISSING_USAGE)
    for receipt in receipts:
        if (message := given.get(receipt.call_id or "")) is None:
            continue
        executed = receipt.outcome is CallOutcome.EXECUTED
        assert message.status == ("success" if executed else "error")
        assert receipt.text_sha256 == (digest(message.text) if executed else None)
        if receipt.source_gap:
            assert message.text.startswith(f"⚠️ TOOL_TIMEOUT ({receipt.tool}): exceeded {BOUND_S}s limit.")


@pytest.mark.parametrize("fault", [*cases.FAULTS, *cases.PROVIDER_FAULTS, *cases.INTERRUPTED], ids=str)
async def test_control_is_back_in_time_and_nothing_late_is_credited(fault: Fault) -> None:
    gate, late, before = Gate(), asyncio.Queue[Event](), asyncio.all_tasks()

    def watch(event: Event) -> None:
        call = event.facts.get("call") or getattr(event.facts.get("receipt"), "tool", "")
        if f"{event.kind} {call}" == fault.interrupt_at:
            gate.interrupt.set()
        if event.kind.endswith("_late"):
            late.put_nowait(event)

    run, config = Run(secrets=frozenset({SECRET}), observe=watch), RunnableConfig(configurable={"thread_id": "1"})
    with provider(gate, fault.answers) as url:
        graph = _graph(fault, gate, url, InMemorySaver())
        started = time.monotonic()
        answer = await ask(
            graph, QUESTION, deadline_s=fault.deadline_s, run=run, interrupt=gate.interrupt, config=config
        )
        took_s = time.monotonic() - started
        for _ in range(20):  # turns of the loop, in which what was asked to stop does so
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        gate.open()
        await _soon(_let_go(late, fault.late, left))
    assert took_s <= fault.bound_s + MARGIN_S
    check(fault, answer_dict(answer))
    assert len(left) <= fault.tasks_left
    assert late.empty()
    settled = [receipt.late.text_sha256 for receipt in run.receipts.all() if receipt.late is not None]
    assert settled == [digest(LATE)] * fault.late
    assert tuple(replace(receipt, late=None) for receipt in run.receipts.all()) == answer.receipts
    assert replace(run.answer(), receipts=answer.receipts, seconds=answer.seconds) == answer
    check_messages(fault, (await graph.aget_state(config)).values["messages"], answer.receipts)


@pytest.mark.parametrize("fault", cases.FAULTS, ids=str)
def test_process_is_gone_soon_after_the_bound_of_its_run(fault: Fault, tmp_path: Path) -> None:
    ended = _run_process(fault, tmp_path)
    assert ended.status == fault.outcome.exit_status
    assert ended.complaints == ""
    check(fault, json.loads(ended.printed))


def test_process_with_a_blocked_loop_is_ended_by_its_watchdog(tmp_path: Path) -> None:
    ended = _run_process(cases.LOOP_BLOCKED, tmp_path)
    assert ended.status == Outcome.DEADLINE.exit_status
    assert "in block_the_loop\n" in ended.complaints
    check(cases.LOOP_BLOCKED, json.loads(ended.printed))


def test_process_whose_interpreter_is_held_is_ended_without_it(tmp_path: Path) -> None:
    ended = _run_process(cases.INTERPRETER_HELD, tmp_path)
    assert ended.status == 1
    assert "in hold_the_interpreter\n" in ended.complaints
    assert ended.printed == ""


@pytest.mark.parametrize("fault", cases.PROVIDER_FAULTS, ids=str)
def test_command_is_gone_soon_after_its_provider_fails(fault: Fault, tmp_path: Path) -> None:
    arguments = ["graph.py", "--json", "--model-timeout", str(fault.model_timeout_s), QUESTION]
    with (
        provider(Gate(), fault.answers) as url,
        (tmp_path / "out").open("w+") as out,
        _process(arguments, out, subprocess.PIPE, REVIEW_MODEL="faulty:1b", OLLAMA_HOST=url) as process,
    ):
        _read_until(process, f"model call {len(fault.answers)}")
        assert process.wait(timeout=BOUND_S + GONE_S) == fault.outcome.exit_status
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        out.seek(0)
        check(fault, json.load(out))


SLOW_SCRIPT: list[dict[str, Any]] = [
    {
        "tool_calls": [{"name": "list_ci_jobs", "args": {"pr": 415}, "id": "call-1"}],
        "usage_metadata": {"total_tokens": cases.TOKENS},
    },
    {"content": LATE, "delay_s": LONG_S},
]


def test_interrupted_model_call_leaves_what_is_known_on_stdout(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SLOW_SCRIPT))
    printed = _interrupted(QUESTION, f"scripted:{script}", "model call 2", tmp_path)
    assert "outcome: interrupted\ntokens: 7 (unknown)\n" in printed
    assert "list_ci_jobs(415) returned " in printed
    assert LATE not in printed


def test_interrupted_tool_call_leaves_what_is_known_on_stdout(tmp_path: Path) -> None:
    printed = _interrupted("Why did job 815 fail?", "offline", "fetch_job_log(815)", tmp_path)
    assert "outcome: interrupted\n" in printed
    assert "(known)\n" in printed
    assert "fetch_job_log(815) was cut off with the run after " in printed


def test_second_interrupt_ends_the_process_at_once() -> None:
    """After the first one it waits for ever to say what is known: no one reads its stdout, and the pipe is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    arguments = ["graph.py", "--model", "offline", "Why did job 815 fail?"]
    with os.fdopen(reader, "rb") as pipe, _process(arguments, writer, subprocess.PIPE) as process:
        os.close(writer)
        _read_until(process, "fetch_job_log(815)")
        process.send_signal(signal.SIGINT)
        _read_until(process, "fetch_job_log(815) was cut off")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GONE_S) == Outcome.INTERRUPTED.exit_status
        assert pipe.read() == b"." * filled


def _interrupted(question: str, model: str, line: str, tmp_path: Path) -> str:
    """What graph.py prints when it is interrupted once `line` stands on its stderr."""
    arguments = ["graph.py", "--deadline", "60", "--model", model, question]
    with (tmp_path / "out").open("w+") as out, _process(arguments, out, subprocess.PIPE) as process:
        _read_until(process, line)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=GONE_S) == Outcome.INTERRUPTED.exit_status
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        out.seek(0)
        return out.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a process left: its status, its stdout, and its stderr after the line that says when the run started."""

    status: int
    printed: str
    complaints: str


def _run_process(fault: Fault, tmp_path: Path) -> Ended:
    """Run `main` below for a fault. To files: a child that the process leaves behind may hold a pipe open."""
    with (
        (tmp_path / "out").open("w+") as out,
        (tmp_path / "err").open("w+") as err,
        _process([__file__, fault.name], out, err) as process,
    ):
        status = process.wait(timeout=START_UP_S + fault.bound_s + GONE_S)
        gone = time.monotonic()
        out.seek(0)
        err.seek(0)
        started, _, complaints = err.read().partition("\n")
        assert gone - float(started) <= fault.bound_s + GONE_S
        assert SECRET not in complaints
        return Ended(status=status, printed=out.read(), complaints=complaints)


@contextlib.contextmanager
def _process(
    arguments: Sequence[str], stdout: int | IO[str], stderr: int | IO[str], **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A python process that does not outlive the block, whatever becomes of the test."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=HERE,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _read_until(process: subprocess.Popen[str], start: str) -> None:
    assert process.stderr is not None
    assert any(line.startswith(start) for line in process.stderr), f"it never said: {start}"


def _graph(
    fault: Fault, gate: Gate, url: str = "", saver: BaseCheckpointSaver[Any] | None = None
) -> CompiledStateGraph[State, Run, State, State]:
    if fault.answers:
        model = build_model("faulty:1b", model_timeout_s=LONG_S, environment={"OLLAMA_HOST": url})
        limits = Limits(model_timeout_s=fault.model_timeout_s)
        return build_graph(model, ci_tools(LocalCi()), limits=limits, checkpointer=saver)
    limits = Limits(model_timeout_s=fault.model_timeout_s, tool_timeouts=ToolTimeouts(default_s=BOUND_S))
    tools = [Tools(gate).made(name) for name in dict.fromkeys(fault.tools)]
    return build_graph(fault.model(gate), tools, limits=limits, checkpointer=saver)


async def _soon(work: Coroutine[Any, Any, None]) -> None:
    with deadline_scope(MARGIN_S):
        assert await until_cut(work) is None


async def _let_go(late: asyncio.Queue[Event], count: int, tasks: set[asyncio.Task[Any]]) -> None:
    for _ in range(count):
        await late.get()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> NoReturn:
    """One fault through the same calls as in graph.py's main; the gate stays shut, and the process has to end."""
    (fault,) = (
        fault for fault in (*cases.FAULTS, cases.LOOP_BLOCKED, cases.INTERPRETER_HELD) if fault.name == sys.argv[1]
    )
    options = parse([QUESTION, "--json", "--quiet", "--deadline", str(fault.deadline_s)], {})
    graph = _graph(fault, Gate())
    print(time.monotonic(), file=sys.stderr, flush=True)
    asyncio.run(ask_and_exit(graph, options, Limits(), frozenset({SECRET}), None))
    raise AssertionError("unreachable: the process has ended")


if __name__ == "__main__":
    main()
