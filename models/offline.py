"""No language model: a deterministic triage that reads the tool results it was given. It is what `make ask` uses.

It asks for the jobs of the pull request, or for the log of the job, that the question names (for all jobs where it
names none), fetches the logs of failed jobs, and answers with their failing lines, verbatim. As its tokens it reports
the words that it read and wrote.
"""

import asyncio
import re
from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage

from models.embedded import EmbeddedModel

_PULL_REQUEST = re.compile(
    r"(?:\b(?:pull[ -]request|pull|pr)s?|#)(?: number| no\.?)?[\s#/:]{0,3}(\d{1,9})\b", re.IGNORECASE
)
_JOB = re.compile(r"\bjobs?(?: number| no\.?)?[\s#/:]{0,3}(\d{1,12})\b", re.IGNORECASE)
_FAILED_JOB = re.compile(r"^- job (\d+): (failed|timed_out), (.+)$", re.MULTILINE)
_FAILING_LINE = re.compile(
    r"^(?:E\s{2,}\S|\s*--- FAIL: |(?-i:FAIL(?:ED|:)?) \S|ERROR:? |\s*(?:●|✕|✗|✖|not ok) \S|.*\bFAILED$"
    r"|.*\b(?:error|exception|fatal|panic)\b.*:|.*\bassert(?:ion)?\b.*\bfail|\s*\S+(?:Error|Exception)\b"
    r"|Execution failed for |.*\b(?:killed|segmentation fault|no space left|would reformat|undefined reference)\b"
    r"|(?-i:(?:\S+ )?[A-Z]{1,4}\d{3,4}) |\S+\.go:\d+:\d+: |\s*\d+:\d+\s+error\b"
    r"|\s+\S+\.go:\d+: |\s*(?:Expected|Received): |npm (?:ERR!|error) |##\[error\]|thread '.*' .*panicked at"
    r"|(?-i:> (?!Task |Run |There |Configure )[A-Z]))",  # why a Gradle task failed
    re.IGNORECASE,
)
_NUMBER = re.compile(r"^\d+\| ?")
_CUT = re.compile(r"^\.\.\. [\d,]+ lines? \.\.\.$")
# That a step failed is known, and a line that is only a mark shows nothing.
_SAYS_NOTHING = re.compile(
    r"^(?:##\[error\]Process completed with exit code \d+\.?|\W*\w+\W*"
    r"|\[ERROR\] (?:To see the full|Re-run |For more info|\[Help ).*|npm (?:ERR!|error) A complete log.*)$"
)
_MARKER = "==="
_NO_FAILURE = "no failure found"
_MAX_LINES = 6
_MAX_LOGS = 8


class OfflineTriage(EmbeddedModel):
    """The embedded triage. It calls `list_ci_jobs` and `fetch_job_log`, whatever else there is.

    `hold_back_s` seconds it waits before each reply, to be as slow as a language model where that is wanted.
    """

    hold_back_s: float = 0.0

    @property
    def _llm_type(self) -> str:
        return "offline"

    async def answer(self, messages: list[BaseMessage]) -> AIMessage:
        """The next call, or the verdict."""
        await asyncio.sleep(self.hold_back_s)
        return _counted(_triage(messages), messages)


def _triage(messages: list[BaseMessage]) -> AIMessage:
    last = max((place for place, message in enumerate(messages) if isinstance(message, HumanMessage)), default=0)
    question, since = messages[last].text, messages[last + 1 :]
    results, more = _results(since), 0
    if jobs := _JOB.findall(question)[:_MAX_LOGS]:
        wanted = {int(number): f"Job {number}" for number in jobs}
    else:
        pull_request = _PULL_REQUEST.search(question)
        args = {"pr": int(pull_request[1]) if pull_request else 0}
        listing = results.get(("list_ci_jobs", args["pr"]))
        if listing is None:
            return _ask(since, "list_ci_jobs", [args])
        if listing.status == "error":
            return _say(f"The jobs could not be listed. {listing.text}")
        failed = _FAILED_JOB.findall(listing.text)
        if not failed:
            return _say(f"No failed job. {listing.text}")
        wanted = {
            int(number): f"Job {number} ({name}) {state.replace('_', ' ')}"
            for number, state, name in failed[:_MAX_LOGS]
        }
        more = len(failed) - len(wanted)
    missing = [number for number in wanted if ("fetch_job_log", number) not in results]
    if missing:
        return _ask(since, "fetch_job_log", [{"job_id": number} for number in missing])
    verdicts = [_verdict(what, results["fetch_job_log", number]) for number, what in wanted.items()]
    return _say("\n\n".join(verdicts + ([f"The logs of {more} more failed jobs were not read."] if more else [])))


def _say(text: str) -> AIMessage:
    return AIMessage(f"Offline triage (no language model). {text}")


def _results(messages: list[BaseMessage]) -> dict[tuple[str, int], ToolMessage]:
    calls: dict[str | None, tuple[str, int]] = {}
    results: dict[tuple[str, int], ToolMessage] = {}
    for message in messages:
        if isinstance(message, AIMessage):
            calls |= {call["id"]: (call["name"], next(iter(call["args"].values()))) for call in message.tool_calls}
        elif isinstance(message, ToolMessage) and message.tool_call_id in calls:
            results[calls[message.tool_call_id]] = message
    return results


def _ask(since: list[BaseMessage], tool: str, wanted: Sequence[dict[str, int]]) -> AIMessage:
    first = sum(len(message.tool_calls) for message in since if isinstance(message, AIMessage)) + 1
    calls = [ToolCall(name=tool, args=dict(args), id=f"call-{first + n}") for n, args in enumerate(wanted)]
    return AIMessage("", tool_calls=calls)


def _verdict(what: str, log: ToolMessage) -> str:
    if log.status == "error":
        return f"{what}; its log could not be read. {log.text}"
    lines = [line for line in log.text.splitlines()[1:] if not line.startswith(_MARKER) and not _CUT.match(line)]
    lines = [_NUMBER.sub("", line).rstrip() for line in lines]
    failing = [line for line in lines if _FAILING_LINE.match(line) and not _SAYS_NOTHING.match(line)]
    if lines[:1] == [_NO_FAILURE]:
        what, failing = f"{what}; no failure found in its log. It ends:", lines[1:][-3:]
    elif len(failing) > _MAX_LINES:
        what = f"{what}. The first {_MAX_LINES} of {len(failing)} failing lines of its log:"
        failing = failing[:_MAX_LINES]
    elif failing:
        what = f"{what}. The failing lines of its log:"
    else:
        what, failing = f"{what}; no line of its log looks like the cause. It ends:", lines[-_MAX_LINES:]
    return "\n".join([what, *(f"    {line}" for line in failing)])


def _counted(reply: AIMessage, messages: list[BaseMessage]) -> AIMessage:
    read = sum(len(message.text.split()) for message in messages)
    written = len(reply.text.split()) + sum(1 + len(call["args"]) for call in reply.tool_calls)
    reply.usage_metadata = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    return reply
