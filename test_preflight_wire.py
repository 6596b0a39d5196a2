"""preflight.py as a process, against a server that plays candidates: what layer 1 finds, prints, counts and seals."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from evidence.verify import verify
from models.test_gemini import calling as gemini_calling
from models.test_gemini import said
from models.test_ollama import last, part
from models.test_openai import calling, completion

pytestmark = pytest.mark.slow

KEY = "-".join(["fake", "key", "4242"])  # in no source, for those are copied into a folder as they are
MARKER = "-".join(["body", "marker", "4242"])
QUESTION = "Why is CI failing on pull request 415?"
READY = {"ready": True}
BLANKS = [{"type": "text", "text": ""}, {"type": "text", "text": " \n"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as the server saw it; `purpose` is text, check or route, by the tools that are offered."""

    name: str
    size: int | None
    purpose: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent back; `then` is what becomes of it otherwise: hang, drip, hang up."""

    body: bytes = b""
    status: int = 200
    then: str = ""


@dataclass
class Server:
    """What it was asked, and the moments that a test waits for."""

    url: str = ""
    requests: list[Asked] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)

    def sizes(self, name: str) -> list[int | None]:
        return [asked.size for asked in self.requests if asked.name == name]

    def of(self, purpose: str) -> list[str]:
        return [asked.name for asked in self.requests if asked.purpose == purpose]


Behaviour = Callable[[Asked], Answer]


def as_json(body: Any, status: int = 200) -> Answer:
    return Answer(body=json.dumps(body).encode(), status=status)


def refusal(status: int) -> Answer:
    return as_json({"error": {"message": f"{MARKER}, the key was {KEY}", "code": MARKER}}, status)


def healthy(asked: Asked) -> Answer:
    if asked.purpose == "check":
        return as_json(calling(("report_ready", READY), content=MARKER))
    return as_json(completion({"role": "assistant", "content": MARKER}))


def ollama(asked: Asked) -> Answer:
    called = {"tool_calls": [{"function": {"name": "report_ready", "arguments": READY}}]}
    lines = [part(MARKER, **(called if asked.purpose == "check" else {})), last()]
    return Answer(body=b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def gemini(asked: Asked) -> Answer:
    called = [gemini_calling("report_ready", args=READY, id="1")] if asked.purpose == "check" else []
    return as_json(said(*called, {"text": MARKER}))


def as_text(asked: Asked) -> Answer:
    return as_json(completion({"role": "assistant", "content": f'{MARKER} {{"name": "report_ready", "args": {{}}}}'}))


def always(answer: Answer) -> Behaviour:
    return lambda asked: answer


def small(message: Mapping[str, Any], *, reason: str | None = "length", then: Answer | None = None) -> Behaviour:
    """At 16 tokens it says this, at more it is healthy or says what is given."""
    starved = as_json(completion({"role": "assistant", **message}, reason=reason))
    return lambda asked: starved if asked.size == 16 else then or healthy(asked)


def on_route(*answers: Answer) -> Behaviour:
    """Healthy where it is probed, and on the route it answers with these, one after the other, the last for ever."""
    left = list(answers)

    def behave(asked: Asked) -> Answer:
        if asked.purpose != "route":
            return healthy(asked)
        return left.pop(0) if len(left) > 1 else left[0]

    return behave


EMPTY = {"content": ""}
HTML = Answer(body=f"<html>{MARKER} {KEY}</html>".encode())
NO_TEXT = as_json(completion({"role": "assistant", "content": ""}, reason="length"))
CREATED = as_json(completion({"role": "assistant", "content": MARKER}), 201)
BEHAVIOURS: dict[str, Behaviour] = {
    "healthy": healthy,
    "second": healthy,
    "ollama": ollama,
    "gemini": gemini,
    "no-usage": lambda asked: as_json({**json.loads(healthy(asked).body), "usage": None}),
    "as-text": as_text,
    "indiscreet": on_route(as_json(completion({"role": "assistant", "content": f"The key is {KEY}."}))),
    "empty": small(EMPTY),
    "null": small({"content": None}),
    "absent": small({}),
    "blanks": small({"content": BLANKS}),
    "reasoned": small({"content": "", "reasoning_content": MARKER}, reason="stop"),
    "reasoned-on": small({"content": None, "reasoning": MARKER}, reason=None),
    "created": always(CREATED),
    "no-content": always(Answer(status=204)),
    "html": always(HTML),
    "broken": always(Answer(body=f'{{"choices": [{{"{MARKER}'.encode())),
    "hidden": always(refusal(502)),
    "silent": always(as_json(completion({"role": "assistant", "content": "  "}))),
    "hung-up": always(Answer(then="hang up")),
    "hang": always(Answer(then="hang")),
    "drip": always(Answer(then="drip")),
    "hang-larger": small(EMPTY, then=Answer(then="hang")),
    "route-503": on_route(refusal(503)),
    "route-201": on_route(CREATED),
    "route-hung-up": on_route(Answer(then="hang up")),
    "route-starved": on_route(NO_TEXT),
    "route-html": on_route(HTML),
    "route-recovers": on_route(refusal(503), refusal(429), as_json(completion())),
    "route-hang": on_route(Answer(then="hang")),
    **{f"refuses-{status}": small(EMPTY, then=refusal(status)) for status in (401, 403, 404, 429, 500, 503)},
}


class Handler(BaseHTTPRequestHandler):
    server_of: Server

    def do_POST(self) -> None:
        server, name = self.server_of, self.path.split("/")[1]
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers.get("authorization") or self.headers.get("x-goog-api-key") or ""
        asked = Asked(name=name, size=_size(body), purpose=_purpose(body), key=key)
        server.requests.append(asked)
        answer = BEHAVIOURS[name](asked)
        self.close_connection = True
        if answer.then == "hang":
            server.hanging.set()
            server.closing.wait()
        elif answer.then != "hang up":
            self.send_response(answer.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer.body) if answer.then != "drip" else 10**6))
            self.end_headers()
            self.wfile.write(answer.body)
        while answer.then == "drip" and not server.closing.wait(0.2):
            try:
                self.wfile.write(b" ")
            except OSError:
                return

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _size(body: Any) -> int | None:
    if "generationConfig" in body:
        return int(body["generationConfig"]["maxOutputTokens"])
    return body["options"]["num_predict"] if "options" in body else body.get("max_tokens")  # type: ignore[no-any-return]


def _purpose(body: Any) -> str:
    tools = json.dumps(body.get("tools") or "")
    return "check" if "report_ready" in tools else "route" if "fetch_job_log" in tools else "text"


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"server_of": server}))
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.closing.set()
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def server(running: Server) -> Server:
    running.requests.clear()
    running.hanging.clear()
    return running


@dataclass(frozen=True, slots=True, kw_only=True)
class Flown:
    """What a process came to, and its run folder."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def said(self) -> Any:
        return json.loads(self.stdout)

    def rows(self) -> dict[str, dict[str, Any]]:
        report = self.said["report"]
        stages = [report, report.get("primary_attempt", {"routes": []})]
        return {row["agent_id"]: row for stage in stages for row in stage["routes"]}

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = json.loads((self.folder / "events.json").read_bytes())
        return [event["facts"] for event in events if event["kind"] == kind]

    def holds_as(self, outcome: str) -> None:
        """Its folder is sealed and verified, and nothing that a server or a key said is anywhere."""
        assert verify(self.folder) == []
        review = json.loads((self.folder / "outcome-review.json").read_bytes())
        assert (review["derived"], review["claimed"]) == (outcome, outcome)
        assert (self.folder / "stdout.txt").read_text() == self.stdout
        texts = {path.name: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        for name, text in {**texts, "stdout": self.stdout.encode(), "stderr": self.stderr.encode()}.items():
            assert MARKER.encode() not in text, name
            assert KEY.encode() not in text, name


def pool_file(server: Server, home: Path, *names: str) -> Path:
    """A pool of these behaviours in this order, each of which is sent the key."""
    tables = []
    for rank, name in enumerate(names):
        provider = name if name in ("ollama", "gemini") else "openai"
        model = "gemini-3.8-flash" if provider == "gemini" else name
        address = f"{server.url}/{name}{'/v1' if provider == 'openai' else ''}"
        values = {"id": name, "provider": provider, "model": model, "base_url": address, "api_key_env": "POOL_VARIABLE"}
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        tables.append("\n".join(["[[candidate]]", *lines, f"cost_rank = {rank}"]))
    path = home / "pool.toml"
    path.write_text("\n".join(tables))
    return path


def command(server: Server, home: Path, names: tuple[str, ...], form: str) -> list[str]:
    pool = ["--pool", str(pool_file(server, home, *names)), "--evidence", str(home / "runs")]
    return [sys.executable, "preflight.py", *pool, *([form] if form else [])]


def started(command: list[str], **environment: str) -> "subprocess.Popen[str]":
    given = os.environ | {"NO_PROXY": "127.0.0.1", "POOL_VARIABLE": KEY} | environment
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=given, text=True, **pipes)


