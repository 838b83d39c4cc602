#!/usr/bin/env bash
# What only a GPU can show, in stages. Every command has a limit, stores each figure as it has it, and does what is
# left when it is given again: the same line goes on where it was stopped. A model that hangs or faults is noted as
# failed, measured without kernels, and comes last in the next call.
#
#     research/benchmarks/gpu.sh tests small               stages, in this order; figures go to results/
#     FOLDER=figures research/benchmarks/gpu.sh medium     ... to a folder, and go on from those in results/
#     DRY=1 research/benchmarks/gpu.sh tests small         print the commands
#     DEVICE=cpu research/benchmarks/gpu.sh tests small    rehearse at sizes of seconds, without a GPU
#
# PYTHON is the interpreter that has torch (python3), LIMIT the seconds of one model (200), MODELS those of small and
# medium, KERNELS as `research/bench.py step` has it. Without git's history COMMIT says which commit it is. What is compiled
# stays in a folder beside other temporary files.
#
# stage      seconds  shows, and the file of its figures
# tests          240  whether kernels, training and decoding are right on a GPU: gpu_tests.json
# small          330  CC-EC, TC and d_v = 1 against additive, small: bench_targets_small_cuda.json
# medium         360  the same, medium: bench_targets_medium_cuda.json
# train          220  train.py: tokens/s, MFU, memory, resuming to the bit: bench_train_cuda.json
# profile        180  the 30 longest kernels of additive and CC-EC; versions: bench_profile_cuda.json
# tune           170  launches of CC's kernels, d = 768, three each: bench_tune_768_K1_v4_cuda.json
# streams        540  AttnRes, mHC and HC against additive, minutes to compile: bench_streams_small_cuda.json
# more           540  two columns, and the memory option: bench_targets_more_cuda.json
# decode         540  generation with and without cache, graph and kernels: bench_decode_cuda.json
# kernels        540  bandwidth of every kernel against a copy: bench_kernels_cuda.json
# peers          540  CC-EC against its transcription, compiled: bench_peers_small_cuda.json
# tune_768       540  launches of the other kernels, d = 768: bench_tune_768_*_cuda.json
# tune_1024      540  launches of all kernels, d = 1024: bench_tune_1024_*_cuda.json
# paper          540  every variant and its peers at both sizes: bench_paper_cuda.json
set -uo pipefail
case "${1:---help}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} DRY=${DRY:-} LIMIT=${LIMIT:-200} KERNELS=${KERNELS:-auto}
FOLDER=${FOLDER:-$([ "$DEVICE" = cuda ] && echo results || mktemp -d)}
ADDITIVE=gpt-mha-rope CC_EC=DDL-gpt-mha-rope-CC-EC TC=DDL-gpt-mha-rope ONE_COLUMN=DDL-vdim1-gpt-mha-rope
MODELS=${MODELS:-$ADDITIVE,$CC_EC,$TC,$ONE_COLUMN}
COMPILED=${TMPDIR:-/tmp}/deep_delta_learning_compiled
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$COMPILED TRITON_CACHE_DIR=$COMPILED/triton
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # without it the products of deterministic runs are refused
failed=0

refuse() {
  echo "gpu.sh: error: $*" >&2
  exit 2
}

# One line where nothing could be measured, else what will be measured with.
preflight() {
  command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON: there is no such program"
  "$PYTHON" - "$DEVICE" <<'END' || exit 2
import importlib.util, sys

def refuse(why):
    print(f"gpu.sh: error: {why}", file=sys.stderr)
    sys.exit(1)

for package in ("torch", "triton"):
    if importlib.util.find_spec(package) is None:
        refuse(f"no {package} for {sys.executable}: set PYTHON to the interpreter that has it")
import torch
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
    refuse(f"torch {torch.__version__}: needs 2.11 or newer")
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    refuse("torch sees no GPU; DEVICE=cpu rehearses without one")
where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
print(f"torch {torch.__version__} on {where}", flush=True)
END
}

# run SECONDS FIGURES ARGUMENTS: `python research/bench.py ARGUMENTS` into that file, ended after so many seconds.
run() {
  local seconds=$1 file=$FOLDER/$2 began=$SECONDS code=0
  shift 2
  set -- research/bench.py "$@" --device="$DEVICE" --json="$file" --resume
  printf '+ timeout %s %s' "$seconds" "$PYTHON"
  printf ' %q' "$@"
  echo
  [ -n "$DRY" ] && return
  [ "$DEVICE" = cpu ] || [ -e "$file" ] || cp "results/${file##*/}" "$file" 2>/dev/null
  timeout --kill-after=20 "$seconds" "$PYTHON" "$@" || code=$?
  [ $code = 0 ] || failed=1
  echo "- $([ $code = 124 ] && echo "stopped: its time is over" || echo "exit code $code") after $((SECONDS - began)) s"
}

