"""How tools and CI systems print failures: what one line of a log says by its shape.

    read("x.c:3:5: error: expected ';'").strength    Strength.NAMED
    read("2 failed, 5 passed in 0.31s").verdict      Verdict.FAILED

Lines are as `lines.py` cleaned them. Only the first thousand characters are looked at, and repetitions are bounded or
cannot give back what they took, so that a hostile line takes no longer than another by more than a constant.
"""

import re
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import lru_cache
from typing import Final

SEEN: Final = 1_000


class Strength(IntEnum):
    """How surely a line states what went wrong."""

    NONE = 0
    RAISED = 1  # an exception, or what a logger calls an error
    STATED = 2  # a tool says of itself "error:"
    NAMED = 3  # a failed test or a place in a source file is named
    ENDED = 4  # a resource, a signal or a time limit ended it


class Verdict(Enum):
    """What a line says of one tool's work, or of the whole job."""

    NONE = auto()
    PASSED = auto()
    FAILED = auto()
    JOB_PASSED = auto()
    JOB_FAILED = auto()


class Place(Enum):
    """What a line means for the lines after it."""

    STEP = auto()
    SCRIPT = auto()  # a step begins, and what it will run is echoed first
    SCRIPT_END = auto()
    CLEANUP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a line says.

    Attributes:
        tool: whose verdict it is: a later one of the same tool replaces it. `exit` is replaced by any tool's success.
    """

    strength: Strength = Strength.NONE
    verdict: Verdict = Verdict.NONE
    tool: str = ""


def _one_of(**shapes: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<{name}>{shape})" for name, shape in shapes.items()))


# Without one of these, in lower case, no line of a log says anything: a literal is found at many times the speed of a
# pattern.
GATE: Final = (
    *(word.encode() for word in (
        "error", "fail", "exception", "fatal", "panic", "abort", "kill", "denied", "no such", "not found", "allocat",
        "undefined ref", "timeout", "timed out", "no space", "exceeded", "segmentation", "not ok", "***", "exit",
        "succe", "pass", "most recent call", "##[", "\r\x1b[0k", "job cleanup", "orphan proc", "____", "●",
        "e   ", ".go:", ".py:", "npm err", "no output has", "non-zero", "reformat", "ok  ", "[*]", " --> ", " 1) ",
        "\nok", "z ok", " issues", "unable to", "curl: (", "conflict (", "[rejected]", "docker: ", "core dump",
        "sigsegv", "sigabrt", "signal", "lost communication", "uncaught ", "unhandled ", "unauthorized: ",
        "multiple def", "caused by", "exporting to", "err_pnpm", "coverage thres", "× ",
    )),
    b"\xe2\x9c",  # the crosses: ✕ ✖ ✗ ✘
)  # fmt: skip

# Around steps. A fold's marker is overwritten by what stands behind its carriage return, so these see the raw line.
_PLACES = _one_of(
    SCRIPT=r"##\[group\]Run ",
    SCRIPT_END=r"##\[endgroup\]",
    CLEANUP=r"Post job cleanup\.|Cleaning up orphan processes|travis_fold:start:(?:after_|cache\.2)"
    r"|section_start:\d{1,20}:(?:after_script|cleanup_|upload_artifacts)",
    STEP=r"##\[section\]Starting: |section_start:\d{1,20}:|travis_fold:start:|travis_time:start:",
)
_JOB = _one_of(
    JOB_PASSED=r"Finished: SUCCESS|Job succeeded|Done\. Your build exited with 0\b",
    JOB_FAILED=r"(?:##\[error\] ?|Error: )Process completed with exit code [1-9]"
    r"|##\[error\]\w{1,40} exited with code '?[1-9]|ERROR: Job failed|Finished: (?:FAILURE|ABORTED|UNSTABLE|NOT_BUILT)"
    r"|Build step .{0,300}? (?:marked build as failure|changed build result to (?:FAILURE|UNSTABLE))"
    r"|The command \".{0,800}?\" (?:exited with [1-9]|failed and exited with)|Done\. Your build exited with [1-9]"
    r"|program finished with exit code [1-9-]|Exited with code (?:exit status )?[1-9]"
    r"|(?:🚨 )?Error: The command exited with status [1-9]|Command exited with code [1-9]",
)
_N = r"[1-9][\d,]{0,8}"
_FAILED = _one_of(
    pytest=rf"=*\s?(?:\d{{1,9}} \w{{1,20}}, ){{0,9}}{_N} (?:failed|errors?)\b[^=]{{0,200}}? in \d[\d.]{{0,12}} ?s",
    unittest=r"FAILED \((?:failures|errors|unexpected successes)=",
    go=r"FAIL$|FAIL\t\S",
    cargo=r"test result: FAILED|error: (?:could not compile|test failed|aborting due to)",
    maven=r"(?:\[(?:INFO|ERROR)\] )?BUILD (?:FAILURE|ERROR)$",
    surefire=rf"(?:\[\w{{1,9}}\] )?Tests run: ?\d{{1,9}}, (?:Failures: ?{_N}|Failures: ?0, Errors: ?{_N})",
    gradle=rf"BUILD FAILED|FAILURE: Build (?:failed|completed)|\d{{1,9}} tests? completed, {_N} failed",
    jest=rf"\s{{0,20}}(?:Tests|Test Suites|Test Files):?\s{{1,20}}{_N} failed",
    mocha=rf"\s{{0,20}}{_N} failing\b",
    tap=rf"(?:#|ℹ) fail {_N}",
    rspec=rf"\d{{1,9}} examples?, {_N} failures?",
    phpunit=rf"FAILURES!$|Tests: \d{{1,9}}, Assertions: \d{{1,9}}, .{{0,40}}?(?:Failures|Errors): {_N}",
    junit=rf"{_N} of {_N} failed: |{_N} failed, and the report names none",
    ctest=rf"\d{{1,3}}% tests passed, {_N} tests? failed|\[  FAILED  \] \d{{1,9}} tests?",
    dotnet=r"Build FAILED|\s{0,8}Failed!\s+- Failed: ",
    lint=rf"Found {_N} (?:errors?|issues?)\b|{_N} errors?(?: generated)?\.?$|(?:✖ )?{_N} problems? \([1-9]"
    r"|Oh no! |\d{1,9} files? would be reformatted",
    exit=r"\w{0,20}make(?:\[\d{1,4}\])?: \*\*\* |ninja: build stopped|exit status [1-9]|npm (?:ERR!|error) "
    r"|error Command failed with|\s?ELIFECYCLE\b|tar: (?:Exiting with failure status|Error is not recoverable)",
)
_EXIT = re.compile(r"\bexit(?:ed with|s with)?(?: exit)? (?:code|status):? '?[1-9]|returned a non-zero code: ")
_PASSED = _one_of(
    pytest=r"=*\s?(?:\d{1,9} \w{1,20}, ){0,9}\d{1,9} passed\b[^=]{0,200}? in \d[\d.]{0,12} ?s",
    unittest=r"OK(?: \(.{0,80}\))?$",
    go=r"PASS$|ok\s{1,4}\t\S",
    cargo=r"test result: ok",
    maven=r"(?:\[INFO\] )?BUILD SUCCESS$",
    surefire=r"(?:\[\w{1,9}\] )?Tests run: ?\d{1,9}, Failures: ?0, Errors: ?0",
    gradle=r"BUILD SUCCESSFUL",
    jest=r"\s{0,20}(?:Tests|Test Suites|Test Files):?\s{1,20}(?:\d{1,9} \w{1,20}, ){0,9}\d{1,9} passed",
    mocha=r"\s{0,20}\d{1,9} passing\b",
    tap=r"(?:#|ℹ) fail 0\b",
    rspec=r"\d{1,9} examples?, 0 failures",
    ctest=r"100% tests passed",
    dotnet=r"Build succeeded|\s{0,8}Passed!\s+- Failed: +0",
    docker=r"#\d{1,4} exporting to image$",
    lint=r"All checks passed|Success: no issues found|Found 0 (?:errors|issues)|All done! ",
)
# A test that failed, a diagnostic with a code, what a CI system or a build tool marks as the cause.
_NAMED = re.compile(
    r"##\[error\]|\s{0,40}--- FAIL: |_{3,} (?=.{1,300}___$)|(?:FAIL|ERROR|UNEXPECTED SUCCESS): \S{1,200} \("
    r"|\s{0,8}● (?!Console$)|E   \s*\S|(?:FAILED|ERROR) \S{1,300}(?:::|\.py\b)"
    r"|FAILED [\w.$-]{1,300}(?: - |$)|---- .{1,300} stdout ----$"
    r"|\s{0,40}not ok \d{1,9}\b(?! .{0,300}# (?:TODO|SKIP))|thread '.{0,200}?' (?:\(\d{1,9}\) )?panicked at"
    r"|test .{1,200} \.\.\. FAILED|\[  FAILED  \] \S{1,200}\.|\s{0,20}(?:✕|✗|✘|✖|×) \S|FAIL \S{1,300}\.[cm]?[jt]sx?\b"
    r"|\s{0,8}FAIL\s{1,4}\S{1,300} > |\s{1,8}\d{1,4}\) \S.{0,200}:$|\s{1,10}Failure/Error: |panic: "
    r"|(?=.{1,600} FAILED$).{1,300}? > |> Task :\S{1,300} FAILED|\* What went wrong:"
    r"|Execution failed for task |\[ERROR\] COMPILATION ERROR"
    r"|error\[[A-Za-z:]{0,20}\d{1,6}\]|[A-Z]{1,4}\d{3,4} (?:\[\*\] |.{1,80}`)|\s{0,8}\d{1,7}:\d{1,6}\s{1,9}error\s"
    r"|CONFLICT \(|\s{0,4}! \[(?:remote )?rejected\]|#\d{1,6} (?:\d{1,9}\.\d{1,9} )?ERROR:? "
    r"|(?:Killed|Aborted|Bus error|Illegal instruction)\b"
    r"|\S{1,200}: line \d{1,7}:\s{1,9}\d{1,9} (?:Killed|Aborted|Terminated|Bus error|Segmentation)"
)
_AT_PLACE = re.compile(
    r":\d{1,7}(?::\d{1,6})?(?::| -)? (?:fatal |internal compiler |syntax )?error\b"
    r"|\(\d{1,7}(?:,\d{1,6})?\): (?:fatal )?error\b|\.\w{1,6}:\[\d{1,7},\d{1,6}\]|\.go:\d{1,7}:\d{1,6}: "
    r"|\.pyi?:\d{1,7}:\d{1,6}: [A-Z]{1,4}\d{1,4} |: undefined reference to |multiple definition of "
    r"|<<< (?:FAILURE|ERROR)!"
)
_ENDED = re.compile(
    r"No space left on device|[Dd]isk quota exceeded|[Oo]ut of memory|OutOfMemoryError|[Cc]annot allocate memory"
    r"|oom-kill|: Killed signal terminated program|OOMKilled"
    r"|[Mm]emory limit exceeded|[Ss]egmentation fault|core dumped|SIG(?:SEGV|KILL|ABRT|BUS|ILL)\b"
    r"|signal: (?:9|11)\b|signal: killed|exit code:? (?:134|137|139|143)\b|The operation was cancell?ed"
    r"|xceeded the (?:maximum|time|job|memory|timeout)|execution took longer than|No output has been received"
    r"|received a shutdown signal|lost communication with the server|timed out after|[Tt]imeout of \d{1,9} ?ms exceeded"
)
_STATED = re.compile(
    r"\[(?:ERROR|FATAL|error)\]\s{0,9}\S|(?:FATAL|Fatal|fatal) ?(?:ERROR|Error|error)?: "
    r"|(?:ERROR|Error|error)(?: \w{1,20})?: |Error response from daemon: "
    r"|Traceback \(most recent|Exception in thread |Unhandled |Uncaught |E: "
    r"|.{0,60}?[\w+]: (?:fatal |internal )?error: |docker: |denied: |unauthorized: |CMake Error|curl: \(\d"
    r"|sh: \d{1,5}: .{1,200}: not found$|FAIL Required test coverage|Jest: .{1,80} coverage threshold"
    r"|error (?=[A-Z])|\s?ERR_PNPM_|npm (?:ERR!|error) (?!A complete log)|[Ww]ould reformat:? "
    r"|Automatic merge failed"
    r"|.{1,300}?: (?:command not found|[Nn]o such file or directory|[Pp]ermission denied)$"
)
_RAISED = re.compile(
    r"\s{0,40}(?:[\w$]{1,80}[./]){0,20}[A-Z]\w{0,80}(?:Error|Exception|Failure)\b|\s{0,40}(?:Caused by|Error): "
    r"|\S{1,300}:\d{1,7}: \w{0,80}(?:Error|Exception)$|\s{0,40}(?:Expected|Received):? |\s{1,8}--> \S{1,300}:\d{1,7}:\d"
)
_LOGGED = re.compile(r"\b(?:ERROR|FATAL|SEVERE|CRITICAL)\b|\blevel=(?:error|fatal)")
# What speaks of failing where nothing failed, and what says after all that something did.
_HARMLESS = re.compile(
    r"\b(?:0|no|without|zero|any) (?:\w{1,20} )?(?:errors?|failures?|failed|failing|fail|problems?|exceptions?)\b"
    r"|\b(?:failures?|errors?|failed|fail|skipped) ?[:=] ?0\b|continue-on-error|fail-fast"
    r"|(?<![\w-])-[\w-]{0,40}(?:error|fail)[\w-]{0,40}",
    re.IGNORECASE,
)
_WORDS = re.compile(
    r"\b(?:errors?|fail(?:ed|s|ures?|ing)?|exception|fatal|cannot|can't|could ?n[o']t|unable to|denied|refused"
    r"|not found|no such|undefined|unexpected|missing|invalid|abort(?:ed|ing)?|timed out|unresolved|mismatch"
    r"|rejected)\b",
    re.IGNORECASE,
)
_QUIET = re.compile(
    r"\s{0,40}\[?(?:INFO|DEBUG|TRACE|WARN|WARNING|NOTICE|[Ii]nfo|[Dd]ebug|[Ww]arn(?:ing)?|[Nn]otice|note|help)\b(?!/)"
    r"|##\[(?!error)|\[command\]|\s{0,40}(?:ok|PASS|PASSED|✓|✔|√)\s|\+{1,3} |\$ |=== |(?:XFAIL|SKIPPED|XPASS) "
    r"|Download(?:ing|ed) |Collecting |go: downloading |npm (?:WARN|warn|notice) "
    r"|ERROR: pip's dependency resolver "
    r"|\s{0,40}(?:Compiling|Checking|Requirement|Running|Using cached) "
    r"|.{1,200} \.\.\. ok$"
)
_QUIET_INSIDE = re.compile(r"\bwarning:|\bWARN(?:ING)?\b|\bPASSED\b|\bXFAIL\b|\bINFO\b")
# What Maven says after every failure.
_ROUTINE = re.compile(
    r"\[ERROR\]\s{0,9}(?:To see the full|Re-run |For more info|\[Help \d|After correcting|mvn <|-> \[Help|$)"
)

_RUNS_ON = re.compile(
    r"\s{1,99}\S|\.\.\. \d{1,9} more|During handling of |The above exception |Caused by|E\s|>\s|\||[+-] |-->"
    r"|\[ERROR\]|##\[error\]|goroutine \d|created by |[\w./*-]{1,200}\(.{0,600}\)$"
)
_STOPS = re.compile(
    r"([=_*-])\1{4,}|(?:ok|FAIL|\?)\s{0,3}\t|PASS|FAIL$|\[INFO\]|test .{1,200} \.\.\. |\s{0,8}● |\s{0,20}(?:✓|✔|√) "
)
_HEADS = re.compile(
    r"_{3,} (?=.{1,300}___$)|={5,} (?=.{1,100}=====$)|(?:FAIL|ERROR): \S{1,200} \(|\s{0,8}● |---- .{1,300} stdout ----$"
    r"|\s{1,8}\d{1,4}\) \S|\* What went wrong:|\s{0,40}not ok \d"
)

# What a builder or a runner puts before each line of what it runs.
_INNER = re.compile(
    r"#\d{1,6} \d{1,9}\.\d{1,9} |\[\d\d:\d\d:\d\d\]:? ?|\d\d:\d\d:\d\d(?:[.,]\d{1,6})? "
    r"|[a-z][\w.-]{0,40}[-_]\d{1,3}\s{1,20}\| "
)
_OF_STRENGTH = {strength: Reading(strength=strength) for strength in Strength}


def place(raw: str) -> Place | None:
    """What a line means for those after it, if anything; `raw` has no timestamp any more, but all of its states."""
    found = _PLACES.match(raw) or (_PLACES.search(raw) if "\r\x1b[0K" in raw else None)
    return Place[found.lastgroup] if found and found.lastgroup else None


def heads(text: str) -> bool:
    """Whether a line is the heading of what follows, up to the next heading."""
    return bool(_HEADS.match(_seen(text)))


def runs_on(text: str) -> bool:
    """Whether a line belongs to the one before it."""
    return bool(_RUNS_ON.match(_seen(text)))


def stops(text: str) -> bool:
    """Whether what stood before is over with this line."""
    return bool(_STOPS.match(_seen(text)))


@lru_cache(maxsize=512)  # what fails often fails in the same words
def read(text: str) -> Reading:
    """What a line says by its shape."""
    text = _seen(text)
    if found := _JOB.match(text):
        return Reading(verdict=Verdict[found.lastgroup or ""])
    if found := _FAILED.match(text):
        return Reading(strength=_strength(text), verdict=Verdict.FAILED, tool=found.lastgroup or "")
    if found := _PASSED.match(text):
        return Reading(verdict=Verdict.PASSED, tool=found.lastgroup or "")
    if _QUIET.match(text) or _ROUTINE.match(text):
        return _OF_STRENGTH[Strength.NONE]
    strength = _strength(text)
    if text.startswith("##[error]"):
        return Reading(strength=strength, verdict=Verdict.JOB_FAILED)
    if _EXIT.search(text):
        return Reading(strength=strength, verdict=Verdict.FAILED, tool="exit")
    return _OF_STRENGTH[strength]


def _seen(text: str) -> str:
    found = _INNER.match(text)
    begin = found.end() if found else 0
    return text[begin : begin + SEEN]


def _strength(text: str) -> Strength:
    if _ENDED.search(text):
        return Strength.ENDED
    if _NAMED.match(text) or _AT_PLACE.search(text):
        return Strength.NAMED
    loud = not _QUIET_INSIDE.search(text)
    strength = Strength.NONE
    if loud and _STATED.match(text):
        strength = Strength.STATED
    elif _RAISED.match(text) or (loud and _LOGGED.search(text, 0, 120)):
        strength = Strength.RAISED
    if strength and _HARMLESS.search(text) and not _WORDS.search(_HARMLESS.sub("", text)):
        return Strength.NONE
    return strength
