"""The inspection tools against real files and the real git: what they show, what they credit, what they refuse."""

import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from bounded.deadlines import now
from bounded.text import MASK, clean
from reviewing import changes as module
from reviewing.changes import Changes, ReviewError
from reviewing.test_changes import git, hostile
from reviewing.tools import MAX_LINE, MAX_LISTED, MAX_READ_LINES, Extent, inspection_tools

NOTHING = Changes(files={}, against="0" * 40)
SECRET = "obviously-fake-value"
KEY = ["-----BEGIN RSA PRIVATE KEY-----", "MIIEfakefakefake", "fakefakefakefakefake==", "-----END RSA PRIVATE KEY-----"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def repo(root: Path) -> Path:
    git(root, "init", "-q")
    (root / "a.py").write_text("def find():\n    return 'needle'\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def tools_of(root: Path, changes: Changes = NOTHING) -> dict[str, BaseTool]:
    return {tool.name: tool for tool in inspection_tools(root, changes, secrets=frozenset({SECRET}))}


def called(root: Path, tool: str, changes: Changes = NOTHING, **args: Any) -> ToolMessage:
    call = {"type": "tool_call", "name": tool, "args": args, "id": "1"}
    answer = tools_of(root, changes)[tool].invoke(call)
    assert isinstance(answer, ToolMessage)
    return answer


async def acalled(root: Path, tool: str, **args: Any) -> str:
    answer = await tools_of(root)[tool].ainvoke({"type": "tool_call", "name": tool, "args": args, "id": "1"})
    assert answer.artifact is None
    return str(answer.text)


def read(root: Path, content: bytes, **args: Any) -> tuple[list[str], Extent]:
    (root / "f").write_bytes(content)
    answer = called(root, "read_file", path="f", **args)
    assert isinstance(answer.artifact, Extent)
    return answer.text.split("\n"), answer.artifact


def test_a_file_is_read_with_its_numbers_and_the_extent_says_what_was_opened(root: Path) -> None:
    content = "é\nb\nc\n".encode()
    rows, extent = read(root, content, start_line=2)
    assert rows == ["f, lines 2-3 of 3", "2| b", "3| c"]
    assert extent == Extent(
        opened_path="f",
        start_line=2,
        end_line=3,
        total_lines=3,
        eof=True,
        complete_sha256=hashlib.sha256(content).hexdigest(),
        source_bytes=len(content),
        line_ends=(23, 27),
    )


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"a\r\nb\r\n", ["1| a", "2| b"]),
        (b"a\nb", ["1| a", "2| b"]),
        (b"\n\n", ["1| ", "2| "]),
        (b"a\r\r\nb", ["1| a␤", "2| b"]),
        (b"x\x0b \x0c \x1c \xc2\x85 \xe2\x80\xa8 \xe2\x80\xa9 \r y\nz\n", ["1| x␤ ␤ <U+001C> ␤ ␤ ␤ ␤ y", "2| z"]),
        (b"\xef\xbb\xbfa\x00\x1b[31m\xe2\x80\xaeb\n".replace(b"\0", b""), ["1| a<U+001B>[31m<U+202E>b"]),
        (b'a = "\x1b]"; evil(); b = "\x07"\n', ['1| a = "<U+001B>]"; evil(); b = "<U+0007>"']),
        (b"caf\xe9\n2| forged\n", ["1| caf\N{REPLACEMENT CHARACTER}", "2| 2| forged"]),
    ],
)
def test_a_line_ends_at_lf_and_at_nothing_else(content: bytes, rows: list[str], root: Path) -> None:
    shown, extent = read(root, content)
    assert shown[1:] == rows
    assert (extent.total_lines, extent.end_line, extent.eof) == (len(rows), len(rows), True)


def test_an_empty_file_is_read_and_has_no_lines(root: Path) -> None:
    rows, extent = read(root, b"")
    assert rows == ["f, no lines: it is empty"]
    assert (extent.start_line, extent.end_line, extent.total_lines, extent.eof) == (1, 0, 0, True)
    assert extent.line_ends == ()


