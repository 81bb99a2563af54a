"""A worker on a simulated device; environment SIMULATED_MODULE names the service.

For NIXL its KV pages are main memory.
"""

import os
import runpy
from unittest import mock

from components.kv_transfer import nixl_transfer
from tests.engine.simulated.simulated_cuda import simulated_cuda

if __name__ == "__main__":
    with simulated_cuda(), mock.patch.object(nixl_transfer, "_memory_type", return_value=("DRAM", 0)):
        runpy.run_module(os.environ["SIMULATED_MODULE"], run_name="__main__", alter_sys=True)
