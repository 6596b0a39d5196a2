"""The first reading finds the failing step and whether the job failed at all."""

import io

import pytest

from sources.scan import Scan, read_through
from sources.shapes import Strength


def scan(log: str) -> Scan:
    return read_through(io.BytesIO(log.encode()))


def titles(found: Scan) -> list[int]:
    return [step.title.number if step.title else 0 for step in found.steps()]


FAILING = {
    "exit code": "cc x.c\n##[error]Process completed with exit code 1.\n",
    "travis": 'boom\nThe command "make" exited with 2.\nDone. Your build exited with 1.\n',
    "gitlab": "boom\nERROR: Job failed: exit code 3\n",
    "jenkins": "boom\nBuild step 'Execute shell' marked build as failure\nFinished: FAILURE\n",
    "a summary alone": "E   assert 1 == 2\n1 failed, 3 passed in 0.1s\n",
    "make alone": "boom\nmake: *** [all] Error 2\n",
    "a failure after a success": "3 passed in 0.1s\n1 failed, 3 passed in 0.1s\n",
    "another tool's success": "1 failed, 3 passed in 0.1s\nAll checks passed!\n",
    "an error at the end": "boom\nfatal: unable to access the remote\n",
    "an error at the end before the clean-up": "fatal: no\ntar: broken\nPost job cleanup.\n" + "clean\n" * 40,
    "a log that was cut off": "--- FAIL: TestTotal (0.01s)\n" + "ok\n" * 80,
    "an exception at the end": "boom\nValueError: too deep\n",
    "a success before the clean-up failed": "Job succeeded\nERROR: Job failed (system failure): gone\n",
}
PASSING = {
    "nothing": "",
    "words": "0 errors\ntest_error PASSED\n",
    "an assertion that was expected": "E       assert 1 == 2\n3 passed, 1 xfailed in 0.1s\n",
    "an inner run": "1 failed in 0.1s\nmake: *** [inner] Error 1\n500 passed in 12s\n",
    "another tool's inner run": "Found 3 errors in 1 file\n500 passed in 12s\nPost job cleanup.\n",
    "jenkins": "[ERROR] x\nBUILD FAILURE\nFinished: SUCCESS\n",
    "gitlab": "E   assert 1 == 2\n1 failed in 0.1s\nJob succeeded\n",
    "an error far from the end": "ERROR: no cache\n" + "compiling\n" * 90,
    "an echoed script": '##[group]Run x\necho "ERROR: failed"\nerror: no\n##[endgroup]\nfine\n',
    "an error in the clean-up": "fine\nPost job cleanup.\n##[error]no cache\nfatal: not a repository\n",
}


@pytest.mark.parametrize("log", FAILING.values(), ids=FAILING)
def test_a_job_failed_if_its_log_says_so_or_ends_on_an_error(log: str) -> None:
    assert scan(log).failed()


@pytest.mark.parametrize("log", PASSING.values(), ids=PASSING)
def test_a_job_did_not_fail_because_of_words(log: str) -> None:
    assert not scan(log).failed()


def test_the_failing_step_is_found_among_others() -> None:
    steps = [
        "##[group]Run a\n##[endgroup]\nerror: harmless\n",
        "##[group]Run b\n##[endgroup]\nerror: the cause\n##[error]Process completed with exit code 1.\n",
        "##[group]Run c\n##[endgroup]\nerror: too late\nPost job cleanup.\n",
    ]
    assert titles(scan("".join(steps))) == [4]


def test_a_step_whose_tool_failed_is_second_to_one_that_failed_the_job() -> None:
    first, second = "##[group]Run a\n##[endgroup]\n1 failed in 0.1s\n", "##[group]Run b\n##[endgroup]\n"
    assert titles(scan(first + second + "fine\n")) == [1]
    assert titles(scan(first + second + "##[error]Process completed with exit code 1.\n")) == [4]


def test_the_failure_that_a_runner_reports_after_its_clean_up_belongs_to_the_last_step() -> None:
    log = "section_start:1:step_script\r\x1b[0Kgo\nboom\nsection_start:2:cleanup_file_variables\r\x1b[0Kclean\n"
    (step,) = scan(f"{log}ERROR: Job failed: exit code 1\n").steps()
    assert step.title
    assert step.said
    assert (step.title.number, step.said.number) == (1, 4)


def test_what_a_tool_survived_is_no_cause_but_a_full_disk_is() -> None:
    (step,) = scan("[ERROR] a.java:[1,2] x\nNo space left on device\nBUILD SUCCESS\nFinished: FAILURE\n").steps()
    assert [(mark.number, mark.strength) for mark in step.causes] == [(2, Strength.ENDED)]


def test_a_package_that_passes_says_nothing_of_those_tested_beside_it() -> None:
    (step,) = scan("./a.go:3:5: undefined: y\nok  \tshop/b\t0.1s\nFAIL\tshop/a [build failed]\nFAIL\n").steps()
    assert [mark.number for mark in step.causes] == [1]


def test_a_script_whose_echo_never_ends_does_not_hide_the_failure() -> None:
    assert scan(
        "##[group]Run x\n" + "echo\n" * 2_000 + "error: y\n##[error]Process completed with exit code 1.\n"
    ).failed()


def test_a_flood_of_errors_is_kept_in_bounded_memory() -> None:
    found = scan("error: x\n" * 20_000 + "x.c:1:2: error: y\nmake: *** [all] Error 1\n")
    (step,) = found.steps()
    assert len(step.causes) + len(step.raised) < 400
    assert [mark.number for mark in step.causes if mark.strength is Strength.NAMED] == [20_001]


def test_marks_are_true_across_the_pieces_in_which_a_log_is_read() -> None:
    head = "".join(f"line {number}\n" for number in range(200_000))
    found = scan(f"{head}error: x\n{'y' * 3_000_000} error: no\nerror: z\nexit status 1\n")
    (step,) = found.steps()
    assert [(mark.number, mark.offset) for mark in step.causes] == [
        (200_001, len(head)),
        (200_003, len(head) + 9 + 3_000_011),
    ]
    assert found.total == 200_004


def test_the_middle_of_a_line_that_is_longer_than_a_piece_is_not_taken_for_a_line() -> None:
    assert not scan(f"{'y' * (2 << 20)}error: no\nfine\n").failed()
