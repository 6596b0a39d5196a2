"""Untrusted text made safe before a model, a receipt or a terminal sees it: control sequences, secrets, size."""

import hashlib
import html
import json
import math
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "[masked]"
MAX_NAME = 64
MAX_ARGUMENT = 500
MAX_ARGUMENTS = 4_000
_MAX_DEPTH = 8
_CUT = "[cut]"
_MAX_SECRET = 1_000
_MAX_RAW_NAME = 4_000
# Shorter values are too likely to be a word of the text itself.
_MIN_SECRET = 8

# ECMA-48: string sequences (OSC, DCS, SOS, PM, APC) to their terminator, CSI, then every other escape; 7-bit and C1.
# A string sequence that never ends loses its introducer only. Every class excludes what starts a sequence, so that no
# input is scanned twice.
_SEQUENCE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\n\x07\x1b\x80-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
# What is left of C0 and C1 but tab and newline, and what shows a text other than it is: bidirectional controls, and
# characters without a glyph (but the joiners, which some scripts and emoji need).
_CONTROL = re.compile(
    r"[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)
_TRACELESS = re.compile(rf"(?!\x85){_CONTROL.pattern}")  # of a line break cleaning leaves one
_BREAK = re.compile(r"\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_PLAIN = re.compile(r"[\t\n -~]*")
_SURROGATE = re.compile(r"[\ud800-\udfff]")

# What a secret looks like: key shapes that their issuers document, then the places where a secret of any shape stands.
# Before each pattern the words without which it cannot match, in lower case: looking for a word is 50 times as quick.
_SHAPES: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (
        ("aiza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "akia", "asia", "xox", "npm_"),
        re.compile(
            r"AIza[0-9A-Za-z_-]{30,}|gh[pousr]_[0-9A-Za-z]{20,}|github_pat_[0-9A-Za-z_]{20,}|glpat-[0-9A-Za-z_-]{16,}"
            r"|sk-[0-9A-Za-z_-]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}|xox[abeprs]-[0-9A-Za-z-]{10,}|npm_[0-9A-Za-z]{30,}"
        ),
    ),
    (("pypi-",), re.compile(r"pypi-[0-9A-Za-z_-]{30,}")),
    (("eyj",), re.compile(r"(?<![\w-])eyJ[0-9A-Za-z_-]{10,}\.[0-9A-Za-z_-]{10,}\.[0-9A-Za-z_-]*")),
    (
        ("private key",),
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[0-9A-Za-z+/=\s\\]{0,6000}"
            r"(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
        ),
    ),
    (("@",), re.compile(r"(?P<keep>://(?:[^\s/:@]{0,200}:)?)[^\s/]{1,500}(?=@)")),
    (
        ("bearer", "basic", "authorization"),
        re.compile(
            r"(?P<keep>\b(?:bearer|basic)\s{1,3}|\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:\w{1,20}\s{1,3})?)"
            r"[0-9A-Z._~+/=-]{8,}",
            re.I | re.A,
        ),
    ),
    (("cookie:",), re.compile(r"(?P<keep>\bcookie:\s{0,3})[^\n]+", re.I | re.A)),
    (
        ("key", "secret", "passw", "passphrase", "token"),
        re.compile(
            r"(?P<keep>(?:api[_-]?key|secret|passw(?:or)?d|passphrase|token|(?:access|account)[_-]?key)[\"']?"
            r"\s{0,3}[=:]\s{0,3}[\"']?)[^\s\"'&,;]{8,}",
            re.I | re.A,
        ),
    ),
    (
        ("key=", "sig=", "signature=", "auth="),
        re.compile(r"(?P<keep>[?&](?:key|sig|signature|auth)=)[^\s\"'&]{8,}", re.I),
    ),
)
_ISSUED = 4  # so many of them are shapes of the secret itself, the others are places
_HINT = re.compile("|".join(re.escape(word) for words, _ in _SHAPES for word in words))
_SECRET_NAME = re.compile(
    r"secret|passw(?:or)?d|token|credential|api_?key|(?:^|[_-])(?:key|pat|pass|auth)$", re.IGNORECASE
)


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """The values that an environment itself calls secret, by their variables' names, in every form that is likely.

    As they are, as `clean` leaves them, line by line, and as URLs, JSON, a `repr` and base64 hold them. Our own
    settings (`REVIEW_TOKEN_BUDGET`) hold none.
    """
    values = {
        value
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and not name.startswith("REVIEW_") and len(value) >= _MIN_SECRET
    }
    forms: set[str] = set()
    for value in values:
        raw = value.encode("utf-8", "surrogateescape")
        forms |= {value, value.strip(), *clean(value).splitlines(), ascii(value)[1:-1], repr(value)[1:-1]}
        forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], b64encode(raw).decode()}
        forms |= {b64encode(raw).decode().rstrip("="), urlsafe_b64encode(raw).decode().rstrip("="), html.escape(value)}
        for quoted in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
            forms |= {quoted, re.sub("%..", lambda found: found[0].lower(), quoted)}
    return frozenset(form for form in forms if len(form) >= _MIN_SECRET)


