"""Check run folders offline: what lies in them, and whether it follows from their events. The standard library only.

    python verify.py runs/20261130T121035.123Z-question
    python verify.py --all

Nothing in a folder is trusted: not its names, links, sizes or shapes. What follows from its events is worked out a
second time by `rederive.py`, which is all of ours that this needs. Exit status 0 if every folder holds, 1 if one does
not, 2 for a command line that names none.
"""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from evidence.rederive import SCHEMA_VERSION, Faults, Json, accounts, differences, outcome_review, shown

MANIFEST = "manifest.json"
REQUIRED = {"accounting.json", "events.json", "outcome-review.json", "provenance.json", "stdout.txt"}
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:bounded-run:evidence:v1"
FOLDERS = ("images/", "sources/", "custody/")
OPTIONAL = {"runs.json", "timeline.html"}
NO_EVENT = "0" * 64
RUNS = Path("runs")
MAX_BYTES, MAX_TOTAL_BYTES = 64 * 1024**2, 256 * 1024**2
MAX_FILES, MAX_DEPTH = 2_000, 8


def canonical(value: Json) -> str:
    """One line of canonical JSON: sorted keys, ASCII; a number that is not finite is a ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def document(value: Json) -> bytes:
    """A whole file of canonical JSON, indented for its reader."""
    return (json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(digests: Mapping[str, str], first: Json, last: Json) -> bytes:
    """The in-toto Statement v1 of a folder: all of it a function of its files' digests and its outer events."""
    predicate = {
        "schema_version": SCHEMA_VERSION,
        "kind": first["facts"]["kind"],
        "outcome": last["facts"]["outcome"],
        "started_at": first["at"],
        "finished_at": last["at"],
        "events": last["seq"] + 1,
        "chain_head": sha256(canonical(last).encode("ascii")),
    }
    subject = [{"name": name, "digest": {"sha256": digests[name]}} for name in sorted(digests)]
    return document({"_type": STATEMENT, "subject": subject, "predicateType": PREDICATE, "predicate": predicate})


def _provenance(provenance: Json, digests: Mapping[str, str], started: Json) -> Faults:
    yield from differences(provenance, model=started["model"], endpoint=started["endpoint"])
    copies = {name[8:]: digest for name, digest in digests.items() if name.startswith("sources/")}
    if copies and provenance["dirty"] is False:
        yield "it says that the tree was clean, and there are copies of changed sources"
    for name, _digest in sorted(copies.items() - provenance["sources"].items()):
        yield f"sources/{shown(name)} is not the source that ran"


def verify(folder: Path) -> list[str]:
    """Every fault of a run folder, as `FILE: what is wrong`; an empty list where it holds."""
    if not os.path.lexists(folder / MANIFEST):
        return [f"{MANIFEST}: missing: no run folder, or one that is not sealed: its run was killed or is going on"]
    contents: dict[str, bytes] = {}
    faults = [f"{shown(name)}: {fault}" for name, fault in _read_all(folder, contents)]
    digests = {name: sha256(data) for name, data in contents.items() if name != MANIFEST}
    events: list[Json] = []
    checks: dict[str, Callable[[bytes], Faults]] = {
        "events.json": lambda data: _chain(data, events),
        MANIFEST: lambda data: _manifest(data, digests, events),
        "outcome-review.json": lambda data: _review_file(data, events),
        "accounting.json": lambda data: accounts(_parse(data), events),
        "provenance.json": lambda data: _provenance(_parse(data), digests, events[0]["facts"]),
    }
    for name, check in checks.items():
        if name not in contents:
            continue  # which is a fault already
        try:
            # One by one: what was found before a check breaks off stays found.
            faults.extend(fault if name == MANIFEST else f"{name}: {fault}" for fault in check(contents[name]))
        except KeyError as exc:
            faults.append(f"{name}: {shown(exc.args[0])} is missing")
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as exc:
            faults.append(f"{name}: has no shape that can be checked: {ascii(exc)[:200]}")
    return faults


def _chain(data: bytes, events: list[Json]) -> Faults:
    """Read the events, one a line, and check that each holds the digest of the one before."""
    text = data.decode("ascii")
    if not (text.startswith("[\n") and text.endswith("\n]\n")):
        raise ValueError("it is no list with one event a line")
    before = NO_EVENT
    for place, line in enumerate(text[2:-3].split(",\n")):
        event = _parse(line.encode("ascii"))
        if event["seq"] != place or event["prev"] != before:
            yield f"event {place} does not follow from the one before it"
        before = sha256(line.encode("ascii"))
        events.append(event)


