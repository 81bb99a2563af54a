"""NIXL's agent, without torch, which `import nixl` imports in a second and 200 MB.

Without CUDA either build works.
"""

import os
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

# Both are read at the import. By default UCX logs to stdout, between the lines of programs that print.
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
os.environ.setdefault("UCX_LOG_FILE", "stderr")


def _package() -> str:
    try:
        without_cuda = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        without_cuda = False
    builds = [name for name in ("nixl_cu13", "nixl_cu12") if find_spec(name)]
    is_needed = without_cuda or not find_spec("nixl")  # a build may be installed alone
    return builds[0] if builds and is_needed else "nixl"


_api: Any = import_module(_package())
nixl_agent: Any = _api.nixl_agent
nixl_agent_config: Any = _api.nixl_agent_config
