"""Create etcd users with the rights of their roles.

`python -m components.discovery.etcd_users [ROLE/INSTANCE …]` creates users for certificates with these common names: one
for each role of a mesh, or for single instances.
"""

import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc

from components.discovery.etcd import etcd_client
from components.discovery.etcd_stubs import auth_pb2, etcdrpc
from components.errors import BackendUnavailable
from components.permissions import ADMINISTRATOR, etcd_rights, users_of
from components.settings import MeshSettings

TIMEOUT_S: Final = 5.0


def admit(client: Any, namespace: str, users: Mapping[str, str], passwords: Mapping[str, str] | None = None) -> None:
    """Create users, or update their rights, and turn authentication on, so all others are refused.

    Args:
        users: role by name, or `role/instance`.
        passwords: by name; a user without one needs a certificate with its name.
    Raises: grpc.RpcError.
    """
    stub = etcdrpc.AuthStub(client.channel)
    for role in sorted(set(users.values())):
        _once(stub.RoleAdd, etcdrpc.AuthRoleAddRequest(name=role))
        for right in etcd_rights(namespace, *role.split("/")):
            end = "" if right.is_key else right.prefix[:-1] + chr(ord(right.prefix[-1]) + 1)
            kind = auth_pb2.Permission.READWRITE if right.writes else auth_pb2.Permission.READ
            permission = auth_pb2.Permission(permType=kind, key=right.prefix.encode(), range_end=end.encode())
            stub.RoleGrantPermission(etcdrpc.AuthRoleGrantPermissionRequest(name=role, perm=permission), TIMEOUT_S)
    for user, role in {**users, ADMINISTRATOR: "root"}.items():
        password = (passwords or {}).get(user) or secrets.token_urlsafe(24)  # random, and not kept
        _once(stub.UserAdd, etcdrpc.AuthUserAddRequest(name=user, password=password))
        stub.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=user, role=role), TIMEOUT_S)
    stub.AuthEnable(etcdrpc.AuthEnableRequest(), TIMEOUT_S)


def _once(call: Callable[..., object], request: object) -> None:
    try:
        call(request, TIMEOUT_S)
    except grpc.RpcError as exc:
        if "already exist" not in (exc.details() or ""):
            raise


def main() -> None:
    users = users_of(sys.argv[1:])
    settings = MeshSettings.read([])
    try:
        with etcd_client(settings.etcd_url, settings.etcd_access()) as client:
            admit(client, settings.namespace, users)
    except BackendUnavailable as exc:
        sys.exit(exc.message)


if __name__ == "__main__":
    main()
