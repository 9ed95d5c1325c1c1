#!/usr/bin/env bash
# Which method finds the wrong word? Tables of docs/results/which-word.md, from pretrained models.
#
#   run.sh            measure all that is not yet in RESULTS, side by side; some minutes on a GPU with 16 cores
#   run.sh NAME ...   measure some: scenes-truth scenes-written photos-rules photos-fluent alarms-scenes alarms-photos
#   run.sh page       write the tables of RESULTS into the page
#
# PHOTOS=lite2-36 is the folder that reproduction/zoo/build.sh features writes. RESULTS=docs/results/which-word,
# CAPTIONS=1000 false captions per table (and half of that on dev), SCENES=[2000,500,500], EXAMINE=2000, DEVICE=auto.
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
RESULTS=$(realpath -m "${RESULTS:-$here/docs/results/which-word}")
PHOTOS=${PHOTOS:-lite2-36} CAPTIONS=${CAPTIONS:-1000} SCENES=${SCENES:-[2000,500,500]}
EXAMINE=${EXAMINE:-2000} DEVICE=${DEVICE:-auto}
mkdir -p "$RESULTS"

scenes=(--data scenes --option "images=$SCENES")
photos=(--data "$PHOTOS")

# table NAME MODEL ... OPTION ...
table() {
  local name=$1
  shift
  counterfoil evaluate-words "$@" --max-captions "$CAPTIONS" --dev-captions $((CAPTIONS / 2)) \
    --device "$DEVICE" --out "$RESULTS/$name.part.json" --json > /dev/null
  mv "$RESULTS/$name.part.json" "$RESULTS/$name.json"
}

# alarms NAME MODEL OPTION ...
alarms() {
  local name=$1
  shift
  python "$here/benchmarks/false_alarms.py" "$@" --device "$DEVICE" --examine "$EXAMINE" --json \
    --chance "$RESULTS/chance-${name#alarms-}.json" ${COUNTERFOIL_CACHE:+--cache "$COUNTERFOIL_CACHE"} \
    > "$RESULTS/$name.part.json"
  mv "$RESULTS/$name.part.json" "$RESULTS/$name.json"
}

measure() {
  [ ! -f "$RESULTS/$1.json" ] || return 0
  case $1 in
    scenes-truth) table "$1" scenes-naaf scenes-corrector --foils truth "${scenes[@]}" ;;
    scenes-written) table "$1" scenes-naaf scenes-corrector --foils scenes-corrector "${scenes[@]}" ;;
    photos-rules) table "$1" photos-naaf photos-vse --foils rules "${photos[@]}" ;;
    photos-fluent) table "$1" photos-naaf photos-vse --foils fluent "${photos[@]}" ;;
    alarms-scenes) alarms "$1" scenes-naaf "${scenes[@]}" ;;
    alarms-photos) alarms "$1" photos-naaf "${photos[@]}" ;;
    *) echo "run.sh: unknown name '$1'" >&2; return 2 ;;
  esac
}

if [ "${1:-}" = page ]; then
  exec python "$here/reproduction/words/page.py" "$RESULTS" "$here/docs/results/which-word.md"
fi
[ $# -gt 0 ] || set -- scenes-truth scenes-written photos-rules photos-fluent alarms-scenes alarms-photos
pids=() failed=0
for name in "$@"; do
  measure "$name" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit $failed
