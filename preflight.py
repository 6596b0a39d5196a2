"""Find out, within a bound and before anything is spent, which candidate models of a pool can serve.

    python preflight.py
    python preflight.py --pool models.toml --json --evidence runs

Layer 1 probes each candidate with the least that can work (models/readiness.py); layer 2 sends one request through the
very route that `REVIEW_MODEL=pool python graph.py "..."` takes.
"""

import signal
import sys

if __name__ == "__main__":  # before anything that takes time: Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from bounded.calls import Cut, until_cut
from bounded.deadlines import deadline_scope, now
from bounded.exit import arm_watchdog, end_process, on_interrupt, run_to_exit
from bounded.outcomes import Outcome
from bounded.run import Run, to_all
from bounded.text import secret_values
from command_line import FLAGS, UsageError, flag_parser, flag_values
from graph import SYSTEM
from models.attempts import PROVIDER_ERROR, Attempt
from models.factory import SetUpMissing
from models.pool import SERVES_NONE, Pool, Routed, read_pool
from models.readiness import INVALID, LAYER_S, NoneReady, Report, Row
from recording import Recording, recorded
from terminal import Progress, clean_logs, complain, not_installed, set_up

ATTEMPT_S = 120.0  # what a large model may take to load and to answer with tools bound
MAX_ATTEMPTS = 3
ATTEMPTS = "REVIEW_PREFLIGHT_GATEWAY_MAX_ATTEMPTS"
STATUS = {"ready": 0, "not_ready": 4, "interrupted": Outcome.INTERRUPTED.exit_status}
_HINTS: Mapping[int | str | None, str] = {
    "ConnectError": ": nothing answers at its address; for Ollama, run: ollama serve",
    "SetUpMissing": ": its key, its address or a package is missing, stderr says which",
    401: ": look at the key that its api_key_env names",
    403: ": look at the key that its api_key_env names",
    404: ": no such model, or base_url does not end where it should (openai: /v1)",
}
EPILOG = f"""\
exit status: 0 the pool can serve; 4 it cannot; 1 a bug, or output that could not be written; 2 bad arguments or
missing set-up; 130 interrupted. {ATTEMPTS} (1 to 9999, default {MAX_ATTEMPTS}) is how
often the end-to-end request is made at most, REVIEW_PREFLIGHT_MAX_ESCALATIONS (0 to 12, default 4) how many candidates
may be asked a second time with a larger budget."""
SHARED = tuple(flag for flag in FLAGS if flag.name in ("--pool", "--evidence", "--served-by"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """What the request through the pool's own route came to. A field that does not apply is None.

    Attributes:
        status: ready, invalid_chat_response, gateway_transport_exhausted, gateway_rejected, gateway_retry_rejected, or
            skipped, of which `why` is the reason.
        attempts: through the whole route, each of which may have asked several candidates.
        candidate: whom the last attempt asked last.
    """

    status: str
    attempts: int = 0
    candidate: str | None = None
    trigger: str | None = None
    http_status: int | None = None
    error_code: str | None = None
    finish_reason: str | None = None
    reasoning_without_content: bool | None = None
    seconds: float = 0.0
    why: str | None = None

    def as_dict(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(slots=True, kw_only=True)
class Preflight:
    """What is known so far."""

    report: Report | None = None
    end_to_end: EndToEnd | None = None
    interrupted: bool = False

    @property
    def outcome(self) -> str:
        if self.interrupted:
            return "interrupted"
        return "ready" if self.end_to_end is not None and self.end_to_end.status == "ready" else "not_ready"


async def fly(pool: Pool, run: Run, known: Preflight, max_attempts: int) -> None:
    """Both layers; what is found out is in `known` as soon as it is."""
    try:
        known.report = await pool.probe(run.emit)
    except NoneReady as exc:
        known.report = exc.report
        known.end_to_end = EndToEnd(status="skipped", why="no candidate is ready")
    else:
        if not pool.serving:
            known.end_to_end = EndToEnd(status="skipped", why=SERVES_NONE)
    run.emit("pool_probed", serving=list(pool.serving), report=known.report.as_dict())
    if known.end_to_end is None:
        known.end_to_end = await end_to_end(pool, run, max_attempts)
    run.emit("end_to_end", **known.end_to_end.as_dict())


async def end_to_end(pool: Pool, run: Run, max_attempts: int) -> EndToEnd:
    """One request through the route that the graph takes, tools bound; at most `max_attempts` times `ATTEMPT_S`.

    Whatever brings no response with status 200 is made again at the same size, without a pause; the last one decides.
    A response whose budget was too small is not: to the route it was a success, and it would take the same again.
    """
    end, began = EndToEnd(status="skipped"), now()
    for number in range(1, max_attempts + 1):
        routed = await _through(pool, run)
        done, took = routed.attempt, round(now() - began, 3)
        end = replace(_judged(done, max_attempts), attempts=number, candidate=routed.candidate, seconds=took)
        run.emit(
            "end_to_end_attempt", number=number, has_text=done.has_text, has_calls=_has_calls(done), **end.as_dict()
        )
        if end.trigger != "A":
            break
    return end


async def _through(pool: Pool, run: Run) -> Routed:
    from langchain_core.messages import HumanMessage, SystemMessage

    from bounded.usage import judge

    def cut(by: Cut) -> None:
        run.cut_model_call("was ended by its timeout" if by is Cut.DEADLINE else "was cut off with the run")

    asked = [SystemMessage(SYSTEM), HumanMessage("Call no tool. Reply with the one word: ready")]
    began = now()
    with deadline_scope(ATTEMPT_S):
        routed = await until_cut(pool.route(run, asked, sys.maxsize), on_cut=cut)
    if isinstance(routed, Cut):
        hung = Attempt(failure=TimeoutError(), timed_out=True, seconds=round(now() - began, 3))
        return Routed(call=run.model_calls, attempt=hung)
    done = routed.attempt
    if done.reply is None:
        run.pass_over(routed.call, spent="nothing" if done.spent_nothing else "unknown", error_type=done.error_type)
    else:
        usage = judge(done.reply.usage_metadata)
        run.end_model_call(routed.call, usage, routed.candidate)
        facts = {"call": routed.call, "candidate": routed.candidate, "usage": usage.raw}
        run.emit("model_call_ended", **facts, finish_reason=done.finish_reason)
    return routed


def _judged(done: Attempt, max_attempts: int) -> EndToEnd:
    facts: dict[str, Any] = {"http_status": done.http_status, "finish_reason": done.finish_reason}
    if done.reply is not None:
        facts["reasoning_without_content"] = done.reasoned and not done.has_text
    if done.http_status in (None, 200) and done.reply is not None:
        if done.has_text or _has_calls(done):
            return EndToEnd(status="ready", **facts)
        return EndToEnd(status=INVALID, trigger=done.trigger, **facts)
    code = done.error_type or PROVIDER_ERROR
    if done.http_status == 200 and not done.broke_off:  # a response, and none that can be read
        return EndToEnd(status=INVALID, error_code=code, **facts)
    if done.http_status in (None, 200) or done.timed_out:
        status = "gateway_transport_exhausted"
    else:
        status = "gateway_rejected" if max_attempts == 1 else "gateway_retry_rejected"
    return EndToEnd(status=status, trigger="A", error_code=code, **facts)


def _has_calls(done: Attempt) -> bool:
    return done.reply is not None and bool(done.reply.tool_calls)


def attempts_of(environment: Mapping[str, str]) -> int:
    """How often the end-to-end request may be made.

    Raises:
        UsageError: the variable is set, and not to a whole number from 1 to 9999.
    """
    text = environment.get(ATTEMPTS, str(MAX_ATTEMPTS))
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise UsageError(
            f"{ATTEMPTS} takes a whole number from 1 to 9999, not {text[:40]!a}; for example: {ATTEMPTS}=3"
        )
    return int(text)


def as_dict(known: Preflight, serving: tuple[str, ...]) -> dict[str, object]:
    """What is known as `--json` prints it. A field that does not apply is absent."""
    fields = {
        "schema_version": 1,
        "outcome": known.outcome,
        "report": None if known.report is None else known.report.as_dict(),
        "end_to_end": None if known.end_to_end is None else known.end_to_end.as_dict(),
        "serving": list(serving),
    }
    return {name: value for name, value in fields.items() if value is not None}


def show(known: Preflight, serving: tuple[str, ...]) -> None:
    """Print what is known as a table of candidates, then the end-to-end result."""
    print(f"outcome: {known.outcome}")
    if known.report is not None:
        stages = [known.report.primary, known.report] if known.report.primary else [known.report]
        rows = [row for stage in stages for row in stage.rows]
        wide = max(len(row.agent_id) for row in rows)
        print(f"\n{'candidate':{max(wide, 9)}}  attempts  trigger  finish      seconds  result")
        for row in rows:
            finish, trigger = (row.finish_reason or "-")[:10], row.trigger or "-"
            shown = f"{row.attempts:8}  {trigger:7}  {finish:10}  {row.seconds:7.1f}  {_said(row)}"
            print(f"{row.agent_id:{max(wide, 9)}}  {shown}")
        used, budget = known.report.escalations_used, known.report.escalation_budget
        print(f"\nescalations: {used} of {budget}" + ("; the fallback stage was run" if known.report.primary else ""))
    if known.end_to_end is not None:
        print(f"end to end: {_end_said(known.end_to_end)}")
    word = "serving" if known.outcome == "ready" or not serving else "would be asked"
    print(f"{word}: {', '.join(serving) or 'none'}")


def _said(row: Row) -> str:
    if not row.ready:
        status = "" if row.http_status in (None, 200) else f" (HTTP {row.http_status})"
        hint = _HINTS.get(row.http_status) or _HINTS.get(row.error_type, "")
        return f"rejected: {row.error_type}{status}{hint}"
    raised = ", escalated" if row.escalated else ""
    return f"ready{raised}; calls tools: {row.tool_calls}; usage: {row.usage}"


def _end_said(end: EndToEnd) -> str:
    if end.why is not None:
        return f"{end.status}, {end.why}"
    parts = [
        end.status,
        f"{end.attempts} attempt{'s' if end.attempts > 1 else ''}",
        f"last asked: {end.candidate}" if end.candidate else None,
        f"trigger {end.trigger}" if end.trigger else None,
        f"HTTP {end.http_status}" if end.http_status and end.http_status != 200 else None,
        end.error_code,
        f"finish {end.finish_reason}" if end.finish_reason else None,
        f"{end.seconds:.1f} s",
    ]
    return ", ".join(part for part in parts if part)


async def fly_and_exit(
    pool: Pool, max_attempts: int, printed: Callable[[Preflight, tuple[str, ...]], None], recording: Recording | None
) -> NoReturn:
    """Run both layers, print what they came to, seal it, and end the process, whatever is stuck."""
    interrupt = asyncio.Event()
    on_interrupt(interrupt)
    from ci import LocalCi
    from sources.jobs import ci_tools

    pool.bind_tools(ci_tools(LocalCi()))
    known, progress = Preflight(), Progress(sys.stderr)
    record = None if recording is None else lambda event: recording.folder.record(event.kind, None, **event.facts)
    run = Run(model="pool", observe=to_all(record, progress))

    def last_words() -> None:
        progress.close()
        try:
            printed(known, pool.serving)
            sys.stdout.flush()
        finally:
            if recording is not None:
                recording.close(known.outcome)

    def blocked() -> int:
        if recording is not None:
            recording.folder.hold()  # the loop may come free at any moment
        return STATUS[known.outcome]

    bound_s = LAYER_S + max_attempts * ATTEMPT_S
    arm_watchdog(bound_s, blocked, last_words)
    with deadline_scope(bound_s):
        ended = await until_cut(fly(pool, run, known, max_attempts), interrupt)
    if ended is Cut.INTERRUPT:
        known.interrupted = True
        run.emit("interrupted")
    end_process(STATUS[known.outcome], last_words)


def main() -> NoReturn:
    """The command line; ends the process."""
    set_up()
    parser = flag_parser("preflight.py", "Find out which candidate models can serve.", EPILOG, SHARED)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    try:
        typed = parser.parse_args()
        values = flag_values(SHARED, typed, os.environ)
        max_attempts = attempts_of(os.environ)
        pool = read_pool(values["--pool"], os.environ)
        secrets = secret_values(os.environ) | pool.keys()
        clean_logs(secrets)
        recording = recorded(
            values["--evidence"],
            kind="preflight",
            model="pool",
            environment=os.environ,
            secrets=secrets,
            served_by=values["--served-by"],
            candidates=pool.described(),
        )
    except (UsageError, SetUpMissing) as exc:
        sys.exit(complain("preflight.py", str(exc)))
    except ModuleNotFoundError as exc:
        sys.exit(complain("preflight.py", not_installed(exc)))
    printed = (lambda *known: print(json.dumps(as_dict(*known), indent=2, allow_nan=False))) if typed.json else show
    run_to_exit(fly_and_exit(pool, max_attempts, printed, recording), secrets)


if __name__ == "__main__":
    main()
