"""Run the comparison scenarios with one model, save what they came to in runs.json, and seal the evidence of the batch.

REVIEW_MODEL=offline python record.py
python record.py --scenarios mine.toml --repeat 10 --jobs 2 --out mine.json --compare runs.json
"""

import signal
import sys

if __name__ == "__main__":  # before anything that takes time: Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bounded.exit import arm_watchdog, end_process, keep_interrupt, on_interrupt, run_to_exit
from bounded.outcomes import Outcome
from bounded.run import Event, Run, to_all
from bounded.text import fit, said_by, secret_values
from bounded.usage import judge
from command_line import KEEPING, Flag, UsageError, count, flag_values, keeping_parser, path
from evidence.capture import pseudo_terminal, tee
from evidence.folder import recordable, write_whole
from evidence.timeline import timeline
from evidence.verify import document
from graph import ask, build_graph
from models.factory import SetUpMissing, build_model
from recording import Recording
from scenarios import SCENARIOS, Scenario, ScenarioError, read_scenarios
from summary import changes, in_short, read_saved, summary
from terminal import Progress, answer_dict, clean_logs, complain, not_installed, set_up

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.tools import BaseTool

SCHEMA_VERSION = 1
MAX_WHY = 600
BUSY_S = 0.1  # for each run, where very many at once are busy for longer than each of them may be
EPILOG = """\
exit status: 0 every scenario was run, however it ended; 1 one of them could not be, or an output not be written; 2 bad
arguments or missing set-up; 130 interrupted: the evidence is sealed as that, and the file of --out left as it was."""

