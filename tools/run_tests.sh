#!/usr/bin/env bash
# Run `make check` and all tests in three lanes at a time. The first has the checks, the simulations, exactness, and the integration
# tests; failed checks end all lanes. The second has the images, and then the mesh in containers and the whole mesh in processes.
# The third has the unit tests. It takes only the time of the processors that the others leave. Outputs of the second and the
# third lane are shown at their end. The minutes of each suite come last.
# Usage: run_tests.sh [BASE]    BASE: base of the images; empty makes one. Exit status 0 if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=.venv/bin/python
marks=(-m "not exactness and not upgrade")
slowest=(--durations=15 --durations-min=4)
beside=(tests/chaos tests/abuse tests/integration/containers tests/integration/images tests/integration/upgrade
  tests/integration/buckets/test_cluster.py tests/integration/faults tests/integration/warmup tests/integration/whole)
background=()
is_first=true
trap '[ ${#background[@]} = 0 ] || kill "${background[@]}" 2>/dev/null' EXIT
trap 'exit 130' INT TERM
# Tests start thousands of processes. Without bytecode each would compile the sources anew, for half of its start.
"$python" -m compileall -q kvmesh services controlplane simulator engines bench tests tools

mkdir -p .kvmesh
minutes=.kvmesh/test-minutes
: >"$minutes"

# note_minutes SUITE BEGAN: record the minutes of a suite that began at the second BEGAN of this script.
note_minutes() { awk -v suite="$1" -v s=$((SECONDS - $2)) 'BEGIN { printf "  %-28s %5.1f\n", suite, s / 60 }' >>"$minutes"; }

# suite NAME PATHS...: run one suite and note its minutes. In the other lanes a signal ends it.
suite() {
  local name=$1 began=$SECONDS status
  shift
  local command=("$python" -m pytest -q "${slowest[@]}" "${marks[@]}" "$@")
  if $is_first; then
    "${command[@]}"
  else
    "${command[@]}" & now=$!
    wait "$now"
  fi
  status=$?
  note_minutes "$name" "$began"
  return $status
}

echo "Checks, simulations, integration tests. Whole meshes and unit tests run meanwhile; logs: .kvmesh/{meshes,unit}.log."
{
  is_first=false
  trap 'kill "$now" 2>/dev/null; exit 143' TERM
  TAG=dev BASE="${1:-}" deploy/images/build.sh --if-possible & now=$!
  wait "$now" || { echo "The images could not be built."; exit 1; }
  note_minutes "images" 0
  suite "whole meshes, faults, upgrade" "${beside[@]}"
} >.kvmesh/meshes.log 2>&1 &
background=($!)
{
  is_first=false
  trap 'kill "$now" 2>/dev/null; exit 143' TERM
  renice -n 10 -p "$BASHPID" >/dev/null
  suite "unit" --ignore=tests/unit/repo tests/unit
} >.kvmesh/unit.log 2>&1 &
background+=($!)
"${MAKE:-make}" check || exit 1
note_minutes "check" 0
suite "simulations, exactness" tests/simulation tests/integration/exactness
simulated=$?
suite "other integration tests" tests/integration --ignore=tests/integration/exactness "${beside[@]/#/--ignore=}"
integrated=$?
wait "${background[0]}"
meshed=$?
wait "${background[1]}"
unit=$?
background=()
cat .kvmesh/unit.log .kvmesh/meshes.log
echo "Minutes of each suite, three lanes at a time:"
cat "$minutes"
[ $unit = 0 ] && [ $simulated = 0 ] && [ $integrated = 0 ] && [ $meshed = 0 ]