def clean(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without terminal control sequences, control characters, lone surrogates, known secrets and key shapes.

    Every kind of line break becomes LF, so that a progress bar's redraws become lines and nothing is overwritten.
    """
    if not text:
        return text
    if not _PLAIN.fullmatch(text):
        text = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
        text = _CONTROL.sub("", _BREAK.sub("\n", _SEQUENCE.sub("", text)))
    return mask(text, secrets)


def visible(text: str) -> str:
    """`text` with each character that `clean` takes out without a trace shown by its number: `<U+202E>`."""
    return text if _PLAIN.fullmatch(text) else _TRACELESS.sub(lambda found: f"<U+{ord(found[0]):04X}>", text)


def mask(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with known secret values, key shapes and values in a secret's place masked; the longest secret first.

    Until nothing changes any more: a mask may make another pattern fit, and what is masked twice must stay the same.
    """
    for _ in range(4):
        before, text = text, _mask_once(text, secrets)
        if text == before:
            break
    return text


def _mask_once(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    lower = text.lower()
    if _HINT.search(lower):
        for words, shape in _SHAPES:
            if any(word in lower for word in words):
                text = shape.sub(_masked, text)
    return text


def holds_secret(text: str, secrets: Iterable[str] = ()) -> bool:
    """Whether a known secret stands in `text`, or what has the shape of a key that its issuer documents."""
    return any(secret in text for secret in secrets) or any(shape.search(text) for _words, shape in _SHAPES[:_ISSUED])


def _masked(found: re.Match[str]) -> str:
    return found.groupdict().get("keep", "") + MASK


def fit(text: str, limit: int, secrets: Collection[str] = ()) -> str:
    """`text` cleaned, masked, and then cut to about `limit` characters: what any untrusted text goes through.

    In this order: half a secret at a cut would be one that no mask knows. Text far over the limit loses its middle
    before it is cleaned, since cleaning takes time in proportion; so much is then dropped on both sides of that first
    cut that no half of a secret is left there either.
    """
    margin = max(_MAX_SECRET, max(map(len, secrets), default=0))
    edge = 2 * limit + margin
    if len(text) <= 2 * edge:
        return cap(clean(text, secrets), limit)
    head = clean(text[:edge], secrets)[:-margin][: limit // 4]
    tail = clean(text[-edge:], secrets)[margin:][limit // 4 - limit :]
    return f"{head}\n{_note(len(text) - len(head) - len(tail), len(text))}\n{tail}"


def cap(text: str, limit: int) -> str:
    """Clean `text` in about `limit` characters: its first quarter and its end, and between them what was cut.

    The end weighs more since a log's cause stands nearer to it; the note says how much is missing.
    """
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]}\n{_note(len(text) - limit, len(text))}\n{text[head - limit :]}"


def said_by(error: BaseException) -> str:
    """What an exception says. Its `__str__` is foreign code, and may raise as well."""
    try:
        return str(error)
    except Exception as exc:
        return f"an error that cannot be shown ({safe_name(type(exc).__name__)})"


def repr_of(value: object) -> str:
    """The `repr` of a value. It is foreign code, and may raise as well."""
    try:
        return repr(value)
    except Exception as exc:
        return f"a {safe_name(type(value).__name__)} that cannot be shown ({safe_name(type(exc).__name__)})"


def _note(cut: int, total: int) -> str:
    return f"[... {cut:,} of {total:,} characters cut here ...]"


def safe_name(name: object, secrets: Iterable[str] = ()) -> str:
    """A name that a model made up: masked, printable ASCII, escaped, at most 64 characters."""
    escaped = ascii(mask(name[:_MAX_RAW_NAME], secrets))[1:-1] if isinstance(name, str) else ascii(name)
    return escaped if len(escaped) <= MAX_NAME else escaped[: MAX_NAME - 3] + "..."


def safe_arguments(args: Mapping[str, object], secrets: Iterable[str] = ()) -> dict[str, object]:
    """A call's arguments as JSON may hold them: cleaned, masked (by key too), capped. For records, not for running."""
    secrets = tuple(secrets)
    left = MAX_ARGUMENTS

    def mapping(value: Mapping[Any, object], depth: int) -> dict[str, object]:
        nonlocal left
        shown: dict[str, object] = {}
        for key, item in value.items():
            name = safe_name(key, secrets)
            left -= len(name)
            if left < 0:
                shown["..."] = _CUT
                break
            shown[name] = MASK if _SECRET_NAME.search(str(key)) else safe(item, depth + 1)
        return shown

    def safe(value: object, depth: int) -> object:
        nonlocal left
        left -= 8
        if left < 0 or depth > _MAX_DEPTH:
            return _CUT
        if value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, int):
            return value if abs(value) < 10**18 else {"repr": "a large integer"}
        if isinstance(value, Mapping):
            return mapping(value, depth)
        if isinstance(value, list | tuple):
            return [safe(item, depth + 1) for item in value[: MAX_ARGUMENTS // 8]]
        if not isinstance(value, str):
            return {"repr": cap(ascii(value), MAX_NAME)}
        shown = fit(value, MAX_ARGUMENT, secrets)
        left -= len(shown)
        return shown if left >= 0 else _CUT

    return mapping(args, 0)


def digest(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, as hex."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
