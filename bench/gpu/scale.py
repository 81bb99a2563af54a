"""Sizes of the measurements: on a GPU those of the targets, on a CPU so small that a test can run every line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

QWEN3_4B: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 65536,  # more than the model's, for the part `skew`
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TINY: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # so that greedy decoding does not repeat one token
}


@dataclass(frozen=True, slots=True)
class Scale:
    device: str
    model: Mapping[str, Any]  # config.json, for random weights
    dtype: Literal["bfloat16", "float32"]
    batch: int  # decodes in a step
    context: int  # tokens of each
    prompt: int
    steps: int  # measured
    long_context: int  # of one decode among `batch` of `short_context`
    short_context: int
    host_batches: tuple[int, ...]
    moved: tuple[int, ...]  # tokens of a prompt whose KV is written
    moved_pool: int  # pages of each process's pool
    requests: int  # to a whole mesh
    clients: int
    longest: int  # tokens of a prompt, and of an answer
    layers: int  # of KV, in the parts without a model

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


CARD: Final = Scale(
    device="cuda:0",
    model=QWEN3_4B,
    dtype="bfloat16",
    batch=100,
    context=768,
    prompt=8192,
    steps=32,
    long_context=60_000,
    short_context=500,
    host_batches=(100, 256),
    moved=(16, 128, 1024, 8192),
    moved_pool=10_000,  # 24 GB
    requests=1000,
    clients=100,
    longest=1024,
    layers=36,
)
ON_CPU: Final = Scale(
    device="cpu",
    model=TINY,
    dtype="float32",
    batch=3,
    context=40,
    prompt=96,
    steps=4,
    long_context=200,
    short_context=24,
    host_batches=(2,),
    moved=(16, 64),
    moved_pool=8,
    requests=6,
    clients=2,
    longest=24,
    layers=2,
)