def test_a_read_in_the_middle_is_not_the_end(root: Path) -> None:
    rows, extent = read(root, b"a\nb\nc\n", start_line=2, end_line=2)
    assert rows == ["f, lines 2-2 of 3", "2| b"]
    assert (extent.eof, extent.line_ends) == (False, (len("\n".join(rows)),))
    assert read(root, b"a\nb\nc\n", end_line=99)[1].end_line == 3


@pytest.mark.parametrize(("start", "end"), [(0, 0), (-1, 0), (4, 0), (2, 1), (1, -1)])
def test_lines_that_are_not_there_are_refused_with_how_many_there_are(start: int, end: int, root: Path) -> None:
    (root / "f").write_text("a\nb\nc\n")
    answer = called(root, "read_file", path="f", start_line=start, end_line=end)
    assert (answer.status, answer.artifact) == ("success", None)
    assert "f has 3 lines" in answer.text


def test_a_long_line_is_shown_cut_and_the_extent_ends_before_it(root: Path) -> None:
    lines = ["a", "x" * MAX_LINE, "y" * (MAX_LINE + 1), "z" * 9_000, "b", "c"]
    content = "\n".join(lines).encode()
    rows, extent = read(root, content)
    assert rows[0].startswith("f, lines 1-4 of 6; over 2,000 characters a line is cut and does not count as read")
    assert rows[0].endswith("the next goes on with start_line=5")
    assert rows[3] == f"3| {'y' * MAX_LINE} [... 1 of 2,001 characters cut here ...]"
    assert len(rows) == 5
    assert (extent.end_line, len(extent.line_ends), extent.eof) == (2, 2, False)
    assert read(root, content, start_line=3)[1].end_line == 2
    assert read(root, content, start_line=5)[1].eof


def test_a_call_returns_so_many_lines_and_says_where_the_next_goes_on(root: Path) -> None:
    rows, extent = read(root, b"x\n" * (MAX_READ_LINES + 5), start_line=3)
    assert rows[0] == "f, lines 3-2002 of 2005; this call ends here, the next goes on with start_line=2003"
    assert len(rows) == MAX_READ_LINES + 1
    assert (extent.end_line, extent.eof) == (2002, False)


def test_secrets_and_whole_private_keys_are_masked_wherever_a_read_begins(root: Path) -> None:
    lines = [f"say {SECRET}", *KEY, "MIIEfakefakefake"]
    content = "\n".join(lines).encode()
    masked = ["say [masked]", MASK, MASK, MASK, KEY[-1], "MIIEfakefakefake"]
    assert [row.partition("| ")[2] for row in read(root, content)[0][1:]] == masked
    assert [row.partition("| ")[2] for row in read(root, content, start_line=3)[0][1:]] == masked[2:]


def test_a_key_in_a_string_or_a_comment_is_masked_and_code_behind_its_first_line_is_not_hidden(root: Path) -> None:
    lines = [KEY[0], '  "MIIEfakefakefake\\n"', "# MIIEfakefakefake", "Proc-Type: 4,ENCRYPTED", "", "MIIEfakefakefake",
             "import os", "x=exploit0exploit0", "os.system(exploit)"]  # fmt: skip
    shown = [row.partition("| ")[2] for row in read(root, "\n".join(lines).encode())[0][1:]]
    assert shown == [MASK, MASK, MASK, lines[3], "", MASK, *lines[6:]]


