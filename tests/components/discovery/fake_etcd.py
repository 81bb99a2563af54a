"""etcd members over real gRPC inside this process. They share leases and records; each can end or lose its leader."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from components.discovery.etcd_stubs import etcdrpc as rpc

LOOK_S: Final = 0.1


@dataclass(slots=True)
class Store:
    """The leases and records of a cluster."""

    records: dict[bytes, bytes] = field(default_factory=dict)
    leases: dict[int, bool] = field(default_factory=dict)  # all granted leases: whether they are valid
    ttl_s: int = 0

    def is_alive(self, lease_id: int) -> bool:
        """No lease expires: tests count renewals, which a busy machine only delays."""
        return self.leases.get(lease_id, False)


class Member:
    def __init__(self, store: Store) -> None:
        self.has_leader = True
        self.ranges = 0
        self.watches = 0  # open ones
        self.renewals = 0  # of valid leases
        self._store = store
        self._server = grpc.server(
            ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)]
        )
        for service, calls in self._calls().items():
            handler = grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", calls)
            self._server.add_generic_rpc_handlers((handler,))
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """End it, with all connections."""
        self._server.stop(0).wait()

    def _calls(self) -> dict[str, dict[str, Any]]:
        return {
            "Maintenance": {"Status": _unary(self._status, rpc.StatusRequest, rpc.StatusResponse)},
            "Cluster": {"MemberList": _unary(self._members, rpc.MemberListRequest, rpc.MemberListResponse)},
            "KV": {
                "Range": _unary(self._range, rpc.RangeRequest, rpc.RangeResponse),
                "Put": _unary(self._put, rpc.PutRequest, rpc.PutResponse),
            },
            "Lease": {
                "LeaseGrant": _unary(self._grant, rpc.LeaseGrantRequest, rpc.LeaseGrantResponse),
                "LeaseRevoke": _unary(self._revoke, rpc.LeaseRevokeRequest, rpc.LeaseRevokeResponse),
                "LeaseKeepAlive": _streaming(self._keep_alive, rpc.LeaseKeepAliveRequest, rpc.LeaseKeepAliveResponse),
            },
            "Watch": {"Watch": _streaming(self._watch, rpc.WatchRequest, rpc.WatchResponse)},
        }

    def _quorum(self, context: Any) -> None:
        """Raises: the error of a member without a leader."""
        if not self.has_leader:
            context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")

    def _status(self, _request: Any, _context: Any) -> Any:
        return rpc.StatusResponse(version="3.5.1")  # also without a leader

    def _members(self, _request: Any, _context: Any) -> Any:
        return rpc.MemberListResponse()

    def _range(self, request: Any, context: Any) -> Any:
        self.ranges += 1
        self._quorum(context)
        end = request.range_end or request.key + b"\0"
        found = sorted(item for item in self._store.records.items() if request.key <= item[0] < end)
        shown = found[: request.limit or None]
        response = rpc.RangeResponse(count=len(found), more=len(shown) < len(found))
        response.header.revision = 1
        if not request.count_only:
            for key, value in shown:
                response.kvs.add(key=key, value=value)
        return response

    def _put(self, request: Any, context: Any) -> Any:
        self._quorum(context)
        self._store.records[request.key] = request.value
        return rpc.PutResponse()

    def _grant(self, request: Any, context: Any) -> Any:
        self._quorum(context)
        store = self._store
        store.ttl_s = request.TTL
        lease_id = len(store.leases) + 1
        store.leases[lease_id] = True
        return rpc.LeaseGrantResponse(ID=lease_id, TTL=request.TTL)

    def _revoke(self, request: Any, context: Any) -> Any:
        self._quorum(context)
        self._store.leases[request.ID] = False
        return rpc.LeaseRevokeResponse()

    def _keep_alive(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            self._quorum(context)
            stands = self._store.is_alive(request.ID)
            self.renewals += stands
            yield rpc.LeaseKeepAliveResponse(ID=request.ID, TTL=self._store.ttl_s if stands else 0)

    def _watch(self, _requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Deliver no change. Report a missing leader to a client that requires one."""
        ended = threading.Event()
        context.add_callback(ended.set)
        wants_leader = ("hasleader", "true") in [(item.key, item.value) for item in context.invocation_metadata()]
        self.watches += 1
        try:
            created = rpc.WatchResponse(created=True)
            created.header.revision = 1  # like each range
            yield created
            while not ended.wait(LOOK_S):
                if wants_leader:
                    self._quorum(context)
        finally:
            self.watches -= 1


def _unary(call: Callable[[Any, Any], Any], request: Any, response: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        call, request_deserializer=request.FromString, response_serializer=response.SerializeToString
    )


def _streaming(call: Callable[[Iterator[Any], Any], Iterator[Any]], request: Any, response: Any) -> Any:
    return grpc.stream_stream_rpc_method_handler(
        call, request_deserializer=request.FromString, response_serializer=response.SerializeToString
    )
