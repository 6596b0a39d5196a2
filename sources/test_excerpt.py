"""The excerpt shows the cause, whoever prints it and whatever stands around it, and never more than asked."""

import io
import re

import pytest

from sources.excerpt import excerpt

NOISE = [f"Downloaded {n} of 400: liberror-{n}.jar, no failure" for n in range(400)]
CLEANUP = ["Post job cleanup.", "[command]/usr/bin/git version", "fatal: late", "Cleaning up orphan processes"]

# What a tool prints, with a mark before each line that the excerpt has to show.
SHAPES = {
    "pytest": """
collected 118 items
tests/test_cart.py ....F
>=================================== FAILURES ===================================
>__________________________________ test_total __________________________________
    def test_total():
        cart = Cart()
>>       assert cart.total() == 2520
>E       assert 2268 == 2520
>tests/test_cart.py:41: AssertionError
FAILED tests/test_cart.py::test_total - assert 2268 == 2520
>1 failed, 117 passed in 4.61s""",
    "unittest": """
..F.
======================================================================
>FAIL: test_total (test_cart.Cart.test_total)
----------------------------------------------------------------------
>Traceback (most recent call last):
>  File "test_cart.py", line 4, in test_total
>AssertionError: 6 != 7
Ran 4 tests in 0.005s
>FAILED (failures=1)""",
    "go test": """
ok  \tshop/a\t0.019s
>--- FAIL: TestTotal (0.00s)
>    cart_test.go:3: Total = 3; want 4
FAIL
FAIL\tshop/cart\t0.003s
ok  \tshop/z\t0.019s""",
    "go build": """
# shop/cart
>./cart.go:3:25: undefined: total""",
    "go panic": """
>panic: assignment to entry in nil map
>goroutine 10 [running]:
>shop/cart.Total(0xc000007d40?)
FAIL\tshop/cart\t0.005s""",
    "rustc": """
   Compiling cart v0.1.0
>error[E0308]: mismatched types
> --> src/lib.rs:1:38
>  |
>1 | pub fn f() -> i32 { "x" }
>error: could not compile `cart` (lib) due to 1 previous error""",
    "cargo test": """
running 3 tests
test works ... ok
>test fails ... FAILED
>---- fails stdout ----
>thread 'fails' (77) panicked at src/lib.rs:5:24:
>assertion `left == right` failed: totals
>  left: 4
test result: FAILED. 1 passed; 1 failed; 0 ignored""",
    "surefire": """
[INFO] Running shop.CartTest
>[ERROR] shop.CartTest.total  Time elapsed: 0.01 s  <<< FAILURE!
>org.opentest4j.AssertionFailedError: expected: <7> but was: <6>
>\tat shop.CartTest.total(CartTest.java:21)
[INFO] Running shop.OtherTest
[INFO] Tests run: 9, Failures: 0, Errors: 0, Skipped: 0
[INFO] BUILD FAILURE
[ERROR] Failed to execute goal maven-surefire-plugin:2.22.2:test (default-test) on project shop: There are failures.""",
    "maven": """
[INFO] 4 warnings
>[ERROR] COMPILATION ERROR :
>[ERROR] /src/Cart.java:[23,29] cannot find symbol
>  symbol:   class Total
[INFO] BUILD FAILURE""",
    "gradle": """
> Task :compileJava
>> Task :test FAILED
>CartTest > total() FAILED
>    org.opentest4j.AssertionFailedError at CartTest.java:21
FAILURE: Build failed with an exception.
>* What went wrong:
>Execution failed for task ':test'.
BUILD FAILED in 12s""",
    "jest": """
>FAIL src/cart.test.js
>  ● cart › adds
>    expect(received).toBe(expected)
>    Expected: 4
>    Received: 3
Tests:       1 failed, 3 passed, 4 total""",
    "mocha": """
  3 passing (2ms)
>  1 failing
>  1) Cart
>       adds:
>      AssertionError [ERR_ASSERTION]: -1 == 0""",
    "npm": """
>npm error code ERESOLVE
>npm error While resolving: shop@1.0.0
npm error A complete log of this run can be found in: /root/x.log""",
    "javac": """
>Cart.java:1: error: incompatible types: String cannot be converted to int
>  int total() { return "x"; }
1 error""",
    "gcc": """
gcc -Wall -c cart.c
>cart.c:3:39: error: 'y' undeclared (first use in this function)
>    3 | int main(){ return y; }
>make: *** [Makefile:3: cart.o] Error 1""",
    "ld": """
>/usr/bin/ld: cart.c:(.text+0xa): undefined reference to `total'
>collect2: error: ld returned 1 exit status""",
    "tsc": """
>src/cart.ts(3,7): error TS2322: Type 'string' is not assignable to type 'number'.""",
    "ruff": """
>cart.py:1:8: F401 [*] `os` imported but unused
>Found 1 error.""",
    "mypy": """
>cart.py:5: error: Incompatible return value type  [return-value]
Found 1 error in 1 file (checked 1 source file)""",
    "eslint": """
>/src/cart.js
>  2:13  error  'b' is not defined  no-undef
✖ 1 problem (1 error, 0 warnings)""",
    "docker": """
#7 [4/6] RUN make
>#7 3.456 cart.c:3:39: error: 'y' undeclared
>#7 ERROR: process "/bin/sh -c make" did not complete successfully: exit code: 1
>ERROR: failed to solve: process "/bin/sh -c make" did not complete successfully: exit code: 1""",
    "git": """
Cloning into 'shop'...
>fatal: unable to access 'https://git.invalid/shop/': Could not resolve host""",
    "out of memory": """
training step 17
>./run.sh: line 12:  2231 Killed                  python3 train.py""",
    "signal": """
>bash: line 1:  4242 Segmentation fault      (core dumped) ./cart""",
    "full disk": """
>cp: error writing 'x': No space left on device
error: less of one""",
    "an unknown tool": """
checking widget B
>widget B: got 3 want 4""",
}


