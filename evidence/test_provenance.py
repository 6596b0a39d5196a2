"""Where a record comes from: the sources that ran, as they are and as committed, and nothing about the machine."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence import provenance
from evidence.folder import RunFolder
from evidence.provenance import LOCK, ROOT, changed_sources, public, record_provenance, sources
from evidence.verify import sha256

SECRET = "fake-secret-0123"
USER, HOST = "jane-doe", "buildbox7.example.org"

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `tmp_path`, which is named for the user as well."""
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of some sources, which is taken for the project's own."""
    root = tmp_path / "tree"
    for name in ("graph.py", "bounded/run.py", "bounded/deeper/no.py", ".venv/no.py", LOCK, "README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    monkeypatch.setattr(provenance, "ROOT", root)
    return root


def git(tree: Path, *arguments: str) -> str:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ["PATH"]}
    names = [part for key in ("author", "committer") for part in ("-c", f"{key}.name=x", "-c", f"{key}.email=x@y")]
    command = ["git", "-C", str(tree), *names, *arguments]
    return subprocess.run(command, env=own, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


@pytest.fixture
def committed(tree: Path) -> Path:
    """That tree, with all of it committed."""
    git(tree, "init", "-q")
    git(tree, "add", "-A", "-f")
    git(tree, "commit", "-q", "-m", "all")
    return tree


def record(parent: Path, *arguments: str, **facts: Any) -> Path:
    secrets = frozenset({SECRET})
    folder = RunFolder(parent / "runs", "question", model="offline", endpoint="in_process", secrets=secrets)
    record_provenance(folder, ["graph.py", *arguments], **facts)
    return folder.path


def recorded(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "provenance.json").read_bytes()))


def copies(folder: Path) -> list[str]:
    """The sources that were copied, each with the recorded digest."""
    about = recorded(folder)["sources"]
    names = [path.relative_to(folder / "sources").as_posix() for path in folder.rglob("sources/**/*") if path.is_file()]
    for name in names:
        assert sha256((folder / "sources" / name).read_bytes()) == about[name]
    return sorted(names)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/x/runs", "<path>"),
        ("--evidence=/home/x/runs", "--evidence=<path>"),
        ("scripted:/home/x/script.json", "scripted:<path>"),
        ("file:///home/x/a.json", "<path>"),
        ("FILE:/home/x/a.json", "<path>"),
        ("~/runs", "<path>"),
        ("~jane/runs", "<path>"),
        ("~jane", "<path>"),
        ("see ~jane and /etc/passwd.", "see <path> and <path>"),
        (r"C:\Users\x\runs", "<path>"),
        ("C:/Users/x/runs", "<path>"),
        (r"\\server\share\x", r"\<path>"),
        ("A=/a:/b", "A=<path>:<path>"),
        ("'/home/x/a'", "'<path>'"),
        ("../runs", "../runs"),
        ("runs/today", "runs/today"),
        ("a / b", "a / b"),
        ("and/or", "and/or"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("http://127.0.0.1:11434", "http://127.0.0.1:11434"),
        ("Why is CI failing on pull request 415?", "Why is CI failing on pull request 415?"),
        ("gemma4:e2b", "gemma4:e2b"),
    ],
)
def test_absolute_paths_are_not_shown(text: str, shown: str) -> None:
    assert public(text) == shown


@pytest.mark.parametrize(
    "text", ["/home/the family/runs", "--evidence=/mnt/my disk/x", "/home/o'brien/x", "/srv/a,b/c"]
)
def test_an_argument_that_is_a_path_is_not_shown_in_part(text: str) -> None:
    for part in ("family", "disk", "brien", "b/c"):
        assert part not in public(text)


@pytest.mark.parametrize(
    "text",
    [
        USER,
        f"{USER}@{HOST}",
        f"../{USER}/runs",
        f"I am {USER}.",
        HOST,
        f"http://{HOST}:11434",
        "http://buildbox7:11434",
    ],
)
def test_neither_user_nor_host_is_named(text: str) -> None:
    shown = public(text)
    assert USER not in shown
    assert "buildbox7" not in shown


