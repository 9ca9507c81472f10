#!/usr/bin/env bash
# Pack for a Python, unpack, and run the proof on the CPU, as on a host whose Python has PyTorch or nothing at all.
# Usage: rehearse.sh PYTHON FOLDER [OPTIONS of run]. Without PyTorch the engines compute the hashed arithmetic.
set -euo pipefail
python=$1 folder=$2
shift 2
rm -rf "$folder"
mkdir -p "$folder"
"$python" -m tools.gpu pack --to "$folder/kvmesh-gpu.tar"
tar xf "$folder/kvmesh-gpu.tar" -C "$folder"
rm "$folder/kvmesh-gpu.tar"
"$python" -m venv --without-pip "$folder/host"
arithmetic=hashed
if torch=$("$python" -c 'import torch; print(torch.__path__[0])' 2>/dev/null); then
  arithmetic=torch
  dirname "$torch" >"$(echo "$folder"/host/lib/python3*/site-packages)/torch.pth"
fi
PYTHON="$folder/host/bin/python" exec "$folder/kvmesh-gpu/run" --cpu --arithmetic "$arithmetic" --to "$folder/results" "$@"
