"""A run folder: made for one record, written as its runs go, and sealed last.

A process that is killed leaves `events.jsonl` and no manifest: a folder that is not sealed, and that nothing takes for
one that is. The manifest comes last, when every other file is on the disk.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import secrets as random
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bounded.limits import Limits
from bounded.outcomes import SourceGap
from bounded.receipts import Receipt
from bounded.run import Event, Observer
from bounded.text import digest, fit, repr_of
from evidence.accounting import accounting, price_of
from evidence.rederive import SCHEMA_VERSION, outcome_review
from evidence.verify import MANIFEST, NO_EVENT, canonical, document, manifest, sha256

EVENTS = "events.jsonl"
MAX_STRING = 100_000
_MAX_DEPTH = 16
_MAX_REPR = 300
_END = ("outcome", "source_gap", "reason")
_NO_MARKS = str.maketrans("", "", "-:")
_ENDED = {SourceGap.STOPPED: "tool_call_timed_out", SourceGap.ABANDONED: "tool_call_abandoned"}


class Unsealed(OSError):
    """A run folder cannot be sealed; the message says why."""


class RunFolder:
    """One record on the disk. Its methods may be called from any thread; the events of several runs may interleave."""

    def __init__(
        self, parent: Path, kind: str, *, model: str, endpoint: str, secrets: frozenset[str], **facts: object
    ) -> None:
        """Make `<UTC stamp>-<kind>` in `parent` and write the record's first event.

        Args:
            model, endpoint: whom the record will ask, and what stands at that address.

        Raises:
            OSError: it cannot be made.
        """
        self.secrets = secrets
        self._wall, self._began = datetime.now(UTC), time.monotonic()
        self._lock = threading.Lock()
        self._first: Mapping[str, Any] | None = None
        self._last: Mapping[str, Any] = {}
        self._fault = ""
        self._writer: int | None = None
        self.path = _new_folder(parent, f"{_iso(self._wall).translate(_NO_MARKS)}-{kind}")
        self._log: int | None = os.open(self.path / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        about = {"kind": kind, "schema_version": SCHEMA_VERSION, "model": model, "endpoint": endpoint}
        self.record("record_started", None, **about, **facts)
        # A price is a provider's, for its own endpoint: who else speaks its wire has none.
        self._price = price_of(model, _iso(self._wall)[:10]) if endpoint == "provider" else None

    def record(self, kind: str, run: str | None = None, /, **facts: object) -> None:
        """Append an event. It never raises: what cannot be written keeps the folder from being sealed."""
        with self._lock:
            if self._log is None or self._fault or self._writer not in (None, threading.get_ident()):
                return
            elapsed_s = time.monotonic() - self._began
            event = {
                "seq": 0 if self._first is None else self._last["seq"] + 1,
                "at": _iso(self._wall + timedelta(seconds=elapsed_s)),
                "elapsed_ms": round(elapsed_s * 1000),
                "run": run,
                "kind": kind,
                "facts": recordable(facts, self.secrets),
                "prev": NO_EVENT if self._first is None else sha256(canonical(self._last).encode("ascii")),
            }
            try:
                _write_all(self._log, canonical(event).encode("ascii") + b"\n")
            except OSError as exc:
                self._fault = f"{EVENTS}: {exc.strerror}"
            self._first, self._last = self._first or event, event

    def hold(self) -> None:
        """From here on only the calling thread records: what others still do is no part of the record any more."""
        with self._lock:
            self._writer = threading.get_ident()

    def observer(self, run: str, *, limits: Limits, deadline_s: float | None, **facts: object) -> Observer:
        """Record that a run starts; what comes back records each of its events."""
        self.record("run_started", run, limits={**recordable(limits), "deadline_s": deadline_s}, **facts)

        def observe(event: Event) -> None:
            kind, facts = event.kind, dict(event.facts)
            if isinstance(receipt := facts.get("receipt"), Receipt):
                if kind == "tool_call_ended" and receipt.source_gap is not None:
                    kind = _ENDED[receipt.source_gap]
                # While it runs, the ledger says already what will be true if nothing else comes.
                left_out = _END if kind == "tool_call_started" else ()
                facts["receipt"] = {name: value for name, value in receipt.as_dict().items() if name not in left_out}
            self.record(kind, run, **facts)

        return observe

    def write(self, name: str, data: bytes) -> None:
        """Put a whole file into the folder: seen either not at all or as it is meant to be.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(self.path / name, data)

    def events(self) -> Iterator[Mapping[str, Any]]:
        """What was recorded so far, read back from the disk, one by one."""
        with open(self.path / EVENTS, encoding="ascii") as log:
            yield from map(json.loads, log)

    def seal(self, outcome: str, *, stdout: bytes) -> None:
        """Write what follows from the events, then the manifest over everything; nothing is recorded afterwards.

        Raises:
            Unsealed: something could not be written; the folder stays unsealed.
        """
        self.hold()
        self.record("record_ended", outcome=outcome)
        with self._lock:
            log, self._log = self._log, None
        if log is None:
            raise Unsealed(f"{self.path} was sealed before")
        try:
            os.fsync(log)
            os.close(log)
            if self._fault:
                raise OSError(0, self._fault)
            self.write("stdout.txt", stdout)
            self.write("accounting.json", document(accounting(self.events(), self._price)))
            self.write("outcome-review.json", document(outcome_review(self.events())))
            self._close_events()
            self._write_manifest()
        except OSError as exc:
            raise Unsealed(f"{self.path} stays unsealed: {exc.strerror}") from exc

    def _close_events(self) -> None:
        with _whole(self.path / "events.json") as file, open(self.path / EVENTS, "rb") as log:
            before = b"[\n"
            for line in log:
                file.write(before + line[:-1])
                before = b",\n"
            file.write(b"\n]\n")
        (self.path / EVENTS).unlink()

    def _write_manifest(self) -> None:
        names = sorted(path for path in self.path.rglob("*") if path.is_file())
        digests = {path.relative_to(self.path).as_posix(): _digest(path) for path in names}
        self.write(MANIFEST, manifest(digests, self._first, self._last))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recordable(value: object, secrets: Collection[str] = (), depth: int = 0) -> Any:
    """A value as canonical JSON may hold it, text in it cleaned and masked; what is not JSON is `{"repr": ...}`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return fit(value, MAX_STRING, secrets)
    if isinstance(value, int) and abs(value) < 10**300:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _MAX_DEPTH:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            named = {key if isinstance(key, str) else repr_of(key): item for key, item in value.items()}
            safe: dict[str, Any] = {}
            # A key that stays as it is keeps its name; one that becomes another's gets a name of its own.
            for name in sorted(named, key=lambda name: fit(name, _MAX_REPR, secrets) != name):
                shown = fit(name, _MAX_REPR, secrets)
                shown = f"{shown} ({digest(name)[:8]})" if shown in safe else shown
                safe[shown] = recordable(named[name], secrets, depth + 1)
            if len(safe) == len(value):  # else two keys are one, as 1 and "1" would be
                return safe
        if isinstance(value, frozenset):
            return sorted(fit(str(item), _MAX_REPR, secrets) for item in value)
        if isinstance(value, list | tuple):
            return [recordable(item, secrets, depth + 1) for item in value]
    return {"repr": fit(repr_of(value), _MAX_REPR, secrets)}


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step: a reader, or a power cut, finds the old content or the new.

    Raises:
        OSError: it cannot be written; the old content stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _whole(path) as file:
        file.write(data)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Any]:
    # A name of its own, or two writers would splice their bytes; on the disk before it is renamed, or the name may
    # stand for a file of zeros after a power cut.
    temporary = path.with_name(f".{path.name}.{random.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable: counting does not end")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
