"""The API keys that are good now: whose a request's key is, and how much each has used."""

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
from services.frontend.quota import Account

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0  # at the file


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