def stamped(lines: list[str]) -> bytes:
    return "".join(f"2026-11-27T09:14:02.1184310Z {line}\r\n" for line in lines).encode()


def on_github(out: list[str]) -> bytes:
    before = ["##[group]Run setup", 'echo "error: $0"', "##[endgroup]", "error: not this", *NOISE]
    echo = ["##[group]Run make", "\x1b[36;1mmake || exit 1 # error: echoed\x1b[0m", "##[endgroup]", *NOISE]
    return stamped([*before, *echo, *out, "##[error]Process completed with exit code 1.", *CLEANUP])


def on_gitlab(out: list[str]) -> bytes:
    before = ["section_start:1:get_sources\r\x1b[0KGetting", "section_end:1:get_sources\r\x1b[0K", *NOISE]
    step = ["section_start:2:step_script\r\x1b[0KExecuting", "\x1b[32;1m$ make\x1b[0;m", *NOISE, *out]
    end = ["section_end:3:step_script\r\x1b[0Ksection_start:3:cleanup_file_variables\r\x1b[0KCleaning", "fatal: late"]
    return "\n".join([*before, *step, *end, "\x1b[31;1mERROR: Job failed: exit code 1\x1b[0;m\n"]).encode()


def on_travis(out: list[str]) -> bytes:
    step = ["travis_time:start:1b\r\x1b[0K$ make", *NOISE, *out]
    end = ['The command "make" exited with 2.', "travis_fold:start:after_failure\r\x1b[0K$ cat log", "fatal: late"]
    return "\n".join([*NOISE, *step, *end, "Done. Your build exited with 1.\n"]).encode()


def on_jenkins(out: list[str]) -> bytes:
    end = ["Build step 'Execute shell' marked build as failure", "fatal: late", "Finished: FAILURE\n"]
    return "\n".join([*NOISE, "+ make", *out, *end]).encode()


