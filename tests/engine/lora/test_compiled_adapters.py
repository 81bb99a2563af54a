"""Adapters of a compiled package: they stay outside of it, like attention."""

import os
import shutil
from pathlib import Path

import pytest

from engine.build import assemble
from engine.compilation import packages
from engine.compilation.forward import EagerForward, PackagedForward
from engine.compilation.packages import CompiledWhenReady, choose_forward
from engine.model.load import LoadedModel
from engine.model.progress import silent
from engine.ports import EngineRequest
from tests.engine.tiny_engine import greedy, make_engine, prompt, run, small


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_with_adapters_gives_the_ids_of_the_eager_one(
    adapted_tiny: LoadedModel, adapter_dirs: dict[str, Path], tiny_dir: Path, compile_home: Path
) -> None:
    lora = {name: str(directory) for name, directory in adapter_dirs.items()}
    config = small(compile="wait", lora=lora)
    forward = choose_forward(str(tiny_dir), adapted_tiny, config, compile_home, silent)
    compiled = assemble(adapted_tiny, config, forward)
    eager = make_engine(adapted_tiny)
    for count in (1, 8):  # alone, a decode step has one token and is padded to two
        requests = [
            EngineRequest(f"{count}-{i}", prompt(3 + 17 * i, start=i), greedy(24), adapter=("plain", "", *lora)[i % 5])
            for i in range(count)
        ]
        assert run(compiled, requests).tokens == run(eager, requests).tokens
    if shutil.which(os.environ.get("CXX", "g++")) is None:  # what must be true on a machine without a C++ compiler
        assert isinstance(forward, EagerForward)
        return
    assert isinstance(forward, CompiledWhenReady)
    assert isinstance(forward._forward, PackagedForward)


def test_a_package_belongs_to_the_layers_that_are_adapted_not_to_the_adapters(
    tiny: LoadedModel, adapted_tiny: LoadedModel, tmp_path: Path
) -> None:
    assert packages._package_path(tiny, small(), tmp_path) != packages._package_path(adapted_tiny, small(), tmp_path)
    assert "plain" not in str(adapted_tiny.adapters.layers)
