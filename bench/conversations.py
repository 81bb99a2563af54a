"""Savings by a prefill policy for conversations: computed tokens, their spread, and time to first token.

    python -m bench.conversations                                    # 4 prefill workers and one decode
    python -m bench.conversations --model mock:smollm2-135m --conversations 40 --users 11
    python -m bench.conversations --policy round_robin --policy cache_aware --policy kv_aware --rounds 3

Each policy has its own mesh; all get the same conversations by turns. Prints one JSON line per policy and round, and
one per policy that compares it with the first.

`computed` counts prompt tokens computed by all workers. `decode_found` counts those that decode had cached, which
are not transferred. `load_spread` and `requests_spread` are the largest share of a prefill worker over the mean. If
the numbers of users and workers have a common divisor, round robin sends a conversation to the same worker each time.
Pauses between turns prevent that.
"""

import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from bench.load.client import Run, chat_body, exchange, open_client
from bench.load.report import quantile_ms
from bench.load.workloads import words
from bench.processes import model_name
from bench.serve import progress_bar
from bench.turns import Contestant, Model, start_kvmesh
from bench.worker_counters import Counted, Counters


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    output_len: int  # tokens
    think_s: float = 0.0  # pause after the previous answer


def conversations(
    draw: random.Random,
    count: int,
    turns: int,
    *,
    first_len: int,
    turn_len: int,
    output_len: int,
    think_s: float,
    system: str = "",
) -> list[list[Turn]]:
    """Return `count` conversations of `turns` turns, which have only `system` in common.

    Args:
        first_len: extra tokens of the first turn, such as a document.
        turn_len: mean tokens of a turn, uniform between half and one and a half of it.
        output_len: tokens of each answer.
        think_s: mean of the exponential pause before a turn. Without pauses, users may synchronise with round
            robin.
    """

    def turn(at: int) -> Turn:
        length = draw.randint(max(1, turn_len // 2), turn_len * 3 // 2)
        if at:
            return Turn(words(draw, length), output_len, draw.expovariate(1 / think_s) if think_s else 0.0)
        return Turn(f"{system} {words(draw, first_len + length)}".lstrip(), output_len)

    return [[turn(at) for at in range(turns)] for _ in range(count)]


async def converse(
    url: str,
    model: str,
    talks: Sequence[Sequence[Turn]],
    users: int,
    done: Callable[[], object] = lambda: None,
) -> tuple[Run, list[list[str]]]:
    """Run all conversations, `users` at a time.

    A failed turn ends its conversation. Returns: times, and each conversation's answers.
    """
    run = Run()
    answers: list[list[str]] = [[] for _ in talks]
    pending = iter(range(len(talks)))

    async with open_client(url) as client:

        async def lead(talk: Sequence[Turn], replies: list[str]) -> None:
            messages: list[dict[str, str]] = []
            for turn in talk:
                await asyncio.sleep(turn.think_s)
                messages.append({"role": "user", "content": turn.text})
                answer = await exchange(client, chat_body(messages, turn.output_len, model), run)
                done()
                if answer is None:
                    return
                replies.append(answer)
                messages.append({"role": "assistant", "content": answer})

        async def user() -> None:
            for at in pending:
                await lead(talks[at], answers[at])

        started = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(users)))
        run.duration_s = time.perf_counter() - started
    return run, answers


TURN_S: Final = 15.0  # average time limit per turn
TARGETS: Final = {  # ratios of a policy over the first one
    "computed": 0.40,
    "load_spread": 1.10,
    "ttft_ms_p50": 1.0,
}


def spread(values: Sequence[float]) -> float:
    mean = statistics.fmean(values) if values else 0.0
    return max(values) / mean if mean else 0.0


@dataclass(frozen=True, slots=True)
class Talked:
    run: Run
    answers: list[list[str]]
    prefills: Sequence[Counted]
    decodes: Sequence[Counted]

    def figures(self) -> dict[str, Any]:
        tokens = [worker.computed for worker in self.prefills]
        requests = [worker.transfers for worker in self.prefills]
        local = sum(worker.computed for worker in self.decodes)
        return {
            "requests": len(self.run.ttft_s),
            "prompt_tokens": self.run.prompt_tokens,
            "computed": round(sum(tokens) + local),
            "computed_by_decode": round(local),
            "prefill_found": round(sum(worker.found for worker in self.prefills)),
            "decode_found": round(sum(worker.found for worker in self.decodes)),
            "prefill_tokens": [round(count) for count in tokens],
            "prefill_requests": [round(count) for count in requests],
            "load_spread": round(spread(tokens), 3),
            "requests_spread": round(spread(requests), 3),
            "ttft_ms_p50": quantile_ms(self.run.ttft_s, 0.5),
            "ttft_ms_p90": quantile_ms(self.run.ttft_s, 0.9),
            "duration_s": round(self.run.duration_s, 1),
        }


