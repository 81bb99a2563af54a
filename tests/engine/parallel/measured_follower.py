"""A follower whose device has `BYTES` of counted memory; it replaces `engine.parallel.rank_process`."""

import os
from typing import Any, Final

from engine import follower
from engine.device import huge_pages
from engine.parallel.rank_process import main
from engine.parts import make_parts
from tests.engine.device.counted_memory import CountedMemory

BYTES: Final = "MEASURED_FOLLOWER_BYTES"


def measured(loaded: Any, config: Any, progress: Any, *, shared: int | None) -> Any:
    with CountedMemory(int(os.environ[BYTES]), loaded) as memory:
        return make_parts(loaded, config, progress, memory, shared=shared)


if __name__ == "__main__":
    huge_pages.BLOCK_BYTES = 0  # type: ignore[misc]
    follower.make_parts = measured  # type: ignore[attr-defined,assignment]
    main()
