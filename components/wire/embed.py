"""frontend ↔ decode: texts in, their vectors back in the answer.

`EmbedRequest` goes to `<decode subject>.embed`; `CancelEmbed` to `<decode subject>.cancel_embed`.
"""

from typing import Final

from components.wire.codec import Struct, message
from components.wire.dated import Dated

MAX_TEXTS: Final = 64  # of one message: their vectors come in one, too


@message("embed.v1")
class EmbedRequest(Dated):
    """frontend → decode."""

    request_id: str  # ours and random, another one for each message
    epoch: str  # of the decode instance addressed
    model: str
    texts: list[bytes]  # int32[T] each: the token ids
    cache_salt: str = ""
    priority: int = 0  # lower goes first


@message("vectors.v1")
class Vectors(Struct):
    """decode → frontend: one for each text, in their order."""

    request_id: str
    vectors: list[bytes]  # float32[dimensions] each, little-endian


@message("cancel-embed.v1")
class CancelEmbed(Struct):
    """frontend → decode: nobody waits for these vectors any more."""

    request_id: str


@message("embed-cancelled.v1")
class EmbedCancelled(Struct):
    """decode → frontend: how many of the texts were still to be done."""

    count: int
