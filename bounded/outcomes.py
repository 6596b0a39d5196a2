"""The words for how a call ends and how a run ends: the only place these strings stand."""

from enum import StrEnum


class Outcome(StrEnum):
    """How a run ends; `exit_status` is what the process ends with."""

    exit_status: int

    ANSWERED = "answered", 0
    PAUSED = "paused", 0
    MISSING_USAGE = "missing_usage", 3
    TOKEN_BUDGET = "token_budget", 3
    DEADLINE = "deadline", 3
    STEP_LIMIT = "step_limit", 3
    MODEL_TIMEOUT = "model_timeout", 3
    MODEL_ERROR = "model_error", 4
    EMPTY_ANSWER = "empty_answer", 4
    ROUND_WITHOUT_PROGRESS = "round_without_progress", 4  # these four are a reviewer's
    TRANSCRIPT_BOUND = "transcript_bound", 4
    BOUND_BELOW_FIRST_SEND = "bound_below_first_send", 4
    REGISTRY_UNAVAILABLE = "registry_unavailable", 4
    INTERRUPTED = "interrupted", 130

    def __new__(cls, word: str, exit_status: int) -> "Outcome":
        member = str.__new__(cls, word)
        member._value_ = word
        member.exit_status = exit_status
        return member


class CallOutcome(StrEnum):
    """How one requested tool call ends, on its receipt."""

    EXECUTED = "executed"  # returned within its bound
    ERROR = "error"  # raised, or a bound or a person ended it
    REFUSED = "refused"  # its body never began
    WITHHELD = "withheld"  # the run ended before its turn


class SourceGap(StrEnum):
    """Which way a bound or a person ended a call that had begun."""

    STOPPED = "native_tool_timeout"
    ABANDONED = "native_tool_abandoned"  # it may still be running
