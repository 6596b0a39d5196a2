"""Measures what bounding costs, as ratios measured side by side, and what the bounds really hold.

python -m bench.overhead
"""

import asyncio
import contextlib
import io
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from bounded.calls import GRACE_S
from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome
from bounded.timeouts import ToolTimeouts
from ci import LocalCi
from graph import SYSTEM, State, ask, build_graph
from models.offline import OfflineTriage
from models.scripted import ScriptedModel
from sources.jobs import ci_tools

QUESTION = "Why is CI failing on pull request 415?"
TURNS = 10
PAIRS = 120
WARM_UP = 5
FAULT_BOUND_S = 0.2
FAULT_REPEATS = 7
AT_ONCE = 200
STARTS = 15
REPEATS = (50, 100, 200)
JOBS = 50
MAXRSS_A_MB = 1024**2 if sys.platform == "darwin" else 1024  # a peak is in bytes there
SDKS = {"langchain_google_genai", "google.genai", "langchain_ollama", "ollama", "langchain_openai", "openai"}
USAGE = {"input_tokens": 900, "output_tokens": 20, "total_tokens": 920}


@dataclass(frozen=True)
class InstantCi(LocalCi):
    """The stub without its delays, with one log for every job."""

    text: str

    async def log(self, job_id: int) -> BinaryIO:
        return io.BytesIO(self.text.encode())


def row(measure: str, figure: str) -> None:
    print(f"{measure:<64} {figure}", flush=True)


def script(tool: str, args: Mapping[str, object], turns: int, delay_s: float = 0) -> list[dict[str, Any]]:
    every: dict[str, Any] = {"usage_metadata": USAGE, "delay_s": delay_s}
    calls = [{**every, "tool_calls": [{"name": tool, "args": args, "id": f"call-{n}"}]} for n in range(turns)]
    return [*calls, {**every, "content": "One test failed."}]


async def async_condition(state: State) -> str:
    return "tools" if state["messages"][-1].tool_calls else END


def plain_graph(model: BaseChatModel, tools: list[BaseTool], state: type[Any], after_agent: Callable[..., Any]) -> Any:
    caller = model.bind_tools(tools)

    async def agent(state: Any) -> dict[str, Any]:
        return {"messages": [await caller.ainvoke(state["messages"])]}

    graph = StateGraph(state)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", after_agent, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile().with_config(recursion_limit=2 * TURNS + 4)


def compare(pairs: list[tuple[float, float]]) -> str:
    ours, theirs = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
    return f"{statistics.median(a / b for a, b in pairs):.2f}  ({ours:.1f} / {theirs:.1f} ms)"


async def timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def measure_ratio(against: str, log: str, state: type[Any], after_agent: Callable[..., Any]) -> None:
    tools = ci_tools(InstantCi(log))
    replies = script("fetch_job_log", {"job_id": 812}, TURNS) * 2 * (PAIRS + WARM_UP)
    model = ScriptedModel(replies=replies)  # the one model of both, in turn
    bounded, plain = build_graph(model, tools), plain_graph(model, tools, state, after_agent)

    async def ask_bounded() -> None:
        answer = await ask(bounded, QUESTION)
        if [call.outcome for call in answer.receipts] != [CallOutcome.EXECUTED] * TURNS:
            raise RuntimeError(f"this is not what was to be measured: {answer}")

    async def ask_plain() -> None:
        await plain.ainvoke({"messages": [SystemMessage(SYSTEM), HumanMessage(QUESTION)]})

    both = [(await timed(ask_bounded()), await timed(ask_plain())) for _ in range(PAIRS + WARM_UP)][WARM_UP:]
    row(f"{against}, logs of {len(log):,} characters", f"ratio: {compare(both)}")


async def measure_faults() -> None:
    async def sleeper() -> None:
        await asyncio.sleep(30)

    async def stubborn() -> str:
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.5)
        return "late"

    def sync_sleeper() -> None:
        time.sleep(1)

    faults: dict[str, dict[str, Any]] = {
        "async tool asleep": {"coroutine": sleeper},
        "async tool that swallows cancellation": {"coroutine": stubborn},
        "sync tool asleep in a thread": {"func": sync_sleeper},
        "model that never answers": {"coroutine": sleeper, "delay_s": 1e6},
    }
    limits = Limits(model_timeout_s=FAULT_BOUND_S, tool_timeouts=ToolTimeouts(default_s=FAULT_BOUND_S))
    for fault, body in faults.items():
        replies, over = script("body", {}, 1, body.pop("delay_s", 0.0)), []
        tools = [StructuredTool.from_function(name="body", description="Misbehave.", **body)]
        for _ in range(FAULT_REPEATS):
            graph = build_graph(ScriptedModel(replies=replies), tools, limits=limits)
            over.append((await timed(ask(graph, QUESTION)) - FAULT_BOUND_S) * 1000)
        beyond = f"{statistics.median(over):+.0f} ms, worst {max(over):+.0f} ms"
        row(f"  {fault}", f"{beyond}; beyond bound + grace, worst {max(over) - GRACE_S * 1000:+.0f} ms")


