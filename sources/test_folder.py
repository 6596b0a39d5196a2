"""The folder as a source: which files are jobs, how they stand, what is read of them, and what is never opened."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bounded.calls import Call, Ending, bounded_call, guarded
from conftest import ROOT, under_file_modes
from sources.folder import MAX_DEPTH, MAX_FILES, STATE_BYTES, STATE_TOTAL, Folder
from sources.jobs import Fault, Job, JobSource, JobState, SourceError

T = TypeVar("T")

FAILING = "E   assert 1 == 2\nFAILED test_a.py::test_b - assert 1 == 2\n=== 1 failed, 1 passed in 0.1s ===\n"
PASSING = "collected 2 items\n=== 2 passed in 0.1s ===\n"
REPORT = (
    '<testsuite><testcase name="a"/><testcase name="b"><failure message="boom">b.py:3</failure></testcase></testsuite>'
)


async def bounded(body: Callable[[], Awaitable[T]]) -> T:
    """What the graph does around a tool's body."""
    call = Call()
    value = await bounded_call(call, lambda: guarded(body), bound_s=10.0, on_late=lambda late: None)
    if call.failure is not None:
        raise call.failure
    assert value is not None
    return value


async def jobs(source: JobSource) -> Sequence[Job]:
    return await bounded(lambda: source.jobs(None))


async def names(source: JobSource) -> list[str]:
    return [job.name for job in await jobs(source)]


async def text(source: JobSource, job_id: int) -> str:
    with await bounded(lambda: source.log(job_id)) as log:
        return log.read().decode(errors="replace")


async def refusal(source: JobSource) -> SourceError:
    with pytest.raises(SourceError) as refused:
        await jobs(source)
    return refused.value


def folder(root: Path, files: Mapping[str, str | bytes]) -> Folder:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Folder(root)


def zipped(root: Path, files: Mapping[str, str | bytes]) -> Folder:
    path = root / "logs.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return Folder(path)


both = pytest.mark.parametrize("made", [folder, zipped])
Made = Callable[[Path, Mapping[str, str | bytes]], Folder]


@both
async def test_logs_and_reports_are_jobs_in_natural_order(tmp_path: Path, made: Made) -> None:
    source = made(
        tmp_path,
        {
            "job-10.log": PASSING,
            "job-9.log": FAILING,
            "reports/unit.xml": REPORT,
            "old.log.1": "",
            "stdio": PASSING,
            "tool": b"\x7fELF\0\0",
            "picture.png": b"\x89PNG",
            "coverage.xml": "<coverage/>",
            ".git/x.log": FAILING,
            ".hidden.log": FAILING,
        },
    )
    assert await jobs(source) == [
        Job(job_id=1, name="job-9.log", state=JobState.FAILED),
        Job(job_id=2, name="job-10.log", state=JobState.UNKNOWN, note="no failure found in it"),
        Job(job_id=3, name="old.log.1", state=JobState.UNKNOWN, note="it is empty"),
        Job(job_id=4, name="reports/unit.xml", state=JobState.FAILED, note="1 of 2 failed: b"),
        Job(job_id=5, name="stdio", state=JobState.UNKNOWN, note="no failure found in it"),
    ]
    assert await text(source, 1) == FAILING
    assert await text(source, 4) == "1 of 2 failed: b\n\nFAILED b - boom\nb.py:3\n"


@both
async def test_of_a_run_the_jobs_are_listed_and_not_each_step_once_more(tmp_path: Path, made: Made) -> None:
    long = "matrix (" + "x" * 90
    source = made(
        tmp_path,
        {
            "run/1_lint.txt": PASSING,
            "run/lint/1_Set up job.txt": "",
            "run/lint/10_Run ruff.txt": PASSING,
            "run/lint/system.txt": "",
            "run/0_unit tests.txt": FAILING,
            "run/unit tests/2_Run pytest.txt": FAILING,
            f"run/2_{long}.txt": PASSING,
            f"run/{long[:60]}/1_Set up job.txt": "",
            "run/no file of its own/1_Set up job.txt": FAILING,
            "run/-3_legacy.txt": PASSING,
            "run/notes/read me.txt": "",
        },
    )
    assert await names(source) == [
        "run/unit tests",
        "run/lint",
        f"run/{long}",
        "run/-3_legacy.txt",
        "run/no file of its own/1_Set up job.txt",
        "run/notes/read me.txt",
    ]
    assert await text(source, 1) == FAILING


