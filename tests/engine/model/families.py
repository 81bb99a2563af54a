"""Tiny models of each family, with weights like real ones and windows much shorter than the prompts."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

WINDOW: Final = 21  # no multiple of a page, less than two of the smallest
SIZES: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 5,
    "pad_token_id": 0,
}
FOUR_LAYERS: Final = {**SIZES, "num_hidden_layers": 4}  # two of each kind
ALTERNATING: Final = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
GEMMA: Final = {**FOUR_LAYERS, "head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": False, **ALTERNATING}

YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 8,
}
EXPERTS: Final = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
LATENT: Final[dict[str, int | None]] = {  # multi-head latent attention
    "num_key_value_heads": SIZES["num_attention_heads"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "head_dim": 16,  # as transformers sets it: of the rotated part
}

FAMILIES: Final[dict[str, Callable[[], PretrainedConfig]]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(
        **FOUR_LAYERS, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=10.0),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA),
    "gemma3n": lambda: Gemma3nTextConfig(
        **{**GEMMA, "intermediate_size": [96] * 4},
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
    ),
    "phi3": lambda: Phi3Config(**SIZES),
    "phi3-window": lambda: Phi3Config(**SIZES, sliding_window=WINDOW),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "smollm3": lambda: SmolLM3Config(**FOUR_LAYERS, no_rope_layer_interval=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
    ),
    "gpt-oss": lambda: GptOssConfig(
        **FOUR_LAYERS,
        **ALTERNATING,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_parameters=YARN,
        swiglu_limit=1.0,  # of random weights few would reach the usual 7
    ),
    "qwen2-moe": lambda: Qwen2MoeConfig(  # an expert that every token passes; layers outweigh the embeddings
        **FOUR_LAYERS,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "deepseek-v2": lambda: DeepseekV2Config(**{**SIZES, **LATENT, **EXPERTS, "q_lora_rank": None}),
    "deepseek-v3": lambda: DeepseekV3Config(**{**SIZES, **LATENT, **EXPERTS}, rope_parameters=YARN),
    "minicpm3": lambda: MiniCPM3Config(**{**SIZES, **LATENT}),
    "glm": lambda: GlmConfig(**SIZES, head_dim=16, attention_bias=True),
    "gpt-neox": lambda: GPTNeoXConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
    "gpt2": lambda: GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=256, vocab_size=128, initializer_range=0.2, eos_token_id=5
    ),
}
OF_LATENTS: Final = ("deepseek-v2", "deepseek-v3", "minicpm3")
WINDOWED: Final = ("qwen2-window", "mistral-window", "gemma2", "gemma3", "gemma3n", "phi3-window", "gpt-oss")


def save_model(directory: Path, config: PretrainedConfig) -> Path:
    """Save random weights. Norms and biases are random too, so that omitting them has an effect."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    return directory


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load transformers' model, with attention written out."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return float32 [T, vocab]."""
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def reference_greedy(model: PreTrainedModel, token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Return greedy ids of transformers, with its cache."""
    ids = torch.tensor([list(token_ids)])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return made[0, ids.shape[1] :].tolist()
