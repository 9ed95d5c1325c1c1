#!/usr/bin/env bash
# Flickr8k from photos to tables, step by step. Every step can be stopped and called again; what is done
# is not done twice. Data and runs lie in WORK, the numbers in RESULTS, nothing in the repository.
#
#   run.sh features [lite2-36 lite2-46 lite20-46 lite210-46 lite0-36]  fragments of the photos (SHARDS: the four .tar files)
#   run.sh words GLOVE_PACKAGE MINILM_FOLDER [CAPTIONS]  word vectors and language model (words.py says which);
#                                                    CAPTIONS, one per line: the latter after reading them, too
#   run.sh tune [ROW ...]                            learning rates on dev, six or more each, one seed
#   run.sh tune-guided [ROW ...]                     the same for models that learn from two tuned ones
#   run.sh tables NAME [ROW ...]                     train and measure a table, or some rows of it
#   run.sh all [FILE]                                all features and tables (or those of a list), LANES of these at a time
#   run.sh prune                                     delete what finished runs only need to be resumed
#   run.sh page                                      docs/results/flickr8k/*.md from RESULTS
#
# Tune before tables, and models by themselves before guided ones and 'gpo-aoq', which learn from their runs: a
# rate that changes later changes what is known, and it is trained again.
#
# The numbers in docs/results/flickr8k/ were made with MORE="train.precision=bf16 …" (method.md there has the commands).
# Runs with other settings, or by code that computed otherwise, do not count as known and are trained again.
#
# SHARDS=. WORK=flickr8k RESULTS=docs/results DATA=lite2-36 SEEDS=3 JOBS=1 LANES=1 SCALE=full LIMIT=400
# (seconds until training stops, which leaves time to measure; 0: none), MORE="train.device=cuda …" overrides of every run.
# A GPU of 140 GB, with 16 cores beside it, is kept busy by LANES=4 JOBS=4 (with more its memory may not do).
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
SHARDS=$(realpath "${SHARDS:-.}")
RESULTS=$(realpath -m "${RESULTS:-$here/docs/results}")
WORK=$(realpath -m "${WORK:-flickr8k}")
DATA=${DATA:-lite2-36} SEEDS=${SEEDS:-3} JOBS=${JOBS:-1} LANES=${LANES:-1} SCALE=${SCALE:-full} LIMIT=${LIMIT:-400}
JUDGEMENTS="ExpertAnnotations.txt CrowdFlowerAnnotations.txt"
list=  # of tables, for `all`: by where it lies from here
[ "${1:-}" != all ] || [ $# = 1 ] || list=$(realpath "$2")
mkdir -p "$WORK" "$RESULTS"
cd "$WORK"  # runs name word vectors and language model by where they lie in it

# Exit code 130: stopped in time, goes on with the next call. Ctrl-C and TERM reach the command, which saves and ends.
limited() {
  local code=0 told=0 command
  timeout --signal=INT --kill-after=600 "$LIMIT" "$@" &
  command=$!
  trap 'told=1; kill -INT "$command" 2> /dev/null || true' INT TERM
  while wait "$command" && code=0 || code=$?; kill -0 "$command" 2> /dev/null; do :; done
  trap - INT TERM
  [ $told = 0 ] || exit 130
  case $code in 124|130) echo "stopped after $LIMIT s; the same call goes on" ;; *) return "$code" ;; esac
}

# Cells and windows as in lite2-46, of each variant that is named: a list of parts.
both() {
  python - "$@" <<'END'
import json, sys
def named(name, **options):
    return f"{name} {json.dumps(options)}"
print(json.dumps([
    named("joined", parts=[
        named("efficientnet-lite", variant=int(variant), fit="keep", size=320, grid=6),
        named("crops", base_options={"variant": int(variant)}, scales=[1.0, 0.5]),
    ])
    for variant in sys.argv[1:]
]))
END
}

