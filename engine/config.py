"""The engine's settings, nested in a service's as `MESH_DECODE_ENGINE__PAGE_SIZE`."""

import re
from dataclasses import field, fields
from math import isfinite
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

FOLLOWER: Final = "engine.parallel.rank_process"  # module of ranks without a transfer end
PAGE_SIZES: Final = (16, 32, 64, 128)
AttentionKind = Literal["auto", "cpu", "torch", "triton", "flashinfer"]
ModelDtype = Literal["bfloat16", "float16", "float32"]
PageDtype = ModelDtype | Literal["fp8_e4m3"]
Seconds = Annotated[float, Field(ge=0)]
Size = Annotated[int | None, Field(gt=0)]


def checked_device(name: str) -> str:
    """Return `name`. Raises: ValueError, unless it is a device of this setting's form."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise ValueError(f"{name!r} is not a device: give auto, cpu, cuda or cuda:N")
    return name


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class MockConfig:
    """Costs and KV shape of the mock engine. The defaults are SmolLM2-135M's on two CPU cores."""

    speedup: Annotated[float, Field(gt=0, description="steps are shorter by this factor; inf: they take no time")] = 1.0
    step_s: Annotated[Seconds, Field(description="any step, whatever is in it")] = 0.0104
    decode_s: Annotated[Seconds, Field(description="each request that decodes in it")] = 0.0009
    context_token_s: Annotated[Seconds, Field(description="each token that these attend to")] = 4e-7
    prompt_token_s: Annotated[Seconds, Field(description="each prompt token computed")] = 0.0005
    attention_s: Annotated[
        Seconds, Field(description="each pair of a prompt token and one it attends to: long prompts cost more a token")
    ] = 0.0
    answer_tokens: Annotated[
        int, Field(ge=0, description="mean length of answers that may end by themselves; 0: none does")
    ] = 128
    layers: Annotated[Size, Field(description="of a KV page; default: the model's")] = None
    kv_heads: Annotated[Size, Field(description="of a KV page; default: the model's")] = None
    head_dim: Annotated[Size, Field(description="of a KV page; default: the model's")] = None
    window: Annotated[
        Size, Field(ge=2 * min(PAGE_SIZES), description="keys that a token sees, its own included; default: all")
    ] = None
    thread: Annotated[
        bool, Field(description="a thread for the engine, as a model's has; else it is stepped on the event loop")
    ] = False

    def duration_s(self, prompt_tokens: int, decodes: int, context_tokens: int, pairs: int = 0) -> float:
        """Duration of a step.

        Args:
            prompt_tokens: computed in the step.
            decodes: requests that get a token.
            context_tokens: total context of the decodes.
            pairs: prompt tokens times the tokens that they attend to; see `attended`.
        """
        if not prompt_tokens and not decodes:
            return 0.0
        prompt_s = prompt_tokens * self.prompt_token_s + pairs * self.attention_s
        decode_s = decodes * self.decode_s + context_tokens * self.context_token_s
        return (self.step_s + prompt_s + decode_s) / self.speedup


@dataclass(frozen=True, slots=True)
class StepSize:
    requests: int
    tokens: int


