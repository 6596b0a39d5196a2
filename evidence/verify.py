"""Check run folders offline: digests, chain, call ids, usage, estimate and outcome. The standard library only.

    python verify.py runs/20261130T121035.123Z-question
    python verify.py --all

Nothing in a folder is trusted: not its names, links, sizes or shapes. What is worked out here from the events is worked
out a second time, by rules of its own: the code that recorded them is not asked. Exit status 0 if every folder holds,
1 if one does not, 2 for a command line that names none.
"""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

SCHEMA_VERSION = 1
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
MAX_CALLS = 256
HOST_ENDS = ("round_without_progress", "transcript_bound", "bound_below_first_send", "registry_unavailable")
MAX_ANSWER = 100_000  # a longer one was cut, and is not compared
ENDED_BY_A_BOUND = {"tool_call_timed_out": "native_tool_timeout", "tool_call_abandoned": "native_tool_abandoned"}
AFTER_THE_STOP = (*ENDED_BY_A_BOUND, "tool_call_ended", "tool_call_late", "model_call_late")
# What a probe waits for: this call, ended by its timeout.
TARGET = {"tool": "fetch_job_log", "args": {"job_id": 815}}

Json = Any
Faults = Iterator[str]


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


def outcome_review(events: Iterable[Json]) -> Json:
    """What `outcome-review.json` holds: what is claimed beside what the events give, run by run and as a whole.

    Of a batch, however long, it holds the runs that are going on, and the few events that belong to no run.
    """
    outer: list[Json] = []
    runs: list[Json] = []
    going: dict[str, list[Json] | None] = {}  # by run: its events so far, None once it has stopped
    for event in events:
        name, kind = event["run"], event["kind"]
        if name is None or outer[0]["facts"]["kind"] != "batch":
            outer.append(event)
        if name is None:
            continue
        if (own := going.setdefault(name, [])) is None:
            if kind not in AFTER_THE_STOP:
                runs.append(_review(name, f"{_shown(kind)} after the stop of the run"))
            continue
        own.append(event)
        if kind == "stop":
            claimed, derived, going[name] = event["facts"]["outcome"], derive(own), None
            runs.append(
                _review(name, *_against_the_claim(own, derived), *_calls(own), claimed=claimed, derived=derived)
            )
    for name, left in going.items():
        if left and all(event["kind"] != "run_failed" for event in left):  # else a bug ended it, and it claims nothing
            runs.append(_review(name, "the run never stopped"))
    claimed, derived = outer[-1]["facts"].get("outcome"), _whole(outer, runs)
    return {"schema_version": SCHEMA_VERSION, "claimed": claimed, "derived": derived, "runs": runs}


def _review(name: str, *faults: str, claimed: Json = None, derived: str | None = None) -> Json:
    return {"run": name, "claimed": claimed, "derived": derived, "disagreements": list(faults)}


def derive(events: Sequence[Json]) -> str | None:
    """How a run ended, from what happened in it and not from what it says; None where nothing ended it."""
    return next(filter(None, _ends(events)), None)


def _ends(events: Sequence[Json]) -> Iterator[str | None]:
    """For each event what it ends the run with, None where it goes on; last, what a breakpoint makes of all that."""
    started, spent, paused = events[0]["facts"], 0, None
    budget = started["limits"]["token_budget"]
    asks_again, due = started.get("asks_again"), None
    for event in events:
        kind, facts, end = event["kind"], event["facts"], None
        if kind == "run_cut" and facts["by"] in ("deadline", "interrupted"):
            end = facts["by"]
        elif kind == "host_ended" and facts["outcome"] in HOST_ENDS:
            end = facts["outcome"]
        elif kind == "model_call_cut":
            end = {"failed": "model_error", "was ended by its timeout": "model_timeout"}.get(facts["fate"])
        elif kind == "model_call_ended":
            total, ids = known_total(facts["usage"]), [call["id"] for call in facts["proposed"]]
            spent += total or 0
            paused = "paused" if "tools" in started.get("pause_after", []) else None
            if total is None:
                end = "missing_usage"
            elif len(ids) > MAX_CALLS or not all(ids) or len(set(ids)) < len(ids):
                end = "model_error"
            elif not ids and (facts["text_chars"] or not asks_again):
                end = "answered" if facts["text_chars"] else "empty_answer"
            elif budget is not None and spent >= budget:
                end = "token_budget"
            elif facts["call"] >= started["limits"]["max_steps"]:
                end = "step_limit"
            if not ids and end in ("token_budget", "step_limit"):  # before these come the host's own rules
                end, due = None, end
        elif kind == "run_ended":
            end = due
        yield end
    yield paused


def known_total(usage: Json) -> int | None:
    """The total that a reply's usage reports, None where it reports none that can be true."""
    return _reported(usage)["total"]


