"""Run the comparison scenarios with one model, save what they came to in runs.json, and seal the evidence of the batch.

REVIEW_MODEL=offline python record.py
python record.py --scenarios mine.toml --repeat 10 --jobs 2 --out mine.json --compare runs.json
"""

import signal
import sys

if __name__ == "__main__":  # before anything that takes time: Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import json
import os
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bounded.exit import arm_watchdog, end_process, on_interrupt, run_to_exit
from bounded.outcomes import Outcome
from bounded.run import Event, Run, to_all
from bounded.text import fit, said_by, secret_values
from bounded.usage import judge
from ci import LocalCi
from command_line import FLAGS, Flag, UsageError, count, flag_parser, flag_values, folder
from evidence.capture import pseudo_terminal, tee
from evidence.folder import recordable, write_whole
from evidence.timeline import timeline
from evidence.verify import document
from graph import ask, build_graph
from models.factory import SetUpMissing, build_model
from models.offline import OfflineTriage
from recording import Recording
from scenarios import SCENARIOS, Scenario, ScenarioError, read_scenarios
from sources.jobs import TOOL_SET, ci_tools
from summary import changes, table
from terminal import Progress, answer_dict, clean_logs, complain, set_up

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

SCHEMA_VERSION = 1
MAX_WHY = 600
EPILOG = """\
exit status: 0 every scenario was run, however it ended; 1 one of them could not be, or an output not be written; 2 bad
arguments or missing set-up; 130 interrupted: the evidence is sealed as that, and the file of --out left as it was."""

SHARED = tuple(flag for flag in FLAGS if flag.name in ("--model", "--served-by"))
OWN = (
    Flag(
        name="--scenarios",
        metavar="FILE",
        default=None,
        help="scenarios of your own; scenarios.py says how the TOML file looks (default: the five of record.py)",
        read=folder,
    ),
    Flag(name="--repeat", metavar="N", default="1", help="run each scenario so often", read=count),
    Flag(name="--jobs", metavar="N", default="1", help="at most so many runs at once", read=count),
    Flag(name="--out", metavar="FILE", default="runs.json", help="what the runs came to; overwritten", read=folder),
    Flag(
        name="--compare",
        metavar="OLD.json",
        default=None,
        help="print what has changed since that file was written, scenario by scenario",
        read=folder,
    ),
    Flag(name="--evidence", metavar="PARENT", default="runs", help="where the run folder is made", read=folder),
)


class NotRun(Exception):
    """A scenario that could not be run as it is meant; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for.

    Attributes:
        models: scenario name -> its model; `model` is the name of all of them.
        repeat, jobs: how often each scenario runs, and how many runs at once.
        out: where it is saved, and `old` what was saved at another time, to be compared with.
    """

    scenarios: Sequence[Scenario]
    models: "Mapping[str, BaseChatModel]"
    model: str
    repeat: int
    jobs: int
    out: Path
    old: Mapping[str, Any] | None

    def run_name(self, scenario: Scenario, number: int) -> str:
        return scenario.name if self.repeat == 1 else f"{scenario.name}/{number + 1}"


