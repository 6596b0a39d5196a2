"""The live probe as a process: what it refuses, what it sends, and what it then keeps, against scripted replies.

python -m pytest -v test_graph.py test_live_probe.py
"""

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.prebuilt import ToolNode

from authorisation import Plan
from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.receipts import Receipt
from bounded.run import Run
from bounded.timeouts import ToolTimeouts
from ci import LocalCi
from conftest import ROOT, OnVirtualClock
from evidence.verify import verify
from graph import build_graph
from live_probe import verdict
from models import conftest as wires
from models.conftest import Loopback, as_json
from models.scripted import ScriptedModel
from models.test_gemini import HELLO, said
from models.test_gemini import NAME as GEMINI
from models.test_gemini import calling as gemini_calling
from models.test_meter import COUNT, COUNTED, GENERATION, encoded
from models.test_ollama import NAME as OLLAMA
from models.test_ollama import calling as ollama_calling
from models.test_ollama import last
from sources.jobs import TOOL_SET, ci_tools
from test_authorisation import GUARDS, SECRET
from test_graph import asks, call, says
from test_terminal import an_answer

loopback = wires.loopback  # a fixture, which only the folder of models would find by itself

# Made up anew each time, so that no source file holds it, nor the copy of one in a run folder.
KEY = f"fake-key-{secrets.token_hex(8)}"
CREDENTIALS = dict.fromkeys(("GOOGLE_API_KEY", "GEMINI_API_KEY", "OPENAI_API_KEY", "OLLAMA_API_KEY"), KEY)
TARGET = {"tool": "fetch_job_log", "args": {"job_id": 815}}
PROVIDERS = re.compile(r"(google\.genai|langchain|langgraph|ollama|openai|anthropic|httpx)")

# Runs live_probe.py as it is, and says at its end which modules were loaded and which variables were looked up.
SPY = """\
import json, os, runpy, sys

looked_up = []

class Spied(type(os.environ)):
    def __getitem__(self, name):
        looked_up.append(os.fsdecode(name))
        return super().__getitem__(name)

    def __iter__(self):
        looked_up.append("EVERY KEY")
        return super().__iter__()

def spied(there):
    return Spied(there._data, there.encodekey, there.decodekey, there.encodevalue, there.decodevalue)

def leave(status):
    with open(report, "w") as file:
        json.dump({"modules": sorted(sys.modules), "looked_up": looked_up}, file)
    end(status)

report, end, os._exit = os.environ.pop("SPY_REPORT"), os._exit, leave
os.environ, os.environb = spied(os.environ), spied(os.environb)
sys.argv[0] = "live_probe.py"
try:
    runpy.run_path("live_probe.py", run_name="__main__")
except SystemExit as exc:
    leave(exc.code)
"""
IMPATIENT = "import authorisation, live_probe; authorisation.GUARD_S = 0.3; live_probe.main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A probe that has ended, and what it kept."""

    status: int
    stdout: str
    stderr: str
    folders: list[Path]

    @property
    def folder(self) -> Path:
        (folder,) = self.folders
        return folder

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_bytes())

    def facts(self, kind: str) -> list[Any]:
        return [event["facts"] for event in self.read("events.json") if event["kind"] == kind]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.read("events.json")]

    @property
    def stop(self) -> Any:
        (stop,) = self.facts("stop")
        return stop

    @property
    def came_to(self) -> tuple[int, str]:
        return self.status, self.read("manifest.json")["predicate"]["outcome"]


Meanwhile = Callable[["subprocess.Popen[bytes]"], Awaitable[None]]


