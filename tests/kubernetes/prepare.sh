#!/usr/bin/env bash
# What `make kubernetes-test` needs: Debian's packages, and Kubernetes 1.20 built from Debian's source, which is the only
# Kubernetes that Debian has. As root, on Debian 12; a quarter of an hour on two cores, once. Everything else is in ~/.cache/kvmesh/kubernetes.
set -euo pipefail
home=${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh/kubernetes
programs="kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy"
export DEBIAN_FRONTEND=noninteractive

apt-get -qq update
apt-get -qq install -y --no-install-recommends containerd runc containernetworking-plugins iptables conntrack ethtool socat \
  iproute2 util-linux dnsmasq-base debootstrap golang-go dpkg-dev rsync jq make patch gcc libc6-dev

mkdir -p "$home/bin"
if [ ! -e "$home/debian/bin/sh" ]; then
  debootstrap --variant=minbase --include="ca-certificates libssl3 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 zlib1g \
    libreadline8 libncursesw6 libstdc++6 libgomp1 libuuid1 libexpat1" bookworm "$home/debian.new"
  mv "$home/debian.new" "$home/debian"
fi

[ -x "$home/bin/kube-proxy" ] && exit
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# The sources of the suite that is installed, whether or not the machine lists them.
mkdir -p lists/partial
{ cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null || true; } | # most machines have one of them
  sed -n 's/^URIs: *//p;s/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' | head -n 1 | sed 's|.*|deb-src & bookworm main|' >sources.list
own=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/lists")
apt-get -qq "${own[@]}" update
apt-get -qq "${own[@]}" source --download-only kubernetes
mkdir kubernetes
tar xzf kubernetes_*.orig.tar.gz --strip-components=1 -C kubernetes
cd kubernetes
printf 'KUBE_GIT_%s\n' COMMIT=0 TREE_STATE=archive VERSION=v1.20.2 MAJOR=1 MINOR=20 >version.sh
HOME=$work GOCACHE=$work/cache GOFLAGS=-mod=vendor KUBE_GIT_VERSION_FILE=$PWD/version.sh \
  make WHAT="$(printf 'cmd/%s ' $programs)"
for program in $programs; do
  cp "_output/local/bin/linux/amd64/$program" "$home/bin/"
done
