"""Instance records: JSON in etcd under `<namespace>/instances/<role>/<instance_id>`, attached to a lease."""

from typing import Literal

import msgspec
from msgspec import field

from components.errors import MalformedMessage
from components.wire.codec import MALFORMED, Struct, message
from components.wire.embed import EmbeddingModel
from components.wire.layout import KvLayout
from components.wire.protocol import UNNAMED, understood

Role = Literal["frontend", "decode", "prefill", "bootstrap"]


class KvEndpoint(Struct):
    """Where an instance's KV pages are and how its backend reaches them."""

    backend: str  # as in --kv-transfer: "nixl/UCX", "mooncake", "fake"; only equal ones work together
    agent: str  # unique per process; NIXL's agent name
    agent_metadata: str  # the backend's own: base64 of NIXL's blob, or addresses
    base_address: int
    num_pages: int
    device: str  # "cpu" or "cuda:0"
    aux_address: int
    aux_slots: int
    aux_slot_bytes: int
    layout: KvLayout


class InstanceRecord(Struct):
    instance_id: str  # fixed while the process lives
    epoch: str  # random, new with every registration
    role: Role
    host: str
    pid: int
    started_unix_ms: int
    subject: str  # NATS subject prefix: `<namespace>.<role>.<instance_id>`
    model: str | None = None  # name in the API
    adapters: dict[str, str] = field(default_factory=dict)  # of that model: identity by name
    max_context: int | None = None  # tokens, prompt and output together
    kv: KvEndpoint | None = None
    http: str | None = None  # URL of a frontend or of a metrics page
    metrics: str | None = None  # URL of a frontend's own metrics page: several frontends may share the other one
    kv_events: bool = False  # whether it publishes KV events
    embedding: EmbeddingModel | None = None  # None: the model generates
    protocol: int = UNNAMED  # see `components/wire/protocol.py`
    oldest_protocol: int = UNNAMED  # oldest protocol that it works with

    @property
    def is_understood(self) -> bool:
        return understood(self.protocol, self.oldest_protocol)


def dump_record(record: InstanceRecord) -> bytes:
    return msgspec.json.encode(record)


def load_record(data: bytes) -> InstanceRecord:
    """Raises: MalformedMessage."""
    try:
        return msgspec.json.decode(data, type=InstanceRecord)
    except MALFORMED as exc:
        raise MalformedMessage(f"instance record: {exc}") from exc


@message("ask-present.v1")
class AskPresent(Struct):
    """anyone → `<subject>.present` of an instance whose record left etcd; answered by Present.

    Refused with StaleInstance by another process, with PeerLost by a leaving one.
    """

    epoch: str  # of the missing record


@message("present.v1")
class Present(Struct):
    instance_id: str
