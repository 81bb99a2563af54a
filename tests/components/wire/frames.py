"""Frames of a decode instance."""

from collections.abc import Sequence

from components.wire.generate import StreamItem, TokenFrame


def frame_of(instance_id: str, epoch: str, step: int, items: Sequence[StreamItem] = (), number: int = 0) -> TokenFrame:
    frame = TokenFrame(instance_id, epoch, step, number)
    for item in items:
        frame.add(item)
    return frame