@pytest.mark.parametrize("user", ["root", "ci", "user", ""])
def test_a_user_name_that_is_a_word_changes_no_question(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, user)
    assert public("What is the root cause, user? ci") == "What is the root cause, user? ci"


def test_the_record_of_the_real_tree_names_its_sources_and_not_its_machine(tmp_path: Path) -> None:
    folder = record(tmp_path, "--evidence", str(tmp_path), f"use {SECRET} as {USER}", model="scripted:/x/y", no=None)
    text, about = (folder / "provenance.json").read_text(encoding="ascii"), recorded(folder)
    assert about["command"] == ["graph.py", "--evidence", "<path>", "use [masked] as <name>"]
    assert (about["model"], about["no"]) == ("scripted:<path>", None)
    for private in (str(tmp_path), str(ROOT), str(Path.home()), sys.prefix, USER, HOST, SECRET):
        assert private not in text
    assert about["sources"]["evidence/provenance.py"] == sha256(Path(provenance.__file__).read_bytes())
    assert about["sources"][LOCK] == sha256((ROOT / LOCK).read_bytes())
    assert about["packages"]["pytest"] == pytest.__version__
    assert about["python"].split()[1] == ".".join(map(str, sys.version_info[:3]))


def test_the_sources_are_the_projects_own_and_the_lock(tree: Path) -> None:
    assert sources() == ["bounded/run.py", "graph.py", LOCK]


def test_what_an_editor_left_does_not_keep_a_record_from_being_made(tree: Path, tmp_path: Path) -> None:
    """Emacs marks a file that it has open with a link to nowhere."""
    for name in (".#graph.py", "bounded/.#run.py"):
        (tree / name).symlink_to("someone@somewhere.42")
    assert list(recorded(record(tmp_path))["sources"]) == ["bounded/run.py", "graph.py", LOCK]


@needs_git
def test_a_tree_as_committed_is_clean_and_copies_nothing(committed: Path, tmp_path: Path) -> None:
    folder = record(tmp_path)
    about = recorded(folder)
    assert (about["commit"], about["dirty"], copies(folder)) == (git(committed, "rev-parse", "HEAD"), False, [])
    assert about["sources"]["bounded/run.py"] == sha256(b"# bounded/run.py\n")


def edit(tree: Path) -> None:
    (tree / "bounded" / "run.py").write_text("# another\n")


def stage(tree: Path) -> None:
    edit(tree)
    git(tree, "add", "-A")


def add(tree: Path) -> None:
    (tree / "bounded" / "new.py").write_text("# new\n")


def ignore(tree: Path) -> None:
    add(tree)
    (tree / ".git" / "info" / "exclude").write_text("new.py\n")


def rename(tree: Path) -> None:
    git(tree, "mv", "bounded/run.py", "bounded/\u00e9t\u00e9.py")


@needs_git
@pytest.mark.parametrize(
    ("change", "copied"),
    [
        (edit, ["bounded/run.py"]),
        (stage, ["bounded/run.py"]),
        (add, ["bounded/new.py"]),
        (ignore, ["bounded/new.py"]),
        (rename, ["bounded/\u00e9t\u00e9.py"]),
        (lambda tree: (tree / LOCK).write_text("other\n"), [LOCK]),
    ],
    ids=["edited", "staged", "added", "ignored", "renamed", "lock"],
)
def test_a_dirty_tree_copies_exactly_what_is_not_as_committed(
    change: Callable[[Path], object], copied: list[str], committed: Path, tmp_path: Path
) -> None:
    change(committed)
    folder = record(tmp_path)
    assert (recorded(folder)["dirty"], copies(folder)) == (True, copied)


@needs_git
@pytest.mark.parametrize(
    "secret", [SECRET, f"'AKIA{'X' * 16}'", f"'AIza{'x' * 35}'"], ids=["of the environment", "AWS", "Google"]
)
def test_a_changed_source_in_which_a_secret_stands_is_named_and_not_copied(
    secret: str, committed: Path, tmp_path: Path
) -> None:
    text = f"fake = {secret}\n"
    (committed / "graph.py").write_text(text)
    add(committed)
    folder = record(tmp_path)
    about = recorded(folder)
    assert (about["not_copied_for_a_secret"], copies(folder)) == (["graph.py"], ["bounded/new.py"])
    assert about["sources"]["graph.py"] == sha256(text.encode())
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert [path.name for path in written if secret.strip("'").encode() in path.read_bytes()] == []


