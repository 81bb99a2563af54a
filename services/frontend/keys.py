"""The currently valid API keys, with the usage of each."""

import asyncio
import hmac
import logging
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from components.aio import background
from components.api_keys import ApiKey, BadKeys, digest_of, read_keys
from components.followed_files import stamp_of
from components.startup import refuse
from services.frontend.config import FrontendSettings
from services.frontend.quota import Account

log = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 1.0  # how often the file is checked for changes


class _Known(NamedTuple):
    digest: bytes
    account: Account


class KeyRing:
    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises: BadKeys."""
        self._known: list[_Known] = []
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace all keys; a key that is still listed keeps its usage. Raises: BadKeys, without changing anything."""
        keys = list(keys)
        for what, values in (("name", {key.name for key in keys}), ("value", {key.digest for key in keys})):
            if len(values) < len(keys):
                raise BadKeys(f"two keys have the same {what}")
        accounts = {known.account.name: known.account for known in self._known}
        self._known = [_Known(key.digest, accounts.get(key.name) or Account(key.name)) for key in keys]
        for key, known in zip(keys, self._known, strict=True):
            known.account.limits = key.limits
            known.account.tenant = key.tenant
            known.account.is_operator = key.operator

    def find(self, key: bytes) -> Account | None:
        digest, found = digest_of(key), None
        for known in self._known:
            if hmac.compare_digest(known.digest, digest):
                found = known.account
        return found

    def __len__(self) -> int:
        return len(self._known)


@asynccontextmanager
async def open_keys(settings: FrontendSettings) -> AsyncIterator[KeyRing | None]:
    """Yield the valid keys, and reload their file when it changes; None if clients need no key. Exit if they are invalid."""
    given = None if settings.api_keys is None else settings.api_keys.get_secret_value()
    file = settings.api_keys_file
    if given is None and file is None:
        yield None
        return
    seen = None if file is None else stamp_of(file)  # before it is read, or a change just after would go unnoticed
    try:
        ring = KeyRing(read_keys(given, file))
    except BadKeys as exc:
        refuse(f"API keys: {exc}")
    if not len(ring):
        log.warning("there is no API key, so every request is refused", extra={"file": str(file)})
    async with follow_keys(ring, given, file, seen):
        yield ring


@asynccontextmanager
async def follow_keys(
    ring: KeyRing, from_environment: str | None, file: Path | None, seen: tuple[int, ...] | None
) -> AsyncIterator[None]:
    """Within the context, reload the file when its stamp differs from `seen`, and on SIGHUP. An invalid file is ignored."""
    if file is None:
        yield
        return
    async with background(_follow(ring, from_environment, file, seen), "api-keys"):
        yield


async def _follow(ring: KeyRing, from_environment: str | None, file: Path, seen: tuple[int, ...] | None) -> None:
    hangup = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        while True:
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await hangup.wait()
            except TimeoutError:
                if stamp_of(file) == seen:
                    continue
            hangup.clear()
            seen = stamp_of(file)
            try:
                ring.replace(read_keys(from_environment, file))
            except BadKeys as exc:
                log.warning("API keys not reloaded, the old ones stay valid", extra={"cause": str(exc)})
            else:
                log.info("API keys reloaded", extra={"count": len(ring)})
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
