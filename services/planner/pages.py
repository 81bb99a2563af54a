"""Metrics pages of workers and frontends, read into samples."""

import math
import socket
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from components.errors import MalformedMessage
from components.planning.samples import FrontendSample, Histogram
from components.wire.instances import InstanceRecord

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Counters:
    """What a worker's page counts."""

    busy_s: float
    steps: int
    prompt_tokens: int
    generated_tokens: int


def page_of(record: InstanceRecord, own_host: str = socket.gethostname()) -> str | None:
    """URL of an instance's page. One that says loopback and stands on another host is asked for under that host's name."""
    url = record.metrics or record.http
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.hostname in LOOPBACK and record.host != own_host:
        return f"http://{record.host}:{parts.port}/metrics"
    return f"{url}/metrics"


def read_worker(text: str) -> Counters:
    """Of a worker's page. Raises: MalformedMessage, where it is none."""
    values = {sample.name: sample.value for sample in _samples(text) if not sample.labels}
    try:
        return Counters(
            busy_s=values["engine_step_seconds_sum"],
            steps=int(values["engine_step_seconds_count"]),
            prompt_tokens=int(values["prompt_tokens_total"]),
            generated_tokens=int(values["generation_tokens_total"]),
        )
    except (KeyError, ValueError) as exc:
        raise MalformedMessage(f"a worker's page without a number for {exc.args[0]}") from exc


def read_frontend(instance_id: str, text: str) -> FrontendSample:
    """Of a frontend's page; histograms of all models and routes together. Raises: MalformedMessage."""
    samples = list(_samples(text))
    return FrontendSample(
        instance_id,
        ttft=_histogram(samples, "time_to_first_token_seconds"),
        itl=_histogram(samples, "inter_token_latency_seconds"),
    )


def _samples(text: str) -> Iterable[Sample]:
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as exc:
        raise MalformedMessage(f"no page of metrics: {exc}") from exc


def _histogram(samples: Iterable[Sample], name: str) -> Histogram:
    """Empty where nothing was observed yet: there are no labels then, and so no buckets."""
    counts: dict[float, float] = defaultdict(float)
    total_s = 0.0
    for sample in samples:
        if sample.name == f"{name}_bucket":
            try:
                counts[float(sample.labels["le"])] += sample.value
            except (KeyError, ValueError) as exc:
                raise MalformedMessage(f"a bucket of {name} without a bound") from exc
        elif sample.name == f"{name}_sum":
            total_s += sample.value
    bounds = sorted(counts)
    if bounds and not math.isinf(bounds[-1]):
        raise MalformedMessage(f"{name} without a last bucket")
    return Histogram(tuple(bounds), tuple(counts[bound] for bound in bounds), total_s)