features() {
  local name
  for name in "${@:-lite2-36}"; do
    [ -e "$name/features.json" ] && { echo "$name: done"; continue; }
    local -a how
    case $name in
      # The setting that public code was measured in: photos squeezed, 9 × 9 cells averaged to 6 × 6.
      lite2-36) how=(-b efficientnet-lite --backbone-option variant=2 --backbone-option grid=6) ;;
      # Proportions kept, larger, and windows of two scales besides: 36 cells and 10 windows.
      lite2-46) how=(-b joined --backbone-option 'parts=["efficientnet-lite {\"variant\": 2, \"fit\": \"keep\", \"size\": 320, \"grid\": 6}", "crops {\"base_options\": {\"variant\": 2}, \"scales\": [1.0, 0.5]}"]') ;;
      # The same of two backbones, their vectors end to end: 46 fragments of 2560 numbers.
      lite20-46) how=(-b joined --backbone-option along=channels --backbone-option "parts=$(both 2 0)") ;;
      # Of three backbones: 46 fragments of 3840 numbers.
      lite210-46) how=(-b joined --backbone-option along=channels --backbone-option "parts=$(both 2 1 0)") ;;
      # A weaker backbone by itself.
      lite0-36) how=(-b efficientnet-lite --backbone-option variant=0 --backbone-option grid=6) ;;
      *) echo "unknown features: $name" >&2; return 2 ;;
    esac
    limited counterfoil features "$SHARDS" --format shards "${how[@]}" --no-images --out "$name" --cache cache
  done
  for name in "${@:-lite2-36}"; do
    [ -e "$name/features.json" ] || continue
    for file in $JUDGEMENTS; do
      [ ! -e "$SHARDS/$file" ] || [ -e "$name/$file" ] || cp "$SHARDS/$file" "$name/"
    done
  done
}

# A table, or some of its rows, with the rates that sweeps have chosen so far.
reproduce() {
  local name=$1
  shift
  local sweep rates
  local -a rows=() chosen=() more=()
  for row in "$@"; do rows+=(--rows "$row"); done
  local scale=""
  [ "$SCALE" = full ] || scale="-$SCALE"
  for sweep in tuning tuning-guided tuning-words tuning-uniter tuning-tags; do
    for rates in "$sweep@$DATA$scale" "$sweep@lite2-36$scale"; do  # of other fragments: those of the first
      [ -e "$RESULTS/flickr8k.$rates.json" ] && chosen+=(--tuned "$RESULTS/flickr8k.$rates.json") && break
    done
  done
  read -ra more <<< "${MORE:-}"
  limited counterfoil reproduce "$name" "${more[@]}" --data "$DATA" --seeds "$SEEDS" --jobs "$JOBS" --scale "$SCALE" \
    --store "$RESULTS" --out reproduce --cache cache "${rows[@]}" "${chosen[@]}"
}

# Of a finished run the best checkpoint stays, without the optimiser's state.
prune() {
  local folder checkpoint
  for folder in reproduce/runs/*/; do
    [ -e "$folder/results.json" ] && [ -e "$folder/best" ] || continue
    for checkpoint in "$folder"checkpoints/*/; do
      [ "$(realpath "$checkpoint")" = "$(realpath "$folder/best")" ] || rm -rf "$checkpoint"
    done
    rm -f "$folder/best/training_state.pt"
    ln -sfn "$(readlink "$folder/best")" "$folder/last"
  done
}

# All that the page shows and lacks, by how much it matters: seeds, fragments, table, and rows of it between bars.
wanted() {
  cat <<'END'
3 lite2-36 flickr8k.tags|UNITER*|TAGS|TAGS-DC
1 lite2-36 flickr8k.tags|TAGS, words
3 lite2-36 flickr8k.ndgl|CHAN*|HREM*
3 lite2-36 flickr8k.ndgl|ESA*
1 lite20-46 flickr8k.best
3 lite2-36 flickr8k.ndgl|GPO*
1 lite2-36 flickr8k.ndgl|VSRN*|DivE*
3 lite2-36 flickr8k.selhn|*-hn|*-selhn|rvse++
3 lite2-36 flickr8k.naaf|scan-t2i|naaf|naaf-positive
3 lite2-36 flickr8k.baselines
1 lite2-36 flickr8k.words
1 lite20-46 flickr8k.baselines|*, ours
1 lite2-36 flickr8k.mining
1 lite2-36 flickr8k.negatives
1 lite2-36 flickr8k.selhn
1 lite2-36 flickr8k.naaf|SCAN*|BFAN*|NAAF*
1 lite2-36 flickr8k.best
3 lite20-46 flickr8k.best
1 lite2-46 flickr8k.baselines|*, ours
1 lite2-46 flickr8k.best|NAAF, MiniLM|VSE∞, MiniLM|VSE∞, MiniLM + NDGL|RVSE++, MiniLM
1 lite0-36 flickr8k.baselines|*, ours
3 lite2-36 flickr8k.mining
3 lite2-36 flickr8k.words
3 lite2-36 flickr8k.selhn
3 lite2-36 flickr8k.ndgl
3 lite2-36 flickr8k.naaf|SCAN*|BFAN*|NAAF*
3 lite2-36 flickr8k.best
1 lite2-36 flickr8k.naaf
END
}

