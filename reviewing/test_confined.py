"""Files below one root: whatever a path, a link or a swap aims at, nothing outside is opened and nothing waits."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from reviewing.changes import ReviewError
from reviewing.confined import MAX_FILE_BYTES, open_inside, parts_of, read_inside, resolve_inside


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside.txt").write_text("not for a review")
    inside = tmp_path / "root"
    (inside / "src").mkdir(parents=True)
    (inside / "src" / "a.py").write_text("a = 1\n")
    return inside


@pytest.mark.parametrize(
    "path",
    ["", ".", "/etc/passwd", "..", "../outside.txt", "src/../../outside.txt", "src/..", "~", "~/x", "a\0b", "\ud800",
     ".git/config", "src/.GIT/x", "x" * 5_000],
)  # fmt: skip
def test_a_path_that_is_not_inside_is_refused_with_what_is_right(path: str) -> None:
    with pytest.raises(ReviewError, match="relative to the root"):
        parts_of(path)


@pytest.mark.parametrize("path", ["src/a.py", "./src//a.py", "src/./a.py"])
def test_a_path_inside_is_brought_to_one_form(path: str, root: Path) -> None:
    assert resolve_inside(root, path) == "src/a.py"
    assert read_inside(root, "src/a.py") == b"a = 1\n"


def test_a_link_that_stays_inside_is_followed_and_named_by_where_it_leads(root: Path) -> None:
    (root / "also").symlink_to("src")
    assert resolve_inside(root, "also/a.py") == "src/a.py"


@pytest.mark.parametrize("link", ["leaf", "folder/outside.txt", "by/way/of/outside.txt"])
def test_a_link_that_leads_out_is_refused_whichever_part_it_is(link: str, root: Path) -> None:
    (root / "leaf").symlink_to("../outside.txt")
    (root / "folder").symlink_to(root.parent)
    (root / "by" / "way").mkdir(parents=True)
    (root / "by" / "way" / "of").symlink_to("../../folder")
    assert (root / link).read_text() == "not for a review"
    with pytest.raises(ReviewError, match="leads out"):
        resolve_inside(root, link)


def test_a_link_into_gits_own_folder_and_a_link_to_itself_are_refused(root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("[remote]")
    (root / "config").symlink_to(".git/config")
    (root / "loop").symlink_to("loop")
    with pytest.raises(ReviewError, match="git's own"):
        resolve_inside(root, "config")
    with pytest.raises(ReviewError, match="only a regular file"):
        read_inside(root, resolve_inside(root, "loop"))


def test_a_file_that_becomes_a_link_between_check_and_open_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, swapped = os.open, []

    def swap_then_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "a.py":  # the check is over, nothing is open yet
            (root / "src" / "a.py").unlink()
            (root / "src" / "a.py").symlink_to(root.parent / "outside.txt")
            swapped.append(path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap_then_open)
    with pytest.raises(ReviewError, match="cannot be read"):
        read_inside(root, resolve_inside(root, "src/a.py"))
    assert swapped


def test_a_folder_that_becomes_a_link_between_check_and_open_is_not_followed(root: Path) -> None:
    name = resolve_inside(root, "src/a.py")
    (root / "src").rename(root.parent / "src")
    (root / "src").symlink_to(root.parent / "src")
    assert (root / name).read_text() == "a = 1\n"
    with pytest.raises(ReviewError, match="there is no file"):
        read_inside(root, name)


def test_pipes_sockets_devices_and_folders_are_refused_without_waiting(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "s"))
        for name in ("pipe", "s", "src"):
            with pytest.raises(ReviewError, match="only a regular file"):
                read_inside(root, name)
    with pytest.raises(ReviewError, match="only a regular file"):
        open_inside(Path("/dev"), ["null"])


def test_a_file_that_becomes_a_pipe_between_check_and_open_is_refused_without_waiting(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def swap_then_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "a.py":
            (root / "src" / "a.py").unlink()
            os.mkfifo(root / "src" / "a.py")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap_then_open)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReviewError, match="only a regular file"):
        read_inside(root, "src/a.py")
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_is_left_open_by_a_refusal(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("src", "missing", "missing/x", "src/a.py/x", "src/missing"):
        with pytest.raises(ReviewError):
            read_inside(root, name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_is_read_up_to_the_limit_and_refused_above_it(root: Path) -> None:
    (root / "fits").write_bytes(b"x" * MAX_FILE_BYTES)
    (root / "over").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    assert len(read_inside(root, "fits")) == MAX_FILE_BYTES
    with pytest.raises(ReviewError, match="over 2,000,000 bytes"):
        read_inside(root, "over")


def test_a_file_that_is_written_to_while_it_is_read_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fstat, seen = os.fstat, []

    def append_then_fstat(descriptor: int) -> os.stat_result:
        seen.append(descriptor)
        if len(seen) == 3:  # after the check of its kind, and the one before the first byte
            with (root / "src" / "a.py").open("a") as file:
                file.write("b = 2\n")
        return real_fstat(descriptor)

    monkeypatch.setattr(os, "fstat", append_then_fstat)
    with pytest.raises(ReviewError, match="written to while it was read"):
        read_inside(root, "src/a.py")