ON_CPU: Final = StepSize(64, 512)
ON_GPU: Final = StepSize(256, 8192)
MAX_ITL_TARGET_MS: Final = 60_000.0
LEAST_PROMPT: Final = 2  # tokens of a step beyond a full batch of decodes


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class EngineConfig:
    page_size: Annotated[int, Field(description="tokens in a KV page: 16, 32, 64 or 128")] = 16
    num_pages: Annotated[
        int | None, Field(description="KV pages; default: as many as kv_memory_gb or gpu_memory_utilization allows")
    ] = None
    kv_memory_gb: Annotated[
        float | None,
        Field(
            description="memory for KV pages, 10^9 bytes, on each device; "
            "default: 1 on a CPU, by gpu_memory_utilization on a GPU"
        ),
    ] = None
    kv_offload_gb: Annotated[
        float | None,
        Field(
            description="main memory for KV pages that the prefix cache evicts, 10^9 bytes, for each device; a later request "
            "with the same prefix gets them back; 0, the default: none"
        ),
    ] = None
    kv_store_dir: Annotated[
        Path | None,
        Field(
            description="directory for KV pages in files, which workers share and which outlive them, on a local disk or a "
            "network's; a prompt whose pages are there is not computed; default: none"
        ),
    ] = None
    kv_store_gb: Annotated[
        float | None,
        Field(
            description="approximate limit of all files in kv_store_dir, 10^9 bytes; beyond it, the pages that were not "
            "used for the longest time are deleted; default: 10"
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Field(
            description="share of a GPU's memory that this worker may use; KV pages get what weights and steps leave of "
            "it. The shares of all workers on a GPU must add up to less than 1"
        ),
    ] = 0.9
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], Field(description="of weights and results; auto: bfloat16")
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp8_e4m3"],
        Field(
            description="of KV pages; auto: as dtype; fp8_e4m3: 8-bit floats, which need half of bfloat16's memory and "
            "transfers, but change answers slightly. Prefill and decode need the same value"
        ),
    ] = "auto"
    device: Annotated[
        str,
        AfterValidator(checked_device),
        Field(description="auto, cpu, cuda or cuda:N, as torch counts; auto: the first CUDA device, else cpu"),
    ] = "auto"
    tensor_parallel: Annotated[
        int, Field(description="devices that hold the model together, of one machine, from `device` on; a process each")
    ] = 1
    load_format: Annotated[
        Literal["auto", "dummy"], Field(description="dummy: random weights, the same in every process")
    ] = "auto"
    max_running: Annotated[
        int | None,
        Field(description="requests with a place in the batch, reserved ones included; default: 64, 256 on a GPU"),
    ] = None
    max_step_tokens: Annotated[
        int | None,
        Field(description="token budget of a step, hence the longest prompt chunk; default: 512, 8192 on a GPU"),
    ] = None
    pack_tokens: Annotated[
        int | None,
        Field(
            description="a step with this many prompt tokens begins no further prompt; "
            "default: 128 on a CPU, 1536 on a device, no limit on one that takes no time"
        ),
    ] = None
    itl_target_ms: Annotated[
        float | None,
        Field(
            description="limits the prompt tokens of a step with decodes to what it can compute in this time, by measured "
            "speed; 0: no such limit; default: on a CPU 50, or four times a step without prompts if that is more; 0 on a "
            "device. Beside streams whose prompts were computed elsewhere a step takes at most twice as long as without "
            "prompts"
        ),
    ] = None
    reserve_tokens: Annotated[
        int, Field(description="admission keeps pages free for at most this many further tokens of each request")
    ] = 512
    threads: Annotated[int | None, Field(description="CPU threads; default: torch decides")] = None
    shared_cores: Annotated[
        Path | None,
        Field(description="file through which workers of one machine lend each other cores; threads is its own share"),
    ] = None
    max_context: Annotated[
        int | None, Field(description="tokens of prompt and answer; default: what model and pages allow")
    ] = None
    lora: Annotated[
        dict[str, str], Field(description="LoRA adapters: name that clients ask for = directory as PEFT saves it")
    ] = field(default_factory=dict)
    matryoshka: Annotated[
        bool,
        Field(description="an embedding model's vectors may be cut, though its config.json does not say is_matryoshka"),
    ] = False
    kv_events: Annotated[
        bool,
        Field(
            description="report to routers which blocks the prefix cache gains and loses; else they guess from what they sent"
        ),
    ] = True
    mock: Annotated[MockConfig, Field(description="of `--model mock`")] = MockConfig()
    compile: Annotated[
        Literal["auto", "wait", "off"],
        Field(
            description="auto: run eagerly until a compiled model is ready, where it pays, on a GPU like wait; "
            "wait: be ready first; off"
        ),
    ] = "auto"
    attention: Annotated[
        AttentionKind,
        Field(
            description="auto: triton on a CUDA device, else cpu, a C++ kernel that reads pages in place, where it can be "
            "compiled; torch: plain operations on any device; flashinfer when it is installed"
        ),
    ] = "auto"
    pipeline: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="plan a step while the device runs the one before; auto: unless the CPU computes (the mock's does not)"
        ),
    ] = "auto"
    speculative_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            le=64,
            description="speculative decoding: guess up to this many next tokens of a request from its own text and check "
            "them in one step; the answers stay the same. 0: off; default: 7 on a CPU where no bit of an answer can "
            "change, else 0",
        ),
    ] = None
    compile_timeout_s: Annotated[
        float, Field(description="how long a start waits for compiling, then runs eagerly")
    ] = 300.0

    def __post_init__(self) -> None:
        for setting in fields(self):
            number = getattr(self, setting.name)
            if isinstance(number, float) and not isfinite(number):
                raise ValueError(f"{setting.name} is {number}; it must be a finite number")
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size is {self.page_size}; it must be one of {', '.join(map(str, PAGE_SIZES))}")
        for name in (
            "num_pages",
            "kv_memory_gb",
            "kv_store_gb",
            "gpu_memory_utilization",
            "tensor_parallel",
            "max_running",
            "max_step_tokens",
            "pack_tokens",
            "threads",
            "max_context",
            "compile_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if not all(self.lora) or not all(self.lora.values()):
            raise ValueError(f"lora is {self.lora}; it must give each adapter a name and a directory")
        if self.itl_target_ms is not None and not 0 <= self.itl_target_ms <= MAX_ITL_TARGET_MS:
            raise ValueError(
                f"itl_target_ms is {self.itl_target_ms}; it must be from 0 (no limit) to {MAX_ITL_TARGET_MS:g}"
            )
        if self.kv_offload_gb is not None and self.kv_offload_gb < 0:
            raise ValueError(f"kv_offload_gb is {self.kv_offload_gb}; it must be 0 (evicted pages are lost) or more")
        if self.reserve_tokens < 0:
            raise ValueError(f"reserve_tokens is {self.reserve_tokens}; it must not be negative")
        if self.gpu_memory_utilization > 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it is a share, at most 1")
        if self.compile_timeout_s > TIMEOUT_MAX:
            raise ValueError(f"compile_timeout_s is {self.compile_timeout_s}; it must be at most {TIMEOUT_MAX}")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that exclude or need each other."""
        if self.kv_store_gb is not None and self.kv_store_dir is None:
            raise ValueError(f"kv_store_gb is {self.kv_store_gb}, so kv_store_dir must say where the files are")
        if self.speculative_tokens and self.pipeline == "on":
            raise ValueError(
                "speculative_tokens needs pipeline=auto or off: a guess follows a token that must be known"
            )
        running = self.max_running or 1
        if self.max_step_tokens and self.max_step_tokens < running + LEAST_PROMPT:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running + {LEAST_PROMPT} "
                f"({running + LEAST_PROMPT}): beside the other decodes a prompt chunk needs three tokens"
            )

    @property
    def model_dtype(self) -> ModelDtype:
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def page_dtype(self) -> PageDtype:
        return self.model_dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def model_suffix(self) -> str:
        """Suffix of the model's name in the KV layout, where the pages' dtype does not imply the model's. bfloat16 has none."""
        return "" if self.model_dtype in {self.page_dtype, "bfloat16"} else f", {self.model_dtype}"

    def step_size(self, device: str) -> StepSize:
        """Limits of a step on `device`, as torch names it. A default gives way to a value that is set."""
        usual = ON_GPU if device.startswith("cuda") else ON_CPU
        running = self.max_running or min(usual.requests, (self.max_step_tokens or usual.tokens) - LEAST_PROMPT)
        return StepSize(running, self.max_step_tokens or max(usual.tokens, running + LEAST_PROMPT))


def attended(start: int, length: int) -> int:
    """Pairs of a token and one it attends to, itself included, for `length` prompt tokens."""
    return length * start + length * (length + 1) // 2
