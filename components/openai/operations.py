"""Answers about the server: models, health, readiness, workers."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from components.openai.fields import IfAsked


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


WorkerState = Literal["up", "draining", "silent"]


class Health(BaseModel):
    """The process is alive. `models` is set only for clients that may use them."""

    status: Literal["ok"] = "ok"
    models: IfAsked[list[str]] = None


class Live(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether a request would succeed. `reasons` is set only for clients that may read it."""

    status: Literal["ready", "unready"]
    reasons: IfAsked[list[str]] = None


class Version(BaseModel):
    version: str


class WorkerLoad(BaseModel):
    """A worker's last heartbeat."""

    num_running: int
    num_waiting: int
    num_reserved: int
    num_held: int
    queued_tokens: int
    free_pages: int
    cached_pages: int
    held_pages: int
    total_pages: int


class Worker(BaseModel):
    id: str
    object: Literal["worker"] = "worker"
    role: Literal["frontend", "decode", "prefill", "bootstrap"]
    epoch: str
    host: str
    pid: int
    started: int  # unix time
    model: str | None
    adapters: list[str]
    max_model_len: int | None
    # silent: registered, but without a heartbeat or with a hung engine; None: without heartbeats
    state: WorkerState | None
    load: WorkerLoad | None = None


class WorkerList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Worker] = []
