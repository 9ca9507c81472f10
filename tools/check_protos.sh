#!/usr/bin/env bash
# Lints the protos and refuses breaking changes against the last release, the main branch or the commit before.
set -euo pipefail
cd "$(dirname "$0")/.."

buf lint protos

base=""
if git rev-parse --git-dir >/dev/null 2>&1; then
  for candidate in "$(git describe --tags --abbrev=0 2>/dev/null || true)" origin/main HEAD~1; do
    if [ -n "$candidate" ] && git cat-file -e "$candidate:protos/buf.yaml" 2>/dev/null; then
      base=$(git rev-parse "$candidate^{commit}")
      break
    fi
  done
fi
if [ -z "$base" ]; then
  echo "buf breaking: skipped, there is no earlier commit with protos to compare with."
  exit 0
fi
# A copy instead of .git#ref: it also works in a shallow clone and from a worktree.
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" protos | tar -x -C "$before"
buf breaking protos --against "$before/protos"
