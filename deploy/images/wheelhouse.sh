#!/usr/bin/env bash
# Fill deploy/images/wheelhouse with the wheels for the images. The build itself then needs no network.
#   wheelhouse.sh [PIP]        default .venv/bin/pip, else pip
# Fetches only missing wheels, for Python 3.11 on x86-64 on any machine. Removes wheels that no lock names any more. Prints
# the folder.
#   LOCKS=             folder with other locks, such as those of the last release; their wheels are in wheelhouse/previous
set -euo pipefail
cd "$(dirname "$0")"

pip=${1:-}
[ -n "$pip" ] || { [ -x ../../.venv/bin/pip ] && pip=../../.venv/bin/pip; } || pip=pip
from=$(cd "${LOCKS:-.}" && pwd)
house=wheelhouse
[ "$from" = "$PWD" ] || house=wheelhouse/previous
locks=("$from/service.lock" "$from/engine.lock" "$from/installer.lock")
stamp=$house/.locks
echo "$house"

if [ -f "$stamp" ] && cat "${locks[@]}" | cmp -s - "$stamp"; then
  exit 0
fi
mkdir -p "$house"
rm -f "$stamp"
platforms=()
for glibc in 36 35 34 31 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
echo "wheelhouse.sh: fetching the packages of $(cat "${locks[@]}" | grep -c ==) pins" >&2
fresh=$(mktemp -d "$house/fresh.XXXXXX")
trap 'rm -rf "$fresh"' EXIT
"$pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
  --implementation cp --abi cp311 --abi abi3 --abi none "${platforms[@]}" --find-links wheelhouse --find-links "$house" \
  --dest "$fresh" "${locks[@]/#/--requirement=}" >&2
rm -f "$house"/*.whl
mv "$fresh"/*.whl "$house"/
cat "${locks[@]}" > "$stamp"
du -sh "$house" | awk '{ print "wheelhouse.sh: " $1 }' >&2
