"""Several candidate models as one: a model call goes to the first that is ready, and on from what does not answer.

    pool = Pool(read_catalogue(Path("models.toml")), environment=os.environ)
    graph = build_graph(pool, tools)
    answer = await ask(graph, "...", first=pool.make_ready)

Only a candidate that brings no usable response is passed over. A reply that is empty because its budget was too small
is a reply: to ask someone else for it would hide that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bounded.deadlines import deadline_scope, time_left
from bounded.limits import Limits
from bounded.outcomes import Outcome
from bounded.run import Run
from bounded.text import secret_values
from models.attempts import Attempt, attempt
from models.catalogue import Candidate, read_catalogue
from models.factory import POOL, SetUpMissing, build_as, build_model, endpoint_of
from models.failures import ModelFailed, call_model, failed
from models.readiness import (
    FIRST_TOKENS,
    MAX_ESCALATIONS,
    NoneReady,
    Observe,
    Report,
    Row,
    escalations_allowed,
    probe_candidates,
    serving_tokens,
)

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage

# What an HTTP client of a candidate waits for one read at most: our own bounds come before it.
HTTP_TIMEOUT_S = 600.0
SERVES_NONE = "no ready candidate of the pool calls tools and reports its usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply and whose it is.

    Attributes:
        call: the number of the model call that it answers.
        candidate: who of a pool gave it; None where there is one model only.
    """

    call: int
    message: "AIMessage"
    candidate: str | None = None

    @property
    def whose(self) -> dict[str, Any]:
        """For the record."""
        return {"call": self.call} if self.candidate is None else {"call": self.call, "candidate": self.candidate}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The last attempt that was made on the way through a pool, its call's number, and whose it is, if known."""

    call: int
    attempt: Attempt
    candidate: str | None = None