def start(home: Path, code: str | None, arguments: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    (home / "outside").mkdir(exist_ok=True)
    (home / "outside" / "guards.py").write_text(GUARDS)
    script = ["live_probe.py"] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *script, "--evidence", str(home / "runs"), *arguments],
        cwd=ROOT,
        env={**os.environ, "GOOGLE_API_KEY": KEY, "PYTHONPATH": str(home / "outside"), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def probe(
    home: Path,
    *arguments: str,
    code: str | None = None,
    env: Mapping[str, str] | None = None,
    meanwhile: Meanwhile | None = None,
) -> Probed:
    """Run live_probe.py to its end, with guards on its path; what has to hold of every probe is checked here."""
    runs = home / "runs"
    with start(home, code, arguments, env or {}) as child:
        try:
            if meanwhile is not None:
                await meanwhile(child)
            stdout, stderr = await asyncio.to_thread(child.communicate, timeout=60)
        except BaseException:
            child.kill()
            raise
    folders = list(runs.iterdir()) if runs.exists() else []
    for folder in folders:
        assert verify(folder) == []
        assert (folder / "stdout.txt").read_bytes() == stdout
        assert f"evidence: {folder}\n" in stderr.decode()
    files = [path.read_bytes() for path in runs.rglob("*") if path.is_file()]
    assert not [text for text in (stdout, stderr, *files) if KEY.encode() in text or SECRET.encode() in text]
    return Probed(status=child.returncode, stdout=stdout.decode(), stderr=stderr.decode(), folders=folders)


async def spied(home: Path, *arguments: str, env: Mapping[str, str]) -> tuple[Probed, list[str], list[str]]:
    """A probe, the provider modules that it loaded, and the credentials that it looked up."""
    report = home / "report.json"
    probed = await probe(home, *arguments, code=SPY, env={"SPY_REPORT": str(report), **env})
    told = json.loads(report.read_bytes())
    assert "REVIEW_MODEL" in told["looked_up"]  # the spy was in its place
    return (
        probed,
        [name for name in told["modules"] if PROVIDERS.match(name)],
        [name for name in told["looked_up"] if re.search("KEY|TOKEN|SECRET|PASS|CREDENTIAL", name)],
    )


@pytest.mark.slow
async def test_run_directly_it_refuses_before_it_builds_an_sdk_object_or_reads_a_credential(
    loopback: Loopback, tmp_path: Path
) -> None:
    # Whoever sets the environment is not whoever types the command: a guard has no twin.
    probed, modules, credentials = await spied(tmp_path, env={"REVIEW_GUARD": "guards:allow", **CREDENTIALS})
    assert (probed.status, probed.stdout, probed.folders) == (2, "", [])
    (line,) = probed.stderr.splitlines()
    assert line.startswith("live_probe.py: refused: ")
    assert line.endswith("--guard package.module:function")
    assert (modules, credentials, loopback.requests) == ([], [], [])


@pytest.mark.slow
async def test_a_guard_that_refuses_is_asked_before_an_sdk_object_is_built_or_a_credential_read(
    loopback: Loopback, tmp_path: Path
) -> None:
    probed, modules, credentials = await spied(tmp_path, "--guard", "guards:none", env=CREDENTIALS)
    assert probed.came_to == (2, "refused")
    assert (modules, credentials, loopback.requests) == ([], [], [])


@pytest.mark.slow
async def test_what_is_missing_after_an_authorisation_is_a_refusal_as_well(loopback: Loopback, tmp_path: Path) -> None:
    probed, modules, credentials = await spied(tmp_path, "--guard", "guards:allow", env={"GOOGLE_API_KEY": ""})
    assert probed.came_to == (2, "refused")
    assert "needs a key in GOOGLE_API_KEY" in probed.facts("refused")[0]["reason"]
    assert "langchain_google_genai" in modules
    assert {"EVERY KEY", "GOOGLE_API_KEY"} <= set(credentials)
    assert loopback.requests == []


@pytest.mark.slow
def test_where_the_evidence_goes_and_what_serves_the_model_can_be_set_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "guards.py").write_text(GUARDS)
    twins = {"REVIEW_EVIDENCE": str(tmp_path / "kept"), "REVIEW_SERVED_BY": "a proxy of ours", "REVIEW_MODEL": OLLAMA}
    command = [sys.executable, "live_probe.py", "--guard", "guards:none"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), **twins}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    (folder,) = (tmp_path / "kept").iterdir()
    assert (done.returncode, verify(folder)) == (2, [])
    provenance = json.loads((folder / "provenance.json").read_bytes())
    assert (provenance["model"], provenance["between"]["served_by"]) == (OLLAMA, "a proxy of ours")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "offline", "--guard", "guards:allow"], "offline is no provider's model"),
        (["--guard", ""], "a probe needs a guard"),
        (["--guard"], "expected one argument"),
    ],
)
async def test_a_command_line_that_cannot_be_a_probe_is_refused_in_one_line_and_without_a_folder(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    probed = await probe(tmp_path, *arguments)
    assert (probed.status, probed.folders) == (2, [])
    (line,) = probed.stderr.splitlines()
    assert says in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "reason"),
    [
        ("evidence.accounting:accounting", "the guard lies inside the project"),
        ("linked:allow", "the guard lies inside the project"),
        ("handed_on:allow", "the guard lies inside the project"),
        ("guards:raises", "the guard raised ValueError"),
        ("guards:raises_refused", "the guard raised Refused"),
        ("guards:interrupts", "the guard raised KeyboardInterrupt"),
        ("leaves:allow", "the guard raised SystemExit"),
        ("guards:absent", "guards has no async function absent"),
        ("guards:no_offset", "the authorisation does not say when it expires, as a moment with an offset"),
        ("guards:other_plan", "the authorisation is for another plan"),
        ("guards:mapping", "the guard answered dict, which is no authorisation"),
        ("guards:hangs", "the guard did not answer within 0.3 s"),
        ("guards:sleeps", "the guard did not answer within 0.3 s"),
        ("guards:briefly", "the authorisation has expired"),  # while the SDK is loaded, which takes longer
    ],
)
async def test_a_refusal_is_sealed_with_its_reason_and_nothing_is_sent(
    guard: str, reason: str, loopback: Loopback, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "linked.py").symlink_to(ROOT / "ci.py")
    (outside / "handed_on.py").write_text("from graph import ask as allow")
    (outside / "leaves.py").write_text(f"raise SystemExit({SECRET!r})")
    probed = await probe(tmp_path, "--guard", guard, code=IMPATIENT if "0.3 s" in reason else None)
    assert (probed.came_to, probed.stdout) == ((2, "refused"), "")
    assert probed.facts("refused") == [{"reason": reason}]
    assert probed.stderr.splitlines()[0] == f"live_probe.py: refused: {reason}"
    assert probed.kinds[:2] == ["record_started", "plan"]
    assert not {"run_started", "exchange"} & set(probed.kinds)
    assert probed.read("accounting.json")["calls"] == []
    assert loopback.requests == []


