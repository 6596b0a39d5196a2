"""The offline reviewer reads every changed file to its end, and claims nothing that it has not seen there."""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from bounded.usage import judge
from episode import Request, task_of
from models.offline_review import OfflineReviewer
from models.reply import call_id_fault
from reviewing.changes import Changes
from reviewing.coverage import Coverage, manifest_of
from reviewing.findings import parse_findings
from reviewing.tools import inspection_tools

Answer = Callable[[Any], ToolMessage]
Found = Callable[[Mapping[str, str]], list[tuple[str, str, int]]]
SECRET = "fake-secret-0123"


def asked(manifest: Mapping[str, int | None]) -> list[BaseMessage]:
    request = Request(goal="Review a change.", task="Look.", subject_root=Path())
    return [SystemMessage("You review."), HumanMessage(task_of(request, manifest))]


async def talk(messages: list[BaseMessage], answer: Answer, *, rounds: int = 50) -> list[dict[str, Any]]:
    """Go on with the conversation until the findings come."""
    for _ in range(rounds):
        reply = await OfflineReviewer().ainvoke(messages)
        messages.append(reply)
        assert judge(reply.usage_metadata).fault is None
        assert call_id_fault(reply) is None
        if not reply.tool_calls:
            return json.loads(reply.text)  # type: ignore[no-any-return]
        messages += [answer(call) for call in reply.tool_calls]
    raise AssertionError(f"it went on for more than {rounds} rounds")


def reads(messages: list[BaseMessage]) -> list[list[tuple[str, int]]]:
    """What each reply asked for."""
    replies = [message.tool_calls for message in messages if isinstance(message, AIMessage) and message.tool_calls]
    return [[(call["args"]["path"], call["args"]["start_line"]) for call in calls] for calls in replies]


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """Severity, file and line of each finding in these files, read by the real tools."""

    def find(files: Mapping[str, str]) -> list[tuple[str, str, int]]:
        for name, text in files.items():
            (tmp_path / name).write_bytes(text.encode())
        changes = Changes(files=dict.fromkeys(files, ""), against="base")
        (read,) = [
            tool
            for tool in inspection_tools(tmp_path, changes, secrets=frozenset({SECRET}))
            if tool.name == "read_file"
        ]
        messages = asked(manifest_of(tmp_path, changes))
        said = asyncio.run(talk(messages, read.invoke))
        assert len(parse_findings(json.dumps(said), Coverage(None))) == len(said)
        return [(finding["severity"], finding["file"], finding["line"]) for finding in said]

    return find


def test_sound_files_and_files_of_unknown_kinds_give_no_findings(found: Found) -> None:
    sound = {
        "a.py": "def f() -> int:\n    return 1\n",
        "a.json": '{"a": [1]}\n',
        "a.toml": 'a = 1\n[b]\nc = "d"\n',
        "a.txt": "def (\n",
        "empty.py": "",
        "empty.json": "",
        "crlf.py": "if x:\r\n    y = 1\r\n",
        "bare.py": "x = 1",
    }
    assert found(sound) == []


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", "x = 1\ny = (\n", 2),
        ("a.py", "if x:\ny = 1\n", 2),
        ("a.py", "x = 1\n" * 4_500 + "def\n" + "x = 1\n" * 10, 4_501),
        ("a.json", '{\n "a": 1\n,}\n', 3),  # some Pythons blame the comma, some what follows it
        ("a.json", f"{'[' * 1_000}\n" * 100, 1),
        ("a.toml", "a = 1\nb = \n", 2),
        ("a.toml", "a = 1\nb = [\n", 2),
    ],
    ids=["open", "indent", "far", "comma", "deep", "value", "end"],
)
def test_a_syntax_error_is_a_blocker_at_its_line(name: str, text: str, line: int, found: Found) -> None:
    assert found({name: text}) == [("blocker", name, line)]


@pytest.mark.parametrize("marker", ["<<<<<<< HEAD", ">>>>>>> other", "||||||| base"])
def test_a_conflict_marker_is_a_blocker_and_makes_no_syntax_error_of_its_own(marker: str, found: Found) -> None:
    assert found({"a.py": f"x = 1\n{marker}\ny = 2\n"}) == [("blocker", "a.py", 2)]


def test_a_whole_conflict_is_found_at_each_of_its_markers(found: Found) -> None:
    text = "<<<<<<< HEAD\na\n=======\nb\n>>>>>>> other\n"
    assert [line for _, _, line in found({"a.md": text})] == [1, 3, 5]


@pytest.mark.parametrize("text", ["Changes\n=======\n", " <<<<<<< HEAD\n", "<<<<<<<<\n", "x <<<<<<< y\n", "========\n"])
def test_what_only_looks_like_a_conflict_is_none(text: str, found: Found) -> None:
    assert found({"a.md": text}) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [("a.py", "    breakpoint()"), ("a.py", "import pdb"), ("a.py", "ipdb.set_trace()"), ("a.js", "  debugger;")],
)
def test_a_debugging_leftover_is_minor(name: str, line: str, found: Found) -> None:
    text = f"def f():\n    pass\n{line}\n" if not line.startswith("    ") else f"def f():\n{line}\n"
    assert found({name: text}) == [("minor", name, text.count("\n"))]


@pytest.mark.parametrize("line", ["debugger_port = 1", "# call breakpoint() here", "import pdbx"])
def test_what_only_names_a_debugger_is_none(line: str, found: Found) -> None:
    assert found({"a.py": f"{line}\n"}) == []