class Pool:
    """The candidates of a pool as one chat model. One pool is for one graph.

    Args:
        serves: which ready candidates serve; by default those that call tools and report their usage.
        build: makes a candidate's model for so many output tokens.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        environment: Mapping[str, str],
        max_escalations: int = MAX_ESCALATIONS,
        serves: Callable[[Row], bool] = lambda row: row.serves,
        build: Callable[[Candidate, int], Any] | None = None,
    ) -> None:
        self._candidates, self._environment, self._max_escalations = candidates, environment, max_escalations
        self._serves, self._build = serves, build or self._built
        self._tools: Sequence[Any] = ()
        self._serving: dict[str, Any] = {}

    def bind_tools(self, tools: Sequence[Any]) -> "Pool":
        """Itself, whose candidates are given these tools when they are ready."""
        self._tools = tools
        return self

    def described(self) -> list[dict[str, object]]:
        """The candidates as a record has them: their ceilings, and what stands at their address, not where that is."""
        return [
            {
                **each.model_dump(exclude={"base_url", "api_key_env"}, exclude_none=True),
                "endpoint": self._endpoint(each),
            }
            for each in self._candidates
        ]

    def keys(self) -> frozenset[str]:
        """The keys that its file names, for whoever masks: their variables may have any names."""
        named = [each.api_key_env for each in self._candidates if each.api_key_env is not None]
        return secret_values({f"OF_{name}_API_KEY": self._environment.get(name, "") for name in named})

    @property
    def serving(self) -> tuple[str, ...]:
        """The ids of the candidates that serve, in their order."""
        return tuple(self._serving)

    async def probe(self, observe: Observe) -> Report:
        """Find out which candidates can serve; from then on those do.

        Raises:
            NoneReady: no candidate is ready.
        """
        candidates = [self._with_known_ceilings(candidate) for candidate in self._candidates]
        report = await probe_candidates(candidates, self._build, max_escalations=self._max_escalations, observe=observe)
        by_id = {candidate.id: candidate for candidate in candidates}
        ready = [by_id[row.agent_id] for row in report.rows if row.ready and self._serves(row)]
        self._serving = {each.id: self._build(each, serving_tokens(each)).bind_tools(self._tools) for each in ready}
        return report

    async def make_ready(self, run: Run) -> None:
        """What a run does first: probe, and end the run where no candidate can serve it."""
        why = SERVES_NONE
        try:
            report: Report = await self.probe(run.emit)
        except NoneReady as exc:
            report, why = exc.report, str(exc)
        run.emit("pool_probed", serving=list(self._serving), report=report.as_dict())
        if not self._serving:
            run.end(Outcome.MODEL_ERROR, why)

    async def route(self, run: Run, messages: "Sequence[BaseMessage]", max_calls: int) -> Routed:
        """Ask one candidate after the other until one replies, or `run` has made `max_calls` model calls.

        While another waits, none gets more than half of what is left before the nearest deadline.

        Raises:
            ModelFailed: there is none that may be asked.
        """
        waiting = len(self._serving)
        for name, caller in self._serving.items():
            waiting -= 1
            left = time_left()
            call = run.start_model_call(candidate=name)

            def late(value: object, call: int = call) -> None:
                run.emit("model_call_late", call=call, usage=getattr(value, "usage_metadata", None))

            bound_s = left / 2 if waiting and left is not None else None
            done = await attempt(caller, messages, bound_s=bound_s, on_late=late)
            if done.reply is not None or not waiting or run.model_calls >= max_calls or time_left() == 0:
                return Routed(call=call, attempt=done, candidate=name)
            spent = "nothing" if done.spent_nothing else "unknown"
            if not run.pass_over(call, spent=spent, error_type=done.error_type, http_status=done.http_status):
                break  # a bound ended the run meanwhile: nothing further is asked
        raise ModelFailed("refused", "no candidate of the pool may be asked: make_ready was not called, or found none")

    def _endpoint(self, candidate: Candidate) -> str:
        return endpoint_of(candidate.provider, candidate.addressed(self._environment))

    def _with_known_ceilings(self, candidate: Candidate) -> Candidate:
        """What its file leaves out, as far as the provider's package knows the model."""
        try:
            profile = getattr(self._build(candidate, FIRST_TOKENS), "profile", None) or {}
        except SetUpMissing:
            return candidate  # which its probe will say
        known = {
            "max_output_tokens": profile.get("max_output_tokens"),
            "context_tokens": profile.get("max_input_tokens"),
        }
        left_out = {name: value for name, value in known.items() if value and getattr(candidate, name) is None}
        return candidate.model_copy(update=left_out)

    def _built(self, candidate: Candidate, tokens: int) -> Any:
        try:
            return build_as(
                candidate.provider,
                candidate.model,
                timeout_s=HTTP_TIMEOUT_S,
                environment=candidate.environment(self._environment),
                max_output_tokens=tokens,
            )
        except ModuleNotFoundError as exc:
            raise SetUpMissing(f"candidate {candidate.id}: {exc.name} is not installed") from exc


def read_pool(path: str, environment: Mapping[str, str]) -> Pool:
    """The pool of a file.

    Raises:
        SetUpMissing: the file, or a setting of the preflight, cannot be taken.
    """
    return Pool(read_catalogue(Path(path)), environment=environment, max_escalations=escalations_allowed(environment))


def chat_model(
    name: str, *, pool: str, model_timeout_s: float | None, environment: Mapping[str, str]
) -> "BaseChatModel | Pool":
    """The model of that name, or the pool of the file `pool`.

    Raises:
        SetUpMissing: a key, a file or a setting is missing or wrong.
    """
    if name == POOL:
        return read_pool(pool, environment)
    return build_model(name, model_timeout_s=model_timeout_s, environment=environment)


async def next_reply(run: Run, caller: Any, messages: "Sequence[BaseMessage]", limits: Limits) -> Reply:
    """Start a model call and have its reply, from a model or from the first candidate of a pool that gives one.

    That the whole of it takes no longer than the model's timeout is for the caller; a pool divides it.

    Raises:
        ModelFailed: there is none.
    """
    if isinstance(caller, Pool):
        with deadline_scope(limits.model_timeout_s):
            routed = await caller.route(run, messages, limits.max_steps)
        if routed.attempt.reply is None:
            failure = routed.attempt.failure or AssertionError("neither a reply nor a failure")
            raise failed(failure) from failure
        return Reply(call=routed.call, message=routed.attempt.reply, candidate=routed.candidate)
    call = run.start_model_call()
    return Reply(call=call, message=await call_model(caller, list(messages)))
