"""The first reading of a log: which lines say something, in which step, and whether the job failed.

Memory is bounded: of each step so many lines of each strength are kept, by number and offset, and so many steps.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from sources.lines import CHUNK, LINE_BYTES, unmasked, unstamped
from sources.shapes import GATE, Place, Reading, Strength, Verdict, place, read

_MOST: Final = 100  # lines of one strength that a step keeps
_STEPS: Final = 8
_SCRIPT: Final = 1_000  # lines that the echo of a script has at most
# So many lines before a log's end an error is a sign of failure in itself, if nothing succeeded after it.
_NEAR: Final = {Strength.RAISED: 2, Strength.STATED: 30, Strength.NAMED: 20, Strength.ENDED: 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line that says something: its number, and where it begins in bytes."""

    number: int
    offset: int
    strength: Strength = Strength.NONE


@dataclass(slots=True, kw_only=True)
class Step:
    """What the first reading keeps of a step, or of a log that has none."""

    title: Mark | None = None
    causes: list[Mark] = field(default_factory=list)  # of each strength the first
    raised: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MOST))  # and of all the last
    summary: deque[Mark] = field(default_factory=lambda: deque(maxlen=4))
    end: Mark | None = None  # says that the job failed; what comes after it in the step is not the cause
    stop: Mark | None = None  # where the next step or the clean-up begins
    said: Mark | None = None  # says after the clean-up that the job failed
    failed: Verdict = Verdict.NONE
    kept: Counter[Strength] = field(default_factory=Counter)
    settled: int = 0  # so many of the causes stand before the last verdict

    def note(self, mark: Mark, reading: Reading) -> None:
        """Take what a line says into account."""
        if self.end:
            return
        if reading.verdict is Verdict.JOB_FAILED:
            self.failed = Verdict.JOB_FAILED
            if not reading.strength:
                self.end = mark
        elif reading.verdict is Verdict.FAILED:
            self.failed = self.failed if self.failed is Verdict.JOB_FAILED else Verdict.FAILED
            self.summary.append(mark)
        if reading.strength >= Strength.STATED and self.kept[mark.strength] < _MOST:
            self.kept[mark.strength] += 1
            self.causes.append(mark)
        elif reading.strength >= Strength.RAISED:
            self.raised.append(mark)
        if reading.verdict in (Verdict.FAILED, Verdict.JOB_FAILED):
            self.settled = len(self.causes)

    def passed(self) -> None:
        """A tool succeeded: what was taken for a cause since the verdict before did no harm, but for a full disk."""
        if self.end:
            return
        for mark in self.causes[self.settled :]:
            if mark.strength is not Strength.ENDED:
                self.kept[mark.strength] -= 1
                self.causes.remove(mark)
        self.settled = len(self.causes)
        self.raised.clear()


@dataclass(slots=True, kw_only=True)
class Scan:
    """What the first reading finds."""

    total: int = 0
    step: Step = field(default_factory=Step)
    failing: list[Step] = field(default_factory=list)  # in which the job failed
    suspect: list[Step] = field(default_factory=list)  # in which a tool did
    others: deque[Step] = field(default_factory=lambda: deque(maxlen=3))
    job: Verdict = Verdict.NONE
    tools: dict[str, Verdict] = field(default_factory=dict)
    passed: int = 0  # the last line that says that something passed
    cleanup: Mark | None = None
    script: int = 0  # where the echo of a script began, if it has not ended
    lost: int = 0  # the last line that says that something failed

    def note(self, number: int, offset: int, states: str, text: str) -> None:
        """Take a line into account; `states` is its text before what carriage returns overwrote was taken off."""
        mark, at = Mark(number=number, offset=offset), place(states)
        if at in (Place.SCRIPT, Place.STEP) and not self.cleanup:
            self.turn(mark)
        self.script = number if at is Place.SCRIPT else self.script
        if at is Place.SCRIPT_END or text.startswith("##[error]") or number > self.script + _SCRIPT:
            self.script = 0
        if at is Place.SCRIPT_END or self.script:
            return
        if at is Place.CLEANUP:
            self.cleanup = self.step.stop = self.cleanup or mark
        reading = read(text)
        if self.cleanup and text.startswith("##["):
            return
        if reading.verdict in (Verdict.JOB_PASSED, Verdict.JOB_FAILED):
            self.job = reading.verdict
        if self.cleanup:
            self.step.said = mark if reading.verdict is Verdict.JOB_FAILED else self.step.said
            return
        if reading.verdict is Verdict.PASSED:
            self.passed = number
            self.tools.pop("exit", None)
            if reading.tool != "go":  # its packages are built and tested side by side
                self.step.passed()
        elif reading.verdict is Verdict.FAILED:
            self.lost = number
        if reading.tool:
            self.tools[reading.tool] = reading.verdict
        self.step.note(Mark(number=number, offset=offset, strength=reading.strength), reading)

    def turn(self, title: Mark | None = None) -> None:
        """A step ends and the next begins."""
        step, self.step = self.step, Step(title=title)
        step.stop = step.stop or title
        if step.failed is Verdict.NONE and not step.said:
            self.others.append(step)
            return
        steps = self.suspect if step.failed is Verdict.FAILED and not step.said else self.failing
        if len(steps) < _STEPS:
            steps.append(step)

    def failed(self) -> bool:
        """Whether the log says so, or ends on an error."""
        if self.job is not Verdict.NONE:
            return self.job is Verdict.JOB_FAILED
        if Verdict.FAILED in self.tools.values() and not (self.cleanup and self.passed > self.lost):
            return True
        end = self.cleanup.number if self.cleanup else self.total + 1
        before = {strength: end - near for strength, near in _NEAR.items()}
        if not self.cleanup:
            before |= {Strength.RAISED: end - 12, Strength.NAMED: 0, Strength.ENDED: 0}  # it may be cut off
        marks = [mark for step in self.others for mark in (*step.causes, *step.raised)]
        return any(mark.number > max(self.passed, before[mark.strength]) for mark in marks)

    def steps(self) -> list[Step]:
        """Those to explain, the first to be explained first."""
        others = list(reversed(self.others))
        return self.failing or self.suspect or [step for step in others if step.causes or step.raised] or others[:1]


def read_through(file: BinaryIO) -> Scan:
    """Read a log from its start to its end, a chunk at a time."""
    found, offset, breaks, whole = Scan(), 0, 0, True
    while chunk := file.read(CHUNK):
        chunk += file.readline(CHUNK)
        at = 0
        for start in _hits(chunk.lower()):
            breaks, at = breaks + chunk.count(b"\n", at, start), start
            if start or whole:  # else it is the middle of a line that is longer than a chunk
                end = chunk.find(b"\n", start)
                raw = chunk[start : end if end >= 0 else len(chunk)]
                text = unmasked(raw)
                states = unstamped(raw[:LINE_BYTES].decode("utf-8", "replace")) if b"\r" in raw[:-1] else text
                found.note(breaks + 1, offset + start, states, text)
        breaks, whole = breaks + chunk.count(b"\n", at), chunk.endswith(b"\n")
        offset += len(chunk)
        found.total = breaks + (not whole)
    found.turn()
    return found


def _hits(low: bytes) -> list[int]:
    """Where the lines begin that hold a literal of the gate, each looked at once for each literal."""
    starts = set()
    for literal in GATE:
        at = low.find(literal)
        while at >= 0:
            starts.add(low.rfind(b"\n", 0, at + 1) + 1)  # some literals begin with the end of the line before
            end = low.find(b"\n", at + 1)
            at = low.find(literal, end) if end >= 0 else -1
    return sorted(starts)
