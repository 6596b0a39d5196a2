"""A send is measured as it is sent, and what is cut to a room fills it to the last character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import tool

from reviewing.transcript import MAX_RESULT, Transcript, fitted, serialised_chars

ANY_TEXT = st.text(st.characters() | st.sampled_from('"\\\n\x00é😀\ud800'), max_size=300)


@tool
def look(path: str) -> str:
    """Look at it."""
    return path


def transcript(bound: int = 10_000) -> Transcript:
    return Transcript(bound, [look])


def test_an_empty_send_is_its_frame_and_the_schemas_of_its_tools() -> None:
    schema = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at it.",
            "parameters": {"properties": {"path": {"type": "string"}}, "required": ["path"], "type": "object"},
        },
    }
    assert Transcript(10_000, []).size([]) == len('{"messages":[],"tools":[]}')
    assert transcript().size([]) == len('{"messages":[],"tools":[]}') + len(json.dumps(schema, separators=(",", ":")))


@given(ANY_TEXT)
def test_a_text_adds_to_each_kind_of_message_what_it_takes_serialised(text: str) -> None:
    for kind in (SystemMessage, HumanMessage, AIMessage):
        assert transcript().size([kind(text)]) - transcript().size([kind("")]) == serialised_chars(text)
    result, empty = (ToolMessage(said, tool_call_id="a", name="look") for said in (text, ""))
    assert transcript().size([result]) - transcript().size([empty]) == serialised_chars(text)


def test_what_a_reply_asks_for_and_the_ids_of_answers_count_as_well() -> None:
    short = AIMessage("", tool_calls=[tool_call(name="look", args={"path": "a"}, id="c")])
    long = AIMessage("", tool_calls=[tool_call(name="look", args={"path": "a" * 101}, id="c" * 51)])
    assert transcript().size([long]) - transcript().size([short]) == 150
    answers = [ToolMessage("x", tool_call_id="c" * length, name="look") for length in (1, 51)]
    assert transcript().size(answers[1:]) - transcript().size(answers[:1]) == 50


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "", "extras": {"signature": "c2ln"}}],
        [{"type": "thinking", "thinking": "Hm."}],
        [{"type": "reasoning", "reasoning": "Hm."}],
        [{"type": "executable_code", "executable_code": "1"}, {"type": "text", "text": "b"}],
        ["a", {"type": "text", "text": "b"}],
    ],
)
def test_blocks_as_providers_send_them_can_be_measured(content: list[str | dict[str, object]]) -> None:
    assert transcript().size([AIMessage(content)]) > transcript().size([])


@pytest.mark.parametrize(
    ("bound", "at"), [(400_000, 320_000), (20_000, 16_000), (10_240, 8_192), (10_000, 7_952), (2_048, 0), (100, -1_948)]
)
def test_the_notice_is_due_at_four_fifths_or_2048_before_the_bound_whichever_is_less(bound: int, at: int) -> None:
    assert Transcript(bound, []).notice_at == at


@pytest.mark.parametrize(
    ("text", "chars"), [("", 0), ("abc", 3), ('"', 2), ("\\", 2), ("\n", 2), ("\x01", 6), ("é漢😀", 3)]
)
def test_a_text_takes_what_json_makes_of_it(text: str, chars: int) -> None:
    assert serialised_chars(text) == chars


@given(ANY_TEXT, st.integers(0, 1_000))
def test_the_longest_prefix_that_takes_no_more_than_the_room_is_kept(text: str, room: int) -> None:
    kept = fitted(text, room)
    assert text.startswith(kept)
    assert len(json.dumps(kept, ensure_ascii=False)) - 2 <= room
    if kept != text:
        assert len(json.dumps(text[: len(kept) + 1], ensure_ascii=False)) - 2 > room


@given(ANY_TEXT, st.integers(0, 1_000))
def test_what_was_cut_to_a_room_fits_into_a_send_of_that_much_more(text: str, room: int) -> None:
    empty = transcript().size([HumanMessage("")])
    assert transcript().size([HumanMessage(fitted(text, room))]) <= empty + room


@pytest.mark.parametrize("room", [0, -1, -10_000])
def test_no_room_holds_nothing(room: int) -> None:
    assert fitted("abc", room) == ""


def test_no_room_is_so_large_that_a_result_has_more_than_its_own_limit() -> None:
    assert MAX_RESULT == 120_000
    assert fitted("a" * (MAX_RESULT + 1), 10**9) == "a" * MAX_RESULT
    assert fitted("\n" * (MAX_RESULT + 1), MAX_RESULT + 1) == "\n" * (MAX_RESULT // 2)
