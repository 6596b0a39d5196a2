"""Whether what an answer quotes from the logs, and the `file:line` that it names, stand in the logs it was given.

    ground(answer, {812: text}).line()  # quotes: 2 of 2 found in job 812

A quote is a line of a fenced block, of a Markdown quote (`> `), a line indented by four blanks, or what stands within a
line in backticks, straight or typographic quotes. The last three also enclose names and commands (`main`, "unit tests",
`npm install`): there it takes three words, or two with a digit or a sign between them, or a test's `path::name`.
Whatever it is, it has 8 characters and a letter: what is shorter stands in any log.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from langchain_core.messages import ToolMessage

from bounded.receipts import Receipt
from bounded.run import Run
from bounded.text import clean
from bounded.toolnode import Delivery, Host
from sources.jobs import JOB_ID

MAX_QUOTES = 100
MAX_SHOWN = 80
_IN_LINE = 3
_MIN_QUOTE = 8
_MAX_INLINE = 2_000
_INDENT = 4
# What stands before a line that the line itself does not hold: its number in an excerpt, when it was written.
_BEFORE = re.compile(
    r"\s*(?:[0-9][0-9,]{0,11}\|\s?)?(?:\ufeff?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8}[.,0-9]{0,12}"
    r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?\s)?"
)
_NUMBERED = re.compile(r"[0-9]+\| ")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})[^`]*")
_BULLET = re.compile(r"\s*(?:[-*+•]|[0-9]{1,3}[.)])\s")
_OPENING = re.compile(r"`+|(?<!\w)\"|[“„«]|(?<![\w'])'(?=\S)")
_CLOSING = {'"': '"', "'": "'", "“": "”", "„": "“", "«": "»"}
# From the start of a path only, and without a step back: each character is looked at once.
_PLACE = re.compile(
    r"(?<![\w.+@/\\~-])(?P<path>[\w.+@/\\~-]++)(?::\[?(?P<colon>[0-9]{1,7})(?![0-9])"
    r"|\((?P<bracket>[0-9]{1,7}),[0-9]{1,7}\)|\"?, line (?P<word>[0-9]{1,7})(?![0-9]))"
)
_FILE = re.compile(r"[^\n]*\w\.[A-Za-z]\w{0,9}")
# What else has two numbers in brackets is a call.
_BRACKETED_FILE = re.compile(r"[^\n]*\w\.(?:[cm]?[jt]sx?|cs|fs|vb|c|cc|cpp|cxx|h|hpp)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounding:
    """What became of an answer's quotes.

    Attributes:
        found, total: quotes and places, each counted once however often the answer has it.
        jobs: ids of the jobs in whose logs at least one was found, ascending.
        missing: what was not found, in the answer's order, each in one short line.
        left_out: quotes beyond `MAX_QUOTES`, which were not looked up and do not count.
    """

    found: int = 0
    total: int = 0
    jobs: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    left_out: int = 0

    def line(self) -> str:
        """The one line that a reader sees."""
        if not self.total:
            return "quotes: none"
        said = f"quotes: {self.found} of {self.total} found"
        if self.jobs:
            said += f" in job{'s' if len(self.jobs) > 1 else ''} {', '.join(map(str, self.jobs))}"
        if self.missing:
            more = len(self.missing) - _IN_LINE
            said += f"; not found: {' | '.join(self.missing[:_IN_LINE])}" + (f" and {more} more" if more > 0 else "")
        return said + (f"; {self.left_out} more were not looked up" if self.left_out else "")

    def as_dict(self) -> dict[str, object]:
        """The same for JSON."""
        return {
            "found": self.found,
            "total": self.total,
            "jobs": list(self.jobs),
            "missing": list(self.missing),
            "left_out": self.left_out,
        }


@dataclass(frozen=True, slots=True)
class _Place:
    """A file and a line of it; `path` with slashes."""

    path: str
    number: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


@dataclass(frozen=True, slots=True)
class _Log:
    """A log made ready: its lines with blanks collapsed, and the places that it names, by file name and line."""

    lines: str
    places: Mapping[_Place, frozenset[str]]

    def holds(self, claim: str | _Place) -> bool:
        if isinstance(claim, str):
            return claim in self.lines
        paths = self.places.get(_Place(_base(claim.path), claim.number), frozenset())
        return any(f"/{path}".endswith(f"/{claim.path}") for path in paths)


class Grounds(Host):
    """Keeps what credited calls returned to the model, so that an answer can be looked up in it."""

    def __init__(self) -> None:
        self._logs: dict[int, str] = {}
        self._lists = ""

    def deliver(self, run: Run, receipt: Receipt, result: ToolMessage) -> Delivery:
        """What the model is given, kept."""
        delivery = super().deliver(run, receipt, result)
        job_id = result.artifact.get(JOB_ID) if isinstance(result.artifact, dict) else None
        if type(job_id) is int:
            # The log's own lines: a heading of ours repeats what was searched for, be it that no line holds it.
            said = "\n".join(line for line in delivery.text.split("\n") if _NUMBERED.match(line))
            self._logs[job_id] = f"{self._logs.get(job_id, '')}\n{said}"
        else:
            self._lists += f"\n{delivery.text}"
        return delivery

    def of(self, answer: str) -> Grounding:
        """What becomes of an answer's quotes."""
        return ground(answer, self._logs, also=self._lists)