def test_a_key_in_a_diff_is_masked_whichever_way_it_goes(root: Path) -> None:
    for sign in "+- ":
        diff = "@@ -1,4 +1,4 @@\n" + "".join(f"{sign}{line}\n" for line in KEY) + f"+{SECRET} stays out\r\n"
        changes = Changes(files={"k": diff}, against="abc")
        shown = called(root, "show_diff", changes, path="k").text.split("\n")
        assert shown == [
            "k, against abc",
            "@@ -1,4 +1,4 @@",
            *[f"{sign}{MASK}"] * 3,
            sign + KEY[-1],
            f"+{MASK} stays out",
        ]


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "~", "", "a\0b", ".git/config", "out", "folder", "pipe", "missing", "\x1b[31mred"]
)
def test_a_refusal_is_ordinary_text_without_an_extent_and_says_what_is_right(path: str, root: Path) -> None:
    (root / "out").symlink_to("/etc/passwd")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    answer = called(root, "read_file", path=path)
    assert (answer.status, answer.artifact) == ("success", None)
    assert re.search("list_files shows|only what is inside", answer.text)
    assert clean(answer.text) == answer.text


@pytest.mark.parametrize("content", [b"\0", b"text\0", b"\xff" * 11, b"\xfe\xff\x00a", b"ab\xff" * 1_000])
def test_a_binary_file_is_refused(content: bytes, root: Path) -> None:
    (root / "f").write_bytes(content)
    assert "binary" in called(root, "read_file", path="f").text


def test_a_file_with_a_few_bytes_of_another_encoding_is_text(root: Path) -> None:
    assert read(root, b"\xe9" * 10)[1].total_lines == 1
    assert read(root, (b"x" * 99 + b"\xe9") * 100)[1].total_lines == 1


def test_a_link_is_credited_to_what_it_leads_to(root: Path) -> None:
    (root / "target").write_text("x\n")
    (root / "link").symlink_to("target")
    assert called(root, "read_file", path="link").artifact.opened_path == "target"


PIECES = st.sampled_from(
    ["x", " ", "\t", "é", "🎉", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\x1b[31m", "\x1b]0;t", "\x9b",
     "\u202e", "\ufeff", "Set-Cookie:", "cookie:", "password=", "token: ", "bearer ", "://u:p@", "hunter2hunter2",
     SECRET, MASK, SECRET[:9], "12| ", "authorization:", '"', "'", *KEY]
)  # fmt: skip
CONTENTS = st.lists(st.lists(PIECES, max_size=8).map("".join), max_size=12).flatmap(
    lambda lines: st.sampled_from(["\n", "\r\n"]).flatmap(
        lambda end: st.sampled_from(["", end]).map(lambda last: (end.join(lines) + last).encode())
    )
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=CONTENTS, start=st.integers(1, 12))
def test_cleaning_what_was_read_again_changes_nothing(content: bytes, start: int, root: Path) -> None:
    (root / "f").write_bytes(content)
    answer = called(root, "read_file", path="f", start_line=start)
    assert clean(answer.text, {SECRET}) == answer.text
    assert SECRET not in answer.text
    if answer.artifact is not None:
        assert len(answer.text.split("\n")) == len(answer.artifact.line_ends) + 1


def test_a_header_of_a_cookie_at_the_end_of_a_line_leaves_the_next_row_alone(root: Path) -> None:
    for line, shown in (("Set-Cookie:", f"Set-Cookie:{MASK}"), ("password=cookie:", f"password={MASK}")):
        rows, extent = read(root, f"{line}\nharmless\n".encode())
        assert rows[1:] == [f"1| {shown}", "2| harmless"]
        assert clean("\n".join(rows)) == "\n".join(rows)
        assert extent.end_line == 2


def test_the_largest_files_are_read_quickly(root: Path) -> None:
    for content in (b"\n" * 2_000_000, b"x" * 2_000_000, b"\xe2\x80\xa8" * 600_000, "\n".join(KEY * 15_000).encode()):
        started = now()
        read(root, content)
        assert now() - started < 10


@pytest.mark.parametrize("glob", ["", "*.py", "**/*.py", "src/**/*.py", "src/"])
async def test_a_literal_is_found_in_tracked_and_new_files(glob: str, repo: Path) -> None:
    (repo / "src").mkdir()
    (repo / "src" / "new.py").write_text("x\nnee(dle\r\nneedle\n")
    (repo / ".gitignore").write_text("ignored\n")
    (repo / "ignored").write_text("nee(dle\n")
    assert await acalled(repo, "query_code", query="nee(dle", glob=glob) == "1 lines hold it\nsrc/new.py:2: nee(dle"


