"""The faults that `test_faults.py` runs: tools, a model and a provider that go wrong, and how each has to end."""

import asyncio
import contextlib
import json
import re
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import IO, Any

from langchain_core.outputs import ChatResult
from langchain_core.tools import BaseTool, StructuredTool

from bounded.calls import GRACE_S
from bounded.outcomes import Outcome
from models.scripted import ScriptedModel

BOUND_S = 0.3
LONG_S = 20.0  # a bound that is not to be reached
BLOCKED_S = 1.0  # the deadline of a run that blocks: its first calls must have gone by on a busy machine
SECRET = "correct-horse-battery"
LATE = "a value that came late"
TOKENS = 7
RAISED: Mapping[str, type[BaseException]] = {
    kind.__name__: kind for kind in (TimeoutError, asyncio.CancelledError, SystemExit, KeyboardInterrupt, RuntimeError)
}


class Gate:
    """What every stuck fake waits for; opened at the end of its test, so that nothing is left running."""

    def __init__(self) -> None:
        self.threads, self.tasks, self.interrupt = threading.Event(), asyncio.Event(), asyncio.Event()
        self.pipes: list[IO[bytes]] = []

    def open(self) -> None:
        self.threads.set()
        self.tasks.set()
        for pipe in self.pipes:
            pipe.close()

    async def wait_stubbornly(self) -> None:
        while not self.tasks.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.tasks.wait()


class Tools:
    """Tools that go wrong, each in its own way, and one that does not."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def made(self, name: str) -> BaseTool:
        body = getattr(self, name)
        kind = "coroutine" if asyncio.iscoroutinefunction(body) else "func"
        return StructuredTool.from_function(**{kind: body}, description="a fake")

    async def quick(self) -> str:
        return "a value that came in time"

    def sleep_in_thread(self) -> str:
        self._gate.threads.wait()
        return LATE

    async def wait_politely(self) -> str:
        await self._gate.tasks.wait()
        return LATE

    async def swallow_cancellation(self) -> str:
        await self._gate.wait_stubbornly()
        return LATE

    async def clean_up_slowly(self) -> str:
        try:
            return await self.wait_politely()
        finally:
            await self._gate.tasks.wait()

    async def be_interrupted_in_the_grace(self) -> str:
        try:
            return await self.wait_politely()
        finally:
            self._gate.interrupt.set()
            for _ in range(100):  # turns of the loop, some milliseconds: meanwhile the interrupt comes down to here
                await asyncio.sleep(0)

    def read_from_child(self) -> str:
        pipe = subprocess.PIPE  # the child ends with its stdin, at the latest when this process is gone
        with subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, start_new_session=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            self._gate.pipes.append(child.stdin)
            child.stdout.read()
        return LATE

    async def fail(self, kind: str) -> str:
        raise RAISED[kind](f"no access with {SECRET}")

    def fail_in_thread(self, kind: str) -> str:
        raise RAISED[kind](f"no access with {SECRET}")

    async def block_the_loop(self) -> str:
        time.sleep(LONG_S)  # noqa: ASYNC251 - the fault itself
        return LATE

    async def hold_the_interpreter(self) -> str:
        re.match(r"(a+)+$", "a" * 40 + "b")
        return LATE


class FaultyModel(ScriptedModel):
    """Replays its replies, but before the one that says `LATE` it is stuck and swallows every cancellation."""

    gate: Any

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        if self.replies[self._next].get("content") == LATE:
            await self.gate.wait_stubbornly()
        return await super()._agenerate(*args, **kwargs)


_USAGE: dict[str, Any] = {"usage_metadata": {"input_tokens": 5, "output_tokens": 2, "total_tokens": TOKENS}}
_ANSWER, _STUCK_REPLY = {"content": "the answer", **_USAGE}, {"content": LATE, **_USAGE}
_SLOW_REPLY = {**_ANSWER, "delay_s": LONG_S}


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to go wrong: what the model asks for, reply by reply, and how each of these calls has to end.

    Attributes:
        turns: the calls of each reply, `tool` or `tool:kind`.
        endings: what stands on each receipt: its outcome, and the source gap or the type of the error.
        says: what the reason has to tell the user.
        last: the reply after the turns.
        answers: what a provider on loopback sends, connection by connection, in place of a script.
        interrupt_at: the event of the run at which a person interrupts it.
        waits: how many bounds the run waits for, one after the other.
        late: how many abandoned tool calls return a value after all, once they are let go.
        tasks_left: tasks of abandoned calls: two for an async tool (its call, and the one in which langchain-core runs
            the body), three for a model.
    """

    name: str
    turns: Sequence[Sequence[str]]
    endings: Sequence[str]
    _: KW_ONLY
    outcome: Outcome = Outcome.ANSWERED
    says: str = ""
    last: Mapping[str, Any] | None = None
    answers: Sequence[bytes] = ()
    interrupt_at: str = ""
    model_timeout_s: float = LONG_S
    deadline_s: float = LONG_S
    waits: int = 1
    late: int = 0
    tasks_left: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def bound_s(self) -> float:
        """When its bounds have ended the run, every grace included."""
        return min(self.deadline_s, self.waits * (BOUND_S + GRACE_S))

    @property
    def tools(self) -> list[str]:
        """The name of the tool of every requested call."""
        return [call.partition(":")[0] for turn in self.turns for call in turn]

    @property
    def known_subtotal(self) -> int:
        """What the replies that came in time and whole have cost."""
        charged = len(self.turns) + (self.outcome is Outcome.ANSWERED) - (self.outcome is Outcome.MISSING_USAGE)
        return TOKENS * charged

    def model(self, gate: Gate) -> FaultyModel:
        """The script of this fault."""
        replies: list[dict[str, Any]] = []
        for turn in self.turns:
            parts = [call.partition(":") for call in turn]
            calls = [
                {"name": tool, "args": {"kind": kind} if kind else {}, "id": f"call-{len(replies)}-{place}"}
                for place, (tool, _, kind) in enumerate(parts)
            ]
            replies.append({"tool_calls": calls, **_USAGE})
        return FaultyModel(replies=[*replies, dict(self.last or _ANSWER)], gate=gate)


