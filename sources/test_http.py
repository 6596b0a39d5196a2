"""Requests against the wire: what is read, what is refused, and that no credential and nothing of httpx leaves."""

import asyncio
import gzip
import time
import traceback
import zlib
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest

from bounded.deadlines import deadline_scope
from sources.conftest import CREDENTIALS, Ending, Said, Site, as_json, moved
from sources.http import MAX_FILE, MAX_JSON, checked_url, connect, download, get_json, in_time, together
from sources.jobs import Fault, SourceError

FAKE_TOKEN = "fake-token-for-tests"
Shape = dict[str, int]


async def answer(site: Site, path: str = "x") -> Shape:
    async with connect(site.url, headers={"authorization": f"Bearer {FAKE_TOKEN}"}) as server:
        return await get_json(server, path, Shape, what="the answer")


async def file(site: Site, path: str = "x") -> bytes:
    async with connect(site.url, headers={"authorization": f"Bearer {FAKE_TOKEN}"}) as server:
        with await download(server, path, what="the file") as kept:
            return kept.read()


async def fault_of(work: Coroutine[Any, Any, object]) -> SourceError:
    with pytest.raises(SourceError) as raised:
        await work
    error = raised.value
    shown = "".join(traceback.format_exception(error)) + repr(error)
    assert FAKE_TOKEN not in shown
    assert "127.0.0.1" not in str(error)
    assert "\n" not in str(error)
    link: BaseException | None = error
    while link is not None:
        assert not type(link).__module__.startswith(("httpx", "httpcore", "h11", "pydantic"))
        link = link.__cause__ or link.__context__
    return error


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://api.example.com/v3/", "https://api.example.com/v3"),
        ("http://127.0.0.1:8010", "http://127.0.0.1:8010"),
        ("http://[::1]:8010/", "http://[::1]:8010"),
        ("http://localhost", "http://localhost"),
    ],
)
def test_an_address_is_https_or_on_this_machine(url: str, kept: str) -> None:
    assert checked_url(url, "THE_URL") == kept


@pytest.mark.parametrize(
    "url",
    ["", "api.example.com", "http://api.example.com", "http://localhost.example.com", "http://127.0.0.1.example.com",
     "ftp://api.example.com", "https://", "https://user:pw@api.example.com", "https://a.example.com/?q=1",
     "https://a.example.com/#f", "https://a.example.com:99999", "https://[::1", "https://a example.com",
     "https://a.example.com/\nx", "file:///etc/passwd"],
)  # fmt: skip
def test_any_other_address_is_refused_in_one_line_that_does_not_repeat_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"^THE_URL must ") as raised:
        checked_url(url, "THE_URL")
    assert "\n" not in str(raised.value)
    assert "pw" not in str(raised.value)


async def test_an_answer_is_read_in_its_shape_whatever_its_content_type(site: Site) -> None:
    site.say("/x?a=1", Said(body=b'{"n": 1}', headers={"content-type": "text/plain"}))
    assert await answer(site, "x?a=1") == {"n": 1}
    assert site.asked[0].headers["authorization"] == f"Bearer {FAKE_TOKEN}"


async def test_an_answer_may_be_packed(site: Site) -> None:
    site.say("/x", Said(body=gzip.compress(b'{"n": 1}'), headers={"content-encoding": "gzip"}))
    assert await answer(site) == {"n": 1}


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>busy</html>", b"[]", b"null", b'{"n": "1"}', b'{"n": true}', b'{"n": 1', b"\xff\xfe", b'{"n": 1.0}',
     b"[" * 100_000, b'{"n": ' + b"9" * 6_000 + b'x}'],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
async def test_an_answer_of_another_shape_is_unreadable(site: Site, body: bytes) -> None:
    site.say("/x", Said(body=body))
    assert (await fault_of(answer(site))).fault is Fault.UNREADABLE


@pytest.mark.parametrize(
    ("status", "fault"),
    [(401, Fault.UNAUTHORIZED), (403, Fault.FORBIDDEN), (404, Fault.NOT_FOUND), (410, Fault.EXPIRED),
     (418, Fault.UNREADABLE), (204, Fault.UNREADABLE), (304, Fault.UNREADABLE),
     (407, Fault.UNREACHABLE), (500, Fault.UNREACHABLE), (503, Fault.UNREACHABLE)],
)  # fmt: skip
async def test_a_refusal_has_the_fault_of_its_status(site: Site, status: int, fault: Fault) -> None:
    site.say("/x", Said(status=status, body=b"" if status in (204, 304) else f'"{FAKE_TOKEN}"'.encode()))
    assert (await fault_of(answer(site))).fault is fault
    assert (await fault_of(file(site))).fault is fault


