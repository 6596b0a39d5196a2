"""One guarded, genuine observation: a provider's model proposes the slow tool, and our own timeout answers it.

    python live_probe.py --guard package.module:function --model gemini-3.8-flash

At most one token count and one generation leave the process. The graph pauses after its tools: no follow-up is asked.
authorisation.py says what a guard is; without one nothing is built, read or sent.
"""

import signal
import sys

if __name__ == "__main__":  # before anything that takes time: Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import authorisation
from authorisation import Plan, Refused, authorise
from bounded.exit import arm_last_resorts, arm_watchdog, end_process, on_interrupt, run_to_exit
from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Answer, Run, to_all
from bounded.text import secret_values
from bounded.timeouts import ToolTimeouts
from command_line import KEEPING, Flag, UsageError, flag_values, keeping_parser
from evidence.capture import pseudo_terminal, tee
from evidence.rederive import TARGET
from graph import ask, build_graph
from models.factory import SetUpMissing, build_model, endpoint
from models.meter import NOT_AVAILABLE, Levers, Meter, count_tokens, lacking, levers_of
from recording import Recording
from terminal import USAGE_STATUS, Progress, clean_logs, complain, not_installed, set_up, show

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage

RUN = "probe"
START_UP_S = 30.0  # what loading a provider's SDK may take, on a slow disk
EPILOG = """\
exit status: 0 the target was seen; 4 it was not, or the probe stopped before its one generation; 2 bad arguments or
set-up, or not authorised; 130 interrupted. What happened is sealed in a run folder, a refusal by the guard included."""
STATUS = {
    "target_seen": 0,
    "target_incomplete": 4,
    "incomplete_preflight": 4,
    "refused": USAGE_STATUS,
    "interrupted": Outcome.INTERRUPTED.exit_status,
}

OWN = (
    Flag(
        name="--guard",
        metavar="PACKAGE.MODULE:FUNCTION",
        default=None,
        help="who may allow this probe: an async function outside this project (required)",
        read=str,
    ),
)


class CountFirst:
    """The probed model: before its one generation its provider counts the messages, where it can."""

    def __init__(self, name: str, model: "BaseChatModel", recording: Recording) -> None:
        self.name, self.model, self.recording = name, model, recording
        self.caller: Any = model  # the same, once it knows the tools
        self.count = "failed"  # until it is known better

    def bind_tools(self, tools: Sequence[Any]) -> "CountFirst":
        self.caller = self.model.bind_tools(tools)
        return self

    async def ainvoke(self, messages: "list[BaseMessage]") -> "AIMessage":
        counted = None
        try:
            counted = await count_tokens(self.name, self.model, messages)
            self.count = NOT_AVAILABLE if counted is None else "counted"
        finally:
            self.recording.folder.record("token_count", RUN, status=self.count, counted=counted)
        reply: AIMessage = await self.caller.ainvoke(messages)
        return reply


def verdict(answer: Answer, count: str) -> str:
    """What the probe came to."""
    if answer.outcome is Outcome.INTERRUPTED:
        return "interrupted"
    if answer.model_calls and count == "failed":
        return "incomplete_preflight"
    seen = any(
        (call.tool, call.args) == (TARGET["tool"], TARGET["args"]) and call.source_gap for call in answer.receipts
    )
    return "target_seen" if seen and answer.outcome is Outcome.PAUSED else "target_incomplete"


