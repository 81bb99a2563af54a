"""Requests with and without adapters in one batch, against models into which the adapters were merged by hand."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from components.errors import UnknownModel
from engine.attention.backend import StepShape
from engine.attention.plain import PlainAttention
from engine.compilation.forward import EagerForward
from engine.core.engine_core import EngineCore
from engine.kernels.linear import can_pack, pack_linears
from engine.kv.storage import allocate_storage
from engine.lora.adapters import AdaptedLinear, PackedLowRank, pack_adapters
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from tests.engine.lora.lora_files import merge, save_adapter
from tests.engine.tiny_engine import (
    Seen,
    alone,
    greedy,
    load_tiny,
    make_engine,
    peek,
    prompt,
    read_page,
    run,
    run_until_idle,
    save_tiny,
    write_page,
)

pytestmark = pytest.mark.usefixtures("pipeline")

NAMES = ("", "plain", "few", "patterned")

Alone = Callable[[str, int, int, int], list[int]]  # (adapter, length and start of the prompt, tokens to make)


@pytest.fixture(scope="module")
def merged(
    tiny: LoadedModel, tiny_dir: Path, adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, LoadedModel]:
    """The model by adapter, with merged weights; these engines have no adapters."""
    home = tmp_path_factory.mktemp("merged")
    made = {name: load_tiny(merge(tiny_dir, directory, home / name)) for name, directory in adapter_dirs.items()}
    return {"": tiny, **made}


@pytest.fixture(scope="module")
def merged_alone(merged: dict[str, LoadedModel]) -> Alone:
    @cache
    def tokens(adapter: str, length: int, start: int, count: int) -> list[int]:
        return alone(merged[adapter], prompt(length, start), greedy(count, ignore_eos=True))

    return tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 17, 130])
def test_an_adapter_gives_the_ids_of_the_model_that_it_was_merged_into(
    adapted_tiny: LoadedModel, merged_alone: Alone, name: str, length: int
) -> None:
    request = EngineRequest("r", prompt(length), greedy(24, ignore_eos=True), adapter=name)
    assert run(make_engine(adapted_tiny), [request]).tokens["r"] == merged_alone(name, length, 0, 24)


def test_the_adapters_and_the_model_itself_give_different_answers(merged_alone: Alone) -> None:
    """So the other tests can fail."""
    assert len({tuple(merged_alone(name, 17, 0, 24)) for name in NAMES}) == len(NAMES)


def test_ids_are_those_of_the_request_alone_whatever_adapters_share_the_batch(
    adapted_tiny: LoadedModel, merged_alone: Alone
) -> None:
    """Also in chunks, with prefix hits, and where the pool is so small that requests are preempted."""

    @settings(max_examples=30, deadline=None)
    @given(
        asked=st.lists(
            st.tuples(st.sampled_from(NAMES), st.sampled_from((1, 16, 33, 60)), st.integers(0, 2)),
            min_size=2,
            max_size=9,
        ),
        max_step_tokens=st.sampled_from((18, 48, 200)),
        num_pages=st.sampled_from((10, 64)),
        arrive_late=st.integers(0, 8),
    )
    def together(asked: list[tuple[str, int, int]], max_step_tokens: int, num_pages: int, arrive_late: int) -> None:
        engine = make_engine(
            adapted_tiny, max_step_tokens=max_step_tokens, num_pages=num_pages, reserve_tokens=0, max_context=90
        )
        seen = Seen()
        for i, (name, length, start) in enumerate(asked):
            if i == arrive_late:
                seen.take(engine.step())
            engine.submit(EngineRequest(str(i), prompt(length, start), greedy(12, ignore_eos=True), adapter=name))
        run_until_idle(engine, seen)
        assert seen.tokens == {
            str(i): merged_alone(name, length, start, 12) for i, (name, length, start) in enumerate(asked)
        }

    together()


def test_layers_keep_their_biases_and_all_linear_means_all_but_the_output_layer(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "biased", attention_bias=True, mlp_bias=True)
    weights = directory / "model.safetensors"
    draw = torch.Generator().manual_seed(7)
    drawn = {
        name: torch.randn(t.shape, generator=draw) if name.endswith("bias") else t
        for name, t in load_file(weights).items()
    }
    save_file(drawn, weights, metadata={"format": "pt"})
    adapter = save_adapter(tmp_path / "adapter", directory, 1, target_modules="all-linear")
    expected = alone(load_tiny(merge(directory, adapter, tmp_path / "merged")), prompt(20), greedy(24))
    engine = make_engine(load_tiny(directory, lora={"a": str(adapter)}))
    assert run(engine, [EngineRequest("r", prompt(20), greedy(24), adapter="a")]).tokens["r"] == expected
    assert expected != alone(load_tiny(directory), prompt(20), greedy(24))


def test_branches_keep_the_adapter_of_their_request(adapted_tiny: LoadedModel, merged: dict[str, LoadedModel]) -> None:
    sampling = greedy(12, ignore_eos=True, n=3)
    seen = run(make_engine(adapted_tiny), [EngineRequest("r", prompt(20), sampling, adapter="plain")])
    expected = alone(merged["plain"], prompt(20), greedy(12, ignore_eos=True))
    assert [seen.tokens["r"], seen.branches["r", 1], seen.branches["r", 2]] == [expected] * 3


def test_a_row_without_adapter_is_bit_by_bit_what_it_is_without_any_loaded(
    tiny: LoadedModel, adapted_tiny: LoadedModel
) -> None:
    token_ids = torch.tensor([7, 9, 7, 11, 12], device=tiny.device)
    positions = torch.tensor([0, 0, 0, 1, 2], device=tiny.device)

    def logits(loaded: LoadedModel, *names: str) -> torch.Tensor:
        storage = allocate_storage(loaded.layout, 4, loaded.device)
        step = PlainAttention(storage, loaded.layout, loaded.query_group).plan(
            StepShape([1, 1, 3], [1, 1, 3], [[1], [2], [3]])
        )
        lengths = (1, 1, 3)
        with torch.inference_mode(), loaded.adapters.of_rows(list(zip(names, lengths, strict=False))):
            return EagerForward(loaded.module)(token_ids, positions, torch.arange(5, device=tiny.device), step)

    plain = logits(tiny)
    assert torch.equal(logits(adapted_tiny), plain)
    mixed = logits(adapted_tiny, "plain", "", "plain")  # of rows that are not adjacent
    assert torch.equal(mixed[1], plain[1])
    assert (mixed[[0, 2, 3, 4]] - plain[[0, 2, 3, 4]]).abs().amax(-1).gt(0.1).all()
    others = logits(adapted_tiny, "few", "patterned", "")
    assert torch.equal(others[2:], plain[2:])
    assert (others[:2] - plain[:2]).abs().amax(-1).gt(0.1).all()


@pytest.mark.parametrize("rows", [[0], [0, 1], list(range(20)), [0, 2, 3], [0, *range(5, 70)]])
def test_a_row_in_bfloat16_has_the_same_bits_beside_any_others(
    tiny_dir: Path, adapter_dirs: dict[str, Path], kernel: str | None, rows: list[int]
) -> None:
    """Sums were rounded once for adjacent rows and twice for others."""
    if kernel is not None or not can_pack():
        pytest.skip("torch's products")
    loaded = load_tiny(tiny_dir, dtype="bfloat16", lora={"a": str(adapter_dirs["patterned"])})
    pack_linears(loaded.module)
    adapters = pack_adapters(loaded.adapters)
    assert all(isinstance(change, PackedLowRank) for change in adapters.changes["a"])
    mlp = loaded.module.model.layers[0].mlp
    assert isinstance(mlp.down_proj, AdaptedLinear)
    x = torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def outputs(taken: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode(), adapters.of_rows([("a" if i in taken else "", 1) for i in range(70)]):
            return mlp(x)

    some, others = outputs(rows), [i for i in range(70) if i not in rows]
    assert torch.equal(some[:, rows], outputs(range(70))[:, rows])
    assert torch.equal(some[:, others], outputs([])[:, others])


def test_prefixes_are_not_shared_between_adapters_nor_with_the_model_itself(adapted_tiny: LoadedModel) -> None:
    engine = make_engine(adapted_tiny)
    run(engine, [EngineRequest("r", prompt(40), greedy(2), adapter="plain")])
    assert [peek(engine, prompt(40), adapter=name) for name in NAMES] == [0, 32, 0, 0]
    again = [EngineRequest(f"r-{name}", prompt(40), greedy(2), adapter=name) for name in NAMES]
    assert run(engine, again).cached == {"r-": 0, "r-plain": 32, "r-few": 0, "r-patterned": 0}


def test_the_same_weights_under_another_name_share_prefixes_and_other_weights_under_the_same_do_not(
    tiny_dir: Path, adapter_dirs: dict[str, Path]
) -> None:
    """Block hashes contain the weights: KV moves between workers, and each has its own adapter names."""
    one = make_engine(load_tiny(tiny_dir, lora={"a": str(adapter_dirs["plain"]), "b": str(adapter_dirs["plain"])}))
    run(one, [EngineRequest("r", prompt(40), greedy(2), adapter="a")])
    assert peek(one, prompt(40), adapter="b") == 32
    other = make_engine(load_tiny(tiny_dir, lora={"a": str(adapter_dirs["few"])}))
    assert one.adapters["a"] == one.adapters["b"] != other.adapters["a"]
    assert one._root_hash("", "a") != other._root_hash("", "a")


def test_kv_computed_elsewhere_with_the_adapter_is_gone_on_with(adapted_tiny: LoadedModel, merged_alone: Alone) -> None:
    """Prefill on one engine, its pages copied into another, as NIXL would."""
    make = partial(make_engine, adapted_tiny)
    prefill, decode = make(), make()
    sampling = greedy(12, ignore_eos=True)
    requests = {name: EngineRequest(f"r-{name}", prompt(40), sampling, adapter=name) for name in NAMES}
    computed = run(prefill, [_in_phase(r, Phase.PREFILL) for r in requests.values()]).computed
    reserved = run(decode, [_in_phase(r, Phase.DECODE) for r in requests.values()]).reserved
    first = {}
    for request_id, told in reserved.items():
        done = computed[request_id][-1]
        assert told.num_computed == 0
        for source, target in zip(done.pages, told.pages, strict=True):
            write_page(decode, target, read_page(prefill, source))
        assert done.first_token is not None
        [output] = decode.deliver(request_id, done.first_token)
        first[request_id] = output.token_ids
    rest = run(decode, []).tokens
    assert {i: first[i] + rest[i] for i in first} == {f"r-{n}": merged_alone(n, 40, 0, 12) for n in NAMES}


def _in_phase(request: EngineRequest, phase: Phase) -> EngineRequest:
    return EngineRequest(request.request_id, request.token_ids, request.sampling, phase, adapter=request.adapter)


def test_an_unknown_adapter_is_refused_and_those_there_are_named(adapted_tiny: LoadedModel, tiny: LoadedModel) -> None:
    engine: EngineCore = make_engine(adapted_tiny)
    with pytest.raises(UnknownModel, match="no LoRA adapter 'x'; loaded here: few, patterned, plain") as refused:
        engine.submit(EngineRequest("r", prompt(5), greedy(2), adapter="x"))
    assert refused.value.fields["param"] == "model"
    assert not engine.has_work()
    with pytest.raises(UnknownModel, match="loaded here: none"):
        make_engine(tiny).submit(EngineRequest("r", prompt(5), greedy(2), adapter="plain"))
