"""A run folder as it is written: what JSON can hold, a chain that stays whole, and nothing sealed that is not."""

import dataclasses
import errno
import json
import os
import signal
import threading
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evidence.folder as module
from bounded.limits import Limits
from bounded.outcomes import CallOutcome, Outcome, SourceGap
from bounded.receipts import Receipt
from bounded.run import Event
from bounded.timeouts import ToolTimeouts
from evidence.folder import EVENTS, RunFolder, Unsealed, recordable, write_whole
from evidence.verify import MANIFEST, NO_EVENT, canonical, document, sha256, verify

SECRET = "fake-secret-0123"
ESC = "\x1b"


def new_folder(parent: Path, kind: str = "batch") -> RunFolder:
    secrets = frozenset({SECRET})
    return RunFolder(parent, kind, model="offline", endpoint="in_process", secrets=secrets, planned=1)


def sealed(folder: RunFolder) -> Path:
    """A batch whose only run a bug ended, with all that a folder needs."""
    folder.record("run_started", "r", limits={})
    folder.record("run_failed", "r")
    about: dict[str, Any] = {"model": "offline", "endpoint": "in_process", "sources": {}, "commit": None, "dirty": None}
    folder.write("provenance.json", document({"schema_version": 1, **about}))
    folder.seal("incomplete", stdout=b"")
    return folder.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@dataclasses.dataclass
class Point:
    x: float
    y: object = None


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (None, None),
        (True, True),
        (0, 0),
        (-(2**63) + 1, -(2**63) + 1),
        (2**64, 2**64),
        (1.5, 1.5),
        ("caf\u00e9", "caf\u00e9"),
        ([1, (2, "3")], [1, [2, "3"]]),
        ({"a": {"b": None}}, {"a": {"b": None}}),
        ({1: "a", None: "b", "c": 2}, {"1": "a", "None": "b", "c": 2}),
        (frozenset({"b", "a"}), ["a", "b"]),
        (Outcome.DEADLINE, "deadline"),
        (signal.SIGINT, 2),
        (Point(1.0, {"a": 1}), {"x": 1.0, "y": {"a": 1}}),
        (ToolTimeouts(default_s=3.0), {"default_s": 3.0, "per_tool": {}, "per_set": {}, "self_limiting": []}),
    ],
)
def test_what_json_can_hold_is_recorded_as_it_is(value: object, recorded: object) -> None:
    assert recordable(value) == recorded


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (b"\xff", "b'\\xff'"),
        ({1, 2}, "{1, 2}"),
        ({1: "a", "1": "b"}, "{1: 'a', '1': 'b'}"),
        (1j, "1j"),
        (Unshowable(), "a Unshowable that cannot be shown (RuntimeError)"),
        pytest.param(10**5_000, "a int that cannot be shown (ValueError)", id="huge"),
        (Point, "<class 'evidence.test_folder.Point'>"),
    ],
)
def test_what_json_cannot_hold_is_recorded_by_its_repr(value: object, shown: str) -> None:
    assert recordable(value) == {"repr": shown}
    assert recordable([{"a": value}]) == [{"a": {"repr": shown}}]


@pytest.mark.parametrize("value", [nested(100_000, 1), itself(), {"a": nested(40, float("nan"))}], ids=len)
def test_what_is_nested_without_end_ends(value: object) -> None:
    assert len(canonical(recordable(value))) < 1_000


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("a\ud800b", "a\ufffdb"),
        (f"{ESC}[31mred{ESC}[0m", "red"),
        ("a\r\nb\x00", "a\nb"),
        (f"use {SECRET}!", "use [masked]!"),
        ("token=abcdefgh12345678", "token=[masked]"),
        ("AIza" + "x" * 35, "[masked]"),
    ],
)
def test_text_is_cleaned_and_masked_in_keys_and_values(text: str, recorded: str) -> None:
    assert recordable(text, {SECRET}) == recorded
    assert recordable({text: [text]}, {SECRET}) == {recorded: [recorded]}
    assert recordable(Point(1.0, frozenset({text})), {SECRET}) == {"x": 1.0, "y": [recorded]}
    assert SECRET not in canonical(recordable({text.encode("utf-8", "replace")}, {SECRET}))


