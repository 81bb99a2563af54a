"""NIXL's thread has the pool's CUDA context before the agent is made; CUDA's functions are fakes."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from components.kv_transfer import nixl_transfer, ucx_settings
from components.kv_transfer.nixl_transfer import NixlTransfer
from components.startup import WrongSettings
from tests.components.kv_transfer.nixl_peer import Pages


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL sets this variable, and UCX in later child processes would report it as unused."""
    monkeypatch.setenv(ucx_settings.UCX_IPC_CACHE, "")
    monkeypatch.delenv(ucx_settings.UCX_IPC_CACHE)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("device", "before"),
    [("cuda:1", ["device 1", "synchronize 1"]), ("cuda:0", ["device 0", "synchronize 0"]), ("cpu", [])],
)
async def test_the_thread_has_a_context_before_the_agent_is_made(
    device: str, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had none: UCX then found no path from GPU to GPU, and was slow."""
    called: list[tuple[str, int]] = []

    def note(what: str) -> None:
        called.append((what, threading.get_ident()))

    def agent(*_args: object) -> None:
        note("agent")
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: note(f"device {index}"))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: note(f"synchronize {index}"))
    )
    monkeypatch.setattr(nixl_transfer, "nixl_agent", agent)
    transfer = NixlTransfer(Pages(device=device), "me", "UCX", 4)
    with pytest.raises(WrongSettings, match="no GPU"):
        await transfer.start()
    await transfer.stop()
    assert [what for what, _ in called] == [*before, "agent"]
    threads = {thread for _, thread in called}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("device", "given", "found"), [("cuda:0", None, "n"), ("cuda:0", "y", "y"), ("cpu", None, None)]
)
async def test_the_memory_of_a_peer_is_not_kept_mapped(
    device: str, given: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed decode's memory stayed mapped in each prefill that had written to it, so its restart had no memory."""
    seen: list[str | None] = []

    def agent(*_args: object) -> None:
        seen.append(os.environ.get(ucx_settings.UCX_IPC_CACHE))
        raise RuntimeError("there is no GPU")

    if given is not None:
        monkeypatch.setenv(ucx_settings.UCX_IPC_CACHE, given)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(nixl_transfer, "nixl_agent", agent)
    transfer = NixlTransfer(Pages(device=device), "me", "UCX", 4)
    with pytest.raises(WrongSettings, match="no GPU"):
        await transfer.start()
    await transfer.stop()
    assert seen == [found]
