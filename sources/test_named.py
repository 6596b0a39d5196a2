"""A name becomes a job source, or one line that says what would do."""

import subprocess
from pathlib import Path

import pytest

from sources.buildbot import Buildbot
from sources.folder import Folder
from sources.github import GitHub
from sources.named import job_source


def test_each_kind_is_built(tmp_path: Path) -> None:
    assert isinstance(job_source("github:owner/repo", {}), GitHub)
    assert isinstance(job_source(f"folder:{tmp_path}", {}), Folder)
    assert isinstance(job_source("buildbot:http://127.0.0.1:8010", {}), Buildbot)


def test_github_alone_is_the_repository_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["init", "-q"], ["remote", "add", "origin", "git@github.com:owner/repo.git"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.chdir(tmp_path)
    source = job_source("github", {"PATH": "/usr/bin:/bin"})
    assert isinstance(source, GitHub)
    assert source.repository == "owner/repo"


def test_github_alone_outside_a_checkout_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="name the repository: --ci github:OWNER/REPO"):
        job_source("github", {"PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jenkins:http://h", "takes github, github:OWNER/REPO, folder:PATH or buildbot:URL, not 'jenkins:http://h'"),
        ("folder:", "not 'folder:'"),
        ("buildbot", "not 'buildbot'"),
        ("\x1b[31m", r"not '\x1b[31m'"),
        ("folder:/no/such", "there is no such folder or zip"),
        (f"folder:{__file__}", "python -m sources.excerpt FILE"),
        ("github:owner", "a GitHub repository is named OWNER/REPO"),
        ("buildbot:ftp://h", "address"),
    ],
)
def test_what_is_none_is_refused_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        job_source(name, {})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
