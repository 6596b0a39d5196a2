"""The scripted model replays a file as it stands, and a script that cannot be taken is refused by reply and key."""

import asyncio
import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from bounded.usage import judge
from conftest import OnVirtualClock
from models.factory import SetUpMissing
from models.failures import ModelFailed, call_model
from models.reply import finish_reason
from models.scripted import ScriptedModel

QUESTION: list[BaseMessage] = [HumanMessage("Why is CI failing on pull request 415?")]


def script(folder: Path, replies: object) -> ScriptedModel:
    """A model over a file that holds these replies."""
    file = folder / "script.json"
    file.write_text(replies if isinstance(replies, str) else json.dumps(replies), encoding="utf-8")
    return ScriptedModel.from_file(str(file))


def refusal(folder: Path, replies: object) -> str:
    with pytest.raises(SetUpMissing) as refused:
        script(folder, replies)
    assert "script.json" in str(refused.value)
    return str(refused.value)


async def only_reply(folder: Path, reply: dict[str, Any]) -> AIMessage:
    return await call_model(script(folder, [reply]), QUESTION)


async def test_replies_come_in_order_and_a_list_that_runs_out_is_a_clear_failure(tmp_path: Path) -> None:
    model = script(tmp_path, [{"content": "one"}, {"content": "two"}])
    assert [(await call_model(model, QUESTION)).text for _ in range(2)] == ["one", "two"]
    for _ in range(2):
        with pytest.raises(ModelFailed, match=r"script\.json ran out") as failed:
            await call_model(model, QUESTION)
        assert failed.value.kind == "scripted"


async def test_an_empty_object_is_a_reply_without_anything(tmp_path: Path) -> None:
    reply = await only_reply(tmp_path, {})
    assert (reply.content, reply.tool_calls, reply.invalid_tool_calls, reply.usage_metadata) == ("", [], [], None)


async def test_every_key_arrives(tmp_path: Path) -> None:
    reply = await only_reply(
        tmp_path,
        {
            "content": [{"type": "text", "text": "I look."}],
            "tool_calls": [{"name": "list_ci_jobs", "args": {"pr": 415}, "id": "c1"}],
            "invalid_tool_calls": [{"name": "fetch_job_log", "args": "{broken", "id": "c2", "error": "broken"}],
            "usage_metadata": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            "response_metadata": {"finish_reason": "STOP"},
        },
    )
    assert (reply.text, finish_reason(reply), judge(reply.usage_metadata).total) == ("I look.", "stop", 3)
    assert [(call["name"], call["args"], call["id"]) for call in reply.tool_calls] == [
        ("list_ci_jobs", {"pr": 415}, "c1")
    ]
    assert [(call["args"], call["id"], call["error"]) for call in reply.invalid_tool_calls] == [
        ("{broken", "c2", "broken")
    ]


@pytest.mark.parametrize(
    "usage",
    [
        {"total_tokens": True},
        {"total_tokens": "9"},
        {"total_tokens": 7.0},
        {"total_tokens": math.nan},
        {"total_tokens": -5},
        {"total_tokens": None},
        {},
        [],
        "many",
        0,
        False,
        None,
    ],
)
async def test_usage_is_handed_over_as_it_is(tmp_path: Path, usage: Any) -> None:
    """Construction would make 1 of true and 7 of 7.0, and refuse the rest."""
    found = (await only_reply(tmp_path, {"content": "Hello.", "usage_metadata": usage})).usage_metadata
    assert repr(found) == repr(usage)
    assert judge(found).total is None


@pytest.mark.parametrize("identity", [None, ""])
async def test_ids_that_are_no_ids_are_handed_over_too(tmp_path: Path, identity: str | None) -> None:
    calls = [{"name": "list_ci_jobs", "args": {"pr": 415}, "id": identity}]
    reply = await only_reply(tmp_path, {"tool_calls": calls})
    assert reply.tool_calls[0]["id"] == identity


async def test_arguments_may_be_left_out(tmp_path: Path) -> None:
    reply = await only_reply(tmp_path, {"tool_calls": [{"name": "list_ci_jobs", "id": "c1"}]})
    assert reply.tool_calls[0]["args"] == {}


