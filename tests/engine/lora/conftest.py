from pathlib import Path

import pytest

from engine.model.load import LoadedModel
from tests.engine.lora.lora_files import save_adapter
from tests.engine.tiny_engine import load_tiny


@pytest.fixture(scope="session")
def adapter_dirs(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of different ranks, layers and scales."""
    home = tmp_path_factory.mktemp("adapters")
    return {
        "plain": save_adapter(home / "plain", tiny_dir, 1),
        "few": save_adapter(home / "few", tiny_dir, 2, rank=2, targets=("q_proj", "v_proj")),
        "patterned": save_adapter(
            home / "patterned",
            tiny_dir,
            3,
            rank=3,
            ranks={"down_proj": 8},
            alpha_pattern={"up_proj": 5},
            use_rslora=True,
            target_modules=r".*\.(self_attn|mlp)\.\w+_proj",
        ),
    }


@pytest.fixture(scope="session")
def adapted_tiny(tiny_dir: Path, adapter_dirs: dict[str, Path]) -> LoadedModel:
    """The tiny model in fp32 with all of them."""
    return load_tiny(tiny_dir, lora={name: str(directory) for name, directory in adapter_dirs.items()})
