"""Facts of an embedding model, in instance records and the engine. No I/O."""

from msgspec import field

from components.wire.codec import Struct


class EmbeddingModel(Struct):
    dimensions: int  # of a vector
    normalised: bool = False  # whether its vectors have length 1
    matryoshka: bool = False  # whether leading dimensions make a vector of their own
    matryoshka_dimensions: list[int] = field(default_factory=list)  # allowed numbers of them; empty: any
