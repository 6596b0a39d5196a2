"""Hostile and forged run folders, and the command line that checks folders: `python verify.py DIR ...`."""

import contextlib
import copy
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, under_file_modes
from evidence.test_verify import DIGEST, NAMES, TIMED_OUT, Edit, Files, facts, faults, remake_manifest, reseal, sealed
from evidence.verify import MANIFEST, MAX_BYTES, document, sha256


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "folder"))


# What no one who only recorded a run could have put into its folder.


def link(path: Path, to: Path) -> None:
    shutil.move(path, to)
    path.symlink_to(to)


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
        bound.bind(path.name)


def sparse(path: Path, size: int) -> None:
    path.write_bytes(b"")
    os.truncate(path, size)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda path: link(path, path.parents[1] / "elsewhere"), "is no plain file"),
        (instead(lambda path: path.symlink_to(path)), "is no plain file"),
        (instead(lambda path: path.symlink_to("/dev/zero")), "is no plain file"),
        (instead(os.mkfifo), "is no plain file"),
        (instead(listen), "is no plain file"),
        (lambda path: sparse(path, MAX_BYTES + 1), f"is larger than {MAX_BYTES} bytes"),
    ],
    ids=["link", "link to itself", "link to a device", "pipe", "socket", "sparse"],
)
def test_what_is_no_plain_file_of_a_possible_size_is_refused(
    folder: Path, name: str, make: Callable[[Path], object], fault: str
) -> None:
    make(folder / name)
    assert f"{name}: {fault}" in faults(folder)


def test_a_linked_folder_is_not_followed(folder: Path) -> None:
    link(folder / "sources", folder.parent / "sources")
    assert "sources: is no plain file" in faults(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdout.txt", "manifest.json", "sources"])
def test_what_cannot_be_read_is_a_fault(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    command = under_file_modes([sys.executable, str(ROOT / "verify.py"), str(folder)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    (folder / name).chmod(0o700)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{folder}/{name}: cannot be read: Permission denied" in done.stdout.splitlines()


def test_folders_below_folders_end_somewhere(folder: Path) -> None:
    (folder / "/".join("d" * 40)).mkdir(parents=True)
    assert any("folders deep" in fault for fault in faults(folder))


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "sources/../stdout.txt", "", ".", "C:\\x", "a\0b"])
def test_a_subject_that_leaves_the_folder_is_not_looked_at(folder: Path, name: str) -> None:
    (folder.parent / "outside.txt").write_bytes(b"")
    claims = json.loads((folder / MANIFEST).read_bytes())
    claims["subject"].append({"name": name, "digest": {"sha256": sha256(b"")}})
    (folder / MANIFEST).write_bytes(document(claims))
    assert f"{ascii(name)[1:-1]}: missing" in faults(folder)


def _escaped(files: Files) -> None:
    files["sources/\x1b[2J\n evil.py"] = b""


def test_names_are_shown_escaped(folder: Path) -> None:
    assert any("\\x1b[2J\\n evil.py" in fault for fault in reseal(folder, _escaped))


HOSTILE = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "as deep as it can be read": b"[" * 400 + b"]" * 400,
    "key twice": b'{"seq":1,"seq":1}',
    "NaN": b"NaN",
    "infinite": b"[-Infinity]",
    "overflowing": b"1e999",
    "minus zero": b"-0",
    "five thousand digits": b"9" * 5_000,
    "sixty digits": b"9" * 60,
    "not ASCII": "\u00e9".encode(),
    "no UTF-8": b"\xff",
    "lone surrogate": b'"\\ud800"',
    "control": b'"\\u001b[2J\\n"',
    "spaces": b"[1, 2]",
    "nothing": b"",
    "null": b"null",
    "empty list": b"[]",
    "empty object": b"{}",
    "number": b"7",
    "text": b'"a"',
}


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".json")])
@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("end", [b"", b"\n"], ids=["", "LF"])
def test_a_hostile_file_is_a_fault_and_nothing_more(folder: Path, name: str, payload: bytes, end: bytes) -> None:
    events = json.loads((folder / "events.json").read_bytes())
    (folder / name).write_bytes(payload + end)
    if name != MANIFEST:
        remake_manifest(folder, events)
    assert any(fault.startswith(f"{name}: ") for fault in faults(folder))


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_event_is_a_fault_and_nothing_more(folder: Path, payload: bytes) -> None:
    events = json.loads((folder / "events.json").read_bytes())
    lines = (folder / "events.json").read_bytes().split(b",\n")
    lines[3] = payload
    (folder / "events.json").write_bytes(b",\n".join(lines))
    remake_manifest(folder, events)
    assert any(fault.startswith("events.json: ") for fault in faults(folder))


