"""What a change consists of, by the real git: names, kinds of change, bounds, and programs that must not run."""

import asyncio
import os
import select
import subprocess
from pathlib import Path

import pytest

from bounded.deadlines import now
from reviewing import changes as module
from reviewing.changes import Changes, ReviewError, changes_since, run_git, staged_changes

ODD_NAMES = [
    "two words.py",
    'quo"te.py',
    "é漢.py",
    "line\nbreak.py",
    "-dash.py",
    ":(top)x.py",
    "tab\tbed",
    "a b/b a",
    'é"\n',
]
USER = ("-c", "user.name=n", "-c", "user.email=e@x")


def git(repo: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *USER, *arguments], cwd=repo, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    (repo / "a.py").write_text("one\ntwo\n")
    (repo / "gone.py").write_text("old\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "first")
    return repo


def head(repo: Path) -> str:
    return git(repo, "rev-parse", "HEAD").strip()


async def test_a_working_tree_is_compared_with_head_with_its_new_files(repo: Path) -> None:
    (repo / "a.py").write_text("one\n2\n")
    (repo / "gone.py").unlink()
    (repo / "new.py").write_text("fresh\n")
    (repo / ".gitignore").write_text("*.log\n")
    (repo / "x.log").write_text("ignored\n")
    changes = await changes_since(repo, None)
    assert changes.against == head(repo)
    assert set(changes.files) == {"a.py", "gone.py", "new.py", ".gitignore"}
    assert changes.files["a.py"].splitlines()[-3:] == [" one", "-two", "+2"]
    assert "deleted file" in changes.files["gone.py"]
    assert changes.files["new.py"].splitlines()[-1] == "+fresh"


async def test_an_unchanged_tree_has_no_changes_and_a_base_goes_back_further(repo: Path) -> None:
    first = head(repo)
    (repo / "a.py").write_text("one\n2\n")
    git(repo, "commit", "-q", "-a", "-m", "second")
    assert await changes_since(repo, None) == Changes(files={}, against=head(repo))
    since = await changes_since(repo, "HEAD~1")
    assert (since.against, set(since.files)) == (first, {"a.py"})


async def test_before_the_first_commit_everything_is_new(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("one\n")
    git(tmp_path, "add", "a.py")
    (tmp_path / "b.py").write_text("two\n")
    assert set((await changes_since(tmp_path, None)).files) == {"a.py", "b.py"}
    assert set((await staged_changes(tmp_path)).files) == {"a.py"}


@pytest.mark.parametrize("quoting", ["true", "false"])
async def test_names_of_every_kind_come_through_tracked_and_untracked(quoting: str, repo: Path) -> None:
    git(repo, "config", "core.quotePath", quoting)
    for name in ODD_NAMES:
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text("old\n")
        (repo / f"{name}.new").write_text("fresh\n")
    git(repo, "add", "--", *(f":(literal){name}" for name in ODD_NAMES))
    git(repo, "commit", "-q", "-m", "names")
    for name in ODD_NAMES:
        (repo / name).write_text(f"new of {ODD_NAMES.index(name)}\n")
    changes = await changes_since(repo, None)
    assert set(changes.files) == {*ODD_NAMES, *(f"{name}.new" for name in ODD_NAMES)}
    for index, name in enumerate(ODD_NAMES):
        assert changes.files[name].endswith(f"\n-old\n+new of {index}\n")
        assert changes.files[f"{name}.new"].endswith("\n+fresh\n")


async def test_a_name_that_is_not_utf_8_keeps_its_bytes(repo: Path) -> None:
    (repo / os.fsdecode(b"caf\xe9.py")).write_text("x\n")
    (name,) = (await changes_since(repo, None)).files
    assert os.fsencode(name) == b"caf\xe9.py"


async def test_a_renamed_file_stands_under_its_new_name_with_what_changed_in_it(repo: Path) -> None:
    (repo / "long.py").write_text("".join(f"line {n}\n" for n in range(30)))
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "long")
    git(repo, "mv", "long.py", "moved here.py")
    (repo / "moved here.py").write_text("".join(f"line {n}\n" for n in range(31)))
    ((name, diff),) = (await changes_since(repo, None)).files.items()
    assert name == "moved here.py"
    assert "rename from long.py" in diff
    assert diff.splitlines()[-1] == "+line 30"


async def test_links_modes_binaries_empty_files_and_repositories_inside_are_told_apart(repo: Path) -> None:
    (repo / "a.py").unlink()
    (repo / "a.py").symlink_to("gone.py")  # for git one entry, and two diffs
    (repo / "bin").write_bytes(b"\0\1\2")
    (repo / "empty").touch()
    (repo.parent / "null").write_text("for git the new file, if it follows the link\n")
    (repo / "folder").symlink_to(repo.parent)
    (repo / "gone.py").chmod(0o755)
    (repo / "inner").mkdir()
    git(repo / "inner", "init", "-q")
    (repo / "inner" / "x").write_text("x\n")
    git(repo, "add", "bin")
    files = (await changes_since(repo, None)).files
    assert set(files) == {"a.py", "bin", "empty", "folder", "gone.py", "inner"}
    assert files["a.py"].count("diff --git ") == 2
    assert "new mode 100755" in files["gone.py"]
    assert "new file mode" in files["empty"]
    assert [files[name] for name in ("bin", "folder", "inner")] == ["", "", ""]


async def test_a_submodule_that_moved_is_one_change_and_nothing_runs_inside_it(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(repo), "repo/sub")
    git(repo, "add", "sub")
    git(repo, "commit", "-q", "-m", "with sub")
    canary = hostile(repo / "sub", tmp_path)
    git(repo, "-C", "sub", "-c", "core.fsmonitor=", "commit", "-q", "--allow-empty", "-m", "moved", "--no-verify")
    canary.unlink(missing_ok=True)
    files = (await changes_since(repo, None)).files
    assert "Subproject commit" in files["sub"]
    assert not canary.exists()


async def test_a_part_of_a_repository_is_reviewed_with_paths_of_its_own(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "part").mkdir()
    (repo / "part" / "in.py").write_text("x\n")
    git(repo, "add", "part")
    (repo / "part" / "new.py").write_text("x\n")
    (repo / "a.py").write_text("changed elsewhere\n")
    assert set((await changes_since(repo / "part", None)).files) == {"in.py", "new.py"}
    monkeypatch.chdir(repo.parent)
    assert set((await changes_since(Path("repo/part"), None)).files) == {"in.py", "new.py"}


async def test_what_is_staged_is_taken_and_what_is_not_is_left(repo: Path) -> None:
    (repo / "gone.py").write_text("staged\n")
    git(repo, "add", "gone.py")
    (repo / "a.py").write_text("not staged\n")
    (repo / "new.py").write_text("untracked\n")
    changes = await staged_changes(repo)
    assert (set(changes.files), changes.against) == ({"gone.py"}, head(repo))


async def test_a_staged_file_that_was_changed_again_is_an_error_since_a_review_would_read_the_other(repo: Path) -> None:
    (repo / "a.py").write_text("staged\n")
    git(repo, "add", "a.py")
    (repo / "a.py").write_text("changed again\n")
    with pytest.raises(ReviewError, match=r"a\.py is not what stands in the file"):
        await staged_changes(repo)


@pytest.mark.parametrize("base", ["", "-p", "--output=x", "nope", "HEAD~9", "a\0b", "HEAD:a.py", "\x1b[31m"])
async def test_a_base_that_is_no_commit_is_an_error_that_names_it(base: str, repo: Path) -> None:
    with pytest.raises(ReviewError) as caught:
        await changes_since(repo, base)
    assert "\x1b" not in str(caught.value)
    assert "commit" in str(caught.value)
    assert not (repo / "x").exists()


async def test_no_repository_no_folder_and_no_git_are_errors_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ReviewError, match="not a git repository"):
        await changes_since(tmp_path, None)
    with pytest.raises(ReviewError, match="is no folder"):
        await changes_since(tmp_path / "missing", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReviewError, match="git is not installed"):
        await changes_since(tmp_path, None)


