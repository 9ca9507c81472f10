#!/usr/bin/env bash
# Run all tests in three lanes at a time. Two lanes have tests of processes and of containers, which mostly wait. The third
# lane has what only computes, and uses the time that the others leave: at low priority, so that it delays no test that waits.
# The output of the first lane is shown as it comes, that of the others at their end. The minutes of each suite come last.
# Usage: run_tests.sh [BASE]    BASE: base of the images; empty makes one. Exit status 0 if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=.venv/bin/python
containers=(tests/chaos tests/integration/containers tests/integration/images tests/integration/upgrade)
meshes=(tests/integration/exactness tests/integration/faults tests/integration/whole)
logs=(.kvmesh/lane-meshes.log .kvmesh/lane-computed.log)
lanes=()
running=""
trap 'kill $running "${lanes[@]}" 2>/dev/null' EXIT
trap 'exit 130' INT TERM
# Tests start thousands of processes. Without bytecode each would compile the sources anew, for half of its start.
"$python" -m compileall -q kvmesh services controlplane simulator engines bench tests tools

mkdir -p .kvmesh
minutes=.kvmesh/test-minutes
: >"$minutes"

# timed NAME COMMAND...: run a command and note its minutes. A signal to the lane ends it.
timed() {
  local name=$1 began=$SECONDS status
  shift
  "$@" &
  running=$!
  wait "$running"
  status=$?
  running=""
  awk -v name="$name" -v s=$((SECONDS - began)) 'BEGIN { printf "  %-28s %5.1f\n", name, s / 60 }' >>"$minutes"
  return $status
}

# suite NAME PATHS...: run the tests of some paths.
suite() {
  local name=$1
  shift
  timed "$name" "$python" -m pytest -q --durations=15 --durations-min=4 -m "not exactness and not upgrade" "$@"
}

# lane LOG FUNCTION ARGUMENTS...: run a function in the background.
lane() {
  local log=$1
  shift
  { trap 'kill $running 2>/dev/null; exit 143' TERM; "$@"; } >"$log" 2>&1 &
  lanes+=($!)
}

# test_meshes BASE: the images, then whole meshes, then containers. Faults in containers judge times, so they come when the third
# lane has ended. Without a Docker engine the tests of images and containers are skipped.
test_meshes() {
  local status=0
  TAG=dev BASE=$1 timed "images" deploy/images/build.sh --if-possible || { echo "The images could not be built."; status=1; }
  suite "whole meshes, faults" "${meshes[@]}" || status=1
  suite "containers, chaos, upgrade" "${containers[@]}" || status=1
  return $status
}

test_computed() {
  local status=0
  renice -n 10 -p "$BASHPID" >/dev/null
  suite "unit" --ignore=tests/unit/repo tests/unit || status=1
  suite "simulations" tests/simulation || status=1
  return $status
}

echo "Integration tests. Containers, whole meshes and unit tests run meanwhile; logs: ${logs[*]}."
lane "${logs[0]}" test_meshes "${1:-}"
lane "${logs[1]}" test_computed
status=0
others=("${containers[@]}" "${meshes[@]}")
suite "other integration, abuse" tests/integration tests/abuse "${others[@]/#/--ignore=}" || status=1
for each in "${lanes[@]}"; do wait "$each" || status=1; done
lanes=()
cat "${logs[@]}"
echo "Minutes of each suite, three lanes at a time:"
cat "$minutes"
exit $status