async def measure_crowd() -> None:
    graph = build_graph(OfflineTriage(), ci_tools(LocalCi()))
    for _ in range(WARM_UP):
        await ask(graph, QUESTION)
    before_mb, started = peak_mb(), time.perf_counter()
    answers = await asyncio.gather(*(ask(graph, QUESTION) for _ in range(AT_ONCE)))
    a_second = AT_ONCE / (time.perf_counter() - started)
    answered = [answer.outcome for answer in answers].count(Outcome.ANSWERED)
    row(f"{AT_ONCE} questions at once, offline", f"{answered} answered, {a_second:.0f} a second")
    row("  peak memory growth", f"{peak_mb() - before_mb:.0f} MB")
    row("  tasks and threads left", f"{len(asyncio.all_tasks()) - 1} and {threading.active_count() - 1}")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MAXRSS_A_MB


async def start(*arguments: str) -> str:
    """Run a child to its end; what it wrote to stderr."""
    environment = {**os.environ, "REVIEW_MODEL": "offline"}
    child = [sys.executable, *arguments]
    return subprocess.run(child, env=environment, capture_output=True, text=True, check=True).stderr  # noqa: ASYNC221


async def imports_of(*arguments: str) -> set[str]:
    # Written as it goes: it is whole in a process that ends by os._exit as well.
    trace = (await start("-X", "importtime", *arguments)).splitlines()
    return {line.rpartition("|")[2].strip() for line in trace if line.startswith("import time:")}


async def measure_start() -> None:
    help_, bare = ("graph.py", "--help"), ("-c", "import argparse")
    both = [(await timed(start(*help_)), await timed(start(*bare))) for _ in range(STARTS)]
    row("graph.py --help / python -c 'import argparse'", compare(both))
    heavy = await imports_of(*help_) & {"langgraph", "langchain_core", *SDKS}
    row("  of langgraph, langchain_core, the SDKs it imports", ", ".join(sorted(heavy)) or "none")
    sdks = await imports_of("graph.py", "--quiet", QUESTION) & SDKS
    row("  of the provider SDKs an offline answer imports", ", ".join(sorted(sdks)) or "none")


def measure_batches() -> None:
    print(f"record.py --jobs {JOBS} with the five scenarios, offline")
    first = 0.0
    for repeat in REPEATS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = [
                "--repeat",
                f"{repeat}",
                "--jobs",
                f"{JOBS}",
                "--out",
                f"{folder}/runs.json",
                "--evidence",
                folder,
            ]
            started = time.perf_counter()
            child = subprocess.Popen(
                [sys.executable, "record.py", *arguments],
                env={**os.environ, "REVIEW_MODEL": "offline"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            _pid, status, used = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - started
        if status != 0:
            raise RuntimeError(f"record.py ended with {status}")
        first = first or seconds / repeat
        peak, ratio = used.ru_maxrss / MAXRSS_A_MB, seconds / repeat / first
        row(f"  --repeat {repeat}", f"{peak:.0f} MB peak, {seconds:.1f} s, ratio: {ratio:.2f} a repeat")


def main() -> None:
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}")
    asyncio.run(measure_crowd())  # first: a peak never falls again
    log = asyncio.run(LocalCi().log(812)).read().decode()
    print(f"bounded / plain StateGraph + ToolNode, {TURNS} turns of agent and tool, {PAIRS} pairs in turn")
    asyncio.run(measure_ratio("  plain as documented", log, MessagesState, tools_condition))
    asyncio.run(measure_ratio("  plain, our state and async edges", log, State, async_condition))
    asyncio.run(measure_ratio("  plain, our state and async edges", (log * 8)[:12_000], State, async_condition))
    print(f"a whole question beyond its bound of {FAULT_BOUND_S:g} s, {FAULT_REPEATS} times each")
    asyncio.run(measure_faults())
    asyncio.run(measure_start())
    measure_batches()


if __name__ == "__main__":
    main()
