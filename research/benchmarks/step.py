"""Speed and memory of training steps and forward passes, against the baseline's.

Models are measured in groups: the baseline, one model and, with --peers=transcription, the model's
straight transcription. They take turns, so that what else the machine does falls on all alike; every
figure that compares two of them comes from rounds in which both ran. A ratio is the baseline's time
over the model's in the same round: the median over rounds, with the 10th and 90th percentile.
"""

import gc
import statistics

import torch

from research.benchmarks import suites
from research.benchmarks.contender import Contender, memory
from research.benchmarks.figures import Figures, launches_used
from research.benchmarks.suites import BASELINE, row_name
from research.benchmarks.timing import compared, measure, percentiles, spread, waiting
from research.benchmarks.transcription import Transcription
from training import distributed
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import tables

# What "activation" figures are on a GPU and on a CPU.
PEAK = "peak of a forward and backward pass minus weights, gradients and the optimizer's state"
SAVED = "saved by a forward pass for its backward pass"
WAYS = {"train": "", "evaluate": "forward_"}  # a turn: what its figures begin with


class Bench:
    """One size: its baseline, which stays, and the models that come and go."""

    def __init__(self, args, size_name: str, size: dict, device: torch.device, figures: Figures):
        self.args, self.size_name, self.size, self.device = args, size_name, size, device
        self.figures, self.compiled = figures, args.compile == "True"
        self.tokens = args.micro_batch_size * size["block_size"]
        shape = (2, args.micro_batch_size, size["block_size"])
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(size["vocab_size"], shape, generator=generator).to(device)
        self.baseline = self.contender(BASELINE, suites.built(BASELINE, size, args, device))

    def contender(self, name: str, model, compiled: bool | None = None, **options) -> Contender:
        compiled = self.compiled if compiled is None else compiled
        dtype = getattr(torch, self.args.dtype)
        return Contender(name, model, lambda: self.ids, self.device, dtype, compiled, **options)

    def transcriptions(self, own: Contender) -> list[Contender]:
        """Eager and, with --compile=True, compiled, those that can take a step here."""
        try:
            model = Transcription(own.name, own.model.config)
        except ValueError:  # the stem has none
            return []
        model.load_state_dict(own.model.state_dict())
        eager = self.contender(f"{own.name} transcription (eager)", model, compiled=False)
        found, name = [eager], f"{own.name} transcription (compiled)"
        found += [self.contender(name, None, partner=eager)] if self.compiled else []
        able = []
        for contender in found:
            try:
                waiting(contender.train, 1, self.device)()
                able.append(contender)
            except torch.OutOfMemoryError as error:
                contender.adamw.zero_grad(set_to_none=True)
                first = str(error).partition("\n")[0]
                print(f"left out: {contender.name}: {first}", flush=True)
                release(self.device)
        return able

    def measure(self, model: str) -> None:
        """One model beside the baseline and its peers: a row of each, stored when it is complete."""
        args = self.args
        launches_used()  # those until here are another model's
        own = self.baseline
        if model != BASELINE:
            made = suites.built(model, self.size, args, self.device)
            own = self.contender(row_name(model), made)
        peers = self.transcriptions(own) if args.peers == "transcription" else []
        group = list({id(each): each for each in (self.baseline, own, *peers)}.values())
        rows = {each.name: {"size": self.size_name, "model": each.name} for each in group}
        for each in group:
            rows[each.name]["parameters"] = each.model.num_parameters()
            rows[each.name]["compiled"] = each.compiled
        for way, prefix in WAYS.items():
            turns = {e.name: waiting(getattr(e, way), args.steps, self.device) for e in group}
            seconds = measure(turns, args.warmup, args.rounds, f"{self.size_name}, {way}")
            seconds = {name: [t / args.steps for t in times] for name, times in seconds.items()}
            for name, times in seconds.items():
                rows[name] |= figures_of(times, seconds[BASELINE], prefix, self.tokens)
            if peers:
                peer, mine = seconds[peers[-1].name], seconds[own.name]
                rows[own.name] |= compared(f"{prefix}speedup", peer, mine)
        base = memory(self.baseline, self.tokens)["activation_bytes_per_token"]
        for each in group:
            row = rows[each.name]
            row |= memory(each, self.tokens)
            row["activation_ratio"] = row["activation_bytes_per_token"] / base
            if peak := get_peak_flops(self.device):
                rate = row["tokens_per_second"]
                row["mfu"] = compute_nominal_flops_per_token(each.model) * rate / peak
        rows[own.name] |= launches_used()
        for each in group:
            if each is own or each is not self.baseline:
                self.figures.add(rows[each.name], "size", "model")


