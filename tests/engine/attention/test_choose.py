"""Which backend one gets, and what is said where it cannot run."""

import logging
from types import SimpleNamespace

import pytest
import torch

from bench.attention_case import AttentionCase
from engine.attention import choose
from engine.attention.backend import AttentionBackend
from engine.attention.choose import BackendUnavailable, make_attention
from engine.attention.cpu import CpuAttention
from engine.attention.triton_backend import TritonAttention
from engine.config import AttentionKind

CASE = AttentionCase((1,), (1,))


def made(kind: AttentionKind) -> AttentionBackend:
    return make_attention(kind, torch.zeros(2, 2, 3, 2, 16, 16), CASE.layout, CASE.group, CASE.limits)


def test_on_a_cpu_it_is_cpu_and_triton_only_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(made("auto"), CpuAttention)
    assert isinstance(made("cpu"), CpuAttention)
    assert isinstance(made("triton"), TritonAttention)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailable, match="needs a CUDA device, the model is on cpu"):
        made("triton")


@pytest.mark.parametrize(("kind", "package"), [("triton", "triton"), ("flashinfer", "flashinfer-python")])
def test_a_package_that_is_missing_is_named(kind: AttentionKind, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda _name: None)
    with pytest.raises(BackendUnavailable, match=f"pip install {package}"):
        made(kind)


@pytest.mark.parametrize(
    ("package", "compiler", "kind", "missing"),
    [
        (True, "gcc", "triton", []),
        (None, "gcc", "cpu", ["triton"]),
        (True, None, "cpu", ["a C compiler"]),
        (None, None, "cpu", ["triton and a C compiler"]),
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
    monkeypatch.setattr(choose, "find_spec", lambda _name: package)
    monkeypatch.setattr(choose, "find_c_compiler", lambda: compiler)
    with caplog.at_level(logging.WARNING):
        assert choose._automatic(SimpleNamespace(type="cuda")) == kind
    assert [record.missing for record in caplog.records] == missing
