"""Metrics pages of workers and frontends: an HTTP GET, and the samples in them."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from components.credentials import PageAccess
from components.errors import MalformedMessage, PeerLost
from components.http.fetch import fetch
from components.planning.samples import FrontendSample, Histogram

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
        async with asyncio.timeout(TIMEOUT_S):
            answer = await asyncio.to_thread(
                fetch, url, timeout_s=TIMEOUT_S, headers=access.headers(), context=access.context(url)
            )
    except (OSError, TimeoutError) as exc:
        raise PeerLost(f"{url} cannot be read: {str(exc) or type(exc).__name__}") from exc
    if answer.status != HTTPStatus.OK:
        raise PeerLost(f"{url} answers {answer.status}")
    return answer.body.decode(errors="replace")


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
