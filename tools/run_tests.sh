#!/usr/bin/env bash
# Run all tests, two suites at a time. The images, the simulations and exactness run beside the unit tests. The mesh in
# containers and the whole mesh in processes run beside the other integration tests. The output of a background suite is
# shown at its end. The minutes of each suite come last.
# Usage: run_tests.sh [BASE]    BASE: base of the images; empty makes one. Exit status 0 if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=.venv/bin/python
marks=(-m "not exactness and not upgrade")
slowest=(--durations=15 --durations-min=4)
beside=(tests/chaos tests/abuse tests/integration/containers tests/integration/images tests/integration/upgrade
  tests/integration/buckets/test_cluster.py tests/integration/faults tests/integration/whole)
background=""
trap '[ -z "$background" ] || kill "$background" 2>/dev/null' EXIT
trap 'exit 130' INT TERM
mkdir -p .kvmesh
minutes=.kvmesh/test-minutes
: >"$minutes"

# note_minutes SUITE BEGAN: record the minutes of a suite that began at the second BEGAN of this script.
note_minutes() { awk -v suite="$1" -v s=$((SECONDS - $2)) 'BEGIN { printf "  %-28s %5.1f\n", suite, s / 60 }' >>"$minutes"; }

echo "Unit tests. Images, simulations and exactness run meanwhile; log: .kvmesh/simulations.log."
{
  trap 'kill "$now" 2>/dev/null' TERM
  TAG=dev BASE="${1:-}" deploy/images/build.sh --if-possible & now=$!
  wait "$now" || { echo "The images could not be built."; exit 1; }
  note_minutes "images" 0
  began=$SECONDS
  "$python" -m pytest -q "${slowest[@]}" "${marks[@]}" tests/simulation tests/integration/exactness & now=$!
  wait "$now"
  status=$?
  note_minutes "simulations, exactness" "$began"
  exit $status
} >.kvmesh/simulations.log 2>&1 &
background=$!
"$python" -m pytest -q "${slowest[@]}" --ignore=tests/unit/repo tests/unit
tested=$?
note_minutes "unit" 0
wait "$background"
simulated=$?
background=""
cat .kvmesh/simulations.log
[ $tested = 0 ] && [ $simulated = 0 ] || exit 1

echo "Integration tests. Whole meshes in containers, in processes and under faults run meanwhile; log: .kvmesh/containers.log."
began=$SECONDS
{
  trap 'kill "$now" 2>/dev/null' TERM
  "$python" -m pytest -q "${slowest[@]}" "${marks[@]}" "${beside[@]}" & now=$!
  wait "$now"
  status=$?
  note_minutes "whole meshes, faults, upgrade" "$began"
  exit $status
} >.kvmesh/containers.log 2>&1 &
background=$!
"$python" -m pytest -q "${slowest[@]}" "${marks[@]}" tests/integration --ignore=tests/integration/exactness "${beside[@]/#/--ignore=}"
tested=$?
note_minutes "other integration tests" "$began"
wait "$background"
contained=$?
background=""
cat .kvmesh/containers.log
echo "Minutes of each suite, two suites at a time:"
cat "$minutes"
[ $tested = 0 ] && [ $contained = 0 ]
