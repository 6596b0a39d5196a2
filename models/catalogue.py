"""The pool's file: which candidate models there are, what each may cost and hold, and in which order they come.

    candidates = read_catalogue(Path("models.toml"))

models.toml in the root of this project is an example and says what each key means.
"""

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StringConstraints, ValidationError, field_validator

from models.factory import ADDRESS_ENV, SetUpMissing

MAX_CANDIDATES = 12
MAX_FILE_BYTES = 256 * 1024
KEY_ENV = {"gemini": "GOOGLE_API_KEY", "openai": "OPENAI_API_KEY"}
_FORMS = {
    "api_key_env": "takes the name of an environment variable, never a key",
    "base_url": "takes an http or https address without user, query or fragment",
    "id": "takes up to 64 letters, digits, dots, dashes and underscores",
}

Tokens = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]


class Candidate(BaseModel):
    """One candidate model of a pool.

    Attributes:
        id: what it is called in tables and records.
        base_url: where it is asked; None for where the environment sends its provider's requests.
        api_key_env: the name of the variable that holds its key; None for the provider's usual one, which is sent to
            no `base_url`. Ollama is sent none.
        cost_rank: the cheaper, the lower; only the order counts.
        zero_retention: whether you attest that its provider keeps nothing of what it is sent.
        max_output_tokens, context_tokens: its ceilings, as far as they are known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    provider: Literal["gemini", "ollama", "openai"]
    model: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,200}$")]
    base_url: str | None = None
    api_key_env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")] | None = None
    cost_rank: Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
    zero_retention: StrictBool = False
    max_output_tokens: Tokens | None = None
    context_tokens: Tokens | None = None

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if not whole or "@" in parts.netloc or parts.query or parts.fragment or not url.isprintable() or " " in url:
                raise ValueError
        return url

    @property
    def ceiling(self) -> int | None:
        """The most output tokens that may be asked of it; None where nothing is known.

        Half of a small context is left for what is read.
        """
        known = [self.max_output_tokens, None if self.context_tokens is None else max(1, self.context_tokens // 2)]
        return min((tokens for tokens in known if tokens is not None), default=None)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment in which the model factory builds it: its own address, and its key under the usual name.

        Raises:
            SetUpMissing: the variable that `api_key_env` names holds no key.
        """
        own = self.addressed(environment)
        if self.base_url is not None:  # the usual key is for the usual address
            own.pop(KEY_ENV.get(self.provider, "OLLAMA_API_KEY"), None)
        if self.api_key_env is not None and self.provider in KEY_ENV:
            key = environment.get(self.api_key_env, "").strip()
            if not key:
                raise SetUpMissing(f"candidate {self.id}: the variable that its api_key_env names holds no key")
            own[KEY_ENV[self.provider]] = key
        return own

    def addressed(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment with its own address."""
        return (
            dict(environment) if self.base_url is None else {**environment, ADDRESS_ENV[self.provider]: self.base_url}
        )


def read_catalogue(path: Path) -> list[Candidate]:
    """The candidates of a pool's file, in the order in which they are probed and served from.

    By `cost_rank`; of the same rank those attested to retain nothing first, then by provider and model.

    Raises:
        SetUpMissing: it cannot be read, or a value in it cannot be taken; the message names the key, and no value.
    """
    try:
        # Without waiting for the other end of a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SetUpMissing(f"{path}: no plain file; --pool names a file such as models.toml")
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise SetUpMissing(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        content = tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise SetUpMissing(f"{path}: no TOML that can be read (nested too deeply)") from None
    except OSError as exc:
        raise SetUpMissing(f"{path}: {exc.strerror or exc}; --pool names a file such as models.toml") from exc
    except ValueError as exc:  # an integer of more digits than Python converts as well
        where = "no UTF-8" if isinstance(exc, UnicodeDecodeError) else "a number is too long"
        if isinstance(exc, tomllib.TOMLDecodeError):
            where = str(exc).rpartition("(")[2].rstrip(")")
        raise SetUpMissing(f"{path}: no TOML ({where})") from None  # its text may quote the line, and a key in it
    if unknown := sorted(content.keys() - {"candidate"}):
        raise SetUpMissing(f"{path}: there is no key {unknown[0][:40]!a}; candidates are [[candidate]] tables")
    tables = content.get("candidate", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise SetUpMissing(f"{path}: candidate: a pool needs at least one [[candidate]] table")
    if len(tables) > MAX_CANDIDATES:
        raise SetUpMissing(f"{path}: candidate: {len(tables)} candidates; a pool takes at most {MAX_CANDIDATES}")
    candidates = [_candidate(path, number, table) for number, table in enumerate(tables, start=1)]
    names = [candidate.id for candidate in candidates]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SetUpMissing(f"{path}: id: there are two candidates {twice[0]}")
    return sorted(
        candidates,
        key=lambda each: (each.cost_rank, not each.zero_retention, each.provider, each.model, each.id),
    )


def _candidate(path: Path, number: int, table: Mapping[str, object]) -> Candidate:
    try:
        return Candidate.model_validate(table)
    except ValidationError as exc:
        fault = exc.errors(include_input=False, include_context=False, include_url=False)[0]
        key = str(fault["loc"][0])[:40] if fault["loc"] else "candidate"
        why = _FORMS.get(key, fault["msg"])
        if fault["type"] == "missing":
            why = "is needed"
        elif fault["type"] == "extra_forbidden":
            why = f"there is no such key; there are {', '.join(Candidate.model_fields)}"
        raise SetUpMissing(f"{path}: candidate {number}: {key!a}: {why}") from None
