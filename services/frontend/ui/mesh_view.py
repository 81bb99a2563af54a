"""The mesh as `/ui` shows it: instances with load and state, and the links of KV transfers between them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from components.discovery.book import InstanceBook
from components.messaging.liveness import Liveness
from components.telemetry.links import links_between
from components.version import VERSION
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from components.wire.status import Status
from services.frontend.operations import Seen
from services.frontend.ui.feed import Fields, View

ROLES: Final[tuple[Role, ...]] = ("frontend", "bootstrap", "prefill", "decode")
WARMING_S: Final = 3.0  # a new instance may be without a heartbeat this long
OLD_BEAT_S: Final = 1.5  # an older heartbeat is shown with its age
NATS_SILENCE_S: Final = 2.5  # after this time without an answer from NATS, the picture is old
MAX_BREAKERS: Final = 16  # shown of one instance


class State(NamedTuple):
    name: str
    why: str = ""  # for humans


UP: Final = State("up")
WARMING: Final = State("warming", "registered; no heartbeat yet")
SILENT: Final = State("silent", "it does not answer, or its engine has stalled")


@dataclass(slots=True)
class Reports:
    prefills: Seen | None = None  # answers to the last query
    statuses: dict[str, Status] = field(default_factory=dict)  # by instance id
    unanswered: dict[str, int] = field(default_factory=dict)  # by instance id: status calls in a row


class MeshView:
    def __init__(
        self,
        book: InstanceBook,
        decodes: Liveness,
        reports: Reports,
        about: Fields,
        clock: Callable[[], float] = time.time,
        *,
        nats_contact_age_s: Callable[[], float],
    ) -> None:
        """`about`: constant facts, such as the namespace. `nats_contact_age_s`: time since NATS answered this process."""
        self._book = book
        self._decodes = decodes
        self._reports = reports
        self._about = about
        self._clock = clock
        self._nats_contact_age_s = nats_contact_age_s

    def snapshot(self, samples: Sequence[Fields] = ()) -> View:
        records = [record for role in ROLES for record in self._book.of_role(role)]
        known = {record.instance_id: record for record in records}
        ages_s = self._decodes.ages_s()
        instances = {r.instance_id: self._instance(r, ages_s.get(r.instance_id, 0.0)) for r in records}
        silent_s = self._nats_contact_age_s()
        about = {
            **self._about,
            "asked": bool(self._reports.statuses),
            "nats_away": round(silent_s) if silent_s > NATS_SILENCE_S else 0,
        }
        return View(instances, self._links(known), about, tuple(samples))

    def _instance(self, record: InstanceRecord, silent_s: float) -> dict[str, Any]:
        beat = self._beat(record)
        status = self._reports.statuses.get(record.instance_id)
        state = self._state(record, beat)
        shown: dict[str, Any] = {
            "role": record.role,
            "state": state.name,
            "host": record.host,
            "pid": record.pid,
            "started": record.started_unix_ms // 1000,
            "model": record.model,
            "metrics": record.metrics or record.http,
        }
        if record.kv is not None and len(record.kv.devices) > 1:
            shown["devices"] = record.kv.devices
        if state.why:
            shown["why"] = state.why
        if record.role == "frontend":
            shown["url"] = record.http
        if beat is not None:
            shown |= _load(beat)
        if silent_s > OLD_BEAT_S:
            shown["beat_age"] = round(silent_s)
        if status is not None and status.epoch in ("", record.epoch):
            shown |= _reported(status, with_load=beat is None)
        return shown

    def _beat(self, record: InstanceRecord) -> Heartbeat | None:
        if record.role == "decode":
            return self._decodes.last_heartbeat(record.instance_id)
        if record.role == "prefill" and self._reports.prefills is not None:
            return self._reports.prefills.last_heartbeat(record.instance_id)
        return None

    def _state(self, record: InstanceRecord, beat: Heartbeat | None) -> State:
        status = self._reports.statuses.get(record.instance_id)
        if not record.is_understood:
            return State("foreign", "it uses another protocol version: upgrade it, or this frontend")
        if (beat is not None and beat.draining) or (status is not None and status.draining):
            return State("draining", "it finishes its requests and accepts no new ones")
        if record.role == "decode":
            return self._decode_state(record.instance_id, beat)
        if record.role == "prefill":
            is_new = self._clock() - record.started_unix_ms / 1000 < WARMING_S
            seen = self._reports.prefills
            if is_new and beat is None:
                return WARMING
            return SILENT if seen is not None and seen.is_lost(record.instance_id) else UP
        return SILENT if self._reports.unanswered.get(record.instance_id, 0) > 1 else UP

    def _decode_state(self, instance_id: str, beat: Heartbeat | None) -> State:
        if self._decodes.is_lost(instance_id):
            return SILENT
        if beat is None:
            return WARMING
        return UP if self._decodes.is_usable(instance_id) else State("late", "no heartbeat or step for a second")

    def _links(self, known: Mapping[str, InstanceRecord]) -> dict[str, Fields]:
        roles = {instance_id: record.role for instance_id, record in known.items()}
        reported = {instance_id: status.links for instance_id, status in self._reports.statuses.items()}
        return {
            f"{prefill}>{decode}": {
                "from": prefill,
                "to": decode,
                "transfers": link.transfers,
                "failures": link.failures,
                "bytes": link.bytes,
                "bytes_per_s": round(link.bytes_per_s),
                "seconds": round(link.seconds, 3),
            }
            for (prefill, decode), link in links_between(roles, reported).items()
        }


def _load(beat: Heartbeat) -> dict[str, Any]:
    return {
        "running": beat.num_running,
        "waiting": beat.num_waiting,
        "reserved": beat.num_reserved,
        "finished_held": beat.num_held,
        "free": beat.free_pages,
        "cached": beat.cached_pages,
        "held": beat.held_pages,
        "total": beat.total_pages,
        "queued_tokens": beat.queued_tokens,
        "accepted": beat.accepted,
    }


def _reported(status: Status, *, with_load: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "tps": round(status.tokens_per_s, 1),
        "rooms": status.num_rooms,
        "queues": {name: count for name, count in status.queues.items() if count},
        "oldest": {name: round(age, 1) for name, age in status.oldest_queued_s.items() if age >= 0.1},
        "lag_ms": round(1000 * status.event_loop_lag_s),
        "etcd_age": round(status.etcd_contact_age_s),
        "nats_age": round(status.nats_contact_age_s),
        "version": status.version,
        "layout": status.layout,
        "kv": " ".join(filter(None, (status.kv_transfer, status.kv_transport))),
    }
    if status.pages is not None:
        shown["exposed"] = status.pages.exposed
    if with_load:
        shown |= {"running": status.running, "waiting": status.waiting}
    if open_breakers := {i: state for i, state in status.breakers.items() if state != "closed"}:
        shown["breakers"] = dict(sorted(open_breakers.items())[:MAX_BREAKERS])
    return {name: value for name, value in shown.items() if value not in ("", {})}


def about_mesh(namespace: str, model: str, instance_id: str) -> Fields:
    return {"namespace": namespace, "model": model, "frontend": instance_id, "version": VERSION}