# Forgeries by someone who makes chain, review and manifest follow, and still contradicts what stands elsewhere.


def claims(files: Files, outcome: str, **stop: Any) -> None:
    """Let all that says how the run ended say this."""
    for kind in ("run_ended", "stop", "record_ended"):
        facts(files, kind)["outcome"] = outcome
    facts(files, "stop").update(stop)


def drop(files: Files, kind: str, number: int = 0) -> None:
    files["events.json"] = [event for event in files["events.json"] if event["facts"] is not facts(files, kind, number)]


def cut_too_early(files: Files) -> None:
    events = files["events.json"]
    (ended,) = [event for event in events if event["facts"].get("call") == 2 and event["kind"] == "model_call_ended"]
    ended.update(kind="run_cut", facts={"by": "deadline"})
    cut = {**ended, "kind": "model_call_cut", "facts": {"call": 2, "fate": "was cut off with the run"}}
    events.insert(events.index(ended) + 1, cut)
    calls = files["accounting.json"]["calls"]
    calls[1] |= dict.fromkeys(("reported", "input", "output", "total"))
    files["accounting.json"] |= {"known_subtotal": 403, "usage_known": False}
    files["accounting.json"]["estimate"] |= {"usd": "0.00083925", "calls_without_usage": 1}
    files["accounting.json"]["estimate"]["covers"] = "the known part only"
    claims(files, "deadline", known_subtotal=403, usage_known=False)


def credited(files: Files, *changed: tuple[str, int | None]) -> None:
    for kind, number in changed:
        found = facts(files, kind)
        (found["receipt"] if number is None else found["receipts"][number]).update(text_sha256=DIGEST)


def executed(files: Files) -> None:
    for receipt in (facts(files, "tool_call_timed_out")["receipt"], facts(files, "stop")["receipts"][1]):
        receipt.update(outcome="executed", text_sha256=DIGEST, text_chars=3)
        del receipt["source_gap"]


def over_budget(files: Files) -> None:
    """The budget was reached at once, and tools ran and the model was asked again."""
    facts(files, "run_started")["limits"]["token_budget"] = 1
    claims(files, "token_budget")


def priced_loopback(files: Files) -> None:
    facts(files, "record_started").update(endpoint="loopback")
    files["provenance.json"].update(endpoint="loopback")


def again(files: Files) -> None:
    files["events.json"].insert(-1, copy.deepcopy(files["events.json"][2]))


