"""The command line: flags, their environment twins, refusals by name."""

import socket
import subprocess
import sys
import time

import pytest

from command_line import FLAGS, Options, UsageError, parse
from conftest import ROOT, run_graph

QUESTION = "Why is CI failing on pull request 415?"

BAD_SECONDS = ["0", "-5", "nan", "NaN", "inf", "-inf", "1e999", "soon", "", " ", "5s"]
BAD_COUNTS = ["0", "-5", "1.5", "nan", "1e3", "1e999", "many", ""]


def read(*arguments: str, **environment: str) -> Options:
    return parse([*arguments, QUESTION], environment)


def test_without_any_setting_the_documented_defaults_hold() -> None:
    assert read() == Options(
        question=QUESTION,
        model="gemini-3.8-flash",
        pool="models.toml",
        ci=None,
        token_budget=None,
        tool_timeout_s=None,
        tool_timeouts_s={},
        model_timeout_s=60.0,
        deadline_s=120.0,
        max_steps=12,
        evidence=None,
        served_by=None,
        json=False,
        quiet=False,
    )


@pytest.mark.parametrize(
    ("flag", "text", "field", "value"),
    [
        ("--model", "offline", "model", "offline"),
        ("--ci", "github:o/r", "ci", "github:o/r"),
        ("--pool", "mine.toml", "pool", "mine.toml"),
        ("--token-budget", "4096", "token_budget", 4096),
        ("--tool-timeout", "2.5", "tool_timeout_s", 2.5),
        ("--tool-timeout", "fetch_job_log=9", "tool_timeouts_s", {"fetch_job_log": 9.0}),
        ("--model-timeout", "7", "model_timeout_s", 7.0),
        ("--deadline", "0.5", "deadline_s", 0.5),
        ("--max-steps", "3", "max_steps", 3),
        ("--evidence", "runs", "evidence", "runs"),
        ("--served-by", "Ollama 0.12", "served_by", "Ollama 0.12"),
    ],
)
def test_a_flag_and_its_environment_twin_say_the_same_and_the_flag_wins(
    flag: str, text: str, field: str, value: object
) -> None:
    (twin,) = [known.twin for known in FLAGS if known.name == flag]
    assert getattr(read(flag, text), field) == value
    assert getattr(read(**{twin: text}), field) == value
    assert getattr(read(flag, text, **{twin: "1"}), field) == value


def test_tool_timeouts_can_be_given_more_than_once() -> None:
    options = read("--tool-timeout", "5", "--tool-timeout", "fetch_job_log=1")
    assert (options.tool_timeout_s, options.tool_timeouts_s) == (5.0, {"fetch_job_log": 1.0})
    twin = read(REVIEW_TOOL_TIMEOUT="5, fetch_job_log=1")
    assert (twin.tool_timeout_s, twin.tool_timeouts_s) == (5.0, {"fetch_job_log": 1.0})


def test_an_empty_environment_twin_is_no_setting() -> None:
    assert read(REVIEW_MODEL="", REVIEW_DEADLINE=" ").deadline_s == 120.0


def test_a_question_needs_no_quotes() -> None:
    assert parse(["Why", "is", "415", "red?", "--model", "offline"], {}).question == "Why is 415 red?"


