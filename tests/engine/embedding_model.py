"""A tiny Qwen3 as sentence-transformers saves it, and the vectors of transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, Qwen3Config

SIZE = 64
VOCAB = 512
CONFIG: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def save_embedding_model(
    directory: Path,
    mode: str = "lasttoken",
    *,
    modules: Sequence[str] = ("Transformer", "Pooling", "Normalize"),
    **config: Any,
) -> Path:
    """`modules`: empty for no modules.json."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModel.from_config(Qwen3Config(**CONFIG)).save_pretrained(directory)
    change(directory / "config.json", config)
    if modules:
        paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(modules)]
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(modules, paths, strict=True))
        ]
        (directory / "modules.json").write_text(json.dumps(listed))
        (directory / "1_Pooling").mkdir(exist_ok=True)
        ways = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        switches = {f"pooling_mode_{way}": way == mode for way in ways}
        (directory / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": SIZE, **switches, "include_prompt": True})
        )
    return directory


def change(path: Path, fields: dict[str, Any]) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def reference(directory: Path, texts: Sequence[Sequence[int]], mode: str) -> npt.NDArray[np.float32]:
    """Return transformers' vectors of each text alone, pooled and normalised: [texts, SIZE]."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            states = model(input_ids=torch.tensor([text])).last_hidden_state[0]
            pooled = {"lasttoken": states[-1], "mean_tokens": states.mean(0), "cls_token": states[0]}[mode]
            vectors.append(torch.nn.functional.normalize(pooled, dim=0).numpy())
    return np.stack(vectors)


def cosines(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the cosine of row i with row i."""
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
