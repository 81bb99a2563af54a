"""Profiles one worker: starts a recording, waits, and fetches the file in parts."""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, Final

from rich.console import Console

from components.errors import DeadlineExceeded, PeerLost
from components.messaging.bus import Bus
from components.settings import MeshSettings
from components.urls import without_password
from components.wire.inspection import FetchProfile, ProfilePart, ProfileStarted, StartProfile
from components.wire.instances import InstanceRecord, Role
from services.inspect.mesh import Mesh, open_mesh

START_S: Final = 60.0  # the engine starts recording after its current step
ANSWER_S: Final = 5.0  # a worker answers no calls while it collects events
TRIES: Final = 3
GZIP_LEVEL: Final = 6
BLANK: Final = re.compile(r"\s*")
WRITE_S: Final = 120.0  # from the end of the recording until the worker has its file


async def profile_worker(
    settings: MeshSettings,
    console: Console,
    role: Role,
    instance: str | None,
    *,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> None:
    async with open_mesh(settings) as mesh:
        record = _choose(mesh, settings, role, instance)
        who = f"{role} {record.instance_id}"
        path = out or Path(f"profile-{role}-{record.instance_id}.json.gz")
        try:
            with _arriving(path) as file:
                last = await _fetch(
                    mesh.bus,
                    record.subject,
                    seconds,
                    file,
                    lambda: None if as_json else console.print(f"recording {who} for {seconds:g} s …"),
                )
        except PeerLost as exc:
            raise SystemExit(f"{who} on {record.host}:{record.pid} is gone: {exc.message}") from None
        except DeadlineExceeded as exc:
            raise SystemExit(f"{who} on {record.host}:{record.pid} does not answer: {exc.message}") from None
        except OSError as exc:
            raise SystemExit(f"{path} cannot be written: {exc.strerror}") from None
    if as_json:
        facts = {"seconds": last.seconds, "steps": last.steps, "size_bytes": last.size_bytes}
        shown = {"file": str(path), "role": role, "instance": record.instance_id, **facts}
        console.out(json.dumps(shown), highlight=False)
    else:
        console.print(outcome(path, who, last))


def outcome(path: Path, who: str, last: ProfilePart) -> str:
    """If the worker was idle, the profile is empty."""
    if last.steps == 0:
        idle = f"[yellow]{who} was idle: it computed nothing in {last.seconds:.1f} s"
        return f"{idle}, so {path} has no steps. Send it requests while you record."
    size_mb = (last.size_bytes or 0) / 1e6
    return f"{path}: {last.seconds:.1f} s of {who}, {last.steps} steps, {size_mb:.1f} MB. Open it in Perfetto."


@contextmanager
def _arriving(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that is renamed to `path` when complete. Open it before recording, so that errors are found early."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w+b") as file:
            yield file
            file.seek(0)
            whole = join_segments(gzip.decompress(file.read()).decode())
        packed = json.dumps(whole).encode()
        part.write_bytes(gzip.compress(packed, GZIP_LEVEL) if path.suffix == ".gz" else packed)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def join_segments(text: str) -> dict[str, Any]:
    """Join the Chrome traces in `text`, whose times have the same origin."""
    decoder = json.JSONDecoder()
    whole: dict[str, Any] = {}
    named: set[tuple[Any, ...]] = set()
    at = 0
    while (at := BLANK.match(text, at).end()) < len(text):  # type: ignore[union-attr]  # it matches the empty string, too
        segment, at = decoder.raw_decode(text, at)
        events = whole.setdefault("traceEvents", [])
        for event in segment.pop("traceEvents"):
            if event.get("ph") == "M":
                name = (event["name"], event.get("pid"), event.get("tid"))
                if name in named:
                    continue
                named.add(name)
            events.append(event)
        segment.pop("traceName", None)  # a temporary file of the worker
        whole = {**segment, **whole}
    return whole


def _choose(mesh: Mesh, settings: MeshSettings, role: Role, instance: str | None) -> InstanceRecord:
    records = mesh.book.of_role(role)
    found = [r for r in records if r.instance_id.startswith(instance or "")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(r.instance_id for r in records)) or "none"
    wrong = "which one?" if found else f"no {role} instance" + (f" {instance}" if instance else "")
    raise SystemExit(
        f"{wrong} registered in etcd at {without_password(settings.etcd_url)} (namespace {settings.namespace}): {names}"
    )


async def _fetch(bus: Bus, subject: str, seconds: float, file: BinaryIO, started: Callable[[], None]) -> ProfilePart:
    """Return the last part, which has the facts of the whole profile."""
    order = StartProfile(seconds=seconds)
    profile = await bus.call(f"{subject}.profile", order, ProfileStarted, timeout_s=START_S)
    started()
    give_up_s = monotonic() + seconds + WRITE_S
    offset = 0
    while True:
        part = await _part(bus, subject, FetchProfile(profile_id=profile.profile_id, offset=offset))
        file.write(part.data)
        offset += len(part.data)
        if part.size_bytes is not None and (offset >= part.size_bytes or not part.data):
            return part
        if part.size_bytes is None and monotonic() > give_up_s:
            raise DeadlineExceeded(f"the profile was not ready {WRITE_S:.0f} s after its end")


async def _part(bus: Bus, subject: str, wanted: FetchProfile) -> ProfilePart:
    """Fetch a part, and retry after a timeout, because NATS then reports whether the worker is gone."""
    for _ in range(TRIES - 1):
        with suppress(DeadlineExceeded):
            return await bus.call(f"{subject}.profile_part", wanted, ProfilePart, timeout_s=ANSWER_S)
    return await bus.call(f"{subject}.profile_part", wanted, ProfilePart, timeout_s=ANSWER_S)