@pytest.mark.slow
async def test_the_target_is_seen_where_gemini_proposes_the_slow_tool_and_its_timeout_answers(
    loopback: Loopback, tmp_path: Path
) -> None:
    target = said(gemini_calling("fetch_job_log", args=TARGET["args"]))
    loopback.say(encoded("gzip", COUNTED), encoded("gzip", as_json(target)), as_json(said(HELLO)))
    probed = await probe(tmp_path, "--guard", "guards:allow")
    assert probed.came_to == (0, "target_seen")
    assert probed.stdout.splitlines()[:3] == ["probe: target_seen", "outcome: paused", "tokens: 403 (known)"]

    count, generation = loopback.requests  # and no follow-up
    assert [count.path.endswith(COUNT), generation.path.endswith(GENERATION[GEMINI])] == [True, True]
    assert [request.headers["x-goog-api-key"] for request in loopback.requests] == [KEY, KEY]
    config = generation.json()["generationConfig"]
    assert (config["maxOutputTokens"], config["thinkingConfig"]) == (4096, {"thinking_level": "LOW"})

    assert probed.kinds == [
        "record_started", "plan", "levers", "authorised", "run_started", "model_call_started", "exchange",
        "token_count", "exchange", "model_call_ended", "tool_call_started", "tool_call_timed_out", "stop",
        "record_ended",
    ]  # fmt: skip
    (plan,) = probed.facts("plan")
    assert plan.pop("plan_sha256") == Plan(**plan).digest
    assert probed.facts("record_started")[0]["endpoint"] == "loopback"
    assert probed.facts("run_started")[0]["pause_after"] == ["tools"]
    sent = {"method": "POST", "status": 200, "content_encoding": "gzip", "error_class": None}
    sizes = [len(COUNTED.pieces[0]), len(as_json(target).pieces[0])]
    assert probed.facts("exchange") == [
        {**sent, "number": number, "path": request.path, "body_bytes": size}
        for number, request, size in zip((1, 2), loopback.requests, sizes, strict=True)
    ]
    assert probed.facts("token_count") == [{"status": "counted", "counted": 31}]

    assert (probed.stop["outcome"], probed.stop["model_calls"], probed.stop["known_subtotal"]) == ("paused", 1, 403)
    (receipt,) = probed.stop["receipts"]
    assert {name: receipt[name] for name in TARGET} == TARGET
    assert (receipt["outcome"], receipt["source_gap"], receipt["bound_s"]) == ("error", "native_tool_timeout", 3.0)
    assert "TOOL_TIMEOUT (fetch_job_log): exceeded 3.0s limit." in receipt["reason"]
    (row,) = probed.read("accounting.json")["calls"]
    assert (row["counted_before"], row["input"], row["total"]) == (31, 224, 403)


