#!/usr/bin/env bash
# Build the images. Each is built only if one of its inputs has changed.
#   build.sh [--if-possible] [service|engine|redis|faults ...]     default: all four
#   --if-possible    if Docker or a base is missing, print a message and exit with status 0
#   TAG=dev          of the images: kvmesh:TAG, kvmesh-engine:TAG, kvmesh-redis:TAG, kvmesh-faults:TAG
#   SOURCES=         folder with the kvmesh/, services/, simulator/, controlplane/ and engines/ to build; empty: this repository. For another revision:
#                      git archive REVISION kvmesh services simulator controlplane engines LICENSE | tar -x -C FOLDER
#   LOCKS=           folder with the *.lock that pin their packages; empty: this one
#   ENTRYPOINT=      file that starts the roles; empty: this one's entrypoint
#   BASE=            an image with Python 3.11 of Debian; empty: kvmesh-base:bookworm. base.sh makes it if it is missing. If
#                    base.sh cannot run: python:3.11-slim-bookworm
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd "${SOURCES:-../..}" && pwd)
locks=$(cd "${LOCKS:-.}" && pwd)
entrypoint=$(realpath "${ENTRYPOINT:-entrypoint}")
tag=${TAG:-dev}
base=${BASE:-}
missing=1
if [ "${1:-}" = --if-possible ]; then missing=0; shift; fi
usage() {
  echo "build.sh: $1. Usage: build.sh [--if-possible] [service|engine|redis|faults ...]" >&2
  exit 2
}
for target in "$@"; do
  case "$target" in
    service | engine | redis | faults) ;;
    -h | --help) sed -n '2,/^set /{ /^#/s/^# \{0,1\}//p }' build.sh; exit 0 ;;
    -*) usage "$target is no option" ;;
    *) usage "\"$target\" is no image" ;;
  esac
done
[[ "$tag" =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$ ]] || {
  echo "build.sh: TAG=\"$tag\" is no tag: allowed are up to 128 letters, digits, \".\", \"_\" and \"-\", the first no \".\" or \"-\"." >&2
  exit 2
}
targets=("$@")
[ $# -gt 0 ] || targets=(service engine redis faults)

lack() { echo "build.sh: no images are built: $1" >&2; exit "$missing"; }
command -v docker >/dev/null || lack "docker is missing; on Debian: apt-get install docker.io"
docker version >/dev/null 2>&1 || lack "no Docker daemon answers; start dockerd, or check the access of this user"
# Without its plug-in the client falls back to the classic builder too, but prints a page of advice first.
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0

# One build at a time, because parallel tests may all ask for the images.
exec 9>"${TMPDIR:-/tmp}/kvmesh-images-$tag.lock"
flock 9

has() { docker image inspect "$1" >/dev/null 2>&1; }
made=kvmesh-base:bookworm
if [ -n "$base" ]; then
  has "$base" || docker pull "$base" >&2 || lack "the base $base cannot be pulled"
elif has "$made" && [ -d debs/build ] && [ -d debs/redis ] && [ -d debs/faults ]; then
  base=$made
elif [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; then
  ./base.sh "$made" || lack "the base could not be made"
  base=$made
else
  base=python:3.11-slim-bookworm
  has "$base" || docker pull --quiet "$base" >&2 ||
    lack "the base $base cannot be pulled; base.sh makes one, as root and with debootstrap (apt-get install debootstrap)"
fi

name_of() { [ "$1" = service ] && echo "kvmesh:$tag" || echo "kvmesh-$1:$tag"; }

sources() {  # print the source files of a kvmesh image, one path a line, relative to the root of the repository
  (cd "$root" && find kvmesh services engines $(for each in simulator controlplane; do [ ! -d $each ] || echo $each; done) -type f \( -name '*.py' -o -name '*.lua' -o -name '*.binpb' -o -path 'engines/reference/model/*' \) \
    ! -path 'engines/reference/training/*' ! -path '*/__pycache__/*' | LC_ALL=C sort)
}

digest_of() {  # print the digest of the image $1 over its files (names and contents) and its base
  {
    docker image inspect --format '{{.Id}}' "$base" 2>/dev/null || echo "$base"
    sha256sum Dockerfile
    case "$1" in
      redis | faults) sha256sum install.sh "$1.packages" ;;
      *)
        (cd "$locks" && sha256sum service.lock engine.lock installer.lock)
        sha256sum build.packages install.sh strip.sh kvmesh
        sha256sum < "$entrypoint"
        (cd "$root" && sources | xargs -d '\n' sha256sum)
        ;;
    esac
  } | sha256sum | cut -c1-16
}

stale=()
declare -A digests
for target in "${targets[@]}"; do
  digests[$target]=$(digest_of "$target")
  is=$(docker image inspect --format '{{index .Config.Labels "kvmesh.sources"}}' "$(name_of "$target")" 2>/dev/null || true)
  [ "$is" = "${digests[$target]}" ] || stale+=("$target")
done

if [ ${#stale[@]} -gt 0 ]; then
  context=$(mktemp -d)
  trap 'rm -rf "$context" "$context.log"' EXIT
  mkdir -p "$context"/{wheelhouse,debs/{build,redis,faults},src}
  cp Dockerfile "$locks"/*.lock ./*.packages strip.sh install.sh kvmesh "$context"
  cp --preserve=mode "$entrypoint" "$context/entrypoint"
  [ ! -d debs ] || cp -R debs/. "$context/debs"
  case " ${stale[*]} " in
    *" service "* | *" engine "*)
      house=$(LOCKS=$locks ./wheelhouse.sh)
      cp "$house"/*.whl "$context/wheelhouse"
      (cd "$root" && sources | tar --create --files-from=- --mode=u=rwX,go=rX) | tar --extract -C "$context/src"
      cp "$root/LICENSE" "$context/src"
      ;;
  esac
  version=$(sed -n 's/^__version__.*"\(.*\)"$/\1/p' "$root/kvmesh/__init__.py")
  revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
  for target in "${stale[@]}"; do
    started=$SECONDS
    docker build --build-arg "BASE=$base" --target "$target" --tag "$(name_of "$target")" \
      --label "kvmesh.sources=${digests[$target]}" \
      --label "org.opencontainers.image.title=$(name_of "$target" | cut -d: -f1)" \
      --label "org.opencontainers.image.version=$version" \
      --label "org.opencontainers.image.revision=$revision" \
      --label "org.opencontainers.image.licenses=Apache-2.0" \
      "$context" >"$context.log" 2>&1 || { cat "$context.log" >&2; exit 1; }
    echo "build.sh: $(name_of "$target") in $((SECONDS - started)) s" >&2
  done
fi

printf '%-24s %8s  %s\n' image MB sources
for target in "${targets[@]}"; do
  name=$(name_of "$target")
  docker image inspect --format '{{.Size}} {{index .Config.Labels "kvmesh.sources"}}' "$name" |
    awk -v name="$name" '{ printf "%-24s %8.0f  %s\n", name, $1 / 1e6, $2 }'
done
