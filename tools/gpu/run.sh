#!/usr/bin/env bash
# Prove the mesh on this host: ./run [--cpu] [--to FOLDER]. PYTHON names the Python that has PyTorch.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=$(cat "$here/python-version")
python=${PYTHON:-$(command -v "python$version" || command -v python3 || true)}
if [ -z "$python" ]; then
  echo "cannot run: no python$version on PATH; set PYTHON to the Python $version that has PyTorch" >&2
  exit 2
fi
exec "$python" -I "$here/repo/tools/gpu/host_environment.py" "$here" "$@"
