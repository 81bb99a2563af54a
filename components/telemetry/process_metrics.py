"""Metrics that every process has, from its figures."""

import platform
from collections import Counter
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector

from components.telemetry.figures import Figures
from components.telemetry.on_demand import ByLabel, OnDemand
from components.version import VERSION

LAG_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
BREAKER_STATES: Final = ("closed", "open", "half_open")


def show_process(figures: Figures, registry: CollectorRegistry) -> None:
    ProcessCollector(registry=registry)
    about = {
        "role": figures.role,
        "instance_id": figures.instance_id,
        "version": VERSION,
        "python": platform.python_version(),
    }
    shown = OnDemand(registry)
    shown.gauge(
        "kvmesh_build_info",
        "Always 1; the labels describe the process.",
        lambda: {tuple(about.values()): 1.0},
        [*about],
    )
    shown.gauge(
        "kvmesh_draining",
        "1 while this process finishes its requests and accepts no new ones.",
        lambda: float(figures.is_draining()),
    )
    shown.gauge("kvmesh_etcd_contact_age_seconds", "Time since etcd last answered.", figures.etcd_contact_age_s)
    shown.gauge(
        "kvmesh_nats_contact_age_seconds",
        "Time since NATS last answered a ping, in steps of 0.4 s.",
        figures.nats_contact_age_s,
    )
    shown.gauge("kvmesh_queue_length", "Requests or transfers in each state.", lambda: _lengths(figures), ["queue"])
    shown.gauge(
        "kvmesh_queue_oldest_seconds",
        "Age of the request or transfer that has been in the state for longest; 0 if none is.",
        lambda: _ages(figures),
        ["queue"],
    )
    shown.gauge(
        "kvmesh_kv_pages", "Pages of the KV pool by state; they add up to the pool.", lambda: _pages(figures), ["state"]
    )
    shown.gauge(
        "kvmesh_kv_exposed_pages",
        "Held pages that a prefill instance may write into.",
        lambda: {(): pages.exposed} if (pages := figures.pages()) is not None and figures.role == "decode" else {},
    )
    shown.gauge(
        "kvmesh_breakers", "Circuit breakers to other instances by state.", lambda: _breakers(figures), ["state"]
    )
    shown.gauge(
        "kvmesh_heartbeat_age_seconds",
        "Longest time since a heartbeat, over the instances that this process follows.",
        lambda: {} if figures.heartbeat_ages_s is None else max(figures.heartbeat_ages_s().values(), default=0.0),
    )
    lag = Histogram(
        "kvmesh_event_loop_lag_seconds",
        "Delay with which the event loop wakes a task that sleeps 0.25 s.",
        buckets=LAG_BUCKETS,
        registry=registry,
    )
    figures.loop.on_lag = lag.observe


def _lengths(figures: Figures) -> ByLabel:
    return {} if figures.queues is None else {(state,): queue.length for state, queue in figures.queues().items()}


def _ages(figures: Figures) -> ByLabel:
    return {} if figures.queues is None else {(state,): queue.oldest_s for state, queue in figures.queues().items()}


def _pages(figures: Figures) -> ByLabel:
    pages = figures.pages()
    return {} if pages is None else {("free",): pages.free, ("cached",): pages.cached, ("held",): pages.held}


def _breakers(figures: Figures) -> ByLabel:
    if figures.breakers is None:
        return {}
    count = Counter(map(str, figures.breakers().values()))
    return {(state,): count[state] for state in BREAKER_STATES}
