"""Zips: what is read out of a sane one, and every way in which one is refused."""

import contextlib
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sources.archive import MAX_ENTRIES, MAX_MEMBER, members, unpack
from sources.jobs import Fault, SourceError


def zipped(*entries: "tuple[str | zipfile.ZipInfo, bytes]", pack: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", pack) as archive:
        for name, content in entries:
            archive.writestr(name, content, pack)
    return made.getvalue()


def with_mode(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info


def on_disk(folder: Path, content: bytes) -> Path:
    path = folder / "logs.zip"
    path.write_bytes(content)
    return path


def patched(content: bytes, offset: int, value: int, format: str = "<H") -> bytes:
    """The archive with a number replaced in every entry of its directory."""
    changed = bytearray(content)
    place = content.find(b"PK\x01\x02")
    while place >= 0:
        struct.pack_into(format, changed, place + offset, value)
        place = content.find(b"PK\x01\x02", place + 1)
    return bytes(changed)


def refusal(path: Path) -> SourceError:
    with pytest.raises(SourceError) as refused:
        members(path)
    return refused.value


def test_members_are_listed_and_read(tmp_path: Path) -> None:
    path = on_disk(tmp_path, zipped(("a.log", b"one"), ("b/", b""), ("b/c.txt", b"x" * 200_000)))
    found = members(path)
    assert [(member.name, member.size) for member in found] == [("a.log", 3), ("b/c.txt", 200_000)]
    with unpack(path, found[1]) as content:
        assert content.read() == b"x" * 200_000
        content.seek(199_999)
        assert content.read() == b"x"


@pytest.mark.parametrize(
    "name", ["../a.log", "a/../../b.log", "a/..", "/etc/a.log", "C:/a.log", "c:a.log", "a\\b.log", "..\\a.log"]
)
def test_a_zip_that_climbs_out_is_refused_as_a_whole(tmp_path: Path, name: str) -> None:
    why = refusal(on_disk(tmp_path, zipped(("fine.log", b"1"), (name, b"2"))))
    assert why.fault is Fault.UNREADABLE
    assert "names a place outside of the archive" in str(why)


def test_a_name_that_goes_on_behind_a_nul_is_refused(tmp_path: Path) -> None:
    content = zipped(("a.logX../b", b"1")).replace(b"a.logX../b", b"a.log\0../b")
    assert "names a place outside" in str(refusal(on_disk(tmp_path, content)))


def test_a_name_with_two_dots_inside_is_no_climb(tmp_path: Path) -> None:
    path = on_disk(tmp_path, zipped(("a..b/1..2.log", b"1"), ("...log", b"2")))
    assert [member.name for member in members(path)] == ["a..b/1..2.log", "...log"]


@pytest.mark.parametrize(
    ("mode", "what"),
    [(stat.S_IFLNK | 0o777, "a link"), (stat.S_IFIFO | 0o644, "a special file"), (stat.S_IFBLK, "a special file")],
)
def test_a_zip_with_a_link_or_a_device_is_refused_as_a_whole(tmp_path: Path, mode: int, what: str) -> None:
    path = on_disk(tmp_path, zipped(("fine.log", b"1"), (with_mode("a.log", mode), b"/etc/passwd")))
    assert str(refusal(path)) == f"unreadable: the zip is refused: its entry a.log is {what}"


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = on_disk(tmp_path, patched(zipped(("a.log", b"1")), 8, 1))
    assert "its entry a.log is encrypted" in str(refusal(path))


def test_a_packing_that_no_one_uses_for_logs_is_refused(tmp_path: Path) -> None:
    path = on_disk(tmp_path, zipped(("a.log", b"1"), pack=zipfile.ZIP_LZMA))
    assert "packed in a way other than deflate" in str(refusal(path))


BOMBS: Mapping[str, Callable[[], bytes]] = {
    "its entry a.log would unpack from 20,3": lambda: zipped(("a.log", b"\0" * (20 << 20))),
    "its entry a.log would unpack to 1,073,741,825 bytes": lambda: patched(
        zipped(("a.log", b"1")), 24, MAX_MEMBER + 1, "<I"
    ),
    "its 36,1": lambda: zipped(*((f"{n}.log", b"\0" * (7 << 20)) for n in range(5))),
    "it lists 10,001 entries, more than 10,000": lambda: zipped(*((f"{n}", b"") for n in range(MAX_ENTRIES + 1))),
    "it lists more than 10,000 entries": lambda: zipped(*((f"{n:0400}", b"") for n in range(MAX_ENTRIES))),
}


@pytest.mark.parametrize("why", BOMBS)
def test_a_bomb_is_refused_before_anything_is_unpacked(tmp_path: Path, why: str) -> None:
    refused = refusal(on_disk(tmp_path, BOMBS[why]()))
    assert refused.fault is Fault.TOO_LARGE
    assert f"the zip is refused: {why}" in str(refused)


def test_entries_that_share_their_bytes_are_refused_for_their_sum(tmp_path: Path) -> None:
    packed = zipped(("0.log", os.urandom(64) * 100_000))
    directory = packed.index(b"PK\x01\x02")
    entry = packed[directory : packed.index(b"PK\x05\x06")]
    many = b"".join(entry.replace(b"0.log", b"%d.log" % n) for n in range(10))
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 10, 10, len(many), directory, 0)
    assert "would unpack to 64,000,000" in str(refusal(on_disk(tmp_path, packed[:directory] + many + end)))


def test_a_zip_within_a_zip_is_a_file_like_any_other_and_never_opened(tmp_path: Path) -> None:
    inner = zipped(("b.log", b"\0" * (20 << 20)))
    path = on_disk(tmp_path, zipped(("inner.zip", inner), ("a.log", b"1")))
    assert [member.name for member in members(path)] == ["inner.zip", "a.log"]


@pytest.mark.parametrize("size", [2, 200])
def test_a_member_of_another_size_than_declared_is_unreadable(tmp_path: Path, size: int) -> None:
    path = on_disk(tmp_path, patched(zipped(("a.log", b"twenty bytes of text")), 24, size, "<I"))
    (member,) = members(path)
    with pytest.raises(SourceError) as failed:
        unpack(path, member)
    assert failed.value.fault is Fault.UNREADABLE


def test_a_member_with_a_broken_checksum_is_unreadable(tmp_path: Path) -> None:
    path = on_disk(tmp_path, patched(zipped(("a.log", b"text")), 16, zlib.crc32(b"else"), "<I"))
    (member,) = members(path)
    with pytest.raises(SourceError, match="Bad CRC-32"):
        unpack(path, member)


def test_a_zip_that_changed_since_it_was_listed_is_not_read_at_the_old_place(tmp_path: Path) -> None:
    path = on_disk(tmp_path, zipped(("a.log", b"1"), ("b.log", b"2")))
    _, second = members(path)
    on_disk(tmp_path, zipped(("c.log", b"1"), ("d.log", b"2")))
    with pytest.raises(SourceError, match=r"logs\.zip has changed") as changed:
        unpack(path, second)
    assert changed.value.fault is Fault.GONE


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + b"\xff" * 18, zipped(("a.log", b"1"))[:-5]])
def test_what_is_no_zip_is_unreadable(tmp_path: Path, content: bytes) -> None:
    why = refusal(on_disk(tmp_path, content))
    assert why.fault is Fault.UNREADABLE
    assert str(why).startswith("unreadable: logs.zip cannot be read as a zip: ")
    assert "\n" not in str(why)


SANE = zipped(("a.log", b"1" * 50), ("b/c.txt", b"E   assert 1 == 2\n" * 9), (with_mode("d.log", 0o100644), b""))


@given(st.binary() | st.lists(st.tuples(st.integers(0, len(SANE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path: Path, change: bytes | list[tuple[int, int]]) -> None:
    content = bytearray(SANE)
    if isinstance(change, bytes):
        content += change
    else:
        for place, value in change:
            content[place] = value
    path = on_disk(tmp_path, bytes(content))
    with contextlib.suppress(SourceError):
        for member in members(path):
            with contextlib.suppress(SourceError), unpack(path, member) as unpacked:
                assert len(unpacked.read()) == member.size
