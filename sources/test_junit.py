"""A JUnit XML report: what it says of its tests, what it is refused for, and that no bytes break more than itself."""

import contextlib
import io
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sources.jobs import Fault, JobState, SourceError
from sources.junit import MAX_FAILURES, MAX_REPORT, MAX_WORDS, Report, read_report

PYTEST = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="1" tests="3" time="4.6">
<testcase classname="tests.test_cart" name="test_empty" time="0.1"/>
<testcase classname="tests.test_cart" name="test_later"><skipped type="pytest.skip" message="not yet"/></testcase>
<testcase classname="tests.test_cart" name="test_total">
<failure message="assert 2268 == 2520&#10; +  where 2268 = total()">
def test_total():
>       assert cart.total() == 2520
E       assert 2268 == 2520

tests/test_cart.py:41: AssertionError</failure><system-out>noise</system-out></testcase>
</testsuite></testsuites>"""


def read(text: str) -> Report:
    report = read_report(io.BytesIO(text.encode()))
    assert report is not None
    return report


def suite(*cases: str, attributes: str = "") -> str:
    return f"<testsuite {attributes}>{''.join(cases)}</testsuite>"


def failed(name: str, message: str = "boom", text: str = "") -> str:
    return f'<testcase name="{name}"><failure message="{message}">{text}</failure></testcase>'


def test_a_failed_test_is_named_in_the_note_and_speaks_in_the_lines() -> None:
    report = read(PYTEST)
    assert report.state is JobState.FAILED
    assert report.note == "1 of 3 failed: tests.test_cart.test_total, 1 skipped"
    assert report.lines().splitlines() == [
        "1 of 3 failed: tests.test_cart.test_total, 1 skipped",
        "",
        "FAILED tests.test_cart.test_total - assert 2268 == 2520",
        " +  where 2268 = total()",
        "def test_total():",
        ">       assert cart.total() == 2520",
        "E       assert 2268 == 2520",
        "",
        "tests/test_cart.py:41: AssertionError",
    ]


def test_a_report_without_a_failure_has_passed() -> None:
    report = read(suite('<testcase name="a"/>', '<testcase name="b"><skipped/></testcase>'))
    assert report.state is JobState.PASSED
    assert report.note == "1 passed, 1 skipped"
    assert report.lines() == "1 passed, 1 skipped\n"


@pytest.mark.parametrize(
    ("text", "state", "note"),
    [
        (suite(), JobState.UNKNOWN, "no test ran"),
        (suite('<testcase name="a"><skipped/></testcase>'), JobState.SKIPPED, "0 passed, 1 skipped"),
        (suite(attributes='failures="2" errors="1"'), JobState.FAILED, "3 failed, and the report names none"),
        (suite('<testcase name="a"/>', attributes='failures="none"'), JobState.PASSED, "1 passed"),
        (suite('<error message="no fixture"/>', attributes='name="db"'), JobState.FAILED, "1 of 1 failed: db"),
        (suite("<testcase><error/></testcase>"), JobState.FAILED, "1 of 1 failed: a test without a name"),
        (
            suite('<testcase name="a"><flakyFailure/><rerunFailure/></testcase>'),
            JobState.PASSED,
            "1 passed",
        ),
        (suite(*map(failed, "abcd")), JobState.FAILED, "4 of 4 failed: a, b, c, ..."),
    ],
)
def test_the_state_follows_from_the_tests(text: str, state: JobState, note: str) -> None:
    report = read(text)
    assert (report.state, report.note) == (state, note)


def test_a_test_that_fails_at_its_tear_down_as_well_counts_once_and_says_both() -> None:
    report = read(
        suite('<testcase name="a"><failure message="first">one</failure><error message="second">two</error></testcase>')
    )
    assert report.note == "1 of 1 failed: a"
    assert report.lines().split("\n\n")[1].splitlines() == ["FAILED a - first", "one", "second", "two"]


def test_a_namespace_and_nested_suites_change_nothing() -> None:
    report = read(f'<testsuites xmlns="urn:x">{suite(suite(failed("a")), failed("b"))}</testsuites>')
    assert report.note == "2 of 2 failed: a, b"


def test_a_name_of_several_lines_is_one_line() -> None:
    assert read(suite(failed("a&#10;b\tc"))).note == "1 of 1 failed: a b c"


def test_a_report_that_is_cut_is_read_as_far_as_it_goes() -> None:
    passed = read("<testsuite><testcase name='a'/><testcase name='b'>")
    assert passed.state is JobState.UNKNOWN
    assert passed.note.startswith("2 passed; the report is broken: no element found")
    counted = read(PYTEST[: PYTEST.index("<failure")])
    assert counted.state is JobState.FAILED
    assert counted.note.startswith("1 failed, and the report names none, 1 skipped; the report is broken")
    half = read(PYTEST[: PYTEST.index("E  ")])
    assert half.state is JobState.FAILED
    assert ">       assert cart.total() == 2520" in half.lines()


def test_xml_of_another_kind_is_no_report() -> None:
    assert read_report(io.BytesIO(b"<coverage line-rate='1'><testsuite/></coverage>")) is None


@pytest.mark.parametrize(
    "head",
    [
        '<!DOCTYPE t [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;"><!ENTITY c "&b;&b;">]>',
        '<!DOCTYPE t [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE t [<!ENTITY % a SYSTEM "http://127.0.0.1/a"> %a;]>',
        '<!DOCTYPE t SYSTEM "http://127.0.0.1/a.dtd">',
    ],
)
def test_entities_and_document_types_are_refused(head: str) -> None:
    with pytest.raises(SourceError, match="it declares a document type or entities") as refused:
        read(f"{head}<testsuite><testcase name='x'><failure>&c;</failure></testcase></testsuite>")
    assert refused.value.fault is Fault.UNREADABLE


def test_a_report_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(SourceError, match="nested more than 100 deep"):
        read("<testsuite>" + "<a>" * 1_000)


def test_a_report_that_is_too_large_is_refused() -> None:
    with pytest.raises(SourceError) as refused:
        read_report(io.BytesIO(b" " * (MAX_REPORT + 1)))
    assert refused.value.fault is Fault.TOO_LARGE


def test_what_many_failures_say_is_capped_and_counted() -> None:
    report = read(suite(*(failed(f"test_{n}") for n in range(MAX_FAILURES + 5))))
    assert report.note.startswith("205 of 205 failed: test_0, test_1, test_2, ...")
    assert report.lines().endswith("... 5 more failed tests ...\n")
    assert len(read(suite(failed("a", text="x" * 10 * MAX_WORDS))).lines()) < MAX_WORDS + 100


@pytest.mark.slow
def test_a_hostile_report_is_read_before_anyone_loses_patience() -> None:
    for unit in ('<testcase name="a"><failure>b</failure></testcase>', "<failure>b\n</failure>", "b\n<a/>"):
        text = f"<testsuite>{failed('first')[:-11]}{unit * 100_000}"  # into an open test
        started = time.process_time()
        read(text)
        assert time.process_time() - started < 20  # it takes a second; what is quadratic takes an hour


PIECES = ["<testsuites>", "<testsuite name='s' failures='1'>", "</testsuite>", "<testcase name='a'>", "</testcase>"]
PIECES += ["<failure message='m'>", "</failure>", "<error/>", "<skipped/>", "text", "&amp;", "&x;", "<![CDATA[", "]]>"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_any_text_is_a_report_or_none_or_refused(text: str) -> None:
    for content in (text.encode("utf-8", "replace"), f"<testsuite>{text}".encode("utf-16", "replace")):
        try:
            report = read_report(io.BytesIO(content))
        except SourceError:
            continue
        if report is not None:
            assert report.note in report.lines()
            assert report.state in JobState


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_a_report_or_none_or_refused(content: bytes) -> None:
    for given_bytes in (content, b"<testsuite>" + content, b"<?xml version='1.0' encoding='" + content):
        with contextlib.suppress(SourceError):
            read_report(io.BytesIO(given_bytes))
