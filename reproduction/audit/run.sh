#!/usr/bin/env bash
# The audit on Flickr8k against other methods: noise planted into its captions, three seeds.
#
#   run.sh zoo         pretrained models on test captions, which they have not seen
#   run.sh self        models trained on the noisy training captions, whole and in folds
#   run.sh train       pretrained models on training captions (they were trained on these, clean)
#   run.sh all         all of these, the most telling ones first
#   run.sh lemon       LEMoN's weights for "LEMoN, tuned on dev": prints them, measures nothing
#   run.sh donors      the same with wrong captions of dev, which have no copy among those of test
#   run.sh page        docs/results/flickr8k/audit.md and audit-tables.md from RESULTS
#
# Every cell is stored: a stopped run continues when repeated. DATA is the folder of features that
# reproduction/flickr8k/run.sh makes.
#
# DATA=lite2-36 RESULTS=docs/results/flickr8k/audit SEEDS="0 1 2" JOBS=14 (processes at a time) LIMIT=230 (seconds, 0: none)
# DEVICE=auto MORE: settings of the self-trained models (on a GPU: train.precision=bf16 data.features_on_gpu=true).
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
DATA=$(realpath -m "${DATA:-lite2-36}")
RESULTS=$(realpath -m "${RESULTS:-$here/docs/results/flickr8k/audit}")
SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-14} LIMIT=${LIMIT:-230} DEVICE=${DEVICE:-auto}
if command -v nvidia-smi > /dev/null; then MORE=${MORE-train.precision=bf16 data.features_on_gpu=true}; else MORE=${MORE-}; fi
# All negatives throughout (warmup_epochs): the hardest ones of a noisy batch are often the right captions.
SMALL="model.embed_size=256 objective.hardest.warmup_epochs=20 train.epochs=6 train.batch_size=256 train.optimizer.lr=3e-3 data.workers=0"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
end=$((SECONDS + LIMIT))


# One line per process: a noise, a rate, a seed and what differs.
zoo() {
  local noise rate seed
  for rate in 0.4 0.1 0.05; do for noise in random noun word; do for seed in $SEEDS; do
    echo "--noise $noise --rate $rate --seed $seed --split test --model photos-vse --model photos-naaf"
  done; done; done
}
self() {
  local noise seed
  for noise in random noun word; do for seed in $SEEDS; do
    echo "--noise $noise --rate 0.4 --seed $seed --split train --recipe flickr8k/gpo --folds 1 --folds 2 $SMALL $MORE"
  done; done
  for noise in random noun; do for seed in $SEEDS; do
    echo "--noise $noise --rate 0.4 --seed $seed --split train --recipe flickr8k/gpo --folds 1 --one-caption $SMALL train.epochs=20 $MORE"
  done; done
  for seed in $SEEDS; do for noise in random noun word; do
    echo "--noise $noise --rate 0.1 --rate 0.05 --seed $seed --split train --recipe flickr8k/gpo --folds 1 $SMALL $MORE"
  done; done
}
donors() {
  local noise rate seed
  for rate in 0.1 0.4 0.05; do for noise in noun random; do for seed in $SEEDS; do
    echo "--noise $noise --rate $rate --seed $seed --split test --donors dev --model photos-vse --model photos-naaf"
  done; done; done
}
train() {
  local noise seed
  for noise in random noun word; do for seed in $SEEDS; do
    echo "--noise $noise --rate 0.4 --seed $seed --split train --model photos-vse"
  done; done
}

# Reads lines, JOBS of them at a time, until LIMIT. What a stopped process has measured stays.
measure() {
  local line failed=0
  [ -e "$DATA/features.json" ] || { echo "DATA=$DATA: no features; make them with reproduction/flickr8k/run.sh features" >&2; return 2; }
  mkdir -p "$RESULTS"
  while read -r line; do
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || failed=1; done
    [ "$LIMIT" = 0 ] || [ $SECONDS -lt $end ] || break
    local left=0
    [ "$LIMIT" = 0 ] || left=$((end - SECONDS))
    # shellcheck disable=SC2086
    timeout --kill-after=10 "$left" counterfoil audit benchmark --data "$DATA" --out "$RESULTS" --device "$DEVICE" --markdown \
      $line > /dev/null 2> "$RESULTS/.error-$BASHPID-$RANDOM" < /dev/null &
  done
  while [ -n "$(jobs -rp)" ]; do wait -n || failed=1; done
  find "$RESULTS" -name '.error-*' -size +0 -exec tail -n 2 {} + >&2 || true
  rm -f "$RESULTS"/.error-*
  # one process writes the final files: several at once may each have missed the others' last cells
  counterfoil audit benchmark --out "$RESULTS" --collect
  return $failed
}

step=${1:?see the head of this file}
case $step in
  zoo | self | donors | train) "$step" | measure ;;
  all) { self | sed -n 1,9p; zoo | sed -n 1,9p; self | tail -n +10; zoo | tail -n +10; donors; train; } | measure ;;
  lemon)
    counterfoil audit benchmark --data "$DATA" --split dev --model photos-vse --rate 0.4 --rate 0.1 \
      --seed 10 --seed 11 --seed 12 --device "$DEVICE" --tune-lemon
    ;;
  page)
    for page in audit audit-tables; do
      counterfoil audit benchmark --render-page "$here/docs/results/flickr8k/$page.md" --out "$RESULTS"
    done
    rm -rf "$RESULTS/cells" "$RESULTS/results.md"  # results.json has all cells; the site takes each .md for a page
    ;;
  *) echo "unknown step: $step" >&2; exit 2 ;;
esac
