"""What the scripts share of their command lines: flags and their environment twins, read and refused by name."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from bounded.limits import DEADLINE_S, MAX_STEPS, MODEL_TIMEOUT_S, Limits
from bounded.timeouts import ToolTimeouts

EXAMPLE = 'python graph.py "Why is CI failing on pull request 415?"'

EPILOG = """\
exit status: 0 answered or paused; 1 a bug, or output that could not be written; 2 bad arguments or missing set-up;
3 ended by a bound; 4 the model failed or said nothing; 130 interrupted.
Each flag with a value can be set in the environment: --tool-timeout is REVIEW_TOOL_TIMEOUT (there with
commas between values), and so on; the flag wins. A .env file is not read."""


class UsageError(Exception):
    """What was typed cannot be taken; the message names it and shows what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, read and checked. Durations in seconds.

    Attributes:
        tool_timeout_s: one timeout for all tools; None leaves each tool its own.
        tool_timeouts_s: tool name -> timeout.
        pool: the file of candidate models, for the model `pool`.
        ci: where CI is asked; None for the stub.
        evidence: the folder in which a run folder is made; None for no evidence.
        served_by: what stands between this program and the model, in the user's words.
    """

    question: str
    model: str
    pool: str
    ci: str | None
    token_budget: int | None
    tool_timeout_s: float | None
    tool_timeouts_s: Mapping[str, float]
    model_timeout_s: float
    deadline_s: float
    max_steps: int
    evidence: str | None
    served_by: str | None
    json: bool
    quiet: bool

    def limits(self, tools: Sequence[str], per_set: Mapping[str, Mapping[str, float | None]]) -> Limits:
        """The run's limits, over the timeouts that the tools' set brings.

        Raises:
            UsageError: a timeout is for a tool that there is not.
        """
        if unknown := sorted(self.tool_timeouts_s.keys() - set(tools)):
            names = ", ".join(tools)
            raise UsageError(
                f"--tool-timeout (or REVIEW_TOOL_TIMEOUT) names no tool {unknown[0]!a}; the tools are: {names}"
            )
        timeouts = ToolTimeouts(per_tool=self.tool_timeouts_s, per_set=per_set)
        if self.tool_timeout_s is not None:  # for all tools means for those too that the set brings a timeout for
            timeouts = ToolTimeouts(per_tool=self.tool_timeouts_s, default_s=self.tool_timeout_s)
        return Limits(
            token_budget=self.token_budget,
            model_timeout_s=self.model_timeout_s,
            max_steps=self.max_steps,
            tool_timeouts=timeouts,
        )


def seconds(text: str) -> float:
    """A length of time as a user types it.

    Raises:
        UsageError: it is no finite number above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"takes a number of seconds above 0, not {text[:40]!a}")
    return value


def model_name(text: str) -> str:
    """A model's name as a user types it.

    Raises:
        UsageError: there is none.
    """
    if not text.strip() or not text.isprintable():
        raise UsageError("takes a model's name, for example: offline")
    return text.strip()


def count(text: str) -> int:
    """A whole number as a user types it.

    Raises:
        UsageError: it is no whole number above 0.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise UsageError(f"takes a whole number above 0, not {text[:40]!a}")
    return value


def path(text: str) -> str:
    """The path of a file or a folder as a user types it.

    Raises:
        UsageError: there is none.
    """
    if not text.strip() or "\0" in text:
        raise UsageError("takes a path, for example: runs")
    return text


def tool_timeout(text: str) -> dict[str | None, float]:
    """`SECONDS` for all tools (key None) or `NAME=SECONDS`; several with commas between.

    Raises:
        UsageError: one of them is neither.
    """
    found: dict[str | None, float] = {}
    for item in text.split(","):
        name, named, value = item.rpartition("=")
        try:
            if named and not name.strip():
                raise UsageError
            found[name.strip() or None] = seconds(value)
        except UsageError:
            raise UsageError(f"takes SECONDS or NAME=SECONDS, with seconds above 0, not {item[:40]!a}") from None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag with an environment twin. `default` is what the twin would hold, None for no value."""

    name: str
    metavar: str
    default: str | None
    help: str
    read: Callable[[str], Any]

    @property
    def twin(self) -> str:
        return "REVIEW_" + self.name.removeprefix("--").replace("-", "_").upper()


