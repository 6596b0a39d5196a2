"""A real Buildbot, asked: a master with a failing, a passing and a hanging builder, and pull request 415.

It is installed from requirements-buildbot.txt into a virtual environment of its own, and runs on loopback with SQLite.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from conftest import ROOT, run_graph
from sources.buildbot import Buildbot
from sources.jobs import Job, JobState

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

T = TypeVar("T")
FAKE_SECRET = "fake-secret-of-the-worker"
WORKER_ENVIRONMENT = {
    "WORKER_SECRET": FAKE_SECRET,
    "WORKER_LINES": f"first\n{FAKE_SECRET}\n",
    "WORKER_LONG": "z" * 9_000,
}
FAILING_LINE = "E       assert 2268 == 2520"
# A busy machine takes several times what a quiet one does.
INSTALL_S, START_S, BUILD_S, STOP_S = 300.0, 120.0, 120.0, 15.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))

MASTER = f"""
from buildbot.plugins import schedulers, steps, util, worker

def builder(name, *steps_):
    return util.BuilderConfig(name=name, workernames=["local"], factory=util.BuildFactory(list(steps_)))

BuildmasterConfig = {{
    "workers": [worker.LocalWorker("local", max_builds=3)],
    "protocols": {{"null": {{}}}},
    "builders": [
        builder("passing", steps.ShellCommand(name="lint", command="echo 'E       assert this is no failure'")),
        builder(
            "failing",
            steps.ShellCommand(name="compile", command="echo compiled"),
            steps.ShellCommand(name="unit tests", command="echo 'running'; echo '{FAILING_LINE}' >&2; exit 1"),
        ),
        # Should everything go wrong, it ends by itself all the same.
        builder("hanging", steps.ShellCommand(name="e2e", command="echo 'it begins'; exec sleep 20", timeout=3)),
    ],
    "schedulers": [schedulers.AnyBranchScheduler(name="all", builderNames=["passing", "failing", "hanging"])],
    "www": {{"port": "tcp:0:interface=127.0.0.1", "plugins": {{}}, "change_hook_dialects": {{"base": True}}}},
    "db": {{"db_url": "sqlite:///state.sqlite"}},
    "buildbotURL": "http://127.0.0.1/",
    "buildbotNetUsageData": None,
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """A running master.

    Attributes:
        newest: the ids of the builds of the newest change, and before them that of one which was built again.
    """

    url: str
    newest: frozenset[int]


def until(happens: Callable[[], T | None], within_s: float, what: str) -> T:
    """What `happens` returns as soon as it is not None."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if (found := happens()) is not None:
            return found
        time.sleep(0.05)  # other processes and their files give no event
    pytest.fail(f"not within {within_s:g} s: {what}")


def install(environment: Path) -> Path:
    """A virtual environment with Buildbot in it; its folder of programs. Skips where there is none to be had."""
    requirements = str(ROOT / "requirements-buildbot.txt")
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "--disable-pip-version-check", "--retries", "1"]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        [*pip, "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "-r", requirements],
    ):
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True)
        except subprocess.TimeoutExpired:
            pytest.skip(f"Buildbot cannot be installed here: not done within {INSTALL_S:g} s")
        except subprocess.CalledProcessError as error:
            said = [line for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
            pytest.skip(f"Buildbot cannot be installed here: {said[-1] if said else 'not a word why'}")
    return environment / "bin"


@contextmanager
def running(programs: Path, folder: Path) -> Iterator[str]:
    """The address of a master that runs from `folder`; nothing of it is left afterwards."""
    folder.mkdir()
    subprocess.run([programs / "buildbot", "create-master", "--quiet", folder], check=True, timeout=START_S)
    (folder / "master.cfg").write_text(MASTER, encoding="utf-8")
    said, log = folder / "said.txt", folder / "twistd.log"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [programs / "buildbot", "start", "--nodaemon", folder],
            env={"PATH": os.environ["PATH"], **WORKER_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def port() -> str | None:
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        assert process.poll() is None, f"the master ended: {text}{said.read_text(encoding='utf-8')}"
        found = re.search(r"BuildbotSite starting on (\d+)", text)
        return found[1] if found and "BuildMaster is running" in text else None

    try:
        yield f"http://127.0.0.1:{until(port, START_S, 'the master runs')}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def fetch(url: str, body: Mapping[str, Any] | bytes | None = None) -> Any:
    data = json.dumps(body).encode() if isinstance(body, Mapping) else body
    headers = {"content-type": "application/json"} if isinstance(body, Mapping) else {}
    with _NO_PROXY.open(urllib.request.Request(url, data, headers), timeout=10.0) as answer:
        text = answer.read()
    return json.loads(text) if "/api/" in url else text


def post_change(url: str, ref: str, revision: str) -> None:
    change = {"branch": ref, "revision": revision, "author": "someone", "repository": "shop", "comments": "a change"}
    fetch(f"{url}/change_hook/base", urllib.parse.urlencode(change | {"files": "[]"}).encode())


def ended(url: str, change: int, count: int) -> Sequence[Mapping[str, Any]]:
    """The builds of a change, as soon as there are `count` and all have ended."""

    def builds() -> Sequence[Mapping[str, Any]] | None:
        found = fetch(f"{url}/api/v2/changes/{change}/builds")["builds"]
        return found if len(found) == count and all(build["complete"] for build in found) else None

    return until(builds, BUILD_S, f"{count} builds of change {change} ended")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """Pull request 415 with two commits; of the newer one the failing builder's build was built again."""
    folder = tmp_path_factory.mktemp("buildbot")
    with running(install(folder / "environment"), folder / "master") as url:
        post_change(url, "refs/pull/415/merge", "older")
        ended(url, 1, 3)
        post_change(url, "refs/pull/415/head", "newer")
        post_change(url, "refs/pull/416/head", "another")
        (failed,) = (build["buildid"] for build in ended(url, 2, 3) if build["builderid"] == failing_builder(url))
        fetch(f"{url}/api/v2/builds/{failed}", {"jsonrpc": "2.0", "id": 1, "method": "rebuild", "params": {}})
        yield Master(url=url, newest=frozenset(build["buildid"] for build in ended(url, 2, 4)))
    shutil.rmtree(folder / "environment")  # a hundred megabytes that pytest would keep


def failing_builder(url: str) -> int:
    ids: dict[str, int] = {b["name"]: b["builderid"] for b in fetch(f"{url}/api/v2/builders")["builders"]}
    return ids["failing"]


async def listed(master: Master, attempt: int | None = None) -> dict[str, Job]:
    jobs = await Buildbot(master.url).jobs(415, attempt)
    assert [job.job_id for job in jobs] == sorted(job.job_id for job in jobs)
    return {job.name: job for job in jobs}


async def log_of(master: Master, job: Job) -> str:
    with await Buildbot(master.url).log(job.job_id) as file:
        return file.read().decode()


async def test_a_real_master_lists_the_newest_builds_of_a_pull_request(master: Master) -> None:
    jobs = await listed(master)
    assert {name: job.state for name, job in jobs.items()} == {
        "passing": JobState.PASSED,
        "failing": JobState.FAILED,
        "hanging": JobState.TIMED_OUT,
    }
    assert {job.job_id for job in jobs.values()} < master.newest
    assert re.fullmatch(
        r"step 2 \(unit tests\): '.*' \(failure\); attempt 2, after job \d+ \(failed\)", jobs["failing"].note
    )
    assert re.fullmatch(r"step 1 \(e2e\): '.*' \(failure\) \(timed out\)", jobs["hanging"].note)


async def test_a_real_master_tells_a_builders_attempts_apart(master: Master) -> None:
    first, second = await listed(master, 1), await listed(master, 2)
    assert set(first) == {"passing", "failing", "hanging"}
    assert set(second) == {"failing"}
    assert first["failing"].job_id < second["failing"].job_id
    assert {job.job_id for job in (*first.values(), *second.values())} == master.newest


@pytest.mark.parametrize(
    ("builder", "wrote"),
    [
        ("failing", ["running", FAILING_LINE]),
        ("passing", ["E       assert this is no failure"]),
        ("hanging", ["it begins"]),
    ],
)
async def test_a_real_log_is_what_the_step_wrote_and_nothing_of_the_workers_environment(
    master: Master, builder: str, wrote: list[str]
) -> None:
    job = (await listed(master))[builder]
    heading, *lines = [line for line in (await log_of(master, job)).splitlines() if line]
    assert lines == wrote
    assert heading.startswith("--- step ")
    raw = str(fetch(f"{master.url}/api/v2/builds/{job.job_id}/steps/{heading.split()[2]}/logs/stdio/contents"))
    assert raw.count(FAKE_SECRET) == 2  # it is there, in a line of its own too
    assert "PATH=" in raw


def test_the_graph_answers_why_ci_fails_on_a_real_master(master: Master) -> None:
    ran = run_graph("--model", "offline", "--ci", f"buildbot:{master.url}", "Why is CI failing on pull request 415?")
    assert ran.returncode == 0, ran.stderr
    assert FAILING_LINE.strip() in ran.stdout
    assert re.search(r"\bJob \d+ \(failing\b.* failed", ran.stdout)
    assert re.search(r"\bJob \d+ \(hanging\b.*(?<!\()timed[ _]out", ran.stdout)
    assert "passing" not in ran.stdout
    assert FAKE_SECRET not in ran.stdout + ran.stderr
    assert "PATH=" not in ran.stdout + ran.stderr


def test_where_buildbot_cannot_be_installed_the_reason_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"Buildbot cannot be installed here: .*No matching distribution"):
        install(tmp_path / "environment")
