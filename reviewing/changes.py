"""What a change consists of, by git, without running anything that the repository names.

A repository's configuration and attributes can name programs (file monitors, hooks, filters, diff drivers, transports);
each way in which the few commands here would start one is closed, so that reviewing a hostile checkout is safe.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bounded.text import fit

MAX_CHANGED = 1_000
MAX_DIFF_BYTES = 20_000_000
MAX_NEW_FILE_BYTES = 2_000_000
MAX_GIT_MEMORY = 1 << 30
MAX_NAMES_BYTES = 8_000_000
_MAX_SAID = 4_000

_SETTINGS: Mapping[str, str] = {
    "core.fsmonitor": "false",
    "core.pager": "cat",
    "core.sshCommand": "false",
    "diff.autoRefreshIndex": "true",
    "diff.external": "",
    "grep.fullName": "false",
    "protocol.allow": "never",
    "safe.bareRepository": "explicit",
    "submodule.recurse": "false",
}
# Beside these the user's own configuration may colour, reorder and rename what is parsed below.
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "--submodule=short",
         "--src-prefix=a/", "--dst-prefix=b/", "-U3", f"-O{os.devnull}")  # fmt: skip


class ReviewError(Exception):
    """What is asked for cannot be had; the message says why, and what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changed files of a review.

    Attributes:
        files: path -> unified diff. A path is relative to the root, POSIX, with bytes that are not UTF-8 as lone
            surrogates. The diff is "" where git shows none: binary, marked so by an attribute, a link or a repository
            that is not tracked. A renamed file stands under its new name.
        against: the full id of the commit (or of the empty tree) that the files are compared with.
    """

    files: Mapping[str, str]
    against: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a git command came to.

    Attributes:
        status: its exit status, negative for a signal.
        output: what it wrote, in bytes.
        said: what it complained of, cleaned.
        cut: it wanted to write more than it might, and was killed for it.
    """

    status: int
    output: bytes
    said: str
    cut: bool

    @property
    def names(self) -> list[str]:
        """The output of a command that ends each name with a NUL (without one that was cut)."""
        return [name.decode("utf-8", "surrogateescape") for name in self.output.split(b"\0")[:-1]]


async def changes_since(repo: Path, base: str | None) -> Changes:
    """What the working tree under `repo` changes against the commit `base` (HEAD for None), untracked files included.

    Raises:
        ReviewError: no git, no repository, no such commit, an unfinished merge, or more than a review takes.
    """
    against = await _commit(repo, base)
    filters = await _no_filters(repo)
    files = await _diffs(repo, filters, against)
    listed = await run_git(repo, "ls-files", "-z", "--others", "--exclude-standard", at_most=MAX_NAMES_BYTES)
    untracked = _checked(listed).names
    _check_count(len(files) + len(untracked))
    for path in untracked:
        files[path.rstrip("/")] = await _untracked_diff(repo, filters, path)
    return Changes(files=files, against=against)


async def staged_changes(repo: Path) -> Changes:
    """What the index changes against HEAD, under `repo`.

    Raises:
        ReviewError: as `changes_since`; or a staged file differs from the one in the working tree, which is the one
            that a review would read.
    """
    against = await _commit(repo, None)
    filters = await _no_filters(repo)
    files = await _diffs(repo, filters, "--cached", against)
    command = (*_DIFF, "--no-renames", "--relative", "--name-only", "-z")
    unstaged = _checked(await run_git(repo, *command, at_most=MAX_NAMES_BYTES, settings=filters)).names
    both = [path for path in unstaged if path in files]
    if both:
        raise ReviewError(_shown(f"what is staged of {both[0]} is not what stands in the file: stage or undo the rest"))
    return Changes(files=files, against=against)


def top_of(root: Path) -> Path | None:
    """The working tree that `root` is in, or None where it is in no repository."""
    real = root.resolve()
    return next((folder for folder in (real, *real.parents) if os.path.lexists(folder / ".git")), None)


