"""Greedy tokens of transformers with the default model in float32. They are stored, as each takes 70 ms of a core.

python -m tests.mesh.transformers_ids writes the file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engine.model.resolve import model_dir

MODEL: Final = "smollm2-135m"
WRITTEN: Final = Path(__file__).with_suffix(".json")
LONG: Final = 64  # tokens for every sixteenth prompt
SHORT: Final = 17  # always crosses the edge of a page
LEAST_MARGIN: Final = 5e-4  # of the chosen token's logit over the next: other orders of float32 sums differ by 1e-5

QUESTIONS: Final = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Once upon a time",
    "The quick brown fox",
    "Summarise the plot of Hamlet in two sentences.",
    "What is 17 times 23?",
    "Name a mammal that lays eggs.",
    "Der schnelle braune Fuchs springt",
    "SELECT name FROM users WHERE",
    "Why is the sky blue?",
    "🙂 means",
    '{"name": "Ada", "born":',
)
LENGTHS: Final = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 200, 256, 400)  # around pages and chunks of 128


def make_prompts(directory: Path) -> list[list[int]]:
    """32: sixteen chats, and sixteen of exact lengths: under a page, exactly a page, several chunks long."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    book = tokenizer("\n".join(QUESTIONS * 8))["input_ids"]
    return chats + [book[length : 2 * length] for length in LENGTHS]


def written() -> list[list[int]]:
    answers: list[list[int]] = json.loads(WRITTEN.read_text())
    return answers


def generate(directory: Path, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
    """Generate `counts[i]` tokens for prompt i, also after an end of text."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # greedy, and no end of text
    answers = []
    for prompt, count in zip(prompts, counts, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=2,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(out.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > LEAST_MARGIN, "another machine may choose another token"
        answers.append(out.sequences[0, len(prompt) :].tolist())
    return answers


def main() -> None:
    """Write the file."""
    directory = model_dir(MODEL, Path("~/.cache/kvmesh"))
    prompts = make_prompts(directory)
    answers = generate(directory, prompts, [SHORT if i % 16 else LONG for i in range(len(prompts))])
    WRITTEN.write_text("[\n" + ",\n".join(map(json.dumps, answers)) + "\n]\n")


if __name__ == "__main__":
    main()
