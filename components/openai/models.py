"""Answers of `/v1/models`."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A model. `max_model_len` limits prompt and answer; `parent` is an adapter's base model. Both as in vLLM."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvmesh"
    max_model_len: int
    parent: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
