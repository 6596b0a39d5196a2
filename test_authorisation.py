"""Who may allow a probe: where a guard may lie, what it may do and answer, and for how long its leave holds."""

import importlib
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest

import authorisation
from authorisation import Plan, Refused, authorise
from conftest import ROOT

# Made up anew each time, so that no source file holds it, nor the copy of one in a run folder.
SECRET = f"fake-secret-{secrets.token_hex(8)}"
GUARDS = f"""\
import asyncio
import re
import sys
import time
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from types import SimpleNamespace

from authorisation import LONGEST, Authorisation, Plan, Refused

SECRET = {SECRET!r}


async def backtrack(plan):
    re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter: no Python thread runs meanwhile


def until(plan, moment):
    return Authorisation(plan_sha256=plan.digest, expires_at=moment)


def leave(plan, **length):
    return until(plan, datetime.now(UTC) + timedelta(**length))


class More(Authorisation):
    pass


class NoOffset(tzinfo):
    def utcoffset(self, moment):
        return None


class Guard:
    async def allow(self, plan):
        return leave(plan, seconds=60)


async def allow(plan):
    return leave(plan, seconds=60)


async def briefly(plan):
    return leave(plan, seconds=0.3)


async def ten_minutes(plan):
    return until(plan, datetime.now(UTC) + LONGEST)


async def elsewhere(plan):
    return until(plan, datetime.now(timezone(timedelta(hours=5, minutes=30))) + timedelta(seconds=60))


def plain(plan):
    return leave(plan, seconds=60)


async def raises(plan):
    raise ValueError(SECRET)


async def raises_refused(plan):
    raise Refused(SECRET)


async def returns_refused(plan):
    return Refused(SECRET)


async def exits(plan):
    raise SystemExit(SECRET)


async def interrupts(plan):
    raise KeyboardInterrupt(SECRET)


async def cancels(plan):
    raise asyncio.CancelledError(SECRET)


async def hangs(plan):
    await asyncio.Event().wait()


async def sleeps(plan):
    time.sleep(60)


async def waits(plan):
    print("the guard is asked", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


async def none(plan):
    return None


async def yes(plan):
    return True


async def mapping(plan):
    return {{"plan_sha256": plan.digest, "expires_at": datetime.now(UTC) + timedelta(seconds=60), "note": SECRET}}


async def looks_alike(plan):
    return SimpleNamespace(plan_sha256=plan.digest, expires_at=datetime.now(UTC) + timedelta(seconds=60))


async def subclass(plan):
    return More(plan_sha256=plan.digest, expires_at=datetime.now(UTC) + timedelta(seconds=60))


async def other_plan(plan):
    return leave(Plan(model=plan.model), seconds=60)


async def expired(plan):
    return leave(plan, seconds=-1)


async def naive(plan):
    return until(plan, datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=60))


async def no_offset(plan):
    return until(plan, datetime.now(UTC).replace(tzinfo=NoOffset()) + timedelta(seconds=60))


async def in_words(plan):
    return until(plan, "2099-01-01T00:00:00+00:00")


async def next_year(plan):
    return leave(plan, days=365)


method = Guard().allow
"""
INSIDE = "the guard lies inside the project"

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module outside the project and returns its name, which no other test has."""
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.syspath_prepend(str(outside))

    def module(source: str) -> str:
        name = f"guards_{secrets.token_hex(4)}"
        (outside / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    return module


def refusal(work: Callable[[], object]) -> str:
    """The words in which it is refused."""
    with pytest.raises(Refused) as refused:
        work()
    return str(refused.value)


def refused(guard: str) -> str:
    return refusal(lambda: authorise(guard, Plan(model="m")))


@pytest.mark.parametrize("guard", ["allow", "method", "ten_minutes", "elsewhere"])
def test_a_guard_from_outside_allows_its_plan_once(guard: str, write: Write) -> None:
    spend = authorise(f"{write(GUARDS)}:{guard}", Plan(model="m"))
    spend()
    assert [refusal(spend) for _ in range(2)] == ["the authorisation is used up"] * 2


@pytest.mark.slow
def test_an_authorisation_that_expires_before_it_is_spent_is_gone(write: Write) -> None:
    spend = authorise(f"{write(GUARDS)}:briefly", Plan(model="m"))
    time.sleep(0.3)  # the clock itself is what is waited for
    assert refusal(spend) == "the authorisation has expired"
    assert refusal(spend) == "the authorisation is used up"


@pytest.mark.parametrize(
    ("guard", "says"),
    [
        ("raises", "the guard raised ValueError"),
        ("raises_refused", "the guard raised Refused"),
        ("exits", "the guard raised SystemExit"),
        ("interrupts", "the guard raised KeyboardInterrupt"),
        ("cancels", "the guard raised CancelledError"),
        ("plain", "MODULE has no async function plain"),
        ("absent", "MODULE has no async function absent"),
        ("SECRET", "MODULE has no async function SECRET"),
        ("none", "the guard answered NoneType, which is no authorisation"),
        ("yes", "the guard answered bool, which is no authorisation"),
        ("mapping", "the guard answered dict, which is no authorisation"),
        ("looks_alike", "the guard answered SimpleNamespace, which is no authorisation"),
        ("subclass", "the guard answered More, which is no authorisation"),
        ("returns_refused", "the guard answered Refused, which is no authorisation"),
        ("other_plan", "the authorisation is for another plan"),
        ("expired", "the authorisation has expired"),
        ("naive", "the authorisation does not say when it expires, as a moment with an offset"),
        ("no_offset", "the authorisation does not say when it expires, as a moment with an offset"),
        ("in_words", "the authorisation does not say when it expires, as a moment with an offset"),
        ("next_year", "the authorisation expires later than in 600 s"),
    ],
)
def test_a_guard_that_fails_or_answers_anything_else_is_refused_in_our_words(
    guard: str, says: str, write: Write
) -> None:
    module = write(GUARDS)
    assert refused(f"{module}:{guard}") == says.replace("MODULE", module)


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "ValueError"])
def test_a_guard_whose_module_raises_is_refused_in_our_words(error: str, write: Write) -> None:
    assert refused(f"{write(f'raise {error}({SECRET!r})')}:allow") == f"the guard raised {error}"


@pytest.mark.parametrize(
    "guard", ["", "guards", ":allow", "guards:", "guards:Guard.allow", "guards:allow()", "guards:a:b", "guards allow"]
)
def test_a_guard_that_is_not_named_as_one_is_refused(guard: str) -> None:
    assert refused(guard) == "a guard is named as package.module:function"


@pytest.mark.parametrize(
    ("guard", "missing"),
    [
        ("no_such_module:allow", "no_such_module"),
        ("no_such_package.guards:allow", "no_such_package"),
        ("json.no_such_module:allow", "json.no_such_module"),
    ],
)
def test_a_guard_that_is_not_there_is_refused_by_its_name(guard: str, missing: str) -> None:
    assert refused(guard) == f"there is no module {missing}; is its folder on PYTHONPATH?"


@pytest.mark.parametrize("guard", ["sys:exit", "zipimport:zipimporter"])
def test_a_guard_without_a_file_is_refused(guard: str) -> None:
    assert refused(guard) == "it cannot be seen where the guard lies"


def test_an_async_function_that_is_no_guard_is_refused_for_what_it_does() -> None:
    assert refused("asyncio.tasks:sleep") == "the guard raised TypeError"


@pytest.mark.parametrize("guard", ["graph:ask", "bounded.calls:until_cut", "evidence:x", "test_authorisation:write"])
def test_a_guard_inside_the_project_is_refused(guard: str) -> None:
    assert refused(guard) == INSIDE


def test_a_function_of_the_project_that_a_module_outside_hands_on_is_refused(write: Write) -> None:
    assert refused(f"{write('from graph import ask as allow')}:allow") == INSIDE


@pytest.mark.parametrize("guard", ["linked:allow", "tree.ci:LocalCi", "tree.bounded.calls:until_cut"])
def test_a_link_outside_that_leads_inside_is_refused_before_anything_of_it_runs(
    guard: str, write: Write, tmp_path: Path
) -> None:
    (tmp_path / "outside" / "linked.py").symlink_to(ROOT / "ci.py")
    (tmp_path / "outside" / "tree").symlink_to(ROOT)
    importlib.invalidate_caches()
    assert refused(guard) == INSIDE
    assert not {"linked", "tree.ci", "tree.bounded"} & sys.modules.keys()


@pytest.mark.parametrize("form", ["a file", "a link to a file outside"])
def test_what_lies_in_the_tree_is_inside_even_where_it_is_a_link(
    form: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, name = tmp_path / "project", f"inner_{secrets.token_hex(4)}"
    project.mkdir()
    if form == "a file":
        (project / f"{name}.py").write_text(GUARDS)
    else:
        (project / f"{name}.py").symlink_to(tmp_path / "outside" / f"{write(GUARDS)}.py")
    monkeypatch.syspath_prepend(str(project))
    authorise(f"{name}:allow", Plan(model="m"))()  # as long as that folder is not the project
    del sys.modules[name]
    monkeypatch.setattr(authorisation, "ROOT", project)
    assert refused(f"{name}:allow") == INSIDE
    assert name not in sys.modules


def test_the_authorisation_of_one_process_is_none_in_another() -> None:
    plan, other = Plan(model="m"), Plan(model="m")
    assert len({plan.process, other.process}) == len({plan.digest, other.digest}) == 2
    assert replace(plan).digest == plan.digest
    assert replace(plan, process=other.process).digest == other.digest


def test_a_plan_is_frozen_and_its_digest_holds_all_of_it() -> None:
    plan = Plan(model="m")
    with pytest.raises(FrozenInstanceError):
        plan.generations = 2  # type: ignore[misc]
    changed: dict[str, Any] = {
        name: f"{value}!" if isinstance(value, str) else value + 1 for name, value in asdict(plan).items()
    }
    digests = {replace(plan, **{name: value}).digest for name, value in changed.items()}
    assert len(digests | {plan.digest}) == len(changed) + 1


def test_a_plan_allows_one_count_and_one_generation_within_bounds() -> None:
    held = asdict(Plan(model="m"))
    assert len(held.pop("process")) == 32
    assert held == {
        "model": "m",
        "question": "Fetch the log of CI job 815 and say why that job failed.",
        "token_counts": 1,
        "generations": 1,
        "max_output_tokens": 4096,
        "thinking": "low",
        "http_timeout_s": 45.0,
        "retries": 0,
        "model_timeout_s": 60.0,
        "deadline_s": 120.0,
        "token_budget": 1_000_000,
    }
    assert authorisation.GUARD_S == 10.0