@pytest.mark.parametrize(
    ("flag", "text"),
    [(flag, text) for flag in ("--tool-timeout", "--model-timeout", "--deadline") for text in BAD_SECONDS]
    + [(flag, text) for flag in ("--token-budget", "--max-steps") for text in BAD_COUNTS]
    + [("--tool-timeout", text) for text in ("=5", "fetch_job_log=", "fetch_job_log=0", "5,", "fetch_job_log=nan")],
)
def test_what_is_no_value_is_refused_by_the_name_that_was_typed(flag: str, text: str) -> None:
    (twin,) = [known.twin for known in FLAGS if known.name == flag]
    with pytest.raises(UsageError, match=f"^{flag} takes "):
        read(f"{flag}={text}")
    if text.strip():
        with pytest.raises(UsageError, match=f"^{twin} takes "):
            read(**{twin: text})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], 'there is no question; for example: python graph.py "Why is CI failing on pull request 415?"'),
        (["  "], "there is no question"),
        ([QUESTION, "--model", " "], "--model takes a model's name, for example: offline"),
        ([QUESTION, "--deadlin", "5"], "unrecognized arguments: --deadlin"),
        ([QUESTION, "--deadline"], "argument --deadline: expected one argument"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(arguments, {})
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "there is no question"),
        ([QUESTION], {}, "gemini-3.8-flash needs a key in GOOGLE_API_KEY"),
        ([QUESTION], {"GEMINI_API_KEY": "fake-key-0123"}, "set REVIEW_MODEL=offline"),
        ([QUESTION], {"GOOGLE_API_KEY": "fake-key-0123", "GOOGLE_GENAI_USE_VERTEXAI": "1"}, "unset GOOGLE_GENAI_USE_"),
        ([QUESTION, "--model", "scripted:/nowhere.json"], {}, "scripted:/nowhere.json cannot be read (No such file"),
        (
            [QUESTION, "--model", "offline", "--tool-timeout", "fetch=3"],
            {},
            "the tools are: list_ci_jobs, fetch_job_log",
        ),
        (
            [QUESTION, "--model", "gemma4:e2b"],
            {"OLLAMA_HOST": "http://ci:fake-key/x@host"},
            "OLLAMA_HOST is not an address",
        ),
        ([QUESTION], {"GOOGLE_API_KEY": "fake-key-0123", "SSL_CERT_FILE": "/nowhere"}, "look at HTTP_PROXY"),
        (
            [QUESTION, "--model", "openai:m"],
            {"OPENAI_API_KEY": "fake-key-0123", "HTTPS_PROXY": "gopher://h"},
            "look at HTTP_PROXY",
        ),
        ([QUESTION, "--model", "offline", "--ci", ""], {}, "--ci: takes github, "),
        ([QUESTION, "--model", "offline", "--ci", f"folder:{'x' * 5000}"], {}, "there is no such folder or zip"),
        ([QUESTION, "--deadline", "0"], {}, "--deadline takes a number of seconds above 0, not '0'"),
    ],
)
def test_missing_set_up_is_one_line_and_status_2(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = run_graph(*arguments, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("graph.py: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "fake-key" not in done.stderr


@pytest.mark.slow
def test_help_is_quick_and_names_every_flag_twin_and_status() -> None:
    done = run_graph("--help")
    assert done.returncode == 0
    for flag in FLAGS:
        assert flag.name in done.stdout
    assert "exit status: 0 answered" in done.stdout
    probe = (
        "import sys, runpy; sys.argv = ['graph.py', '--help']\ntry: runpy.run_path('graph.py', run_name='__main__')\n"
    )
    probe += (
        "except SystemExit: print([m for m in sys.modules if m.split('.')[0].startswith(('lang', 'google', 'ollama'))])"
    )
    loaded = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert loaded.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_deadline_of_the_command_line_ends_it() -> None:
    start = time.monotonic()
    done = run_graph("--quiet", "job 815", "--deadline", "2", REVIEW_MODEL="offline")
    assert (done.returncode, done.stdout.splitlines()[0]) == (3, "outcome: deadline")
    assert "fetch_job_log(815) was cut off with the run after" in done.stdout
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_tracing_that_the_environment_asks_for_sends_nothing_anywhere() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        tracing = {"LANGSMITH_TRACING": "true", "LANGSMITH_API_KEY": "fake-key-0123", "LANGSMITH_ENDPOINT": endpoint}
        assert run_graph("--quiet", "job 815", REVIEW_MODEL="offline", **tracing).returncode == 0
        with pytest.raises(BlockingIOError):
            listener.accept()
