"""`/v1/models`: what is served."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """One model; `max_model_len` and `parent` as vLLM calls them.

    The first is the tokens that prompt and answer may have together, the second the model that an adapter adapts.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvmesh"
    max_model_len: int
    parent: str | None = None


class ModelList(BaseModel):
    """Every model that a request may name now."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
