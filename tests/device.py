"""The device that tests of the engine and of KV transfer run on: pytest's --device names it."""

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Final

import pytest

VARIABLE: Final = "KVMESH_TEST_DEVICE"  # for processes that tests start
TESTED: Final = {"device": os.environ.get(VARIABLE, "cpu")}
RECORDS: Final = {"graphs": False}  # whether engines on a device record graphs of decodes
IS_GPU: Final = re.compile(r"gpu\b")

# Files with tests of a device, which are marked `gpu`.
ON_DEVICE: Final = (
    "tests/components/kv_transfer/test_nixl_transfer.py",
    "tests/components/kv_transfer/test_transfer_contract.py",
    "tests/engine/core/test_failed_steps.py",
    "tests/engine/lora/test_adapted_requests.py",
    "tests/engine/model/test_families.py",
    "tests/engine/sampling/test_against_reference.py",
    "tests/engine/sampling/test_distribution.py",
    "tests/engine/sampling/test_in_engine.py",
    "tests/engine/sampling/test_sampler.py",
    "tests/engine/test_branches.py",
    "tests/engine/test_embeddings.py",
    "tests/engine/test_engine_stateful.py",
    "tests/engine/test_greedy_equals_transformers.py",
    "tests/engine/test_non_finite_logits.py",
    "tests/engine/test_offload.py",
    "tests/engine/test_phases.py",
    "tests/engine/test_pipeline.py",
)
# Their tests that need a CPU.
ON_CPU_ALONE: Final = (
    # the packed products of a CPU
    "test_a_row_in_bfloat16_has_the_same_bits_beside_any_others",
    # the event loop posts short writes
    "test_a_short_write_that_has_landed_at_once_costs_no_turn_of_the_loop",
    "test_others_have_a_turn_in_the_midst_of_a_long_write_and_may_end_it",
    "test_the_event_loop_posts_pages_some_at_a_time_and_the_thread_pieces",
    # between processes of a GPU the writer copies alone, so its write needs no live receiver
    "test_a_dead_peer_fails_the_write_of_pieces",
    "test_a_dead_peer_leaves_nothing_behind",
    "test_a_write_in_flight_fails_when_its_peer_is_killed_or_forgotten",
    "test_a_dead_peer_fails_its_writes_and_a_restarted_one_is_served",
    "test_forgetting_a_peer_that_hangs_ends_its_write_and_nothing_of_later_pages_leaves",
)
SIMULATED: Final = "simulated"  # a device made of main memory: tests/engine/simulated
WITHOUT_SIMULATION: Final = (
    "tests/components/",  # their processes share memory by NIXL
    "tests/engine/sampling/",  # the interpreter takes hours for their draws
)
HOST_BACKENDS: Final = ("fake", "mooncake")  # for pages in main memory


def is_for_cpu(arguments: Sequence[str]) -> bool:
    """Read pytest's command line, before pytest does."""
    given = dict(pairwise([word for argument in arguments for word in argument.split("=", 1)]))
    return given["--device"] in {"cpu", SIMULATED} if "--device" in given else not IS_GPU.match(given.get("-m", ""))


if TESTED["device"] == "cpu" and is_for_cpu(sys.argv):
    # Kernels for CUDA run in Triton's interpreter. Triton reads this at its import, which torch may cause.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def choose_device(config: pytest.Config) -> None:
    """Raises: pytest.UsageError, if there is no such device."""
    asked = config.getoption("--device")
    device = asked or ("cuda:0" if IS_GPU.match(config.option.markexpr) else "cpu")
    RECORDS["graphs"] = config.getoption("--graphs")
    if device == "cpu":
        if RECORDS["graphs"]:
            raise pytest.UsageError(
                "--graphs is for a device: add -m gpu, and --device simulated where there is no GPU"
            )
        return
    if not IS_GPU.match(config.option.markexpr):
        raise pytest.UsageError(f"--device {device} is for the tests marked gpu: add -m gpu")
    if device == SIMULATED:
        simulation = import_module("tests.engine.simulated.simulated_cuda").simulated_cuda()
        simulation.__enter__()
        config.add_cleanup(lambda: simulation.__exit__(None, None, None))
        # only Triton's kernels can be recorded, although its interpreter takes a second a step
        TESTED.update(device="cuda:0", attention="triton" if RECORDS["graphs"] else "torch")
        return
    cuda = import_module("torch").cuda
    index = device.removeprefix("cuda:")
    if not index.isdigit() or not cuda.is_available() or int(index) >= cuda.device_count():
        raise pytest.UsageError(
            f"there is no device {device} here: torch {import_module('torch').__version__} finds "
            f"{cuda.device_count() if cuda.is_available() else 0} CUDA devices, named cuda:0 and so on. "
            "`--device cpu` runs the same tests on the CPU"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("with TRITON_INTERPRET=1 kernels run on the CPU: unset it")
    TESTED["device"] = os.environ[VARIABLE] = device
    # UCX reads it once: after a pool in main memory, one in VRAM would not get cuda_ipc
    import_module("components.kv_transfer.ucx_settings").unmap_after_writes()


def is_on_device(item: pytest.Item) -> bool:
    name = item.name.partition("[")[0]
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    at = item.path.relative_to(item.config.rootpath).as_posix()
    if item.config.getoption("--device") == SIMULATED and at.startswith(WITHOUT_SIMULATION):
        return False
    return at in ON_DEVICE and name not in ON_CPU_ALONE and parameters.get("backend") not in HOST_BACKENDS


if __name__ == "__main__":  # the files for a machine that has no packages of the other tests
    print(*ON_DEVICE)  # noqa: T201