def _manifest(data: bytes, digests: Mapping[str, str], events: Sequence[Json]) -> Faults:
    claimed = {subject["name"]: subject["digest"]["sha256"] for subject in _parse(data)["subject"]}
    for name in sorted(claimed.keys() | digests.keys() | REQUIRED):
        if name not in digests:
            yield f"{shown(name)}: missing"
        elif name not in claimed:
            yield f"{shown(name)}: is no subject of the manifest"
        elif claimed[name] != digests[name]:
            yield f"{shown(name)}: its digest is not the one in the manifest"
        elif name not in REQUIRED | OPTIONAL and not name.startswith(FOLDERS):
            yield f"{shown(name)}: is no file of a run folder"
    if not events or events[-1]["kind"] != "record_ended" or data != manifest(digests, events[0], events[-1]):
        yield f"{MANIFEST}: differs from the one that the folder gives"


def _review_file(data: bytes, events: Sequence[Json]) -> Faults:
    review = outcome_review(events)
    if data != document(review):
        yield "is not what the events give"
    if review["claimed"] != review["derived"]:
        yield f"the events make the whole {review['derived']}, it claims {shown(review['claimed'])}"
    for run in review["runs"]:
        yield from (f"{shown(run['run'])}: {fault}" for fault in run["disagreements"])


def _read_all(folder: Path, contents: dict[str, bytes]) -> Iterator[Sequence[str]]:
    """Read every plain file into `contents`, by its name in the folder; yield the name and fault of everything else."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        try:
            entries = sorted(os.scandir(folder / prefix), key=lambda entry: entry.name)
            if prefix and not entries:
                yield prefix[:-1], "is an empty folder"
        except OSError as exc:
            yield prefix[:-1], f"cannot be read: {exc.strerror}"
            continue
        for entry in entries:
            name = prefix + entry.name
            try:
                if len(contents) >= MAX_FILES or name.count("/") > MAX_DEPTH:
                    raise ValueError(f"is beyond {MAX_FILES} files or {MAX_DEPTH} folders deep")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                else:
                    contents[name] = _read(entry.path, MAX_TOTAL_BYTES - sum(map(len, contents.values())))
            except (ValueError, OSError) as exc:
                yield name, f"cannot be read: {exc.strerror}" if isinstance(exc, OSError) else str(exc)


def _read(path: str, left: int) -> bytes:
    """The bytes of a plain file of a size that can be: no link, device, pipe, or file that grows."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError("is no plain file")
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        data = file.read(min(MAX_BYTES, left) + 1)
    if len(data) > min(MAX_BYTES, left):
        raise ValueError(f"is larger than {MAX_BYTES} bytes" if left >= MAX_BYTES else "makes the folder too large")
    return data


def _parse(data: bytes) -> Json:
    """Canonical JSON, so no key twice; else a ValueError, or a RecursionError where it is nested too deep."""
    value = json.loads(data.decode("ascii"))
    if data != canonical(value).encode("ascii") and not _is_document(value, data):
        raise ValueError("is no canonical JSON")
    return value


def _is_document(value: Json, data: bytes) -> bool:
    """Whether `data` is `document(value)`, which is not made: its indentation may be a thousand times as long."""
    place = 0
    for piece in json.JSONEncoder(sort_keys=True, indent=2, allow_nan=False).iterencode(value):
        if not data.startswith(piece.encode("ascii"), place):
            return False
        place += len(piece)
    return data[place:] == b"\n"


def main() -> NoReturn:
    """Check the folders that the command line names."""
    named = sys.argv[1:]
    if named in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit(0)
    folders = sorted(str(path) for path in RUNS.glob("*") if path.is_dir()) if named == ["--all"] else named
    if not folders or any(folder.startswith("-") for folder in folders):
        what = f"no run folder is named, or there is none in {RUNS}; for example: python verify.py runs/*"
        sys.stderr.write(f"verify.py: {what}\n")
        sys.exit(2)
    try:
        holds = [_says(folder) for folder in folders]
        sys.stdout.flush()
    except BrokenPipeError:  # a reader that left early: what it has not seen is not known to hold
        os._exit(1)
    sys.exit(0 if all(holds) else 1)


def _says(folder: str) -> bool:
    named = shown(folder)
    faults = [f"{named}: there is no such folder"]
    if os.path.isdir(folder):
        faults = [f"{named}/{fault}" for fault in verify(Path(folder))]
    print("\n".join(faults or [f"{named} holds"]))
    return not faults


if __name__ == "__main__":  # as a module: who runs it means to check something
    main()