FLAGS = (
    Flag(
        name="--model",
        metavar="NAME",
        default="gemini-3.8-flash",
        help="gemini-*, an Ollama tag, openai:MODEL, pool, offline (no language model, no key) or scripted:FILE",
        read=model_name,
    ),
    Flag(
        name="--pool",
        metavar="FILE",
        default="models.toml",
        help="the candidate models of which --model pool serves those that can; python preflight.py tells which",
        read=path,
    ),
    Flag(
        name="--ci",
        metavar="SOURCE",
        default=None,
        help="where CI is asked: github (the repository of this folder), github:OWNER/REPO, folder:PATH (logs and JUnit"
        " XML, or a zip of them), buildbot:URL (default: a local stub)",
        read=str.strip,
    ),
    Flag(
        name="--token-budget",
        metavar="TOKENS",
        default=None,
        help="start no further call once this many tokens are spent; one call may overshoot (default: none)",
        read=count,
    ),
    Flag(
        name="--tool-timeout",
        metavar="[NAME=]SECONDS",
        default=None,
        help="what one tool call may take, in seconds: for all tools, or with NAME= for one; repeatable"
        " (default: 10, for the stub's fetch_job_log 3; with --ci 20)",
        read=tool_timeout,
    ),
    Flag(
        name="--model-timeout",
        metavar="SECONDS",
        default=f"{MODEL_TIMEOUT_S:g}",
        help="what one model call may take, in seconds",
        read=seconds,
    ),
    Flag(
        name="--deadline",
        metavar="SECONDS",
        default=f"{DEADLINE_S:g}",
        help="what the whole run may take, in seconds",
        read=seconds,
    ),
    Flag(
        name="--max-steps",
        metavar="CALLS",
        default=f"{MAX_STEPS}",
        help="at most this many model calls in one run",
        read=count,
    ),
    Flag(
        name="--evidence",
        metavar="PARENT",
        default=None,
        help="keep what the run did in a new folder of this one, sealed; python verify.py checks it (default: no)",
        read=path,
    ),
    Flag(
        name="--served-by",
        metavar="TEXT",
        default=None,
        help="what stands between this program and the model, in your words; kept in the evidence",
        read=str,
    ),
)

# What the scripts take that always keep evidence.
KEEPING = tuple(
    replace(flag, default="runs", help="where the run folder is made") if flag.name == "--evidence" else flag
    for flag in FLAGS
    if flag.name in ("--model", "--evidence", "--served-by")
)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read a command line.

    Raises:
        UsageError: in one line, what was wrong and what is right.
        SystemExit: `--help` was asked for, and printed.
    """
    parser = flag_parser("graph.py", "Ask why CI fails on a pull request.", EPILOG, FLAGS)
    parser.add_argument("question", nargs="*", help="for example: Why is CI failing on pull request 415?")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    typed = parser.parse_args(arguments)
    values = flag_values(FLAGS, typed, environment)
    question = " ".join(typed.question).strip()
    if not question:
        raise UsageError(f"there is no question; for example: {EXAMPLE}")
    timeouts = dict(values["--tool-timeout"] or {})
    return Options(
        question=question,
        model=values["--model"],
        pool=values["--pool"],
        ci=values["--ci"],
        token_budget=values["--token-budget"],
        tool_timeout_s=timeouts.pop(None, None),
        tool_timeouts_s=timeouts,
        model_timeout_s=values["--model-timeout"],
        deadline_s=values["--deadline"],
        max_steps=values["--max-steps"],
        evidence=values["--evidence"],
        served_by=values["--served-by"],
        json=typed.json,
        quiet=typed.quiet,
    )


def flag_parser(prog: str, description: str, epilog: str, flags: Sequence[Flag]) -> argparse.ArgumentParser:
    """A parser of these flags, which says what is wrong as a `UsageError`."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in flags:
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(flag.name, metavar=flag.metavar, action="append", help=flag.help + default)
    return parser


def keeping_parser(prog: str, description: str, epilog: str, own: Sequence[Flag]) -> argparse.ArgumentParser:
    """The same for a script that always keeps evidence, which has `KEEPING` and `--frames` beside its own flags."""
    parser = flag_parser(prog, description, epilog, (*KEEPING, *own))
    frames = "keep pictures of the final screen as well, at three widths"
    parser.add_argument("--frames", action="store_true", help=frames)
    return parser


def flag_values(flags: Sequence[Flag], typed: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """What each flag holds, by its name: typed, else from its twin in the environment, else its default.

    Raises:
        UsageError: a value cannot be taken.
    """
    return {flag.name: _value(flag, getattr(typed, flag.name[2:].replace("-", "_")), environment) for flag in flags}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; python {self.prog} --help lists what there is")


def _value(flag: Flag, typed: list[str] | None, environment: Mapping[str, str]) -> Any:
    name, texts = flag.name, typed
    if texts is None and environment.get(flag.twin, "").strip():
        name, texts = flag.twin, [environment[flag.twin]]
    if texts is None:
        return None if flag.default is None else flag.read(flag.default)
    try:
        values = [flag.read(text) for text in texts]
    except UsageError as exc:
        raise UsageError(f"{name} {exc}") from None
    if isinstance(values[0], dict):
        return {key: value for found in values for key, value in found.items()}
    return values[-1]