@pytest.mark.slow
async def test_the_target_is_seen_through_ollama_and_what_it_lacks_is_not_available(
    loopback: Loopback, tmp_path: Path
) -> None:
    proposed = as_json(ollama_calling(("fetch_job_log", {"job_id": 815.0})), last())  # JSON has one kind of number
    loopback.say(proposed, as_json(last("It failed.")))
    probed = await probe(tmp_path, "--model", OLLAMA, "--guard", "guards:allow", env={"OLLAMA_HOST": loopback.url})
    assert probed.came_to == (0, "target_seen")
    assert [request.path for request in loopback.requests] == [GENERATION[OLLAMA]]
    (levers,) = probed.facts("levers")
    assert (levers["token_count"], levers["thinking"]) == ("not_available", "not_available")
    assert (levers["max_output_tokens"], levers["http_timeout_s"], levers["retries"]) == (4096, 45.0, 0)
    assert probed.facts("token_count") == [{"status": "not_available", "counted": None}]
    assert [exchange["status"] for exchange in probed.facts("exchange")] == [200]
    assert (probed.stop["outcome"], probed.stop["model_calls"]) == ("paused", 1)
    assert [receipt["source_gap"] for receipt in probed.stop["receipts"]] == ["native_tool_timeout"]
    (row,) = probed.read("accounting.json")["calls"]
    assert (row["counted_before"], row["input"]) == (None, 224)


def _receipt(**changes: Any) -> Receipt:
    fields = {**TARGET, "outcome": CallOutcome.ERROR, "source_gap": SourceGap.STOPPED} | changes
    return Receipt(turn=1, index=0, call_id="c", **fields)


@pytest.mark.parametrize(
    ("outcome", "receipt", "count", "seen"),
    [
        (Outcome.PAUSED, {}, "counted", "target_seen"),
        (Outcome.PAUSED, {"source_gap": SourceGap.ABANDONED}, "not_available", "target_seen"),
        (Outcome.PAUSED, {"source_gap": None}, "counted", "target_incomplete"),
        (Outcome.PAUSED, {"tool": "list_ci_jobs"}, "counted", "target_incomplete"),
        (Outcome.PAUSED, {"args": {"job_id": 812}}, "counted", "target_incomplete"),
        (Outcome.PAUSED, {"args": {"job_id": 815, "more": 1}}, "counted", "target_incomplete"),
        (Outcome.DEADLINE, {}, "counted", "target_incomplete"),
        (Outcome.MODEL_TIMEOUT, {}, "failed", "incomplete_preflight"),
        (Outcome.INTERRUPTED, {}, "counted", "interrupted"),
        (Outcome.INTERRUPTED, {}, "failed", "interrupted"),
    ],
)
def test_the_verdict_rests_on_the_receipt_the_count_and_the_end(
    outcome: Outcome, receipt: dict[str, Any], count: str, seen: str
) -> None:
    assert verdict(an_answer(outcome=outcome, receipts=(_receipt(**receipt),)), count) == seen


def test_the_real_graph_stops_at_its_static_breakpoint_with_the_native_timeout_as_its_last_message(
    on_virtual_clock: OnVirtualClock[None],
) -> None:
    async def check() -> None:
        model = ScriptedModel(replies=[asks(call("fetch_job_log", {"job_id": 815})), says()])
        limits = Limits(tool_timeouts=ToolTimeouts(per_set={TOOL_SET: LocalCi().timeouts}))
        tools = ci_tools(LocalCi())
        graph = build_graph(model, tools, limits=limits, tool_set=TOOL_SET, interrupt_after=["tools"])
        assert isinstance(graph.nodes["tools"].bound, ToolNode)
        run, question = Run(), HumanMessage(Plan(model="m").question)
        state = await graph.ainvoke({"messages": [question]}, context=run)
        asked, proposed, told = state["messages"]
        assert (asked, type(proposed), type(told)) == (question, AIMessage, ToolMessage)
        assert (told.tool_call_id, told.status) == (proposed.tool_calls[0]["id"], "error")
        assert told.text.startswith("⚠️ TOOL_TIMEOUT (fetch_job_log): exceeded 3.0s limit.")
        assert (run.answer().outcome, run.answer().model_calls, run.answer().seconds) == (Outcome.PAUSED, 1, 3.0)

    on_virtual_clock(check())
