"""What a line says by its shape; each shape passes the gate, and no line takes long."""

import pytest

from sources.shapes import GATE, Place, Strength, Verdict, heads, place, read, runs_on, stops

NAMED = """\
E       assert 2268 == 2520
FAILED tests/test_cart.py::test_total - assert 1 == 2
ERROR tests/test_cart.py
________________ ERROR at setup of test_db ________________
FAIL: test_total (test_cart.Cart.test_total)
--- FAIL: TestTotal (0.01s)
    --- FAIL: TestTotal/negative (0.00s)
./cart.go:12:5: undefined: total
panic: assignment to entry in nil map
test cart::total ... FAILED
---- cart::total stdout ----
thread 'cart::total' (77) panicked at src/lib.rs:5:24:
error[E0308]: mismatched types
[ERROR] Tests run: 2, Failures: 1, Errors: 0, Skipped: 0, Time elapsed: 0.05 s <<< FAILURE! - in shop.CartTest
[ERROR] /src/Cart.java:[23,29] cannot find symbol
[ERROR] COMPILATION ERROR :
Cart.java:3: error: incompatible types: String cannot be converted to int
> Task :shop:test FAILED
CartTest > total() FAILED
* What went wrong:
Execution failed for task ':shop:test'.
FAIL src/cart.test.js
  ● cart › adds
  1) Array finds:
     Failure/Error: expect(1+1).to eq 3
✖ adds (1.2ms)
not ok 2 - adds
cart.c:3:39: error: 'y' undeclared (first use in this function)
cart.c:1:10: fatal error: nope.h: No such file or directory
/usr/bin/ld: cart.c:(.text+0xa): undefined reference to `total'
src/cart.ts(3,7): error TS2322: Type 'string' is not assignable to type 'number'.
src/cart.ts:3:7 - error TS2322: Type 'string' is not assignable to type 'number'.
cart.py:5: error: Incompatible return value type (got "int", expected "str")  [return-value]
cart.py:1:8: F401 [*] `os` imported but unused
F401 [*] `os` imported but unused
  2:13  error  'b' is not defined  no-undef
#7 ERROR: process "/bin/sh -c npm ci" did not complete successfully: exit code: 1
#9 12.34 cart.c:3:39: error: 'y' undeclared
##[error]Unable to find version 9
CONFLICT (content): Merge conflict in cart.py failed
[  FAILED  ] Cart.Total (0 ms)
""".splitlines()
ENDED = """\
tar: write error: No space left on device
java.lang.OutOfMemoryError: Java heap space
FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory
fork: Cannot allocate memory
./run.sh: line 12:  2231 Segmentation fault      (core dumped) ./cart
error: process didn't exit successfully: (signal: 9, SIGKILL: kill)
##[error]The operation was canceled.
##[error]The runner has received a shutdown signal.
##[error]The job running on runner A 3 has exceeded the maximum execution time of 360 minutes.
ERROR: test timed out after 60 seconds
No output has been received in the last 10m0s, this potentially indicates a stalled build
command terminated with exit code 137
c++: fatal error: Killed signal terminated program cc1plus
./run.sh: line 3: 99 Illegal instruction (core dumped) ./cart
The runner has received a shutdown signal. This can happen when the runner service is stopped.
The self-hosted runner lost communication with the server.
signal: 11
""".splitlines()
STATED = """\
fatal: not a git repository (or any of the parent directories): .git
error: failed to push some refs to 'origin'
ERROR: go.mod is not up to date
Error: Cannot find module './cart'
Traceback (most recent call last):
Exception in thread "main" java.lang.IllegalStateException: bad state
bash: line 1: frobnicate: command not found
[ERROR] Failed to execute goal shop:plugin:1:run
npm error Missing script: "nope"
CMake Error at CMakeLists.txt:7 (find_package):
curl: (7) Failed to connect to 127.0.0.1 port 9
E: Unable to locate package nope (not found)
denied: requested access to the resource is denied
docker: Error response from daemon: no such image.
docker: invalid reference format.
Error response from daemon: manifest for shop:1 not found
E: Unable to locate package nope
curl: (6) Could not resolve host: nope
Unhandled promise rejection
Uncaught TypeError: x is not a function
sh: 1: frobnicate: not found
FAIL Required test coverage of 90% not reached. Total coverage: 71.20%
Jest: "global" coverage threshold for lines (80%) not met: 71.2%
error Command failed with exit code 1.
 ERR_PNPM_NO_MATCHING_VERSION  No matching version found for left-pad@99
""".splitlines()
RAISED = """\
java.lang.IllegalStateException: bad state
ValueError: too deep
Caused by: java.lang.RuntimeException: root
2026-01-01 10:00:00 ERROR shop.Cart - cannot total
time=1 level=error msg="cannot total"
tests/test_cart.py:41: AssertionError
""".splitlines()
NOTHING = """\
0 errors, 0 warnings
Errors: 0, Failures: 0
[INFO] no errors were found
[WARNING] error in nothing
cart.c:3:5: warning: unused variable 'error' [-Wunused]
tests/test_cart.py::test_error PASSED
test cart::error ... ok
ok 3 - handles an error
not ok 4 - flaky # TODO some day
gcc -Werror -c cart.c
continue-on-error: true
+ ./deploy.sh || echo "ERROR: failed"
  ● Console
Compiling error-chain v0.12.4
npm warn deprecated error-handler@1.0.0
[ERROR] To see the full stack trace of the errors, re-run Maven with the -e switch.
ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.
""".splitlines()
FAILED = """\
2 failed, 5 passed in 0.31s
=============== 7 failed, 27 passed, 1 xfailed, 1 error in 1.41s ===============
FAILED (failures=1, errors=1)
FAIL\tshop/cart\t0.703s
test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.46s
error: could not compile `shop` (lib) due to 3 previous errors
[INFO] BUILD FAILURE
Tests run: 202, Failures: 0, Errors: 5, Skipped: 9
BUILD FAILED in 12s
Tests:       3 failed, 3 passed, 6 total
  2 failing
# fail 1
2 examples, 1 failure
50% tests passed, 1 tests failed out of 2
Found 3 errors in 1 file (checked 1 source file)
3 errors
✖ 5 problems (5 errors, 0 warnings)
4 files would be reformatted, 1 file already formatted
make: *** [Makefile:3: all] Error 1
tar: Exiting with failure status due to previous errors
The command '/bin/sh -c make' returned a non-zero code: 2
exit status 1
""".splitlines()
PASSED = """\
=== 118 passed, 2 skipped in 4.61s ===
ok  \tshop/cart\t0.703s
test result: ok. 3 passed; 0 failed; 0 ignored
[INFO] BUILD SUCCESS
Tests run: 6, Failures: 0, Errors: 0, Skipped: 0
BUILD SUCCESSFUL in 3s
Tests:       6 passed, 6 total
All checks passed!
Success: no issues found in 3 source files
OK
OK (skipped=2)
#12 exporting to image
""".splitlines()
JOB_FAILED = """\
##[error]Process completed with exit code 1.
##[error]Bash exited with code '1'.
The command "make test" exited with 2.
Done. Your build exited with 1.
ERROR: Job failed: exit code 1
Build step 'Execute shell' marked build as failure
Finished: FAILURE
program finished with exit code 2
Exited with code exit status 1
""".splitlines()
JOB_PASSED = ["Finished: SUCCESS", "Job succeeded", "Done. Your build exited with 0."]

