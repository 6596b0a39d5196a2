"""A zip opened safely: one that climbs out, links, hides or unpacks to far too much is refused as a whole.

Nothing is ever unpacked to a path: members are read, one at a time, into files without a name.
"""

import io
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from bounded.text import safe_name
from sources.jobs import Fault, SourceError

MAX_ENTRIES = 10_000
MAX_MEMBER = 1 << 30
MAX_TOTAL = 4 << 30
# Logs shrink to a tenth or a fiftieth; deflate can do 1,032. Below the floor no ratio does harm.
MAX_RATIO = 200
RATIO_FLOOR = 8 << 20
# `zipfile` reads the directory of an archive at once, and makes an object of each entry before they can be counted.
_MAX_DIRECTORY = 4 << 20
_IN_MEMORY = 8 << 20
_PIECE = 64 << 10
_ENCRYPTED = 0x1 | 0x40 | 0x2000
# What `zipfile` raises for bytes that are no zip, or a broken one. NotImplementedError is a RuntimeError.
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One file in an archive; `size` in bytes once unpacked, as declared, and held to when it is read."""

    name: str
    size: int
    place: int


class _Modest(io.BufferedReader):
    """A file of which no one reads more at once than a directory of a sane size."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY:
            raise SourceError(Fault.TOO_LARGE, f"the zip is refused: it lists more than {MAX_ENTRIES:,} entries")
        return super().read(size)


def members(path: Path) -> list[Member]:
    """The files in an archive, in its own order.

    Raises:
        SourceError: it is refused, and why; it is no zip, or a broken one; it cannot be read.
    """
    with _opened(path) as archive:
        return [
            Member(name=info.filename, size=info.file_size, place=place)
            for place, info in enumerate(archive.infolist())
            if not info.is_dir()
        ]


def unpack(path: Path, member: Member) -> BinaryIO:
    """The content of one member as a seekable file without a name, at its start. The caller closes it.

    Raises:
        SourceError: as `members`; the archive is not the one that was listed; the member is broken.
    """
    with ExitStack() as until_whole:
        unpacked = until_whole.enter_context(cast(BinaryIO, SpooledTemporaryFile(max_size=_IN_MEMORY)))  # noqa: SIM115
        with _opened(path) as archive:
            info = next(iter(archive.infolist()[member.place : member.place + 1]), None)
            if info is None or (info.filename, info.file_size) != (member.name, member.size):
                raise SourceError(Fault.GONE, f"{path.name} has changed since its jobs were listed")
            with archive.open(info) as packed:
                shutil.copyfileobj(packed, unpacked, _PIECE)
        if unpacked.tell() != member.size:
            raise SourceError(Fault.UNREADABLE, f"{safe_name(member.name)} ends before its declared size")
        unpacked.seek(0)
        until_whole.pop_all()
        return unpacked


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with _Modest(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            _check(archive.infolist(), path.stat().st_size)
            yield archive
    except PermissionError as exc:
        raise SourceError(Fault.FORBIDDEN, f"{path.name} cannot be read: {exc.strerror}") from exc
    except (*_BROKEN, OSError) as exc:
        raise SourceError(Fault.UNREADABLE, f"{path.name} cannot be read as a zip: {exc}") from exc


def _check(infos: list[zipfile.ZipInfo], packed: int) -> None:
    if len(infos) > MAX_ENTRIES:
        raise _refused(Fault.TOO_LARGE, f"it lists {len(infos):,} entries, more than {MAX_ENTRIES:,}")
    for info in infos:
        name = safe_name(info.orig_filename)
        if _climbs_out(info.orig_filename):
            raise _refused(Fault.UNREADABLE, f"its entry {name} names a place outside of the archive")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            what = "a link" if kind == stat.S_IFLNK else "a special file"
            raise _refused(Fault.UNREADABLE, f"its entry {name} is {what}")
        if info.flag_bits & _ENCRYPTED:
            raise _refused(Fault.UNREADABLE, f"its entry {name} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _refused(Fault.UNREADABLE, f"its entry {name} is packed in a way other than deflate")
        if info.file_size > MAX_MEMBER:
            raise _refused(Fault.TOO_LARGE, f"its entry {name} would unpack to {info.file_size:,} bytes")
        if info.file_size > max(RATIO_FLOOR, MAX_RATIO * info.compress_size):
            raise _refused(
                Fault.TOO_LARGE,
                f"its entry {name} would unpack from {info.compress_size:,} bytes to {info.file_size:,}",
            )
    # Entries that overlap are each of a sane ratio: together they are not.
    total = sum(info.file_size for info in infos)
    if total > min(MAX_TOTAL, max(RATIO_FLOOR, MAX_RATIO * packed)):
        raise _refused(Fault.TOO_LARGE, f"its {packed:,} bytes would unpack to {total:,}")


def _climbs_out(name: str) -> bool:
    # `zipfile` itself ends a name at its NUL, and takes a backslash for a separator on one system only.
    return not name or bool(re.match(r"/|[A-Za-z]:", name) or re.search(r"[\\\0]|(?:^|/)\.\.(?:/|$)", name))


def _refused(fault: Fault, why: str) -> SourceError:
    return SourceError(fault, f"the zip is refused: {why}")
