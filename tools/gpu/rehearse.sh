#!/usr/bin/env bash
# Pack for this Python, unpack and run the proof on the CPU. Usage: rehearse.sh PYTHON FOLDER
# Without PyTorch the engines compute the hashed arithmetic.
set -euo pipefail
python=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder"
"$python" -m tools.gpu pack --to "$folder/kvmesh-gpu.tar"
tar xf "$folder/kvmesh-gpu.tar" -C "$folder"
arithmetic=hashed
"$python" -c 'import torch' 2>/dev/null && arithmetic=torch
PYTHON=$("$python" -c 'import sys; print(sys.executable)') exec "$folder/kvmesh-gpu/run" \
  --cpu --arithmetic "$arithmetic" --to "$folder/results"
