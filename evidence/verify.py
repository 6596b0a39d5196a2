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
NO_EVENT = "0" * 64
RUNS = Path("runs")
MAX_BYTES = 64 * 1024 * 1024
MAX_FILES = 2_000
MAX_DEPTH = 8
MAX_CALLS = 256
MAX_ANSWER = 100_000  # a longer one was cut, and is not compared
MAX_TOTAL_BYTES = 256 * 1024 * 1024
ENDED_BY_A_BOUND = ("tool_call_timed_out", "tool_call_abandoned")
AFTER_THE_STOP = (*ENDED_BY_A_BOUND, "tool_call_ended", "tool_call_late", "model_call_late")
# What a probe waits for: this call, ended by its timeout.
TARGET = {"tool": "fetch_job_log", "args": {"job_id": 815}}

Json = Any
Faults = Iterator[str]


def canonical(value: Json) -> str:
    """One line of canonical JSON: sorted keys, ASCII, finite numbers.

    Raises:
        ValueError: a number is not finite.
    """
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


def reviews(events: Iterable[Json]) -> Iterator[Json]:
    """Each run's outcome, worked out again, with every disagreement. Holds no more than the runs that are going on."""
    going: dict[str, list[Json]] = {}
    stopped: set[str] = set()
    for event in events:
        name = event["run"]
        if name in stopped and event["kind"] not in AFTER_THE_STOP:
            yield _review(name, [], [f"{_shown(event['kind'])} after the stop of the run"])
        elif name is not None and name not in stopped:
            going.setdefault(name, []).append(event)
            if event["kind"] == "stop":
                yield _review(name, going[name], [])
                stopped.add(name)
                del going[name]
    for name, unfinished in going.items():
        if all(event["kind"] != "run_failed" for event in unfinished):  # else a bug ended it, and it claims nothing
            yield _review(name, [], ["the run never stopped"])


def _review(name: str, events: Sequence[Json], disagreements: list[str]) -> Json:
    claimed = derived = None
    if events:
        claimed, derived = events[-1]["facts"]["outcome"], derive(events)
        disagreements = [*_against_the_claim(events, derived), *_calls(events)]
    return {"run": name, "claimed": claimed, "derived": derived, "disagreements": disagreements}


def derive(events: Sequence[Json]) -> str | None:
    """How a run ended, from what happened in it and not from what it says; None where nothing ended it."""
    if end := next(filter(None, _ends(events)), None):
        return end
    replied = any(event["kind"] == "model_call_ended" for event in events)
    return "paused" if replied and "tools" in events[0]["facts"].get("pause_after", []) else None


def _ends(events: Sequence[Json]) -> Iterator[str | None]:
    """For each event what it ends the run with, None where the run goes on."""
    limits, spent = events[0]["facts"]["limits"], 0
    for event in events:
        kind, facts, end = event["kind"], event["facts"], None
        if kind == "run_cut" and facts["by"] in ("deadline", "interrupted"):
            end = facts["by"]
        elif kind == "model_call_cut":
            end = {"failed": "model_error", "was ended by its timeout": "model_timeout"}.get(facts["fate"])
        elif kind == "model_call_ended":
            total, ids = known_total(facts["usage"]), [call["id"] for call in facts["proposed"]]
            spent += total or 0
            if total is None:
                end = "missing_usage"
            elif len(ids) > MAX_CALLS or not all(ids) or len(set(ids)) < len(ids):
                end = "model_error"
            elif not ids:
                end = "answered" if facts["text_chars"] else "empty_answer"
            elif limits["token_budget"] is not None and spent >= limits["token_budget"]:
                end = "token_budget"
            elif facts["call"] >= limits["max_steps"]:
                end = "step_limit"
        yield end


def known_total(usage: Json) -> int | None:
    """The total that a reply's usage reports, None where it reports none that can be true."""
    if not isinstance(usage, dict):
        return None
    details = usage.get("input_token_details")
    cached = _count(details.get("cache_read")) if isinstance(details, dict) else None
    total, read, written = (_count(usage.get(f"{part}_tokens")) for part in ("total", "input", "output"))
    least = max(cached or 0, 0 if read is None or written is None else read + written)
    return None if total is None or total < least else total