def compare(lines: Sequence[Mapping[str, Any]], policy: str, first: str) -> dict[str, Any]:
    """Return the ratios `policy` / `first` of medians over rounds, and the targets."""
    ratios: dict[str, Any] = {"compared": f"{policy} / {first}"}
    for figure in (*TARGETS, "ttft_ms_p90", "requests_spread"):
        ours, theirs = ([line[figure] for line in lines if line["label"] == name] for name in (policy, first))
        ratios[figure] = round(statistics.median(ours) / statistics.median(theirs), 3)
        if figure in TARGETS:
            ratios |= {f"target_{figure}": TARGETS[figure], f"met_{figure}": ratios[figure] <= TARGETS[figure]}
    return ratios


def talk(mesh: Contestant, model: str, talks: Sequence[Sequence[Turn]], users: int) -> Talked:
    """Run the conversations, after a warm-up of one turn for each user. Exit if a turn fails."""
    draw = random.Random()

    async def load(some: Sequence[Sequence[Turn]]) -> tuple[Run, list[list[str]]]:
        total = sum(map(len, some))
        async with asyncio.timeout(TURN_S * max(total, 10)):
            with progress_bar(mesh.name, total) as done:
                run, answers = await converse(mesh.url, model, some, users, done)
        if run.failed or len(run.ttft_s) < total:
            sys.exit(f"{mesh.name}: of {total} turns {run.failed} failed: {next(iter(run.reasons), 'no reason given')}")
        return run, answers

    asyncio.run(load([[Turn(words(draw, 64), 4)] for _ in range(2 * users)]))
    counters = Counters(mesh.servers[0], ("prefill", "decode"))
    run, answers = asyncio.run(load(talks))
    return Talked(run, answers, *counters.now())


def main(
    policy: Annotated[
        list[str], typer.Option(help="prefill policy; may be given several times; the first is the baseline")
    ] = [  # noqa: B006
        "round_robin",
        "kv_aware",
    ],
    prefill: Annotated[int, typer.Option(min=1, help="prefill workers")] = 4,
    decode: Annotated[int, typer.Option(min=1, help="decode workers, each with its own router")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, each with other conversations")] = 2,
    count: Annotated[int, typer.Option("--conversations", min=1, help="conversations per round")] = 12,
    turns: Annotated[int, typer.Option(min=1, help="turns per conversation")] = 12,
    users: Annotated[int, typer.Option(min=1, help="at once")] = 3,
    first_len: Annotated[int, typer.Option(min=0, help="extra tokens at the start of a conversation")] = 0,
    turn_len: Annotated[int, typer.Option(min=1, help="mean tokens of a user's message")] = 100,
    output_len: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 24,
    think_s: Annotated[float, typer.Option(min=0.0, help="mean seconds between an answer and the next turn")] = 0.3,
    system_len: Annotated[int, typer.Option(min=0, help="tokens of a prefix that all conversations share")] = 0,
    kv_memory_gb: Annotated[float, typer.Option(help="KV memory of each worker")] = 0.5,
    model: Model = "smollm2-135m",
    seed: Annotated[int | None, typer.Option(help="seed; the same seed makes the same conversations")] = None,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs every `finally`
    draw = random.Random(seed)
    shape = {"turns": turns, "first_len": first_len, "turn_len": turn_len, "output_len": output_len, "think_s": think_s}
    facts = {"model": model, "prefill": prefill, "decode": decode, "users": users, "conversations": count, **shape}
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        meshes = [
            stack.enter_context(
                start_kvmesh(name, model, {"prefill": prefill, "decode": decode}, _env(name, kv_memory_gb))
            )
            for name in policy
        ]
        print(json.dumps(facts | {"system_len": system_len, "kv_memory_gb": kv_memory_gb}), flush=True)
        for number in range(rounds):
            talks = conversations(draw, count, system=words(draw, system_len), **shape)  # type: ignore[arg-type]
            answers = []
            for mesh in meshes if number % 2 == 0 else meshes[::-1]:
                talked = talk(mesh, model_name(int(mesh.url.rpartition(":")[2])), talks, users)
                answers.append(talked.answers)
                lines.append({"label": mesh.name, "round": number, **talked.figures()})
                print(json.dumps(lines[-1]), flush=True)
            print(json.dumps({"round": number, "equal_answers": equal(answers)}), flush=True)
    for name in policy[1:]:
        print(json.dumps(compare(lines, name, policy[0])), flush=True)


def equal(answers: Sequence[Sequence[Sequence[str]]]) -> str:
    same = sum(all(other == one for other in each) for one, *each in zip(*answers, strict=True))
    return f"{same} of {len(answers[0])}"


def _env(policy: str, kv_memory_gb: float) -> dict[str, str]:
    return {"MESH_DECODE_PREFILL_POLICY": policy, "MESH_ENGINE__KV_MEMORY_GB": str(kv_memory_gb)}


if __name__ == "__main__":
    typer.run(main)
