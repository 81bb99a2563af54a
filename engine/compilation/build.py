"""Compile a model's forward to a package: python -m engine.compilation.build, a process of its own.

Ahead of time, because what is compiled at run time is traced anew in every process and, with weights folded in, not
cached either: 42 s at each start of SmolLM2-135M, where a package loads in half a second.
"""

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from pydantic import TypeAdapter

from engine.compilation.forward import MIN_TOKENS, Exported, has_own_weights
from engine.compilation.shared_linear import merge_products, share_linears
from engine.compilation.trial import scratch_attention, step_of
from engine.config import EngineConfig
from engine.kernels.build import load_kernels
from engine.kernels.linear import pack_linears
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent

OWN_WEIGHTS: Final = {"freezing": True}  # folded in and packed
NO_WEIGHTS: Final = {"always_keep_tensor_constants": True, "aot_inductor.package_constants_in_so": False}
EXAMPLE: Final = 8  # tokens of the step with which the model is exported


@dataclass(frozen=True, slots=True)
class Order:
    """What to compile, and where to put it; goes to the child as one JSON argument."""

    model: str
    state_dir: str
    package: str
    config: EngineConfig

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), default=str)


def build_package(loaded: LoadedModel, path: Path, max_tokens: int) -> None:
    """Compile `loaded` for steps of 2 to `max_tokens` tokens into `path`, which appears whole or not at all."""
    step = step_of(scratch_attention(loaded.layout, EXAMPLE), loaded.layout, EXAMPLE, EXAMPLE)
    example = torch.zeros(EXAMPLE, dtype=torch.int64), torch.arange(EXAMPLE), torch.arange(4), step.pool, step.plan
    tokens = torch.export.Dim("tokens", min=MIN_TOKENS, max=max_tokens)
    kept = torch.export.Dim("kept", min=MIN_TOKENS, max=max_tokens)
    sizes = tokens, tokens, kept, torch.export.Dim("pages", min=2), torch.export.Dim("plan", min=2)
    share_linears(loaded.module)
    own = has_own_weights(loaded.module)
    unfinished = path.with_name(f"{path.stem}-{os.getpid()}.pt2")
    with torch.no_grad():
        program = torch.export.export(
            Exported(loaded.module),
            example,
            dynamic_shapes=tuple({0: size} for size in sizes),
            strict=False,
        )
        merge_products(program.graph)
        try:
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(unfinished), inductor_configs=OWN_WEIGHTS if own else NO_WEIGHTS
            )
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def main() -> None:
    """Carry out the order in argv, with what the others leave of the cores; end when the parent has ended."""
    _step_back()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    order = TypeAdapter(Order).validate_json(sys.argv[1])
    torch.set_num_threads(os.cpu_count() or 1)  # then generated loops take as many as are set when they run
    loaded = load_model(order.model, order.config, Path(order.state_dir), silent)
    load_kernels(Path(order.state_dir))
    pack_linears(loaded.module)
    build_package(loaded, Path(order.package), order.config.max_step_tokens)


def _step_back() -> None:
    """Take only what nobody on this machine wants.

    Where Linux schedules by sessions (autogroup), `nice` counts within one alone: beside a compiler in another worker's
    session a token took a second, not 30 ms, its threads waiting for one another at each barrier.
    """
    os.nice(19)
    with suppress(OSError):  # a session of ours already; or a kernel without it
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends with the process at its other end."""
    os.read(sys.stdin.fileno(), 1)  # not through the file object: its lock would be held when the interpreter ends
    os._exit(1)


if __name__ == "__main__":
    main()
