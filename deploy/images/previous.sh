#!/usr/bin/env bash
# Build kvmesh:previous and kvmesh-engine:previous from the code of the last release. Its commit is in previous-release.
# Exit status 3: that commit is missing (a shallow clone, or no clone), and nothing is built.
set -euo pipefail
cd "$(dirname "$0")"
commit=$(sed 's/#.*//' previous-release | tr -d '[:space:]')
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
  echo "previous.sh: commit $commit of deploy/images/previous-release is not in this clone: git fetch --unshallow" >&2
  exit 3
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# A release that lacks one of these folders is built without it.
folders=$(git -C ../.. ls-tree --name-only "$commit" -- kvmesh services simulator controlplane engines LICENSE)
# shellcheck disable=SC2086
git -C ../.. archive "$commit" $folders | tar --extract -C "$folder"

# Use the packages of that release. It may import packages that this release needs no more.
mkdir "$folder/locks"
cp ./*.lock "$folder/locks"
if git cat-file -e "$commit:./service.lock" 2>/dev/null; then
  for lock in ./*.lock; do git show "$commit:$lock" > "$folder/locks/$lock"; done
else  # a release without images: its pins of the packages that a service needs now or needed then, without those `kvmesh up` starts
  {
    git show "$commit:../../pyproject.toml" | sed -n '/^dependencies = \[/,/^\]/s/^ *"\([A-Za-z0-9_-]*\).*/needed \1/p'
    git show "$commit:../../requirements.lock" | sed -n 's/^\([^#=]*\)==\(.*\)/pinned \1 \2/p'
    sed -n 's/^\([^#=]*\)==\(.*\)/now \1 \2/p' service.lock
    sed -n '/^local = /s/"\([A-Za-z0-9_-]*\)==[^"]*"/\nlocal \1\n/gp' ../../pyproject.toml
  } | awk '$1 == "needed" { needed[$2] = 1 } $1 == "pinned" { pinned[$2] = $3 } $1 == "now" { needed[$2] = 1; now[$2] = $3 } $1 == "local" { local[$2] = 1 }
      END { for (name in needed) if (!(name in local)) print name "==" (name in pinned ? pinned[name] : now[name]) }' | LC_ALL=C sort \
    > "$folder/locks/service.lock"
fi
# A release without an HTTP port does not know the option.
cp --preserve=mode entrypoint "$folder/entrypoint"
git grep --quiet --fixed-strings -e --http-port "$commit" -- ../../kvmesh/service_options.py ||
  sed --in-place 's/ --http-port 8080//' "$folder/entrypoint"

SOURCES="$folder" LOCKS="$folder/locks" ENTRYPOINT="$folder/entrypoint" TAG=previous ./build.sh service engine
