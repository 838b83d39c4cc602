#!/usr/bin/env bash
# The study on a GPU: research/residual_streams/gpu.sh [FOLDER]. Every call goes on where the last one stopped, for at most
# nine minutes (MINUTES), through rates, tokens, again, alone, seconds and eager; the same call again until it says "finished".
# What is kept goes to FOLDER (default: results/residual_streams), which takes over what results/residual_streams has: on
# a machine that begins bare, bring FOLDER's gpu_* back into results/residual_streams before the next call.
# JOBS runs share the GPU (default: 4), but for those that are timed. PYTHON is the interpreter that has torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
kept=results/residual_streams folder=${1:-results/residual_streams} python=${PYTHON:-python3}
deadline=$((SECONDS + 60 * ${MINUTES:-9}))
mkdir -p "$folder"
if ! [ "$folder" -ef "$kept" ]; then cp -n "$kept"/gpu_* "$folder"/ 2>/dev/null || true; fi
[ -e data/python_packages_16k/meta.json ] ||
    "$python" research/residual_streams/python_packages.py --vocab_size=16384 --out=data/python_packages_16k
for stage in rates tokens again alone seconds eager; do
    jobs=${JOBS:-4}
    case $stage in alone | eager) jobs=1 ;; esac
    code=0
    timeout --signal=INT --kill-after=60 "$((deadline - SECONDS > 5 ? deadline - SECONDS : 5))" \
        "$python" research/residual_streams/run.py "$stage" --preset=gpu --jobs="$jobs" --results="$folder" || code=$?
    case $code in
    0) ;;
    124 | 130 | 137) echo "$stage is not finished; the same command goes on" && exit 0 ;;
    *) exit "$code" ;;
    esac
done
echo "finished; now: $python research/residual_streams/report.py --preset=gpu"
