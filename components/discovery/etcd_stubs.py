"""Make `etcd3` importable with a current protobuf. Import `etcd3` and `etcdrpc` only from here.

protobuf accepts etcd3 0.12.0's message classes only in pure Python, where OTLP export is fifteen times slower. So they are
built from the serialized descriptors in etcd3's source.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

_FILES: Final = ("kv", "auth", "rpc")  # in dependency order
SERIALIZED: Final = re.compile(r"^  serialized_pb=_b\(('.*')\)$", re.MULTILINE)


def _serialized_descriptor(source: str) -> bytes:
    # parsing the whole file would take 0.1 s at each start
    found = SERIALIZED.search(source)
    if found is None:
        raise ImportError("this etcd3 release has no serialized descriptors; kvmesh needs etcd3 0.12.0")
    return str(ast.literal_eval(found[1])).encode("latin1")


def _install() -> None:
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("etcd3 is not installed: pip install etcd3==0.12.0")
    folder = Path(spec.submodule_search_locations[0]) / "etcdrpc"
    for name in _FILES:
        module = ModuleType(f"etcd3.etcdrpc.{name}_pb2")
        blob = _serialized_descriptor((folder / f"{name}_pb2.py").read_text())
        descriptor = descriptor_pool.Default().AddSerializedFile(blob)
        builder.BuildMessageAndEnumDescriptors(descriptor, module.__dict__)
        builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, module.__dict__)
        sys.modules[module.__name__] = module


_install()

import etcd3  # noqa: E402  the message modules must be in sys.modules first
from etcd3 import etcdrpc  # noqa: E402
from etcd3.etcdrpc import auth_pb2  # noqa: E402

__all__ = ["auth_pb2", "etcd3", "etcdrpc"]
