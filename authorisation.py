"""Who may ask a provider once: a frozen plan, and a guard from outside the project that authorises it, or does not.

A guard is an async callable `guard(plan)`, named as `package.module:function`. To allow the plan it returns

    Authorisation(plan_sha256=plan.digest, expires_at=datetime.now(UTC) + timedelta(seconds=60))

None ships with the project, and none is taken that lies inside it: who starts a probe must not be who allows it.
"""

import asyncio
import importlib
import importlib.util
import inspect
import queue
import secrets
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from bounded.limits import DEADLINE_S
from bounded.text import safe_name
from evidence.verify import canonical, sha256

ROOT = Path(__file__).resolve().parent
GUARD_S = 10.0
# An authorisation that holds for longer than this does not expire in any sense that matters.
LONGEST = timedelta(minutes=10)


class Refused(Exception):
    """The plan is not authorised; the message says why, in words of our own."""


class _Unfit(Exception):
    """Why a guard or its answer cannot be taken, in words of our own; a guard that raises `Refused` has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one probe may do. Durations in seconds.

    Attributes:
        token_counts, generations: the requests that may leave the process.
        max_output_tokens: of the one reply, thinking included.
        token_budget: so high that it does not end the run: what is observed is something else.
        question: names the job and no pull request, so that the slow tool is the first that there is reason to call.
        process: made up for this process, so that no authorisation of another one is good here.
    """

    model: str
    question: str = "Fetch the log of CI job 815 and say why that job failed."
    token_counts: int = 1
    generations: int = 1
    max_output_tokens: int = 4096
    thinking: Literal["low"] = "low"
    http_timeout_s: float = 45.0
    retries: int = 0
    model_timeout_s: float = 60.0
    deadline_s: float = DEADLINE_S
    token_budget: int = 1_000_000
    process: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def digest(self) -> str:
        """SHA-256 of the plan as canonical JSON, as hex."""
        return sha256(canonical(asdict(self)).encode("ascii"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Authorisation:
    """A guard's leave for one plan, until a moment at most `LONGEST` from now."""

    plan_sha256: str
    expires_at: datetime


def authorise(guard: str, plan: Plan) -> Callable[[], None]:
    """Ask the guard, for `GUARD_S` seconds at the most.

    On a thread of its own, with a loop of its own: importing it and calling it are foreign code, and may never end.

    Returns:
        What spends the authorisation, right before the first request; it raises `Refused` on the second call, and
        where the authorisation has expired meanwhile.

    Raises:
        Refused: the guard lies inside the project, fails, takes too long, or answers anything else than the plan's
            authorisation.
    """
    answers: queue.SimpleQueue[Authorisation | Refused] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with asyncio.Runner() as runner:
                # What a task that it leaves behind raises stays untold as well.
                runner.get_loop().set_exception_handler(lambda _loop, _context: None)
                answers.put(_checked(runner.run(_guard(guard)(plan)), plan))
        except _Unfit as exc:
            answers.put(Refused(str(exc)))
        except BaseException as exc:  # what it says may hold anything, what it is does not
            answers.put(Refused(f"the guard raised {safe_name(type(exc).__name__)}"))

    threading.Thread(target=ask, name="guard", daemon=True).start()
    try:
        answer = answers.get(timeout=GUARD_S)
    except queue.Empty:
        raise Refused(f"the guard did not answer within {GUARD_S:g} s") from None
    if isinstance(answer, Refused):
        raise answer
    left = [answer]

    def spend() -> None:
        if not left:
            raise Refused("the authorisation is used up")
        try:
            _checked(left.pop(), plan)
        except _Unfit as exc:
            raise Refused(str(exc)) from None

    return spend


def _checked(answer: object, plan: Plan) -> Authorisation:
    if type(answer) is not Authorisation:
        raise _Unfit(f"the guard answered {safe_name(type(answer).__name__)}, which is no authorisation")
    expires_at = answer.expires_at
    if type(expires_at) is not datetime:
        raise _Unfit("the authorisation does not say when it expires, as a moment with an offset")
    if answer.plan_sha256 != plan.digest:
        raise _Unfit("the authorisation is for another plan")
    if expires_at.utcoffset() is None:
        raise _Unfit("the authorisation does not say when it expires, as a moment with an offset")
    left = expires_at - datetime.now(UTC)
    if left <= timedelta(0):
        raise _Unfit("the authorisation has expired")
    if left > LONGEST:
        raise _Unfit(f"the authorisation expires later than in {LONGEST.total_seconds():g} s")
    return replace(answer, expires_at=expires_at.astimezone(UTC))  # its own time zone is foreign code


def _guard(name: str) -> Callable[[Plan], Coroutine[Any, Any, object]]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise _Unfit("a guard is named as package.module:function")
    parts = module_name.split(".")
    for length in range(1, len(parts) + 1):  # each package before anything of it is run
        spec = importlib.util.find_spec(".".join(parts[:length]))
        if spec is None:
            raise _Unfit(f"there is no module {safe_name('.'.join(parts[:length]))}; is its folder on PYTHONPATH?")
        _lies_outside(spec.origin or next(iter(spec.submodule_search_locations or []), None))
    guard = getattr(importlib.import_module(module_name), function_name, None)
    if not inspect.iscoroutinefunction(guard):
        raise _Unfit(f"{safe_name(module_name)} has no async function {safe_name(function_name)}")
    body = guard.__func__ if inspect.ismethod(guard) else guard
    if not inspect.isfunction(body):
        raise _Unfit(f"{safe_name(module_name)} has no async function {safe_name(function_name)}")
    for each in (body, inspect.unwrap(body)):  # the one that runs, and the one that it says it wraps
        _lies_outside(each.__code__.co_filename)
    return guard


def _lies_outside(origin: str | None) -> None:
    if origin is None or not Path(origin).exists():
        raise _Unfit("it cannot be seen where the guard lies")
    if any(path.is_relative_to(ROOT) for path in (Path(origin).absolute(), Path(origin).resolve())):
        raise _Unfit("the guard lies inside the project")