# LANES tables at the same time, JOBS runs of each: a lane that is done takes the next one.
everything() {
  local lane code=0 end=$((SECONDS + LIMIT)) failed=0 running= list
  local -a lanes=() fragments
  list=$(if [ $# = 0 ]; then wanted; else cat "$1"; fi | grep -v '^ *\(#\|$\)') || { echo "no table is named" >&2; return 2; }
  [ "$LANES" -ge 1 ] || { echo "LANES=$LANES: at least 1" >&2; return 2; }
  echo "$list" > wanted.txt
  rm -f lane-*.log
  read -ra fragments <<< "$(cut -d' ' -f2 wanted.txt | awk '!seen[$0]++' | xargs)"
  in_time features "${fragments[@]}"  # tables that lack theirs fail by themselves
  for ((lane = 1; lane <= LANES; lane++)); do
    lane > "lane-$lane.log" 2>&1 &
    lanes+=($!)
  done
  trap 'kill "${lanes[@]}" 2> /dev/null || true; wait; exit 130' INT TERM
  code=$failed
  for lane in "${lanes[@]}"; do wait "$lane" || code=1; done
  trap - INT TERM
  [ $code = 0 ] || grep -H "failed$" ./lane-*.log >&2 || true
  return $code
}
# Told to end, a lane tells the step that it is at, which then saves.
lane() {
  local failed=0 running= line SEEDS DATA table
  local -a rows
  trap '[ -z "$running" ] || kill "$running" 2> /dev/null || true; wait; exit 130' TERM
  while line=$(taken) && [ -n "$line" ]; do
    echo "== $line"
    read -r SEEDS DATA table <<< "$line"
    IFS='|' read -ra rows <<< "$table"
    in_time reproduce "${rows[@]}"
  done
  exit $failed
}
taken() {  # the first line of what is wanted, which goes from the list
  exec 9> wanted.lock
  flock 9
  sed -n 1p wanted.txt
  sed -i 1d wanted.txt
}
in_time() {  # a step of this file, as long as there is time
  local left=0
  if [ "$LIMIT" != 0 ]; then
    left=$((end - SECONDS))
    [ $left -gt 20 ] || return 0
  fi
  LIMIT=$left "$@" &
  running=$!
  wait "$running" || { echo "$*: failed" >&2; failed=1; }
}

step=${1:?see the head of this file}
shift
case $step in
  features) features "$@" ;;
  words)
    (
      cd "$OLDPWD"
      python "$here/reproduction/flickr8k/words.py" "$SHARDS" "$1" "$2" "$WORK"
      [ -z "${3:-}" ] || [ -e "$WORK/minilm-captions" ] ||
        python "$here/reproduction/flickr8k/word_head.py" "$2" "$3" "$WORK/minilm-captions"
    ) ;;
  tune) SEEDS=1 reproduce flickr8k.tuning "$@" ;;
  tune-guided) SEEDS=1 reproduce flickr8k.tuning-guided "$@" ;;
  tables) reproduce "$@" ;;
  all) everything ${list:+"$list"} ;;
  prune) prune ;;
  page) counterfoil reproduce --render-page "$here/docs/results/flickr8k" --store "$RESULTS" ;;
  *) echo "unknown step: $step" >&2; exit 2 ;;
esac