def _reported(usage: Json) -> dict[str, int | None]:
    """What a reply's usage says, as `accounting.json` names it; None for what it does not say, or cannot be true."""
    total, read, written = (_count(usage, f"{part}_tokens") for part in ("total", "input", "output"))
    cached = _count(usage, "input_token_details", "cache_read") or 0
    thinking, rest = _count(usage, "output_token_details", "reasoning"), None
    if total is not None and total < max(cached, 0 if read is None or written is None else read + written):
        total = None
    if written is None or thinking is None or thinking > written:
        thinking = None
    else:
        rest = written - thinking
    return {"input": read, "output": written, "thinking": thinking, "output_without_thinking": rest, "total": total}


def _count(value: Json, *path: str) -> int | None:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if type(value) is int and 0 <= value < 2**63 else None


def _against_the_claim(events: Sequence[Json], derived: str | None) -> Faults:
    started, stop = events[0], events[-1]["facts"]
    if started["kind"] != "run_started":
        yield "the run has no start"
    if derived != stop["outcome"]:
        yield f"the events make it {derived}, it claims {_shown(stop['outcome'])}"
    replies = [event["facts"] for event in events if event["kind"] == "model_call_ended"]
    totals = [known_total(reply["usage"]) for reply in replies]
    happened = [event["kind"] for event in events]
    said = [event["facts"]["outcome"] for event in events if event["kind"] == "run_ended"]
    chars, answer = replies[-1]["text_chars"] if replies else 0, len(stop.get("answer", ""))
    if answer != chars <= MAX_ANSWER:
        yield f"the answer has {answer} characters, the last reply {_shown(chars)}"
    yield from _differences(
        stop,
        known_subtotal=sum(filter(None, totals)),
        usage_known=None not in totals and "model_call_cut" not in happened,
        model_calls=happened.count("model_call_started"),
        model=started["facts"].get("model"),
        outcome=said[0] if said else stop["outcome"],
    )
    over, deadline_s = False, started["facts"]["limits"]["deadline_s"]
    for event, end in zip(events, _ends(events), strict=False):
        took_ms = event["elapsed_ms"] - started["elapsed_ms"]
        if over and event["kind"] in ("model_call_started", "tool_call_started"):
            yield f"{event['kind']} after the run had ended"
        if end == "deadline" and deadline_s is not None and took_ms + 1 < deadline_s * 1000:
            yield f"cut off by its deadline of {deadline_s:g} s after {took_ms} ms"
        over = over or end is not None


def _differences(said: Json, **derived: Json) -> Faults:
    for name, value in derived.items():
        if said.get(name) != value:
            yield f"{name} is {_shown(said.get(name))}, and {_shown(value)} by the events"


def _calls(events: Sequence[Json]) -> Faults:
    """Proposed ids and receipts pair up one to one, and each receipt is what the call's last event said."""
    proposed, last = [], {}
    for event in events:
        facts = event["facts"]
        if event["kind"] == "model_call_ended":
            proposed += [(facts["call"], n, call["id"], call["tool"]) for n, call in enumerate(facts["proposed"])]
        elif "receipt" in facts:
            receipt = facts["receipt"]
            last[receipt["turn"], receipt["index"]] = receipt
            ended = event["kind"] == "tool_call_ended" or event["kind"] in ENDED_BY_A_BOUND
            if ended and receipt.get("source_gap") != ENDED_BY_A_BOUND.get(event["kind"]):
                yield f"{_shown(event['kind'])} with a receipt that says otherwise"
    receipts = events[-1]["facts"]["receipts"]
    if proposed != [(each["turn"], each["index"], each.get("call_id"), each["tool"]) for each in receipts]:
        yield "the proposed calls and the receipts do not pair up"
    for receipt in receipts:
        where = f"call {receipt['index'] + 1} of turn {_shown(receipt['turn'])}"
        seen = last.pop((receipt["turn"], receipt["index"]), {})
        # A call whose end never came has only its start to go by, and may still be running.
        unended = "outcome" not in seen and receipt.get("source_gap") == "native_tool_abandoned"
        never_began = not seen and receipt["outcome"] == "withheld"
        if receipt != seen and not never_began and not (unended and seen and seen.items() <= receipt.items()):
            yield f"{where}: its receipt is not what its last event says"
        if (receipt["outcome"] == "executed") != ("text_sha256" in receipt):
            yield f"{where}: only a call that was executed has a digest"
    yield from (f"call {index + 1} of turn {_shown(turn)}: has an event and no receipt" for turn, index in last)


def _whole(outer: Sequence[Json], runs: Sequence[Json]) -> str | None:
    kind, happened = outer[0]["facts"]["kind"], {event["kind"] for event in outer}
    if kind == "batch":
        if "interrupted" in happened or any(run["derived"] == "interrupted" for run in runs):
            return "interrupted"
        return "complete" if len(runs) == outer[0]["facts"]["planned"] else "incomplete"
    derived: str | None = runs[0]["derived"] if len(runs) == 1 else None
    if kind != "live-probe":
        return derived
    if "refused" in happened:
        return "refused"
    if "interrupted" in (*happened, derived):
        return "interrupted"
    counts = [event["facts"]["status"] for event in outer if event["kind"] == "token_count"]
    if "model_call_started" in happened and counts not in (["counted"], ["not_available"]):
        return "incomplete_preflight"
    timed_out = [event["facts"]["receipt"] for event in outer if event["kind"] in ENDED_BY_A_BOUND]
    seen = derived == "paused" and any(TARGET.items() <= receipt.items() for receipt in timed_out)
    return "target_seen" if seen else "target_incomplete"


