"""Records torch's profiles."""

import gzip
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.scheduler.request import Chunk

COPY_BYTES: Final = 1 << 20  # at once
GZIP_LEVEL: Final = 3  # makes a profile 20 times smaller


class Profile:
    """A torch profile of what one thread computes."""

    def __init__(self, device: torch.device, facts: Mapping[str, str]) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        for name, value in facts.items():
            self._profile.add_metadata(name, value)

    def step(self, chunks: Sequence[Chunk]) -> AbstractContextManager[object]:
        prompts = [chunk.length for chunk in chunks if chunk.is_prompt]
        return record_function(f"forward: {len(chunks) - len(prompts)} decodes, {sum(prompts)} prompt tokens")

    def stop(self) -> "Recording":
        self._profile.stop()
        return Recording(self._profile)


class Recording:
    def __init__(self, stopped: profile) -> None:
        self._profile = stopped

    def save(self, path: Path) -> None:
        plain = path.with_suffix(".plain.json")
        try:
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "ab", compresslevel=GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target, COPY_BYTES)  # zlib releases the GIL
        finally:
            plain.unlink(missing_ok=True)
