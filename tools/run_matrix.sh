#!/usr/bin/env bash
# Run the integration tests with each pair of transports, with and without step frames: eight combinations, LANES at a time.
# A failed combination does not stop the others. Outputs are in .kvmesh/matrix/, and the failed tests of each are shown.
# Usage: run_matrix.sh [EDGE/HOPS/FRAMES...]    such as batched/grpcio/off; none names all. Exit status 0 if all passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

lanes=${LANES:-3}
all=({batched,grpcio}/{batched,grpcio}/{on,off})
chosen=("$@")
[ $# -gt 0 ] || chosen=("${all[@]}")
for one in "${chosen[@]}"; do
  [[ " ${all[*]} " == *" $one "* ]] || { echo "$one is no combination: edge/hops/frames of ${all[*]}" >&2; exit 2; }
done
folder=.kvmesh/matrix
rm -rf "$folder" && mkdir -p "$folder"
trap 'trap - INT TERM; kill $(jobs -p) 2>/dev/null; wait; exit 130' INT TERM

# combination EDGE/HOPS/FRAMES: run it, and say how it ended.
combination() {
  local edge hops frames tests="" log=$folder/${1//\//-}.log began=$SECONDS verdict=passed
  trap '' INT # of a terminal: the script ends its combinations by TERM
  trap 'kill $tests 2>/dev/null; wait; exit 143' TERM
  IFS=/ read -r edge hops frames <<<"$1"
  .venv/bin/python -m pytest -q -m "not exactness and not upgrade" \
    --edge "$edge" --hops "$hops" --step-frames "$frames" tests/integration >"$log" 2>&1 &
  tests=$!
  wait "$tests" || verdict=FAILED
  printf '  %-22s %-7s %4d min  %s\n' "$1" "$verdict" $(((SECONDS - began) / 60)) "$(tail -n 1 "$log")"
  [ $verdict = passed ] || { grep -E '^(FAILED|ERROR) ' "$log"; return 1; }
}

failed=0
echo "${#chosen[@]} combinations of edge/hops/frames, $lanes at a time. Logs: $folder/."
for one in "${chosen[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$lanes" ]; do wait -n || failed=1; done
  combination "$one" &
done
while [ -n "$(jobs -p)" ]; do wait -n || failed=1; done
exit $failed
