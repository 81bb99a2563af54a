"""A follower on a simulated device; it replaces `engine.parallel.rank_process`."""

from unittest import mock

from engine.compilation import device
from engine.parallel.rank_process import main
from tests.engine.simulated.simulated_cuda import simulated_cuda

if __name__ == "__main__":
    with simulated_cuda(index=1), mock.patch.object(device, "torch_compile", lambda module: module):
        main()
