"""What an instance says of a model that makes embeddings. No I/O: the engine says it first."""

from msgspec import field

from components.wire.codec import Struct


class EmbeddingModel(Struct):
    """Of a model that makes embeddings, and generates nothing."""

    dimensions: int  # of a vector
    normalised: bool = False  # whether its vectors have length 1
    matryoshka: bool = False  # whether the first of its dimensions make a vector of their own
    matryoshka_dimensions: list[int] = field(default_factory=list)  # so many of them; none: any number
