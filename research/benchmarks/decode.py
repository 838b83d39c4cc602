"""Tokens per second of one-token decoding: `bench.py decode`.

Every model decodes without a cache (a forward pass over the whole text for each token), with the cache eagerly, and by
the step that is made once: compiled on a CPU, a CUDA graph on a GPU, there also with fused kernels. A turn decodes
`--tokens` tokens after a context of `--context`, whose reading is not part of it; nor is drawing a token.
"""

from functools import partial

import torch

from model import build, kernels
from model.decoding import Decoder
from research.benchmarks.figures import Figures
from research.benchmarks.suites import EVERY_STEM, SIZE_KEYS, row_name, split_model
from research.benchmarks.timing import compared, measure, spread, waiting
from training import distributed
from utils import machine, tables

FIXED = {"cpu": "compiled", "cuda": "CUDA graph"}  # what a decoder's `compiled` means there


def uncached(model, ids, context: int):
    """A function that decodes the tokens of ids (B, T) after the context by whole forward passes."""

    @torch.no_grad()
    def turn():
        for end in range(context + 1, ids.shape[1] + 1):
            model.logits(model.hidden(ids[:, :end])[:, -1])

    return turn


def cached(model, ids, context: int, compiled: bool):
    """(a function that reads the context anew, one that decodes the tokens after it)."""
    decoder, tokens = Decoder(model, *ids.shape, compiled), ids[:, context:].unbind(1)

    def turn():
        for token in tokens:
            decoder.step(token)

    return lambda: decoder.prefill(ids[:, :context]), turn


def turns_of(name: str, model, ids, args) -> dict:
    """{(name, way): function}, and the preparation of each under (name, way, "context")."""
    fixed, turns = FIXED[ids.device.type], {(name, "uncached"): uncached(model, ids, args.context)}
    for way in ("cached", fixed) if args.compile == "True" else ("cached",):
        read, turn = cached(model, ids, args.context, way == fixed)
        turns |= {(name, way, "context"): read, (name, way): turn}
        print(f"  made {name}, {way}", flush=True)
    return turns


def models_of(args, size: dict, device: torch.device):
    """(name, function that makes the model) of each of --models, on a GPU with and without fused kernels."""

    def make(stem, keys, setting):
        torch.manual_seed(0)
        model = build(stem, **size, **keys).to(device).eval()
        kernels.use(model, setting, device)
        return model

    for text in args.models:
        stem, keys, given = split_model(text)
        if given:
            raise ValueError(
                f"--models: {text}: decoding is measured with and without kernels: leave the plus out"
            )
        for setting in ("off", "on") if device.type == "cuda" else ("off",):
            name = row_name(text) + (", fused kernels" if setting == "on" else "")
            yield name, partial(make, stem, keys, setting)


def rows_of(seconds: dict, tokens: int) -> list[dict]:
    """Tokens/s, and the speed relative to the same model without a cache: medians and 10th and 90th percentiles."""
    rows = []
    for (name, way), times in seconds.items():
        row = {"model": name, "way": way} | compared(
            "tokens_per_second", [tokens] * len(times), times
        )
        rows.append(row | compared("ratio", seconds[name, "uncached"], times))
    return rows


def markdown(rows: list[dict]) -> str:
    header = ["model", "decoding", "tokens/s (10th to 90th percentile)", "relative to uncached"]
    lines = [
        [
            f"`{row['model']}`",
            row["way"],
            spread(row, "tokens_per_second", ",.0f"),
            spread(row, "ratio", ".2f"),
        ]
        for row in rows
    ]
    return tables.format_markdown(header, lines)


def check(args, size: dict, device: torch.device) -> None:
    if (wanted := args.context + args.tokens) > size["block_size"]:
        raise ValueError(
            f"--context and --tokens: {wanted} together, --block_size={size['block_size']}: give fewer"
        )
    if args.compile == "True" and not machine.can_compile(device.type):
        raise ValueError(
            "--compile=True needs a C++ compiler and Python's headers: install them, or --compile=False"
        )


def run(args) -> None:
    """Print and store the figures of `bench.py decode`."""
    device = distributed.pick_device(args.device)
    size = {key: getattr(args, key) for key in SIZE_KEYS}
    args.models = args.models.split(",") if args.models else list(EVERY_STEM)
    check(args, size, device)
    # All models share the code that is compiled: by default the ninth would be refused.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    shape = (args.batch_size, args.context + args.tokens)
    ids = torch.randint(size["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    settings = {
        "size": size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "note": args.note,
    }
    settings |= {
        key: getattr(args, key) for key in ("batch_size", "context", "tokens", "rounds", "compile")
    }
    figures = Figures(args.json, device, settings, args.resume)
    for name, make in models_of(args, size, device):
        if figures.find(model=name):
            continue
        turns = {
            key: waiting(turn, 1, device) for key, turn in turns_of(name, make(), ids, args).items()
        }
        seconds = measure(turns, 1, args.rounds, f"decode, {name}")
        seconds = {key: times for key, times in seconds.items() if key[-1] != "context"}
        for row in rows_of(seconds, args.batch_size * args.tokens):
            figures.add(row, "model", "way")
    where = f"{figures.on_what()}, {torch.get_num_threads()} threads"
    print(f"{size}, {where}, batch_size={args.batch_size}\n\n{markdown(figures.rows)}")