def ground(answer: str, texts: Mapping[int, str], also: str = "") -> Grounding:
    """Look an answer's quotes and places up in what was returned to the model.

    Args:
        texts: job id -> all that its fetched logs came to, several calls one after the other.
        also: what else was returned, such as the list of jobs; what stands there is found, in no job.
    """
    elsewhere = _made_ready(clean(also))
    claims = list(dict.fromkeys(_claims(clean(answer))))
    logs = {job_id: _made_ready(clean(text)) for job_id, text in texts.items()}
    jobs: set[int] = set()
    missing: list[str] = []
    for claim in claims[:MAX_QUOTES]:
        where = {job_id for job_id, log in logs.items() if log.holds(claim)}
        jobs |= where
        if not where and not elsewhere.holds(claim):
            missing.append(_short(str(claim)))
    total = min(len(claims), MAX_QUOTES)
    return Grounding(
        found=total - len(missing),
        total=total,
        jobs=tuple(sorted(jobs)),
        missing=tuple(missing),
        left_out=len(claims) - total,
    )


def _made_ready(text: str) -> _Log:
    places: dict[_Place, set[str]] = {}
    for place in _places(text):
        places.setdefault(_Place(_base(place.path), place.number), set()).add(place.path)
    lines = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    return _Log(lines, {key: frozenset(paths) for key, paths in places.items()})


def _claims(answer: str) -> Iterator[str | _Place]:
    prose: list[str] = []
    fence = ""
    for line in [*answer.split("\n"), ""]:
        mark = _FENCE.fullmatch(line)
        quoted = line if fence else _block_line(line)
        if mark and mark[1].startswith(fence):
            fence, quoted = "" if fence else mark[1], ""
        if quoted is None:
            prose.append(line)
            continue
        yield from _prose_claims("\n".join(prose))
        prose.clear()
        if _says_something(quote := _bare(quoted)):
            yield quote
    yield from _prose_claims("\n".join(prose))


def _block_line(line: str) -> str | None:
    """What a line outside of fences quotes as a whole, be it nothing; None for a line of prose."""
    text = line.lstrip()
    if not text:
        return ""
    quote = line
    while bullet := _BULLET.match(quote):  # a quote may stand in a list
        quote = quote[bullet.end() :]
    if quote.lstrip().startswith(">"):
        return quote.lstrip("> ").strip("`")
    blanks = len(line[: -len(text)].expandtabs(_INDENT))
    return text if blanks >= _INDENT and not _BULLET.match(text) else None


def _prose_claims(prose: str) -> Iterator[str | _Place]:
    rest: list[str] = []
    place = 0
    for span in _enclosed(prose):
        quotes = [quote for line in prose[span].split("\n") if _is_line(quote := _bare(line))]
        if quotes:
            rest.append(prose[place : span.start])
            place = span.stop
        yield from quotes
    yield from _places("\n".join([*rest, prose[place:]]))


def _enclosed(prose: str) -> Iterator[slice]:
    """What stands in backticks or double quotes, without them, from left to right."""
    closing: dict[int, int] = {}  # of a run of backticks, where the next one of its length begins
    next_run: dict[int, int] = {}
    for run in reversed(list(re.finditer("`+", prose))):
        length = len(run[0])
        if length in next_run:
            closing[run.end()] = next_run[length]
        next_run[length] = run.start()
    place = 0
    while opening := _OPENING.search(prose, place):
        place, mark = opening.end(), opening[0]
        in_quotes = mark in _CLOSING
        end = prose.find(_CLOSING[mark], place, place + _MAX_INLINE) if in_quotes else closing.get(place, -1)
        if end >= 0:
            yield slice(place, end)
            place = end + len(mark)


def _places(text: str) -> Iterator[_Place]:
    for found in _PLACE.finditer(text):
        path = found["path"].replace("\\", "/").removeprefix("./")
        if (_FILE if found["bracket"] is None else _BRACKETED_FILE).fullmatch(_base(path)):
            yield _Place(path, found["colon"] or found["bracket"] or found["word"])


def _bare(line: str) -> str:
    """A quoted line without what stands before and after it: number, time; an ellipsis, the answer's own full stop."""
    before = _BEFORE.match(line)
    return " ".join(line[before.end() if before else 0 :].split()).strip("… ").removeprefix("... ").rstrip("…., ")


def _says_something(quote: str) -> bool:
    return len(quote) >= _MIN_QUOTE and any(character.isalpha() for character in quote)


def _is_line(quote: str) -> bool:
    words = quote.count(" ") + 1
    sign = any(not character.isalpha() and character != " " for character in quote)
    return _says_something(quote) and ("::" in quote or words > 2 or (words == 2 and sign))


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _short(claim: str) -> str:
    return claim if len(claim) <= MAX_SHOWN else claim[: MAX_SHOWN - 3] + "..."
