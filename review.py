"""Review a change in a repository with read-only tools, under the same bounds as every other run.

    python review.py --model offline --repo . "what to look for"
    python review.py --repo PATH --base main --evidence runs "does this leak a descriptor?"

From another program: `await ReviewEpisode(assignment, changes=...).execute()`, see episode.py.
"""

import signal
import sys

if __name__ == "__main__":  # before anything that takes time: Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bounded.calls import Cut, until_cut
from bounded.deadlines import deadline_scope
from bounded.exit import arm_watchdog, end_process, on_interrupt, run_to_exit
from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import to_all
from bounded.text import fit, secret_values
from command_line import FLAGS, Flag, UsageError, flag_parser, flag_values, path
from episode import ROUNDS, Assignment, Request, Review, ReviewEpisode, Slot, reviewer
from models.factory import SetUpMissing
from recording import Recording
from reviewing.changes import Changes, ReviewError, changes_since, staged_changes
from reviewing.coverage import Coverage
from terminal import Progress, answer_dict, call_label, clean_logs, complain, fate, not_installed, set_up

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

MAX_NAME = 1_000
EPILOG = """\
exit status: 0 reviewed, be it with findings; 1 a bug, or output that could not be written; 2 bad arguments or missing
set-up; 3 ended by a bound; 4 the model failed, or gave no findings that can be read; 130 interrupted."""

SHARED = tuple(
    flag for flag in FLAGS if flag.name in ("--model", "--model-timeout", "--deadline", "--evidence", "--served-by")
)
OWN = (
    Flag(name="--repo", metavar="PATH", default=".", help="the repository, or a folder of it", read=path),
    Flag(name="--base", metavar="REV", default=None, help="review what changed since then (default: HEAD)", read=path),
)


def as_dict(review: Review) -> dict[str, Any]:
    """The review as `--json` prints it."""
    answer = answer_dict(review.answer)
    answer.pop("answer", None)
    found = None if review.findings is None else [finding.model_dump() for finding in review.findings]
    return {
        **answer,
        **({"draft": review.draft} if found is None else {"findings": found}),
        "coverage": review.coverage,
        "usage": dict(review.usage),
        "native_source_gap": review.native_source_gap,
        "native_incomplete": review.native_incomplete,
    }


def show(review: Review, secrets: frozenset[str]) -> None:
    """Print findings, coverage, and what they rest on."""
    answer = review.answer
    print(f"outcome: {answer.outcome}")
    if answer.reason:
        print(f"reason: {answer.reason}")
    if review.findings is None:
        print(f"findings: none that can be gone by (native_incomplete={review.native_incomplete})")
        if review.draft:
            print("\nthe draft:")
            for line in review.draft.split("\n"):  # marked, or it could be taken for the lines around it
                print(f"  | {line}")
    else:
        print(f"findings: {len(review.findings)}")
    for finding in review.findings or ():
        print(f"  {finding.shown()}")
    coverage = review.coverage
    print(f"\ncoverage: {coverage['state']}" + (f" ({coverage['reason']})" if "reason" in coverage else ""))
    for word, name in (("read", "read_ranges"), ("not read", "missing_ranges")):
        for file, ranges in coverage[name].items():
            lines = ", ".join(f"{first}-{last}" for first, last in ranges)
            shown = " ".join(fit(file, MAX_NAME, secrets).split())
            print(f"  {word}: {shown}, {f'lines {lines}' if lines else 'which is empty'}")
    print(f"\ntokens: {answer.known_subtotal} ({'known' if answer.usage_known else 'unknown'})")
    print("based on:" if answer.receipts else "based on: no tool call")
    for receipt in answer.receipts:
        print(f"  {receipt.call_id or '-'} {call_label(receipt)} {fate(receipt)}")


def status(review: Review) -> int:
    """The exit status: that of the outcome; a reply that cannot be read as findings is a failure of the model."""
    failed = review.answer.outcome is Outcome.ANSWERED and review.native_incomplete
    return Outcome.MODEL_ERROR.exit_status if failed else review.answer.outcome.exit_status


async def changes_of(repo: Path, base: str | None, *, staged: str, deadline_s: float) -> Changes:
    """The change that is to be reviewed: `staged` is "staged", or "" for the working tree.

    Raises:
        ReviewError: there is none to be had, or not within `deadline_s` seconds: git waits for a pipe, for example.
        SystemExit: interrupted. What git was at is killed: in a session of its own no Ctrl-C reaches it.
    """
    interrupt = asyncio.Event()
    on_interrupt(interrupt)
    try:
        with deadline_scope(deadline_s):
            changes = await until_cut(staged_changes(repo) if staged else changes_since(repo, base), interrupt)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if changes is Cut.INTERRUPT:
        raise SystemExit(Outcome.INTERRUPTED.exit_status)
    if isinstance(changes, Cut):
        raise ReviewError(f"git could not say within {deadline_s:g} s what has changed")
    return changes