def ended(process: "subprocess.Popen[str]", home: Path) -> Flown:
    stdout, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    (folder,) = (home / "runs").iterdir()
    return Flown(status=process.returncode, stdout=stdout, stderr=stderr, folder=folder)


def flown(server: Server, home: Path, *names: str, form: str = "--json", **environment: str) -> Flown:
    with started(command(server, home, names, form), **environment) as process:
        return ended(process, home)


def shown(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("status", "error_type", "http_status", "attempts", "trigger", "escalated"))


REFUSED: dict[str, tuple[Any, ...]] = {
    **{
        f"refuses-{n}": ("rejected", "escalated_probe_rejected", n, 2, "B", True)
        for n in (401, 403, 404, 429, 500, 503)
    },
    "html": ("rejected", "ReplyUnreadable", 200, 1, "A", None),
    "broken": ("rejected", "ReplyUnreadable", 200, 1, "A", None),
    "no-content": ("rejected", "ReplyUnreadable", 204, 1, "A", None),
    "hidden": ("rejected", "InternalServerError", 502, 1, "A", None),
    "silent": ("rejected", "invalid_chat_response", 200, 1, None, None),
    "hung-up": ("rejected", "RemoteProtocolError", None, 1, "A", None),
}


def test_what_refuses_or_answers_nonsense_is_rejected_and_each_attempt_is_one_request(
    server: Server, tmp_path: Path
) -> None:
    done = flown(server, tmp_path, *REFUSED, REVIEW_PREFLIGHT_MAX_ESCALATIONS="6")
    report, rows = done.said["report"], done.rows()
    assert (done.status, done.said["outcome"]) == (4, "not_ready")
    assert {name: shown(row) for name, row in rows.items()} == REFUSED
    assert {name: len(server.sizes(name)) for name in rows} == {name: row["attempts"] for name, row in rows.items()}
    assert all(server.sizes(name) == [16, 4096][: rows[name]["attempts"]] for name in rows)
    assert (report["contract"], report["probed_count"], report["ready_count"]) == ("review-preflight-v1", 4, 0)
    assert (report["escalations_used"], report["escalation_budget"]) == (6, 6)
    assert report["fallback_reason"] == "primary_routes_unavailable"
    assert (report["primary_attempt"]["probed_count"], report["primary_attempt"]["rejected_count"]) == (8, 8)
    assert (done.said["end_to_end"]["why"], done.said["serving"]) == ("no candidate is ready", [])
    assert {asked.key for asked in server.requests} == {f"Bearer {KEY}"}
    done.holds_as("not_ready")