def figures_of(own: list[float], base: list[float], prefix: str, tokens: int) -> dict[str, float]:
    """Tokens/s of a model's rounds, of the baseline's in the same rounds (seconds), and the ratio
    round by round."""
    figures = percentiles(f"{prefix}tokens_per_second", [tokens / seconds for seconds in own])
    beside = statistics.median(tokens / seconds for seconds in base)
    figures[f"{prefix}baseline_tokens_per_second"] = beside
    return figures | compared(f"{prefix}ratio", base, own)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def number(row: dict, key: str, form: str, scale: float = 1) -> str | None:
    return format(row[key] / scale, form) if key in row else None


COLUMNS = {
    "model": lambda r: f"`{r['model']}`",
    "parameters": lambda r: number(r, "parameters", ",.0f"),
    "training tokens/s": lambda r: spread(r, "tokens_per_second", ",.0f"),
    "additive in the same rounds": lambda r: number(r, "baseline_tokens_per_second", ",.0f"),
    "relative to additive (10th to 90th percentile)": lambda r: spread(r, "ratio", ".3f"),
    "forward tokens/s": lambda r: spread(r, "forward_tokens_per_second", ",.0f"),
    "forward relative to additive": lambda r: spread(r, "forward_ratio", ".3f"),
    "training speed over its transcription": lambda r: spread(r, "speedup", ".2f"),
    "forward speed over its transcription": lambda r: spread(r, "forward_speedup", ".2f"),
    "MFU": lambda r: number(r, "mfu", ".1%"),
    "activations per token, KiB": lambda r: number(r, "activation_bytes_per_token", ",.0f", 2**10),
    "activations relative to additive": lambda r: number(r, "activation_ratio", ".2f"),
    "peak memory, GiB": lambda r: number(r, "peak_memory_bytes", ".1f", 2**30),
}


def markdown(rows: list[dict]) -> str:
    """The rows as a table, without the columns in which no row has anything."""
    cells = {title: [column(row) for row in rows] for title, column in COLUMNS.items()}
    cells = {title: column for title, column in cells.items() if any(column)}
    return tables.format_markdown(list(cells), zip(*cells.values()))


def run(args) -> None:
    """Print and store the figures of `bench.py step`; what the file has is not measured again."""
    device = distributed.pick_device(args.device)
    peers = suites.SUITES[args.suite].peers
    args.peers = args.peers or ("transcription" if peers else "none")
    sizes = suites.complete(args, device)
    torch.set_float32_matmul_precision("high")  # as in training
    if device.type == "cpu":
        distributed.keep_freed_memory()  # likewise
    # All models share the code that is compiled: by default the ninth would run eagerly, unnoticed.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    settings = {"suite": args.suite, "sizes": sizes, "device": device.type, "dtype": args.dtype}
    settings |= {"threads": torch.get_num_threads(), "micro_batch_size": args.micro_batch_size}
    settings |= {
        "kernels": args.kernels,
        "state_checkpoint_interval": args.state_checkpoint_interval,
    }
    settings |= {"rounds": args.rounds, "steps_per_round": args.steps}
    settings["activations"] = PEAK if device.type == "cuda" else SAVED
    figures = Figures(args.json, device, settings, args.resume)
    for size_name, size in sizes.items():
        left = [m for m in args.models if not figures.find(size=size_name, model=row_name(m))]
        bench = Bench(args, size_name, size, device, figures) if left else None
        for count, model in enumerate(left, 1):
            print(f"{size_name}, {count}/{len(left)}: {row_name(model)}", flush=True)
            bench.measure(model)
            release(device)
        del bench
        torch.compiler.reset()
        release(device)
    for size_name, size in sizes.items():
        rows = [row for row in figures.rows if row["size"] == size_name]
        print(f"\n{size_name}: {size}, {args.dtype} on {figures.on_what()}\n\n{markdown(rows)}")
    print(f"\nactivations: {settings['activations']}")
