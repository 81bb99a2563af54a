"""The cost of one routing decision: python -m bench.routing_policies

Prints µs of each policy for fleets of 10, 100 and 1,000 instances, a tenth of which have part of the prompt cached.
`whole route` includes health and load book; `book` is the load book alone, `heartbeat` one heartbeat. Figures are the
best of five rounds.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from random import Random

from components.routing.health import Health
from components.routing.load_book import LoadBook
from components.routing.policies import POLICIES, PolicyName, parse_policy
from components.routing.policy import RouteRequest
from components.wire.heartbeat import Heartbeat

FLEETS = (10, 100, 1000)
ROUNDS = 5  # the best one is used, because other load only adds time


def fleet(count: int, rng: Random) -> tuple[LoadBook, Health]:
    book, health = LoadBook(), Health(rng)
    for at in range(count):
        instance_id = f"prefill-{at:08x}"
        book.joined(instance_id, "1")
        health.joined(instance_id, -60.0)
        book.record_heartbeat(heartbeat(instance_id, rng, 1), 0.0)
    return book, health


def heartbeat(instance_id: str, rng: Random, step: int) -> Heartbeat:
    return Heartbeat(
        instance_id=instance_id,
        epoch="1",
        step=step,
        busy=True,
        accepted=1,
        num_requests=rng.randrange(40, 60),
        queued_tokens=rng.randrange(20_000, 30_000),
        held_pages=rng.randrange(3000, 4000),
        total_pages=8000,
        prompt_tokens_per_s=rng.uniform(9000, 11000),
    )


def best_us(decide: Callable[[int], None], times: int) -> float:
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for at in range(times):
            decide(at)
        found.append((time.perf_counter() - begun) / times * 1e6)
    return min(found)


def policy_us(name: PolicyName, count: int, *, route: bool) -> float:
    rng = Random(0)
    book, health = fleet(count, rng)
    policy = parse_policy(name).make("prefill", rng)
    asks = [
        RouteRequest(rng.randrange(100, 8000), session=str(at % 50), prefix=b"%d" % (at % 20)) for at in range(1000)
    ]
    cached = {m.instance_id: rng.randrange(16, 4000) for m in rng.sample(list(book.members), max(count // 10, 1))}

    def choose(at: int) -> None:
        policy.choose(asks[at % 1000], book.members, cached, 0.0)

    def whole(at: int) -> None:
        ask = asks[at % 1000]
        choice = policy.choose(ask, health.candidates(book.members, 0.0), cached, 0.0)
        health.sent(choice.member.instance_id, 0.0)
        sent = book.send(choice.member.instance_id, ask.num_tokens, ask.num_tokens // 16, 0.0)
        assert sent is not None
        book.accepted(sent, 1)
        book.ended(sent)
        health.succeeded(choice.member.instance_id, 0.0)

    return best_us(whole if route else choose, max(200, 20_000 // count))


def book_us(count: int) -> float:
    book, _ = fleet(count, Random(0))
    instance_id = book.members[0].instance_id

    def decide(_: int) -> None:
        sent = book.send(instance_id, 100, 7, 0.0)
        assert sent is not None
        book.accepted(sent, 1)
        book.ended(sent)

    return best_us(decide, 5000)


def heartbeat_us(count: int) -> float:
    rng = Random(0)
    book, _ = fleet(count, rng)
    beat = heartbeat(book.members[0].instance_id, rng, 2)
    return best_us(lambda _: book.record_heartbeat(beat, 0.0), 5000)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args(argv).json
    rows: dict[str, list[float]] = {name: [policy_us(name, n, route=False) for n in FLEETS] for name in POLICIES}
    rows["kv_aware, whole route"] = [policy_us("kv_aware", n, route=True) for n in FLEETS]
    rows["book"] = [book_us(n) for n in FLEETS]
    rows["heartbeat"] = [heartbeat_us(n) for n in FLEETS]
    if as_json:
        print(json.dumps({"instances": FLEETS, "us_per_decision": rows}))
        return
    print("µs per decision".ljust(24), *(f"{n:>8}" for n in FLEETS))
    for name, figures in rows.items():
        print(name.ljust(24), *(f"{us:8.1f}" for us in figures))


if __name__ == "__main__":
    main()
