"""Where a record comes from: sources and their digests, commit, versions, command line, model and endpoint."""

import getpass
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from bounded.text import fit, holds_secret
from evidence.folder import RunFolder, recordable
from evidence.verify import document, sha256

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_VERSION = 1
LOCK = "requirements-lock.txt"
GIT_S = 10.0
MAX_ARGUMENT = 2_000
# A path from the root of this machine, or of a home, but no address: that has its own two slashes before the host.
_PATH = re.compile(
    r"(?<![\w/.-])(?:~[\w.-]*(?=/)|[A-Za-z]:(?=[\\/]))?[\\/](?![\\/])[^\s\"':,;]+|(?<![\w/])~[\w.-]*(?=\s|$)"
)
_WHOLE = re.compile(r"\A(--[\w-]+=|scripted:)?(?:/|~/|[A-Za-z]:[\\/]).*\Z", re.DOTALL)
_FILE_URL = re.compile(r"file:/+[^\s\"']+", re.IGNORECASE)


def record_provenance(
    folder: RunFolder, arguments: Sequence[str], *, copies: Literal["all", "none"] = "all", **facts: object
) -> None:
    """Write `provenance.json`, and where the tree is not as committed a copy of each changed source.

    Args:
        arguments: the command line; absolute paths become `<path>`.
        copies: "none" where no secret has been read, so that none could be found in a source.
        facts: about the model and the way to it; their text is made public in the same way.

    Raises:
        OSError: it cannot be written.
    """
    commit, changed = _git("rev-parse", "HEAD"), changed_sources()
    # Read once: a source that is saved meanwhile must not differ between its digest and its copy.
    contents = {name: (ROOT / name).read_bytes() for name in sources()}
    with_secrets = [
        name for name in changed if holds_secret(contents.get(name, b"").decode("utf-8", "replace"), folder.secrets)
    ]
    facts = {"command": list(arguments), **facts}
    about = {
        "schema_version": SCHEMA_VERSION,
        "sources": {name: sha256(data) for name, data in contents.items()},
        "not_copied_for_a_secret": with_secrets,
        "commit": commit,
        "dirty": None if commit is None else bool(changed),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {dist.name: dist.version for dist in importlib.metadata.distributions()},
        **{name: _public(value, folder.secrets) for name, value in facts.items()},
    }
    folder.write("provenance.json", document(recordable(about)))
    for name in changed:
        if copies == "all" and name in contents and name not in with_secrets:
            folder.write(f"sources/{name}", contents[name])


def sources() -> list[str]:
    """The project's own source files and its lock, relative to its root; no folder of it lies deeper."""
    own = [path.relative_to(ROOT) for pattern in ("*.py", "*/*.py") for path in ROOT.glob(pattern)]
    return sorted([LOCK, *(path.as_posix() for path in own if not any(part.startswith(".") for part in path.parts))])


def changed_sources() -> list[str]:
    """Sources that are not as the commit has them: changed, new or gone; all of them where there is no commit."""
    committed = _git("diff", "--name-only", "--relative", "--no-ext-diff", "HEAD")
    tracked = _git("ls-files")  # and not the untracked ones: those leave out what is ignored, be it the whole tree
    if committed is None or tracked is None:
        return sources()
    changed, known = set(committed.splitlines()), set(tracked.splitlines())
    own = {*sources(), *(name for name in changed if name.endswith(".py") or name == LOCK)}
    return sorted(own & changed | own - known)


def _public(value: object, secrets: Collection[str]) -> object:
    if isinstance(value, list):
        return [_public(item, secrets) for item in value]
    if isinstance(value, dict):
        return {name: _public(item, secrets) for name, item in value.items()}
    return public(value, secrets) if isinstance(value, str) else value


def public(text: str, secrets: Collection[str] = ()) -> str:
    """Text of the command line without secrets, absolute paths, and this machine's user and host names."""
    text = fit(text, MAX_ARGUMENT, secrets)
    # An argument that is a path as a whole may have blanks and quotes in it.
    text = _WHOLE.sub(r"\1<path>", text) if _WHOLE.match(text) else _PATH.sub("<path>", _FILE_URL.sub("<path>", text))
    host = socket.gethostname()
    for name in (_user(), host, host.partition(".")[0]):
        # A name such as root is a word as well, and tells nothing.
        if len(name) >= 3 and name not in ("root", "runner", "user", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""


def _git(*arguments: str) -> str | None:
    # Not the whole environment: its GIT_* may name another repository, and git has no business with its secrets.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ}
    command = ["git", "-C", str(ROOT), "-c", "core.quotepath=off", *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
