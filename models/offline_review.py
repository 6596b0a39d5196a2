"""No language model: a deterministic reviewer that reads every changed file whole and reports a few cheap things.

Conflict markers, syntax errors in Python, JSON and TOML, debugging leftovers, and values that were masked as secrets.
As its tokens it reports the words that it read and wrote.
"""

import ast
import json
import re
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage

from bounded.text import MASK
from models.embedded import EmbeddedModel

_CHANGED = re.compile(r"^- (\d+) lines?: (.+)$", re.MULTILINE)
_HEADER = re.compile(r".+, lines (\d+)-(\d+) of (\d+)")
_NUMBERED = re.compile(r"^(\d+)\| (.*)$", re.MULTILINE)
_CONFLICT = re.compile(r"(?:<{7}|>{7}|\|{7})(?: |$)")
_BETWEEN = "=" * 7  # alone it may underline a heading
# Where the tool shows a line otherwise than it stands: masked, with a line break or a control character in it, cut.
_ALTERED = re.compile(re.escape(MASK) + r"|␤|<U\+[0-9A-F]{4,6}>|\[\.\.\. .* characters cut here \.\.\.\]$", re.M)
_LEFTOVER = re.compile(r"\s*(?:breakpoint\(\)|import i?pdb\b|i?pdb\.set_trace\(\)|debugger;?\s*$|binding\.pry\b)")
# Masked inside a literal: an expression that follows `token =` is masked as well, and is none.
_SECRET = re.compile(rf"[\"'`][^\"'`]{{0,200}}{re.escape(MASK)}")
_MAX_CALLS = 8
_MAX_FINDINGS = 200


class OfflineReviewer(EmbeddedModel):
    """The embedded reviewer: it calls `read_file`, whatever else there is."""

    @property
    def _llm_type(self) -> str:
        return "offline"

    async def answer(self, messages: list[BaseMessage]) -> AIMessage:
        """The next reads, or the findings."""
        reply = _review(messages)
        read = sum(len(message.text.split()) for message in messages)
        written = len(reply.text.split()) + sum(1 + len(call["args"]) for call in reply.tool_calls)
        reply.usage_metadata = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
        return reply


def _review(messages: Sequence[BaseMessage]) -> AIMessage:
    task = next(message.text for message in messages if isinstance(message, HumanMessage))
    changed = list(dict.fromkeys(path for _lines, path in _CHANGED.findall(task)))
    source: dict[str, dict[int, str]] = {path: {} for path in changed}
    following: dict[str, int] = dict.fromkeys(changed, 1)  # path -> the line to go on at; gone where there is none
    totals = dict.fromkeys(changed, 0)
    asked: dict[str, tuple[str, int]] = {}
    for message in messages:
        if isinstance(message, AIMessage):
            asked |= {
                call["id"] or "": (call["args"]["path"], call["args"]["start_line"]) for call in message.tool_calls
            }
        elif isinstance(message, ToolMessage) and message.tool_call_id in asked:
            path, start = asked[message.tool_call_id]
            following.pop(path, None)
            header = _HEADER.match(message.text)
            if message.status != "error" and header is not None:
                rows = [(int(number), text) for number, text in _NUMBERED.findall(message.text)]
                if len(rows) <= int(header[2]) - int(header[1]):
                    rows = rows[:-1]  # cut to the room that was left: the last row may be a part of its line
                source[path] |= dict(rows)
                totals[path] = int(header[3])
                if start <= int(header[2]) < int(header[3]):
                    following[path] = int(header[2]) + 1
    # Whoever speaks after the task asks for an end.
    if following and sum(isinstance(message, HumanMessage) for message in messages) == 1:
        wanted = list(following.items())[:_MAX_CALLS]
        calls = [
            ToolCall(name="read_file", args={"path": path, "start_line": start}, id=f"call-{len(asked) + n}")
            for n, (path, start) in enumerate(wanted, 1)
        ]
        return AIMessage("", tool_calls=calls)
    ids = {path: [call for call, (of, _start) in asked.items() if of == path] for path in changed}
    found = [
        {**finding, "receipts": ids[path]}
        for path in changed
        for finding in _findings(path, source[path], totals[path])
    ]
    return AIMessage(json.dumps(found[:_MAX_FINDINGS]))


def _findings(path: str, lines: dict[int, str], total: int) -> Iterator[dict[str, object]]:
    def found(severity: str, line: int, text: str) -> dict[str, object]:
        return {"severity": severity, "file": path, "line": line, "text": text}

    conflict = any(_CONFLICT.match(line) for line in lines.values())
    for number, line in lines.items():
        if _CONFLICT.match(line) or (conflict and line == _BETWEEN):
            yield found("blocker", number, "A conflict marker was left in the file.")
        elif _LEFTOVER.match(line):
            yield found("minor", number, f"A debugging leftover: {line.strip()[:80]}")
        elif _SECRET.search(line):
            yield found("major", number, "What stands here looks like a secret; it was masked for the review.")
    whole = "".join(f"{line}\n" for line in lines.values())
    if (
        not conflict
        and list(lines) == list(range(1, total + 1))
        and not _ALTERED.search(whole)
        and (fault := _fault(path, whole))
    ):
        yield found("blocker", min(max(fault.line, 1), max(len(lines), 1)), fault.text)


@dataclass(frozen=True, slots=True)
class _Fault:
    line: int
    text: str


def _fault(path: str, source: str) -> _Fault | None:
    """The syntax error of a whole file, None where there is none or its kind is not known."""
    try:
        if path.endswith(".py"):
            with warnings.catch_warnings(action="ignore"):
                ast.parse(source)
        elif path.endswith(".json") and source.strip():
            json.loads(source)
        elif path.endswith(".toml"):
            tomllib.loads(source)
    except SyntaxError as exc:
        return _Fault(exc.lineno or 1, f"This is no valid Python: {exc.msg}.")
    except json.JSONDecodeError as exc:
        return _Fault(exc.lineno, f"This is no valid JSON: {exc.msg}.")
    except tomllib.TOMLDecodeError as exc:
        place = re.search(r"at line (\d+)", str(exc))
        return _Fault(int(place[1]) if place else len(source.splitlines()), f"This is no valid TOML: {exc}.")
    except (RecursionError, MemoryError, ValueError):
        return _Fault(1, "This is nested too deep, or holds what its parser refuses.")
    return None
