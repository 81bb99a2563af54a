"""Benchmark of evicted KV pages: python -m bench.offload --threads 2. Prints one JSON line per figure.

Conversations return to one engine by turns, and there are more than fit into its pool. Each turn repeats the
conversation so far and adds a question. The benchmark measures the time to first token of returning conversations:
with evicted pages in main memory or on disk, without them, and with a pool that is large enough. The answers of all
four cases are compared.
"""

import engine  # noqa: F401  # before torch: it bounds how long OpenMP's threads spin

# isort: split
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from components.wire.sampling import SamplingParams
from engine.build import assemble, prepare_model
from engine.compilation.forward import Forward
from engine.compilation.packages import choose_forward
from engine.config import EngineConfig
from engine.model.load import LoadedModel
from engine.model.progress import silent
from engine.ports import EngineRequest

QUESTION: Final = 20  # tokens
PLAIN: Final = "evicted pages are gone"


@dataclass(frozen=True, slots=True)
class Scale:
    conversations: int
    length: int  # tokens of a conversation before its first question
    turns: int
    answer: int  # tokens

    @property
    def tokens(self) -> int:
        """Tokens of one conversation at its end, with one more page, which is partly filled."""
        return self.length + self.turns * (QUESTION + self.answer) + 16


@dataclass(frozen=True, slots=True)
class Visit:
    ttft_s: float
    cached: int  # tokens
    prompt: int


class Visits:
    """Runs conversations on a new engine."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, forward: Forward, scale: Scale, vocab: int) -> None:
        self._core = assemble(loaded, config, forward)
        self._scale = scale
        draw = random.Random(5)
        self.texts = [draw.choices(range(10, vocab), k=scale.length) for _ in range(scale.conversations)]
        self._questions = draw.choices(range(10, vocab), k=scale.turns * scale.conversations * QUESTION)
        self.restored = 0

    def all(self) -> list[Visit]:
        """Visit all conversations in each turn. Return the visits after the first turn."""
        found: list[Visit] = []
        for turn in range(self._scale.turns):
            visits = [self._visit(number, turn) for number in range(len(self.texts))]
            found += visits if turn else []
        self.restored = self._core.step().stats.restored_pages
        return found

    def _visit(self, number: int, turn: int) -> Visit:
        first = (turn * len(self.texts) + number) * QUESTION
        text = self.texts[number]
        text += self._questions[first : first + QUESTION]
        sampling = SamplingParams(max_tokens=self._scale.answer, temperature=0, ignore_eos=True)
        started, ttft_s, cached, prompt = time.perf_counter(), 0.0, 0, len(text)
        self._core.submit(EngineRequest(f"{number} {turn}", list(text), sampling))
        while self._core.has_work():
            for output in self._core.step().tokens:
                ttft_s = ttft_s or time.perf_counter() - started
                cached = output.num_cached_tokens
                text += output.token_ids
        return Visit(ttft_s, cached, prompt)


def main(
    model: Annotated[str, typer.Option(help="model, as for the services")] = "smollm2-135m",
    state_dir: Annotated[Path, typer.Option(help="directory of models and packages")] = Path("~/.cache/kvmesh"),
    directory: Annotated[Path, typer.Option(help="directory on the disk that is measured")] = Path(),
    compile: Annotated[Literal["wait", "off"], typer.Option(help="off: eager")] = "wait",  # noqa: A002
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    conversations: Annotated[int, typer.Option(help="number of conversations, which return by turns")] = 12,
    length: Annotated[int, typer.Option(help="tokens before the first question")] = 1000,
    turns: Annotated[int, typer.Option(min=2, help="questions in each conversation")] = 3,
    answer: Annotated[int, typer.Option(help="tokens")] = 20,
    held: Annotated[float, typer.Option(help="share of the conversations that fits into the pool")] = 0.25,
    rounds: Annotated[int, typer.Option(min=1, help="measurements per figure; ratios are of medians")] = 3,
) -> None:
    state_dir = state_dir.expanduser()
    base = EngineConfig(num_pages=64, compile=compile, threads=threads)
    loaded = prepare_model(model, base, state_dir)
    forward = choose_forward(model, loaded, base, state_dir, silent)
    scale = Scale(conversations, length, turns, answer)
    pages = conversations * loaded.layout.pages_for(scale.tokens)
    pool = max(int(pages * held), loaded.layout.pages_for(scale.tokens))
    gigabytes = (pages + 1) * loaded.layout.page_bytes / 1e9
    ways: Mapping[str, dict[str, Any]] = {
        PLAIN: {"num_pages": pool},
        "in main memory": {"num_pages": pool, "kv_offload_gb": gigabytes},
        "on disk": {"num_pages": pool, "kv_offload_gb": gigabytes, "kv_offload_dir": directory},
        "none is evicted": {"num_pages": pages},
    }
    facts = {"conversations": conversations, "pool_pages": pool, "all_pages": pages}
    compare(ways, loaded, forward, scale, rounds, facts)


def compare(
    ways: Mapping[str, dict[str, Any]],
    loaded: LoadedModel,
    forward: Forward,
    scale: Scale,
    rounds: int,
    facts: Mapping[str, object],
) -> None:
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        texts: dict[str, Sequence[Sequence[int]]] = {}
        plain_s = 0.0
        for way, settings in ways.items():
            config = EngineConfig(reserve_tokens=scale.answer, **settings)
            visits = Visits(loaded, config, forward, scale, loaded.vocab_size)
            found = visits.all()
            texts[way] = visits.texts
            ttft_s = statistics.median(visit.ttft_s for visit in found)
            plain_s = ttft_s if way == PLAIN else plain_s
            ratios[way].append(ttft_s / plain_s)
            cached = sum(visit.cached for visit in found) / sum(visit.prompt for visit in found)
            line = {
                "figure": "returning conversations",
                **facts,
                "pages": way,
                "ttft_p50_ms": round(1000 * ttft_s, 2),
                "cached": round(cached, 3),
                "restored_pages": visits.restored,
                "same_tokens": texts[way] == texts[PLAIN],
            }
            print(json.dumps(line), flush=True)
    for way, values in ratios.items():
        summary = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        rounded = {name: round(value, 3) for name, value in summary.items()}
        print(json.dumps({"figure": "TTFT over that without", "pages": way, "rounds": rounds, **rounded}), flush=True)


if __name__ == "__main__":
    typer.run(main)
