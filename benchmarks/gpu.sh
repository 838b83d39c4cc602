#!/usr/bin/env bash
# What only a GPU can show, stage by stage: benchmarks/gpu.sh STAGE [FOLDER]; --help lists the stages, what each shows,
# takes and writes. PYTHON is the interpreter that has torch (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.campaign "$@"
