"""Convert GGUF to safetensors, once: run by `engine.model.converted`.

    python -m engine.model.convert FILE.gguf DIRECTORY FINAL_DIRECTORY GENERATION_DEFAULTS_AS_JSON

transformers reads GGUF directly, but takes 13 s for the smallest model at each start.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES, load_gguf_checkpoint
from transformers.utils.logging import disable_progress_bar

from engine.model.converted import PROGRESS_MARK, REASON_MARK, WARNING_MARK, finish
from engine.model.gguf_tokenizer import end_tokens, save_tokenizer

STEPS: Final = 3
F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
# keys that change results, and transformers' names
CHECKED: Final = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA_27B: Final = {"gemma2": 46, "gemma3": 62}  # layers by architecture
ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class CannotConvert(Exception):
    """The file is damaged, or the conversion would be wrong."""


def convert(source: Path, target: Path) -> None:
    """Raises: CannotConvert."""
    disable_progress_bar()  # we show our own progress
    _report(0)
    reader = _read(source)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    save_tokenizer(source, reader, target, lambda warning: _write(f"{WARNING_MARK}{warning}"))
    _report(1)
    model, loading = AutoModelForCausalLM.from_pretrained(**where, dtype=_dtype(reader), output_loading_info=True)
    _check(reader, model.config, loading)
    _scale_attention(reader, model.config)
    model.generation_config.eos_token_id = end_tokens(reader) or model.generation_config.eos_token_id
    _report(2)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # an image is built by one user and served by another
    del model.config.quantization_config  # the weights are no longer quantised
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)


def _read(source: Path) -> GGUFReader:
    try:
        reader = GGUFReader(source)
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, LookupError, OSError, OverflowError, MemoryError) as exc:
        raise CannotConvert(f"it is not a GGUF file, or truncated ({type(exc).__name__}: {exc})") from exc
    if "split.count" in reader.fields and reader.fields["split.count"].contents() > 1:
        raise CannotConvert("it is one of several parts: merge them first")
    if "tokenizer.ggml.tokens" not in reader.fields:
        raise CannotConvert("it has no tokenizer")
    try:
        load_gguf_checkpoint(source)
    except ValueError as exc:
        known = ", ".join(sorted(GGUF_SUPPORTED_ARCHITECTURES))
        raise CannotConvert(f"transformers does not read {architecture!r} from GGUF ({exc}), only {known}") from exc
    return reader


def _check(reader: GGUFReader, config: Any, loading: dict[str, Any]) -> None:
    """Raises: CannotConvert, if the model lacks a value of the file."""
    if missing := sorted(loading["missing_keys"]):
        raise CannotConvert(f"it lacks {len(missing)} of the model's tensors, among them {missing[0]}")
    architecture = reader.fields["general.architecture"].contents()
    for key, name in CHECKED.items():
        field = reader.fields.get(f"{architecture}.{key}")
        if field is not None and field.contents() != (read := getattr(config, name, None)):
            raise CannotConvert(f"its {name} is {field.contents()}, which transformers reads as {read}")
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    if any(tensor.name in ROPE_FACTORS for tensor in reader.tensors) or (scaling and scaling.contents() != "none"):
        raise CannotConvert("its rotary frequencies are scaled, which transformers does not read from GGUF")


def _scale_attention(reader: GGUFReader, config: Any) -> None:
    """Set `query_pre_attn_scalar`, which GGUF lacks, as llama.cpp does; transformers assumes 256.

    Raises: CannotConvert.
    """
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in GEMMA_27B:
        return
    if config.num_hidden_layers == GEMMA_27B[architecture]:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    elif config.head_dim != config.query_pre_attn_scalar:
        raise CannotConvert(
            f"the scale of its attention is unknown: GGUF has no query_pre_attn_scalar, and of {architecture} with "
            f"{config.num_hidden_layers} layers and heads of {config.head_dim} no usual value is known. Use its safetensors"
        )


def _dtype(reader: GGUFReader) -> torch.dtype:
    """Return the matrices' dtype if they are not quantised, else bfloat16."""
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    if kinds == {F32}:
        return torch.float32
    # llama.cpp writes some matrices of an F16 file in F32, such as routers
    return torch.float16 if kinds <= {F32, F16} else torch.bfloat16


def _report(done: int) -> None:
    _write(f"{PROGRESS_MARK}{done}/{STEPS}")


def _write(line: str) -> None:
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the parent has died, but other processes will use the result
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)


def main() -> int:
    try:
        source, partial, done = map(Path, sys.argv[1:4])
        convert(source, partial)
        finish(partial, done, json.loads(sys.argv[4]))
        _report(STEPS)
    except CannotConvert as exc:
        sys.stdout.write(f"{REASON_MARK}{' '.join(str(exc).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