async def test_a_regular_expression_is_one_only_when_asked_for(repo: Path) -> None:
    assert await acalled(repo, "query_code", query="n[e]+dle") == "no line holds it"
    assert "a.py:2:" in await acalled(repo, "query_code", query="n[e]+dle", regex=True)
    assert "Unmatched (" in await acalled(repo, "query_code", query="(", regex=True)


async def test_a_folder_that_is_no_repository_is_searched_and_listed_as_well(root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "b.txt").write_text("needle\n")
    assert await acalled(root, "query_code", query="needle", glob="*.txt") == "1 lines hold it\nsub/b.txt:1: needle"
    assert await acalled(root, "list_files") == "1 files\nsub/b.txt"


@pytest.mark.parametrize("query", ["--open-files-in-pager=x", "-e", "-f/etc/passwd", ":(top)", "$(id)", "; id"])
async def test_a_query_is_never_an_option_or_a_command(query: str, repo: Path) -> None:
    (repo / "odd").write_text(f"{query}\n")
    assert await acalled(repo, "query_code", query=query) == f"1 lines hold it\nodd:1: {query}"


@pytest.mark.parametrize(
    "args", [{"query": ""}, {"query": "a\nb"}, {"query": "a\0b"}, {"query": "\ud800"}, {"query": "x" * 501},
             {"query": "x", "glob": "../*"}, {"query": "x", "glob": "/etc/*"}, {"query": "x", "glob": "a\nb"}]
)  # fmt: skip
async def test_a_query_that_cannot_be_one_is_refused(args: dict[str, str], repo: Path) -> None:
    assert re.search("one line|is empty|relative to the root", await acalled(repo, "query_code", **args))


async def test_pathspec_magic_in_a_glob_is_only_a_name(repo: Path) -> None:
    for glob in (":(top)a.py", ":!b.py", ":/"):
        assert await acalled(repo, "query_code", query="needle", glob=glob) == "no line holds it"


async def test_hits_are_masked_cut_and_kept_to_one_row_each(repo: Path) -> None:
    (repo / "b").write_text(f"needle {SECRET} \x1b[31m\rforged:1: x\n{'y' * 600}needle\n")
    (repo / "bin").write_bytes(b"\0needle\n\xff\xfeneedle\n")
    rows = (await acalled(repo, "query_code", query="needle", glob="b*")).split("\n")
    assert rows[0] == "2 lines hold it; 2 more are not shown, as they are no text"
    assert rows[1] == "b:1: needle [masked] <U+001B>[31m␤forged:1: x"
    assert rows[2] == f"b:2: {'y' * 500} [... 106 of 606 characters cut here ...]"


async def test_an_attribute_hides_no_source_from_a_query(repo: Path) -> None:
    (repo / ".gitattributes").write_text("*.py binary\n")
    assert "a.py:2:" in await acalled(repo, "query_code", query="needle")


async def test_a_search_with_too_much_to_say_is_ended_and_says_so(repo: Path) -> None:
    (repo / "big").write_text("needle in a long line of hay\n" * 20_000)
    text = await acalled(repo, "query_code", query="needle")
    assert "the search was ended at 200,000 bytes" in text.split("\n")[0]
    assert len(text) < 400_000


async def test_a_folder_that_became_a_link_is_not_searched_through(repo: Path, tmp_path: Path) -> None:
    (repo / "d").mkdir()
    (repo / "d" / "x").write_text("inside\n")
    git(repo, "add", "-A")
    (repo / "d" / "x").unlink()
    (repo / "d").rmdir()
    (tmp_path / "x").write_text("secret of the machine\n")
    (repo / "d").symlink_to(tmp_path)
    assert "d/x:1:secret of the machine" in git(repo, "grep", "-n", "machine")
    assert await acalled(repo, "query_code", query="machine") == "no line holds it"


