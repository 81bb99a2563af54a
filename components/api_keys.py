"""API keys as they are given: names, values and limits, from a file or an environment variable.

A file of them is TOML, one table a key, named as the key is to be called in metrics:

    [alice]
    key = "sk-…"                   # or sha256 = "…", what `printf %s "$KEY" | sha256sum` prints
    requests_at_once = 8           # these may be left out: no limit
    requests_per_minute = 600
    tokens_per_minute = 100_000
    best_priority = 0              # lower goes first; without it, that of --best-priority
    tenant = "acme"                # keys of one tenant share the prefix cache; without it, the key shares it with none
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from components.openai.fields import Priority

MAX_KEYS: Final = 1000  # each is compared with what every request brings, and a label of metrics
KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _Entry(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    key: Annotated[str, Field(pattern=r"^[!-~]{8,512}$")] | None = None  # what an HTTP header carries, without spaces
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    requests_at_once: PositiveInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    best_priority: Priority | None = None
    tenant: KeyName | None = None


_entries: Final = TypeAdapter(
    Annotated[dict[KeyName, _Entry], Field(max_length=MAX_KEYS)], config=ConfigDict(hide_input_in_errors=True)
)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit."""

    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    best_priority: int | None = None  # lower is better; None: the frontend's

    @property
    def per_minute(self) -> bool:
        """Whether there is anything to tell of in headers."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


class BadKeys(ValueError):
    """Keys that cannot be used; the message quotes none of them."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key; of itself only its hash is kept."""

    name: str
    digest: bytes  # SHA-256: a key is random, so that nobody finds it by trying
    limits: KeyLimits
    tenant: str


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return sha256(key).digest()


def parse_list(text: str) -> list[ApiKey]:
    """Keys as an environment variable has them: `name:key`, or only `key`, separated by commas.

    Raises: BadKeys, which gives a key's place in the list: what stands before the colon may be the key.
    """
    places: dict[str, str] = {}
    entries: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(text.split(","), 1):
        name, colon, key = item.strip().partition(":")
        name, key = (name, key) if colon else (f"key-{number}", name)
        place = f"key {number}"
        if name in entries:
            raise BadKeys(f"{places[name]} and {place} have the same name")
        places[name] = place
        entries[name] = {"key": key}
    return _checked(entries, places)


def parse_file(text: str) -> list[ApiKey]:
    """Keys as a file has them; see the module. Raises: BadKeys."""
    try:
        return _checked(tomllib.loads(text))
    except tomllib.TOMLDecodeError as exc:
        raise BadKeys(f"not TOML: {exc}") from None


def _checked(entries: Mapping[str, Any], places: Mapping[str, str] | None = None) -> list[ApiKey]:
    """`places`: what an error calls each entry, instead of its name."""
    try:
        tables = _entries.validate_python(entries)
    except ValidationError as exc:
        fault = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        entry, *field = map(str, fault["loc"] or ("keys",))
        where = ".".join([(places or {}).get(entry, entry), *field])
        raise BadKeys(f"{where}: {fault['msg']}") from None
    return [_made(name, entry) for name, entry in tables.items()]


def _made(name: str, entry: _Entry) -> ApiKey:
    if (entry.key is None) == (entry.sha256 is None):
        raise BadKeys(f"{name}: give either key or sha256")
    digest = bytes.fromhex(entry.sha256) if entry.key is None else digest_of(entry.key.encode())  # type: ignore[arg-type]
    limits = KeyLimits(entry.requests_at_once, entry.requests_per_minute, entry.tokens_per_minute, entry.best_priority)
    return ApiKey(name, digest, limits, entry.tenant or name)


def read_keys(from_environment: str | None, file: Path | None) -> list[ApiKey]:
    """The keys of both. Raises: BadKeys, without a word of any key."""
    keys = [] if from_environment is None else parse_list(from_environment)
    if file is None:
        return keys
    try:
        return keys + parse_file(file.read_text())
    except (OSError, UnicodeDecodeError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise BadKeys(f"{file}: {cause}") from None
    except BadKeys as exc:
        raise BadKeys(f"{file}: {exc}") from None
