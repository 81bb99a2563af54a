"""An earlier commit of this repository, unpacked to be run."""

import re
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Final

from tests.waiting import PATIENCE_S

REPO: Final = Path(__file__).resolve().parents[2]
PROTOCOL_FILES: Final = ("components/wire/codec.py", "components/wire/protocol.py")  # the second one until f11ad086
PROTOCOL: Final = re.compile(r"^PROTOCOL: Final = (\d+)", re.MULTILINE)
NO_HISTORY: Final = (
    "needs the history of this repository: `git fetch --unshallow` brings it, or name a commit with EARLIER"
)


def newest_of_another_protocol() -> str:
    """Return the last commit before the current PROTOCOL."""
    return f"{_oldest_of_this_protocol()}^"


def oldest_of_this_protocol() -> str:
    """Return the newest release with this protocol, or else the oldest commit."""
    tag = _git("describe", "--tags", "--abbrev=0", "HEAD^").decode().strip() if _git("tag") else ""
    return tag if tag and protocol_of(tag) == protocol_of("HEAD") else _oldest_of_this_protocol()


def protocol_of(commit: str) -> int:
    found = PROTOCOL.search(_git("grep", "-h", "^PROTOCOL: Final", commit, "--", *PROTOCOL_FILES).decode())
    assert found is not None, f"{commit} names no protocol in {' or '.join(PROTOCOL_FILES)}"
    return int(found[1])


def unpack(commit: str, folder: Path) -> Path:
    """Unpack a commit. Return `folder`."""
    with tarfile.open(fileobj=BytesIO(_git("archive", "--format=tar", commit)), mode="r:") as files:
        files.extractall(folder, filter="data")
    return folder


def _oldest_of_this_protocol() -> str:
    oldest, here = "", protocol_of("HEAD")
    for commit in _git("log", "--first-parent", "--format=%H", "HEAD", "--", *PROTOCOL_FILES).decode().split():
        if protocol_of(commit) != here:
            break
        oldest = commit
    assert oldest, NO_HISTORY
    return oldest


def _git(*arguments: str) -> bytes:
    ended = subprocess.run(["git", "-C", REPO, *arguments], capture_output=True, check=False, timeout=PATIENCE_S)
    assert ended.returncode == 0, f"git {' '.join(arguments)}: {ended.stderr.decode().strip()}; this {NO_HISTORY}"
    return ended.stdout
