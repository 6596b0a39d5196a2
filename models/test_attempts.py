"""What one attempt shows, in a table: which trigger fires, and that nothing it says gets into what is told of it."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage

from conftest import OnVirtualClock
from models.attempts import Attempt, Trigger, attempt, facts, note_status

SECRET = "fake-key-for-tests"


def reply(content: Any = "", *, reason: object = "stop", key: str = "finish_reason", **more: Any) -> AIMessage:
    return AIMessage(content, response_metadata={key: reason}, **more)


THOUGHTS: dict[str, Any] = {"additional_kwargs": {"reasoning_content": "hm"}}
COUNTED: dict[str, Any] = {
    "usage_metadata": {
        "input_tokens": 1, "output_tokens": 16, "total_tokens": 17, "output_token_details": {"reasoning": 16}
    }
}  # fmt: skip
BLANKS = [{"type": "text", "text": ""}, {"type": "text", "text": " \n"}]


@pytest.mark.parametrize(
    ("said", "trigger"),
    [
        (reply("ready"), None),
        (reply("ready", reason="length"), None),  # cut, and usable all the same
        (reply("ready", **THOUGHTS), None),  # reasoning beside real text is no sign
        (reply(), None),
        (reply(reason=None), None),
        (reply(reason="content_filter"), None),
        (reply(reason="length"), Trigger.BUDGET),
        (reply(reason="LENGTHLENGTH"), Trigger.BUDGET),
        (reply(reason="MAX_TOKENS"), Trigger.BUDGET),
        (reply(reason="length", key="done_reason"), Trigger.BUDGET),
        (reply(reason="max_tokens", key="stop_reason"), Trigger.BUDGET),
        (reply(" \n\t ", reason="length"), Trigger.BUDGET),
        (reply(BLANKS, reason="length"), Trigger.BUDGET),
        (reply(BLANKS), None),
        (reply(**THOUGHTS), Trigger.BUDGET),
        (reply(reason=None, **THOUGHTS), Trigger.BUDGET),
        (reply(reason="odd\x1b[31m", **THOUGHTS), Trigger.BUDGET),
        (reply(additional_kwargs={"reasoning_content": " \n"}), None),
        (reply("\u200b\0\ufeff", reason="length"), Trigger.BUDGET),  # nothing that can be seen
        (reply(additional_kwargs={"reasoning_details": [{"type": "reasoning.encrypted"}]}), Trigger.BUDGET),
        (reply([{"type": "thinking", "thinking": "hm"}]), Trigger.BUDGET),
        (reply([{"type": "reasoning", "reasoning": "hm"}]), Trigger.BUDGET),
        (reply(**COUNTED), Trigger.BUDGET),
    ],
)
def test_a_response_shows_a_budget_that_was_too_small_or_nothing(said: AIMessage, trigger: Trigger | None) -> None:
    assert Attempt(reply=said).trigger == trigger


@pytest.mark.parametrize("status", [None, 200, 401, 502])
def test_no_response_is_trigger_a_whatever_the_status(status: int | None) -> None:
    assert Attempt(failure=ValueError("length"), http_status=status).trigger is Trigger.NO_RESPONSE


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("STOP", "stop"),
        (None, "unknown"),
        ("", "unknown"),
        ("x" * 33, "unknown"),
        ("x" * 31 + "y", "x" * 31 + "y"),
        ("two words", "unknown"),
        ("\x1b[31m", "unknown"),
        (7, "unknown"),
    ],
)
def test_a_finish_reason_is_one_plain_word(reason: object, shown: str) -> None:
    assert Attempt(reply=reply(reason=reason)).finish_reason == shown


class Caller:
    """A model that does what a test says."""

    def __init__(self, say: Any, *statuses: int) -> None:
        self.say, self.statuses = say, statuses

    async def ainvoke(self, messages: list[Any]) -> Any:
        for status in self.statuses:
            await note_status(type("Response", (), {"status_code": status}))
        if isinstance(self.say, BaseException):
            raise self.say
        return self.say


class Status(Exception):
    def __init__(self, status_code: object) -> None:
        super().__init__(SECRET)
        self.status_code = status_code


async def asked(say: Any, *statuses: int) -> Attempt:
    return await attempt(Caller(say, *statuses), [], bound_s=5.0, on_late=lambda _: None)


@pytest.mark.parametrize(
    ("say", "statuses", "status", "error"),
    [
        (reply("ready"), (200,), 200, None),
        (reply("ready"), (), None, None),
        (reply("ready"), (500, 200), 200, None),  # of the last response
        (reply("ready"), (302,), 302, "ValueError"),  # no SDK may make a reply of that
        (Status(503), (), 503, "Status"),
        (Status(503), (429,), 429, "Status"),  # the wire knows best
        (Status("503"), (), None, "Status"),
        (Status(True), (), None, "Status"),
        (Status(99), (), None, "Status"),
        (Status(600), (), None, "Status"),
        ("text", (200,), 200, "TypeError"),
        (None, (), None, "TypeError"),
        (SystemExit(3), (), None, "SystemExit"),
        (asyncio.CancelledError(), (), None, "CancelledError"),
    ],
)
async def test_an_attempt_knows_its_status_and_the_class_of_its_failure(
    say: Any, statuses: tuple[int, ...], status: int | None, error: str | None
) -> None:
    done = await asked(say, *statuses)
    assert (done.http_status, done.error_type) == (status, error)
    assert (done.reply is None) == (error is not None)


def _wrapped(inner: BaseException) -> BaseException:
    outer = RuntimeError("wrapped")
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("failure", "status", "nothing"),
    [
        (type("ConnectError", (Exception,), {})(), None, True),
        (_wrapped(type("ConnectTimeout", (Exception,), {})()), None, True),
        (ConnectionRefusedError(), None, True),
        (ValueError(), 429, True),
        (ValueError(), 500, True),
        (ValueError(), 503, True),
        (ValueError(), 408, False),  # from in front of a model that may have served
        (ValueError(), 502, False),
        (ValueError(), 504, False),
        (ValueError(), 524, False),
        (ValueError(), 599, False),
        (ValueError(), 200, False),
        (TimeoutError(), None, False),
        (ConnectionResetError(), None, False),
        (type("ReadTimeout", (Exception,), {})(), None, False),
    ],
)
def test_what_was_not_reached_or_refused_has_spent_nothing_and_all_else_is_unknown(
    failure: BaseException, status: int | None, nothing: bool
) -> None:
    assert Attempt(failure=failure, http_status=status).spent_nothing is nothing


def test_a_reply_that_drips_past_its_bound_is_unknown_be_its_status_an_error() -> None:
    assert not Attempt(failure=TimeoutError(), http_status=500, timed_out=True).spent_nothing


async def test_a_status_that_is_none_is_not_on_record_where_the_bound_ended_it_either() -> None:
    class Odd:
        async def ainvoke(self, _: object) -> None:
            await note_status(SimpleNamespace(status_code=999))
            await asyncio.Event().wait()

    done = await attempt(Odd(), [], bound_s=0.01, on_late=lambda _: None)
    assert (done.timed_out, done.http_status) == (True, None)


def test_causes_that_go_round_in_a_circle_end() -> None:
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert not Attempt(failure=one).spent_nothing


def test_what_hangs_is_abandoned_and_what_comes_late_is_handed_over(on_virtual_clock: OnVirtualClock[None]) -> None:
    class Stubborn:
        async def ainvoke(self, messages: list[Any]) -> AIMessage:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
            return reply("late")

    async def check() -> None:
        late: list[object] = []
        done = await attempt(Stubborn(), [], bound_s=2.0, on_late=late.append)
        assert (done.timed_out, done.error_type, done.seconds, done.reply) == (True, "TimeoutError", 2.25, None)
        await asyncio.sleep(2)
        assert [each.text for each in late if isinstance(each, AIMessage)] == ["late"]

    on_virtual_clock(check())


def test_two_attempts_at_once_do_not_mix_their_statuses(on_virtual_clock: OnVirtualClock[None]) -> None:
    class Slow(Caller):
        async def ainvoke(self, messages: list[Any]) -> Any:
            await asyncio.sleep(self.statuses[0])
            return await super().ainvoke(messages)

    async def check() -> None:
        callers = [Slow(reply("x"), status) for status in (201, 204)]
        both = await asyncio.gather(*[attempt(each, [], bound_s=None, on_late=lambda _: None) for each in callers])
        assert [each.http_status for each in both] == [201, 204]

    on_virtual_clock(check())


TEXT = st.text(max_size=30).map(lambda text: f"{text}{SECRET}{text}")


@given(TEXT, TEXT, st.sampled_from(["finish_reason", "done_reason", "stop_reason", "other"]), TEXT)
def test_no_text_of_a_reply_or_of_a_failure_gets_into_the_record(
    said: str, thought: str, key: str, reason: str
) -> None:
    answer = AIMessage(
        said, response_metadata={key: reason, "body": said}, additional_kwargs={"reasoning_content": thought}
    )
    named = type(reason.replace("\0", "") or "x", (Exception,), {})(said)
    for done in (Attempt(reply=answer), Attempt(failure=named), Attempt(failure=_wrapped(named))):
        assert SECRET not in json.dumps(dict(facts(done)))
        assert SECRET not in repr(done)
