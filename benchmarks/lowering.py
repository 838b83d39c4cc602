"""Launches and bytes of a training step as Inductor lowers it for a GPU that is not there: `bench.py lowering`.

And what time it would take if every launch reached the speed assumed for its kind: a prediction, no measurement.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import absent_gpu, suites
from model import STEMS
from training.provenance import provenance

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-torch2.11" / "bin" / "python"
CEILINGS = ROOT / "results" / "ceiling_sm90.json"
KINDS = {"inductor": "Inductor's kernels", "product": "products", "operator": "operators", "attention": "attention",
    "other": "others"}  # fmt: skip

COPY, FLOPS, FLOOR, PEAK = 4.3e12, 0.7 * 780e12, 2e-6, 989e12
# The norm reads a gradient, clipping reads and writes it; AdamW reads four numbers of 4 bytes and writes three.
OPTIMIZER_BYTES = 4 + 8 + 28
ASSUMPTIONS = {
    "device": "one H200, never seen by these figures",
    "matrix products": f"70% of 780 TFLOP/s in bfloat16 ({FLOPS / 1e12:.0f}), or their bytes at {COPY / 1e12} TB/s",
    "attention": "the same, of the operations under the causal mask; backward 2.5 times forward; the flash kernel",
    "Inductor's kernels": f"the bytes of the buffers that each reads and writes, once, at {COPY / 1e12} TB/s",
    "our operators": f"the bytes of their arguments and results at {COPY / 1e12} TB/s times the kernel's ceiling "
    "(results/ceiling_sm90.json), 1.0 where that has none; their own sums over programs are not counted",
    "optimizer": f"{OPTIMIZER_BYTES} bytes a parameter: the norm, clipping, AdamW",
    "floor": f"no launch under {FLOOR * 1e6:.0f} us; nothing overlaps; the GPU never waits for Python",
}


def lowered(python: Path, setting: dict, env: dict) -> dict:
    """benchmarks/lowered.py's figures of one model. RuntimeError: it failed; the message has its last lines."""
    command = [python, "-m", "benchmarks.lowered", json.dumps(setting)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"lowering {setting['stem']} failed:\n{result.stderr.strip()[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def ceilings(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def ceiling_of(case: dict, known: list[dict]) -> float | None:
    """The share of the copy bandwidth that the operator's kernel can reach; None: it is not in the table.

    A case of the kernel that the table does not tell, as the first step and the readout, is taken for its slowest.
    """
    like = {key: value for key, value in case.items() if key not in ("writes_replayed", "stored")}
    for wanted in (case, like):
        found = [row["ceiling"] for row in known if all(row.get(key, value) == value for key, value in wanted.items())]
        if found:
            return min(found)
    return None


def seconds_of(launch: dict, known: list[dict]) -> float:
    """Predicted time of one launch."""
    share = 1.0
    if launch["kind"] == "operator":
        share = ceiling_of(launch.get("case", {}), known) or 1.0
    return max(FLOOR, launch["bytes"] / (COPY * share), launch["flops"] / FLOPS)


def row_of(setting: dict, figures: dict, known: list[dict]) -> dict:
    """Counts, bytes and the prediction of one model."""
    row = {"model": setting["stem"], "parameters": figures["parameters"]}
    row |= {f"lowering_{name}": round(figures[name], 1) for name in ("seconds", "cpu_seconds")}
    milliseconds, missing = {}, set()
    for way in ("forward", "backward"):
        launches = figures[way]
        row[f"{way}_launches"] = len(launches)
        row[way] = {}
        for kind in KINDS:
            of_kind = [launch for launch in launches if launch["kind"] == kind]
            seconds = sum(seconds_of(launch, known) for launch in of_kind)
            milliseconds[kind] = milliseconds.get(kind, 0) + 1e3 * seconds
            counts = {"launches": len(of_kind), "bytes": sum(launch["bytes"] for launch in of_kind)}
            row[way][kind] = counts | {"flops": sum(launch["flops"] for launch in of_kind)}
        missing |= {
            launch["case"]["kernel"]
            for launch in launches
            if launch["kind"] == "operator" and ceiling_of(launch["case"], known) is None
        }
    row["launches"] = row["forward_launches"] + row["backward_launches"]
    milliseconds["optimizer"] = 1e3 * OPTIMIZER_BYTES * figures["parameters"] / COPY
    row["predicted_milliseconds"] = {kind: round(value, 3) for kind, value in milliseconds.items()}
    size, tokens = setting["size"], setting["rows"] * setting["size"]["block_size"]
    row["predicted_step_milliseconds"] = total = round(sum(milliseconds.values()), 3)
    row["predicted_tokens_per_second"] = round(1e3 * tokens / total)
    context = 12 * size["num_hidden_layers"] * size["hidden_size"] * size["block_size"]
    row["predicted_mfu"] = round((6 * figures["parameters"] + context) * 1e3 * tokens / total / PEAK, 4)
    return row | {"without_ceiling": sorted(missing)}


def markdown(rows: list[dict]) -> str:
    """A line a model; its ratio is to the additive model of the same size where that is there."""
    titles = [
        "model",
        "seconds of lowering",
        "on a CPU of its own",
        "launches forward",
        "backward",
        "of which products",
        "operators",
    ]
    titles += ["GB moved", "predicted step, ms", "predicted tokens/s", "predicted MFU", "predicted ratio"]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        both = [row["forward"], row["backward"]]
        moved = sum(kind["bytes"] for way in both for kind in way.values()) / 1e9
        counts = [sum(way[kind]["launches"] for way in both) for kind in ("product", "operator")]
        ratio = f"{row['predicted_ratio']:.3f}" if "predicted_ratio" in row else "-"
        line = [f"`{row['model']}`", row["lowering_seconds"], row["lowering_cpu_seconds"]]
        line += [row["forward_launches"], row["backward_launches"]]
        line += [*counts, f"{moved:.1f}", f"{row['predicted_step_milliseconds']:.2f}"]
        lines.append([*line, f"{row['predicted_tokens_per_second']:,}", f"{row['predicted_mfu']:.1%}", ratio])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def environment_of(python: Path) -> dict:
    """Versions there. ValueError: not a CUDA build of torch, or no such environment."""
    script = "import json, sys, torch, triton\nprint(json.dumps([torch.__version__, torch.version.cuda, "
    script += "triton.__version__, torch.cuda.is_available()]))"
    found = subprocess.run([python, "-c", script], capture_output=True, text=True) if python.exists() else None
    if found is None or found.returncode:
        raise ValueError(f"--python={python}: no Python with torch and triton there: make .venv-torch2.11 (about 5 GB)")
    torch_version, cuda, triton_version, available = json.loads(found.stdout)
    if cuda is None:
        raise ValueError(f"--python={python}: its torch {torch_version} is not built for CUDA: make .venv-torch2.11")
    if available:
        raise ValueError("lowering pretends that there is a GPU, and there is one: measure with bench.py step")
    return {"torch": torch_version, "cuda": cuda, "triton": triton_version}


def run(args) -> None:
    """Print and store the figures of `bench.py lowering`."""
    stems = args.models.split(",") if args.models else list(suites.EVERY_STEM)
    for stem in stems:
        if stem not in STEMS:
            raise ValueError(f"--models: {stem} is none of {', '.join(STEMS)}")
    python = args.python or (PYTHON if PYTHON.exists() else Path(sys.executable))
    versions = environment_of(python)
    size = suites.SUITES["paper"].sizes[args.size]
    size = size | {key: getattr(args, key) for key in suites.SIZE_KEYS if getattr(args, key) is not None}
    setting = {"size": size, "rows": args.micro_batch_size, "kernels": args.kernels}
    kept = {"note": args.note, "lowered_with": versions, "assumptions": ASSUMPTIONS, **setting}
    known, rows, base = ceilings(args.ceilings), [], None
    with tempfile.TemporaryDirectory() as folder:
        env = absent_gpu.environment(Path(folder))
        for stem in stems:
            own = setting | {"stem": stem}
            figures = lowered(python, own, env)
            rows.append(row_of(own, figures, known))
            if args.launches:
                args.launches.mkdir(parents=True, exist_ok=True)
                (args.launches / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            base = rows[-1]["predicted_step_milliseconds"] if stem == suites.BASELINE else base
            if base is not None:
                rows[-1]["predicted_ratio"] = round(base / rows[-1]["predicted_step_milliseconds"], 4)
            print(f"{stem}: {rows[-1]['lowering_cpu_seconds']} s of a CPU, {rows[-1]['launches']} launches", flush=True)
            if args.json:
                stored = json.dumps({**provenance(), **kept, "rows": rows}, indent=1)
                args.json.write_text(stored + "\n", encoding="utf-8")
    print(f"\nPredictions, not measurements: {ASSUMPTIONS}\n\n{markdown(rows)}")
    for row in rows:
        if row["without_ceiling"]:
            print(f"{row['model']}: taken at the full bandwidth, no ceiling known: {', '.join(row['without_ceiling'])}")