FORGERIES: dict[str, Edit] = {
    "outcome where it stopped": lambda files: facts(files, "stop").update(outcome="deadline"),
    "outcome where it ended": lambda files: facts(files, "run_ended").update(outcome="deadline"),
    "outcome of the whole": lambda files: facts(files, "record_ended").update(outcome="deadline"),
    "outcome everywhere": lambda files: claims(files, "empty_answer"),
    "known subtotal": lambda files: facts(files, "stop").update(known_subtotal=459),
    "usage known": lambda files: facts(files, "stop").update(usage_known=False),
    "model calls": lambda files: facts(files, "stop").update(model_calls=1),
    "receipt dropped": lambda files: facts(files, "stop")["receipts"].pop(),
    "receipt doubled": lambda files: facts(files, "stop")["receipts"].append(TIMED_OUT),
    "receipts swapped": lambda files: facts(files, "stop")["receipts"].reverse(),
    "id of a proposal": lambda files: facts(files, "model_call_ended")["proposed"][1].update(id="c9"),
    "tool of a proposal": lambda files: facts(files, "model_call_ended")["proposed"][1].update(tool="other"),
    "id where it ended": lambda files: facts(files, "tool_call_timed_out")["receipt"].update(call_id="c9"),
    "id on its receipt": lambda files: facts(files, "stop")["receipts"][1].update(call_id="c9"),
    "digest on a receipt": lambda files: credited(files, ("stop", 1)),
    "digest everywhere": lambda files: credited(files, ("stop", 1), ("tool_call_timed_out", None)),
    "digest changed": lambda files: facts(files, "stop")["receipts"][0].update(text_sha256="cd" * 32),
    "end of a call dropped": lambda files: drop(files, "tool_call_timed_out"),
    "stop dropped": lambda files: drop(files, "stop"),
    "start dropped": lambda files: drop(files, "run_started"),
    "event after the stop": again,
    "usage of the events": lambda files: facts(files, "model_call_ended")["usage"].update(total_tokens=404),
    "usage of the accounting": lambda files: files["accounting.json"]["calls"][0]["reported"].update(total_tokens=404),
    "total of the accounting": lambda files: files["accounting.json"]["calls"][0].update(total=404),
    "sum of the accounting": lambda files: files["accounting.json"].update(known_subtotal=461),
    "accounting says unknown": lambda files: files["accounting.json"].update(usage_known=False),
    "row dropped": lambda files: files["accounting.json"]["calls"].pop(),
    "estimate changed": lambda files: files["accounting.json"]["estimate"].update(usd="0.0008"),
    "estimate dropped": lambda files: files["accounting.json"].update(estimate=None),
    "price changed": lambda files: files["accounting.json"]["price"].update(input_usd_per_million="1"),
    "source copy changed": lambda files: files.update({"sources/graph.py": b"pass\n"}),
    "source copy added": lambda files: files.update({"sources/other.py": b"pass\n"}),
    "deadline too early": cut_too_early,
    # What the folder contradicts as well, in a place that is easily left unread.
    "input of the accounting": lambda files: files["accounting.json"]["calls"][0].update(input=1),
    "thinking of the accounting": lambda files: files["accounting.json"]["calls"][0].update(thinking=0),
    "what the estimate covers": lambda files: files["accounting.json"]["estimate"].update(covers="the known part only"),
    "price of a loopback": priced_loopback,
    "endpoint where it started": lambda files: facts(files, "record_started").update(endpoint="loopback"),
    "model where it started": lambda files: facts(files, "record_started").update(model="another"),
    "endpoint of the provenance": lambda files: files["provenance.json"].update(endpoint="loopback"),
    "model of the provenance": lambda files: files["provenance.json"].update(model="another"),
    "model where it stopped": lambda files: facts(files, "stop").update(model="another"),
    "answer": lambda files: facts(files, "stop").update(answer="All is well."),
    "timed out and executed": executed,
    "went on after its budget": over_budget,
    "no sources": lambda files: files.update({"provenance.json": {"schema_version": 1}}),
    "clean with a copy": lambda files: files["provenance.json"].update(dirty=False),
    "end of the record dropped": lambda files: drop(files, "record_ended"),
}


