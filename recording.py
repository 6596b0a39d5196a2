"""What the scripts share to keep evidence: a run folder opened before the runs, and sealed with the last words."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.request import getproxies

from bounded.exit import keep_interrupt
from bounded.limits import Limits
from bounded.run import Answer, Observer
from command_line import UsageError
from evidence.capture import Finish, frames, pseudo_terminal, tee
from evidence.folder import RunFolder
from evidence.provenance import public, record_provenance
from models.factory import endpoint, looks_for_proxy, provider_of
from terminal import answer_dict


def recorded(parent: str | None, **about: Any) -> "Recording | None":
    """A `Recording` in that folder; None where none is named.

    Raises:
        UsageError: the folder cannot be made.
    """
    if parent is None:
        return None
    keep_interrupt()
    return Recording(parent, **about)


class Recording:
    """A run folder, and what the process writes to its stdout from here on."""

    def __init__(
        self,
        parent: str,
        *,
        kind: str,
        model: str,
        environment: Mapping[str, str],
        secrets: frozenset[str],
        served_by: str | None,
        candidates: Sequence[Mapping[str, Any]] = (),
        capture: Callable[[], Finish] = tee,
        **facts: object,
    ) -> None:
        """Make the folder, and write into it where the record comes from.

        Args:
            served_by: what stands between this program and the model, in the user's words.
            candidates: of a pool, as `Pool.described` has them.
            capture: how stdout is recorded; with `pseudo_terminal` pictures of the final screen are kept as well.
            facts: what the first event says besides.

        Raises:
            UsageError: the folder cannot be made.
        """
        try:
            self._finish_stdout = capture()
        except (OSError, ModuleNotFoundError) as exc:
            raise UsageError(f"--frames cannot be made here: {exc}") from exc
        way = endpoint(model, environment)
        asked = [(each["provider"], each["endpoint"]) for each in candidates] or [(provider_of(model), way)]
        # Where a transport is given, as for a live probe, no client looks for a proxy.
        proxied = kind != "live-probe" and bool(getproxies()) and any(looks_for_proxy(*one) for one in asked)
        if candidates:
            facts["candidates"] = candidates
        self._about: dict[str, Any] = {
            "model": model,
            "endpoint": way,
            "between": {"proxy": proxied, "served_by": served_by},
        }
        try:
            self.folder = RunFolder(Path(parent), kind, model=public(model), endpoint=way, secrets=secrets, **facts)
            if kind != "live-probe":  # which may not read yet what is secret
                self.say_where_from()
        except OSError as exc:
            raise UsageError(f"--evidence {parent}: {exc.strerror or exc}; for example: --evidence runs") from exc
        self.model = public(model)
        self._pictures = capture is pseudo_terminal

    def say_where_from(self, copies: Literal["all", "none"] = "all") -> None:
        """Write where the record comes from, masked by the folder's secrets.

        Raises:
            OSError: it cannot be written.
        """
        record_provenance(self.folder, sys.argv, copies=copies, **self._about)

    def observer(
        self, name: str, question: str, limits: Limits, *, deadline_s: float | None, **facts: object
    ) -> Observer:
        """Record that a run starts; what comes back records each of its events."""
        return self.folder.observer(
            name, limits=limits, deadline_s=deadline_s, question=question, model=self.model, **facts
        )

    def stop(self, name: str, answer: Answer, **more: object) -> None:
        """Record what a run came to, and what is said of it besides."""
        told = {key: value for key, value in more.items() if value is not None}
        self.folder.record("stop", name, **{**answer_dict(answer), **told, "model": self.model})

    def close(self, outcome: str) -> None:
        """Seal the folder, and say on stderr where it is.

        Raises:
            OSError: it cannot be sealed.
        """
        stdout = self._finish_stdout()
        try:
            if self._pictures:
                for name, picture in frames(stdout).items():
                    self.folder.write(f"images/{name}", picture)
        finally:  # a picture that cannot be made takes nothing from the evidence
            self.folder.seal(outcome, stdout=stdout)
        sys.stderr.write(f"evidence: {self.folder.path}\n")
