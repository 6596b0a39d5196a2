"""A log's lines are numbered as an editor does and cleaned; a page shows some of them and is never too large."""

import io
import tracemalloc

import pytest

from sources.lines import Line, Page, cleaned, count, lines, raw_lines, readable_twice, unmasked

STAMP = "2026-11-27T09:14:02.1184310Z"


def texts(log: bytes) -> list[str]:
    with readable_twice(io.BytesIO(log)) as file:
        return [line.text for line in lines(file, 1, 99)]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain", "plain"),
        (f"{STAMP} stamped".encode(), "stamped"),
        (f"\ufeff{STAMP} stamped".encode(), "stamped"),
        (f"{STAMP}".encode(), ""),
        (f"[{STAMP}] jenkins".encode(), "jenkins"),
        (f"{STAMP} 00O gitlab".encode(), "gitlab"),
        (f"{STAMP} 01E+gitlab".encode(), "gitlab"),
        (f"build\tRun make\t{STAMP} make".encode(), "make"),
        (f"build\tRun make\t\ufeff{STAMP} make".encode(), "make"),
        (b"ok  \tshop/cart\t0.03s", "ok  \tshop/cart\t0.03s"),
        (b"\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07 \x1b[?25l\x1b(Bend", "red link end"),
        (b"section_start:1:script\r\x1b[0Ktitle", "title"),
        (b"10%\r50%\r100%\r", "100%"),
        (b"done\r\r", "done"),
        (b"a\x0bb\xe2\x80\xa8c", "a b c"),
        (b"nul\x00 and \xff\xfe", "nul and \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"),
        (b"trailing  \t ", "trailing"),
    ],
)
def test_a_line_shows_its_last_state_without_what_is_not_its_text(raw: bytes, shown: str) -> None:
    assert cleaned(raw) == shown
    assert unmasked(raw) == shown


def test_a_secret_is_masked_where_a_line_is_shown() -> None:
    assert cleaned(b"password=fake-secret-0123", frozenset({"unlike"})) == "password=[masked]"
    assert cleaned(b"it is fake-secret-0123", frozenset({"fake-secret-0123"})) == "it is [masked]"


def test_a_private_key_is_masked_line_by_line_and_a_digest_is_not() -> None:
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{'aB3/' * 16}\n  {'Zz09' * 16}\n{'deadbeef' * 8}\n"
    assert texts(key.encode()) == ["[masked]", "[masked]", "[masked]", "deadbeef" * 8]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"1%\r2%\nb\n", ["2%", "b"]),
        (b"a\x85b\x0cc\nd", ["a\N{REPLACEMENT CHARACTER}b c", "d"]),
        ("\ufeffa\nb".encode("utf-16-le"), ["a", "b"]),
        ("\ufeffa\r\nb".encode("utf-16-be"), ["a", "b"]),
    ],
)
def test_a_line_ends_where_an_editor_ends_it(log: bytes, shown: list[str]) -> None:
    assert texts(log) == shown
    with readable_twice(io.BytesIO(log)) as file:
        assert count(file) == len(shown)


def test_a_line_longer_than_what_is_looked_at_keeps_its_beginning_and_its_last_state() -> None:
    log = b"x" * 100_000 + b"\n" + b"p" * 50_000 + b"\r" + b"q" * 50_000 + b"\r\n" + b"r" * 16_383 + b"\rend\nlast"
    assert [(line[:1], len(line)) for line in texts(log)] == [("x", 16_384), ("q", 16_384), ("e", 3), ("l", 4)]


def test_a_line_without_an_end_is_read_in_bounded_memory() -> None:
    log = io.BytesIO(b"." * 32_000_000)
    tracemalloc.start()
    assert [len(raw) for raw in raw_lines(log)] == [16_384]
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_log_that_cannot_seek_can_be_read_twice() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, offset: int, whence: int = 0) -> int:
            raise OSError("a pipe")

    with readable_twice(Pipe(b"a\nb\n")) as file:
        assert (count(file), file.seek(0), count(file)) == (2, 0, 2)


def test_a_page_shows_lines_in_order_and_says_what_it_cut() -> None:
    page = Page(1_000, 1_300)
    for number in (1_290, 3, 4, 1_290):
        assert page.add(Line(number=number, text=f"line {number}"))
    assert page.text() == (
        "... 2 lines ...\n3| line 3\n4| line 4\n... 1,285 lines ...\n1290| line 1290\n... 10 lines ...\n"
    )


def test_a_page_is_never_larger_than_asked() -> None:
    for size in range(1, 300):
        page = Page(size, 40)
        page.head("heading")
        shown = [page.add(Line(number=number, text="ä" * number)) for number in range(1, 41, 3)]
        assert len(page.text().encode()) <= size
        assert size < 100 or any(shown)


def test_a_share_leaves_room_for_what_comes_later() -> None:
    page = Page(1_000, 2)
    assert not page.add(Line(number=1, text="x" * 100), 0.1)
    assert page.add(Line(number=1, text="x" * 100), 0.2)


def test_a_long_line_is_cut_where_the_page_is_small() -> None:
    page = Page(2_000, 1)
    page.add(Line(number=1, text="x" * 500))
    assert page.text() == f"1| {'x' * 165}…\n"
