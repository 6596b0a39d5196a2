"""What a run leaves: the real graph recorded, sealed and verified, however it ends; and `graph.py --evidence`.

python test_recording.py PARENT    # a run that blocks the loop, recorded as graph.py's own main would record it
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool

import fault_cases as cases
from bounded.calls import until_cut
from bounded.deadlines import deadline_scope
from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Event, Run, to_all
from bounded.timeouts import ToolTimeouts
from ci import LocalCi
from command_line import parse
from conftest import ROOT, OnVirtualClock, run_graph
from evidence import folder as folder_module
from evidence.folder import RunFolder
from evidence.rederive import HOST_ENDS
from evidence.verify import document, verify
from fault_cases import BOUND_S, SECRET, Fault, Gate, Tools, provider
from graph import ask, ask_and_exit, build_graph
from models.factory import build_model
from models.scripted import ScriptedModel
from recording import Recording
from sources.jobs import TOOL_SET, ci_tools
from terminal import answer_dict
from test_graph import QUESTION, asks, call, says

SLOW = call("fetch_job_log", {"job_id": 815})
UNPARSED = {"name": "list_ci_jobs", "args": "{pr", "id": "c1"}
LATER_S = {"delay_s": 30}


class Recorded:
    """One run folder, and the run that is recorded in it."""

    def __init__(self, parent: Path, *, secrets: frozenset[str] = frozenset()) -> None:
        self.secrets = secrets
        self.folder = RunFolder(parent, "question", model="scripted", endpoint="in_process", secrets=secrets)
        about: dict[str, Any] = {
            "model": "scripted",
            "endpoint": "in_process",
            "sources": {},
            "commit": None,
            "dirty": None,
        }
        self.folder.write("provenance.json", document({"schema_version": 1, **about}))

    def run(
        self, limits: Limits, deadline_s: float | None, *observers: Callable[[Event], None], **facts: object
    ) -> Run:
        observe = self.folder.observer("r", limits=limits, deadline_s=deadline_s, model="scripted", **facts)
        return Run(model="scripted", secrets=self.secrets, observe=to_all(observe, *observers))

    def holds_as(self, outcome: Outcome) -> None:
        """It is sealed, every check of it is passed, and what follows from its events is this."""
        self.folder.seal(outcome, stdout=b"")
        assert verify(self.folder.path) == []
        review = json.loads((self.folder.path / "outcome-review.json").read_bytes())
        assert (review["derived"], review["claimed"]) == (outcome, outcome)


def script(*replies: dict[str, Any]) -> ScriptedModel:
    return ScriptedModel(replies=list(replies))


class LateReply(ScriptedModel):
    """It answers within the grace of its cancellation."""

    async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
        return await super().ainvoke(*args, **kwargs)


class Raising(ScriptedModel):
    async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
        raise SystemExit(3)


MANY = [call(call_id=f"c{n}") for n in range(300)]
MALFORMED: list[Any] = [{}, [], "9", *({"total_tokens": total} for total in (True, "9", 7.0, -1, 2**70, 10**5_000))]
TIMES_OUT: dict[str, Any] = {"model_timeout_s": 5.0}
CONVERSATIONS: list[tuple[Outcome, BaseChatModel, dict[str, Any]]] = [
    (Outcome.ANSWERED, script(asks(), asks(call("fetch_job_log", {"job_id": 812})), says()), {}),
    (Outcome.ANSWERED, script(asks(SLOW), says()), {}),
    (Outcome.ANSWERED, script(asks(SLOW, call(call_id="c2")), says()), {}),
    (Outcome.ANSWERED, script(says("I looked nothing up.")), {}),
    (Outcome.ANSWERED, script(says('{"name": "fetch_job_log", "arguments": {"job_id": 812}}')), {}),
    (Outcome.ANSWERED, script(asks(), asks(), says()), {}),
    (Outcome.ANSWERED, script(asks(), says()), {"max_steps": 2}),
    (Outcome.ANSWERED, script(asks(), says()), {"token_budget": 11}),
    (Outcome.ANSWERED, script(says(total=0)), {"token_budget": 1}),
    (Outcome.ANSWERED, script(says("x" * 300_000)), {}),
    (Outcome.ANSWERED, script(says("\ud800 caf\u00e9 \x1b[31m")), {}),
    (Outcome.ANSWERED, script(asks(call("nope\x1b[31m", {})), asks(call(args={"pr": "many"})), says()), {}),
    (Outcome.ANSWERED, script(asks(call(args={"pr": 999})), says()), {}),
    (Outcome.ANSWERED, script(asks(call(args={"pr": 415, "deep": [[[[[[[[[[1]]]]]]]]]]})), says()), {}),
    (Outcome.ANSWERED, script(asks(*MANY[:20]), says()), {}),
    (Outcome.ANSWERED, script(asks(*(call(call_id="x" * 5_000 + str(n)) for n in range(2))), says()), {}),
    (Outcome.ANSWERED, script(asks(*(call(call_id="sk-" + str(n) * 30) for n in range(2))), says()), {}),
    (Outcome.ANSWERED, script(asks() | {"invalid_tool_calls": [{**UNPARSED, "id": "c2"}]}, says()), {}),
    (Outcome.ANSWERED, script({**asks(), "tool_calls": [], "invalid_tool_calls": [UNPARSED]}, asks(), says()), {}),
    (Outcome.PAUSED, script(asks()), {"interrupt_after": ["tools"]}),
    (Outcome.PAUSED, script(asks(SLOW)), {"interrupt_after": ["tools"]}),
    (Outcome.TOKEN_BUDGET, script(asks(), says()), {"token_budget": 1}),
    (Outcome.TOKEN_BUDGET, script(asks(), asks(), says()), {"token_budget": 20}),
    (Outcome.TOKEN_BUDGET, script(asks()), {"token_budget": 10, "max_steps": 1, "interrupt_after": ["tools"]}),
    (Outcome.STEP_LIMIT, script(*[asks()] * 3), {"max_steps": 3}),
    (Outcome.MISSING_USAGE, script(asks() | {"usage_metadata": None}), {"token_budget": 1}),
    *((Outcome.MISSING_USAGE, script(says() | {"usage_metadata": usage}), {}) for usage in MALFORMED),
    (Outcome.EMPTY_ANSWER, script(asks(), says("  \n")), {}),
    (Outcome.EMPTY_ANSWER, script(says() | {"content": [{"type": "text", "text": ""}]}), {}),
    (Outcome.MODEL_ERROR, script(asks(), {"error": "503 from upstream"}), {}),
    (Outcome.MODEL_ERROR, script(asks(call(call_id=None))), {}),
    (Outcome.MODEL_ERROR, script(asks(call(call_id=""))), {}),
    (Outcome.MODEL_ERROR, script(asks(call(), call())), {}),
    (Outcome.MODEL_ERROR, script(asks(*MANY)), {}),
    (Outcome.MODEL_ERROR, Raising(replies=[]), {}),
    (Outcome.MODEL_TIMEOUT, script(asks(), says() | LATER_S), TIMES_OUT),
    (Outcome.MODEL_TIMEOUT, LateReply(replies=[says()]), TIMES_OUT),
    (Outcome.DEADLINE, script(asks(), says() | LATER_S), {"deadline_s": 4.0}),
    (Outcome.DEADLINE, script(asks(SLOW)), {"deadline_s": 2.0}),
    (Outcome.DEADLINE, script(asks(), asks(), says()), {"deadline_s": 0.05}),
    (Outcome.DEADLINE, LateReply(replies=[says()]), {"deadline_s": 1.0, "model_timeout_s": None}),
    (Outcome.INTERRUPTED, script(asks(SLOW)), {"interrupt_s": 1.0}),
    (Outcome.INTERRUPTED, script(asks(), says() | LATER_S), {"interrupt_s": 1.0}),
    (Outcome.INTERRUPTED, LateReply(replies=[says()]), {"interrupt_s": 1.0}),
    (Outcome.INTERRUPTED, script(says()), {"interrupt_s": 0.0}),
]


@pytest.mark.parametrize(("outcome", "model", "how"), CONVERSATIONS)
def test_the_real_graph_leaves_evidence_that_holds(
    outcome: Outcome,
    model: BaseChatModel,
    how: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_virtual_clock: OnVirtualClock[None],
) -> None:
    async def check() -> None:
        loop, settings, interrupt = asyncio.get_running_loop(), dict(how), asyncio.Event()
        monkeypatch.setattr(folder_module, "time", SimpleNamespace(monotonic=loop.time))
        deadline_s, pauses = settings.pop("deadline_s", 120.0), settings.pop("interrupt_after", [])
        if (interrupt_s := settings.pop("interrupt_s", None)) is not None:
            loop.call_later(interrupt_s, interrupt.set) if interrupt_s else interrupt.set()
        limits = Limits(tool_timeouts=ToolTimeouts(per_set={TOOL_SET: LocalCi().timeouts}), **settings)
        graph = build_graph(model, ci_tools(LocalCi()), limits=limits, tool_set=TOOL_SET, interrupt_after=pauses)
        recorded = Recorded(tmp_path)
        run = recorded.run(limits, deadline_s, question=QUESTION, **({"pause_after": pauses} if pauses else {}))
        answer = await ask(graph, QUESTION, deadline_s=deadline_s, run=run, interrupt=interrupt)
        assert answer.outcome is outcome
        recorded.folder.record("stop", "r", **answer_dict(answer))
        await asyncio.sleep(60)  # what comes late comes after the stop
        recorded.holds_as(outcome)

    on_virtual_clock(check())


def test_every_outcome_of_a_run_was_recorded() -> None:
    reviewers = {outcome for outcome in Outcome if outcome.value in HOST_ENDS}  # which test_review.py has
    assert {outcome for outcome, _model, _how in CONVERSATIONS} == set(Outcome) - reviewers


async def let_go(late: "asyncio.Queue[Event]", count: int, tasks: set[asyncio.Task[Any]]) -> None:
    for _ in range(count):
        await late.get()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*cases.FAULTS, *cases.PROVIDER_FAULTS, *cases.INTERRUPTED], ids=str)
async def test_every_fault_leaves_evidence_that_holds(fault: Fault, tmp_path: Path) -> None:
    gate, before, recorded = Gate(), asyncio.all_tasks(), Recorded(tmp_path, secrets=frozenset({SECRET}))
    limits = Limits(model_timeout_s=fault.model_timeout_s, tool_timeouts=ToolTimeouts(default_s=BOUND_S))
    late: asyncio.Queue[Event] = asyncio.Queue()

    def watch(event: Event) -> None:
        name = event.facts.get("call") or getattr(event.facts.get("receipt"), "tool", "")
        if f"{event.kind} {name}" == fault.interrupt_at:
            gate.interrupt.set()
        if event.kind == "tool_call_late":
            late.put_nowait(event)

    with provider(gate, fault.answers) as url:
        tools: Sequence[BaseTool] = ci_tools(LocalCi())
        model: BaseChatModel = build_model("faulty:1b", model_timeout_s=60, environment={"OLLAMA_HOST": url})
        if not fault.answers:
            tools, model = [Tools(gate).made(name) for name in dict.fromkeys(fault.tools)], fault.model(gate)
        run = recorded.run(limits, fault.deadline_s, watch)
        graph = build_graph(model, tools, limits=limits)
        answer = await ask(graph, QUESTION, deadline_s=fault.deadline_s, run=run, interrupt=gate.interrupt)
        recorded.folder.record("stop", "r", **answer_dict(answer))
        gate.open()
        with deadline_scope(5):  # what comes late comes after the stop
            assert await until_cut(let_go(late, fault.late, asyncio.all_tasks() - before)) is None
    assert SECRET not in (recorded.folder.path / "events.jsonl").read_text()
    recorded.holds_as(fault.outcome)


# The command line.


def the_folder(parent: Path) -> Path:
    (only,) = parent.iterdir()
    return only


def events_of(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "events.json").read_bytes()))


def start(*arguments: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def read_until(process: "subprocess.Popen[str]", start: str) -> None:
    assert process.stderr is not None
    assert any(line.startswith(start) for line in process.stderr), f"it never said: {start}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"), [("offline", "--quiet"), ("scripted", "--json"), ("scripted", "--max-steps=9")]
)
def test_a_question_leaves_a_sealed_folder_that_holds(model: str, form: str, tmp_path: Path) -> None:
    said = tmp_path / "script.json"
    said.write_text(json.dumps([asks(), says("caf\u00e9 \x1b[31m \U0001f600")]), encoding="utf-8")
    name = model if model == "offline" else f"scripted:{said}"
    done = run_graph(form, "--evidence", str(tmp_path / "new" / "runs"), QUESTION, REVIEW_MODEL=name)
    folder = the_folder(tmp_path / "new" / "runs")
    assert (done.returncode, verify(folder)) == (0, [])
    assert (folder / "stdout.txt").read_text(encoding="utf-8") == done.stdout
    assert done.stderr.splitlines()[-1] == f"evidence: {folder}"
    assert folder.name.endswith("Z-question")
    events = events_of(folder)
    assert [event["facts"]["outcome"] for event in events if event["kind"] in ("stop", "record_ended")] == [
        "answered"
    ] * 2
    (asked,) = [event["facts"] for event in events if event["kind"] == "run_started"]
    (came_to,) = [event["facts"] for event in events if event["kind"] == "stop"]
    assert (asked["question"], asked["limits"]["tool_timeouts"]["per_set"]) == (
        QUESTION,
        {"ci": {"fetch_job_log": 3.0}},
    )
    assert asked["model"] == came_to["model"]
    quotes = {"offline": {"found": 3, "total": 3, "jobs": [812], "missing": [], "left_out": 0}}
    none = {"found": 0, "total": 0, "jobs": [], "missing": [], "left_out": 0}
    assert came_to["quotes"] == quotes.get(model, none)
    about = (folder / "provenance.json").read_text()
    assert str(tmp_path) not in about
    assert json.loads(about)["endpoint"] == "in_process"
    assert str(tmp_path) not in (folder / "events.json").read_text()


@pytest.mark.parametrize(
    ("model", "environment", "candidates", "proxied"),
    [
        ("gemini-3.8-flash", {}, (), True),
        ("gemini-3.8-flash", {"GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:8000"}, (), False),
        ("openai:m", {}, (), True),
        ("openai:m", {"OPENAI_BASE_URL": "http://127.0.0.1:8000/v1"}, (), False),
        ("gemma4:e2b", {}, (), False),
        ("offline", {}, (), False),
        ("pool", {}, ({"provider": "ollama", "endpoint": "loopback"},), False),
        ("pool", {}, ({"provider": "openai", "endpoint": "overridden"},), True),
    ],
)
def test_a_proxy_stands_between_where_a_client_looks_for_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    environment: dict[str, str],
    candidates: tuple[dict[str, str], ...],
    proxied: bool,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    recording = Recording(
        str(tmp_path), kind="question", model=model, environment=environment, secrets=frozenset(), served_by=None,
        candidates=candidates, capture=lambda: lambda: b"",
    )  # fmt: skip
    assert json.loads((recording.folder.path / "provenance.json").read_text())["between"]["proxy"] is proxied


@pytest.mark.slow
@pytest.mark.parametrize("parent", ["a file", "a file/below", "/proc/evidence"])
def test_a_parent_that_takes_no_folder_is_one_line_and_nothing_is_spent(parent: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("kept")
    (tmp_path / "script.json").write_text(json.dumps([says()]))
    where = str(tmp_path / parent)
    done = run_graph("--evidence", where, "--model", f"scripted:{tmp_path / 'script.json'}", QUESTION)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("graph.py: --evidence ")
    assert "for example: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "a file").read_text() == "kept"


@pytest.mark.slow
def test_an_interrupt_seals_the_folder_as_interrupted(tmp_path: Path) -> None:
    with start("graph.py", "--model", "offline", "--evidence", str(tmp_path), "job 815") as process:
        read_until(process, "fetch_job_log(815)")
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=10)
    folder = the_folder(tmp_path)
    assert (process.returncode, verify(folder)) == (Outcome.INTERRUPTED.exit_status, [])
    assert events_of(folder)[-1]["facts"] == {"outcome": "interrupted"}
    assert (folder / "stdout.txt").read_text() == printed
    assert said.splitlines()[-1] == f"evidence: {folder}"
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_folder_that_says_it_is_not_sealed(tmp_path: Path) -> None:
    with start("graph.py", "--model", "offline", "--evidence", str(tmp_path), "job 815") as process:
        read_until(process, "fetch_job_log(815)")
        process.kill()
    folder = the_folder(tmp_path)
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds[-1] == "tool_call_started"
    checked = subprocess.run([sys.executable, "verify.py", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 1
    assert "no run folder, or one that is not sealed: its run was killed or is going on" in checked.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_early_takes_nothing_from_the_evidence(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start("graph.py", "--model", "offline", "--evidence", str(tmp_path), QUESTION, stdout=writer) as process:
        os.close(writer)
        said = process.communicate(timeout=30)[1]
    folder = the_folder(tmp_path)
    assert (process.returncode, verify(folder)) == (0, [])
    assert (folder / "stdout.txt").read_bytes() == b""
    assert said.splitlines()[-1] == f"evidence: {folder}"
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_blocked_loop_is_sealed_as_a_deadline(tmp_path: Path) -> None:
    with start(__file__, str(tmp_path)) as process:
        printed, said = process.communicate(timeout=30)
    folder = the_folder(tmp_path)
    assert (process.returncode, verify(folder)) == (Outcome.DEADLINE.exit_status, [])
    assert "in block_the_loop\n" in said
    assert (folder / "stdout.txt").read_text() == printed
    assert json.loads(printed)["receipts"][-1]["source_gap"] == "native_tool_abandoned"


@pytest.mark.slow
def test_a_secret_of_the_environment_stands_in_no_file(tmp_path: Path) -> None:
    secret = "-".join(["fake", "secret", "4242"])  # in no source either, for those are copied as they are
    done = run_graph("--evidence", str(tmp_path), f"use {secret}", REVIEW_MODEL="offline", FAKE_API_KEY=secret)
    assert done.returncode == 0
    assert "use [masked]" in (the_folder(tmp_path) / "events.json").read_text()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()] == []


def main() -> NoReturn:
    """A run that blocks the loop, through the same calls as in graph.py's main."""
    fault = cases.LOOP_BLOCKED
    options = parse([QUESTION, "--json", "--quiet", "--deadline", str(fault.deadline_s)], {})
    tools = [Tools(Gate()).made(name) for name in fault.tools]
    limits = Limits(tool_timeouts=ToolTimeouts(default_s=BOUND_S))
    recording = Recording(
        sys.argv[1], kind="question", model="offline", environment={}, secrets=frozenset(), served_by=None
    )
    graph = build_graph(fault.model(Gate()), tools, limits=limits)
    asyncio.run(ask_and_exit(graph, options, limits, frozenset(), recording))
    raise AssertionError("unreachable: the process has ended")


if __name__ == "__main__":
    main()
