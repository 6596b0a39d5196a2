"""Coverage: what was delivered whole is credited, and nothing else ever is."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import ToolMessage

from bounded.text import MASK, clean, visible
from reviewing.changes import Changes
from reviewing.coverage import Coverage, credited, manifest_of
from reviewing.test_tools import CONTENTS, SECRET
from reviewing.tools import MAX_LINE, Extent, inspection_tools

SECRETS = frozenset({SECRET})
OLD, NEW = "0" * 64, "1" * 64


def read(root: Path, path: str = "f", start_line: int = 1, end_line: int = 0) -> tuple[str, Extent]:
    tools = {tool.name: tool for tool in inspection_tools(root, Changes(files={}, against=""), secrets=SECRETS)}
    args = {"path": path, "start_line": start_line, "end_line": end_line}
    answer = tools["read_file"].invoke({"type": "tool_call", "name": "read_file", "args": args, "id": "1"})
    assert isinstance(answer, ToolMessage)
    assert isinstance(answer.artifact, Extent)
    return answer.text, answer.artifact


def read_all(coverage: Coverage, root: Path, path: str) -> None:
    text, extent = read(root, path)
    coverage.credit_extent(extent, text_given=text, tool_text=text)


def test_all_lines_of_all_files_are_complete_and_one_less_is_not() -> None:
    coverage = Coverage({"a": 3, "b": 1})
    coverage.credit("a", 1, 2, 3, OLD)
    coverage.credit("b", 1, 1, 1, OLD)
    assert coverage.report() == {
        "state": "incomplete",
        "missing_ranges": {"a": [[3, 3]]},
        "read_ranges": {"a": [[1, 2]], "b": [[1, 1]]},
    }
    coverage.credit("a", 3, 3, 3, OLD)
    assert coverage.report() == {
        "state": "complete",
        "missing_ranges": {},
        "read_ranges": {"a": [[1, 3]], "b": [[1, 1]]},
    }


def test_reads_in_any_order_and_over_each_other_come_to_the_same() -> None:
    coverage = Coverage({"a": 10})
    for start, end in ((7, 8), (2, 3), (3, 4), (10, 10), (2, 2)):
        coverage.credit("a", start, end, 10, OLD)
    report = coverage.report()
    assert report["read_ranges"] == {"a": [[2, 4], [7, 8], [10, 10]]}
    assert report["missing_ranges"] == {"a": [[1, 1], [5, 6], [9, 9]]}
    assert [line for line in range(12) if coverage.covers("a", line)] == [2, 3, 4, 7, 8, 10]
    assert not coverage.covers("b", 1)


def test_without_a_manifest_nothing_is_observed_and_what_was_read_is_still_told() -> None:
    coverage = Coverage(None)
    coverage.credit("a", 1, 1, 1, OLD)
    assert coverage.report() == {"state": "unobserved", "missing_ranges": {}, "read_ranges": {"a": [[1, 1]]}}


def test_an_empty_manifest_is_complete_since_it_was_declared_empty() -> None:
    assert Coverage({}).report()["state"] == "complete"
    assert Coverage({}).report()["reason"] == "declared_empty"


@pytest.mark.parametrize("manifest", [{}, {"a": 1}, {"gone": None}])
def test_any_gap_takes_complete_away_and_the_first_one_is_the_reason(manifest: dict[str, int | None]) -> None:
    coverage = Coverage(manifest)
    coverage.credit("a", 1, 1, 1, OLD)
    coverage.set_gap("native_tool_abandoned")
    coverage.set_gap("another")
    assert coverage.report()["state"] == "incomplete"
    assert coverage.report()["reason"] == "native_tool_abandoned"


def test_an_empty_file_needs_one_read_and_a_deleted_one_none() -> None:
    coverage = Coverage({"empty": 0, "gone": None})
    assert coverage.report()["missing_ranges"] == {"empty": []}
    coverage.credit("empty", 1, 0, 0, OLD)
    assert coverage.report() == {"state": "complete", "missing_ranges": {}, "read_ranges": {"empty": []}}


def test_a_file_that_changed_between_its_reads_loses_what_was_credited_before() -> None:
    coverage = Coverage({"a": 2})
    coverage.credit("a", 1, 1, 2, OLD)
    coverage.credit("a", 2, 2, 2, NEW)
    assert coverage.report()["missing_ranges"] == {"a": [[1, 1]]}
    coverage.credit("a", 1, 1, 2, NEW)
    assert coverage.report()["state"] == "complete"


def test_a_file_of_another_length_than_declared_is_not_the_one_that_was_declared() -> None:
    coverage = Coverage({"a": 2, "b": 0})
    coverage.credit("a", 1, 3, 3, OLD)
    coverage.credit("b", 1, 1, 1, OLD)
    assert coverage.report()["missing_ranges"] == {"a": [[1, 2]], "b": []}


@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 4), (3, 1), (5, 4)])
def test_lines_that_are_not_in_the_file_are_a_bug_of_the_caller(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="lies within its file"):
        Coverage(None).credit("a", start, end, 3, OLD)


def test_a_path_that_is_not_utf_8_can_be_stored() -> None:
    name = os.fsdecode(b"caf\xe9.py")
    report = Coverage({name: 1}).report()
    assert report["missing_ranges"] == {"caf\\xe9.py": [[1, 1]]}


def test_only_an_uncut_prefix_is_worth_anything(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one\ntwo\nthree")
    text, extent = read(tmp_path)
    assert credited(extent, text, text) == range(1, 4)
    assert credited(extent, text[:-1], text) == range(1, 3)
    assert credited(extent, text[: text.index("\n2|")], text) == range(1, 1)  # line 1 without its newline
    assert credited(extent, text[: text.index("2|")], text) == range(1, 2)
    assert list(credited(extent, "", text)) == []
    for other in (text + "\n", text[1:], text.replace("two", "2"), text[:20] + "\n[... cut ...]"):
        assert list(credited(extent, other, text)) == []


def test_an_empty_file_counts_as_read_only_if_the_model_was_told(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    text, extent = read(tmp_path)
    coverage = Coverage({"f": 0})
    coverage.credit("f", 1, 1, 1, OLD)
    assert list(coverage.credit_extent(extent, text_given=text[:5], tool_text=text)) == []
    assert coverage.report()["state"] == "incomplete"
    assert not coverage.covers("f", 1)
    assert list(coverage.credit_extent(extent, text_given=text, tool_text=text)) == []
    assert coverage.report()["state"] == "complete"


def test_real_files_of_every_kind_are_read_to_the_end(tmp_path: Path) -> None:
    contents = {
        "crlf": b"a\r\nb\r\n",
        "unfinished": b"a\nb",
        "separators": "a\u2028b\x85c\x0bd\x0ce\x1cf\rg\n".encode(),
        "empty": b"",
        "newlines": b"\n\n\n",
        "many": b"x\n" * 4_500,
        "key": b"-----BEGIN PRIVATE KEY-----\nfakefakefakefake\n-----END PRIVATE KEY-----\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    manifest = manifest_of(tmp_path, Changes(files=dict.fromkeys(contents, ""), against=""))
    assert list(manifest.values()) == [2, 2, 1, 0, 3, 4_500, 3]
    coverage = Coverage(manifest)
    for name in contents:
        start, total = 1, 1
        while start <= max(total, 1):
            text, extent = read(tmp_path, name, start)
            coverage.credit_extent(extent, text_given=text, tool_text=text)
            start, total = extent.end_line + 1 if extent.total_lines else 2, extent.total_lines
    assert coverage.report()["state"] == "complete"


def test_a_line_that_is_too_long_to_be_shown_stays_missing_and_those_around_it_do_not(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(f"a\n{'x' * (MAX_LINE + 1)}\nb\n")
    coverage = Coverage({"f": 3})
    for start in (1, 2, 3):
        text, extent = read(tmp_path, start_line=start)
        coverage.credit_extent(extent, text_given=text, tool_text=text)
    assert coverage.report()["missing_ranges"] == {"f": [[2, 2]]}


def test_a_real_file_that_changes_between_two_reads_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one\ntwo\n")
    coverage = Coverage({"f": 2})
    text, extent = read(tmp_path, end_line=1)
    coverage.credit_extent(extent, text_given=text, tool_text=text)
    (tmp_path / "f").write_text("ONE\ntwo\n")
    text, extent = read(tmp_path, start_line=2)
    coverage.credit_extent(extent, text_given=text[:3], tool_text=text)  # seen to have changed, and nothing delivered
    assert coverage.report()["missing_ranges"] == {"f": [[1, 2]]}
    coverage.credit_extent(extent, text_given=text, tool_text=text)
    assert coverage.report()["missing_ranges"] == {"f": [[1, 1]]}
    read_all(coverage, tmp_path, "f")
    assert coverage.report()["state"] == "complete"


def test_what_is_gone_has_no_lines_and_what_cannot_be_shown_stays_unread(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (tmp_path / "x").write_text("outside\n")
    (root / "link").symlink_to("../x")
    (root / "way").symlink_to("..")
    (root / "binary").write_bytes(b"\0\n\0")
    (root / "huge").write_bytes(b"x" * 2_000_000 + b"\nx\n")
    names = ("folder", "link", "way/x", "gone", "binary/x", "binary", "huge")
    manifest = manifest_of(root, Changes(files=dict.fromkeys(names, ""), against=""))
    assert list(manifest.values()) == [1, 1, None, None, None, 2, 1]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=CONTENTS, long=st.booleans(), start=st.integers(1, 12), cut=st.floats(0, 1.2))
def test_what_is_credited_never_exceeds_what_was_delivered(
    content: bytes, long: bool, start: int, cut: float, tmp_path: Path
) -> None:
    content += b"\n" + b"long " * 401 + b"\nend" if long else b""
    (tmp_path / "f").write_bytes(content)
    lines = content.decode().split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    start = min(start, max(len(lines), 1))
    text, extent = read(tmp_path, start_line=start)
    given_text = text[: int(cut * len(text))]
    whole = [row for row in re.findall(r"[^\n]*\n|[^\n]+$", given_text) if row.endswith("\n") or given_text == text]
    delivered = dict(row.removesuffix("\n").split("| ", 1) for row in whole[1:])
    lines_of = credited(extent, given_text, text)
    assert extent.total_lines == len(lines)
    assert lines_of.start == start
    assert set(map(str, lines_of)) == set(delivered) - {
        str(number) for number in range(extent.end_line + 1, len(lines) + 1)
    }
    for number in lines_of:
        line, shown = lines[number - 1].removesuffix("\r"), delivered[str(number)]
        line = line.removeprefix("\ufeff") if number == 1 else line
        expected = clean(clean(visible(line), SECRETS).replace("\n", "␤"), SECRETS)
        if shown == MASK != expected:  # the body of a private key
            assert re.fullmatch(r"[\s\"'(#*]*[A-Za-z0-9+/]{16,}=*[\s\"']*", line)
        else:
            assert shown in (
                expected,
                clean(expected + MASK, SECRETS),
            )  # a `cookie:` at its end is kept apart from the next row
            assert len(expected) <= MAX_LINE
    coverage = Coverage({"f": len(lines)})
    coverage.credit_extent(extent, text_given=given_text, tool_text=text)
    if coverage.report()["state"] == "complete" and lines:
        assert set(delivered) == {str(number + 1) for number in range(len(lines))}