async def run_git(root: Path, *arguments: str, at_most: int, settings: Mapping[str, str] | None = None) -> Ran:
    """Run one git command in `root`, in a process group of its own that is killed on any way out of here.

    Args:
        at_most: bytes of output, after which it is killed.
        settings: configuration beside the safe one.

    Raises:
        ReviewError: there is no git, or no such folder.
    """
    environment = _environment(root, settings or {})
    program = shutil.which("git", path=environment["PATH"])
    if program is None:
        raise ReviewError("git is not installed here, and this needs it")
    process = _Process(at_most)
    spawning = asyncio.create_task(
        asyncio.get_running_loop().subprocess_exec(
            lambda: process,
            program,
            "--no-pager",
            "--config-env=core.hooksPath=NO_HOOKS",  # a git that does not know this knows no GIT_CONFIG_COUNT either
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            cwd=root,
            env=environment,
            start_new_session=True,
        )
    )
    try:
        await asyncio.shield(spawning)  # cancelled, it would kill the one process and wait for its children
        _limit_memory(process.pid)
        await process.ended.wait()
    finally:
        transport, _ = await spawning
        if not process.ended.is_set():
            process.kill()
            for pipe in filter(None, map(transport.get_pipe_transport, process.kept)):
                pipe.close()  # one that left the group may hold them open
        await process.ended.wait()  # what was killed counts as stopped only once it is gone
        transport.close()  # no sooner: it would take the exit status away from whoever waits for it
    said = _shown(process.kept[2].decode("utf-8", "replace").strip())
    return Ran(status=transport.get_returncode() or 0, output=bytes(process.kept[1]), said=said, cut=process.cut)


class _Process(asyncio.SubprocessProtocol):
    """Keeps what a process writes, up to a size, and kills the group of one that writes more."""

    def __init__(self, at_most: int) -> None:
        self.ended = asyncio.Event()
        self.kept = {1: bytearray(), 2: bytearray()}
        self.cut = False
        self._at_most = {1: at_most, 2: _MAX_SAID}
        self.pid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.pid = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        room = self._at_most[fd] - len(self.kept[fd])
        self.kept[fd] += data[:room]
        if fd == 1 and len(data) > room and not self.cut:
            self.cut = True
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:  # it has exited, and all its pipes are closed
        self.ended.set()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _limit_memory(pid: int) -> None:
    import resource

    # A regular expression of 30 characters takes all memory that there is: `((a{1,255}){1,255}){1,255}`.
    if hasattr(resource, "prlimit"):  # on Linux
        with contextlib.suppress(OSError, ValueError):  # it has ended, or a stricter limit holds
            resource.prlimit(pid, resource.RLIMIT_DATA, (MAX_GIT_MEMORY, MAX_GIT_MEMORY))


