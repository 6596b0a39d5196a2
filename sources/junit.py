"""What a JUnit XML report says: how many tests ran, which of them failed, and their own words about it as lines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import ParseError, XMLParser

from sources.jobs import Fault, JobState, SourceError

MAX_REPORT = 32 << 20
MAX_FAILURES = 200
MAX_WORDS = 64 << 10
_MAX_NAME = 200
_MAX_DEPTH = 100
_NAMED = 3
_MAX_NAMED = 80
_SUITES = ("testsuites", "testsuite")
_FAILURES = ("failure", "error")  # not `flakyFailure` and `rerunFailure`: such a test passed in the end, or has both


@dataclass(slots=True)
class Failure:
    """One failed test: its name, its message, and the text below it in pieces, as the report has them but capped."""

    test: str
    message: str
    pieces: list[str] = field(default_factory=list)
    left: int = MAX_WORDS

    def add(self, text: str) -> None:
        if self.left > 0:
            self.pieces.append(text[: self.left])
            self.left -= len(text)


@dataclass(slots=True)
class Report:
    """What a report says, as far as it goes.

    Attributes:
        failed: tests that failed; of the first `MAX_FAILURES` of them `failures` holds what they say.
        declared: the most failures that any suite counts itself; it matters where no failed test is named.
        broken: why the report ends before its end; empty for a whole one.
    """

    tests: int = 0
    skipped: int = 0
    failed: int = 0
    declared: int = 0
    failures: list[Failure] = field(default_factory=list)
    broken: str = ""

    @property
    def state(self) -> JobState:
        """Failed as soon as one test is known to be; passed only by a whole report of tests that ran."""
        if self.failed or self.declared:
            return JobState.FAILED
        if self.broken or not self.tests:
            return JobState.UNKNOWN
        return JobState.SKIPPED if self.skipped == self.tests else JobState.PASSED

    @property
    def note(self) -> str:
        """The report in one sentence: `3 of 120 failed: a, b, c`."""
        if self.failed:
            names = [failure.test[:_MAX_NAMED] for failure in self.failures[:_NAMED]]
            said = f"{self.failed:,} of {self.tests:,} failed: {', '.join(names)}"
            said += ", ..." if self.failed > len(names) else ""
        elif self.declared:
            said = f"{self.declared:,} failed, and the report names none"
        else:
            said = f"{self.tests - self.skipped:,} passed" if self.tests else "no test ran"
        said += f", {self.skipped:,} skipped" if self.skipped else ""
        return f"{said}; the report is broken: {self.broken}" if self.broken else said

    def lines(self) -> str:
        """The report as a log: the note, then each failed test with what it says."""
        parts = [self.note]
        for failure in self.failures:
            first, _, rest = failure.message.strip().partition("\n")
            said = [f"FAILED {failure.test} - {first}" if first else f"FAILED {failure.test}"]
            words = "".join(failure.pieces).strip("\n")
            if rest and rest not in words:
                said.append(rest)
            parts.append("\n".join([*said, words]))
        if self.failed > len(self.failures):
            parts.append(f"... {self.failed - len(self.failures):,} more failed tests ...")
        return "\n\n".join(part.rstrip() for part in parts) + "\n"


class _NotAReport(Exception):
    """The outermost element is another one."""


def read_report(file: BinaryIO) -> Report | None:
    """Read a report; None if the file is XML of another kind. A report that is cut is read as far as it goes.

    Raises:
        SourceError: it is too large, declares a document type or entities (which could make it so), or is no XML.
    """
    content = file.read(MAX_REPORT + 1)
    if len(content) > MAX_REPORT:
        raise SourceError(Fault.TOO_LARGE, f"the report is larger than {MAX_REPORT >> 20} MiB")
    reader = _Reader()
    parser = XMLParser(target=reader, forbid_dtd=True)
    try:
        parser.feed(content)  # at once: some versions of expat take quadratic time for a long token in pieces
        parser.close()
    except _NotAReport:
        return None
    except DefusedXmlException as exc:
        raise SourceError(Fault.UNREADABLE, "the report is refused: it declares a document type or entities") from exc
    except (ParseError, ValueError, LookupError) as exc:  # the last two of an encoding that is none
        if not reader.path:
            raise SourceError(Fault.UNREADABLE, f"it is no XML: {exc}") from exc
        reader.report.broken = str(exc)
    return reader.report


class _Reader:
    """The parser's target: it builds no tree, so that the size of a report does not matter.

    Attributes:
        path: the names of the open elements; kept when the report breaks off.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.path: list[str] = []
        self._names: list[str] = []  # of the open suites and the open test
        self._outcome = ""  # of the open test: the first of its failures, or that it was skipped
        self._speaking: Failure | None = None

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        tag = tag.rpartition("}")[2]
        parent = self.path[-1] if self.path else ""
        if not parent and tag not in _SUITES:
            raise _NotAReport
        if len(self.path) == _MAX_DEPTH:
            raise SourceError(Fault.UNREADABLE, f"the report is refused: it is nested more than {_MAX_DEPTH} deep")
        self.path.append(tag)
        if tag in _SUITES:
            self._names.append(_name(attributes.get("name", "")))
            declared = sum(_count(attributes.get(kind, "")) for kind in ("failures", "errors"))
            self.report.declared = max(self.report.declared, declared)
        elif tag == "testcase":
            self.report.tests += 1
            self._outcome = ""
            parts = (attributes.get("classname", ""), attributes.get("name", ""))
            self._names.append(_name(".".join(part for part in parts if part)))
        elif tag in _FAILURES and (parent == "testcase" or parent in _SUITES):
            self._failed(parent, attributes)
        elif tag == "skipped" and parent == "testcase" and not self._outcome:
            self._outcome = tag
            self.report.skipped += 1

    def _failed(self, parent: str, attributes: Mapping[str, str]) -> None:
        report = self.report
        if parent in _SUITES:  # a suite that could not even begin: what it counts is not among its tests
            report.tests += 1
            self._outcome = ""
        if self._outcome in _FAILURES:  # the same test once more, at its tear-down
            if len(report.failures) == report.failed:
                self._speaking = report.failures[-1]
                self._speaking.add(f"\n{attributes.get('message', '')}\n")
            return
        report.skipped -= self._outcome == "skipped"
        self._outcome = "failure"
        report.failed += 1
        if len(report.failures) < MAX_FAILURES:
            message = attributes.get("message", "") or attributes.get("type", "")
            name = self._names[-1] or "a test without a name"
            self._speaking = Failure(test=name, message=message[:MAX_WORDS])
            report.failures.append(self._speaking)

    def data(self, text: str) -> None:
        if self._speaking is not None:
            self._speaking.add(text)

    def end(self, tag: str) -> None:
        closed = self.path.pop() if len(self.path) > 1 else self.path[0]
        if closed in _FAILURES:
            self._speaking = None
        elif closed in _SUITES or closed == "testcase":
            self._names.pop()

    def close(self) -> None:
        """What the parser asks of its target at the end."""


def _name(text: str) -> str:
    return " ".join(text[:_MAX_NAME].split())


def _count(value: str) -> int:
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0
