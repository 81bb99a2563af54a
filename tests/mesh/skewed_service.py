"""A service whose wall clock is SKEW_S off; environment SKEWED_MODULE names the service."""

import os
import runpy
import sys
import time
from types import SimpleNamespace
from typing import Final

import components.discovery.etcd  # noqa: F401 - loads all of gRPC; see below

SKEW_NS: Final = int(float(os.environ["SKEW_S"]) * 1e9)

_time_ns = time.time_ns


def time_ns() -> int:
    return _time_ns() + SKEW_NS


def skewed_time() -> float:
    return time_ns() / 1e9


# gRPC adds its timeouts to Python's clock, and compares them with the machine's.
as_it_is = SimpleNamespace(**vars(time))
for name, module in list(sys.modules.items()):
    if name.startswith("grpc") and getattr(module, "time", None) is time:
        module.time = as_it_is  # type: ignore[attr-defined]
time.time_ns, time.time = time_ns, skewed_time

if __name__ == "__main__":
    runpy.run_module(os.environ["SKEWED_MODULE"], run_name="__main__", alter_sys=True)
