"""Engines with random weights, and requests for them."""

import atexit
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, models, pre_tokenizers

from bench.engine import Bench
from bench.gpu.report import print_figure
from bench.gpu.scale import TINY, Scale
from components.wire.sampling import SamplingParams
from engine.build import assemble, build_engine
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent
from engine.parts import make_parts
from engine.ports import Engine, EngineRequest

ON_CPU: Final[Mapping[str, Any]] = {"num_pages": 200, "max_running": 8, "max_step_tokens": 64, "threads": 1}
# for comparing ids; without num_pages a tiny model would get millions
EXACT: Final[Mapping[str, Any]] = {"dtype": "float32", "num_pages": 600, "max_running": 24, "max_step_tokens": 96}


def config_of(scale: Scale, **changes: Any) -> EngineConfig:
    """Return the configuration; on a GPU the defaults, with time to compile."""
    settings: dict[str, Any] = {"device": scale.device, "dtype": scale.dtype, "load_format": "dummy"}
    if scale.on_cpu:
        settings |= {**ON_CPU, "attention": "torch", "compile": "off"}
    else:
        settings |= {"compile": "wait", "compile_timeout_s": 400.0}
    return EngineConfig(**{**settings, **changes})


@contextmanager
def saved(described: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a directory with a model's configuration and a tokenizer, in which each token is a word."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(dict(described)))
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(described["vocab_size"])}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path / "tokenizer.json"))
        yield path


@contextmanager
def built(described: Mapping[str, Any], config: EngineConfig) -> Iterator[EngineCore]:
    """Yield an engine with all its ranks."""
    with saved(described) as directory:
        engine = build_engine(str(directory), config, _state_dir())
        try:
            yield engine
        finally:
            engine.close()


@cache
def _state_dir() -> Path:
    """Return the same directory for all engines of this process, because compilers only use that of the first one."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def exact_ids(scale: Scale, asked: list[EngineRequest], **changes: Any) -> dict[str, list[int]]:
    """Return the tokens that one engine with the tiny model generates."""
    with built(TINY, config_of(scale, **EXACT, **changes)) as engine:
        return generate(engine, asked)


def make_bench(described: Mapping[str, Any], config: EngineConfig, label: str) -> tuple[Bench, LoadedModel]:
    with saved(described) as directory:
        loaded = load_model(str(directory), replace(config, load_format="dummy"), directory, silent)
    started = time.perf_counter()
    parts = make_parts(loaded, config)
    engine = assemble(loaded, config, parts.model.forward, parts.pool)
    spent_s = round(time.perf_counter() - started, 1)
    print_figure("engine ready", label=label, seconds=spent_s, compile=config.compile, pages=engine.kv_region.num_pages)
    return Bench(engine, config, label), loaded


def requests(
    vocab_size: int, count: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int = 0
) -> list[EngineRequest]:
    """Return greedy requests with random tokens and lengths."""
    draw, made = random.Random(seed), []
    for i in range(count):
        length, limit = draw.randint(*prompts), draw.randint(*outputs)
        tokens = [draw.randrange(vocab_size) for _ in range(length)]
        made.append(
            EngineRequest(f"{seed}-{i}", tokens, SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True))
        )
    return made


def generate(engine: Engine, asked: list[EngineRequest]) -> dict[str, list[int]]:
    for request in asked:
        engine.submit(request)
    found: dict[str, list[int]] = {}
    while engine.has_work():
        output = engine.step()
        if output.failed:
            raise output.failed[0].error
        for tokens in output.tokens:
            found.setdefault(tokens.request_id, []).extend(tokens.token_ids)
    return found