def _count(value: object) -> int | None:
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
    claims = {
        "known_subtotal": sum(filter(None, totals)),
        "usage_known": None not in totals and "model_call_cut" not in happened,
        "model_calls": happened.count("model_call_started"),
        "model": started["facts"].get("model"),
        "outcome": said[0] if said else stop["outcome"],
    }
    for name, value in claims.items():
        if stop.get(name) != value:
            yield f"{name} is {_shown(stop.get(name))} where the run stopped, {_shown(value)} by its events"
    said_chars, chars = len(stop.get("answer", "")), replies[-1]["text_chars"] if replies else 0
    if said_chars != chars <= MAX_ANSWER:
        yield f"the answer has {said_chars} characters, the last reply {_shown(chars)}"
    over, deadline_s = False, started["facts"]["limits"]["deadline_s"]
    for event, end in zip(events, _ends(events), strict=True):
        took_ms = event["elapsed_ms"] - started["elapsed_ms"]
        if over and event["kind"] in ("model_call_started", "tool_call_started"):
            yield f"{event['kind']} after the run had ended"
        if end == "deadline" and deadline_s is not None and took_ms + 1 < deadline_s * 1000:
            yield f"cut off by its deadline of {deadline_s:g} s after {took_ms} ms"
        over = over or end is not None


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
            gap = {"tool_call_timed_out": "native_tool_timeout", "tool_call_abandoned": "native_tool_abandoned"}
            if event["kind"] in ("tool_call_ended", *gap) and receipt.get("source_gap") != gap.get(event["kind"]):
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


def outcome_review(events: Iterable[Json]) -> Json:
    """What `outcome-review.json` holds: what is claimed beside what the events give, run by run and as a whole."""
    outer: list[Json] = []

    def watched() -> Iterator[Json]:
        for event in events:
            if event["run"] is None or outer[0]["facts"]["kind"] != "batch":
                outer.append(event)  # of a batch, however long, only the few that belong to no run
            yield event

    runs = list(reviews(watched()))
    claimed, derived = outer[-1]["facts"].get("outcome"), _whole(outer, runs)
    return {"schema_version": SCHEMA_VERSION, "claimed": claimed, "derived": derived, "runs": runs}


def _whole(outer: Sequence[Json], runs: Sequence[Json]) -> str | None:
    kind, happened = outer[0]["facts"]["kind"], {event["kind"] for event in outer}
    if kind == "batch":
        if "interrupted" in happened or any(run["derived"] == "interrupted" for run in runs):
            return "interrupted"
        return "complete" if len(runs) == outer[0]["facts"]["planned"] else "incomplete"
    if kind == "live-probe" and "refused" in happened:
        return "refused"
    if kind == "live-probe" and "interrupted" in happened:
        return "interrupted"
    derived: str | None = runs[0]["derived"] if len(runs) == 1 else None
    if kind != "live-probe" or derived == "interrupted":
        return derived
    counts = [event["facts"]["status"] for event in outer if event["kind"] == "token_count"]
    if "model_call_started" in happened and counts not in (["counted"], ["not_available"]):
        return "incomplete_preflight"
    timed_out = [event["facts"]["receipt"] for event in outer if event["kind"] in ENDED_BY_A_BOUND]
    seen = derived == "paused" and any(TARGET.items() <= receipt.items() for receipt in timed_out)
    return "target_seen" if seen else "target_incomplete"


