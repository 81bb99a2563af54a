"""KV pages in files, which workers share and which outlive them. A file is named after the hash of its block.

The hash covers the model's weights, the adapter, the salt and all tokens up to the end of the block. A file has the KV of
all heads, so instances with different numbers of ranks can share it.
"""

import errno
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final
from zlib import crc32

from components.startup import WrongSettings
from components.wire.layout import KvLayout, of_whole
from components.wire.tokens import HASH_BYTES

log = logging.getLogger(__name__)

HEAD: Final = Struct(f"<4sI{HASH_BYTES}s")  # format, checksum of the page, block
FORMAT: Final = b"kvp1"
DEPTH_S: Final = 1e-3  # by how much a block looks older than the one before it
SWEEP_SHARE: Final = 1 / 16  # of the limit: bytes that a worker writes between two sweeps
ABANDONED_S: Final = 600.0  # age at which an unfinished file has no writer any more
UNFINISHED: Final = ".part"
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
# Names of a layout's directory, of a directory in it, and of a file there. Other files in the directory are not ours.
NAMES: Final = tuple(
    re.compile(name)
    for name in (r".+-[0-9a-f]{16}", "[0-9a-f]{2}", rf"[0-9a-f]{{{2 * HASH_BYTES}}}(\.[0-9a-f]{{8}}\{UNFINISHED})?")
)


class PageFiles:
    """The files of one layout. Any thread may call the methods.

    A file's modification time says when its block was last used. Later blocks of a prompt look a little older, so that they
    are deleted first: a block is of no use without the blocks before it.
    """

    def __init__(self, root: Path, layout: KvLayout, max_bytes: int) -> None:
        """`max_bytes`: approximate limit for the files of all layouts. Raises: WrongSettings, if `root` is not writable."""
        try:
            self._root = root.expanduser().absolute()
        except RuntimeError as exc:  # no such user
            raise WrongSettings(f"setting engine.kv_store_dir: {root} names no directory: {exc}") from exc
        self.directory = self._root / directory_name(layout)
        self._max_bytes = max_bytes
        self._until_sweep = 0
        self._suffix = f".{secrets.token_hex(4)}{UNFINISHED}"  # process ids of containers are alike
        probe = self.directory / f"probe{self._suffix}"
        try:
            os.close(_create(probe))
            probe.unlink()
        except OSError as exc:
            raise WrongSettings(
                f"setting engine.kv_store_dir: cannot write KV pages to {self._root}: {exc.strerror or exc}"
            ) from exc

    def read(self, block: bytes, page: memoryview) -> bool:
        """Fill `page` with the KV of `block`. Returns: False if there is no file. Raises: OSError."""
        path = self._path(block)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        head = bytearray(HEAD.size)
        try:
            num_bytes = os.readv(file, [head, page])
        finally:
            os.close(file)
        if num_bytes == HEAD.size + page.nbytes and head == _head(block, page):
            return True
        log.warning("a damaged KV page file is deleted", extra={"file": str(path), "bytes": num_bytes})
        path.unlink(missing_ok=True)
        return False

    def write(self, block: bytes, page: memoryview, used_at: float, depth: int) -> bool:
        """Write the KV of `block`. `depth`: number of blocks before it.

        Returns: False if there was a file. Raises: OSError.
        """
        path = self._path(block)
        if path.exists():
            return False
        if self._until_sweep <= 0:
            self._sweep()
            self._until_sweep = int(self._max_bytes * SWEEP_SHARE)
        head = _head(block, page)
        try:
            self._put(path, head, page)
        except OSError as exc:
            if exc.errno not in NO_SPACE:
                raise
            self._sweep(is_full=True)
            self._put(path, head, page)  # or the prompt's later blocks would be of no use
        self._until_sweep -= HEAD.size + page.nbytes
        _set_used(path, used_at, depth)
        return True

    def used(self, blocks: Sequence[bytes], used_at: float) -> None:
        """Record the use of a prompt's leading blocks. Raises: OSError."""
        for depth, block in enumerate(blocks):
            _set_used(self._path(block), used_at, depth)

    def remove(self, block: bytes) -> None:
        """Raises: OSError."""
        self._path(block).unlink(missing_ok=True)

    def _put(self, path: Path, head: bytes, page: memoryview) -> None:
        unfinished = path.with_name(path.name + self._suffix)
        try:
            _fill(unfinished, head, page)
            unfinished.rename(path)  # a reader finds the whole file or none
        except OSError:
            with suppress(OSError):  # the first error is the cause
                unfinished.unlink()
            raise

    def _path(self, block: bytes) -> Path:
        name = block.hex()
        return self.directory / name[:2] / name

    def _sweep(self, *, is_full: bool = False) -> None:
        """Delete the blocks that were not used for the longest time, and what ended writers left.

        `is_full`: the disk has no more room, so the files are at their limit.
        """
        found = sorted(_files(self._root))
        abandoned_at = time.time() - ABANDONED_S
        total = sum(size for _, size, _ in found)
        excess = total - int(min(self._max_bytes, total if is_full else self._max_bytes) * (1 - SWEEP_SHARE))
        deleted = 0
        for used_at, size, path in found:
            if excess > 0 or (path.endswith(UNFINISHED) and used_at < abandoned_at):
                with suppress(OSError):  # another user's, or a disk that one may not write
                    Path(path).unlink(missing_ok=True)  # another worker deletes the same files
                    excess -= size
                    deleted += 1
        log.debug("KV page files swept", extra={"found": len(found), "deleted": deleted})


def directory_name(layout: KvLayout) -> str:
    """Instances with equal names can use each other's files. It begins with the model's name, for people."""
    whole = of_whole(layout)
    digest = hashlib.sha256(FORMAT + whole.text.encode()).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', whole.model)[:80]}-{digest}"


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


def _fill(path: Path, head: bytes, page: memoryview) -> None:
    file = _create(path)
    try:
        if os.writev(file, [head, page]) < HEAD.size + page.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(file)


def _set_used(path: Path, used_at: float, depth: int) -> None:
    modified_at = used_at - depth * DEPTH_S
    with suppress(FileNotFoundError):  # it was deleted
        os.utime(path, (modified_at, modified_at))


def _head(block: bytes, page: memoryview) -> bytes:
    return HEAD.pack(FORMAT, crc32(page), block)


def _files(directory: str | Path, names: Sequence[re.Pattern[str]] = NAMES) -> Iterator[tuple[float, int, str]]:
    """Find the files of all layouts that this user can see. Yields: time of the last use, bytes, path."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if names[0].fullmatch(entry.name) is None:
                continue
            if len(names) > 1:
                yield from _files(entry.path, names[1:])
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:  # another worker has deleted or renamed it
                continue
            yield found.st_mtime, found.st_size, entry.path
