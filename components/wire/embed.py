"""frontend ↔ decode: texts on `<decode subject>.embed` and their vectors."""

from typing import Final

from msgspec import field

from components.wire.codec import Dated, Struct, message

MAX_TEXTS: Final = 64


@message("embed.v1")
class EmbedRequest(Dated):
    sent_by = "frontend"

    request_id: str
    epoch: str
    model: str
    texts: list[bytes]  # int32[T] each
    cache_salt: str = ""
    priority: int = 0


@message("vectors.v1")
class Vectors(Struct):
    request_id: str
    vectors: list[bytes]  # float32[dimensions] each, little-endian


@message("cancel-embed.v1")
class CancelEmbed(Struct):
    request_id: str


@message("embed-cancelled.v1")
class EmbedCancelled(Struct):
    count: int


class EmbeddingModel(Struct):
    dimensions: int
    normalised: bool = False  # vectors have length 1
    matryoshka: bool = False  # leading dimensions are a vector, too
    matryoshka_dimensions: list[int] = field(default_factory=list)  # allowed; empty: any
