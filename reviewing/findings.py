"""What a reviewer found: a JSON array against a schema, read from its final reply, and whether coverage supports it."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bounded.text import fit
from reviewing.coverage import Coverage

MAX_FINDINGS = 200
MAX_TEXT = 2_000
# No JSON string holds a line break: only a fence at the beginning of a line ends the block.
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)

CONTRACT = """\
End with a JSON array of findings and nothing else, [] for none. Each is an object with
"severity": "blocker", "major", "minor" or "note"; "file": the path; "line": the line's number;
"text": one or two sentences; "receipts": a list of the ids of the calls that it rests on, possibly empty."""


class Unparsable(Exception):
    """A final reply holds no findings; the message says why in one word."""


class Said(BaseModel):
    """One finding as the reviewer's reply has it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    severity: Literal["blocker", "major", "minor", "note"]
    file: Annotated[str, Field(min_length=1, max_length=1_000)]
    line: Annotated[int, Field(ge=1)]
    text: Annotated[str, Field(min_length=1)]
    receipts: list[str] = []


class Finding(Said):
    """One finding, its text cleaned; `supported` if its very line was credited as read."""

    supported: bool

    def shown(self) -> str:
        """`major src/a.py:7: ...`, on one line."""
        unsupported = "" if self.supported else " (unsupported: that line was not read)"
        rests = f" [{', '.join(self.receipts)}]" if self.receipts else ""
        return " ".join(f"{self.severity} {self.file}:{self.line}: {self.text}{rests}{unsupported}".split())


_MANY = TypeAdapter(Annotated[list[Said], Field(max_length=MAX_FINDINGS)])


def parse_findings(raw_text: str, coverage: Coverage, secrets: frozenset[str] = frozenset()) -> list[Finding]:
    """The findings of a final reply: the whole of it, or of the one fenced block in it.

    Raises:
        Unparsable: `empty`, `malformed`.
    """
    text = raw_text.strip()
    if not text:
        raise Unparsable("empty")
    if len(blocks := _FENCED.findall(text)) == 1:
        text = blocks[0]
    try:
        found = _MANY.validate_json(text)
    except (ValidationError, RecursionError) as exc:
        raise Unparsable("malformed") from exc
    return [
        Finding.model_construct(  # cleaning may take all of a text, or make it longer
            severity=said.severity,
            file=fit(said.file, 1_000, secrets),
            line=said.line,
            text=fit(said.text, MAX_TEXT, secrets),
            receipts=[fit(receipt, 64, secrets) for receipt in said.receipts],
            supported=coverage.covers(said.file, said.line),
        )
        for said in found
    ]
