#!/bin/bash
# canter's profile `fast` against rsl_rl with mjlab's settings, on one GPU; about 25 minutes.
#
#   bash benchmarks/mjlab_race.sh runs/race
#
# Go1 flat, three seeds: the policies at 30, 60, 120 and 250 s, scored, and the curves. Seeds 2 and 3 of rsl_rl share the
# GPU; they go as far as seed 1 goes alone in the same time. Go1 rough and G1 flat: one run of each library, all four at
# the same time, so that all have the same share of the GPU. Results go to RUNS/results.
set -eu
runs=$1
python=${PYTHON:-python3}
flat=Mjlab-Velocity-Flat-Unitree-Go1
here=$(dirname "$0")
mkdir -p "$runs/results"
unset PYTHONDONTWRITEBYTECODE  # importing mjlab without compiled files takes seconds

race() { echo "$(date +%T) $*"; "$python" "$here/mjlab_race.py" "$@"; }
train() { name=$1; shift; race train "$@" --out "$runs/$name" > "$runs/$name.log" 2>&1 || echo "$name failed, see $runs/$name.log"; }

# The iterations of a run at each mark of seconds.
marks() {
  "$python" - "$1" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(f"{sys.argv[1]}/progress.jsonl")]
seconds = [row["seconds"] for row in rows if "iteration" in row]
print(*sorted({max(1, sum(s <= mark for s in seconds)) for mark in (30, 60, 120, 250)}))
PY
}

# Kernels are compiled in the first run of a task, which does not count.
train warm-up canter --profile fast --iterations 5
train canter-1 canter --profile fast --seconds 120 --seed 1
train canter-2 canter --profile fast --seconds 60 --seed 2
train canter-3 canter --profile fast --seconds 60 --seed 3
train canter-plain canter --seconds 50 --seed 1
race simulate --num-envs 4096 --out "$runs/results"
train rsl_rl-1 rsl_rl --seconds 250 --seed 1

nvidia-cuda-mps-control -d 2>/dev/null || true  # kernels of several processes at the same time
reached=$(marks "$runs/rsl_rl-1")
last=${reached##* }
for seed in 2 3; do train "rsl_rl-$seed" rsl_rl --iterations "$last" --marks-iterations $reached --seed $seed & done
wait
for task in Rough-Unitree-Go1 Flat-Unitree-G1; do
  train "canter-$task" canter --task "Mjlab-Velocity-$task" --profile fast --seconds 180 &
  train "rsl_rl-$task" rsl_rl --task "Mjlab-Velocity-$task" --seconds 180 &
done
wait

race score "$runs"/{canter,rsl_rl}-[123] --task $flat --out "$runs/scores.jsonl"
collect() { race collect "$@" --scores "$runs/scores.jsonl" --out "$runs/results"; }
collect "$runs"/canter-[123] "$runs/canter-plain" "$runs/rsl_rl-1"
collect "$runs"/rsl_rl-[23] --pace "$runs/rsl_rl-1"
collect "$runs"/{canter,rsl_rl}-{Rough-Unitree-Go1,Flat-Unitree-G1} --shared
race plot "$runs/race.png" --results "$runs/results" || echo "no picture: matplotlib is missing"
