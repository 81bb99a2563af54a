"""`/v1/models`: what is served."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """One model; `max_model_len`, as vLLM calls it, is the tokens that prompt and answer may have together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvmesh"
    max_model_len: int


class ModelList(BaseModel):
    """Every model that a request may name now."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