def test_a_masked_value_is_major_and_its_file_is_not_parsed(found: Found) -> None:
    assert found({"a.py": f"x = 1\nkey = '{SECRET}'\ny = (\n"}) == [("major", "a.py", 2)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps({"a": "x" * 3_000}) + "\n"),
        ("a.py", f"x = '{'x' * 3_000}'\ny = 1\n"),
        ("a.py", "x = 1\n\x0c\ny = 2\n"),
        ("a.json", '{"a": "b\u2028c"}\n'),
    ],
    ids=["long json", "long python", "form feed", "line separator"],
)
def test_a_sound_file_of_which_the_tool_shows_no_true_copy_is_not_called_broken(
    name: str, text: str, found: Found
) -> None:
    assert found({name: text}) == []


async def test_every_changed_file_is_asked_for_at_most_eight_a_reply_and_on_to_its_end() -> None:
    messages = asked({f"{n}.txt": 5 for n in range(10)} | {"gone.txt": None})

    def two_lines(call: Any) -> ToolMessage:
        path, start = call["args"]["path"], call["args"]["start_line"]
        if path == "gone.txt":
            return ToolMessage("gone.txt is no file", tool_call_id=call["id"])
        end = min(start + 1, 5)
        rows = [f"{path}, lines {start}-{end} of 5", *(f"{n}| <<<<<<< {n}" for n in range(start, end + 1))]
        return ToolMessage("\n".join(rows), tool_call_id=call["id"])

    said = await talk(messages, two_lines)
    asked_for = reads(messages)
    assert max(len(calls) for calls in asked_for) == 8
    assert sorted(itertools.chain(*asked_for)) == sorted(
        [(f"{n}.txt", start) for n in range(10) for start in (1, 3, 5)] + [("gone.txt", 1)]
    )
    assert [(finding["file"], finding["line"]) for finding in said] == [
        (f"{n}.txt", line) for n in range(10) for line in range(1, 6)
    ]
    assert all(len(finding["receipts"]) == 3 for finding in said)


@pytest.mark.parametrize("failed", ["error", "success"])
async def test_a_file_of_which_only_the_beginning_was_read_is_not_called_broken(failed: Any) -> None:
    def first_part_only(call: Any) -> ToolMessage:
        if call["args"]["start_line"] == 1:
            text = "a.py, lines 1-2 of 3; this call ends here, the next goes on with start_line=3\n1| x = (\n2|     1"
            return ToolMessage(text, tool_call_id=call["id"])
        return ToolMessage("It cannot be read.", tool_call_id=call["id"], status=failed)

    messages = asked({"a.py": 3})
    assert await talk(messages, first_part_only) == []
    assert reads(messages) == [[("a.py", 1)], [("a.py", 3)]]


async def test_what_was_cut_off_to_the_room_is_not_called_broken_and_its_last_line_is_not_judged() -> None:
    def cut(call: Any) -> ToolMessage:
        return ToolMessage("a.py, lines 1-4 of 4\n1| x = (\n2| breakpoint()", tool_call_id=call["id"])

    said = await talk(asked({"a.py": 4}), cut)
    assert [finding for finding in said if finding["severity"] == "blocker"] == []
    assert [finding for finding in said if finding["line"] == 2] == []


async def test_without_changed_files_there_is_nothing_to_say() -> None:
    messages = asked({})
    assert await talk(messages, lambda call: ToolMessage("", tool_call_id=call["id"])) == []
    assert reads(messages) == []


async def test_a_file_that_is_named_twice_is_reviewed_once() -> None:
    messages = asked({"a.txt": 1})
    messages[1] = HumanMessage(messages[1].text + "\n- 1 line: a.txt")

    def marked(call: Any) -> ToolMessage:
        return ToolMessage("a.txt, lines 1-1 of 1\n1| <<<<<<< x", tool_call_id=call["id"])

    assert len(await talk(messages, marked)) == 1


LAST = 30
NUMBERS = st.integers(0, LAST)
ROW_TEXTS = st.sampled_from(["x = 1", "(", "<<<<<<< a", "breakpoint()", "[masked]", "}", ""]) | st.text(max_size=9)
ROWS = st.lists(st.tuples(st.integers(1, LAST), ROW_TEXTS), max_size=9) | st.lists(ROW_TEXTS, max_size=9).map(
    lambda texts: list(enumerate(texts, 1))
)
ANSWERS = st.tuples(st.sampled_from(["success", "success", "error"]), st.tuples(NUMBERS, NUMBERS, NUMBERS), ROWS)


@given(
    st.lists(st.sampled_from(["a.py", "b.json", "c.toml", "d.txt"]), min_size=1, max_size=4, unique=True),
    st.lists(ANSWERS | st.text(max_size=40), min_size=1, max_size=6),
)
def test_whatever_the_tool_says_it_comes_to_an_end_and_claims_only_lines_that_it_was_shown(
    files: list[str], answers: list[Any]
) -> None:
    shown: dict[str, set[int]] = {file: set() for file in files}
    said = itertools.cycle(answers)

    def answer(call: Any) -> ToolMessage:
        path, given_now = call["args"]["path"], next(said)
        if isinstance(given_now, str):
            return ToolMessage(given_now, tool_call_id=call["id"])
        status, (first, last, total), rows = given_now
        if status == "success":
            shown[path] |= {number for number, _ in rows}
        text = "\n".join([f"{path}, lines {first}-{last} of {total}", *(f"{number}| {row}" for number, row in rows)])
        return ToolMessage(text, tool_call_id=call["id"], status=status)

    messages = asked(dict.fromkeys(files, 9))
    findings = asyncio.run(talk(messages, answer, rounds=LAST + 1))
    assert len(list(itertools.chain(*reads(messages)))) <= len(files) * LAST
    assert [finding for finding in findings if finding["line"] not in shown[finding["file"]]] == []
    assert len(parse_findings(json.dumps(findings), Coverage(None))) == len(findings)
