"""Answers of `/v1/models`."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A model, with the fields of OpenAI's and of Anthropic's API.

    `max_model_len` limits prompt and answer; `parent` is an adapter's base model. Both as in vLLM.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int  # unix time, in seconds
    created_at: datetime
    owned_by: str = "kvmesh"
    max_model_len: int
    parent: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False
