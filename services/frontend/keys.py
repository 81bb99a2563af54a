"""API keys: who may ask, by what name they are known, and how much each may use.

A file of them is TOML, one table a key, named as the key is to be called in metrics:

    [alice]
    key = "sk-…"                   # or sha256 = "…", what `printf %s "$KEY" | sha256sum` prints
    requests_at_once = 8           # these may be left out: no limit
    requests_per_minute = 600
    tokens_per_minute = 100_000
    best_priority = 0              # lower goes first; without it, that of --best-priority
    tenant = "acme"                # keys of one tenant share the prefix cache; without it, the key shares it with none
"""

import asyncio
import hmac
import logging
import signal
import tomllib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from components.aio import background
from components.openai.fields import Priority
from services.frontend.quota import Account, KeyLimits

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0  # at the file
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


class _Known(NamedTuple):
    digest: bytes
    account: Account


class KeyRing:
    """The keys that are good now, and what each has used."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises: BadKeys."""
        self._known: list[_Known] = []
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """These are good from now on; who stays keeps what it has used. Raises: BadKeys, and changes nothing."""
        keys = list(keys)
        for what, values in (("name", {key.name for key in keys}), ("value", {key.digest for key in keys})):
            if len(values) < len(keys):
                raise BadKeys(f"two keys have the same {what}")
        accounts = {known.account.name: known.account for known in self._known}
        self._known = [_Known(key.digest, accounts.get(key.name) or Account(key.name)) for key in keys]
        for key, known in zip(keys, self._known, strict=True):
            known.account.limits = key.limits
            known.account.tenant = key.tenant

    def find(self, key: bytes) -> Account | None:
        """Whose key this is; all are compared, each in the same time."""
        digest, found = digest_of(key), None
        for known in self._known:
            if hmac.compare_digest(known.digest, digest):
                found = known.account
        return found

    def __len__(self) -> int:
        return len(self._known)


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


@asynccontextmanager
async def follow_keys(ring: KeyRing | None, from_environment: str | None, file: Path | None) -> AsyncIterator[None]:
    """Read the file again when it changes, and on SIGHUP, while inside. One that cannot be used changes nothing."""
    if ring is None or file is None:
        yield
        return
    async with background(_follow(ring, from_environment, file), "api-keys"):
        yield


async def _follow(ring: KeyRing, from_environment: str | None, file: Path) -> None:
    hangup = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        seen = _stamp(file)
        while True:
            try:
                await asyncio.wait_for(hangup.wait(), LOOK_EVERY_S)
            except TimeoutError:
                if _stamp(file) == seen:
                    continue
            hangup.clear()
            seen = _stamp(file)
            try:
                ring.replace(read_keys(from_environment, file))
            except BadKeys as exc:
                log.warning("API keys not read, those from before stay", extra={"cause": str(exc)})
            else:
                log.info("API keys read", extra={"count": len(ring)})
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Differs when the file does; what replaced it by a rename is another one."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
