"""Compares speculative with plain decoding: python -m bench.speculation --threads 2. Prints one JSON line per figure.

One engine answers the same questions with and without drafts, by turns. Questions of the kind `chat` are short; those of
the kind `rewrite` ask to repeat or correct a text in the prompt. The kind `predicted` has the questions of `chat` with a
prediction: the answer, in which one token in twenty is wrong. The tokens with and without drafts are compared.
"""

import engine  # noqa: F401  # before torch: it bounds how long OpenMP's threads spin

# isort: split
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from transformers import AutoTokenizer

from components.wire.sampling import SamplingParams
from engine.build import assemble, prepare_model
from engine.compilation.forward import Forward
from engine.compilation.packages import choose_forward
from engine.config import EngineConfig
from engine.model.load import LoadedModel
from engine.model.progress import silent
from engine.model.resolve import model_dir
from engine.ports import EngineRequest


class Kind(StrEnum):
    chat = "chat"
    rewrite = "rewrite"
    predicted = "predicted"


TEXT: Final = (
    "Green plants turn light into chemical energy. Their leaves take in carbon dioxide through small pores, and their "
    "roots take up water. Chlorophyll absorbs red and blue light. The energy splits water, and oxygen is released. "
    "Sugar is then built from carbon dioxide. Plants use the sugar to grow, or store it as starch."
)
CODE: Final = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth

def surface(width, height, depth):
    return 2 * (width * height + height * depth + width * depth)
"""
QUESTIONS: Final[Mapping[Kind, Sequence[str]]] = {
    Kind.chat: (
        "Explain why the sky is blue.",
        "What is the capital of France, and what is it known for?",
        "Write a short story about a dragon.",
        "How do I make pancakes?",
        "Give me five tips for learning a language.",
        "What is the difference between a virus and a bacterium?",
    ),
    Kind.rewrite: (
        f"Correct the spelling of this text and repeat it in full:\n{TEXT}",
        f"Repeat this code, and rename width to w:\n{CODE}",
        f"Summarise in three sentences:\n{TEXT}",
        f"List the steps in this text, and quote it:\n{TEXT}",
        f"Add a docstring to each function:\n{CODE}",
        f"Write this text in plain words, and keep all sentences:\n{TEXT}",
    ),
}
CHANGED: Final = 20  # one in this many tokens of a prediction is changed
SEED: Final = 5
WAVES: Final = 3  # minimum number of requests per client


@dataclass(frozen=True, slots=True)
class Answers:
    tokens: Mapping[str, Sequence[int]]
    tok_s: float  # rate in steps without prompts
    drafted: int
    accepted: int


class Bench:
    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, forward: Forward, prompts: Sequence[list[int]]
    ) -> None:
        self._loaded = loaded
        self._config = config
        self._forward = forward
        self._prompts = prompts
        self._predictions: Sequence[list[int]] = [[] for _ in prompts]

    def predict(self, sampling: SamplingParams) -> None:
        """Set a prediction for each prompt: the answer, with a few tokens changed."""
        answers = self.answer(0, 1, sampling).tokens
        texts = [answers[f"{number}"] for number in range(len(self._prompts))]
        self._predictions = [
            [token if i % CHANGED != CHANGED // 2 else text[i - 1] for i, token in enumerate(text)] for text in texts
        ]

    def answer(self, speculative_tokens: int, clients: int, sampling: SamplingParams) -> Answers:
        """Answer all prompts at least once, `clients` at a time. The prefix cache is empty at the start."""
        config = EngineConfig(num_pages=self._config.num_pages, speculative_tokens=speculative_tokens)
        core = assemble(self._loaded, config, self._forward)
        tokens: dict[str, list[int]] = {}
        count, spent_s = 0, 0.0
        # several per client, because the longest answer would determine the duration of a single wave
        both = [*zip(self._prompts, self._predictions, strict=True)]
        waiting = list(enumerate(both * max(1, WAVES * clients // len(both))))
        while waiting or core.has_work():
            while waiting and len(core._scheduler.running) + len(core._scheduler.waiting) < clients:
                number, (prompt, prediction) = waiting.pop(0)
                core.submit(EngineRequest(f"{number}", prompt, sampling, prediction=prediction))
            started = time.perf_counter()
            output = core.step()
            for item in output.tokens:
                tokens.setdefault(item.request_id, []).extend(item.token_ids)
            if not output.stats.prompt_tokens:
                spent_s += time.perf_counter() - started
                count += output.stats.decode_tokens
        stats = core.step().stats
        return Answers(tokens, count / spent_s, stats.drafted_tokens, stats.accepted_tokens)


def main(
    model: Annotated[str, typer.Option(help="model, as for the services")] = "smollm2-135m",
    state_dir: Annotated[Path, typer.Option(help="directory of models and packages")] = Path("~/.cache/kvmesh"),
    compile: Annotated[Literal["wait", "off"], typer.Option(help="off: eager")] = "wait",  # noqa: A002
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    drafts: Annotated[list[int], typer.Option(help="speculative_tokens; may be given several times")] = [7],  # noqa: B006
    clients: Annotated[list[int], typer.Option(help="concurrent requests; may be given several times")] = [1, 2, 6],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="may be given several times")] = [0.0, 0.8],  # noqa: B006
    kinds: Annotated[list[Kind], typer.Option(help="kind of questions; may be given several times")] = [*Kind],  # noqa: B006
    output_len: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="measurements per figure; ratios are of medians")] = 3,
) -> None:
    state_dir = state_dir.expanduser()
    config = EngineConfig(num_pages=max(clients) * (512 + output_len) // 16, compile=compile, threads=threads)
    loaded = prepare_model(model, config, state_dir)
    forward = choose_forward(model, loaded, config, state_dir, silent)
    tokenizer = AutoTokenizer.from_pretrained(model_dir(model, state_dir))
    for kind in kinds:
        questions = QUESTIONS[Kind.chat if kind is Kind.predicted else kind]
        turns = [[{"role": "user", "content": question}] for question in questions]
        prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in turns]
        bench = Bench(loaded, config, forward, prompts)
        for how in temperature:
            sampling = SamplingParams(max_tokens=output_len, temperature=how, seed=SEED)
            if kind is Kind.predicted:
                bench.predict(sampling)
            for count in clients:
                compare(bench, drafts, count, sampling, rounds, {"questions": kind, "temperature": how})


def compare(
    bench: Bench,
    drafts: Sequence[int],
    clients: int,
    sampling: SamplingParams,
    rounds: int,
    facts: Mapping[str, object],
) -> None:
    ratios: dict[int, list[float]] = {most: [] for most in drafts}
    for _ in range(rounds):
        plain = bench.answer(0, clients, sampling)
        for most in drafts:
            guessed = bench.answer(most, clients, sampling)
            ratios[most].append(guessed.tok_s / plain.tok_s)
            line = {
                "figure": "speculative decoding",
                **facts,
                "clients": clients,
                "speculative_tokens": most,
                "plain_tok_s": round(plain.tok_s, 1),
                "tok_s": round(guessed.tok_s, 1),
                "drafted": guessed.drafted,
                "accepted": guessed.accepted,
                "same_tokens": guessed.tokens == plain.tokens,
            }
            print(json.dumps(line), flush=True)
    for most, found in ratios.items():
        summary = {**facts, "clients": clients, "speculative_tokens": most, "rounds": rounds}
        ratio = {"median": round(statistics.median(found), 2), "min": round(min(found), 2), "max": round(max(found), 2)}
        print(json.dumps({"figure": "ratio of tokens/s", **summary, **ratio}), flush=True)


if __name__ == "__main__":
    typer.run(main)
