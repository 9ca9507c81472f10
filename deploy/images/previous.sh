#!/usr/bin/env bash
# Build kvmesh:previous and kvmesh-engine:previous: the code of the last release, whose commit is in previous-release.
# Exit status 3: that commit is not here (a shallow clone, or no clone at all), and nothing is built.
set -euo pipefail
cd "$(dirname "$0")"
commit=$(sed 's/#.*//' previous-release | tr -d '[:space:]')
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
  echo "previous.sh: commit $commit of deploy/images/previous-release is not in this clone: git fetch --unshallow" >&2
  exit 3
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git -C ../.. archive "$commit" kvmesh services engines LICENSE | tar --extract -C "$folder"
SOURCES="$folder" TAG=previous ./build.sh service engine
