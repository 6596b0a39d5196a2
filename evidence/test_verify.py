"""Run folders checked offline: every changed byte is found, nothing in a folder is trusted, outcomes are worked out."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bounded.outcomes import Outcome
from evidence.folder import RunFolder
from evidence.rederive import outcome_review
from evidence.verify import MANIFEST, NO_EVENT, canonical, document, manifest, sha256, verify

Files = dict[str, Any]
Edit = Callable[[Files], object]

SOURCE = b"print('a source that was not as committed')\n"
NAMES = [
    "accounting.json",
    "events.json",
    "manifest.json",
    "outcome-review.json",
    "provenance.json",
    "sources/graph.py",
    "stdout.txt",
]
LIMITS = {"token_budget": 1000, "max_steps": 12, "deadline_s": 120.0, "model_timeout_s": 60.0, "tool_timeouts": {}}
DIGEST = "ab" * 32
FIRST = {"turn": 1, "index": 0, "tool": "list_ci_jobs", "args": {"pr": 418}, "call_id": "c1"}
SECOND = {"turn": 1, "index": 1, "tool": "fetch_job_log", "args": {"job_id": 815}, "call_id": "c2", "bound_s": 3.0}
EXECUTED = {**FIRST, "outcome": "executed", "text_sha256": DIGEST, "text_chars": 9}
TIMED_OUT = {**SECOND, "outcome": "error", "source_gap": "native_tool_timeout", "duration_sec": 3.0}
USAGE = [
    {"input_tokens": 224, "output_tokens": 179, "total_tokens": 403, "output_token_details": {"reasoning": 159}},
    {"input_tokens": 50, "output_tokens": 7, "total_tokens": 57},
]
ANSWER = "Its log came too late."
STORY: list[tuple[str, dict[str, Any]]] = [
    ("run_started", {"question": "Why?", "model": "gemini-3.8-flash", "limits": LIMITS}),
    ("model_call_started", {"call": 1}),
    (
        "model_call_ended",
        {
            "call": 1,
            "usage": USAGE[0],
            "finish_reason": "stop",
            "text_chars": 0,
            "proposed": [{"id": "c1", "tool": "list_ci_jobs"}, {"id": "c2", "tool": "fetch_job_log"}],
        },
    ),
    ("tool_call_started", {"receipt": FIRST}),
    ("tool_call_started", {"receipt": SECOND}),
    ("tool_call_ended", {"receipt": EXECUTED}),
    ("tool_call_timed_out", {"receipt": TIMED_OUT}),
    ("model_call_started", {"call": 2}),
    (
        "model_call_ended",
        {"call": 2, "usage": USAGE[1], "finish_reason": "stop", "text_chars": len(ANSWER), "proposed": []},
    ),
    ("run_ended", {"outcome": "answered", "reason": None}),
    (
        "stop",
        {
            "schema_version": 1,
            "outcome": "answered",
            "known_subtotal": 460,
            "usage_known": True,
            "model": "gemini-3.8-flash",
            "model_calls": 2,
            "answer": ANSWER,
            "receipts": [EXECUTED, TIMED_OUT],
            "seconds": 3.5,
        },
    ),
]


def sealed(parent: Path) -> Path:
    """A sealed folder that holds."""
    folder = RunFolder(parent, "question", model="gemini-3.8-flash", endpoint="provider", secrets=frozenset())
    about = {"schema_version": 1, "sources": {"graph.py": sha256(SOURCE)}, "commit": "0" * 40, "dirty": True}
    folder.write("provenance.json", document({**about, "model": "gemini-3.8-flash", "endpoint": "provider"}))
    folder.write("sources/graph.py", SOURCE)
    for kind, facts in STORY:
        folder.record(kind, "question", **facts)
    folder.seal("answered", stdout=b"outcome: answered\n")
    assert verify(folder.path) == []
    return folder.path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(original, tmp_path / "folder"))


def faults(folder: Path) -> list[str]:
    """What verify finds, each fault fit for a terminal."""
    found = verify(folder)
    for line in found:
        assert line.isascii()
        assert line.isprintable()
        assert len(line) <= 1_000
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def reseal(folder: Path, edit: Edit) -> list[str]:
    """Change parsed files, make chain, review and manifest follow from the change, and verify."""
    read = {name: (folder / name).read_bytes() for name in names(folder) if name != MANIFEST}
    files: Files = {name: json.loads(data) if name.endswith(".json") else data for name, data in read.items()}
    edit(files)
    events, before = files["events.json"], NO_EVENT
    for place, event in enumerate(events):
        if isinstance(event, dict):
            event.update(seq=place, prev=before)
        before = sha256(canonical(event).encode())
    with contextlib.suppress(TypeError, LookupError, AttributeError):  # events that give no review leave the old one
        files["outcome-review.json"] = outcome_review(events)
    written = {name: value if isinstance(value, bytes) else document(value) for name, value in files.items()}
    written["events.json"] = ("[\n" + ",\n".join(map(canonical, events)) + "\n]\n").encode()
    for name in read.keys() - written.keys():
        (folder / name).unlink()
    for name, data in written.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    remake_manifest(folder, events)
    return faults(folder)


def remake_manifest(folder: Path, events: list[Any]) -> None:
    digests = {name: sha256((folder / name).read_bytes()) for name in names(folder) if name != MANIFEST}
    with contextlib.suppress(TypeError, LookupError):  # of such events there is no manifest
        (folder / MANIFEST).write_bytes(manifest(digests, events[0], events[-1]))


def facts(files: Files, kind: str, number: int = 0) -> dict[str, Any]:
    """The facts of one event of that kind."""
    found: dict[str, Any] = [event for event in files["events.json"] if event["kind"] == kind][number]["facts"]
    return found


def test_the_sealed_folder_holds_what_is_documented(original: Path) -> None:
    assert names(original) == NAMES


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@example(place=0.0, change=1)
@example(place=1.0, change=1)
@given(place=st.floats(0, 1), change=st.integers(1, 255))
def test_any_byte_that_is_changed_is_found(original: Path, name: str, place: float, change: int) -> None:
    path = original / name
    before = path.read_bytes()
    data = bytearray(before)
    data[round(place * (len(data) - 1))] ^= change
    try:
        path.write_bytes(data)
        assert any(name in fault for fault in faults(original))
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes() + b"\n"),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[1:]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_name("renamed.txt")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["byte appended", "zero appended", "end cut", "start cut", "emptied", "removed", "renamed", "made a folder"],
)
def test_a_file_that_is_changed_as_a_whole_is_found_by_its_name(
    folder: Path, name: str, change: Callable[[Path], object]
) -> None:
    change(folder / name)
    assert any(fault.startswith(f"{name}: ") for fault in faults(folder))


@pytest.mark.parametrize("name", ["extra.txt", ".hidden", "sources/new.py", "images/x.png", "events.jsonl", "a\nb"])
def test_a_file_that_was_added_is_found(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    assert f"{ascii(name)[1:-1]}: is no subject of the manifest" in faults(folder)


@pytest.mark.parametrize(
    "name", ["extra.txt", ".hidden", "events.jsonl", "imagesx/x.png", "sources.py", "sub/runs.json"]
)
def test_a_file_that_is_none_of_a_run_folder_is_a_fault_even_where_it_is_listed(folder: Path, name: str) -> None:
    assert reseal(folder, lambda files: files.update({name: b""})) == [f"{name}: is no file of a run folder"]


@pytest.mark.parametrize("name", ["runs.json", "timeline.html", "images/x.png"])
def test_a_file_that_may_be_in_a_run_folder_holds_where_it_is_listed(folder: Path, name: str) -> None:
    assert reseal(folder, lambda files: files.update({name: b"{}"})) == []


@pytest.mark.parametrize("name", ["images", "sources/.git", "\x1b[31m"])
def test_an_empty_folder_that_was_added_is_found(folder: Path, name: str) -> None:
    """Nothing may be there that is no subject, and a name can say something as well."""
    (folder / name).mkdir()
    assert any(fault.startswith(f"{ascii(name)[1:-1]}: ") for fault in faults(folder))


def test_a_folder_without_a_manifest_says_that_it_is_not_sealed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"{}")
    (tmp_path / "link").symlink_to("nowhere")
    assert faults(tmp_path) == [
        "manifest.json: missing: no run folder, or one that is not sealed: its run was killed or is going on"
    ]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["\x1b[2J", "runs/x holds\n", "a" * 2_000, *Outcome, *(kind for kind, _ in STORY)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key or index there."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(["events.json"] * 4 + ["accounting.json", "provenance.json"]), data=st.data())
def test_any_value_in_any_place_gives_faults_and_no_exception(
    original: Path, tmp_path: Path, file: str, data: st.DataObject
) -> None:
    def edit(files: Files) -> None:
        where = list(places(files[file]))
        holder, key = where[data.draw(st.integers(0, len(where) - 1))]
        holder[key] = data.draw(JSON)

    reseal(Path(shutil.copytree(original, tmp_path / "folder", dirs_exist_ok=True)), edit)
