"""Answers to those who run the mesh."""

from typing import Literal

from pydantic import BaseModel

from components.openai.fields import IfAsked

WorkerState = Literal["up", "draining", "silent"]


class Health(BaseModel):
    """This process answers; `models` are those that a request may name now, for who might ask them."""

    status: Literal["ok"] = "ok"
    models: IfAsked[list[str]] = None


class Live(BaseModel):
    """This process answers."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether a request would succeed, and if not, why, for who might ask."""

    status: Literal["ready", "unready"]
    reasons: IfAsked[list[str]] = None


class Version(BaseModel):
    """Of kvmesh."""

    version: str


class WorkerLoad(BaseModel):
    """What a worker said of itself last."""

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
    """One registered process of the mesh."""

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
    # silent: it stands in etcd, but sends no heartbeat, or its engine stands still; None: it sends none at all
    state: WorkerState | None
    load: WorkerLoad | None = None


class WorkerList(BaseModel):
    """Everyone in etcd."""

    object: Literal["list"] = "list"
    data: list[Worker] = []
