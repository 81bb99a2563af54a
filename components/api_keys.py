"""API keys from a file or an environment variable.

The file is TOML, one table per key, with the key's name in metrics:

    [alice]
    key = "sk-…"                   # or sha256 = "…", as printed by `printf %s "$KEY" | sha256sum`
    requests_at_once = 8           # all limits are optional
    requests_per_minute = 600
    tokens_per_minute = 100_000
    best_priority = 0              # lower is served first; default: the frontend's best_priority
    tenant = "acme"                # its keys share the prefix cache; default: a cache of its own
    operator = true                # sees all tenants' requests at /ui; default: its own tenant's
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from components.openai.fields import Priority

MAX_KEYS: Final = 1000  # each is compared with every request's key
KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    key: Annotated[str, Field(pattern=r"^[!-~]{8,512}$")] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    requests_at_once: PositiveInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    best_priority: Priority | None = None
    tenant: KeyName | None = None
    operator: bool = False


SHAPES: Final = {  # shown in place of the field's pattern
    "key": "it must have 8 to 512 ASCII characters without spaces",
    "sha256": "it must have 64 hexadecimal digits in lower case",
}
_entries: Final = TypeAdapter(
    Annotated[dict[KeyName, _Entry], Field(max_length=MAX_KEYS)], config=ConfigDict(hide_input_in_errors=True)
)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    best_priority: int | None = None  # None: the frontend's setting

    @property
    def per_minute(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


class BadKeys(ValueError):
    """The message quotes no key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    digest: bytes  # SHA-256; no salt, since keys are random
    limits: KeyLimits
    tenant: str
    operator: bool = False


def digest_of(key: bytes) -> bytes:
    return sha256(key).digest()


def parse_list(text: str) -> list[ApiKey]:
    """Parse `name:key` or `key`, separated by commas.

    Raises: BadKeys with the key's position only: the part before the colon may be the key.
    """
    places: dict[str, str] = {}
    entries: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(text.split(","), 1):
        name, colon, key = item.strip().partition(":")
        if not colon:
            name, key = f"key-{digest_of(name.encode()).hex()[:8]}", name  # not its position: keys before it may go
        place = f"key {number}"
        if name in entries:
            raise BadKeys(f"{places[name]} and {place} have the same name")
        places[name] = place
        entries[name] = {"key": key}
    return _checked(entries, places)


def parse_file(text: str) -> list[ApiKey]:
    try:
        return _checked(tomllib.loads(text))
    except tomllib.TOMLDecodeError as exc:
        raise BadKeys(f"not TOML: {exc}") from None


def _checked(entries: Mapping[str, Any], places: Mapping[str, str] | None = None) -> list[ApiKey]:
    try:
        tables = _entries.validate_python(entries)
    except ValidationError as exc:
        fault = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        entry, *field = map(str, fault["loc"] or ("keys",))
        where = ".".join([(places or {}).get(entry, entry), *field])
        text = SHAPES.get(field[-1]) if field and fault["type"] == "string_pattern_mismatch" else None
        raise BadKeys(f"{where}: {text or fault['msg']}") from None
    return [_made(name, entry) for name, entry in tables.items()]


def _made(name: str, entry: _Entry) -> ApiKey:
    if (entry.key is None) == (entry.sha256 is None):
        raise BadKeys(f"{name}: give either key or sha256")
    digest = bytes.fromhex(entry.sha256) if entry.key is None else digest_of(entry.key.encode())  # type: ignore[arg-type]
    limits = KeyLimits(entry.requests_at_once, entry.requests_per_minute, entry.tokens_per_minute, entry.best_priority)
    return ApiKey(name, digest, limits, entry.tenant or name, entry.operator)


def read_keys(from_environment: str | None, file: Path | None) -> list[ApiKey]:
    """Raises: BadKeys, without any part of a key."""
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
