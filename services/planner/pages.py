"""Reads metrics pages of workers and frontends over HTTP, and parses their samples."""

import asyncio
import math
import ssl
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from components.credentials import PageAccess
from components.errors import MalformedMessage, PeerLost
from components.http.fetch import fetch
from components.planning.samples import FrontendSample, Histogram

T = TypeVar("T")

TIMEOUT_S: Final = 2.0  # for a page
AT_ONCE: Final = 32  # pages, each in a thread
WORKER_COUNTERS: Final = (
    "kvmesh_engine_step_seconds_sum",
    "kvmesh_engine_step_seconds_count",
    "kvmesh_prompt_tokens_total",
    "kvmesh_generation_tokens_total",
)
ACCEPTED_DRAFTS: Final = "kvmesh_spec_decode_num_accepted_tokens_total"
TTFT: Final = "kvmesh_time_to_first_token_seconds"  # histograms of a frontend
ITL: Final = "kvmesh_inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class Counters:
    busy_s: float
    steps: int
    prompt_tokens: int
    generated_tokens: int  # without accepted drafts


class PageReader:
    """Fetches and parses pages in threads, because a large fleet's pages would block the event loop."""

    def __init__(self, access: PageAccess = PageAccess()) -> None:  # noqa: B008 - a frozen value
        self._access = access
        self._threads = ThreadPoolExecutor(AT_ONCE, "page")
        self._places = asyncio.Semaphore(AT_ONCE)  # the timeout does not include the wait for a thread

    async def read(self, url: str, parse: Callable[[str], T]) -> T:
        """Fetch `url` and return `parse` of the body. Raises: PeerLost, unless the status is 200; errors of `parse`."""
        async with self._places:
            try:
                headers, context = self._access.headers(), self._access.context(url)
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(TIMEOUT_S):
                    return await loop.run_in_executor(self._threads, _read, url, parse, headers, context)
            except (OSError, TimeoutError) as exc:
                raise PeerLost(f"{url} cannot be read: {str(exc) or type(exc).__name__}") from exc


def _read(url: str, parse: Callable[[str], T], headers: Mapping[str, str], context: ssl.SSLContext | None) -> T:
    answer = fetch(url, timeout_s=TIMEOUT_S, headers=headers, context=context)
    if answer.status != HTTPStatus.OK:
        raise PeerLost(f"{url} answers {answer.status}")
    return parse(answer.body.decode(errors="replace"))


def read_worker(text: str) -> Counters:
    """Raises: MalformedMessage."""
    values = {
        sample.name: sample.value for sample in _samples(text, *WORKER_COUNTERS, ACCEPTED_DRAFTS) if not sample.labels
    }
    try:
        busy_s, steps, prompt_tokens, generated_tokens = (values[name] for name in WORKER_COUNTERS)
    except KeyError as exc:
        raise MalformedMessage(f"the worker's page has no number for {exc.args[0]}") from exc
    # Count one token per request and step. More tokens of a step would look like more requests, which cost far more.
    alone = max(0.0, generated_tokens - values.get(ACCEPTED_DRAFTS, 0.0))
    return Counters(busy_s, int(steps), int(prompt_tokens), int(alone))


def read_frontend(instance_id: str, text: str) -> FrontendSample:
    """Histograms are summed over models and routes. Raises: MalformedMessage."""
    return FrontendSample(instance_id, ttft=_histogram(text, TTFT), itl=_histogram(text, ITL))


def _samples(text: str, *names: str) -> Iterable[Sample]:
    """Return the samples with these names, without NaN and infinity, which would stay in the planner's averages forever."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith(names))
    try:
        found = [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
        return [sample for sample in found if math.isfinite(sample.value)]
    except ValueError as exc:
        raise MalformedMessage(f"not a metrics page: {exc}") from exc


def _histogram(text: str, name: str) -> Histogram:
    """Return a histogram; empty before the first observation, because the page then has no buckets."""
    if f"# TYPE {name} " not in text:
        raise MalformedMessage(f"the frontend's page has no {name}")
    counts: dict[float, float] = defaultdict(float)
    total_s = 0.0
    for sample in _samples(text, f"{name}_bucket", f"{name}_sum"):
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