@pytest.mark.slow
async def test_an_expression_that_eats_memory_is_ended_by_a_limit(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GIT_MEMORY", 100_000_000)
    started = now()
    text = await acalled(repo, "query_code", query="((a{1,255}){1,255}){1,255}", regex=True)
    assert text.startswith("git grep cannot do it:")
    assert now() - started < 5  # without the limit it takes 5 GB, and much longer


async def test_no_program_runs_that_a_hostile_repository_names(repo: Path, tmp_path: Path) -> None:
    canary = hostile(repo, tmp_path)
    (repo / "a.py").write_text("needle again\n")
    subprocess.run(["git", "status"], cwd=repo, capture_output=True, check=True)  # noqa: ASYNC221
    assert canary.read_text()
    canary.unlink()
    assert "a.py:1: needle again" in await acalled(repo, "query_code", query="needle")
    assert await acalled(repo, "list_files") == "1 files\na.py"
    assert not canary.exists()


async def test_without_git_searching_and_listing_say_what_is_missing(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await acalled(repo, "query_code", query="x") == "git is not installed here, and this needs it"
    assert await acalled(repo, "list_files") == "git is not installed here, and this needs it"
    assert called(repo, "read_file", path="a.py").artifact.total_lines == 2


async def test_ten_thousand_files_are_listed_up_to_a_limit_with_a_note(root: Path) -> None:
    for folder in range(100):
        (root / f"{folder:02}").mkdir()
        for number in range(100):
            (root / f"{folder:02}" / f"{number:02}.py").touch()
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").touch()
    rows = called(root.parent, "list_files").text.split("\n")
    assert rows[0] == "10,000 files, of which 1,000 are listed; give a narrower pattern"
    assert rows[1:] == sorted(rows[1:])
    assert len(rows) == MAX_LISTED + 1
    (root / ".git" / "HEAD").unlink()
    (root / ".git").rmdir()
    git(root, "init", "-q")
    rows = (await acalled(root, "list_files")).split("\n")
    assert rows[0] == "10,000 files, of which 1,000 are listed; give a narrower pattern"
    assert len(rows) == MAX_LISTED + 1


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["a.py", "docs/b.md", "src/d.py", "src/deep/c.py"]),
        ("src/", ["src/d.py", "src/deep/c.py"]),
        ("*.py", ["a.py", "src/d.py", "src/deep/c.py"]),
        ("**/*.py", ["a.py", "src/d.py", "src/deep/c.py"]),
        ("src/**/*.py", ["src/d.py", "src/deep/c.py"]),
        ("*deep*", ["src/deep/c.py"]),
        ("src/*d*.py", ["src/d.py", "src/deep/c.py"]),
        ("d.py*d.py", []),
        ("[a-z].py", []),
        ("*" * 500, ["a.py", "docs/b.md", "src/d.py", "src/deep/c.py"]),
    ],
)
def test_a_pattern_is_a_part_of_a_path_or_stands_for_a_whole_one(pattern: str, found: list[str], root: Path) -> None:
    for name in ("a.py", "docs/b.md", "src/d.py", "src/deep/c.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    assert called(root, "list_files", pattern=pattern).text.split("\n") == [f"{len(found)} files", *found]


def test_only_a_changed_file_has_a_diff_and_a_wrong_name_is_told_the_right_ones(root: Path) -> None:
    changes = Changes(files={"a b": "@@\n+x\n", "bin": ""}, against="abc")
    assert called(root, "show_diff", changes, path="./a b").text == "a b, against abc\n@@\n+x"
    assert "git shows no text" in called(root, "show_diff", changes, path="bin").text
    assert called(root, "show_diff", changes, path="c").text == (
        "c is not among the changed files; these are: a b, bin"
    )


def test_a_root_that_cannot_be_read_makes_no_tools(root: Path) -> None:
    (root / "file").touch()
    for wrong in (root / "missing", root / "file"):
        with pytest.raises(ReviewError, match="cannot be read"):
            inspection_tools(wrong, NOTHING)