async def test_an_unfinished_merge_shows_its_markers_and_has_nothing_staged(repo: Path) -> None:
    git(repo, "checkout", "-q", "-b", "other")
    (repo / "a.py").write_text("theirs\n")
    git(repo, "commit", "-q", "-a", "-m", "theirs")
    git(repo, "checkout", "-q", "main")
    (repo / "a.py").write_text("ours\n")
    git(repo, "commit", "-q", "-a", "-m", "ours")
    with pytest.raises(subprocess.CalledProcessError):
        git(repo, "merge", "-q", "other")
    assert "+<<<<<<< HEAD\n" in (await changes_since(repo, None)).files["a.py"]
    with pytest.raises(ReviewError, match=r"merge of a\.py is not finished"):
        await staged_changes(repo)


async def test_more_than_a_review_takes_is_an_error_that_says_what_to_do(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        (repo / f"{number}.py").write_text("x\n" * 100)
    git(repo, "add", "-A")
    monkeypatch.setattr(module, "MAX_DIFF_BYTES", 1_000)
    with pytest.raises(ReviewError, match="too large for a review"):
        await changes_since(repo, None)
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_CHANGED", 11)
    with pytest.raises(ReviewError, match="12 files have changed"):
        await changes_since(repo, None)


def hostile(repo: Path, tmp_path: Path) -> Path:
    """Make the repository's configuration and attributes name a program wherever they can; its canary is returned."""
    canary, program = tmp_path / "canary", tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {canary}\ncat\n')
    program.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir(exist_ok=True)
    for hook in ("post-index-change", "reference-transaction", "pre-commit"):
        (hooks / hook).write_text(program.read_text())
        (hooks / hook).chmod(0o755)
    for name in ("core.fsmonitor", "core.pager", "pager.diff", "pager.grep", "core.sshCommand", "diff.external",
                 "diff.evil.command", "diff.evil.textconv", "filter.evil.clean", "filter.evil.smudge",
                 "filter.e=v.il.clean"):  # fmt: skip
        git(repo, "config", name, f"{program} {name}")
    git(repo, "config", "filter.evil.required", "true")
    git(repo, "config", "core.hooksPath", str(hooks))
    attributes = Path(git(repo, "rev-parse", "--absolute-git-dir").strip()) / "info" / "attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text("* filter=evil diff=evil\n*.txt filter=e=v.il\n")
    return canary


async def test_no_program_runs_that_a_hostile_repository_names(repo: Path, tmp_path: Path) -> None:
    (repo / "b.txt").write_text("text\n")
    git(repo, "add", "b.txt")
    git(repo, "commit", "-q", "-m", "text")
    (repo / "a.py").write_text("one\ntwo\nthree\n")
    (repo / "b.txt").write_text("changed\n")
    (repo / "new.txt").write_text("fresh\n")
    canary = hostile(repo, tmp_path)
    git(repo, "diff", "HEAD")
    ran = canary.read_text()
    assert all(name in ran for name in ("core.fsmonitor", "filter.evil.clean", "diff.evil.command"))
    canary.unlink()
    changes = await changes_since(repo, None)
    assert changes.files["a.py"].splitlines()[-1] == "+three"
    assert set(changes.files) == {"a.py", "b.txt", "new.txt"}
    git(repo, "-c", "core.fsmonitor=", "-c", "filter.evil.clean=cat", "-c", f"core.hooksPath={os.devnull}", "add", ".")
    canary.unlink(missing_ok=True)
    assert set((await staged_changes(repo)).files) == {"a.py", "b.txt", "new.txt"}
    assert not canary.exists()


async def test_a_repository_cannot_say_that_it_stands_elsewhere(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("not for a review\n")
    git(repo, "config", "core.worktree", str(tmp_path))
    assert await changes_since(repo, None) == Changes(files={}, against=head(repo))


async def test_a_program_named_git_inside_the_repository_is_not_taken_for_it(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "git").write_text(f"#!/bin/sh\ntouch {repo}/canary\n")
    (repo / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(repo)
    assert set((await changes_since(repo, None)).files) == {"git"}


async def test_an_outer_environment_does_not_reach_git(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    (repo / "a.py").write_text("one\n")
    assert set((await changes_since(repo, None)).files) == {"a.py"}


@pytest.fixture
def wedged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git that never ends, with a child that neither does; both hold the returned pipe open as long as they live."""
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec 3>{pipe}\necho started >&3\nsleep 600 &\nsleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize("turns", [2, 50], ids=["while it is being started", "once it runs"])
async def test_a_cancelled_git_is_killed_with_its_children(turns: int, wedged: Path, tmp_path: Path) -> None:
    reader = os.open(wedged, os.O_RDONLY | os.O_NONBLOCK)
    running = asyncio.create_task(run_git(tmp_path, "grep", at_most=100))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert select.select([reader], [], [], 5)[0]  # the loop stands still meanwhile
    assert os.read(reader, 100) == b"started\n"
    before = now()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert now() - before < 5
    assert select.select([reader], [], [], 5)[0]
    assert os.read(reader, 100) == b""  # no one holds it any more
    os.close(reader)


@pytest.mark.slow
async def test_a_git_that_writes_without_end_is_killed_at_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nyes 'far too long a line' | cat\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ran = await run_git(tmp_path, "grep", at_most=10_000)
    assert (ran.cut, len(ran.output)) == (True, 10_000)
    assert ran.status == -9
