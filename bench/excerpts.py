"""Measures the excerpt on real logs of which people marked the lines that state the error, and its speed.

python -m bench.excerpts FOLDER

FOLDER holds NAME.log beside NAME.groundtruth, whose lines `E 12-18` name lines of the log; CR, LF and CRLF end one.
"""

import io
import re
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sources.excerpt import excerpt
from sources.lines import cleaned

SIZES = (2_000, 4_000, 8_000)
FIRST_LINES = 20  # of the first marked block, the lines that the excerpt should hold
SHORT = 8  # characters that a line has at least to be told from others
BEGINNING = 120  # characters by which a longer line is known where it is cut
MAXRSS_A_MB = 1024**2 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One log: what a person marked in it, and of that the first block."""

    log: bytes
    marked: list[str]
    first: list[str]


def read_case(path: Path) -> Case:
    log = path.read_bytes()
    lines = [cleaned(raw).strip() for raw in re.split(rb"\r\n|\n|\r", log)]
    found = re.findall(r"^E\s+(\d+)(?:-(\d+))?", path.with_suffix(".groundtruth").read_text(encoding="utf-8"), re.M)
    blocks = sorted((range(int(a) - 1, int(b or a)) for a, b in found), key=lambda block: block.start)
    told = [[lines[n] for n in block if n < len(lines) and len(lines[n]) >= SHORT] for block in blocks]
    marked = [line for block in told for line in block]
    first = [lines[n] for n in blocks[0][:FIRST_LINES] if n < len(lines) and len(lines[n]) >= SHORT]
    return Case(log=log, marked=marked, first=first or marked)


def holds(text: str, line: str) -> bool:
    return f"| {line}\n" in text or (len(line) > BEGINNING and f"| {line[:BEGINNING]}" in text)


def score(cases: list[Case], size: int) -> str:
    texts = [re.sub(r"^(\d+\|)[ \t]*", r"\1 ", excerpt(io.BytesIO(case.log), size), flags=re.M) for case in cases]
    pairs = list(zip(cases, texts, strict=True))
    hits = sum(any(holds(text, line) for line in case.marked) for case, text in pairs)
    cover = statistics.mean(sum(holds(text, line) for line in case.first) / len(case.first) for case, text in pairs)
    over = sum(len(text.encode()) > size for text in texts)
    return (
        f"{size:>6,} bytes: a marked line in {hits} of {len(cases)}, {cover:.3f} of the first block, {over} too large"
    )


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else None
    paths = sorted(folder.glob("*.log")) if folder else []
    cases = [read_case(path) for path in paths if path.with_suffix(".groundtruth").exists()]
    if not cases:
        print(f"skipped: no marked logs{f' in {folder}' if folder else ''}; python -m bench.excerpts FOLDER")
        return 0
    for size in SIZES:
        print(score(cases, size))
    together = b"".join(case.log for case in cases)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        excerpt(io.BytesIO(together))
        seconds.append(time.process_time() - start)
    print(f"{len(together) / 1e6 / min(seconds):.1f} MB a second of one core, best of {len(seconds)}")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MAXRSS_A_MB:.0f} MB at the most, the logs included")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