@pytest.mark.parametrize("ending", [Ending.CUT, Ending.RESET, Ending.CHUNKED_CUT, Ending.HUNG_UP])
async def test_what_is_cut_off_is_unreadable_and_never_a_short_success(site: Site, ending: Ending) -> None:
    site.say("/x", Said(body=b'{"n": 1}', ending=ending))
    assert (await fault_of(answer(site))).fault is Fault.UNREADABLE
    assert (await fault_of(file(site))).fault is Fault.UNREADABLE


async def test_no_one_listening_is_unreachable(unused_tcp_port: int) -> None:
    assert (await fault_of(answer(Site(f"http://127.0.0.1:{unused_tcp_port}")))).fault is Fault.UNREACHABLE


@pytest.mark.parametrize("ending", [Ending.SILENT, Ending.DRIPPING])
async def test_a_server_that_never_ends_is_left_at_the_deadline(site: Site, ending: Ending) -> None:
    site.say("/x", Said(ending=ending))
    started = time.monotonic()
    with deadline_scope(0.3):
        error = await fault_of(in_time(answer(site), "the answer"))
    assert error.fault is Fault.UNREACHABLE
    assert time.monotonic() - started < 3


async def test_unusable_proxy_settings_are_a_fault_and_this_machine_is_asked_directly(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "gopher://proxy.example.com")
    monkeypatch.setenv("HTTP_PROXY", "gopher://proxy.example.com")
    site.say("/x", as_json({"n": 1}))
    assert await answer(site) == {"n": 1}
    error = await fault_of(answer(Site("https://api.example.com")))
    assert error.fault is Fault.UNREACHABLE
    assert "proxy" in str(error)


async def test_more_than_the_bound_is_refused_packed_or_not(site: Site) -> None:
    large = b'"' + b" " * MAX_JSON + b'"'
    site.say("/x", Said(body=large), Said(body=gzip.compress(large), headers={"content-encoding": "gzip"}))
    assert (await fault_of(answer(site))).fault is Fault.TOO_LARGE
    assert (await fault_of(answer(site))).fault is Fault.TOO_LARGE


async def test_a_file_that_says_it_is_too_large_is_not_fetched(site: Site) -> None:
    site.say("/x", Said(body=b"log", headers={"content-length": str(MAX_FILE + 1)}))
    assert (await fault_of(file(site))).fault is Fault.TOO_LARGE


async def test_a_file_that_unpacks_to_more_than_the_bound_is_refused(site: Site) -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(65)), packer.flush()])
    site.say("/x", Said(body=bomb, headers={"content-encoding": "gzip"}))
    assert (await fault_of(file(site))).fault is Fault.TOO_LARGE


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("br", b"x"), ("gzip", b"no gzip"), ("gzip", gzip.compress(b"log")[:-9]), ("gzip", gzip.compress(b"log") + b"x")],
)
async def test_an_encoding_that_does_not_come_out_is_unreadable(site: Site, encoding: str, body: bytes) -> None:
    site.say("/x", Said(body=body, headers={"content-encoding": encoding}))
    assert (await fault_of(file(site))).fault is Fault.UNREADABLE


