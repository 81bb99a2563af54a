"""Linear layers over packed weights, compared with torch's."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from engine.device.huge_pages import HugeMemory
from engine.kernels.linear import PackedGate, PackedLinear, can_pack, pack, pack_linears
from engine.kernels.shared_linear import SharedLinear, share_linears
from engine.model.load import load_model
from engine.model.progress import silent
from engine.ports import EngineRequest
from tests.engine.tiny_engine import greedy, make_engine, prompt, run, save_tiny, small


@pytest.fixture(autouse=True)
def _needs_kernels(kernel: str | None) -> None:
    if kernel is not None or not can_pack():
        pytest.skip(kernel or "this processor has no AVX2")


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    whole = None if bias is None else torch.nn.Parameter(bias)
    return PackedLinear(torch.nn.Parameter(pack(weight, HugeMemory()), requires_grad=False), whole, 0, len(weight))


@pytest.mark.parametrize("rows", [0, 1, 2, 11, 12, 13, 16, 17, 24, 32, 33, 100])
@pytest.mark.parametrize(("out_size", "in_size"), [(32, 2), (96, 64), (960, 576), (1024, 130)])
@torch.no_grad()
def test_products_are_those_of_plain_weights(rows: int, out_size: int, in_size: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(out_size, in_size).bfloat16(), torch.randn(out_size).bfloat16()
    x = torch.randn(1, rows, in_size).bfloat16()
    exact = torch.nn.functional.linear(x.double(), weight.double())
    found = packed(weight)(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(packed(weight, bias)(x), found + bias)
    torch.testing.assert_close(
        packed(weight)(x.expand(3, -1, -1).transpose(0, 1)), found.expand(3, -1, -1).transpose(0, 1)
    )


@pytest.mark.parametrize("in_size", [200, 192])  # tiles of AMX take multiples of 32
@torch.no_grad()
def test_a_row_gives_the_same_bits_among_any_others_with_any_number_of_threads(in_size: int) -> None:
    torch.manual_seed(0)
    layer, x = packed(torch.randn(320, in_size).bfloat16()), torch.randn(50, in_size).bfloat16()
    together = layer(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), together)
            assert all(torch.equal(layer(x[i : i + 1]), together[i : i + 1]) for i in range(50))
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_an_error() -> None:
    layer = packed(torch.randn(64, 32).bfloat16())
    with pytest.raises(RuntimeError, match="linear"):
        layer(torch.randn(1, 32))
    with pytest.raises(RuntimeError, match="linear"):
        layer(torch.randn(1, 34).bfloat16())


class Block(torch.nn.Module):
    """Layers like a decoder's: siblings, a lone one, one of odd size, one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 96), ("odd", 33)):
            setattr(self, name, torch.nn.Linear(96, size, bias=name != "o_proj", dtype=torch.bfloat16))
        self.wide = torch.nn.Linear(96, 32)


@torch.no_grad()
def test_siblings_are_packed_together_and_what_cannot_be_packed_stays() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(5, 96).bfloat16()
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "odd")
    expected = {name: getattr(block, name)(x) for name in names}
    assert pack_linears(block) == 4
    for name in names:
        torch.testing.assert_close(getattr(block, name)(x), expected[name], atol=1e-2, rtol=1e-2)
    q_packed, k_packed, v_packed = (getattr(block, name).packed for name in names[:3])
    assert q_packed is k_packed is v_packed
    assert type(block.odd) is type(block.wide) is torch.nn.Linear
    assert not any(isinstance(module, SharedLinear) for module in block.modules())
    assert pack_linears(block) == share_linears(block) == 0


class Model(torch.nn.Module):
    """A model that has an output layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head: torch.nn.Module = torch.nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: torch.nn.Module) -> None:
        self.lm_head = head


@torch.no_grad()
def test_logits_are_not_rounded() -> None:
    """In bfloat16 the two best are often equal, and the first one won."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(7, 64).bfloat16()
    exact = torch.nn.functional.linear(x.double(), model.lm_head.weight.double())
    assert pack_linears(model) == 1
    found = model.lm_head(x)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


def mlp(**changes: object) -> LlamaMLP:
    torch.manual_seed(0)
    settings = {"hidden_size": 96, "intermediate_size": 128, "mlp_bias": False, "hidden_act": "silu"}
    return LlamaMLP(LlamaConfig(**{**settings, **changes})).bfloat16()


@torch.no_grad()
def test_a_gated_mlp_is_one_product_and_the_one_after_it() -> None:
    block = torch.nn.ModuleList([mlp()])
    x = torch.cat([torch.randn(40, 96) * 3, torch.full((1, 96), 300.0), torch.full((1, 96), -300.0)]).bfloat16()
    exact = block[0].double()(x.double())
    block[0].bfloat16()
    assert pack_linears(block) == 3
    assert isinstance(block[0], PackedGate)
    off = (block[0](x).double() - exact).abs().amax(dim=1) / exact.abs().amax(dim=1)
    assert off.max() < 1e-2
    assert torch.equal(block[0](x[:1]), block[0](x)[:1])


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"mlp_bias": True}, {"intermediate_size": 80}])
@torch.no_grad()
def test_other_mlps_keep_their_form(changes: dict[str, object]) -> None:
    block, x = torch.nn.ModuleList([mlp(**changes)]), torch.randn(5, 96).bfloat16()
    expected = block[0](x)
    pack_linears(block)
    assert type(block[0]) is LlamaMLP
    torch.testing.assert_close(block[0](x), expected, atol=2e-2, rtol=2e-2)


def test_a_model_in_bfloat16_gives_the_same_ids_alone_and_among_others(tmp_path: Path) -> None:
    """The order of additions in plain bfloat16 products depends on the number of rows."""
    directory = save_tiny(tmp_path / "wide", intermediate_size=128)
    loaded = load_model(str(directory), small(dtype="bfloat16"), tmp_path, silent)
    assert pack_linears(loaded.module) > 0
    requests = [EngineRequest(str(i), prompt(3 + 5 * i, start=i), greedy(12)) for i in range(16)]
    together = run(make_engine(loaded, dtype="bfloat16"), requests).tokens
    for request in requests:
        assert (
            run(make_engine(loaded, dtype="bfloat16"), [request]).tokens[request.request_id]
            == together[request.request_id]
        )