def _accounts(book: Json, events: Sequence[Json]) -> Faults:
    """The rows, sums and estimate of `accounting.json`, against the events and its own price."""
    rows: list[Json] = []
    for event in events:
        if event["kind"] in ("model_call_ended", "model_call_cut"):
            usage = event["facts"].get("usage")
            rows.append({"run": event["run"], "call": event["facts"]["call"], "reported": usage, **_reported(usage)})
    if rows != [{name: said[name] for name in rows[0]} for said in book["calls"]]:
        yield "its calls are not those of the events"
    known = [row for row in rows if row["total"] is not None]
    spent, unknown, price, estimate = sum(row["total"] for row in known), len(rows) - len(known), book["price"], None
    if price is not None and known:
        read, written = (sum(row[part] or 0 for row in known) for part in ("input", "output"))
        usd = read * Decimal(price["input_usd_per_million"]) + written * Decimal(price["output_usd_per_million"])
        unpriced = spent - read - written
        estimate = {
            "usd": format((usd / 1_000_000).normalize(), "f"),
            "covers": "the known part only" if unknown or unpriced else "all that was used",
            "calls_without_usage": unknown,
            "tokens_without_a_price": unpriced,
        }
    yield from _differences(book, known_subtotal=spent, usage_known=unknown == 0, estimate=estimate)
    if price is not None and events[0]["facts"]["endpoint"] != "provider":
        yield "there is a price for what is not the provider's own endpoint"


def _provenance(provenance: Json, digests: Mapping[str, str], started: Json) -> Faults:
    yield from _differences(provenance, model=started["model"], endpoint=started["endpoint"])
    copies = {name[8:]: digest for name, digest in digests.items() if name.startswith("sources/")}
    if copies and provenance["dirty"] is False:
        yield "it says that the tree was clean, and there are copies of changed sources"
    for name, _digest in sorted(copies.items() - provenance["sources"].items()):
        yield f"sources/{_shown(name)} is not the source that ran"


def verify(folder: Path) -> list[str]:
    """Every fault of a run folder, as `FILE: what is wrong`; an empty list where it holds."""
    if not os.path.lexists(folder / MANIFEST):
        return [f"{MANIFEST}: missing: no run folder, or one that is not sealed: its run was killed or is going on"]
    contents: dict[str, bytes] = {}
    faults = [f"{_shown(name)}: {fault}" for name, fault in _read_all(folder, contents)]
    digests = {name: sha256(data) for name, data in contents.items() if name != MANIFEST}
    events: list[Json] = []
    checks: dict[str, Callable[[bytes], Faults]] = {
        "events.json": lambda data: _chain(data, events),
        MANIFEST: lambda data: _manifest(data, digests, events),
        "outcome-review.json": lambda data: _review_file(data, events),
        "accounting.json": lambda data: _accounts(_parse(data), events),
        "provenance.json": lambda data: _provenance(_parse(data), digests, events[0]["facts"]),
    }
    for name, check in checks.items():
        if name not in contents:
            continue  # which is a fault already
        try:
            # One by one: what was found before a check breaks off stays found.
            faults.extend(fault if name == MANIFEST else f"{name}: {fault}" for fault in check(contents[name]))
        except KeyError as exc:
            faults.append(f"{name}: {_shown(exc.args[0])} is missing")
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
            yield f"{_shown(name)}: missing"
        elif name not in claimed:
            yield f"{_shown(name)}: is no subject of the manifest"
        elif claimed[name] != digests[name]:
            yield f"{_shown(name)}: its digest is not the one in the manifest"
        elif name not in REQUIRED | OPTIONAL and not name.startswith(FOLDERS):
            yield f"{_shown(name)}: is no file of a run folder"
    if not events or events[-1]["kind"] != "record_ended" or data != manifest(digests, events[0], events[-1]):
        yield f"{MANIFEST}: differs from the one that the folder gives"


def _review_file(data: bytes, events: Sequence[Json]) -> Faults:
    review = outcome_review(events)
    if data != document(review):
        yield "is not what the events give"
    if review["claimed"] != review["derived"]:
        yield f"the events make the whole {review['derived']}, it claims {_shown(review['claimed'])}"
    for run in review["runs"]:
        yield from (f"{_shown(run['run'])}: {fault}" for fault in run["disagreements"])


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


def _shown(name: object) -> str:
    return ascii(name)[1:-1][:200] if isinstance(name, str) else ascii(name)[:200]


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
    shown = _shown(folder)
    faults = [f"{shown}: there is no such folder"]
    if os.path.isdir(folder):
        faults = [f"{shown}/{fault}" for fault in verify(Path(folder))]
    print("\n".join(faults or [f"{shown} holds"]))
    return not faults


if __name__ == "__main__":
    main()
