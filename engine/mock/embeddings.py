"""Made-up embeddings: equal texts have equal vectors, other texts have unrelated ones."""

import math
import random
import sys
from array import array

from components.wire.embedding_model import EmbeddingModel


def made_up_vector(checksum: int, model: EmbeddingModel) -> bytes:
    """float32[dimensions], little-endian."""
    draw = random.Random(checksum)
    values = [draw.gauss(0.0, 1.0) for _ in range(model.dimensions)]
    length = math.hypot(*values) if model.normalised else 1.0
    vector = array("f", [value / length for value in values])
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()
