"""The choice of a backend, and the errors of one that cannot run."""

import logging
from types import SimpleNamespace

import pytest
import torch

from bench.attention_case import AttentionCase
from engine.attention import choose_attention
from engine.attention.backend import AttentionBackend
from engine.attention.choose_attention import AttentionUnavailable, make_attention
from engine.attention.cpu import CpuAttention
from engine.attention.plain import PlainAttention
from engine.attention.triton_backend import TritonAttention
from engine.config import AttentionKind

CASE = AttentionCase((1,), (1,))


def made(kind: AttentionKind) -> AttentionBackend:
    return make_attention(kind, torch.zeros(2, 2, 3, 2, 16, 16), CASE.layout, CASE.group, CASE.limits)


def test_on_a_cpu_it_is_the_kernel_where_there_is_one_and_triton_only_interpreted(
    kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(made("auto"), CpuAttention if kernel is None else PlainAttention)
    assert isinstance(made("torch"), PlainAttention)
    monkeypatch.setattr(choose_attention, "kernels_are_loaded", lambda: False)
    assert isinstance(made("auto"), PlainAttention)
    with pytest.raises(AttentionUnavailable, match=r"\(attention=torch can\): its kernel is not loaded"):
        made("cpu")
    assert isinstance(made("triton"), TritonAttention)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(AttentionUnavailable, match="needs a CUDA device, the model is on cpu"):
        made("triton")


@pytest.mark.parametrize(("kind", "package"), [("triton", "triton"), ("flashinfer", "flashinfer-python")])
def test_a_package_that_is_missing_is_named(kind: AttentionKind, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_attention, "find_spec", lambda _name: None)
    with pytest.raises(AttentionUnavailable, match=f"pip install {package}"):
        made(kind)


@pytest.mark.parametrize(
    ("package", "compiler", "kind", "missing"),
    [
        (True, "gcc", "triton", []),
        (None, "gcc", "torch", ["triton"]),
        (True, None, "torch", ["a C compiler with Python.h"]),
        (None, None, "torch", ["triton and a C compiler with Python.h"]),
    ],
)
def test_on_a_cuda_device_it_is_triton_where_that_can_run(
    package: bool | None,
    compiler: str | None,
    kind: str,
    missing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(choose_attention, "find_spec", lambda _name: package)
    monkeypatch.setattr(choose_attention, "find_c_compiler", lambda: compiler)
    with caplog.at_level(logging.WARNING):
        assert choose_attention._automatic(SimpleNamespace(type="cuda"), CASE.layout) == kind
    assert [vars(record)["missing"] for record in caplog.records] == missing


def test_heads_that_the_kernels_cannot_hold_take_plain_attention(caplog: pytest.LogCaptureFixture) -> None:
    """A kernel's block exceeds a GPU's shared memory: the start ended with a traceback of Triton."""
    layout = AttentionCase((1,), (1,), head_dim=272).layout
    with pytest.raises(AttentionUnavailable, match=r"at most 256 numbers, and the model's have 272; attention=torch"):
        make_attention("triton", torch.zeros(2, 2, 3, 2, 16, 272), layout, CASE.group, CASE.limits)
    with caplog.at_level(logging.WARNING):
        assert choose_attention._automatic(SimpleNamespace(type="cuda"), layout) == "torch"
    assert "kernels for heads of 272 numbers" in vars(caplog.records[-1])["missing"]


@pytest.mark.parametrize(("capability", "kind"), [((8, 0), "torch"), ((8, 9), "triton"), ((9, 0), "triton")])
def test_a_device_without_8_bit_floats_attends_to_such_pages_in_plain_operations(
    capability: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    major, minor = capability
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(major=major, minor=minor))
    monkeypatch.setattr(choose_attention, "find_c_compiler", lambda: "gcc")
    layout = AttentionCase((1,), (1,), eight_bits=True).layout
    with caplog.at_level(logging.WARNING):
        assert choose_attention._automatic(SimpleNamespace(type="cuda"), layout) == kind
    missing = [vars(record)["missing"] for record in caplog.records]
    assert missing == (["8-bit floats, which devices have from compute capability 8.9 on"] if kind == "torch" else [])
