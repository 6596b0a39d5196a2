"""The timeline page: bars against bounds, fates in words, and nothing that an event holds gets out of its place."""

import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

import pytest

from evidence.timeline import MAX_ROWS, MAX_RUNS, MAX_TEXT, timeline

TIMEOUTS = {"default_s": 10.0, "per_tool": {}, "per_set": {"ci": {"fetch_job_log": 3.0}}, "self_limiting": []}
LIMITS = {
    "token_budget": None,
    "model_timeout_s": 60.0,
    "deadline_s": 120.0,
    "max_steps": 12,
    "tool_timeouts": TIMEOUTS,
}
USAGE = {
    "input_tokens": 224,
    "output_tokens": 179,
    "total_tokens": 403,
    "output_token_details": {"reasoning": 159},
}
HOSTILE = "</style></p>\"'><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e\x00\ud800"

Event = dict[str, Any]


class Page(HTMLParser):
    """The page read back: its text, every tag with its attributes, and whether tags are closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.drawn: list[dict[str, str | None]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self._open.append(tag)
        self._see(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.drawn.append(dict(attrs))
        self._see(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words += f"{data}\n"

    def one(self, look: str) -> dict[str, float]:
        """The numbers of the one shape of a look, in percent or pixels."""
        (shape,) = [shape for shape in self.drawn if shape["class"] == look]
        return {name: float((value or "").rstrip("%")) for name, value in shape.items() if name != "class"}

    def looks(self) -> list[str | None]:
        return [shape["class"] for shape in self.drawn if shape["class"] != "grid"]

    def _see(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def event(at: int, kind: str, /, run: str | None = "slow", **facts: Any) -> Event:
    return {"seq": 0, "at": "2026-11-30T12:10:35.123Z", "elapsed_ms": at, "run": run, "kind": kind, "facts": facts}


def started(at: int = 0, run: str = "slow", limits: Mapping[str, Any] = LIMITS, **facts: Any) -> Event:
    question = "Why did job 815 fail?"
    return event(at, "run_started", run=run, question=question, model="offline", limits=limits, **facts)


def a_receipt(outcome: str, **fields: Any) -> Event:
    about = {"turn": 1, "index": 0, "tool": "fetch_job_log", "args": {"job_id": 815}}
    return {**about, "bound_s": 3.0, "bound_source": "tool_set", "outcome": outcome, **fields}


def stop(at: int, outcome: str = "answered", receipts: tuple[Event, ...] = (), **facts: Any) -> Event:
    spent = {"known_subtotal": 403, "usage_known": True, "model": "offline", "model_calls": 1, "seconds": at / 1000}
    return event(at, "stop", outcome=outcome, **{**spent, **facts}, receipts=list(receipts))


def a_reply(at: int, usage: object = None, call: int = 1, tools: tuple[str, ...] = ()) -> Event:
    proposed = [{"id": f"call-{place}", "tool": tool} for place, tool in enumerate(tools)]
    facts: Event = {"finish_reason": "STOP", "proposed": proposed, "text_chars": 0, "usage": usage}
    return event(at, "model_call_ended", call=call, **facts)


def the_slow_tool() -> list[Event]:
    """A tool that was abandoned 0.25 s after its bound of 3 s; its result came at 8.4 s, after the run."""
    begun = {name: value for name, value in a_receipt("error").items() if name != "outcome"}
    cut = a_receipt("error", duration_sec=3.25, source_gap="native_tool_abandoned", reason="TOOL_TIMEOUT")
    return [
        event(0, "record_started", run=None, kind="batch", model="offline", schema_version=1),
        started(1000),
        event(1000, "model_call_started", call=1),
        a_reply(1400, USAGE, tools=("fetch_job_log",)),
        event(1400, "tool_call_started", receipt=begun),
        event(4650, "tool_call_abandoned", receipt=cut),
        event(4700, "run_ended", outcome="answered", reason=None),
        stop(4700, receipts=(cut,)),
        event(9400, "tool_call_late", receipt={**cut, "late": {"at": "2026-11-30T12:10:44Z", "chars": 1574}}),
        event(9500, "record_ended", run=None, outcome="completed"),
    ]


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every string in a value."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from strings(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: str) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_an_abandoned_tool_is_a_cut_bar_past_its_bound_and_its_late_result_has_a_mark() -> None:
    page = Page(timeline(the_slow_tool()))
    bar, stripes, limit = page.one("cut"), page.one("stripes"), page.one("limit")
    assert bar["x"] == stripes["x1"] < limit["x1"] == limit["x2"] < bar["x"] + bar["width"]
    assert page.one("wait")["x1"] == pytest.approx(bar["x"] + bar["width"], abs=0.02)
    assert page.looks().count("end") == 2  # in both rows: the run ended before the late result came
    assert page.one("wait")["x1"] < page.one("wait")["x2"] == 98.0
    assert "timed out at its bound of 3 s; abandoned, for it did not stop\n" in page.words
    assert "came late, at 8.40 s with 1,574 characters: recorded, never used" in page.words
    assert "\n400 ms to 3.65 s; bound 3 s (tool set)\n" in page.words


def test_a_run_says_what_it_was_asked_allowed_and_charged() -> None:
    events = the_slow_tool()
    events[1] = started(1000, injected="held back by 0.8 s", derived="one token more than before")
    page = Page(timeline(events))
    for said in (
        "batch, 1 run; model offline; from 2026-11-30T12:10:35.123Z",
        "fetch_job_log(815)",
        "Why did job 815 fail?",
        "answered",
        "known subtotal 403, which is the total",
        "no token budget; whole run 120 s; model call 60 s; at most 12 model calls;"
        " fetch_job_log 3 s, any other tool 10 s",
        "held back by 0.8 s",
        "one token more than before",
    ):
        assert f"\n{said}\n" in page.words


def test_the_timeout_that_was_asked_for_is_told_and_not_the_one_that_it_replaces() -> None:
    limits = {**LIMITS, "tool_timeouts": {**TIMEOUTS, "per_tool": {"fetch_job_log": 9.0, "list_ci_jobs": None}}}
    assert "fetch_job_log 9 s, list_ci_jobs unlimited, any other tool 10 s" in timeline([started(limits=limits)])


def test_a_model_call_says_what_it_asked_for_and_its_tokens_with_thinking_apart() -> None:
    page = Page(timeline(the_slow_tool()))
    assert "replied after 400 ms, asked for fetch_job_log\n" in page.words
    assert "403 tokens: 224 in, 179 out, 159 of these thinking; finish reason STOP\n" in page.words


@pytest.mark.parametrize(
    "usage", [None, {}, {"repr": "?"}, {**USAGE, "total_tokens": 1}, {**USAGE, "total_tokens": "9"}]
)
def test_tokens_that_were_not_validly_reported_are_unknown_and_no_number(usage: object) -> None:
    fault = "no usage was reported"
    ended = stop(20, "missing_usage", known_subtotal=0, usage_known=False, usage_fault=fault, reason=fault)
    page = Page(timeline([started(), event(0, "model_call_started", call=1), a_reply(20, usage), ended]))
    assert "tokens unknown: " in page.words
    assert " tokens: " not in page.words
    assert f"known subtotal 0, the total is unknown: {fault}" in page.words


@pytest.mark.parametrize("thinking", [True, "9", {"repr": "?"}, None])
def test_thinking_that_is_no_count_is_not_shown(thinking: object) -> None:
    reply = a_reply(20, {**USAGE, "output_token_details": {"reasoning": thinking}})
    assert "thinking" not in timeline([started(), event(0, "model_call_started", call=1), reply])


def test_a_bound_far_beyond_the_run_does_not_squash_it() -> None:
    page = Page(timeline([started(), event(0, "model_call_started", call=1), a_reply(300, USAGE), stop(300)]))
    assert page.one("model") == {"x": 0.5, "y": 9, "width": 97.5, "height": 8}
    assert page.one("bound")["x"] + page.one("bound")["width"] > 100
    assert "beyond" in page.looks()
    assert "limit" not in page.looks()
    assert "\n0 ms to 300 ms; bound 60 s, beyond the axis" in page.words


def test_a_call_that_took_no_measurable_time_is_drawn() -> None:
    page = Page(timeline([started(), event(5, "model_call_started", call=1), a_reply(5, USAGE), stop(3000)]))
    assert page.one("model")["width"] > 0


def test_a_bound_that_lies_near_is_on_the_axis_whole() -> None:
    limits = {**LIMITS, "model_timeout_s": 0.4}
    page = Page(timeline([started(limits=limits), event(0, "model_call_started", call=1), a_reply(300), stop(300)]))
    assert page.one("limit")["x1"] == 98.0
    assert page.one("model")["width"] == pytest.approx(97.5 * 0.75, abs=0.01)
    assert ", beyond the axis" not in page.words


def test_a_late_result_far_beyond_the_run_is_told_in_words() -> None:
    events = the_slow_tool()
    events[-2]["elapsed_ms"] = 61_000
    page = Page(timeline(events))
    assert "came late, at 60.0 s with 1,574 characters" in page.words
    assert "what came late lies beyond the axis" in page.words
    assert page.one("wait")["x2"] > 100


def test_a_model_call_late_in_a_run_is_bound_by_what_is_left() -> None:
    events = [started(limits={**LIMITS, "deadline_s": 2.0}), event(1500, "model_call_started", call=1)]
    assert "bound 0.5 s (about, by the deadline)" in timeline([*events, a_reply(1600), stop(1600)])


def test_without_a_bound_there_is_no_outline() -> None:
    limits = {**LIMITS, "deadline_s": None, "model_timeout_s": None, "token_budget": 1000}
    page = Page(timeline([started(limits=limits), event(0, "model_call_started", call=1), a_reply(20), stop(20)]))
    assert "bound" not in page.looks()
    assert "\n0 ms to 20 ms; no bound\n" in page.words
    assert "token budget 1,000; whole run unlimited; model call unlimited;" in page.words


def test_a_model_call_that_was_cut_has_unknown_tokens_and_its_late_reply_is_not_counted() -> None:
    cut = event(304, "model_call_cut", call=1, fate="was ended by its timeout")
    late = event(804, "model_call_late", call=1, usage=USAGE)
    ended = stop(307, "model_timeout", known_subtotal=0, usage_known=False)
    page = Page(timeline([started(), event(3, "model_call_started", call=1), cut, ended, late]))
    assert {"cut", "stripes", "wait", "late"} <= set(page.looks())
    assert "was ended by its timeout after 301 ms\ntokens unknown: no usage was reported\n" in page.words
    assert "a reply came late, at 804 ms: recorded, never used, not counted; 403 tokens" in page.words


def test_a_failed_call_is_no_cut_one() -> None:
    failed = a_receipt("error", duration_sec=0.02, error_type="OSError", reason="OSError: no log there")
    model = [event(30, "model_call_started", call=2), event(40, "model_call_cut", call=2, fate="failed")]
    page = Page(timeline([started(), *the_call(failed, "tool_call_ended"), *model, stop(50, "model_error")]))
    assert page.looks().count("failed") == 2
    assert "stripes" not in page.looks()
    assert "failed after 20 ms\nOSError: no log there\n" in page.words
    assert "failed after 10 ms\ntokens unknown" in page.words


def the_call(receipt: Event, kind: str) -> list[Event]:
    return [event(0, "tool_call_started", receipt=receipt), event(20, kind, receipt=receipt)]


@pytest.mark.parametrize(
    ("bound_s", "source", "by", "said"),
    [(1.4, "deadline", "deadline", "its deadline"), (3.0, "tool_set", "interrupted", "a person")],
)
def test_a_call_that_was_cut_off_with_its_run_did_not_time_out(bound_s: float, source: str, by: str, said: str) -> None:
    bound = {"bound_s": bound_s, "bound_source": source}
    cut = a_receipt("error", **bound, duration_sec=1.5, source_gap="native_tool_timeout")
    events = [started(), *the_call(cut, "tool_call_timed_out"), event(1500, "run_cut", by=by), stop(1510, by)]
    page = Page(timeline(events))
    assert "was cut off with the run after 1.50 s; it stopped" in page.words
    assert f"1.51 s; cut off at 1.50 s by {said}" in page.words


@pytest.mark.parametrize("outcome", ["withheld", "refused"])
def test_a_call_that_never_began_is_a_row_of_words(outcome: str) -> None:
    never = {
        "turn": 1,
        "index": 0,
        "tool": "list_ci_jobs",
        "args": {"pr": 415},
        "outcome": outcome,
        "reason": "Why not.",
    }
    page = Page(timeline([started(), stop(11, "token_budget", (never,))]))
    assert f"list_ci_jobs(415)\n{outcome}: it never began\nWhy not.\n" in page.words
    assert page.looks() == []


def test_a_call_whose_end_only_the_stop_knows_is_ended_by_it() -> None:
    cut = a_receipt("error", source_gap="native_tool_abandoned", reason="the run ended while it was running")
    begun = event(0, "tool_call_started", receipt=cut)
    page = Page(timeline([started(), begun, stop(900, "deadline", (cut,))]))
    assert "was cut off with the run; abandoned, for it did not stop" in page.words
    assert page.one("cut")["width"] > 0


def test_a_run_that_never_stopped_is_shown_as_unfinished() -> None:
    page = Page(timeline(the_slow_tool()[:5]))
    assert "unfinished\n" in page.words
    assert "its stop was not recorded\n" in page.words
    assert "no end was recorded\n" in page.words
    assert "the total is unknown\n" in page.words
    assert "end" not in page.looks()


def test_a_run_that_failed_says_why_even_if_it_never_started() -> None:
    page = Page(timeline([event(5, "run_failed", run="derived", reason="the first reply reported no usage")]))
    assert "derived\n" in page.words
    assert "the first reply reported no usage\n" in page.words


def test_runs_and_calls_beyond_their_caps_are_counted_and_left_out() -> None:
    def events() -> Iterator[Event]:
        for number in range(MAX_RUNS + 3):
            yield started(number, run=f"repeated/{number}")
            yield {**stop(number), "run": f"repeated/{number}"}

    page = Page(timeline(events()))
    assert page.tags.count("section") == MAX_RUNS
    assert f"3 further runs left out: this page shows the first {MAX_RUNS}." in page.words
    assert f"batch, {MAX_RUNS + 3} runs" in Page(timeline([the_slow_tool()[0], *events()])).words
    many = tuple(a_receipt("withheld", index=index) for index in range(MAX_ROWS + 1))
    page = Page(timeline([started(), stop(1, receipts=many)]))
    assert page.words.count("withheld: it never began") == MAX_ROWS
    assert "1 further call left out." in page.words


@pytest.mark.parametrize("path", sorted(strings(the_slow_tool()), key=str), ids=str)
def test_no_text_of_an_event_gets_out_of_its_place(path: tuple[Any, ...]) -> None:
    known = Page(timeline(the_slow_tool()))
    page = timeline(replaced(the_slow_tool(), path, HOSTILE))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\ud800]", page)
    seen = Page(page)
    assert set(seen.tags) <= set(known.tags)
    assert {name for name, _ in seen.attributes} <= {name for name, _ in known.attributes}


def test_a_name_that_is_a_key_gets_out_of_its_place_no_more_than_a_text() -> None:
    limits = {**LIMITS, "tool_timeouts": {**TIMEOUTS, "per_tool": {HOSTILE: 9.0}}}
    page = Page(timeline([started(limits=limits)]))
    assert "script" not in page.tags
    assert "alert(1)>\N{REPLACEMENT CHARACTER} 9 s" in page.words


def test_texts_are_cut_to_a_length() -> None:
    long = "W" * 100_000
    short = len(timeline(the_slow_tool()))
    for path in strings(the_slow_tool()):
        assert len(timeline(replaced(the_slow_tool(), path, long))) < short + 4 * MAX_TEXT


def test_the_page_needs_nothing_but_itself() -> None:
    page = timeline(the_slow_tool())
    for reference in ("http", "src=", "url(", "@import", "<script", "<link", "javascript:"):
        assert reference not in page
    targets = {value for name, value in Page(page).attributes if name == "id"}
    assert {value for name, value in Page(page).attributes if name == "href"} == {f"#{target}" for target in targets}
    for needed in (
        '<html lang="en">',
        '<meta charset="utf-8">',
        "<title>Timeline: batch, 1 run</title>",
        "<h1>",
        "<h2 ",
    ):
        assert needed in page


def test_the_same_events_make_the_same_bytes() -> None:
    assert timeline(iter(the_slow_tool())) == timeline(the_slow_tool())


def test_no_event_makes_an_empty_page() -> None:
    assert "0 runs" in Page(timeline([])).words