def _accounts(book: Json, events: Sequence[Json]) -> Faults:
    """The sums of `accounting.json`, and its estimate, against the events and its own price."""
    ended = [event for event in events if event["kind"] in ("model_call_ended", "model_call_cut")]
    rows = [(event["run"], event["facts"]["call"], event["facts"].get("usage")) for event in ended]
    if rows != [(row["run"], row["call"], row["reported"]) for row in book["calls"]]:
        yield "its calls are not those of the events"
        return
    totals = [known_total(usage) for _run, _call, usage in rows]
    for row, total, usage in zip(book["calls"], totals, (usage for _run, _call, usage in rows), strict=True):
        if {name: row[name] for name in PARTS} != _parts(usage, total):
            yield f"call {_shown(row['call'])} of {_shown(row['run'])}: its row is not what was reported"
    if book["known_subtotal"] != sum(total or 0 for total in totals) or book["usage_known"] != (None not in totals):
        yield "the known subtotal is not the sum of what was reported"
    if (book["estimate"] is None) != (book["price"] is None or totals == [None] * len(totals)):
        yield "an estimate needs a price and reported usage"
    if book["price"] is not None and events[0]["facts"]["endpoint"] != "provider":
        yield "there is a price for what is not the provider's own endpoint"
    if book["estimate"] is not None:
        priced = 0
        usd = Decimal(0)
        for part in ("input", "output"):
            tokens = sum(
                _count(usage.get(f"{part}_tokens")) or 0
                for _run, _call, usage in rows
                if known_total(usage) is not None
            )
            priced += tokens
            usd += tokens * Decimal(book["price"][f"{part}_usd_per_million"]) / 1_000_000
        if Decimal(book["estimate"]["usd"]) != usd:
            yield "the estimate is not the price of the reported tokens"
        unknown, unpriced = totals.count(None), sum(total or 0 for total in totals) - priced
        covers = "the known part only" if unknown or unpriced else "all that was used"
        said = [book["estimate"][name] for name in ("covers", "calls_without_usage", "tokens_without_a_price")]
        if said != [covers, unknown, unpriced]:
            yield "what the estimate covers is not what was reported"


PARTS = ("input", "output", "thinking", "output_without_thinking", "total")


def _parts(usage: Json, total: int | None) -> Json:
    usage = usage if isinstance(usage, dict) else {}
    read, written = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    details = usage.get("output_token_details")
    thinking = _count(details.get("reasoning")) if isinstance(details, dict) else None
    if thinking is None or written is None or thinking > written:
        thinking, rest = None, None
    else:
        rest = written - thinking
    return dict(zip(PARTS, (read, written, thinking, rest, total), strict=True))


def _sources(provenance: Json, digests: Mapping[str, str]) -> Faults:
    if provenance["dirty"] is False and any(name.startswith("sources/") for name in digests):
        yield "it says that the tree was clean, and there are copies of changed sources"
    provenance["sources"].keys()
    for name, digest in digests.items():
        if name.startswith("sources/") and provenance["sources"].get(name.removeprefix("sources/")) != digest:
            yield f"{_shown(name)} is not the source that ran"


def verify(folder: Path) -> list[str]:
    """Every fault of a run folder, as `FILE: what is wrong`; an empty list where it holds."""
    contents: dict[str, bytes] = {}
    faults = [f"{_shown(name)}: {fault}" for name, fault in _read_all(folder, contents)]
    if MANIFEST not in contents:
        return [*faults, f"{MANIFEST}: missing: this folder is not sealed; its run was killed or is still going on"]
    digests = {name: sha256(data) for name, data in contents.items() if name != MANIFEST}
    events: list[Json] = []
    checks: dict[str, Callable[[], Faults]] = {
        "events.json": lambda: _chain(contents["events.json"], events),
        MANIFEST: lambda: _manifest(contents[MANIFEST], digests, events),
        "outcome-review.json": lambda: _review_file(contents["outcome-review.json"], events),
        "accounting.json": lambda: _accounts(_parse(contents["accounting.json"]), events),
        "provenance.json": lambda: _sources(_parse(contents["provenance.json"]), digests),
    }
    for name, check in checks.items():
        try:
            # One by one: what was found before a check breaks off stays found.
            faults.extend(fault if name == MANIFEST else f"{name}: {fault}" for fault in check())
        except KeyError as exc:
            faults.append(f"{name}: {_shown(exc.args[0])} is missing")
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as exc:
            faults.append(f"{name}: cannot be checked: {ascii(exc)[:200]}")
    return faults


