#!/usr/bin/env bash
# Warm start, validation, reinforcement learning until the time is over, validation:
#
#   recipes/train_1_5b.sh MODEL DATA RESULTS SECONDS [WARM_SECONDS]
#
# MODEL is a pulled model or a path, DATA the folder that prepare_1_5b.py wrote with dev_7k.jsonl, dev_28k.jsonl and dev_112k.jsonl,
# RESULTS a new folder for the two runs and their logs. SECONDS is the time for everything, WARM_SECONDS (by default
# 40 % of it) that of the warm start, loading included. Environment variables:
#
#   ADAPTER=FOLDER        start reinforcement learning from this adapter, without a warm start
#   TAIL_SECONDS=150      time kept for the last step, the last validation and the export
#   WARM_OPTIONS, RL_OPTIONS   further options of memagent train, such as "--set seed=2"
set -euo pipefail

if [ $# -lt 4 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
model=$1 data=$(realpath "$2") results=$3 total=$4
warm=${5:-$((total * 40 / 100))}
configs=$(cd "$(dirname "$0")/../configs/train/reader_1.5b" && pwd)
started=$SECONDS
mkdir -p "$results"

minutes() { awk -v seconds="$1" 'BEGIN { printf "%.2f", seconds / 60 }'; }
say() { echo "+$((SECONDS - started))s $*" | tee -a "$results/run.log"; }

train() { # NAME CONFIG SECONDS OPTIONS...: a run in RESULTS/NAME
  local name=$1 config=$2 seconds=$3
  shift 3
  say "$name: $(minutes "$seconds") minutes"
  memagent train "$configs/$config" --model "$model" --run-dir "$results/$name" \
    --max-minutes "$(minutes "$seconds")" "$@" 2>&1 | tee -a "$results/$name.log"
}

adapter=${ADAPTER:-}
if [ -z "$adapter" ]; then
  # shellcheck disable=SC2086  # options are words
  train warm warm_start.toml "$warm" ${WARM_OPTIONS:-} \
    --set "warm_start.files=[\"$data/lessons_long.jsonl\",\"$data/lessons_short.jsonl\",\"$data/lessons_answers.jsonl\",\"$data/lessons_tasks.jsonl\"]"
  adapter=$results/warm/final
fi
say "adapter: $adapter"

left=$((total - (SECONDS - started) - ${TAIL_SECONDS:-150}))
if [ "$left" -lt 60 ]; then
  say "no time is left for reinforcement learning"
  exit 0
fi
validation=
for name in dev_7k dev_28k dev_112k dev_ruler_8k; do
  if [ -f "$data/$name.jsonl" ]; then validation+="{files=[\"$data/$name.jsonl\"]},"; fi
done
# shellcheck disable=SC2086
train rl rl.toml "$left" ${RL_OPTIONS:-} \
  --set "model.adapter=\"$(realpath "$adapter")\"" \
  --set "tasks.0.files=[\"$data/train_short.jsonl\"]" \
  --set "tasks.1.files=[\"$data/train_plain.jsonl\"]" \
  --set "tasks.2.files=[\"$data/train_natural.jsonl\"]" \
  --set "tasks.3.files=[\"$data/train_titled.jsonl\"]" \
  --set "tasks.4.files=[\"$data/train_longer.jsonl\"]" \
  --set "validation.tasks=[${validation%,}]"
say "trained: $results/rl/final"
