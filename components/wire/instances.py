"""What an instance says of itself in etcd, as JSON so that `etcdctl get --prefix` can be read by a person.

Key: `<namespace>/instances/<role>/<instance_id>`, attached to the instance's lease.
"""

from typing import Literal

import msgspec
from msgspec import field

from components.errors import MalformedMessage
from components.kv_transfer.layout import KvLayout
from components.wire.codec import MALFORMED, Struct
from components.wire.embedding_model import EmbeddingModel
from components.wire.protocol import UNNAMED, understood

Role = Literal["frontend", "decode", "prefill", "bootstrap"]


class KvEndpoint(Struct):
    """Where an instance's KV pages are and how its backend reaches them: all that the other side sets up once per pair."""

    backend: str  # as --kv-transfer names it: "nixl/UCX", "mooncake", "fake"; only equal ones speak with each other
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
    """One registered process. A new epoch is a new registration: messages quoting an old one are refused as stale."""

    instance_id: str  # stable while the process lives
    epoch: str  # random, new with every registration
    role: Role
    host: str
    pid: int
    started_unix_ms: int
    subject: str  # NATS subject prefix of this instance: `<namespace>.<role>.<instance_id>`
    model: str | None = None  # the name clients use
    adapters: dict[str, str] = field(default_factory=dict)  # of that model, by the name clients use: their identity
    max_context: int | None = None  # tokens, prompt and output together
    kv: KvEndpoint | None = None
    http: str | None = None  # URL of a frontend or of a metrics page
    metrics: str | None = None  # URL of a frontend's own metrics page: several may share the other one
    kv_events: bool = False  # whether it tells which blocks it has cached
    embedding: EmbeddingModel | None = None  # None: the model generates
    protocol: int = UNNAMED  # what it speaks; see `components/wire/protocol.py`
    oldest_protocol: int = UNNAMED  # what others must speak at least

    @property
    def is_understood(self) -> bool:
        """Whether it and this process can work together."""
        return understood(self.protocol, self.oldest_protocol)


def dump_record(record: InstanceRecord) -> bytes:
    """JSON of `record`."""
    return msgspec.json.encode(record)


def load_record(data: bytes) -> InstanceRecord:
    """The record in `data`. Raises: MalformedMessage."""
    try:
        return msgspec.json.decode(data, type=InstanceRecord)
    except MALFORMED as exc:
        raise MalformedMessage(f"instance record: {exc}") from exc
