"""A process's own report, on `<subject>.status`."""

from msgspec import field

from components.wire.codec import Struct, message


@message("status-ask.v1")
class StatusRequest(Struct):
    transport: bool = False  # whether `Status.transport` is wanted


class RoomStatus(Struct):
    """One transfer, aged by the reporting process's clock."""

    room: str
    request_id: str
    state: str
    age_s: float
    peer: str = ""  # the other worker; at bootstrap: the prefill instance


class LinkStatus(Struct):
    """Transfers with one other worker since start."""

    peer: str  # instance id
    transfers: int = 0  # completed
    failures: int = 0
    bytes: int = 0
    seconds: float = 0.0  # of completed transfers
    bytes_per_s: float = 0.0  # of the last seconds


class PageStatus(Struct):
    total: int
    free: int = 0
    cached: int = 0  # by the prefix cache alone
    held: int = 0  # by requests
    exposed: int = 0  # of the held ones: a prefill instance may write into them


class Connection(Struct):
    local: int
    remote: int


class TransportStatus(Struct):
    """What a worker's process has open towards its peers."""

    ports: list[int] = field(default_factory=list)  # all that it listens on
    connections: list[Connection] = field(default_factory=list)  # established, also to etcd and NATS
    shared_memory: bool = False  # a segment of UCX is mapped
    rdma: bool = False  # an RDMA device is open


@message("status.v1")
class Status(Struct):
    instance_id: str
    role: str
    epoch: str = ""
    model: str = ""
    version: str = ""
    host: str = ""
    pid: int = 0
    uptime_s: float = 0.0
    now_unix_s: float = 0.0  # wall clock
    draining: bool = False
    log_level: str = ""
    traces_per_s: float = 0.0
    event_loop_lag_s: float = 0.0  # worst of the last seconds
    etcd_contact_age_s: float = 0.0
    nats_contact_age_s: float = 0.0
    layout: str = ""  # `KvLayout.text`
    kv_transfer: str = ""  # backend
    kv_transport: str = ""  # such as "tcp"; empty: unknown
    queues: dict[str, int] = field(default_factory=dict)  # requests or transfers, by state
    oldest_queued_s: dict[str, float] = field(default_factory=dict)  # by state
    rooms: list[RoomStatus] = field(default_factory=list)  # oldest first, at most MAX_ROOMS
    num_rooms: int = 0  # all
    links: list[LinkStatus] = field(default_factory=list)
    pages: PageStatus | None = None  # of workers
    running: int = 0  # requests
    waiting: int = 0
    tokens_per_s: float = 0.0  # in the last seconds; at prefill, of prompts
    breakers: dict[str, str] = field(default_factory=dict)  # state by instance id
    heartbeat_ages_s: dict[str, float] = field(default_factory=dict)  # by instance id
    transport: TransportStatus | None = None  # None: not requested, not a worker, or unreadable
