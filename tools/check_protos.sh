#!/usr/bin/env bash
# Lint the protos and refuse breaking changes against the last release, the main branch or the previous commit.
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
  echo "buf breaking: skipped, because no earlier commit has protos to compare with."
  exit 0
fi
# A copy instead of .git#ref, which also works in a shallow clone and from a worktree.
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" protos | tar -x -C "$before"
buf breaking protos --against "$before/protos"