STOPPED, ABANDONED = "error native_tool_timeout", "error native_tool_abandoned"
_STUCK = ("sleep_in_thread",)
FAULTS = (
    Fault("sync tool asleep", [_STUCK], [ABANDONED], late=1),
    Fault(
        "forty sync tools asleep",
        [_STUCK * 16, _STUCK * 16, _STUCK * 8, ["sleep_in_thread", "quick"]],
        [*[ABANDONED] * 40, "refused", "executed"],
        waits=3,
        late=40,
    ),
    Fault(
        "tool swallows cancellation", [["swallow_cancellation", "quick"]], [ABANDONED, "executed"], late=1, tasks_left=2
    ),
    Fault("tool cleans up slowly", [["clean_up_slowly", "quick"]], [ABANDONED, "executed"], tasks_left=2),
    Fault("setsid child holds the pipe", [["read_from_child", "quick"]], [ABANDONED, "executed"], late=1),
    *(
        Fault(f"tool raises {kind}", [[f"fail:{kind}", f"fail_in_thread:{kind}"]], [f"error {kind}"] * 2, waits=0)
        for kind in RAISED
    ),
    Fault(
        "three siblings", [["quick", "fail:RuntimeError", "wait_politely"]], ["executed", "error RuntimeError", STOPPED]
    ),
    Fault(
        "model swallows cancellation",
        [["quick"]],
        ["executed"],
        outcome=Outcome.MODEL_TIMEOUT,
        says="0.3 s",
        last=_STUCK_REPLY,
        model_timeout_s=BOUND_S,
        tasks_left=3,
    ),
)
INTERRUPTED = (
    Fault(
        "interrupted during a model call",
        [["quick"]],
        ["executed"],
        outcome=Outcome.INTERRUPTED,
        last=_SLOW_REPLY,
        interrupt_at="model_call_started 2",
    ),
    Fault(
        "interrupted during a tool call",
        [["wait_politely", "quick"]],
        [STOPPED, "executed"],
        outcome=Outcome.INTERRUPTED,
        interrupt_at="tool_call_ended quick",
    ),
    Fault(
        "interrupted in the grace of a tool call",
        [["be_interrupted_in_the_grace"]],
        [STOPPED],
        outcome=Outcome.INTERRUPTED,
    ),
)
LOOP_BLOCKED = Fault(
    "loop blocked",
    [["quick"], ["block_the_loop"]],
    ["executed", ABANDONED],
    outcome=Outcome.DEADLINE,
    deadline_s=BLOCKED_S,
    waits=2,
)
INTERPRETER_HELD = Fault("interpreter held", [["quick"], ["hold_the_interpreter"]], [], deadline_s=BLOCKED_S, waits=2)


