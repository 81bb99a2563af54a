"""Meshes: one with the real model for the whole run; those with tiny or mock models are for tests that kill."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.components.text.tiny_model import tiny_tokenizer
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MOCK_ENV
from tests.mesh.preloaded import Preloaded

MODEL: Final = "smollm2-135m"

TINY: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


TINY_ENV: Final = {
    "MESH_SERVED_MODEL_NAME": "tiny",
    "MESH_ENGINE__DTYPE": "float32",
    "MESH_ENGINE__NUM_PAGES": "512",
    "MESH_ENGINE__MAX_STEP_TOKENS": "128",
    "MESH_ENGINE__THREADS": "1",
    "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
    "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    "MESH_LEASE_TTL_S": "3",
}


@pytest.fixture(scope="session")
def real_mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshProcesses]:
    """One instance of each role, with the default model in float32 and chunks of 128 tokens."""
    home = tmp_path_factory.mktemp("real-mesh")
    env = {
        "MESH_SERVED_MODEL_NAME": MODEL,
        "MESH_ENGINE__DTYPE": "float32",
        "MESH_ENGINE__MAX_STEP_TOKENS": "128",
        "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
        "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
        "MESH_ENGINE__THREADS": "1",  # two workers, two cores
        "MESH_ENGINE__COMPILE": "off",
        "MESH_TRANSFER_TIMEOUT_S": "60",  # no prefill is killed here
    }
    with MeshProcesses(
        etcd_url, nats_url, f"real-{secrets.token_hex(3)}", home, str(real_model_dir), env, preloaded
    ) as mesh:
        mesh.start("bootstrap", "prefill", "decode", "frontend")
        yield mesh


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and random weights, which are the same in every process."""
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    tiny_tokenizer().save(str(path.with_name("tokenizer.json")))
    return path


def save_windowed(directory: Path, window: int) -> Path:
    """Save a tiny model whose layers attend to the last `window` keys."""
    described = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    (directory / "config.json").write_text(json.dumps({**TINY, **described}))
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def tiny_mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, namespace: str, tiny_model: Path, tmp_path: Path
) -> Iterator[MeshProcesses]:
    """A mesh without processes, for the tiny model in float32. `mock_mesh` starts in half the time."""
    with MeshProcesses(etcd_url, nats_url, namespace, tmp_path, str(tiny_model), TINY_ENV, preloaded) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def shared_tiny_mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshProcesses]:
    """A bootstrap, a prefill and two decodes with the tiny model, for the tests of a module."""
    home = tmp_path_factory.mktemp("shared")
    with MeshProcesses(
        etcd_url, nats_url, f"shared-{secrets.token_hex(3)}", home, str(tiny_model), TINY_ENV, preloaded
    ) as mesh:
        mesh.start("bootstrap", "prefill", "decode", "decode")
        yield mesh


@pytest.fixture
def mock_mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, namespace: str, tmp_path: Path
) -> Iterator[MeshProcesses]:
    """A mesh without processes, for mock workers whose steps take no time."""
    with MeshProcesses(etcd_url, nats_url, namespace, tmp_path, "mock", MOCK_ENV, preloaded) as mesh:
        yield mesh
