"""frontend ↔ decode: texts and their vectors.

`EmbedRequest` goes to `<decode subject>.embed`; `CancelEmbed` to `<decode subject>.cancel_embed`.
"""

from typing import Final

from msgspec import field

from components.wire.codec import Dated, Struct, message

MAX_TEXTS: Final = 64  # of one message, whose vectors come in one answer


@message("embed.v1")
class EmbedRequest(Dated):
    request_id: str  # ours and random, one for each message
    epoch: str  # of the addressed instance
    model: str
    texts: list[bytes]  # int32[T] each
    cache_salt: str = ""
    priority: int = 0  # lower goes first


@message("vectors.v1")
class Vectors(Struct):
    request_id: str
    vectors: list[bytes]  # float32[dimensions] each, little-endian


@message("cancel-embed.v1")
class CancelEmbed(Struct):
    """frontend → decode: the vectors are not needed any more."""

    request_id: str


@message("embed-cancelled.v1")
class EmbedCancelled(Struct):
    count: int


class EmbeddingModel(Struct):
    dimensions: int  # of a vector
    normalised: bool = False  # whether its vectors have length 1
    matryoshka: bool = False  # whether leading dimensions make a vector of their own
    matryoshka_dimensions: list[int] = field(default_factory=list)  # allowed numbers of them; empty: any