OWN = (
    Flag(
        name="--scenarios",
        metavar="FILE",
        default=None,
        help="scenarios of your own; scenarios.py says how the TOML file looks (default: the five of record.py)",
        read=path,
    ),
    Flag(name="--repeat", metavar="N", default="1", help="how many times each scenario runs", read=count),
    Flag(name="--jobs", metavar="N", default="1", help="how many runs at once, at most", read=count),
    Flag(name="--out", metavar="FILE", default="runs.json", help="what the runs came to; overwritten", read=path),
    Flag(
        name="--compare",
        metavar="OLD.json",
        default=None,
        help="print what has changed since that file was written, scenario by scenario",
        read=path,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What was asked for.

    Attributes:
        models: scenario name -> its model; `model` is the name of all of them.
        tool_set, tools, timeouts: what each run may call, and the seconds that its set brings, by tool.
        repeat, jobs: how often each scenario runs, and how many runs at once.
        out: where it is saved, and `old` what was saved at another time, to be compared with.
    """

    scenarios: Sequence[Scenario]
    models: "Mapping[str, BaseChatModel]"
    model: str
    tool_set: str
    tools: "Sequence[BaseTool]"
    timeouts: Mapping[str, float | None]
    repeat: int
    jobs: int
    out: Path
    old: Mapping[str, Any] | None

    @property
    def planned(self) -> int:
        """How many runs there are to be."""
        return len(self.scenarios) * self.repeat

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

    def __init__(self, *, plan: BatchPlan, recording: Recording, secrets: frozenset[str], progress: Progress) -> None:
        self.plan, self.recording, self.secrets, self.progress = plan, recording, secrets, progress
        self.interrupt = asyncio.Event()
        self.waiting = ((scenario, number) for number in range(plan.repeat) for scenario in plan.scenarios)
        self.first_replies: dict[str, asyncio.Future[int | None]] = {s.name: asyncio.Future() for s in plan.scenarios}
        self.going: set[str] = set()
        self.rows: dict[str, dict[str, Any]] = {}
        self.final: tuple[str, dict[str, Any]] | None = None

    @property
    def outcome(self) -> str:
        """How the batch as a whole ended."""
        if self.interrupt.is_set():
            return "interrupted"
        ran = [row for row in self.rows.values() if "failed" not in row]
        return "complete" if len(ran) == self.plan.planned else "incomplete"

    @property
    def exit_status(self) -> int:
        return {"complete": 0, "incomplete": 1, "interrupted": Outcome.INTERRUPTED.exit_status}[self.outcome]

    async def work(self) -> None:
        """Run what is waiting, one after the other, until nothing is left or a person interrupts."""
        for scenario, number in self.waiting:
            if self.interrupt.is_set():
                return
            name = self.plan.run_name(scenario, number)
            self.going.add(name)
            self.progress.begin(name, name)
            # Gathered and not caught: only the ladder catches everything.
            [failure] = await asyncio.gather(self.run(scenario, name), return_exceptions=True)
            if isinstance(failure, BaseException):  # it loses its own row only
                why = (
                    str(failure)
                    if isinstance(failure, ScenarioError)
                    else f"{type(failure).__name__}: {said_by(failure)}"
                )
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
            ScenarioError: its budget cannot be derived.
        """
        facts, token_budget = {}, scenario.token_budget
        if (other := scenario.budget_after_first_reply_of) is not None:
            first = await self.first_replies[other]
            if first is None:
                raise ScenarioError(f"its budget is derived from the first reply of {other}, whose usage is not known")
            token_budget = first + 1
            facts["derived"] = f"token_budget: the first reply of {other} used {first} tokens, and one more"
        if scenario.hold_back_s is not None and self.plan.model == "offline":
            facts["injected"] = f"the offline model holds each reply back by {scenario.hold_back_s:g} s"
        limits = scenario.limits(token_budget, {self.plan.tool_set: self.plan.timeouts})
        observer = self.recording.observer(name, scenario.question, limits, deadline_s=scenario.deadline_s, **facts)

        def watch(event: Event) -> None:
            if event.kind == "model_call_ended":
                self.note_first_reply(scenario.name, judge(event.facts["usage"]).total)

        run = Run(model=self.recording.model, secrets=self.secrets, observe=to_all(observer, watch))
        model = self.plan.models[scenario.name].model_copy()  # a script begins anew with each run
        graph = build_graph(model, self.plan.tools, limits=limits, tool_set=self.plan.tool_set)
        answer = await ask(graph, scenario.question, deadline_s=scenario.deadline_s, run=run, interrupt=self.interrupt)
        self.recording.stop(name, answer)
        self.rows[name] = {"token_budget": token_budget, **facts, **answer_dict(answer)}

    def note_first_reply(self, name: str, total: int | None) -> None:
        if not self.first_replies[name].done():
            self.first_replies[name].set_result(total)


def saved(batch: Batch) -> dict[str, Any]:
    """What runs.json holds."""
    plan, scenarios = batch.plan, []
    for scenario in plan.scenarios:
        names = [plan.run_name(scenario, number) for number in range(plan.repeat)]
        limits = {
            "model_timeout_s": scenario.model_timeout_s,
            "deadline_s": scenario.deadline_s,
            "max_steps": scenario.max_steps,
            "tool_timeouts_s": {**plan.timeouts, **scenario.tool_timeouts_s},
        }
        runs = [batch.rows[name] for name in names if name in batch.rows]
        scenarios.append({"name": scenario.name, "question": scenario.question, "limits": limits, "runs": runs})
    about = {"model": batch.recording.model, "evidence": batch.recording.folder.path.name}
    safe: dict[str, Any] = recordable(
        {"schema_version": SCHEMA_VERSION, **about, "scenarios": scenarios}, batch.secrets
    )
    return safe


def finish(batch: Batch) -> None:
    """Print the table, save what the runs came to, and seal the evidence.

    Raises:
        OSError: one of these could not be written.
    """
    plan, folder = batch.plan, batch.recording.folder
    outcome, record = batch.final or (batch.outcome, saved(batch))
    if outcome == "interrupted":
        folder.record("interrupted")
    try:  # first: who reads what is printed may be stuck
        folder.write("runs.json", document(record))
        folder.write("timeline.html", timeline(folder.events()).encode())
        if outcome != "interrupted":
            write_whole(plan.out, document(record))
        sys.stderr.write(
            f"interrupted: {plan.out} is left as it was\n" if outcome == "interrupted" else f"saved: {plan.out}\n"
        )
    finally:
        try:
            print(summary(record))
            if plan.old is not None:
                print(f"\n{changes(plan.old, record)}")
            sys.stdout.flush()
        finally:
            batch.recording.close(outcome)


async def record_and_exit(plan: BatchPlan, recording: Recording, secrets: frozenset[str]) -> NoReturn:
    """Run the batch and end the process, whatever is stuck in it."""
    progress = Progress(sys.stderr, total=plan.planned)
    batch = Batch(plan=plan, recording=recording, secrets=secrets, progress=progress)
    on_interrupt(batch.interrupt)

    def last_words() -> None:
        progress.close()
        finish(batch)

    def blocked() -> int:
        recording.folder.hold()  # the loop may come free at any moment
        for name in list(batch.going):
            batch.fail(name, "the event loop was blocked past the deadlines of all runs")
        batch.final = batch.outcome, saved(batch)
        return batch.exit_status

    # No run takes longer than its deadline, but for the moment in which it ends, and a derived one waits for another.
    longest = max(scenario.deadline_s for scenario in plan.scenarios) + 1
    arm_watchdog(2 * longest * math.ceil(plan.planned / plan.jobs) + BUSY_S * plan.planned, blocked, last_words)
    await asyncio.gather(*(batch.work() for _ in range(min(plan.jobs, plan.planned))))
    end_process(batch.exit_status, last_words)


def check_tools(scenarios: Sequence[Scenario], tools: Sequence[str]) -> None:
    """Raise a `ScenarioError` for a timeout of a tool that there is not: it would change nothing."""
    for scenario in scenarios:
        if unknown := sorted(scenario.tool_timeouts_s.keys() - set(tools)):
            fault = f"tool_timeouts_s names no tool {unknown[0]!a}; the tools are: {', '.join(tools)}"
            raise ScenarioError(f"scenario {scenario.name}: {fault}")


def plan_of(values: Mapping[str, Any], environment: Mapping[str, str], secrets: frozenset[str]) -> BatchPlan:
    """What the command line asks for, checked, with each scenario's model built: nothing has been asked yet.

    Raises:
        UsageError, SetUpMissing, ScenarioError: what was typed or set up cannot be taken.
    """
    scenarios = read_scenarios(Path(values["--scenarios"])) if values["--scenarios"] else SCENARIOS
    try:
        old = read_saved(Path(values["--compare"])) if values["--compare"] else None
    except (OSError, ValueError) as exc:
        raise UsageError(f"--compare {values['--compare']}: {getattr(exc, 'strerror', None) or exc}") from exc
    out, model = Path(values["--out"]), values["--model"]
    folder = os.path.dirname(os.path.realpath(out))
    if os.path.exists(out) and not os.path.isfile(out):  # unlike a Path, these do not raise where it cannot be seen
        raise UsageError(f"--out {out}: is there and is no plain file")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: its folder cannot be written to")
    from ci import LocalCi
    from sources.jobs import TOOL_SET, ci_tools

    source = LocalCi()
    tools = ci_tools(source, secrets=secrets)
    check_tools(scenarios, [tool.name for tool in tools])
    models = {}
    for each in scenarios:
        built = build_model(model, model_timeout_s=each.model_timeout_s, environment=environment)
        held_back = {"hold_back_s": each.hold_back_s} if model == "offline" and each.hold_back_s is not None else {}
        models[each.name] = built.model_copy(update=held_back)
    return BatchPlan(
        scenarios=scenarios,
        models=models,
        model=model,
        tool_set=TOOL_SET,
        tools=tools,
        timeouts=source.timeouts,
        repeat=values["--repeat"],
        jobs=values["--jobs"],
        out=out,
        old=old,
    )


def prepare(
    arguments: Sequence[str], environment: Mapping[str, str], secrets: frozenset[str]
) -> "Coroutine[Any, Any, NoReturn]":
    """Read the command line, and make the run folder last: until then nothing is touched."""
    parser = keeping_parser("record.py", "Run the comparison scenarios and keep their evidence.", EPILOG, OWN)
    typed = parser.parse_args(arguments)
    values = flag_values(KEEPING, typed, environment) | flag_values(OWN, typed, {})
    plan = plan_of(values, environment, secrets)
    keep_interrupt()
    recording = Recording(
        values["--evidence"],
        kind="batch",
        model=plan.model,
        environment=environment,
        secrets=secrets,
        served_by=values["--served-by"],
        capture=pseudo_terminal if typed.frames else tee,
        planned=plan.planned,
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
    except ModuleNotFoundError as exc:
        sys.exit(complain("record.py", not_installed(exc)))
    run_to_exit(work, secrets)


if __name__ == "__main__":
    main()