class Batch:
    """The runs of one batch: which are to come, and what the others came to.

    Attributes:
        waiting: scenario and number of the runs that have not begun, in order.
        first_replies: scenario name -> what its first reply used, None where that is unknown.
        going: the names of the runs that have begun and not ended.
        rows: run name -> what it came to, as runs.json holds it.
    """

    def __init__(self, *, plan: Plan, recording: Recording, secrets: frozenset[str], progress: Progress) -> None:
        self.plan, self.recording, self.secrets, self.progress = plan, recording, secrets, progress
        self.interrupt = asyncio.Event()
        self.tools = ci_tools(LocalCi(), secrets=secrets)
        self.waiting = deque((scenario, number) for number in range(plan.repeat) for scenario in plan.scenarios)
        loop = asyncio.get_running_loop()
        self.first_replies: dict[str, asyncio.Future[int | None]] = {
            scenario.name: loop.create_future() for scenario in plan.scenarios
        }
        self.going: set[str] = set()
        self.rows: dict[str, dict[str, Any]] = {}

    @property
    def outcome(self) -> str:
        """How the batch as a whole ended."""
        if self.interrupt.is_set():
            return "interrupted"
        ran = [row for row in self.rows.values() if "failed" not in row]
        return "complete" if len(ran) == len(self.plan.scenarios) * self.plan.repeat else "incomplete"

    @property
    def exit_status(self) -> int:
        return {"complete": 0, "incomplete": 1, "interrupted": Outcome.INTERRUPTED.exit_status}[self.outcome]

    async def work(self) -> None:
        """Run what is waiting, one after the other, until nothing is left or a person interrupts."""
        while self.waiting and not self.interrupt.is_set():
            scenario, number = self.waiting.popleft()
            name = self.plan.run_name(scenario, number)
            self.going.add(name)
            self.progress.begin(name, name)
            [failure] = await asyncio.gather(self.run(scenario, name), return_exceptions=True)
            if isinstance(failure, BaseException):  # it loses its own row only
                why = str(failure) if isinstance(failure, NotRun) else f"{type(failure).__name__}: {said_by(failure)}"
                self.fail(name, why)
            self.going.discard(name)
            self.note_first_reply(scenario.name, None)
            self.progress.end(name, f"{name}: {in_short(self.rows[name])}")

    def fail(self, name: str, why: str) -> None:
        self.rows[name] = {"failed": fit(why, MAX_WHY, self.secrets)}
        self.recording.folder.record("run_failed", name, reason=why)

    async def run(self, scenario: Scenario, name: str) -> None:
        """Run one scenario once.

        Raises:
            NotRun: its budget cannot be derived.
        """
        facts, token_budget = {}, scenario.token_budget
        if (other := scenario.budget_after_first_reply_of) is not None:
            first = await self.first_replies[other]
            if first is None:
                raise NotRun(f"its budget is derived from the first reply of {other}, which reported no usage")
            token_budget = first + 1
            facts["derived"] = f"token_budget: the first reply of {other} used {first} tokens, and one more"
        if scenario.hold_back_s is not None and self.plan.model == "offline":
            facts["injected"] = f"the offline model holds each reply back by {scenario.hold_back_s:g} s"
        limits = scenario.limits(token_budget, {TOOL_SET: LocalCi().timeouts})
        record = self.recording.run(name, scenario.question, limits, deadline_s=scenario.deadline_s, **facts)

        def watch(event: Event) -> None:
            if event.kind == "model_call_ended":
                self.note_first_reply(scenario.name, judge(event.facts["usage"]).total)

        run = Run(model=self.recording.model, secrets=self.secrets, observe=to_all(record, watch))
        model = self.plan.models[scenario.name].model_copy()  # a script begins anew with each run
        graph = build_graph(model, self.tools, limits=limits, tool_set=TOOL_SET)
        answer = await ask(graph, scenario.question, deadline_s=scenario.deadline_s, run=run, interrupt=self.interrupt)
        self.recording.stop(name, answer)
        self.rows[name] = {"token_budget": token_budget, **facts, **answer_dict(answer)}

    def note_first_reply(self, name: str, total: int | None) -> None:
        if not self.first_replies[name].done():
            self.first_replies[name].set_result(total)


def in_short(row: Mapping[str, Any]) -> str:
    """What a run came to, on one line."""
    if "failed" in row:
        return f"not run: {row['failed']}"
    known = "" if row["usage_known"] else " known"
    return f"{row['outcome']}, {row['known_subtotal']}{known} tokens, {row['seconds']:.1f} s"


def saved(batch: Batch) -> dict[str, Any]:
    """What runs.json holds."""
    plan, scenarios = batch.plan, []
    for scenario in plan.scenarios:
        names = [plan.run_name(scenario, number) for number in range(plan.repeat)]
        limits = {
            "model_timeout_s": scenario.model_timeout_s,
            "deadline_s": scenario.deadline_s,
            "max_steps": scenario.max_steps,
            "tool_timeouts_s": {**LocalCi().timeouts, **scenario.tool_timeouts_s},
        }
        runs = [batch.rows[name] for name in names if name in batch.rows]
        scenarios.append({"name": scenario.name, "question": scenario.question, "limits": limits, "runs": runs})
    about = {"model": batch.recording.model, "evidence": batch.recording.folder.path.name}
    record = {"schema_version": SCHEMA_VERSION, **about, "scenarios": scenarios}
    return recordable(record, batch.secrets)  # type: ignore[no-any-return]


def read_saved(path: Path) -> dict[str, Any]:
    """An earlier runs.json.

    Raises:
        UsageError: it is none.
    """
    try:
        old = recordable(json.loads(path.read_text(encoding="utf-8")))  # a terminal will show it
        changes(old, old)
    except OSError as exc:
        raise UsageError(f"--compare {path}: {exc.strerror}") from exc
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as exc:
        raise UsageError(f"--compare {path} is not a file that record.py has saved") from exc
    return old  # type: ignore[no-any-return]


