"""Outcomes of requests in every order, before and after an instance restarts: the breaker counts only its own requests."""

from itertools import product
from random import Random

from components.errors import DecodeLost
from components.routing.health import DEFAULT_SETTINGS, BreakerState
from components.routing.policies import parse_policy
from components.routing.policy import Member, RouteRequest
from components.routing.router import Route, Router
from tests.components.routing.test_routing_router import blocks

FIRST = ("sent", "restarted")  # other first events change nothing
AFTER = 4  # it: a second trial that the first one outlives, or as many late failures as open a breaker
EVENTS = ("sent", "late cancelled", "late failed", "latest cancelled", "latest failed", "latest answered", "restarted")
USABLE = [Member("a")]


class Instance:
    """An instance whose breaker is open, with requests from before in flight."""

    def __init__(self) -> None:
        self.now = 0.0
        policy = parse_policy("round_robin").make("prefill", Random(1))
        self.router = Router(policy, Random(1), lambda: self.now, None, or_none=True)
        self.epochs = 0
        self.late: list[tuple[int, Route]] = []  # the epoch of each
        self.latest: tuple[int, Route] | None = None
        self.failures = 0  # of requests to the present process, without a success since
        self.restart()
        for _ in range(2 * DEFAULT_SETTINGS.failures):
            self.send()
        for _ in range(DEFAULT_SETTINGS.failures):
            self.end(self.late.pop(0), "failed")
        assert self.state is BreakerState.OPEN

    @property
    def state(self) -> BreakerState:
        return self.router.health.state("a")

    def restart(self) -> None:
        self.epochs += 1
        self.failures = 0
        self.router.joined("a", str(self.epochs))

    def send(self) -> bool:
        """Return whether the router sends a request, after the back-off."""
        if self.state is BreakerState.OPEN:
            self.now = self.router.health._breakers["a"].ready_s
        chosen = self.router.choose(RouteRequest(1), blocks(), USABLE)
        if chosen is None:
            return False
        if self.latest is not None:
            self.late.append(self.latest)
        self.latest = self.epochs, self.router.send(chosen, 1, 1)
        return True

    def end(self, request: tuple[int, Route], how: str) -> None:
        epoch, route = request
        if how == "failed":
            route.failed(DecodeLost("silent"))
            self.failures += epoch == self.epochs
        elif how == "answered":
            route.succeeded()
        route.ended()


def run(events: tuple[str, ...]) -> None:
    instance = Instance()
    trial: tuple[int, Route] | None = None  # in flight at a half-open breaker
    for event in events:
        was = instance.state
        request: tuple[int, Route] | None = None
        which, _, how = event.partition(" ")
        match which:
            case "sent":
                passes = instance.send()
                assert passes == (was is not BreakerState.HALF_OPEN or trial is None), "one trial at a time"
                if passes:
                    trial = None if was is BreakerState.CLOSED else instance.latest
            case "restarted":
                instance.restart()
            case "late" if instance.late:
                request = instance.late.pop()
            case "latest":
                request, instance.latest = instance.latest, None
        if request is not None:
            instance.end(request, how)
        if request is trial or instance.state is not BreakerState.HALF_OPEN:
            trial = None
        assert instance.state is BreakerState.CLOSED or instance.failures >= DEFAULT_SETTINGS.failures, (
            "the failures of another"
        )
    if trial is not None:
        instance.end(trial, "cancelled")
    assert instance.send(), "in time each instance is tried again"
    assert instance.latest is not None
    instance.end(instance.latest, "answered")
    assert instance.state is BreakerState.CLOSED


def test_a_breaker_lets_one_trial_at_a_time_pass_and_counts_failures_of_its_process_alone() -> None:
    for events in product(FIRST, *[EVENTS] * AFTER):
        run(events)