def test_a_text_without_end_is_cut_and_says_so() -> None:
    recorded = recordable("x" * 10_000_000)
    assert len(recorded) < 101_000
    assert "of 10,000,000 characters cut here" in recorded


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.frozensets(st.text(max_size=4) | st.integers(), max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(ANYTHING)
def test_whatever_happens_is_recorded_as_canonical_json(value: object) -> None:
    recorded = recordable(value)
    text = canonical(recorded)
    assert text.isascii()
    assert canonical(json.loads(text)) == text
    assert recordable(recorded) == recorded


def test_a_folder_is_named_by_its_moment_and_kind_and_begins_at_once(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    folder = new_folder(tmp_path / "new" / "runs")
    stamp = folder.path.name.removesuffix("-batch")
    begun = datetime.strptime(stamp, "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC)
    assert -0.001 <= (begun - before).total_seconds() <= 5
    (event,) = map(json.loads, (folder.path / EVENTS).read_text().splitlines())
    assert event.pop("at").endswith("Z")
    assert 0 <= event.pop("elapsed_ms") < 5_000
    about = {"kind": "batch", "schema_version": 1, "model": "offline", "endpoint": "in_process", "planned": 1}
    assert event == {"seq": 0, "run": None, "kind": "record_started", "facts": about, "prev": NO_EVENT}


class Standing:
    """A wall clock that stands still."""

    @staticmethod
    def now(zone: Any) -> datetime:
        return datetime(2026, 11, 30, 12, 10, 35, 123_456, tzinfo=zone)

    fromisoformat = datetime.fromisoformat


def test_folders_of_one_millisecond_do_not_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "datetime", Standing)
    stamp = "20261130T121035.123Z"
    (tmp_path / f"{stamp}-batch-2").mkdir()
    (tmp_path / f"{stamp}-batch-3").write_text("a file")
    made = [new_folder(tmp_path).path.name, new_folder(tmp_path).path.name, new_folder(tmp_path, "question").path.name]
    assert made == [f"{stamp}-batch", f"{stamp}-batch-4", f"{stamp}-question"]
    assert list((tmp_path / f"{stamp}-batch-2").iterdir()) == []
    assert (tmp_path / f"{stamp}-batch-3").read_text() == "a file"


def test_folders_that_are_made_at_once_do_not_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "datetime", Standing)
    at_once, made = threading.Barrier(8), []

    def make() -> None:
        at_once.wait(10)
        made.append(sealed(new_folder(tmp_path)))

    in_threads([make] * 8)
    assert len(set(made)) == 8
    assert [verify(path) for path in made] == [[]] * 8


def in_threads(bodies: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("parent", ["a file", "a file/below"])
def test_a_parent_that_is_no_folder_is_an_os_error(parent: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("kept")
    with pytest.raises(OSError, match=r"exists|directory"):
        new_folder(tmp_path / parent)
    assert (tmp_path / "a file").read_text() == "kept"


def test_events_are_on_the_disk_before_the_seal_and_the_chain_goes_through_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    before = [*folder.events()]
    folder.record("run_started", "a/2", limits={}, text="caf\u00e9 \u2028 x")
    lines = (folder.path / EVENTS).read_bytes().splitlines()
    assert len(lines) == len(before) + 1 == 2
    assert (json.loads(lines[1])["prev"], json.loads(lines[1])["run"]) == (sha256(lines[0]), "a/2")
    after = (sealed(folder) / "events.json").read_bytes().splitlines()
    assert [line.removesuffix(b",") for line in after[1:3]] == lines


def test_what_is_recorded_after_the_seal_is_ignored(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    path = sealed(folder)
    folder.record("tool_call_late", "question")
    assert verify(path) == []
    assert "events.jsonl" not in names(path)
    with pytest.raises(Unsealed, match="was sealed before"):
        folder.seal("answered", stdout=b"again")
    assert verify(path) == []


def test_events_from_several_threads_keep_the_chain_whole(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    at_once = threading.Barrier(6)

    def body(name: str) -> Callable[[], None]:
        def record() -> None:
            at_once.wait(10)
            for number in range(100):
                folder.record("token_count", name, counted=number, status="counted")
            folder.record("run_failed", name)

        return record

    in_threads([body(f"run/{number}") for number in range(6)])
    path = sealed(folder)
    assert verify(path) == []
    events = json.loads((path / "events.json").read_bytes())
    for number in range(6):
        own = [event["facts"] for event in events if event["run"] == f"run/{number}"]
        assert [each.get("counted") for each in own] == [*range(100), None]


def receipt(gap: SourceGap | None, outcome: CallOutcome = CallOutcome.ERROR) -> Receipt:
    return Receipt(turn=1, index=0, tool="t", args={}, outcome=outcome, reason="why", source_gap=gap)


@pytest.mark.parametrize(
    ("kind", "given", "recorded"),
    [
        ("tool_call_ended", receipt(None, CallOutcome.EXECUTED), "tool_call_ended"),
        ("tool_call_ended", receipt(SourceGap.STOPPED), "tool_call_timed_out"),
        ("tool_call_ended", receipt(SourceGap.ABANDONED), "tool_call_abandoned"),
        ("tool_call_late", receipt(SourceGap.ABANDONED), "tool_call_late"),
    ],
)
def test_an_observer_says_how_a_call_ended(kind: str, given: Receipt, recorded: str, tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.observer("r", limits=Limits(), deadline_s=None)(Event(kind=kind, facts={"receipt": given}))
    last = [*folder.events()][-1]
    assert (last["kind"], last["facts"]) == (recorded, {"receipt": json.loads(json.dumps(given.as_dict()))})


def test_an_observer_tells_of_a_start_without_its_end_and_of_its_limits(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    observe = folder.observer("r", limits=Limits(token_budget=5), deadline_s=9.0, question="Why?")
    observe(Event(kind="tool_call_started", facts={"receipt": receipt(SourceGap.ABANDONED)}))
    _, start, call = folder.events()
    assert (start["facts"]["limits"]["token_budget"], start["facts"]["limits"]["deadline_s"]) == (5, 9.0)
    assert start["facts"]["question"] == "Why?"
    assert call["facts"] == {"receipt": {"turn": 1, "index": 0, "tool": "t", "args": {}}}


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_event_that_cannot_be_written_keeps_the_folder_unsealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        folder.record("run_started", "r", limits={})
    folder.record("run_failed", "r")  # there is room again, and the chain has a hole
    with pytest.raises(Unsealed, match=r"stays unsealed: events\.jsonl: No space left on device$"):
        folder.seal("failed", stdout=b"")
    assert names(folder.path) == [EVENTS]
    assert "not sealed" in verify(folder.path)[-1]


@pytest.mark.parametrize("number", range(1, 11))
def test_a_disk_that_fails_at_any_moment_of_the_seal_leaves_no_manifest(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced, sync = new_folder(tmp_path), 0, os.fsync
    folder.record("run_failed", "question")

    def fsync(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        if synced == number:
            full()
        sync(descriptor)

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", fsync)
        with pytest.raises(Unsealed, match=r"stays unsealed: No space left on device$"):
            folder.seal("failed", stdout=b"")
    assert MANIFEST not in names(folder.path)
    assert not [name for name in names(folder.path) if name.endswith(".tmp")]
    assert "not sealed" in verify(folder.path)[-1]


def test_a_partly_accepted_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        folder = new_folder(tmp_path)
    assert verify(sealed(folder)) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_replaced_keeps_its_old_content(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs.json").write_bytes(b"old")
    with monkeypatch.context() as disk:
        disk.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "runs.json", b"new")
    assert names(tmp_path) == ["runs.json"]
    assert (tmp_path / "runs.json").read_bytes() == b"old"
    write_whole(tmp_path / "runs.json", b"new")
    assert (names(tmp_path), (tmp_path / "runs.json").read_bytes()) == (["runs.json"], b"new")


def test_two_writers_of_one_file_leave_one_of_their_contents(tmp_path: Path) -> None:
    contents = [bytes([65 + number]) * 200_000 for number in range(4)]
    in_threads([lambda data=data: write_whole(tmp_path / "x", data) for data in contents * 3])  # type: ignore[misc]
    assert (tmp_path / "x").read_bytes() in contents
    assert names(tmp_path) == ["x"]


def test_sealing_a_long_batch_holds_no_more_than_a_part_of_it(tmp_path: Path) -> None:
    folder, known = new_folder(tmp_path), {"known_subtotal": 7, "usage_known": True, "outcome": "answered"}
    limits = {"token_budget": None, "max_steps": 1, "deadline_s": None}
    for name in map(str, range(400)):
        folder.record("run_started", name, limits=limits, question="x" * 20_000)
        folder.record("model_call_started", name, call=1)
        folder.record("model_call_ended", name, call=1, usage={"total_tokens": 7}, text_chars=1, proposed=[])
        folder.record("stop", name, **known, model_calls=1, receipts=[])
    size = (folder.path / EVENTS).stat().st_size
    tracemalloc.start()
    folder.seal("incomplete", stdout=b"")
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 2
