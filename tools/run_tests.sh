#!/usr/bin/env bash
# All tests, two at a time: the images are built, the simulations run and exactness is tried beside the unit tests, and the mesh in
# containers is tried beside the mesh in processes. What goes on in the background is shown when it is over.
# Usage: run_tests.sh [BASE]: the images' base, empty makes one. Exit status 0 if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=.venv/bin/python
marks=(-m "not exactness and not upgrade")
beside=(tests/chaos tests/integration/containers tests/integration/images tests/integration/upgrade
  tests/integration/buckets/test_cluster.py tests/integration/faults)
background=""
trap '[ -z "$background" ] || kill "$background" 2>/dev/null' EXIT
trap 'exit 130' INT TERM
mkdir -p .kvmesh

echo "Unit tests; meanwhile images are built, simulations run and exactness is tried, the log is .kvmesh/simulations.log."
{
  trap 'kill "$now" 2>/dev/null' TERM
  TAG=dev BASE="${1:-}" deploy/images/build.sh --if-possible & now=$!
  wait "$now" || { echo "The images could not be built."; exit 1; }
  "$python" -m pytest -q "${marks[@]}" tests/simulation tests/integration/exactness & now=$!
  wait "$now"
} >.kvmesh/simulations.log 2>&1 &
background=$!
"$python" -m pytest -q --ignore=tests/unit/repo tests/unit
tested=$?
wait "$background"
simulated=$?
background=""
cat .kvmesh/simulations.log
[ $tested = 0 ] && [ $simulated = 0 ] || exit 1

echo "The mesh in processes; the mesh in containers and under faults meanwhile, its log is .kvmesh/containers.log."
"$python" -m pytest -q "${marks[@]}" "${beside[@]}" >.kvmesh/containers.log 2>&1 &
background=$!
"$python" -m pytest -q "${marks[@]}" tests/integration --ignore=tests/integration/exactness "${beside[@]/#/--ignore=}"
tested=$?
wait "$background"
contained=$?
background=""
cat .kvmesh/containers.log
[ $tested = 0 ] && [ $contained = 0 ]
