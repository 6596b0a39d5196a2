"""Excerpts and named parts of any bytes at all, within their size and truly numbered; and the command line."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sources.excerpt import excerpt, part
from sources.lines import cleaned
from sources.test_excerpt import CLEANUP, NOISE, SHAPES

ROOT = Path(__file__).parent.parent
FRAGMENTS = [line for shape in SHAPES.values() for line in shape.split("\n")] + [
    *CLEANUP,
    *NOISE[:2],
    "",
    "\x1b[31m",
    "\t",
]
FRAGMENTS += ["##[group]Run x", "##[endgroup]", "##[error]x", "Finished: FAILURE", "\ufeff", "x" * 900, "1%\r2%\r"]
LOGS = st.one_of(
    st.binary(max_size=400),
    st.lists(st.tuples(st.sampled_from(FRAGMENTS), st.sampled_from(["\n", "\r\n", "\r", "\n\n"])), max_size=60).map(
        lambda some: "".join(text + end for text, end in some).encode()
    ),
    st.text(max_size=200).map(lambda text: f"\ufeff{text}\nerror: x".encode("utf-16-le", "replace")),
)
WHICH = st.one_of(
    st.sampled_from(["head", "tail", "search:error", "search:e"]), st.integers(1, 70).map(lambda line: f"around:{line}")
)


def hold(text: str, log: bytes, max_bytes: int) -> None:
    """Hold that a text is within its size, and each of its numbered lines is that line of the log."""
    assert len(text.encode()) <= max_bytes
    if log.startswith((b"\xff\xfe", b"\xfe\xff")):
        log = log.decode("utf-16", "replace").encode("utf-8", "replace")
    lines = log.split(b"\n")
    last = 0
    for shown in text.split("\n")[:-1]:
        if found := re.match(r"(\d+)\| ?(.*)$", shown):
            number, line = int(found[1]), cleaned(lines[int(found[1]) - 1])
            assert number > last
            assert found[2] == line or (found[2].endswith("…") and line.startswith(found[2][:-1]))
            last = number


@given(log=LOGS, max_bytes=st.integers(1, 3_000))
def test_any_bytes_give_an_excerpt_within_its_size_whose_numbers_are_true(log: bytes, max_bytes: int) -> None:
    hold(excerpt(io.BytesIO(log), max_bytes), log, max_bytes)


@given(log=LOGS, max_bytes=st.integers(1, 3_000), which=WHICH)
def test_any_part_of_any_bytes_is_within_its_size_and_its_numbers_are_true(
    log: bytes, max_bytes: int, which: str
) -> None:
    try:
        text = part(io.BytesIO(log), which, max_bytes)
    except ValueError as error:
        assert which.startswith("around:"), error  # noqa: PT017 - that it is raised is not what is tested
        return
    hold(text, log, max_bytes)


def test_context_of_very_long_lines_is_numbered_truly() -> None:
    log = b"".join(b"%d%s\n" % (n, b"x" * 9_000) for n in range(90)) + b"x.c:1:2: error: no\nexit status 1\n"
    text = excerpt(io.BytesIO(log), 8_000)
    assert len(text.splitlines()) > 5
    hold(text, log, 8_000)


LOG = b"".join(b"line %d\n" % n for n in range(1, 2_001))


@pytest.mark.parametrize(
    ("which", "shown"),
    [
        ("head", "1| line 1\n2| line 2\n3| line 3\n... 1,997 lines ...\n"),
        ("tail", "... 1,997 lines ...\n1998| line 1998\n1999| line 1999\n2000| line 2000\n"),
        ("around:900", "... 898 lines ...\n899| line 899\n900| line 900\n... 1,100 lines ...\n"),
        ("search:ne 1234", "1 line with 'ne 1234'\n... 1,233 lines ...\n1234| line 1234\n... 766 lines ...\n"),
        ("search:l.ne", "0 lines with 'l.ne'\n... 2,000 lines ...\n"),
    ],
)
def test_a_part_shows_the_lines_that_it_names(which: str, shown: str) -> None:
    assert part(io.BytesIO(LOG), which, len(shown) + 2) == shown


def test_a_text_is_searched_for_in_what_a_line_shows() -> None:
    log = b"[\x1b[1;31mERROR\x1b[m] full\npassword=fake-secret-0123\nplain\n"
    assert part(io.BytesIO(log), "search:[ERROR] full", 400).startswith("1 line with")
    assert part(io.BytesIO(log), "search:fake-secret", 400).startswith("0 lines with")


@pytest.mark.parametrize("which", ["", "middle", "around:", "around:x", "around:0", "around:2001", "search:", "head:3"])
def test_a_malformed_part_is_refused_in_one_line(which: str) -> None:
    with pytest.raises(ValueError, match=r"^part[^\n]+$"):
        part(io.BytesIO(LOG), which, 400)


def test_known_secrets_are_masked_before_a_line_is_cut() -> None:
    log = b"error: " + b"x" * 60 + b" fake-secret-0123 " + b"y" * 200
    for size in range(200, 420, 5):
        for text in (
            excerpt(io.BytesIO(log), size, {"fake-secret-0123"}),
            part(io.BytesIO(log), "head", size, {"fake-secret-0123"}),
        ):
            assert "fake-" not in text


def run(*arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "sources.excerpt", *arguments]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, timeout=60)


def test_the_command_reads_a_file_or_its_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "build.log"
    path.write_bytes(b"x.c:1:2: error: no\nexit status 1\n")
    for done in (run(str(path)), run("-", stdin=path.read_bytes()), run("--max-bytes", "60", str(path))):
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == b"1| x.c:1:2: error: no\n2| exit status 1\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "one file"),
        (["a", "b"], "one file"),
        (["--all", "a"], "one file"),
        (["--max-bytes", "0", "a"], "--max-bytes takes a number"),
        (["--max-bytes"], "--max-bytes takes a number"),
        (["missing.log"], "'missing.log' cannot be read: No such file"),
        (["."], "'.' cannot be read: Is a directory"),
    ],
)
def test_a_wrong_command_is_refused_with_the_right_one(arguments: list[str], why: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert why in done.stderr.decode()
    assert done.stderr.decode().count("\n") == 1
    assert b"python -m sources.excerpt [--max-bytes N] FILE|-" in done.stderr


def test_help_is_given() -> None:
    assert (run("--help").returncode, run("--help").stdout) == (
        0,
        b"usage: python -m sources.excerpt [--max-bytes N] FILE|-\n",
    )


def test_nothing_on_standard_input_is_no_passing_log() -> None:
    done = run("-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input is empty" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sources.excerpt", __file__]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "sources.excerpt", "--max-bytes", "900000", "-"]
    with subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.write(b"x.c:1:2: error: no\n" * 20_000)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
