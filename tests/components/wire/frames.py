"""Frames as a decode instance sends them."""

from components.wire.generate import FrameDraft, TokenFrame


def pack_frame(frame: TokenFrame) -> bytes:
    draft = FrameDraft()
    for item in frame.items:
        draft.add(item)
    return draft.pack(frame.instance_id, frame.epoch, frame.step, frame.number)