def _chain(data: bytes, events: list[Json]) -> Faults:
    """Read the events, one a line, and check that each holds the digest of the one before."""
    text = data.decode("ascii")
    if not (text.startswith("[\n") and text.endswith("\n]\n")):
        yield "is no list with one event a line"
        return
    before = NO_EVENT
    for place, line in enumerate(text[2:-3].split(",\n")):
        event = _parse(line.encode("ascii"))
        if event["seq"] != place or event["prev"] != before:
            yield f"event {place} does not follow from the one before it"
        before = sha256(line.encode("ascii"))
        events.append(event)


def _manifest(data: bytes, digests: Mapping[str, str], events: Sequence[Json]) -> Faults:
    claimed = {subject["name"]: subject["digest"]["sha256"] for subject in _parse(data)["subject"]}
    for name in sorted(claimed.keys() | digests.keys()):
        if name not in digests:
            yield f"{_shown(name)}: missing"
        elif name not in claimed:
            yield f"{_shown(name)}: is no subject of the manifest"
        elif claimed[name] != digests[name]:
            yield f"{_shown(name)}: its digest is not the one in the manifest"
    for name in sorted(REQUIRED - digests.keys() - claimed.keys()):
        yield f"{name}: missing"
    if not events or events[-1]["kind"] != "record_ended" or data != manifest(digests, events[0], events[-1]):
        yield f"{MANIFEST}: is not what the folder gives"


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
    waiting = [(str(folder), "")]
    while waiting:
        directory, prefix = waiting.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as exc:
            yield prefix[:-1], f"cannot be read: {exc.strerror}"
            continue
        if prefix and not entries:
            yield prefix[:-1], "is an empty folder"
        for entry in entries:
            name = prefix + entry.name
            try:
                if len(contents) >= MAX_FILES or name.count("/") > MAX_DEPTH:
                    raise ValueError(f"is beyond {MAX_FILES} files or {MAX_DEPTH} folders deep")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{name}/"))
                else:
                    contents[name] = _read(entry.path, MAX_TOTAL_BYTES - sum(map(len, contents.values())))
            except (ValueError, OSError) as exc:
                yield name, f"cannot be read: {exc.strerror}" if isinstance(exc, OSError) else str(exc)


def _read(path: str, left: int) -> bytes:
    """The bytes of a plain file of a size that can be: no link, device, pipe, or file that grows."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError("is no plain file")
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if os.fstat(file.fileno()).st_size > left:
            raise ValueError(f"is beyond {MAX_TOTAL_BYTES} bytes of the whole folder")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    return data


def _parse(data: bytes) -> Json:
    """Strict, canonical JSON; anything else is a ValueError, or a RecursionError where it is nested too deep."""

    def once(pairs: list[tuple[str, Json]]) -> Json:
        if len({key for key, _value in pairs}) < len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    value = json.loads(data.decode("ascii"), object_pairs_hook=once)
    if data != canonical(value).encode("ascii") and data != document(value):
        raise ValueError("is no canonical JSON")
    return value


def _shown(name: object) -> str:
    return ascii(name)[1:-1][:200] if isinstance(name, str) else ascii(name)[:200]


def main() -> NoReturn:
    """Check the folders that the command line names."""
    named = sys.argv[1:]
    if named in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit(0)
    folders = sorted(path for path in RUNS.glob("*") if path.is_dir()) if named == ["--all"] else list(map(Path, named))
    if not folders or any(str(folder).startswith("-") for folder in folders):
        what = (
            f"there is no run folder in {RUNS}"
            if named == ["--all"]
            else "name run folders, or --all for those in runs"
        )
        sys.stderr.write(f"verify.py: {what}; for example: python verify.py runs/*\n")
        sys.exit(2)
    try:
        holds = _say(folders)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader that left early has seen enough: whatever it was, it is not known to hold
        holds = False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0 if holds else 1)


def _say(folders: Iterable[Path]) -> bool:
    holds = True
    for folder in folders:
        shown = _shown(str(folder))
        if not os.path.isdir(folder):
            faults = [f"{shown}: there is no such folder"]
        else:
            faults = [f"{shown}/{fault}" for fault in verify(folder)]
        print("\n".join(faults or [f"{shown} holds"]))
        holds = holds and not faults
    return holds
