#!/usr/bin/env bash
# Test and measure on a GPU, in stages. Each stage is a list of commands that store every figure as soon as it is
# measured. Run the same line again to resume. A model that hangs or crashes is stopped after LIMIT seconds, and then
# measured without fused kernels.
#
#     research/benchmarks/gpu.sh tests small               run these stages; figures are written to results/
#     FOLDER=figures research/benchmarks/gpu.sh medium     write to this folder; figures in results/ are not measured again
#     DRY=1 research/benchmarks/gpu.sh tests small         print the commands
#     DEVICE=cpu research/benchmarks/gpu.sh tests small    rehearse with tiny models, without a GPU
#
# Environment variables: PYTHON is the interpreter that has torch (python3), LIMIT the time limit of one model in
# seconds (200), MODELS the models of the stages small and medium, and KERNELS the option of `research/bench.py step`.
# Without the git history, COMMIT names the commit. Compiled code is cached in the folder for temporary files.
#
# stage      what it measures, and the file of its figures
# tests      whether kernels, training and decoding are correct on a GPU: gpu_tests.txt
# small      small CC-EC, TC and d_v = 1 relative to the additive model: bench_targets_small_cuda.json
# medium     the same at the medium size: bench_targets_medium_cuda.json
# train      tokens/s, MFU, memory and bitwise resuming of train.py: train_cuda.txt
# several    losses of train.py on two GPUs, with ddp and fsdp, relative to one: several_cuda.txt
# profile    the 30 longest kernels of additive and CC-EC; versions: bench_profile_cuda.json
# tune       three launches of each of CC's kernels at d = 768: bench_tune_768_K1_v4_cuda.json
# streams    AttnRes, mHC and HC relative to additive, and compile times: bench_streams_small_cuda.json
# more       d_v = 2, and state_checkpoint_interval=4: bench_targets_more_cuda.json
# float32    the cost of a float32 residual state: bench_state_dtype_cuda.json
# decode     generation with and without cache, CUDA graphs and kernels: bench_decode_cuda.json
# kernels    the bandwidth of every kernel relative to a copy: bench_kernels_cuda.json
# peers      CC-EC relative to the compiled transcription of its equations: bench_peers_small_cuda.json
# others     MGT, wide and conv, and mHC without liger-kernel's Sinkhorn-Knopp: bench_streams_more_cuda.json
# tune_768   launches of the other kernels at d = 768: bench_tune_768_*_cuda.json
# tune_1024  launches of all kernels at d = 1024: bench_tune_1024_*_cuda.json
# paper      every variant and its peers at both sizes: bench_paper_cuda.json
set -uo pipefail
case "${1:---help}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} DRY=${DRY:-} LIMIT=${LIMIT:-200} KERNELS=${KERNELS:-auto}
FOLDER=${FOLDER:-$([ "$DEVICE" = cuda ] && echo results || mktemp -d)}
ADDITIVE=gpt-mha-rope CC_EC=DDL-gpt-mha-rope-CC-EC TC=DDL-gpt-mha-rope ONE_COLUMN=DDL-vdim1-gpt-mha-rope
MODELS=${MODELS:-$ADDITIVE,$CC_EC,$TC,$ONE_COLUMN}
COMPILED=${TMPDIR:-/tmp}/deep_delta_learning_compiled
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TORCHINDUCTOR_CACHE_DIR=$COMPILED TRITON_CACHE_DIR=$COMPILED/triton
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # torch refuses deterministic matrix products without it
failed=0

refuse() {
  echo "gpu.sh: error: $*" >&2
  exit 2
}

# Print the versions of torch and the GPU, or one line that says why nothing can be measured.
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

# limited SECONDS COMMAND...: run a command with a time limit. SIGABRT comes first, so that Python prints a traceback.
limited() {
  local began=$SECONDS code=0
  printf '+ timeout %s' "$1"; printf ' %q' "${@:2}"; echo
  [ -n "$DRY" ] && return
  timeout --signal=ABRT --kill-after=20 "$@" || code=$?
  [ $code = 0 ] || failed=1
  echo "- $([ $code = 124 ] && echo "stopped at its time limit" || echo "exit code $code") after $((SECONDS - began)) s"
  return $code
}