if [ "$DEVICE" = cpu ]; then # sizes of seconds
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
  TINY=(--vocab_size=320 --block_size=16 --num_hidden_layers=1 --num_attention_heads=2 --head_dim=8 --hidden_size=16)
  SUITE=(--suite=rehearsal --compile=False)
  STEPS=(--rounds=1 --warmup=1 --steps=1 --visits=1)
  TRAIN=("${TINY[@]}" --compile=False --steps=2 --global_batch_size=2 --micro_batch_size=1 --corpus_tokens=2000
    --vocabulary=300)
  DECODE=("${TINY[@]}" --compile=False --rounds=1 --context=4 --tokens=2)
  BANDWIDTH=(--micro_batch_size=1 --block_size=1 --rounds=1 --copied=4096 --widths=8)
  PROFILE=(--steps=2) TUNE=(--launches=1) TESTS=(--workers=1)
else
  SUITE=(--suite=targets) STEPS=(--rounds=20) TRAIN=(--steps=50) BANDWIDTH=(--rounds=10) PROFILE=(--steps=10)
  TUNE=(--rounds=5) TESTS=(--workers=8)
  DECODE=(--vocab_size=50304 --block_size=1024 --num_hidden_layers=12 --num_attention_heads=6 --head_dim=128
    --hidden_size=768 --context=960)
fi

step() { # SECONDS FIGURES SIZE MODELS [LIMIT]
  run "$1" "$2" step "${SUITE[@]}" "${STEPS[@]}" --sizes="$3" --models="$4" --peers=none --limit="${5:-$LIMIT}" \
    --kernels="$KERNELS"
}

tune() { # SECONDS WIDTH NAME MATCH
  local width=(--widths="$2")
  [ "$DEVICE" = cpu ] && width=()
  run "$1" "bench_tune_$2_$3_cuda.json" kernels --tune "${BANDWIDTH[@]}" "${TUNE[@]}" "${width[@]}" --match="$4" "${@:5}"
}

stage() {
  case "$1" in
  tests) TORCHINDUCTOR_COMPILE_THREADS=2 run 240 gpu_tests.json tests "${TESTS[@]}" --limit=120 ;;
  small) step 330 bench_targets_small_cuda.json small "$MODELS" ;;
  medium) step 360 bench_targets_medium_cuda.json medium "$MODELS" ;;
  train) run 130 bench_train_cuda.json train "${TRAIN[@]}" --what=speed --limit=120
    run 90 bench_train_cuda.json train "${TRAIN[@]}" --what=resume --configs=ddl_dv4_cc_ec_small --limit=80 ;;
  profile) for model in "$ADDITIVE" "$CC_EC"; do
    run 90 bench_profile_cuda.json profile "${SUITE[@]}" "${PROFILE[@]}" --sizes=small --models="$model"
  done ;;
  tune) tune 170 768 K1_v4 "K=1 v=4" --launches=3 ;;
  streams) step 540 bench_streams_small_cuda.json small AttnRes-gpt-mha-rope,mHC-gpt-mha-rope,HC-gpt-mha-rope 500 ;;
  more) step 540 bench_targets_more_cuda.json small "$CC_EC:2,$CC_EC+state_interval=4" ;;
  decode) for model in "$ADDITIVE" "$CC_EC"; do
    run 270 bench_decode_cuda.json decode "${DECODE[@]}" --models="$model"
  done ;;
  kernels) run 540 bench_kernels_cuda.json kernels "${BANDWIDTH[@]}" ;;
  peers) run 540 bench_peers_small_cuda.json step "${SUITE[@]}" "${STEPS[@]}" --sizes=small --models="$CC_EC" \
    --peers=transcription --limit=400 ;;
  tune_768) for name in K1_v1 K4_v4; do tune 180 768 "$name" "K=${name:1:1} v=${name:4}"; done
    tune 180 768 add_norm add_norm ;;
  tune_1024) for name in K1_v4 K1_v1 K4_v4; do tune 180 1024 "$name" "K=${name:1:1} v=${name:4}"; done ;;
  paper) run 540 bench_paper_cuda.json step "${SUITE[@]/targets/paper}" "${STEPS[@]}" --limit=500 ;;
  *) refuse "no stage $1: research/benchmarks/gpu.sh --help lists them" ;;
  esac
}

for each in "$@"; do (DRY=1 stage "$each") >/dev/null || exit 2; done
[ -n "$DRY" ] || preflight
[ -n "$DRY" ] || mkdir -p "$FOLDER"
for each in "$@"; do stage "$each"; done
exit $failed