def finish(batch: Batch) -> None:
    """Print the table, save what the runs came to, and seal the evidence.

    Raises:
        OSError: one of these could not be written.
    """
    plan, folder, record = batch.plan, batch.recording.folder, saved(batch)
    if batch.outcome == "interrupted":
        folder.record("interrupted")
    try:
        print(table(record))
        if plan.old is not None:
            print(f"\n{changes(plan.old, record)}")
        sys.stdout.flush()
    finally:  # a reader that left early takes nothing from what was run
        try:
            folder.write("runs.json", document(record))
            folder.write("timeline.html", timeline(folder.events()).encode())
            if batch.outcome == "interrupted":
                sys.stderr.write(f"interrupted: {plan.out} is left as it was\n")
            else:
                write_whole(plan.out, document(record))
        finally:
            batch.recording.close(batch.outcome)


async def record_and_exit(plan: Plan, recording: Recording, secrets: frozenset[str]) -> NoReturn:
    """Run the batch and end the process, whatever is stuck in it."""
    progress = Progress(sys.stderr, total=len(plan.scenarios) * plan.repeat)
    batch = Batch(plan=plan, recording=recording, secrets=secrets, progress=progress)
    on_interrupt(batch.interrupt)

    def last_words() -> None:
        progress.close()
        finish(batch)

    def blocked() -> int:
        for name in list(batch.going):
            batch.fail(name, "the event loop was blocked past the deadlines of all runs")
        return batch.exit_status

    # No run takes longer than its deadline, but for the moment in which it ends.
    longest = max(scenario.deadline_s for scenario in plan.scenarios) + 1
    arm_watchdog(longest * len(batch.waiting), blocked, last_words)
    await asyncio.gather(*(batch.work() for _ in range(min(plan.jobs, len(batch.waiting)))))
    end_process(batch.exit_status, last_words)


def check_tools(scenarios: Sequence[Scenario]) -> None:
    """Raise a `ScenarioError` for a timeout of a tool that there is not: it would change nothing."""
    tools = [tool.name for tool in ci_tools(LocalCi())]
    for scenario in scenarios:
        if unknown := sorted(scenario.tool_timeouts_s.keys() - set(tools)):
            fault = f"tool_timeouts_s names no tool {unknown[0]!a}; the tools are: {', '.join(tools)}"
            raise ScenarioError(f"scenario {scenario.name}: {fault}")


def prepare(
    arguments: Sequence[str], environment: Mapping[str, str], secrets: frozenset[str]
) -> "Coroutine[Any, Any, NoReturn]":
    """Read the command line, build each scenario's model, and make the run folder: nothing has been asked yet.

    Raises:
        UsageError, SetUpMissing, ScenarioError: what was typed or set up cannot be taken.
    """
    parser = flag_parser("record.py", "Run the comparison scenarios and keep their evidence.", EPILOG, (*SHARED, *OWN))
    parser.add_argument(
        "--frames", action="store_true", help="keep pictures of the final screen as well, at three widths"
    )
    typed = parser.parse_args(arguments)
    values = flag_values(SHARED, typed, environment) | flag_values(OWN, typed, {})
    scenarios = read_scenarios(Path(values["--scenarios"])) if values["--scenarios"] else SCENARIOS
    old = read_saved(Path(values["--compare"])) if values["--compare"] else None
    out = Path(values["--out"])
    if (out.exists() and not out.is_file()) or not out.resolve().parent.is_dir():
        raise UsageError(f"--out {out}: takes a file in a folder that there is")
    check_tools(scenarios)
    model = values["--model"]
    models = {
        scenario.name: build_model(model, model_timeout_s=scenario.model_timeout_s, environment=environment)
        for scenario in scenarios
    }
    for scenario in scenarios:
        if isinstance(offline := models[scenario.name], OfflineTriage):
            offline.hold_back_s = scenario.hold_back_s or 0.0
    plan = Plan(
        scenarios=scenarios,
        models=models,
        model=model,
        repeat=values["--repeat"],
        jobs=values["--jobs"],
        out=out,
        old=old,
    )
    recording = Recording(
        values["--evidence"],
        "batch",
        model,
        environment,
        secrets,
        served_by=values["--served-by"],
        capture=pseudo_terminal if typed.frames else tee,
        planned=len(scenarios) * plan.repeat,
    )
    return record_and_exit(plan, recording, secrets)


def main() -> NoReturn:
    """The command line; ends the process."""
    set_up()
    secrets = secret_values(os.environ)
    clean_logs(secrets)
    try:
        work = prepare(sys.argv[1:], os.environ, secrets)
    except (UsageError, SetUpMissing, ScenarioError) as exc:
        sys.exit(complain("record.py", str(exc)))
    run_to_exit(work, secrets)


if __name__ == "__main__":
    main()
