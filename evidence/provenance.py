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

from bounded.text import fit
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
_FILE_URL = re.compile(r"file:/+[^\s\"']+", re.IGNORECASE)


def record_provenance(folder: RunFolder, arguments: Sequence[str], **facts: object) -> None:
    """Write `provenance.json`, and where the tree is not as committed a copy of each changed source.

    Args:
        arguments: the command line; absolute paths become `<path>`.
        facts: about the model and the way to it; their text is made public in the same way.

    Raises:
        OSError: it cannot be written.
    """
    commit, changed = _git("rev-parse", "HEAD"), changed_sources()
    facts = {"command": list(arguments), **facts}
    about = {
        "schema_version": SCHEMA_VERSION,
        "sources": {name: sha256((ROOT / name).read_bytes()) for name in sources()},
        "commit": commit,
        "dirty": None if commit is None else bool(changed),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {dist.name: dist.version for dist in importlib.metadata.distributions()},
        **{name: _public(value, folder.secrets) for name, value in facts.items()},
    }
    folder.write("provenance.json", document(recordable(about)))
    for name in changed:
        folder.write(f"sources/{name}", (ROOT / name).read_bytes())


def sources() -> list[str]:
    """The project's own source files and its lock, relative to its root; no folder of it lies deeper."""
    own = [path.relative_to(ROOT) for pattern in ("*.py", "*/*.py") for path in ROOT.glob(pattern)]
    return sorted([LOCK, *(path.as_posix() for path in own if not path.parts[0].startswith("."))])


def changed_sources() -> list[str]:
    """Sources that are not as the commit has them, the new ones included; all of them where there is no commit."""
    committed = _git("diff", "--name-only", "--relative", "--no-ext-diff", "HEAD")
    added = _git("ls-files", "--others", "--exclude-standard")
    if committed is None or added is None:
        return sources()
    changed = {*committed.splitlines(), *added.splitlines()}
    return [name for name in sources() if name in changed]


def _public(value: object, secrets: Collection[str]) -> object:
    if isinstance(value, list):
        return [_public(item, secrets) for item in value]
    if isinstance(value, dict):
        return {name: _public(item, secrets) for name, item in value.items()}
    return public(value, secrets) if isinstance(value, str) else value


def public(text: str, secrets: Collection[str] = ()) -> str:
    """Text of the command line without secrets, absolute paths, and this machine's user and host names."""
    text = _PATH.sub("<path>", _FILE_URL.sub("<path>", fit(text, MAX_ARGUMENT, secrets)))
    for name in (_user(), socket.gethostname()):
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
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