@pytest.mark.parametrize("edit", FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_that_contradicts_itself_is_found(folder: Path, edit: Edit) -> None:
    assert reseal(folder, edit) != []


def test_resealing_without_a_change_holds(folder: Path) -> None:
    assert reseal(folder, lambda files: None) == []


# The command line.


def check(*arguments: str, cwd: Path = ROOT, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run verify.py to its end; whatever it meets, it speaks plain lines and never in a traceback."""
    command = [sys.executable, str(ROOT / "verify.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, check=False, **options)
    for line in (done.stdout + done.stderr).splitlines():
        assert line.isascii()
        assert line.isprintable()
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)
    return done


@pytest.mark.slow
def test_a_folder_that_holds_is_said_to_and_the_status_is_0(folder: Path) -> None:
    done = check(str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder} holds\n", "")


@pytest.mark.slow
def test_each_fault_has_a_line_with_its_file_and_the_status_is_1(folder: Path) -> None:
    (folder / "stdout.txt").write_bytes(b"outcome: paused\n")
    (folder / "extra.txt").write_bytes(b"")
    done = check(str(folder))
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        [
            f"{folder}/extra.txt: is no subject of the manifest",
            f"{folder}/stdout.txt: its digest is not the one in the manifest",
            f"{folder}/manifest.json: differs from the one that the folder gives",
        ],
    )


@pytest.mark.slow
def test_one_bad_folder_of_several_makes_the_status_1(folder: Path, original: Path) -> None:
    (folder / "stdout.txt").unlink()
    done = check(str(original), str(folder))
    assert done.returncode == 1
    assert f"{original} holds\n" in done.stdout
    assert f"{folder}/stdout.txt: missing\n" in done.stdout


@pytest.mark.slow
def test_help_says_how_it_is_called() -> None:
    done = check("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "python verify.py " in done.stdout
    assert "--all" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--all", "x"], ["-x"], ["--all"]], ids=" ".join)
def test_a_command_line_that_names_no_folder_is_told_what_to_type(arguments: list[str], tmp_path: Path) -> None:
    done = check(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "; for example: python verify.py runs" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_all_are_those_in_runs(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "runs" / "first")
    shutil.copytree(original, tmp_path / "runs" / "second")
    (tmp_path / "runs" / "README.md").write_text("no folder")
    done = check("--all", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "runs/first holds\nruns/second holds\n")
    (tmp_path / "runs" / "second" / MANIFEST).unlink()
    done = check("--all", cwd=tmp_path)
    assert done.returncode == 1
    assert "runs/second/manifest.json: missing: no run folder, or one that is not sealed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nowhere", "stdout.txt", "x" * 300, "x" * 5_000, "a\nb", "caf\u00e9", "x/" * 3_000])
def test_what_is_no_folder_is_a_fault(name: str, folder: Path) -> None:
    done = check(name, cwd=folder)
    assert done.returncode == 1
    assert done.stdout.endswith(": there is no such folder\n")


@pytest.mark.slow
def test_a_folder_by_an_odd_name_is_shown_escaped(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "\x1b[2J\nruns")
    done = check("\x1b[2J\nruns", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "\\x1b[2J\\nruns holds\n")


@pytest.mark.slow
def test_a_folder_of_many_large_files_does_not_fill_the_memory(folder: Path) -> None:
    for number in range(12):
        sparse(folder / f"{number}.bin", MAX_BYTES)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))

    done = check(str(folder), preexec_fn=limit)
    assert done.returncode == 1
    assert "9.bin: " in done.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_early_gets_no_traceback(folder: Path) -> None:
    for number in range(2_000):
        (folder / f"{number}.txt").touch()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "verify.py"), str(folder)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["verify.py"], ["-m", "evidence.verify"]], ids=" ".join)
def test_a_check_needs_two_files_and_the_standard_library(folder: Path, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "evidence").mkdir()
    for name in ("verify.py", "evidence/verify.py", "evidence/rederive.py"):
        shutil.copy(ROOT / name, tmp_path / name)

    def check() -> tuple[int, str, str]:
        whole = [sys.executable, "-S", "-E", *command, str(folder)]
        done = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout, done.stderr

    assert check() == (0, f"{folder} holds\n", "")
    (folder / "stdout.txt").write_bytes(b"outcome: paused\n")
    assert check() == (
        1,
        f"{folder}/stdout.txt: its digest is not the one in the manifest\n"
        f"{folder}/manifest.json: differs from the one that the folder gives\n",
        "",
    )