# bench SECONDS FIGURES ARGUMENTS: run `python research/bench.py ARGUMENTS` and store its figures in that file.
bench() {
  local file=$FOLDER/$2
  [ -n "$DRY$(ls "$file" 2>/dev/null)" ] || [ "$DEVICE" = cpu ] || cp "results/$2" "$file" 2>/dev/null
  limited "$1" "$PYTHON" research/bench.py "${@:3}" --device="$DEVICE" --json="$file" --resume
}

if [ "$DEVICE" = cpu ]; then # models that take seconds
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
  TINY=(--num_hidden_layers=1 --num_attention_heads=2 --head_dim=8 --hidden_size=16)
  SUITE=(--suite=rehearsal --compile=False) STEPS=(--rounds=1 --warmup=1 --steps=1)
  TRAIN=("${TINY[@]}" --block_size=16 --compile=False --global_batch_size=2 --micro_batch_size=1)
  DECODE=("${TINY[@]}" --vocab_size=320 --block_size=16 --compile=False --rounds=1 --context=4 --tokens=2)
  BANDWIDTH=(--micro_batch_size=1 --block_size=1 --rounds=1 --copied=4096 --widths=8)
  PROFILE=(--steps=2) TUNE=(--launches=1) LAST=4
else
  SUITE=(--suite=targets) STEPS=(--rounds=20) BANDWIDTH=(--rounds=10) PROFILE=(--steps=10) TUNE=(--rounds=5)
  TRAIN=(--vocab_size=50304 --global_batch_size=32 --micro_batch_size=16) LAST=50
  DECODE=(--vocab_size=50304 --block_size=1024 --num_hidden_layers=12 --num_attention_heads=6 --head_dim=128
    --hidden_size=768 --context=960)
fi

