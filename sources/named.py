"""A name becomes a job source: github[:OWNER/REPO], folder:PATH or buildbot:URL."""

import os.path
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sources.jobs import JobSource

FORMS = "github, github:OWNER/REPO, folder:PATH or buildbot:URL"


def job_source(name: str, environment: Mapping[str, str]) -> JobSource:
    """The source of that name; `github` alone is the repository of this folder's git remote `origin`.

    Raises:
        ValueError: there is no such source, or what it names cannot be one; one line, with what would do.
    """
    kind, _, what = name.partition(":")
    if kind == "github":
        from sources.github import GitHub, origin

        repository = what or origin(Path.cwd(), environment)
        if repository is None:
            raise ValueError(
                "github: this folder has no git remote origin on GitHub; name the repository: --ci github:OWNER/REPO"
            )
        return GitHub(repository, environment=environment)
    if kind == "folder" and what:
        from sources.folder import Folder

        what = os.path.expanduser(what)  # a shell leaves the blank-less `folder:~/logs` as it is
        if not os.path.exists(what):  # that of a Path raises for a name that is too long
            raise ValueError(f"folder:{what[:200]!a}: there is no such folder or zip")
        if Path(what).is_file() and not zipfile.is_zipfile(what):
            raise ValueError(
                f"folder:{what[:200]!a} is neither a folder nor a whole zip; name the folder that it lies in, or of a"
                " single log: python -m sources.excerpt FILE"
            )
        return Folder(Path(what))
    if kind == "buildbot" and what:
        from sources.buildbot import Buildbot

        return Buildbot(what)
    raise ValueError(f"takes {FORMS}, not {name[:60]!a}")
