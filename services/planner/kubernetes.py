"""Connector for workers in a Kubernetes cluster, by the scale subresource of a Deployment or StatefulSet.

A pod's `terminationGracePeriodSeconds` must be longer than its worker's drain timeout.
"""

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self

from components.errors import BackendUnavailable, Rejected
from components.http.fetch import fetch
from components.planning.planner import Change
from components.planning.samples import PLANNED, Planned
from components.startup import WrongSettings

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
KINDS: Final = {"deployment": "deployments", "statefulset": "statefulsets"}
ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    plural: str
    name: str

    @classmethod
    def parse(cls, text: str, setting: str) -> Self:
        """Read `deployment/NAME` or `statefulset/NAME`. Raises: WrongSettings."""
        kind, _, name = text.partition("/")
        if kind not in KINDS or not name:
            raise WrongSettings(f"setting {setting}: {text!r} is not deployment/NAME or statefulset/NAME")
        return cls(KINDS[kind], name)


@dataclass(frozen=True, slots=True)
class Api:
    url: str
    namespace: str
    account: Path | None = None  # directory of `token`, which is rotated, and `ca.crt`


def in_cluster(url: str | None, namespace: str | None) -> Api:
    """Return the API at `url`, such as a `kubectl proxy`, else of our cluster. Raises: WrongSettings, BackendUnavailable."""
    if url:
        return Api(url, namespace or "default")
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise WrongSettings("not in a Kubernetes cluster: set MESH_PLANNER_KUBERNETES_API")
    try:
        own = (ACCOUNT / "namespace").read_text().strip()
    except OSError as exc:
        raise BackendUnavailable(f"no service account in {ACCOUNT}: {exc.strerror}") from exc
    return Api(f"https://{f'[{host}]' if ':' in host else host}:{port}", namespace or own, ACCOUNT)


class KubernetesConnector:
    """A connector that needs `get` and `patch` on `deployments/scale` (or `statefulsets/scale`)."""

    def __init__(self, api: Api, workloads: Mapping[Planned, Workload]) -> None:
        self._api = api
        self._workloads = workloads

    async def counts(self) -> Mapping[Planned, int]:
        """Raises: BackendUnavailable."""
        return {role: (await self._scale_of(role))[0] for role in PLANNED}

    async def scale(self, change: Change) -> None:
        """Raises: BackendUnavailable; Rejected, if the number has changed meanwhile."""
        replicas, version = await self._scale_of(change.role)
        if replicas != change.before:
            raise Rejected(f"{replicas} {change.role} replicas are requested, not {change.before}")
        patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": change.after}}
        await asyncio.to_thread(self._call, "PATCH", self._path(change.role), json.dumps(patch))

    async def _scale_of(self, role: Planned) -> tuple[int, str]:
        scale = await asyncio.to_thread(self._call, "GET", self._path(role))
        try:
            return int(scale["spec"].get("replicas", 0)), str(scale["metadata"]["resourceVersion"])
        except (LookupError, TypeError, ValueError, AttributeError) as exc:
            raise BackendUnavailable(f"{self._path(role)} is not a scale") from exc

    def _path(self, role: Planned) -> str:
        workload = self._workloads[role]
        return f"/apis/apps/v1/namespaces/{self._api.namespace}/{workload.plural}/{workload.name}/scale"

    def _call(self, method: str, path: str, body: str | None = None) -> Any:
        url, account = self._api.url.rstrip("/"), self._api.account
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            if account is not None:
                headers["Authorization"] = f"Bearer {(account / 'token').read_text().strip()}"
            trust = None
            if url.startswith("https:"):
                trust = ssl.create_default_context(cafile=str(account / "ca.crt") if account else None)
            answer = fetch(url + path, timeout_s=ANSWER_S, method=method, body=body, headers=headers, context=trust)
        except OSError as exc:
            raise BackendUnavailable(f"Kubernetes at {url}: {str(exc) or type(exc).__name__}") from exc
        text = answer.body.decode(errors="replace")
        if answer.status == HTTPStatus.CONFLICT:
            raise Rejected(f"{method} {path}: it has changed meanwhile")
        if answer.status != HTTPStatus.OK:
            raise BackendUnavailable(f"{method} {path}: HTTP {answer.status} {text[:200]}")
        try:
            return json.loads(text)
        except ValueError as exc:
            raise BackendUnavailable(f"{method} {path}: the answer is not JSON") from exc