def test_a_starved_reply_in_any_shape_is_asked_once_more_and_is_ready(server: Server, tmp_path: Path) -> None:
    starved = ("empty", "null", "absent", "blanks", "reasoned", "reasoned-on")
    done = flown(server, tmp_path, *starved, "created", "healthy", REVIEW_PREFLIGHT_MAX_ESCALATIONS="6")
    rows = done.rows()
    assert (done.status, done.said["outcome"]) == (0, "ready")
    for name in starved:
        assert shown(rows[name]) == ("ready", None, None, 2, "B", True), name
        assert (rows[name]["finish_reason"], rows[name]["reasoning_without_content"]) == ("stop", False)
        assert server.sizes(name)[:3] == [16, 4096, 4096]
    assert shown(rows["healthy"]) == ("ready", None, None, 1, None, None)
    assert shown(rows["created"]) == ("ready", None, None, 1, None, None)  # 2xx, be it an odd one
    assert rows["created"]["tool_calls"] == "no"
    assert done.said["serving"] == [*starved, "healthy"]
    assert (sorted(server.of("check")), server.of("route")) == (sorted(rows), ["empty"])
    signs = {facts["agent_id"]: facts for facts in done.events("probe_ended") if facts["purpose"] == "base"}
    assert [signs[name]["finish_reason"] for name in starved] == ["length"] * 4 + ["stop", "unknown"]
    assert [signs[name]["reasoned"] for name in starved] == [False] * 4 + [True] * 2
    done.holds_as("ready")