async def test_an_error_fails_that_call_and_the_next_reply_follows(tmp_path: Path) -> None:
    model = script(tmp_path, [{"error": "the provider is on fire"}, {"content": "better"}])
    with pytest.raises(ModelFailed, match="the provider is on fire") as failed:
        await call_model(model, QUESTION)
    assert failed.value.kind == "scripted"
    assert (await call_model(model, QUESTION)).text == "better"


def test_a_delay_passes_before_the_reply_and_before_the_error(
    tmp_path: Path, on_virtual_clock: OnVirtualClock[Any]
) -> None:
    model = script(tmp_path, [{"delay_s": 1.5}, {"delay_s": 60, "error": "late"}, {}])

    async def took() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        with contextlib.suppress(ModelFailed):
            await call_model(model, QUESTION)
        return loop.time() - started

    async def all_of_them() -> list[float]:
        return [await took(), await took(), await took()]

    assert on_virtual_clock(all_of_them()) == [1.5, 60.0, 0.0]


async def test_a_call_that_is_cancelled_has_used_its_reply_up(tmp_path: Path) -> None:
    model = script(tmp_path, [{"content": "never heard", "delay_s": 3600}, {"content": "next"}])
    call = asyncio.create_task(call_model(model, QUESTION))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await call_model(model, QUESTION)).text == "next"


async def test_tools_are_taken_and_change_nothing(tmp_path: Path) -> None:
    reply = await call_model(script(tmp_path, [{"content": "Hello."}]).bind_tools([]), QUESTION)
    assert reply.text == "Hello."


async def test_two_models_over_one_file_each_start_at_the_first_reply(tmp_path: Path) -> None:
    replies = [{"content": "one"}]
    first, second = script(tmp_path, replies), script(tmp_path, replies)
    assert [(await call_model(model, QUESTION)).text for model in (first, second)] == ["one", "one"]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetUpMissing, match="No such file"):
        ScriptedModel.from_file(str(tmp_path / "missing.json"))


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(SetUpMissing):
        ScriptedModel.from_file("a\0b")


@pytest.mark.parametrize("content", ["", "{", "not json", "[" * 100_000])
def test_what_is_no_json_is_refused(tmp_path: Path, content: str) -> None:
    assert "not JSON" in refusal(tmp_path, content)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SetUpMissing, match="not JSON"):
        ScriptedModel.from_file(str(file))


@pytest.mark.parametrize(
    ("replies", "type_name"), [({}, "dict"), ("null", "NoneType"), ('"text"', "str"), ("7", "int")]
)
def test_what_is_no_list_is_refused(tmp_path: Path, replies: object, type_name: str) -> None:
    assert f"must hold a JSON list of replies, not {type_name}" in refusal(tmp_path, replies)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("text", "must be an object, not str"),
        (None, "must be an object, not NoneType"),
        ({"contents": "Hello."}, "unknown key 'contents'; the keys are content, delay_s"),
        ({"delay_s": -1}, "delay_s must be a number of seconds, not -1"),
        ({"delay_s": "1"}, "delay_s must be a number of seconds, not '1'"),
        ({"delay_s": True}, "delay_s must be a number of seconds, not True"),
        ({"delay_s": None}, "delay_s must be a number of seconds, not None"),
        ({"delay_s": math.inf}, "delay_s must be a number of seconds, not inf"),
        ({"delay_s": math.nan}, "delay_s must be a number of seconds, not nan"),
        ({"content": 7}, "content"),
        ({"content": None}, "content"),
        ({"tool_calls": [{"args": {}}]}, "name"),
        ({"tool_calls": [{"name": 7, "id": "c1"}]}, "tool_calls"),
        ({"tool_calls": [{"name": "list_ci_jobs", "id": "c1", "args": "text"}]}, "tool_calls"),
        ({"tool_calls": ["list_ci_jobs"]}, "tool_calls"),
        ({"tool_calls": 7}, "tool_calls"),
        ({"tool_calls": None}, "tool_calls"),
        ({"invalid_tool_calls": [7]}, "invalid_tool_calls"),
        ({"response_metadata": []}, "response_metadata"),
        ({"response_metadata": None}, "response_metadata"),
    ],
)
def test_a_reply_that_cannot_be_taken_is_refused_by_its_number_and_key(tmp_path: Path, reply: Any, why: str) -> None:
    message = refusal(tmp_path, [{"content": "fine"}, reply])
    assert "reply 2: " in message
    assert why in message
    assert "\n" not in message