@both
async def test_names_that_no_encoding_holds_and_long_numbers_are_listed(tmp_path: Path, made: Made) -> None:
    source = made(tmp_path, {"é 中.log": PASSING, "9" * 200 + ".log": PASSING, "8" * 200 + ".log": PASSING})
    assert await names(source) == ["8" * 200 + ".log", "9" * 200 + ".log", "é 中.log"]
    if made is folder:
        (tmp_path / os.fsdecode(b"\xff.log")).write_text(FAILING)
        assert "\udcff.log" in await names(Folder(tmp_path))


async def test_ids_stay_while_files_come_and_go(tmp_path: Path) -> None:
    source = folder(tmp_path, {"b.log": PASSING, "c.log": FAILING})
    assert await names(source) == ["b.log", "c.log"]
    folder(tmp_path, {"a.log": PASSING})
    (tmp_path / "b.log").unlink()
    assert await text(source, 2) == FAILING
    with pytest.raises(SourceError, match=r"not_found: there is no b\.log"):
        await text(source, 1)


async def test_a_log_can_be_asked_for_without_a_listing(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a.log": FAILING})
    assert await text(source, 1) == FAILING
    for number in (0, 2, -1):
        with pytest.raises(SourceError, match=f"there is no job {number}; .* has 1 to 1"):
            await text(source, number)


async def test_a_folder_takes_no_notice_of_the_pull_request_and_has_one_attempt(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a.log": PASSING})
    assert await bounded(lambda: source.jobs(7, 1)) == await jobs(source)
    with pytest.raises(SourceError, match="there is no attempt 2"):
        await bounded(lambda: source.jobs(None, 2))
    assert source.timeouts == {"list_ci_jobs": 20.0, "fetch_job_log": 20.0}


async def test_what_is_not_there_or_empty_says_so(tmp_path: Path) -> None:
    missing = await refusal(Folder(tmp_path / "nowhere"))
    assert str(missing) == f"not_found: there is no {tmp_path}/nowhere"
    empty = await refusal(folder(tmp_path, {"picture.png": ""}))
    assert str(empty) == f"not_found: {tmp_path} holds no logs (*.log, *.txt, ...) and no JUnit XML (*.xml)"
    assert {missing.fault, empty.fault} == {Fault.NOT_FOUND}
    assert (await refusal(zipped(tmp_path, {"picture.png": ""}))).fault is Fault.NOT_FOUND
    assert (await refusal(Folder(tmp_path / "picture.png"))).fault is Fault.UNREADABLE
    assert (await refusal(Folder("a\0b"))).fault is Fault.UNREADABLE
    assert (await refusal(Folder("/dev/zero"))).fault is Fault.UNREADABLE


async def test_a_zip_that_climbs_out_is_refused_as_a_whole(tmp_path: Path) -> None:
    source = zipped(tmp_path, {"a.log": FAILING, "../b.log": FAILING})
    for asked in (lambda: source.jobs(None), lambda: source.log(1)):
        with pytest.raises(SourceError, match="the zip is refused"):
            await bounded(asked)


async def test_links_pipes_and_sockets_are_entries_that_are_never_opened(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    source = folder(tmp_path / "logs", {"a.log": PASSING})
    folder(outside, {"secret.log": FAILING})
    logs = tmp_path / "logs"
    (logs / "link.log").symlink_to(outside / "secret.log")
    (logs / "loop.log").symlink_to("loop.log")
    (logs / "linked").symlink_to(outside)
    os.mkfifo(logs / "pipe.log")
    os.mknod(logs / "s.log", stat.S_IFSOCK | 0o600)
    (logs / "folder.log").mkdir()
    found = {job.name: job.note for job in await jobs(source)}
    assert list(found) == ["a.log", "link.log", "linked", "loop.log", "pipe.log", "s.log"]
    assert found["link.log"] == "unreadable: link.log is a link, and links are not followed"
    assert found["pipe.log"] == "unreadable: pipe.log is no regular file"
    for job_id in range(2, 7):
        with pytest.raises(SourceError) as refused:
            await text(source, job_id)
        assert refused.value.fault is Fault.UNREADABLE


async def test_a_log_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    source = folder(tmp_path / "logs", {"a.log": PASSING})
    await jobs(source)
    (tmp_path / "logs" / "a.log").unlink()
    folder(tmp_path, {"b.log": FAILING})
    (tmp_path / "logs" / "a.log").symlink_to(tmp_path / "b.log")
    with pytest.raises(SourceError, match="cannot be read"):
        await text(source, 1)


async def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    source = folder(tmp_path / "logs", {"sub/a.log": PASSING})
    await jobs(source)
    (tmp_path / "logs" / "sub" / "a.log").unlink()
    (tmp_path / "logs" / "sub").rmdir()
    folder(tmp_path / "other", {"a.log": FAILING})
    (tmp_path / "logs" / "sub").symlink_to(tmp_path / "other")
    with pytest.raises(SourceError, match="cannot be read"):
        await text(source, 1)


async def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    folder(tmp_path / "logs", {"a.log": FAILING})
    (tmp_path / "latest").symlink_to("logs")
    assert await text(Folder(tmp_path / "latest"), 1) == FAILING


@pytest.mark.slow
def test_what_may_not_be_read_is_an_entry_with_its_reason(tmp_path: Path) -> None:
    folder(tmp_path, {"a.log": FAILING, "b.log": PASSING, "c/d.log": PASSING})
    (tmp_path / "b.log").chmod(0)
    (tmp_path / "c").chmod(0)
    script = "import asyncio, sys; from sources.test_folder import jobs; from sources.folder import Folder\n"
    script += (
        "print(*((job.name, str(job.state), job.note) for job in asyncio.run(jobs(Folder(sys.argv[1])))), sep='\\n')"
    )
    command = under_file_modes([sys.executable, "-c", script, str(tmp_path)])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (tmp_path / "c").chmod(0o700)
    assert done.stdout.splitlines() == [
        "('a.log', 'failed', '')",
        "('b.log', 'unknown', 'forbidden: b.log cannot be read: Permission denied')",
        "('c', 'unknown', 'forbidden: c cannot be read: Permission denied')",
    ]


@both
async def test_a_report_that_is_refused_hides_no_other_file(tmp_path: Path, made: Made) -> None:
    bomb = '<!DOCTYPE t [<!ENTITY a "aaaa">]><testsuite/>'
    source = made(tmp_path, {"a.xml": bomb, "b.xml": "no xml", "c.log": FAILING})
    first, second, third = await jobs(source)
    assert first.note == "unreadable: the report is refused: it declares a document type or entities"
    assert second.note.startswith("unreadable: it is no XML")
    assert (first.state, second.state, third.state) == (JobState.UNKNOWN, JobState.UNKNOWN, JobState.FAILED)
    with pytest.raises(SourceError, match="it declares a document type or entities"):
        await text(source, 1)


async def test_of_a_large_log_the_end_is_looked_at_and_the_whole_is_read(tmp_path: Path) -> None:
    filler = b"fine\n" * (STATE_BYTES // 5 + 1)
    source = folder(tmp_path, {"a.log": FAILING.encode() + filler, "b.log": filler + FAILING.encode()})
    first, second = await jobs(source)
    assert (first.state, first.note) == (JobState.UNKNOWN, "no failure found in its last 1 MiB")
    assert second.state is JobState.FAILED
    assert (await text(source, 1)).startswith(FAILING)


async def test_what_is_too_much_for_a_listing_is_listed_without_being_looked_at(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a.log": FAILING, "b.xml": "", "c.log": FAILING})
    os.truncate(tmp_path / "b.xml", STATE_TOTAL + 1)
    first, second, third = await jobs(source)
    assert (second.state, second.note) == (JobState.UNKNOWN, "not looked at: it is more than a listing may read")
    assert (first.state, third.state) == (JobState.FAILED, JobState.FAILED)
    with pytest.raises(SourceError, match="the report is larger than 32 MiB"):
        await text(source, 2)


async def test_too_many_files_and_too_many_folders_are_refused(tmp_path: Path) -> None:
    many = await refusal(folder(tmp_path / "many", {f"{n}.log": "" for n in range(MAX_FILES + 1)}))
    assert str(many) == f"too_large: {tmp_path}/many holds 1,001 logs and reports; name a part of it"
    deep = await refusal(folder(tmp_path / "deep", {"/".join("a" * (MAX_DEPTH + 1)) + "/b.log": ""}))
    assert "folders more than 12 deep; name the part of it with the logs" in str(deep)
    assert {many.fault, deep.fault} == {Fault.TOO_LARGE}


async def test_a_disk_that_does_not_answer_is_left_at_the_bound(tmp_path: Path) -> None:
    source, call = folder(tmp_path, {"a.log": PASSING}), Call()
    with source._listing:
        work = bounded_call(call, lambda: guarded(lambda: source.jobs(None)), bound_s=0.05, on_late=lambda late: None)
        assert await work is None
    assert call.ending is Ending.ABANDONED


@given(st.binary() | st.text().map(lambda text: f"<testsuite>{text}".encode()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
def test_any_bytes_are_listed_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "any.zip").write_bytes(content)

    async def ask() -> None:
        for source in (Folder(tmp_path / "any.zip"), folder(tmp_path / "logs", {"a.xml": content, "b.log": content})):
            with contextlib.suppress(SourceError):
                for job in await jobs(source):
                    with contextlib.suppress(SourceError):
                        await text(source, job.job_id)

    asyncio.run(ask())