def _http(body: bytes, status: str = "200 OK", kind: str = "application/x-ndjson", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


_CALL = {"function": {"name": "list_ci_jobs", "arguments": {"pr": 415}}}
_PIECE = {"model": "faulty:1b", "message": {"role": "assistant", "content": "", "tool_calls": [_CALL]}, "done": False}
_END = {"done": True, "done_reason": "stop", "prompt_eval_count": 5, "eval_count": TOKENS - 5}
_GOOD, _MID_REPLY = _http(json.dumps({**_PIECE, **_END}).encode()), json.dumps(_PIECE).encode() + b"\n"


def _hangs(name: str, answer: bytes) -> Fault:
    timeout, says = Outcome.MODEL_TIMEOUT, "the model did not answer within 0.3 s"
    return Fault(name, [], [], outcome=timeout, says=says, answers=[answer], model_timeout_s=BOUND_S)


def _breaks(name: str, says: str, answer: bytes) -> Fault:
    # After one good reply: its call is executed and its tokens stay known.
    answers, error = [_GOOD, answer], Outcome.MODEL_ERROR
    return Fault(name, [["list_ci_jobs"]], ["executed"], outcome=error, says=says, answers=answers)


_UNREADABLE = "the provider's reply could not be read"
PROVIDER_FAULTS = (
    _hangs("provider never answers", b""),
    _hangs("provider drips for ever", b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n "),
    _breaks("provider answers 500", "answered with an error", _http(b'{"error": "no memory"}', "500 Server Error")),
    _breaks(
        "provider answers 429", "rate limit was reached", _http(b'{"error": "slow down"}', "429 Too Many Requests")
    ),
    _breaks("provider answers broken JSON", _UNREADABLE, _http(b'{"message": {"role": "assis')),
    _breaks("provider answers HTML", _UNREADABLE, _http(b"<!doctype html><title>Sign in</title>", kind="text/html")),
    _breaks("provider answers nothing", _UNREADABLE, _http(b"")),
    _breaks("provider closes mid-reply", "ended before the reply was whole", _http(_MID_REPLY, length=9_999)),
    Fault(
        "provider leaves out the end of its reply",
        [["list_ci_jobs"], ["list_ci_jobs"]],
        ["executed", "withheld"],
        outcome=Outcome.MISSING_USAGE,
        answers=[_GOOD, _http(_MID_REPLY)],
    ),
)


@contextlib.contextmanager
def provider(gate: Gate, answers: Sequence[bytes]) -> Iterator[str]:
    """The address of a server on loopback that sends one answer a connection; opens the gate at the end.

    After an empty answer it keeps the connection open, after one that ends with a blank it drips blanks.
    """
    left = iter(answers)

    class Connection(socketserver.StreamRequestHandler):
        timeout = LONG_S

        def handle(self) -> None:
            head = b"".join(iter(self.rfile.readline, b"\r\n"))
            self.rfile.read(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
            answer = next(left)
            with contextlib.suppress(OSError):  # the client has hung up
                self.wfile.write(answer)
                while answer[-1:] in (b"", b" ") and not gate.threads.wait(0.2):
                    self.wfile.write(answer[-1:])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as server:
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            gate.open()
            server.shutdown()
