"""Compares pages of 8-bit floats with pages of the model's dtype: python -m bench.page_dtypes --threads 2.

Prints one JSON line per figure. Two engines with the same weights compute decode steps and prompts by turns, and then the
same English texts, whose log-probabilities show what rounding costs in quality.
"""

import engine  # noqa: F401  # before torch: it bounds how long OpenMP's threads spin

# isort: split
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from tokenizers import Tokenizer

from bench.engine import Bench
from bench.load.report import machine_and_date
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.build import assemble, prepare_model
from engine.compilation.packages import choose_forward
from engine.config import EngineConfig
from engine.model.progress import silent
from engine.model.resolve import model_dir
from engine.ports import EngineRequest

DTYPES: Final[tuple[Literal["auto", "fp8_e4m3"], ...]] = ("auto", "fp8_e4m3")


def main(
    model: Annotated[str, typer.Option(help="model, as for the services")] = "smollm2-135m",
    state_dir: Annotated[Path, typer.Option(help="directory of models and packages")] = Path("~/.cache/kvmesh"),
    compile: Annotated[Literal["wait", "off"], typer.Option(help="off: eager")] = "wait",  # noqa: A002
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    batch: Annotated[list[int], typer.Option(help="decode batches; may be given several times")] = [1, 8],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="tokens of context of each decode")] = [320, 1024, 4096],  # noqa: B006
    prompt: Annotated[list[int], typer.Option(help="prompt lengths")] = [256, 2048],  # noqa: B006
    steps: Annotated[int, typer.Option(help="decode steps of a measurement")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="measurements per figure; a ratio is of medians of one round")] = 5,
    text: Annotated[Path, typer.Option(help="directory of Markdown files")] = Path("docs"),
    window: Annotated[int, typer.Option(help="tokens of a text")] = 1024,
    texts: Annotated[int, typer.Option(help="how many texts")] = 24,
) -> None:
    state_dir = state_dir.expanduser()
    pages = max(max(batch) * (max(context) + 64), *prompt, window) // 16 + 64
    settings = EngineConfig(
        num_pages=pages, compile=compile, threads=threads, max_step_tokens=512, speculative_tokens=0
    )
    benches = [_bench(model, state_dir, replace(settings, kv_dtype=kv_dtype)) for kv_dtype in DTYPES]
    for size in batch:
        for length in context:
            spent = _by_turns(benches, rounds, lambda b: b.decode([length] * size, steps)[0])  # noqa: B023 - called here
            _print("decode step", spent, batch=size, context=length)
    for length in prompt:
        _print("prompt", _by_turns(benches, rounds, lambda b: [b.prompt(length)]), tokens=length)  # noqa: B023 - likewise
    _print_quality(benches, _windows(model_dir(model, state_dir, silent), text, window, texts))


def _bench(model: str, state_dir: Path, config: EngineConfig) -> Bench:
    loaded = prepare_model(model, config, state_dir)
    return Bench(
        assemble(loaded, config, choose_forward(model, loaded, config, state_dir, silent)), config, config.kv_dtype
    )


def _by_turns(benches: Sequence[Bench], rounds: int, measure: Callable[[Bench], list[float]]) -> list[list[float]]:
    """Return the median seconds of each round, by bench."""
    for bench in benches:
        measure(bench)
    medians: list[list[float]] = [[] for _ in benches]
    for _ in range(rounds):
        for bench, found in zip(benches, medians, strict=True):
            found.append(statistics.median(measure(bench)))
    return medians


def _print(figure: str, spent: list[list[float]], **facts: Any) -> None:
    own, eight = spent
    ratios = sorted(b / a for a, b in zip(own, eight, strict=True))
    _print_line(
        figure,
        **facts,
        ms=round(statistics.median(own) * 1000, 2),
        ms_8_bits=round(statistics.median(eight) * 1000, 2),
        ratio=round(statistics.median(ratios), 3),
        ratios=[round(ratios[0], 3), round(ratios[-1], 3)],
    )


def _print_line(figure: str, **facts: Any) -> None:
    print(json.dumps({"figure": figure, **facts, **machine_and_date()}), flush=True)


def _windows(directory: Path, text: Path, window: int, count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(path.read_text() for path in sorted(text.glob("*.md")))).ids
    return [ids[i * window : (i + 1) * window] for i in range(min(count, len(ids) // window))]


def _print_quality(benches: Sequence[Bench], windows: Sequence[list[int]]) -> None:
    own, eight = ([_logprobs(bench, ids) for ids in windows] for bench in benches)
    before = [token.logprob for told in own for token in told]
    after = [token.logprob for told in eight for token in told]
    agreed = [a.top[0][0] == b.top[0][0] for x, y in zip(own, eight, strict=True) for a, b in zip(x, y, strict=True)]
    _print_line(
        "quality",
        tokens=len(before),
        perplexity=round(exp(-statistics.mean(before)), 3),
        perplexity_8_bits=round(exp(-statistics.mean(after)), 3),
        same_most_likely_token=round(statistics.mean(agreed), 4),
        mean_difference_of_logprobs=round(statistics.mean(abs(a - b) for a, b in zip(before, after, strict=True)), 4),
    )


def _logprobs(bench: Bench, ids: list[int]) -> list[TokenLogprobs]:
    core, found = bench.engine, list[TokenLogprobs]()
    core.submit(EngineRequest("text", ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)))
    while core.has_work():
        for output in core.step().tokens:
            found += output.prompt_logprobs or ()
    return found


if __name__ == "__main__":
    typer.run(main)