def _environment(root: Path, settings: Mapping[str, str]) -> dict[str, str]:
    if not root.is_dir():
        raise ReviewError(_shown(f"{root} is no folder"))
    # A relative entry would name a program inside the repository.
    path = os.pathsep.join(entry for entry in os.get_exec_path() if os.path.isabs(entry))
    environment = {
        "PATH": path,
        "HOME": os.environ.get("HOME", os.devnull),
        "LC_ALL": "C.UTF-8",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",  # or one in the checkout could stand for the commit that is compared with
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "NO_HOOKS": os.devnull,
    }
    if top := top_of(root):  # or `core.worktree` could point anywhere
        environment["GIT_WORK_TREE"] = str(top)
    # Not by `-c name=value`: a filter's name may hold a "=".
    pairs = {**_SETTINGS, **settings}
    for number, (name, value) in enumerate(pairs.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return environment | {"GIT_CONFIG_COUNT": str(len(pairs))}


async def _no_filters(repo: Path) -> dict[str, str]:
    """Settings under which no filter runs: git has no switch for that, and a diff would run each on what it reads."""
    found = await run_git(repo, "config", "-z", "--name-only", "--get-regexp", r"^filter\.", at_most=MAX_NAMES_BYTES)
    if found.cut or found.status not in (0, 1):
        raise ReviewError(f"git cannot read its configuration: {found.said}")
    drivers = {name.rpartition(".")[0] for name in found.names}
    off = {"clean": "", "process": "", "required": "false"}
    return {f"{driver}.{key}": value for driver in drivers for key, value in off.items()}


async def _commit(repo: Path, base: str | None) -> str:
    wanted = "HEAD" if base is None else base
    if not wanted or wanted.startswith("-") or "\0" in wanted:
        raise ReviewError(_shown(f"{wanted!r} is no name of a commit"))
    found = await run_git(repo, "rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}", at_most=_MAX_SAID)
    if found.status == 1 and base is None:  # nothing is committed yet
        found = await run_git(repo, "hash-object", "-t", "tree", os.devnull, at_most=_MAX_SAID)
    if found.status == 1 or (found.status and not found.said):
        raise ReviewError(_shown(f"there is no commit {wanted!r} in {repo}"))
    return _checked(found).output.decode("ascii").strip()


async def _diffs(repo: Path, filters: Mapping[str, str], *against: str) -> dict[str, str]:
    # Raw and patch of one command: of two the second might see other files.
    command = (*_DIFF, "--raw", "--patch", "--find-renames", "--relative", *against, "--")
    ran = await run_git(repo, *command, at_most=MAX_DIFF_BYTES, settings=filters)
    raw, _, patch = _checked(ran).output.partition(b"\n\n")
    entries = [line.split(b"\t") for line in raw.splitlines()]
    _check_count(len(entries))
    blocks = iter(re.split(rb"(?m)^(?=diff --git )", patch)[1:])  # every line of a file has a character before it
    files = dict(_matched(entries, blocks))
    if next(blocks, None) is not None:
        raise ReviewError("the diff that git made cannot be read")
    return files


def _matched(entries: list[list[bytes]], blocks: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    for facts, *names in entries:
        status, path = facts.split()[-1][:1], _unquoted(names[-1])
        if status == b"U":
            raise ReviewError(_shown(f"the merge of {path} is not finished"))
        # A file that became a link is one entry, and two blocks: one gone, one new.
        block = [next(blocks, b"") for _ in range(2 if status == b"T" else 1)]
        if not all(block):
            raise ReviewError("the diff that git made cannot be read")
        yield path, _text(b"".join(block))


async def _untracked_diff(repo: Path, filters: Mapping[str, str], path: str) -> str:
    if path.endswith("/") or (repo / path).is_symlink():  # here git would follow a link to a folder
        return ""
    command = (*_DIFF, "--no-index", "--", os.devnull, path)
    ran = await run_git(repo, *command, at_most=MAX_NEW_FILE_BYTES, settings=filters)
    return "" if ran.cut or ran.status != 1 else _text(ran.output)


def _text(block: bytes) -> str:
    return "" if re.search(rb"(?m)^Binary files ", block) else block.decode("utf-8", "replace")


def _unquoted(name: bytes) -> str:
    if name.startswith(b'"'):
        name = name[1:-1].decode("unicode_escape").encode("latin-1")
    return name.decode("utf-8", "surrogateescape")


def _checked(ran: Ran) -> Ran:
    if ran.cut:
        raise ReviewError(f"the change is too large for a review: git has more than {len(ran.output):,} bytes to say")
    if ran.status != 0:
        raise ReviewError(f"git cannot say what has changed: {ran.said or f'status {ran.status}'}")
    return ran


def _check_count(files: int) -> None:
    if files > MAX_CHANGED:
        raise ReviewError(
            f"{files:,} files have changed, and a review takes {MAX_CHANGED:,}: commit, stage or ignore the others"
        )


def _shown(text: str) -> str:
    return " ".join(fit(text, 600).split())
