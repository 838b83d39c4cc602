"""Speed and memory of the training step and the forward pass: every variant, and its peers, against the baseline.

Models take turns in groups: the baseline, one variant and that variant's peers. Every figure that compares two of
them comes from rounds in which both ran, and no more than one group's models are in memory. A group is visited several
times, with all the others in between, so that percentiles hold what changes between visits as well.
"""

import gc
import statistics
from functools import partial

import torch

from evaluation import tables
from model import STEMS, build, kernels
from research.benchmarks import suites
from research.benchmarks.apart import run_python
from research.benchmarks.contender import Contender, memory
from research.benchmarks.figures import Figures, launches_used
from research.benchmarks.suites import BASELINE, PLAIN, row_name
from research.benchmarks.timing import compared, measure, percentiles, spread, waiting
from research.benchmarks.transcription import Transcription
from training import distributed
from training.metrics import nominal_flops_per_token, peak_flops

# What "activation" figures are on a GPU and on a CPU.
PEAK = "peak of a forward and backward pass minus weights, gradients and the optimizer's state"
SAVED = "saved by a forward pass for its backward pass"


class Bench:
    """One size: its baseline, which stays, and groups of contenders that come and go. Figures are stored at once."""

    def __init__(self, args, size_name: str, size: dict, device: torch.device, figures: Figures):
        self.args, self.size_name, self.size, self.device = args, size_name, size, device
        self.figures, self.left_out = figures, figures.notes["left_out"]
        self.dtype, self.compiled = getattr(torch, args.dtype), args.compile == "True"
        self.tokens = args.micro_batch_size * size["block_size"]
        shape = (2, args.micro_batch_size, size["block_size"])
        ids = torch.randint(
            0, size["vocab_size"], shape, generator=torch.Generator().manual_seed(0)
        ).to(device)
        self.batch = lambda: ids
        self.baseline = self.contender(BASELINE, self.build(BASELINE))
        self.rows = {
            row["model"]: row
            for row in figures.rows
            if row["size"] == size_name and "failed" not in row
        }
        self.rounds = -(-args.rounds // args.visits)  # of one visit

    def build(self, model: str):
        torch.manual_seed(0)
        stem, keys, fused = suites.split_model(model)
        made, default = build(stem, **self.size, **keys), {"setting": self.args.kernels}
        kernels.use(
            made,
            **default | {"state_interval": self.args.state_interval} | fused,
            device=self.device,
        )
        return made

    def contender(self, name: str, model, compiled: bool | None = None, **options) -> Contender:
        compiled = self.compiled if compiled is None else compiled
        return Contender(name, model, self.batch, self.device, self.dtype, compiled, **options)

    def twice(self, name: str, model) -> list[Contender]:
        """A peer eager and, with --compile=True, compiled too."""
        eager = self.contender(f"{name} (eager)", model, compiled=False)
        if not self.compiled:
            return [eager]
        return [eager, self.contender(f"{name} (compiled)", None, partner=eager)]

    def group(self, model: str) -> tuple[list[Contender], list[Contender]]:
        """(the baseline and the model, their peers)."""
        own, others = [self.baseline], []
        if model != BASELINE:
            own.append(self.contender(row_name(model), self.build(model)))
        if "transcription" in self.args.peers and model in STEMS:
            transcribed = transcription(model, own[-1].model)
            if transcribed is not None:
                others = self.twice(f"{model} transcription", transcribed)
        return own, others

    def leave_out(self, name: str, reason: str) -> None:
        line = f"{self.size_name}: {name}: {reason}"
        if line not in self.left_out:  # in an earlier visit
            self.left_out.append(line)
            print(f"left out: {line}", flush=True)

    def that_run(self, others: list[Contender]) -> list[Contender]:
        """The peers that can take a step here; why another cannot is said and stored. Our own models must run."""
        able = []
        for contender in others:
            try:
                waiting(contender.train, 1, self.device)()
                waiting(contender.evaluate, 1, self.device)()
                able.append(contender)
            except Exception as error:  # a peer's failure is a finding about the peer, not the end of the measurement
                contender.adamw.zero_grad(set_to_none=True)
                self.leave_out(contender.name, f"{type(error).__name__}: {first_line(error)}")
                release(self.device)
        return able

    def times(self, contenders: list[Contender], what: str) -> dict[str, list[float]]:
        """Seconds of one training step (`train`) or forward pass (`forward`) in every round of a visit."""
        args, method = self.args, "train" if what == "train" else "evaluate"
        turns = {c.name: waiting(getattr(c, method), args.steps, self.device) for c in contenders}
        seconds = measure(turns, args.warmup, self.rounds, f"{self.size_name}, {what}")
        return {name: [t / args.steps for t in times] for name, times in seconds.items()}

    def visits(self, model: str) -> int:
        """How often the model's group has been measured to its end."""
        return self.rows.get(row_name(model), {}).get("visits", 0)

    def measure_group(self, model: str) -> None:
        """Visit one model and its peers, and add what is measured to their rows."""
        own, others = self.group(model)
        launches_used()
        others = self.that_run(others)
        contenders, before = own + others, self.visits(model) * self.rounds
        for contender in contenders:
            self.rows.setdefault(contender.name, self.row(contender))
        for what, prefix in (("train", ""), ("forward", "forward_")):
            self.add(contenders, what, prefix, self.times(contenders, what), before)
            peer = f"{model} transcription ({'compiled' if self.compiled else 'eager'})"
            if peer in (contender.name for contender in others):
                row, beside = self.rows[own[-1].name], self.rows[peer]
                seconds = beside["baseline_seconds"] if model == BASELINE else row["seconds"]
                row |= compared(f"{prefix}speedup", beside["seconds"][what], seconds[what])
            self.store(contenders)
        for contender in (self.baseline, *others, own[-1]):
            self.finish(contender, self.rows[contender.name])
        self.rows[own[-1].name] |= {
            "visits": self.visits(model) + 1,
            **launches_used(),
        }  # the group is complete
        self.store(contenders)

    def add(
        self, contenders: list[Contender], what: str, prefix: str, seconds: dict, before: int
    ) -> None:
        """Put the seconds of a visit behind those of the `before` rounds of earlier ones, and compute from all."""
        for contender in contenders:
            row = self.rows[contender.name]
            kept = (
                row.setdefault(key, {"train": [], "forward": []})
                for key in ("seconds", "baseline_seconds")
            )
            own, base = (seconds_of[what] for seconds_of in kept)
            # The baseline runs in every group: its own figures are of all of them.
            first = len(own) if contender is self.baseline else before
            own[first:], base[first:] = seconds[contender.name], seconds[BASELINE]
            row |= figures_of(own, base, prefix, self.tokens)

    def store(self, contenders: list[Contender]) -> None:
        for contender in contenders:
            self.figures.add(self.rows[contender.name], "size", "model")

    def row(self, contender: Contender) -> dict:
        row = {"size": self.size_name, "model": contender.name}
        return row | {
            "parameters": contender.model.num_parameters(),
            "compiled": contender.compiled,
        }

    def finish(self, contender: Contender, row: dict) -> None:
        """What is measured outside of the rounds: memory and utilisation."""
        if "activation_bytes_per_token" not in row:
            row |= memory(contender, self.tokens)
            base = self.rows[BASELINE]["activation_bytes_per_token"]
            row["activation_ratio"] = row["activation_bytes_per_token"] / base
        if peak := peak_flops(self.device):
            row["mfu"] = nominal_flops_per_token(contender.model) * row["tokens_per_second"] / peak


def transcription(stem: str, model) -> torch.nn.Module | None:
    """The straight transcription of that stem with the weights of `model`; None where the stem has none."""
    try:
        result = Transcription(stem, model.config)
    except ValueError:
        return None
    result.load_state_dict(model.state_dict())
    return result


def figures_of(own: list[float], base: list[float], prefix: str, tokens: int) -> dict[str, float]:
    """Tokens/s of a model's rounds, of the baseline's in the same rounds (seconds), and the ratio round by round."""
    figures = percentiles(f"{prefix}tokens_per_second", [tokens / seconds for seconds in own])
    figures[f"{prefix}baseline_tokens_per_second"] = statistics.median(
        tokens / seconds for seconds in base
    )
    return figures | compared(f"{prefix}ratio", base, own)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def settings_of(args, sizes: dict, device: torch.device) -> dict:
    """What the stored figures say of the measurement, beside their provenance."""
    settings = {"suite": args.suite, "sizes": sizes, "device": device.type, "dtype": args.dtype}
    settings |= {"threads": torch.get_num_threads(), "micro_batch_size": args.micro_batch_size}
    settings |= {"kernels": args.kernels, "state_interval": args.state_interval}
    settings |= {"rounds": args.rounds, "visits": args.visits, "steps_per_round": args.steps}
    return settings | {"activations": PEAK if device.type == "cuda" else SAVED}


def number(row: dict, key: str, form: str, scale: float = 1) -> str | None:
    return format(row[key] / scale, form) if key in row else None


COLUMNS = {
    "model": lambda r: f"`{r['model']}`",
    "parameters": lambda r: number(r, "parameters", ",.0f"),
    "training tokens/s": lambda r: spread(r, "tokens_per_second", ",.0f"),
    "additive in the same rounds": lambda r: number(r, "baseline_tokens_per_second", ",.0f"),
    "relative to additive (10th to 90th percentile)": lambda r: spread(r, "ratio", ".3f"),
    "forward tokens/s": lambda r: spread(r, "forward_tokens_per_second", ",.0f"),
    "additive forward in the same rounds": lambda r: number(
        r, "forward_baseline_tokens_per_second", ",.0f"
    ),
    "forward relative to additive": lambda r: spread(r, "forward_ratio", ".3f"),
    "training speed over its transcription": lambda r: spread(r, "speedup", ".2f"),
    "forward speed over its transcription": lambda r: spread(r, "forward_speedup", ".2f"),
    "MFU": lambda r: number(r, "mfu", ".1%"),
    "activations per token, KiB": lambda r: number(r, "activation_bytes_per_token", ",.0f", 2**10),
    "activations relative to additive": lambda r: number(r, "activation_ratio", ".2f"),
    "peak memory, GiB": lambda r: number(r, "peak_memory_bytes", ".1f", 2**30),
    "failed": lambda r: r.get("failed"),
}


def markdown(rows: list[dict]) -> str:
    """The rows as a table, without the columns in which no row has anything."""
    cells = {title: [column(row) for row in rows] for title, column in COLUMNS.items()}
    cells = {title: column for title, column in cells.items() if any(column)}
    return tables.markdown(list(cells), zip(*cells.values()))


def present(settings: dict, figures: Figures) -> None:
    """Print a table for each size, and what could not be measured."""
    sizes = dict.fromkeys(row["size"] for row in figures.rows)
    for size in sizes:
        where = f"{settings['dtype']} on {figures.on_what()}"
        table = markdown([row for row in figures.rows if row["size"] == size])
        print(f"\n{size}: {settings['sizes'][size]}, {where}\n\n{table}")
    print(f"\nactivations: {settings['activations']}")
    for line in settings["left_out"]:
        print(f"left out: {line}")


GIVEN_ANEW = ("command", "models", "peers", "limit", "resume")


def measure_apart(args, sizes: dict, reopen) -> bool:
    """Measure each model in a process of its own, which ends within args.limit seconds; `reopen()` reads the figures.

    A model that failed gets a row that says so, and is measured without kernels; in a later call it comes last. False:
    the baseline, with which all are compared, failed, so nothing can be measured with kernels.
    """

    def left(text: str) -> list[str]:
        own = [row for row in reopen().rows if row["model"] == row_name(text)]
        done = {row["size"] for row in own if row.get("visits", 0) >= args.visits}
        return [size for size in sizes if size not in done]

    def failed(text: str) -> bool:
        return any("failed" in row and row["model"] == row_name(text) for row in reopen().rows)

    given = {
        key: value
        for key, value in vars(args).items()
        if value is not None and key not in GIVEN_ANEW
    }
    options = [f"--{key}={value}" for key, value in given.items()]
    options += [f"--peers={','.join(args.peers) or 'none'}", "--resume"]
    if failed(BASELINE):
        return False
    for model in sorted(args.models, key=failed):
        for text in (model,) if model.endswith(PLAIN) else (model, model + PLAIN):
            why = left(text) and run_python(
                ["research/bench.py", "step", f"--models={text}", *options], args.limit
            )
            if not why:
                break
            for size in left(text):
                print(f"{size}: {row_name(text)} failed: {why}", flush=True)
                reopen().add(
                    {"size": size, "model": row_name(text), "failed": why}, "size", "model"
                )
            if text == BASELINE:
                return False
    return True


def run(args) -> None:
    """Print and store the figures of `bench.py step`."""
    device = distributed.pick_device(args.device)
    sizes = suites.sizes_of(args)
    suites.complete(args, device)
    suites.check(args, device, sizes)
    if args.limit and not args.json:
        raise ValueError(
            "--limit: what processes of their own measure comes by a file: give --json=FILE"
        )
    torch.set_float32_matmul_precision("high")  # as in training
    if device.type == "cpu":
        distributed.keep_freed_memory()  # likewise
    settings = settings_of(args, sizes, device)
    reopen = partial(Figures, args.json, device, settings, notes={"left_out": []})
    if not args.limit:
        figures = measure_here(args, sizes, device, reopen(resume=args.resume))
    else:
        if not args.resume:
            args.json.unlink(missing_ok=True)
        whole = measure_apart(args, sizes, partial(reopen, resume=True))
        figures = reopen(resume=True)
        if not whole and args.kernels != "off":
            print("the baseline failed with kernels: everything without them", flush=True)
            args.kernels, args.json = "off", args.json.with_stem(f"{args.json.stem}_kernels_off")
            args.models, args.peers = ",".join(args.models), ",".join(args.peers)
            run(args)
    present(settings | figures.notes, figures)


def measure_here(args, sizes: dict, device: torch.device, figures: Figures) -> Figures:
    """Measure in this process all that the figures lack."""
    # All models of a size share the code that is compiled: by default the ninth would run eagerly, unnoticed.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    for size_name, size in sizes.items():
        done = {
            row["model"]: row.get("visits", 0) for row in figures.rows if row["size"] == size_name
        }
        left = [
            (n, model)
            for n in range(args.visits)
            for model in args.models
            if done.get(row_name(model), 0) <= n
        ]
        bench = Bench(args, size_name, size, device, figures) if left else None
        for number, (visit, model) in enumerate(left, 1):
            print(
                f"{size_name}, group {number}/{len(left)}: {row_name(model)}, visit {visit + 1}",
                flush=True,
            )
            bench.measure_group(model)
            release(device)
        del bench
        torch.compiler.reset()
        release(device)
    return figures
