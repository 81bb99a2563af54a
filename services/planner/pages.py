"""Metrics pages of workers and frontends: an HTTP GET, and the samples in them."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from components.credentials import PageAccess
from components.errors import MalformedMessage, PeerLost
from components.planning.samples import FrontendSample, Histogram

LARGEST_BYTES: Final = 16 * 1024 * 1024
TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Counters:
    busy_s: float
    steps: int
    prompt_tokens: int
    generated_tokens: int


async def get(url: str, access: PageAccess = PageAccess()) -> str:  # noqa: B008 - a frozen value
    """The body of `http://…` or `https://…`. Raises: PeerLost, unless the status is 200."""
    try:
        parts = urlsplit(url)
        context = access.context(url)
        host, port = parts.hostname or "", parts.port or (80 if context is None else 443)
        headers = {"Host": parts.netloc, **access.headers()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                # In HTTP/1.0 the body ends with the connection.
                writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\n{lines}\r\n".encode("latin-1"))
                head, _, body = (await _read_all(reader, url)).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as exc:  # ValueError: an invalid host name
        raise PeerLost(f"{url} cannot be read: {str(exc) or type(exc).__name__}") from exc
    status = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
    if status != [b"200"]:
        raise PeerLost(f"{url} answers {b' '.join(status).decode(errors='replace') or 'nothing'}")
    return body.decode(errors="replace")


async def _read_all(reader: asyncio.StreamReader, url: str) -> bytes:
    data = bytearray()
    while part := await reader.read(2**16):
        data += part
        if len(data) > LARGEST_BYTES:
            raise PeerLost(f"{url} is longer than {LARGEST_BYTES} bytes")
    return bytes(data)


def read_worker(text: str) -> Counters:
    """Raises: MalformedMessage."""
    values = {sample.name: sample.value for sample in _samples(text) if not sample.labels}
    try:
        return Counters(
            busy_s=values["kvmesh_engine_step_seconds_sum"],
            steps=int(values["kvmesh_engine_step_seconds_count"]),
            prompt_tokens=int(values["kvmesh_prompt_tokens_total"]),
            generated_tokens=int(values["kvmesh_generation_tokens_total"]),
        )
    except KeyError as exc:
        raise MalformedMessage(f"the worker's page has no number for {exc.args[0]}") from exc


def read_frontend(instance_id: str, text: str) -> FrontendSample:
    """Histograms are summed over models and routes. Raises: MalformedMessage."""
    samples = list(_samples(text))
    return FrontendSample(
        instance_id,
        ttft=_histogram(samples, "kvmesh_time_to_first_token_seconds"),
        itl=_histogram(samples, "kvmesh_inter_token_latency_seconds"),
    )


def _samples(text: str) -> Iterable[Sample]:
    """Without NaN and infinity, which would stay in the planner's averages for good."""
    try:
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return [sample for sample in found if math.isfinite(sample.value)]
    except ValueError as exc:
        raise MalformedMessage(f"not a metrics page: {exc}") from exc


def _histogram(samples: Iterable[Sample], name: str) -> Histogram:
    """Empty before the first observation: the page has no buckets then."""
    counts: dict[float, float] = defaultdict(float)
    total_s = 0.0
    for sample in samples:
        if sample.name == f"{name}_bucket":
            try:
                counts[float(sample.labels["le"])] += sample.value
            except (KeyError, ValueError) as exc:
                raise MalformedMessage(f"a bucket of {name} has no bound") from exc
        elif sample.name == f"{name}_sum":
            total_s += sample.value
    bounds = sorted(counts)
    if bounds and not math.isinf(bounds[-1]):
        raise MalformedMessage(f"{name} has no last bucket")
    return Histogram(tuple(bounds), tuple(counts[bound] for bound in bounds), total_s)
