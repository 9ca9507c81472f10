#!/usr/bin/env bash
# Run `make check` and all tests in three lanes at a time. The first begins with the checks and exactness; failed checks end all
# lanes. The second begins with the images and the tests that need them. The third begins with the unit tests and the simulations,
# which take only the time of the processors that the others leave. Then each lane takes the next suite of one queue, so that all
# end at about the same time. Outputs of the second and the third lane are shown at their end. The minutes of each suite come last.
# Usage: run_tests.sh [BASE]    BASE: base of the images; empty makes one. Exit status 0 if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=.venv/bin/python
marks=(-m "not exactness and not upgrade")
slowest=(--durations=15 --durations-min=4)
with_images=(tests/integration/images tests/integration/containers tests/chaos)
# The longest first. Upgrades need the images, which are long made when a lane comes to them.
queued=(whole faults frontend cli warmup docs upgrade replicas trust control client)
background=()
now=""
priority=()
# Failed checks and signals end the lanes that still run, and show how far they came.
end_lanes() {
  local status=$?
  trap - EXIT
  kill ${now:+"$now"} "${background[@]}" 2>/dev/null
  wait
  [ ${#background[@]} = 0 ] || cat .kvmesh/unit.log .kvmesh/meshes.log
  exit $status
}
trap end_lanes EXIT
trap 'exit 130' INT TERM
# Tests start thousands of processes. Without bytecode each would compile the sources anew, for half of its start.
"$python" -m compileall -q kvmesh services controlplane simulator engines bench tests tools

mkdir -p .kvmesh
minutes=.kvmesh/test-minutes
queue=.kvmesh/test-queue
: >"$minutes"
{
  named=("${with_images[@]}" tests/integration/exactness "${queued[@]/#/tests/integration/}")
  echo "other tests/integration ${named[*]/#/--ignore=}"
  for name in "${queued[@]}"; do echo "$name tests/integration/$name"; done
  echo "abuse tests/abuse"
} >"$queue"

# note_minutes SUITE BEGAN: record the minutes of a suite that began at the second BEGAN of this script.
note_minutes() { awk -v suite="$1" -v s=$((SECONDS - $2)) 'BEGIN { printf "  %-28s %5.1f\n", suite, s / 60 }' >>"$minutes"; }

# run COMMAND...: run it so that a signal ends it and this shell at once.
run() {
  "$@" & now=$!
  wait "$now"
  local status=$?
  now=""
  return $status
}

# suite NAME PATHS...: run one suite and note its minutes.
suite() {
  local name=$1 began=$SECONDS status
  shift
  run "${priority[@]}" "$python" -m pytest -q "${slowest[@]}" "${marks[@]}" "$@"
  status=$?
  note_minutes "$name" "$began"
  return $status
}

# work: run the suites of the queue until none is left. Exit status 0 if all of them passed.
work() {
  local status=0 words
  while words=$(flock "$queue.lock" sh -c 'head -n 1 "$1"; sed -i 1d "$1"' - "$queue") && [ -n "$words" ]; do
    read -r -a words <<<"$words"
    suite "${words[@]}" || status=1
  done
  return $status
}

# begin_lane: prepare the shell of a lane in the background. A signal ends the lane and what it runs.
begin_lane() {
  trap - EXIT INT
  trap '[ -z "$now" ] || kill "$now" 2>/dev/null; wait; exit 143' TERM
}

echo "Three lanes. Shown at once: checks, exactness, integration tests. Logs of the others: .kvmesh/{meshes,unit}.log."
{
  begin_lane
  TAG=dev BASE="${1:-}" run deploy/images/build.sh --if-possible || { echo "The images could not be built."; exit 1; }
  note_minutes "images" 0
  suite "in containers" "${with_images[@]}"
  contained=$?
  work && exit $contained
} >.kvmesh/meshes.log 2>&1 &
background=($!)
{
  begin_lane
  priority=(nice -n 5)
  suite "unit, simulations" --ignore=tests/unit/repo tests/unit tests/simulation
  unit=$?
  priority=()
  work && exit $unit
} >.kvmesh/unit.log 2>&1 &
background+=($!)
run "${MAKE:-make}" check || exit 1
note_minutes "check" 0
suite "exactness" tests/integration/exactness
exact=$?
work
worked=$?
wait "${background[0]}"
meshed=$?
wait "${background[1]}"
unit=$?
background=()
cat .kvmesh/unit.log .kvmesh/meshes.log
echo "Minutes of each suite, three lanes at a time:"
cat "$minutes"
if [ -s "$queue" ]; then
  echo "These suites did not run:"
  cat "$queue"
  exit 1
fi
[ $unit = 0 ] && [ $exact = 0 ] && [ $worked = 0 ] && [ $meshed = 0 ]