def test_the_table_says_who_can_serve_and_why_the_others_cannot(server: Server, tmp_path: Path) -> None:
    names = ("empty", "as-text", "no-usage", "ollama", "gemini", "hidden", "healthy")
    done = flown(server, tmp_path, *names, form="", REVIEW_PREFLIGHT_MAX_ESCALATIONS="0")
    head, *lines = done.stdout.splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}
    ready = "ready; calls tools: {}; usage: {}"
    said = {
        "empty": ("1 B length", "rejected: escalation_budget_exhausted"),
        "as-text": ("1 - stop", ready.format("as_text", "reported")),
        "no-usage": ("1 - stop", ready.format("yes", "missing")),
        "ollama": ("1 - stop", ready.format("yes", "reported")),
        "gemini": ("1 - stop", ready.format("yes", "reported")),
        "hidden": ("1 A -", "rejected: InternalServerError (HTTP 502)"),
        "healthy": ("1 - stop", ready.format("yes", "reported")),
    }
    assert (head, done.status) == ("outcome: ready", 0)
    for name, (begins, ends) in said.items():
        assert rows[name].startswith(begins), rows[name]
        assert rows[name].endswith(ends), rows[name]
    assert "escalations: 0 of 0" in lines
    assert any(line.startswith("end to end: ready, 1 attempt, last asked: ollama") for line in lines)
    assert lines[-1] == "serving: ollama, gemini, healthy"
    assert server.sizes("empty") == [16]
    assert server.sizes("gemini") == [16, 4096]
    assert server.sizes("ollama") == [16, 4096, 4096]
    assert [asked.key for asked in server.requests if asked.name == "gemini"] == [KEY] * 2
    assert [asked.key for asked in server.requests if asked.name == "ollama"] == [""] * 3
    done.holds_as("ready")


def test_what_hangs_or_drips_holds_no_other_up_and_is_rejected_at_its_bound(server: Server, tmp_path: Path) -> None:
    done = flown(server, tmp_path, "hang", "drip", "healthy", "second")
    rows = done.rows()
    assert shown(rows["hang"]) == ("rejected", "TimeoutError", None, 1, "A", None)
    assert shown(rows["drip"]) == ("rejected", "TimeoutError", 200, 1, "A", None)
    assert [10.0 <= rows[name]["seconds"] < 12.0 for name in ("hang", "drip")] == [True, True]
    assert rows["healthy"]["seconds"] < 8.0
    assert (done.status, done.said["serving"]) == (0, ["healthy", "second"])
    assert server.sizes("hang") == server.sizes("drip") == [16]
    done.holds_as("ready")


def test_a_larger_probe_that_hangs_keeps_its_own_error_type(server: Server, tmp_path: Path) -> None:
    done = flown(server, tmp_path, "hang-larger", "healthy")
    row = done.rows()["hang-larger"]
    assert shown(row) == ("rejected", "TimeoutError", None, 2, "B", True)
    assert "finish_reason" not in row  # that was the first attempt's
    assert server.sizes("hang-larger") == [16, 4096]
    assert (done.status, done.said["serving"]) == (0, ["healthy"])
    done.holds_as("ready")
