"""What happened to one requested tool call, and the run's ledger of that: exactly one receipt for each call."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from bounded.outcomes import CallOutcome, SourceGap
from bounded.text import MASK, MAX_NAME, digest, safe_name

BEFORE_ITS_TURN = "the run ended before its turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The one pair of wall and monotonic clock readings from which every time of a run is worked out."""

    wall: datetime
    monotonic: float

    def wall_time(self, monotonic: float) -> str:
        """ISO 8601 with offset, of a moment on the monotonic clock."""
        return (self.wall + timedelta(seconds=monotonic - self.monotonic)).isoformat()


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """What an ended call settled with after all. Recorded here and credited nowhere."""

    at: str
    chars: int | None = None
    text_sha256: str | None = None
    error_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One requested tool call. A field that does not apply is None here and absent from `as_dict`.

    Attributes:
        call_id: as the model gave it, escaped and short; None where it gave none.
        turn, index: the reply that asked for it, from 1, and its place in that reply, from 0.
        args: masked and capped, for reading only.
        bound_s, bound_source: what it really got in seconds, and which rule said so.
        duration_sec: until it settled or was walked away from; without `started_at` the body never began.
        reason: why the call was not executed, without its name.
        text_sha256, text_chars: of the cleaned text that the model was given, for an executed call only.
        more: what the host of the tools adds; its fields stand beside the others in `as_dict`.
    """

    turn: int
    index: int
    tool: str
    args: Mapping[str, object]
    outcome: CallOutcome
    call_id: str | None = None
    bound_s: float | None = None
    bound_source: str | None = None
    started_at: str | None = None
    duration_sec: float | None = None
    source_gap: SourceGap | None = None
    error_type: str | None = None
    reason: str | None = None
    text_sha256: str | None = None
    text_chars: int | None = None
    late: Late | None = None
    more: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The receipt as JSON holds it."""
        held = asdict(self, dict_factory=lambda items: {name: value for name, value in items if value is not None})
        more: dict[str, object] = held.pop("more")
        return {**held, **more}


class Receipts:
    """The ledger: a call enters it when a reply requests it and has an honest receipt at every moment after."""

    def __init__(self) -> None:
        self._turns: dict[int, list[Receipt]] = {}
        self._places: dict[tuple[int, str], int] = {}

    def request(
        self,
        *,
        turn: int,
        call_id: object,
        tool: str,
        args: Mapping[str, object],
        secrets: frozenset[str] = frozenset(),
    ) -> Receipt:
        """Enter the next call of a turn, by the id that the model gave it. It is withheld until its turn comes."""
        receipts = self._turns.setdefault(turn, [])
        receipt = Receipt(
            call_id=_identity(call_id, secrets) if isinstance(call_id, str) else None,
            turn=turn,
            index=len(receipts),
            tool=tool,
            args=args,
            outcome=CallOutcome.WITHHELD,
            reason=BEFORE_ITS_TURN,
        )
        receipts.append(receipt)
        if isinstance(call_id, str):
            self._places[turn, call_id] = receipt.index
        return receipt

    def find(self, turn: int, call_id: str) -> Receipt | None:
        """The receipt of a call that was entered, None for one that was not."""
        place = self._places.get((turn, call_id))
        return None if place is None else self._turns[turn][place]

    def current(self, receipt: Receipt) -> Receipt:
        """The call's receipt as it stands now."""
        return self._turns[receipt.turn][receipt.index]

    def update(self, receipt: Receipt, **changes: Any) -> Receipt:
        """Replace fields of the call's current receipt."""
        current = replace(self._turns[receipt.turn][receipt.index], **changes)
        self._turns[receipt.turn][receipt.index] = current
        return current

    def all(self) -> tuple[Receipt, ...]:
        """Every receipt, in the order in which the calls were requested."""
        return tuple(receipt for receipts in self._turns.values() for receipt in receipts)


def _identity(call_id: str, secrets: frozenset[str]) -> str:
    """A call's id made safe; long ones that differ stay different."""
    safe = safe_name(call_id, secrets)
    return safe if len(safe) < MAX_NAME and MASK not in safe else f"{safe[: MAX_NAME - 19]}...{digest(call_id)[:16]}"