@needs_git
def test_a_source_that_is_gone_makes_the_tree_dirty(committed: Path, tmp_path: Path) -> None:
    (committed / "bounded" / "run.py").unlink()
    folder = record(tmp_path)
    assert (recorded(folder)["dirty"], copies(folder)) == (True, [])


@needs_git
def test_what_is_no_source_is_not_copied(committed: Path, tmp_path: Path) -> None:
    (committed / "notes.txt").write_text("private")
    (committed / "bounded" / "deeper" / "no.py").write_text("private")
    assert copies(record(tmp_path)) == []


@needs_git
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text")
def test_a_file_name_that_is_no_text_stops_nothing(committed: Path, tmp_path: Path) -> None:
    with open(os.fsencode(committed) + b"/\xff.txt", "w"):
        pass
    edit(committed)
    assert copies(record(tmp_path)) == ["bounded/run.py"]


@needs_git
def test_the_environments_git_settings_mislead_no_one(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(committed, "rev-parse", "HEAD")
    other = Path(shutil.copytree(ROOT / "evidence", tmp_path / "other"))
    git(other, "init", "-q")
    for name, value in (("DIR", other / ".git"), ("WORK_TREE", other), ("INDEX_FILE", other / "index")):
        monkeypatch.setenv(f"GIT_{name}", str(value))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    edit(committed)
    folder = record(tmp_path)
    assert (recorded(folder)["commit"], copies(folder)) == (head, ["bounded/run.py"])


@needs_git
@pytest.mark.parametrize("ignored", [False, True], ids=["untracked", "ignored"])
def test_a_tree_inside_anothers_repository_is_not_taken_for_committed(
    ignored: bool, tree: Path, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("tree/\n" if ignored else "")
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "-q", "-m", "not ours")
    folder = record(tmp_path)
    assert recorded(folder)["dirty"] is not False
    assert copies(folder) == sources()


@needs_git
def test_a_tree_below_the_root_of_its_repository_is_compared_as_it_lies(tree: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A", "-f", "tree")
    git(tmp_path, "commit", "-q", "-m", "ours")
    assert changed_sources() == []
    edit(tree)
    assert changed_sources() == ["bounded/run.py"]


@needs_git
def test_a_repository_without_a_commit_has_none(tree: Path, tmp_path: Path) -> None:
    git(tree, "init", "-q")
    folder = record(tmp_path)
    assert (recorded(folder)["commit"], recorded(folder)["dirty"], copies(folder)) == (None, None, sources())


def test_without_git_everything_is_copied_and_nothing_claimed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = record(tmp_path)
    assert (recorded(folder)["commit"], recorded(folder)["dirty"]) == (None, None)
    assert copies(folder) == ["bounded/run.py", "graph.py", LOCK]


@pytest.mark.slow
def test_it_works_in_a_copy_that_no_repository_knows(tmp_path: Path) -> None:
    for package in ("bounded", "evidence"):
        shutil.copytree(ROOT / package, tmp_path / "copy" / package, ignore=shutil.ignore_patterns("test_*", "__pyc*"))
    shutil.copy(ROOT / LOCK, tmp_path / "copy")
    script = """
import pathlib, sys
from evidence.folder import RunFolder
from evidence.provenance import record_provenance
folder = RunFolder(pathlib.Path("runs"), "x", model="m", endpoint="in_process", secrets=frozenset())
record_provenance(folder, sys.argv)
print(folder.path)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True, timeout=30, check=True)
    folder = tmp_path / "copy" / done.stdout.strip()
    assert done.stderr == ""
    about = recorded(folder)
    assert {"evidence/verify.py", "evidence/folder.py"} <= set(copies(folder))
    assert sorted([*copies(folder), *about["not_copied_for_a_secret"]]) == sorted(about["sources"])
    assert about["commit"] is None