@pytest.mark.parametrize("wrap", [on_github, on_gitlab, on_travis, on_jenkins])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_cause_is_shown_and_the_noise_is_not(shape: str, wrap: type) -> None:
    marked = shape.strip("\n").split("\n")
    out = [line.removeprefix(">") if not line.startswith("> Task :compile") else line for line in marked]
    text = excerpt(io.BytesIO(wrap(out)), 2_000)
    shown = {re.sub(r"^\d+\| ?", "", line) for line in text.splitlines()}
    assert {line[1:] for line in marked if line.startswith(">") and line[1:] in out} <= shown
    assert len(text.encode()) <= 2_000
    assert "late" not in text
    assert "not this" not in text
    assert "echoed" not in text
    assert len([line for line in text.splitlines() if "Downloaded" in line]) <= 40


def test_the_step_and_the_end_are_shown_with_the_cuts_between() -> None:
    text = excerpt(io.BytesIO(on_github(["cart.c:3:5: error: no"])))
    assert text.startswith("... 404 lines ...\n405| ##[group]Run make\n... ")
    assert text.endswith(
        "\n808| cart.c:3:5: error: no\n809| ##[error]Process completed with exit code 1.\n... 4 lines ...\n"
    )


def test_the_first_of_many_failures_is_told_whole_and_the_others_briefly() -> None:
    out = []
    for n in range(40):
        out += [f"--- FAIL: Test{n:02} (0.00s)", *[f"    cart_test.go:{n}: line {i} of {n}" for i in range(6)], "log"]
    text = excerpt(io.BytesIO(on_github([*out, "FAIL"])), 2_000)
    assert all(f"line {i} of 0" in text for i in range(6))
    assert text.count("--- FAIL") > 3


def test_what_stands_around_the_cause_is_cut_where_it_ends_and_the_summary_is_not() -> None:
    error = ["[ERROR] /src/Cart.java:[1,2] no", "[INFO] unrelated", "[INFO] unrelated"]
    text = excerpt(io.BytesIO(on_jenkins([*error, *NOISE, "1 failed, 3 passed in 2.1s", *NOISE])), 2_000)
    assert "unrelated" not in text
    assert "1 failed, 3 passed" in text


def test_context_does_not_reach_back_into_another_step() -> None:
    log = stamped(
        [
            "the step before",
            "##[group]Run x",
            "echoed",
            "##[endgroup]",
            "odd",
            "##[error]Process completed with exit code 1.",
        ]
    )
    assert excerpt(io.BytesIO(log)).splitlines() == [
        "... 1 line ...",
        "2| ##[group]Run x",
        "... 2 lines ...",
        "5| odd",
        "6| ##[error]Process completed with exit code 1.",
    ]


def test_an_error_that_is_only_repeated_is_told_once() -> None:
    same = [
        "[ERROR] No space left on device",
        "java.io.IOException: full",
        *[f"\tat a.B.c{n}(B.java:1)" for n in range(90)],
    ]
    text = excerpt(io.BytesIO(on_jenkins([*same * 9, "ERROR: the last words"])), 3_000)
    assert text.count("No space left") <= 2
    assert "the last words" in text


@pytest.mark.parametrize(
    "log",
    [
        b"",
        stamped(
            ["##[group]Run pytest", "##[endgroup]", "E       assert 1 == 2", "3 passed, 1 xfailed in 0.1s", *CLEANUP]
        ),
        b"Running tests\ntest_error PASSED\n0 errors\nWARNING: failed over\n",
        b"[ERROR] inner\nBUILD FAILURE\nFinished: SUCCESS\n",
    ],
)
def test_a_passing_log_is_not_given_a_failure(log: bytes) -> None:
    assert excerpt(io.BytesIO(log)).startswith("no failure found\n")


def test_a_passing_log_shows_its_last_lines() -> None:
    text = excerpt(io.BytesIO(b"a\n" * 90 + b"the end\n"))
    assert text == "no failure found\n... 86 lines ...\n87| a\n88| a\n89| a\n90| a\n91| the end\n"


def test_hundreds_of_megabytes_without_a_break_are_not_a_line_that_is_held() -> None:
    log = b"error: x\n" + b"%" * 20_000_000 + b"\nexit status 1\n"
    assert excerpt(io.BytesIO(log), 300).endswith("3| exit status 1\n")
