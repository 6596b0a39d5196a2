"""Files below one root, opened so that no path, no link and no swap leads out of it."""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from reviewing.changes import ReviewError

MAX_FILE_BYTES = 2_000_000
_MAX_PATH = 4_000
_UNUSUAL = re.compile(r"[\0\ud800-\udfff]")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def parts_of(path: str) -> tuple[str, ...]:
    """The parts of a path that may name a file below a root.

    Raises:
        ReviewError: it may not: empty, absolute, `..`, `~`, git's own, or no path at all.
    """
    parts = PurePosixPath(path).parts
    fault = ""
    if not parts or len(path) > _MAX_PATH or _UNUSUAL.search(path):
        fault = "no path of a file"
    elif path.startswith("/") or parts[0] == "~" or ".." in parts:
        fault = "not inside what is reviewed"
    elif any(part.casefold() == ".git" for part in parts):
        fault = "git's own"
    if fault:
        raise ReviewError(f"{path!r} is {fault}: a path is relative to the root, as list_files shows it")
    return parts


def resolve_inside(root: Path, path: str) -> str:
    """What `path` comes to below `root`, a resolved path, with links followed.

    Raises:
        ReviewError: it leads out, or may name no file.
    """
    real = Path(os.path.realpath(root.joinpath(*parts_of(path))))
    if not real.is_relative_to(root):
        raise ReviewError(f"{path} is a link that leads out of what is reviewed: only what is inside can be read")
    return "/".join(parts_of(real.relative_to(root).as_posix()))


def read_inside(root: Path, path: str) -> bytes:
    """All bytes of the file that `path` is, as `resolve_inside` returned it.

    Raises:
        ReviewError: there is none, it is no regular file, it is too large, or it cannot be read.
    """
    try:
        with open_inside(root, parts_of(path)) as file:
            before = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES + 1)
            after = os.fstat(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        raise ReviewError(f"there is no file {path}; list_files shows what there is") from None
    except OSError as exc:
        raise ReviewError(f"{path} cannot be read: {exc.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ReviewError(f"{path} has over {MAX_FILE_BYTES:,} bytes and is not read; query_code searches it")
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise ReviewError(f"{path} was written to while it was read; read it again")
    return data


def open_inside(root: Path, parts: Sequence[str]) -> BinaryIO:
    """Open a regular file of which no part is a link: from folder to folder, so that nothing can be swapped between.

    Raises:
        ReviewError: it is no regular file; nothing waits for one that is a pipe.
        OSError: it cannot be opened, or a part has become a link.
    """
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            above, folder = folder, os.open(part, _FOLDER, dir_fd=folder)
            os.close(above)
        _check_regular(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False))  # opening a device may do something
        file = os.open(parts[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check_regular(os.fstat(file))
        return os.fdopen(file, "rb")
    except ReviewError:
        os.close(file)
        raise


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ReviewError("only a regular file can be read, no folder, link or device; list_files shows what there is")
