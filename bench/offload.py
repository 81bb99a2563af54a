"""Benchmark of evicted KV pages: python -m bench.offload --threads 2. Prints one JSON line per figure.

Conversations return to one engine by turns, and there are more than fit into its pool. Each turn repeats the
conversation so far and adds a question. The benchmark measures the time to first token of returning conversations:
with evicted pages in main memory or in files, without them, and with a pool that is large enough. After a restart,
an engine finds the files of an earlier one. New conversations show what it costs to keep pages. The answers of all
cases are compared.
"""

import engine  # noqa: F401  # before torch: it bounds how long OpenMP's threads spin

# isort: split
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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

    def all(self) -> tuple[list[Visit], list[Visit]]:
        """Visit all conversations in each turn. Return the visits of the first turn, and the others."""
        first, *others = [
            [self._visit(number, turn) for number in range(len(self.texts))] for turn in range(self._scale.turns)
        ]
        stats = self._core.step().stats
        self.restored = stats.restored_pages + stats.loaded_pages
        self._core.close()
        return first, list(chain.from_iterable(others))

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
    facts = {"conversations": conversations, "pool_pages": pool, "all_pages": pages}
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=directory) as files:
            ways: Mapping[str, dict[str, Any]] = {
                PLAIN: {"num_pages": pool},
                "in main memory": {"num_pages": pool, "kv_offload_gb": gigabytes},
                "in files": {"num_pages": pool, "kv_store_dir": Path(files)},
                "in files, after a restart": {"num_pages": pool, "kv_store_dir": Path(files)},
                "none is evicted": {"num_pages": pages},
            }
            for way, ratio in compare(ways, loaded, forward, scale, facts).items():
                ratios.setdefault(way, []).append(ratio)
    for way, values in ratios.items():
        summary = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        rounded = {name: round(value, 3) for name, value in summary.items()}
        print(json.dumps({"figure": "TTFT over that without", "pages": way, "rounds": rounds, **rounded}), flush=True)


def compare(
    ways: Mapping[str, dict[str, Any]],
    loaded: LoadedModel,
    forward: Forward,
    scale: Scale,
    facts: Mapping[str, object],
) -> dict[str, float]:
    """Print a line for each way. Return the TTFT of returning conversations over that of PLAIN, which comes first."""
    texts: dict[str, Sequence[Sequence[int]]] = {}
    ttft_s: dict[str, float] = {}
    for way, settings in ways.items():
        config = EngineConfig(reserve_tokens=scale.answer, **settings)
        visits = Visits(loaded, config, forward, scale, loaded.vocab_size)
        new, returning = visits.all()
        texts[way] = visits.texts
        ttft_s[way] = statistics.median(visit.ttft_s for visit in returning)
        cached = sum(visit.cached for visit in returning) / sum(visit.prompt for visit in returning)
        line = {
            "figure": "returning conversations",
            **facts,
            "pages": way,
            "ttft_p50_ms": round(1000 * ttft_s[way], 2),
            "new_ttft_p50_ms": round(1000 * statistics.median(visit.ttft_s for visit in new), 2),
            "cached": round(cached, 3),
            "restored_pages": visits.restored,
            "same_tokens": texts[way] == texts[PLAIN],
        }
        print(json.dumps(line), flush=True)
    return {way: each / ttft_s[PLAIN] for way, each in ttft_s.items()}


if __name__ == "__main__":
    typer.run(main)