# step FIGURES SIZE MODELS [ARGUMENTS]: measure each model in its own process, without fused kernels if that fails.
step() {
  local model options=("${SUITE[@]}" "${STEPS[@]}" --sizes="$2" --kernels="$KERNELS" --peers=none "${@:4}")
  for model in ${3//,/ }; do
    bench "$LIMIT" "$1" step --models="$model" "${options[@]}" ||
      bench "$LIMIT" "$1" step --models="$model+kernels=off" "${options[@]}"
  done
}

tune() { # WIDTH NAME MATCH
  local width=(--widths="$1")
  [ "$DEVICE" = cpu ] && width=()
  bench 180 "bench_tune_$1_$2_cuda.json" kernels --tune "${BANDWIDTH[@]}" "${TUNE[@]}" "${width[@]}" --match="$3" "${@:4}"
}

# Run each file with tests for GPUs in its own process. A file that has passed at this commit is skipped.
tests() {
  local file at log=$FOLDER/gpu_tests.txt
  at=${COMMIT:-$(git describe --always --dirty 2>/dev/null)}
  for file in $(grep -l "mark\.gpu" tests/test_*.py research/tests/test_*.py); do
    grep -qsF "$at $file passed" "$log" && continue
    if limited 900 "$PYTHON" -m pytest "$file" -m gpu; then
      [ -n "$DRY" ] || echo "$at $file passed" >>"$log"
    fi
  done
}

# Run train.py once for its speed, once with a checkpoint in the middle, and once from that checkpoint. The last two
# must end with the same bits.
train() { # CONFIG
  local file runs=${TMPDIR:-/tmp}/deep_delta_learning_runs/$1 log=$FOLDER/train_cuda.txt step middle
  step=$(printf 'checkpoints/step_%08d' "$LAST") middle=$(printf 'checkpoints/step_%08d' $((LAST / 2)))
  local keys=(train.py "config/$1.py" --dataset=python_stdlib "${TRAIN[@]}" --max_steps="$LAST" --warmup_steps=2
    --eval_batches=1 --eval_full=False --device="$DEVICE")
  local exact=(--deterministic=True --checkpoint_interval=$((LAST / 2)))
  [ -n "$DRY" ] || rm -rf "$runs"
  [ -e data/python_stdlib/meta.json ] || limited 120 "$PYTHON" data/python_stdlib/prepare.py
  limited 130 "$PYTHON" "${keys[@]}" --out_dir="$runs/speed"
  limited 130 "$PYTHON" "${keys[@]}" "${exact[@]}" --out_dir="$runs/whole" || return
  limited 130 "$PYTHON" "${keys[@]}" "${exact[@]}" --out_dir="$runs/half" --resume="$runs/whole/$middle"
  [ -n "$DRY" ] && return
  for file in model optimizer; do
    cmp "$runs/whole/$step/$file.safetensors" "$runs/half/$step/$file.safetensors" &&
      echo "$1: $file resumed to the bit" >>"$log" || failed=1
  done
  tail -n 3 "$runs/speed/metrics.jsonl" >>"$log"
}

# Train the same steps on one GPU and on two. With each engine, the losses must be the same up to rounding.
several() {
  local engine runs=${TMPDIR:-/tmp}/deep_delta_learning_runs/several
  local keys=(train.py config/ddl_dv4_cc_ec_small.py --dataset=python_stdlib "${TRAIN[@]}" --max_steps="$LAST"
    --warmup_steps=2 --eval_batches=1 --eval_full=False --device="$DEVICE")
  [ -n "$DRY" ] || rm -rf "$runs"
  [ -e data/python_stdlib/meta.json ] || limited 120 "$PYTHON" data/python_stdlib/prepare.py
  limited 130 "$PYTHON" "${keys[@]}" --out_dir="$runs/one" || return
  for engine in ddp fsdp; do
    limited 180 "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=2 "${keys[@]}" \
      --engine="$engine" --out_dir="$runs/$engine" || return
  done
  [ -n "$DRY" ] && return
  "$PYTHON" - "$runs" >>"$FOLDER/several_cuda.txt" <<'END' || failed=1
import json, sys
from pathlib import Path

def read_losses(name):
    lines = Path(sys.argv[1], name, "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

expected = read_losses("one")
differences = {}
for engine in ("ddp", "fsdp"):
    losses = read_losses(engine)
    differences[engine] = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
    print(f"{engine} on two: {len(losses)} losses differ from those on one by at most {differences[engine]:.2g} nats")
sys.exit(max(differences.values()) > 0.05)
END
}

stage() {
  case "$1" in
  tests) tests ;;
  small) step bench_targets_small_cuda.json small "$MODELS" ;;
  medium) step bench_targets_medium_cuda.json medium "$MODELS" ;;
  train) train gpt_small; train ddl_dv4_cc_ec_small ;;
  several) several ;;
  profile) for model in "$ADDITIVE" "$CC_EC"; do
    bench 90 bench_profile_cuda.json profile "${SUITE[@]}" "${PROFILE[@]}" --sizes=small --models="$model"
  done ;;
  tune) tune 768 K1_v4 "K=1 v=4" --launches=3 ;;
  streams) LIMIT=500 step bench_streams_small_cuda.json small AttnRes-gpt-mha-rope,mHC-gpt-mha-rope,HC-gpt-mha-rope ;;
  more) step bench_targets_more_cuda.json small "$CC_EC:2,$CC_EC+state_checkpoint_interval=4" ;;
  float32) step bench_state_dtype_cuda.json small \
    "$ADDITIVE+state_dtype=float32,$ONE_COLUMN,$ONE_COLUMN+state_dtype=float32,$CC_EC,$CC_EC+state_dtype=float32" ;;
  decode) for model in "$ADDITIVE" "$CC_EC"; do
    bench 270 bench_decode_cuda.json decode "${DECODE[@]}" --models="$model"
  done ;;
  kernels) bench 540 bench_kernels_cuda.json kernels "${BANDWIDTH[@]}" ;;
  peers) LIMIT=400 step bench_peers_small_cuda.json small "$CC_EC" --peers=transcription ;;
  others) LIMIT=400 step bench_streams_more_cuda.json small \
    mHC-gpt-mha-rope+kernels=off,MGT-gpt-mha,wide-gpt-mha-rope,conv-gpt-mha-rope ;;
  tune_768) for name in K1_v1 K4_v4; do tune 768 "$name" "K=${name:1:1} v=${name:4}"; done
    tune 768 add_norm add_norm ;;
  tune_1024) for name in K1_v4 K1_v1 K4_v4; do tune 1024 "$name" "K=${name:1:1} v=${name:4}"; done ;;
  paper) bench 540 bench_paper_cuda.json step "${SUITE[@]/targets/paper}" "${STEPS[@]}" ;;
  *) refuse "no stage $1: research/benchmarks/gpu.sh --help lists them" ;;
  esac
}

for each in "$@"; do (DRY=1 stage "$each") >/dev/null || exit 2; done
[ -n "$DRY" ] || preflight
[ -n "$DRY" ] || mkdir -p "$FOLDER"
for each in "$@"; do stage "$each"; done
exit $failed