async def review_and_exit(
    values: Mapping[str, Any],
    typed: Any,
    changes: Changes,
    model: "BaseChatModel",
    secrets: frozenset[str],
    recording: Recording | None,
) -> NoReturn:
    """Review as the command line does, print what it came to, and end the process, whatever is stuck."""
    interrupt = asyncio.Event()
    on_interrupt(interrupt)
    progress = None if typed.quiet else Progress(sys.stderr)
    limits = Limits(max_steps=ROUNDS, model_timeout_s=values["--model-timeout"])
    task = " ".join(typed.task).strip()
    observer = recording and recording.observer(
        "review", task, limits, deadline_s=values["--deadline"], asks_again=True
    )
    custody = recording.folder.path / "custody" if recording else Path(tempfile.mkdtemp(prefix="review-"))
    request = Request(goal="Review a change.", task=task, subject_root=Path(values["--repo"]), surface="report")
    assignment = Assignment(request=request, slot=Slot(model=values["--model"]), call_id="1", custody_root=custody)
    episode = ReviewEpisode(
        assignment,
        changes=changes,
        model=model,
        limits=limits,
        deadline_s=values["--deadline"],
        secrets=secrets,
        observe=to_all(observer or None, progress),
        interrupt=interrupt,
    )

    last: Review | None = None

    def last_words() -> None:
        if progress is not None:
            progress.close()
        review = last or episode.so_far()
        try:
            if typed.json:
                print(json.dumps(as_dict(review), indent=2, allow_nan=False))
            else:
                show(review, secrets)
            sys.stdout.flush()
        finally:
            if recording is None:
                shutil.rmtree(custody, ignore_errors=True)
            else:
                recording.stop("review", review.answer)
                recording.close(review.answer.outcome)

    def blocked() -> int:
        nonlocal last
        if recording is not None:
            recording.folder.hold()  # the loop may come free at any moment
        episode.run.cut(Outcome.DEADLINE, "the event loop was blocked past the deadline of the run")
        last = episode.give_up()
        return status(last)

    arm_watchdog(values["--deadline"], blocked, last_words)
    end_process(status(await episode.execute()), last_words)


def main() -> NoReturn:
    """The command line; ends the process."""
    set_up()
    parser = flag_parser("review.py", "Review a change in a repository.", EPILOG, (*SHARED, *OWN))
    parser.add_argument("task", nargs="*", help="what to look for")
    parser.add_argument("--staged", action="store_const", const="staged", default="", help="review what is staged")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    try:
        typed = parser.parse_args()
        values = flag_values(SHARED, typed, os.environ) | flag_values(OWN, typed, {})
        if not " ".join(typed.task).strip():
            raise UsageError('say what to look for; for example: python review.py --repo . "descriptors that leak"')
        if typed.staged and values["--base"]:
            raise UsageError("--staged and --base: one of them")
        secrets = secret_values(os.environ)
        clean_logs(secrets)
        limits = Limits(model_timeout_s=values["--model-timeout"])
        model = reviewer(values["--model"], limits, os.environ)
        where, until = Path(values["--repo"]), values["--deadline"]
        changes = asyncio.run(changes_of(where, values["--base"], staged=typed.staged, deadline_s=until))
        if not changes.files:
            nothing: dict[str, Any] = {"schema_version": 1, "findings": [], "coverage": Coverage({}).report()}
            said = f"nothing has changed against {changes.against[:12]}: no one was asked"
            print(json.dumps(nothing, indent=2) if typed.json else said)
            sys.exit(0)
        recording = None
        if values["--evidence"]:
            recording = Recording(
                values["--evidence"],
                kind="review",
                model=values["--model"],
                environment=os.environ,
                secrets=secrets,
                served_by=values["--served-by"],
            )
    except (UsageError, SetUpMissing, ReviewError) as exc:
        sys.exit(complain("review.py", str(exc)))
    except ModuleNotFoundError as exc:
        sys.exit(complain("review.py", not_installed(exc)))
    run_to_exit(review_and_exit(values, typed, changes, model, secrets, recording), secrets)


if __name__ == "__main__":
    main()
