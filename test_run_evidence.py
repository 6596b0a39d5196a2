"""The saved observations: every run folder holds, and what the project says about them is what they say.

python -m pytest -v test_run_evidence.py
"""

import getpass
import hashlib
import json
import re
import socket
import struct
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from evidence.verify import verify

ROOT = Path(__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The saved ones: beside them lie those of whoever has used this copy of the project.
FOLDERS = [ROOT / "runs" / name for name in re.findall(r"^\| `(\d{8}T\d{6}\.\d{3}Z-[a-z-]+)` \|", README, re.MULTILINE)]
IMAGE_WIDTHS = {
    "completed-end-1440@2x.png": 2880,
    "completed-end-390@2x.png": 780,
    "completed-end-320@2x.png": 640,
}

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def load(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="ascii"))


def events(folder: Path, kind: str) -> list[Any]:
    return [event for event in load(folder, "events.json") if event["kind"] == kind]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob(commit: str, name: str) -> bytes | None:
    """A file as a commit has it, None where git or this clone does not know it."""
    try:
        done = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


@each_folder
def test_a_saved_folder_holds(folder: Path) -> None:
    assert verify(folder) == []


@each_folder
def test_the_chain_of_a_saved_folder_can_be_followed_by_hand(folder: Path) -> None:
    lines = (folder / "events.json").read_text(encoding="ascii").splitlines()[1:-1]
    before = "0" * 64
    for line in lines:
        assert json.loads(line.rstrip(","))["prev"] == before
        before = sha256(line.rstrip(",").encode())
    assert load(folder, "manifest.json")["predicate"]["chain_head"] == before


@each_folder
def test_each_proposed_call_of_a_saved_folder_has_one_receipt(folder: Path) -> None:
    for stop in events(folder, "stop"):
        replies = [event["facts"] for event in events(folder, "model_call_ended") if event["run"] == stop["run"]]
        proposed = [(reply["call"], call["id"]) for reply in replies for call in reply["proposed"]]
        assert [(receipt["turn"], receipt["call_id"]) for receipt in stop["facts"]["receipts"]] == proposed


@each_folder
def test_the_sources_of_a_saved_folder_are_those_of_its_commit_or_its_copies(folder: Path) -> None:
    provenance = load(folder, "provenance.json")
    compared = 0
    for name, digest in provenance["sources"].items():
        copy = folder / "sources" / name
        found = copy.read_bytes() if copy.exists() else blob(provenance["commit"], name)
        if found is not None:
            assert sha256(found) == digest, name
            compared += 1
    if compared == 0:
        pytest.skip(f"this clone does not have the commit {provenance['commit']}")
    assert compared == len(provenance["sources"])


@each_folder
def test_the_accounting_of_a_saved_folder_adds_up(folder: Path) -> None:
    book = load(folder, "accounting.json")
    known = [call for call in book["calls"] if call["total"] is not None]
    assert book["known_subtotal"] == sum(call["reported"]["total_tokens"] for call in known)
    assert book["usage_known"] == (len(known) == len(book["calls"]))
    for call in known:
        if call["thinking"] is not None:
            assert call["output_without_thinking"] + call["thinking"] == call["output"]
    if book["estimate"] is not None:
        parts = [
            Decimal(book["price"][f"{part}_usd_per_million"]) * call[part]
            for call in known
            for part in ("input", "output")
        ]
        assert Decimal(book["estimate"]["usd"]) * 1_000_000 == sum(parts)


@each_folder
def test_the_pictures_of_a_saved_folder_are_what_their_names_say(folder: Path) -> None:
    pictures = {path.name: path.read_bytes() for path in folder.glob("images/*")}
    assert set(pictures) in (set(), set(IMAGE_WIDTHS))
    for name, data in pictures.items():
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">I", data[16:20])[0] == IMAGE_WIDTHS[name]


@each_folder
def test_a_saved_folder_says_nothing_of_the_machine_that_made_it(folder: Path) -> None:
    text = (folder / "provenance.json").read_text(encoding="ascii")
    assert socket.gethostname() not in text
    assert not re.search(r"/(?:root|home|tmp|Users)\b", text)
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in text


@each_folder
def test_no_saved_folder_has_a_price_and_no_request_went_to_gemini(folder: Path) -> None:
    assert load(folder, "provenance.json")["endpoint"] in ("in_process", "loopback")
    assert load(folder, "accounting.json")["price"] is None


def test_the_readme_says_what_each_saved_folder_shows() -> None:
    listed = subprocess.run(["git", "ls-files", "runs"], cwd=ROOT, capture_output=True, text=True, check=False)
    saved = {path.split("/")[1] for path in listed.stdout.splitlines()} or {folder.name for folder in FOLDERS}
    assert saved == {folder.name for folder in FOLDERS}


def test_the_saved_batch_is_what_runs_json_and_its_output_say() -> None:
    saved = (ROOT / "runs.json").read_bytes()
    batch = ROOT / "runs" / json.loads(saved)["evidence"]
    if batch not in FOLDERS:
        pytest.skip("runs.json was overwritten by a batch of this copy's own")
    assert (batch / "runs.json").read_bytes() == saved
    assert (batch / "stdout.txt").read_bytes() == (ROOT / "run-output.txt").read_bytes()


def test_the_saved_folders_are_all_that_is_promised() -> None:
    outcomes = [
        (load(folder, "manifest.json")["predicate"]["kind"], load(folder, "manifest.json")["predicate"]["outcome"])
        for folder in FOLDERS
    ]
    assert ("batch", "complete") in outcomes
    assert ("live-probe", "incomplete_preflight") in outcomes
    assert ("live-probe", "target_seen") in outcomes
    assert {outcome for kind, outcome in outcomes if kind == "question"} >= {
        "model_timeout",
        "token_budget",
        "answered",
    }