@pytest.mark.parametrize("size", [0, 1, 5 << 20])
async def test_a_file_comes_as_it_was_packed_or_not(site: Site, size: int) -> None:
    body = (b"\x00\xff\r\n" * (size // 4 + 1))[:size]
    site.say("/x", Said(body=body), Said(body=gzip.compress(body), headers={"content-encoding": "gzip"}))
    assert await file(site) == body
    assert await file(site) == body


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_an_answer_that_moved_is_followed_within_its_server_only(
    site: Site, elsewhere: Site, status: int
) -> None:
    site.say("/x", moved("/y", status=status))
    site.say("/y", as_json({"n": 2}))
    assert await answer(site) == {"n": 2}
    site.say("/y", moved(f"{elsewhere.url}/z", status=status))
    assert (await fault_of(answer(site))).fault is Fault.UNREADABLE
    assert elsewhere.asked == []


async def test_a_redirect_to_what_is_no_host_is_a_fault(site: Site) -> None:
    site.say("/x", moved("https://xn--/", status=302))
    assert (await fault_of(file(site))).fault in (Fault.UNREACHABLE, Fault.UNREADABLE)


async def test_a_redirect_without_end_ends(site: Site) -> None:
    site.say("/x", moved("/x", status=301))
    assert (await fault_of(answer(site))).fault is Fault.UNREADABLE
    assert len(site.asked) == 4


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_file_elsewhere_is_fetched_without_credentials(site: Site, elsewhere: Site, status: int) -> None:
    site.say("/x", moved(f"{elsewhere.url}/blob?sig=1", status=status))
    elsewhere.say("/blob", moved("/really", status=302))
    elsewhere.say("/really", Said(body=b"log", headers={"set-cookie": "a=b"}))
    assert await file(site) == b"log"
    assert elsewhere.paths() == ["/blob?sig=1", "/really"]


async def test_the_way_back_is_without_credentials_too(site: Site, elsewhere: Site) -> None:
    site.say("/x", moved(f"{elsewhere.url}/blob"))
    elsewhere.say("/blob", moved(f"{site.url}/y"))
    site.say("/y", Said(body=b"log"))
    assert await file(site) == b"log"
    assert not CREDENTIALS & set(site.asked[-1].headers)


@pytest.mark.parametrize(
    "target",
    ["http://logs.example.com/x", "ftp://logs.example.com/x", "file:///etc/passwd", "https://u:p@logs.example.com/",
     "http://127.0.0.1.example.com/", "//logs.example.com/x", "http://[", "https://", ""],
)  # fmt: skip
async def test_a_file_is_not_fetched_from_where_anyone_could_read_along(site: Site, target: str) -> None:
    site.say("/x", moved(target))
    assert (await fault_of(file(site))).fault in (Fault.UNREADABLE, Fault.UNREACHABLE)
    assert len(site.asked) <= 4


LIMITED = [
    as_json({}, status=429, retry_after="1"),
    as_json({}, status=403, retry_after="1"),
    as_json({"message": "You have exceeded a secondary Rate Limit"}, status=403),
    as_json({}, status=403, x_ratelimit_remaining="0", x_ratelimit_reset="0"),
]


@pytest.mark.parametrize("limited", [LIMITED[0], LIMITED[-1]])
async def test_a_rate_limit_is_waited_for_where_that_fits(site: Site, limited: Said) -> None:
    site.say("/x", limited, as_json({"n": 1}))
    started = time.monotonic()
    with deadline_scope(5.0):
        assert await answer(site) == {"n": 1}
    assert 0.9 < time.monotonic() - started < 4


@pytest.mark.parametrize("limited", LIMITED)
async def test_a_rate_limit_is_said_at_once_where_the_wait_does_not_fit(site: Site, limited: Said) -> None:
    site.say("/x", limited)
    with deadline_scope(1.2):
        error = await fault_of(answer(site))
    assert error.fault is Fault.RATE_LIMITED
    assert len(site.asked) == 1


async def test_a_rate_limit_says_when_to_try_again(site: Site) -> None:
    reset = int(time.time()) + 3_000
    site.say("/x", as_json({}, status=403, x_ratelimit_remaining="0", x_ratelimit_reset=str(reset)))
    error = await fault_of(answer(site))
    at, seconds = str(error).partition("try again at ")[2].split(" UTC, in ")
    assert abs(datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp() - reset) < 5
    assert 2_990 < int(seconds.removesuffix(" s")) <= 3_001


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({}, 60), ({"x_ratelimit_reset": "9999999999", "x_ratelimit_remaining": "7"}, 60), ({"retry_after": "soon"}, 60),
     ({"retry_after": "61", "x_ratelimit_reset": "1"}, 61), ({"retry_after": "9" * 400}, 60)],
)  # fmt: skip
async def test_a_limit_without_a_usable_word_lasts_a_minute(site: Site, headers: dict[str, str], seconds: int) -> None:
    site.say("/x", as_json({}, status=429, **headers))
    with deadline_scope(20.0):
        error = await fault_of(answer(site))
    assert f"in {seconds} s" in str(error)


async def test_a_limit_that_stays_is_given_up_on(site: Site) -> None:
    site.say("/x", as_json({}, status=429, retry_after="0"))
    assert (await fault_of(file(site))).fault is Fault.RATE_LIMITED
    assert len(site.asked) == 3


async def test_a_few_requests_run_at_once_and_come_back_in_order(site: Site) -> None:
    site.delay_s = 0.05
    for number in range(20):
        site.say(f"/{number}", as_json({"n": number}))
    async with connect(site.url) as server:
        answers = await together(get_json(server, str(number), Shape, what="n") for number in range(20))
    assert answers == [{"n": number} for number in range(20)]
    assert site.most_at_once == 6


async def test_the_first_failure_ends_the_others_and_a_bug_stays_one() -> None:
    async def fails(error: Exception) -> None:
        raise error

    async def waits() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SourceError, match="first"):
        await together([fails(SourceError(Fault.GONE, "first")), waits()])
    with pytest.raises(ExceptionGroup):
        await together([fails(KeyError("bug")), waits()])
