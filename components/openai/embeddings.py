"""`/v1/embeddings`: request and answer."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import BaseModel, Field, JsonValue, PlainValidator

from components.errors import Rejected
from components.openai.completions import prompts
from components.openai.fields import INT32_MAX, Priority, Strict
from components.openai.parts import Parts, filled
from components.wire.embed import EmbeddingModel

MAX_INPUTS: Final = 2048  # OpenAI's limit


def _inputs(value: JsonValue) -> list[str | list[int]]:
    return prompts(value, MAX_INPUTS)


class EmbeddingRequest(Strict):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    input: Annotated[
        list[str | list[int]],
        PlainValidator(_inputs, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    # vLLM's extensions
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # -1: as many as fit
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Priority | None = None

    def check(self, model: EmbeddingModel) -> None:
        """Raises: Rejected if the vectors cannot be truncated to `dimensions`."""
        wanted = self.dimensions
        if wanted is None or wanted == model.dimensions:
            return
        if wanted > model.dimensions:
            reason = f"its vectors have {model.dimensions}"
        elif not model.matryoshka:
            reason = (
                "its config.json does not say is_matryoshka: leave 'dimensions' out, or set MESH_ENGINE__MATRYOSHKA=true "
                "on the workers if its authors say elsewhere that its vectors may be cut"
            )
        elif model.matryoshka_dimensions and wanted not in model.matryoshka_dimensions:
            reason = f"its vectors may be cut to {', '.join(map(str, model.matryoshka_dimensions))}"
        else:
            return
        raise Rejected(
            f"The model '{self.model}' has no embeddings of {wanted} dimensions: {reason}.",
            param="dimensions",
            code="invalid_value",
        )


class Embedding(BaseModel):
    """One vector; base64 encodes little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Number of tokens in all inputs, including special tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """One vector for each input, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def embedding_list(
    vectors: Sequence[bytes], request: EmbeddingRequest, model: EmbeddingModel, num_tokens: int
) -> Parts:
    """The JSON of an `EmbeddingList`, vector by vector; `vectors` are float32[dimensions]."""
    shown = (
        Embedding(index=i, embedding=_shown(np.frombuffer(vector, "<f4"), request, model)).model_dump_json().encode()
        for i, vector in enumerate(vectors)
    )
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return filled(EmbeddingList(data=[], model=request.model, usage=usage), data=shown)


def _shown(
    vector: "np.ndarray[tuple[int], np.dtype[np.float32]]", request: EmbeddingRequest, model: EmbeddingModel
) -> list[float] | str:
    if request.dimensions is not None and request.dimensions < len(vector):
        vector = vector[: request.dimensions]
        if model.normalised:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return b64encode(vector.tobytes()).decode() if request.encoding_format == "base64" else vector.tolist()
