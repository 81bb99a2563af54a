"""GGUF to safetensors, once: `python -m engine.model.convert <file.gguf> <directory>`; run by `engine.model.wheel`.

transformers can read GGUF directly, but takes 13 s each time, and `save_pretrained` refuses a model so loaded.
"""

import sys
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.wheel import PROGRESS_MARK

STEPS: Final = 3


def convert(source: Path, target: Path) -> None:
    """Write weights (bf16), configuration and tokenizer of the GGUF file `source` into the directory `target`."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    _report(0)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    _report(1)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    _report(2)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # an image converts as one user and serves as another
    del model.config.quantization_config  # the weights are no longer quantised
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    _report(STEPS)


def _report(done: int) -> None:
    sys.stdout.write(f"{PROGRESS_MARK}{done}/{STEPS}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
