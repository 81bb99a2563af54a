"""Instance records: JSON in etcd under `<namespace>/instances/<role>/<instance_id>`."""

from typing import Literal

import msgspec
from msgspec import field

from components.errors import MalformedMessage
from components.wire.codec import MALFORMED, UNNAMED, Struct, Subject, message, understood
from components.wire.embed import EmbeddingModel
from components.wire.layout import KvLayout, of_shard

Role = Literal["frontend", "decode", "prefill", "bootstrap"]


class RankEndpoint(Struct):
    """A follower; its pages are the instance's, with its own heads."""

    pid: int
    device: str
    base_address: int
    agent: str = ""
    agent_metadata: str = ""
    aux_address: int = 0  # as many slots as the first rank has


class KvEndpoint(Struct):
    backend: str  # as in --kv-transfer
    agent: str
    agent_metadata: str  # base64, or a backend's addresses
    base_address: int
    num_pages: int
    device: str  # "cpu" or "cuda:0"
    aux_address: int
    aux_slots: int
    aux_slot_bytes: int
    layout: KvLayout
    followers: list[RankEndpoint] = field(default_factory=list)  # from rank 1 on

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on all ranks."""
        shards = self.layout.shards
        return sum(of_shard(self.layout, shard, shards).page_bytes for shard in range(shards))

    @property
    def devices(self) -> list[str]:
        return [self.device, *(rank.device for rank in self.followers)]


class InstanceRecord(Struct):
    instance_id: str  # random, per process
    epoch: str  # random, per registration
    role: Role
    host: str
    pid: int
    started_unix_ms: int
    subject: Subject
    model: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)  # hash of each adapter's weights, by name
    max_context: int | None = None  # tokens of prompt and output
    kv: KvEndpoint | None = None
    http: str | None = None
    metrics: str | None = None  # a URL; several frontends may share `http`
    kv_events: bool = False
    embedding: EmbeddingModel | None = None
    protocol: int = UNNAMED
    oldest_protocol: int = UNNAMED
    max_running: int = 0  # requests of a step; 0: no engine
    max_step_tokens: int = 0

    @property
    def is_understood(self) -> bool:
        return understood(self.protocol, self.oldest_protocol)


def dump_record(record: InstanceRecord) -> bytes:
    return msgspec.json.encode(record)


def load_record(data: bytes) -> InstanceRecord:
    try:
        return msgspec.json.decode(data, type=InstanceRecord)
    except MALFORMED as exc:
        raise MalformedMessage(f"instance record: {exc}") from exc


@message("ask-present.v1")
class AskPresent(Struct):
    """On `<subject>.present` of an instance whose record left etcd.

    Another process refuses with StaleInstance, a leaving one with PeerLost.
    """

    epoch: str


@message("present.v1")
class Present(Struct):
    instance_id: str
