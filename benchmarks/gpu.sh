#!/usr/bin/env bash
# What only a GPU can show, in under nine minutes: the tests, then the kernels, then the variants that have targets.
#
#     PYTHON=python3 benchmarks/gpu.sh [FOLDER]      figures go to FOLDER (default: results)
#
# Each part has its share of the time. The benchmarks store what they have as they go, so one that is cut short loses
# its last model only. Exit code: that of the tests.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${1:-results}
mkdir -p "$out"

timeout 160 "$python" -m pytest -m gpu -n 8 2>&1 | tee "$out/gpu_tests.txt"
tests=$?
timeout 70 "$python" bench.py kernels --device=cuda --rounds=10 --json="$out/bench_kernels_cuda.json"
timeout 190 "$python" bench.py --suite=targets --sizes=small --json="$out/bench_targets_small_cuda.json"
timeout 110 "$python" bench.py --suite=targets --sizes=medium --models=DDL-gpt-mha-rope-CC-EC \
  --json="$out/bench_targets_medium_cuda.json"
exit $tests