async def probe_and_exit(plan: Plan, model: "BaseChatModel", recording: Recording, secrets: frozenset[str]) -> NoReturn:
    """Ask the one question, print what it came to, seal it, and end the process."""
    interrupt = asyncio.Event()
    on_interrupt(interrupt)  # before what takes time to import: until here there is no run to end
    from ci import LocalCi
    from sources.jobs import TOOL_SET, ci_tools

    source = LocalCi()
    limits = Limits(
        token_budget=plan.token_budget,
        model_timeout_s=plan.model_timeout_s,
        tool_timeouts=ToolTimeouts(per_set={TOOL_SET: source.timeouts}),
    )
    probed: Any = CountFirst(plan.model, model, recording)  # all that the graph asks of a model
    graph = build_graph(
        probed, ci_tools(source, secrets=secrets), limits=limits, tool_set=TOOL_SET, interrupt_after=["tools"]
    )
    observer = recording.observer(RUN, plan.question, limits, deadline_s=plan.deadline_s, pause_after=["tools"])
    progress = Progress(sys.stderr)
    run = Run(model=plan.model, secrets=secrets, observe=to_all(observer, progress))

    last: Answer | None = None

    def last_words() -> None:
        progress.close()
        answer = last or run.answer()
        try:
            print(f"probe: {verdict(answer, probed.count)}")
            show(answer)
            sys.stdout.flush()
        finally:
            recording.stop(RUN, answer)
            recording.close(verdict(answer, probed.count))

    def blocked() -> int:
        nonlocal last
        recording.folder.hold()  # the loop may come free at any moment
        run.cut(Outcome.DEADLINE, "the event loop was blocked past the deadline of the run")
        last = run.answer()
        return STATUS[verdict(last, probed.count)]

    arm_watchdog(plan.deadline_s, blocked, last_words)
    answer = await ask(graph, plan.question, deadline_s=plan.deadline_s, run=run, interrupt=interrupt)
    end_process(STATUS[verdict(answer, probed.count)], last_words)


def main() -> NoReturn:
    """The command line; ends the process."""
    set_up()
    parser = keeping_parser("live_probe.py", "Observe a provider once, if a guard allows it.", EPILOG, OWN)
    try:
        typed = parser.parse_args()
        values = flag_values(KEEPING, typed, os.environ) | flag_values(OWN, typed, {})
        if not values["--guard"]:
            raise UsageError("refused: a probe needs a guard that allows it: --guard package.module:function")
        plan = Plan(model=values["--model"])
        if endpoint(plan.model, os.environ) == "in_process":
            raise UsageError(f"{plan.model} is no provider's model; without a provider there is nothing to observe")
        recording = Recording(
            values["--evidence"],
            kind="live-probe",
            model=plan.model,
            environment=os.environ,
            secrets=frozenset(),  # nothing secret has been read yet
            served_by=values["--served-by"],
            capture=pseudo_terminal if typed.frames else tee,
        )
    except UsageError as exc:
        sys.exit(complain("live_probe.py", str(exc)))
    recording.folder.record("plan", **asdict(plan), plan_sha256=plan.digest)
    arm_last_resorts(authorisation.GUARD_S + START_UP_S)  # the guard is foreign code, and may hold the interpreter
    signal.signal(signal.SIGINT, signal.default_int_handler)  # until the probe has its own: there is a folder to seal
    try:
        spend = authorise(values["--guard"], plan)
        # From here on it is allowed to know what is secret.
        recording.folder.secrets = secrets = secret_values(os.environ)
        clean_logs(secrets)
        recording.say_where_from()
        model = probed_model(plan, recording)
        spend()
        recording.folder.record("authorised")
    except Refused as exc:
        recording.say_where_from(copies="none")
        refuse(recording, str(exc))
    except SetUpMissing as exc:
        refuse(recording, str(exc))
    except ModuleNotFoundError as exc:
        refuse(recording, not_installed(exc))
    except KeyboardInterrupt:
        recording.say_where_from(copies="none")
        recording.folder.record("interrupted")
        end_process(STATUS["interrupted"], lambda: recording.close("interrupted"))
    run_to_exit(probe_and_exit(plan, model, recording, secrets), secrets)


def probed_model(plan: Plan, recording: Recording) -> "BaseChatModel":
    """The provider's client as the plan has it, behind a meter that lets out what the plan allows.

    Raises:
        SetUpMissing: it cannot be built.
    """
    counts = 0 if "token_count" in lacking(plan.model) else plan.token_counts
    levers = Levers(
        meter=Meter(lambda facts: recording.folder.record("exchange", **facts), allowed=counts + plan.generations),
        max_output_tokens=plan.max_output_tokens,
        thinking=plan.thinking,
        http_timeout_s=plan.http_timeout_s,
        retries=plan.retries,
    )
    recording.folder.record("levers", **levers_of(plan.model, levers))
    return build_model(plan.model, model_timeout_s=plan.model_timeout_s, environment=os.environ, levers=levers)


def refuse(recording: Recording, reason: str) -> NoReturn:
    """End the process without having asked anything, and keep why."""
    recording.folder.record("refused", reason=reason)

    def last_words() -> None:
        complain("live_probe.py", f"refused: {reason}")
        recording.close("refused")

    end_process(STATUS["refused"], last_words)


if __name__ == "__main__":
    main()