STRENGTHS = [(Strength.NAMED, NAMED), (Strength.ENDED, ENDED), (Strength.STATED, STATED), (Strength.RAISED, RAISED)]
VERDICTS = [
    (Verdict.FAILED, FAILED),
    (Verdict.PASSED, PASSED),
    (Verdict.JOB_FAILED, JOB_FAILED),
    (Verdict.JOB_PASSED, JOB_PASSED),
]


@pytest.mark.parametrize(
    ("strength", "line"), [(s, line) for s, some in [*STRENGTHS, (Strength.NONE, NOTHING)] for line in some]
)
def test_a_line_states_a_cause_as_surely_as_its_shape(strength: Strength, line: str) -> None:
    assert read(line).strength is strength


@pytest.mark.parametrize(("verdict", "line"), [(v, line) for v, some in VERDICTS for line in some])
def test_a_line_says_how_a_tool_or_the_job_ended(verdict: Verdict, line: str) -> None:
    assert read(line).verdict is verdict


@pytest.mark.parametrize("line", [line for _, some in [*STRENGTHS, *VERDICTS] for line in some if not heads(line)])
def test_every_shape_passes_the_gate(line: str) -> None:
    low = f"\n{line}\n".encode().lower()
    assert any(literal in low for literal in GATE)


@pytest.mark.parametrize(
    ("raw", "meaning"),
    [
        ("##[group]Run make test", Place.SCRIPT),
        ("##[endgroup]", Place.SCRIPT_END),
        ("##[group]Installed packages", None),
        ("Post job cleanup.", Place.CLEANUP),
        ("##[section]Starting: Tests", Place.STEP),
        ("section_end:2:get_sources\r\x1b[0Ksection_start:2:step_script\r\x1b[0KExecuting", Place.STEP),
        ("section_end:2:step_script\r\x1b[0Ksection_start:2:cleanup_file_variables\r\x1b[0KCleaning", Place.CLEANUP),
        ("travis_fold:start:after_failure\r\x1b[0K$ cat log", Place.CLEANUP),
        ("travis_time:start:1b\r\x1b[0K$ make test", Place.STEP),
        ("make test", None),
    ],
)
def test_a_line_means_something_for_those_after_it(raw: str, meaning: Place | None) -> None:
    assert place(raw) is meaning


@pytest.mark.parametrize(
    "unit", ["(", " ", "at ", ":", "E ", "_ ", "=", "-e", "1, ", " > ", "A.", "x: ", "[ERROR] ", "'"]
)
def test_a_hostile_line_is_read_to_its_end(unit: str) -> None:
    line = unit * (1_000_000 // len(unit))
    for text in (line, f"error {line}", f"##[error]{line}", f'The command "{line}', f"{line} failed"):
        assert read(text).verdict is not Verdict.PASSED
        assert place(text) in (None, Place.STEP)
        assert {heads(text), runs_on(text), stops(text)} <= {True, False}
