"""`bench.py decode`: measure the tokens per second of one-token decoding.

Every model decodes without a cache (a forward pass over the whole text for each token) and with the
cache, on a GPU also with fused kernels. A turn decodes `--tokens` tokens after a context of
`--context` tokens. Reading the context and sampling a token are not part of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from configurator import option
from model import build, kernels
from research.benchmarks.figures import Figures
from research.benchmarks.options import MeasurementOptions, SizeOptions
from research.benchmarks.suites import ALL_MODELS, SIZE_KEYS, make_row_name, parse_model
from research.benchmarks.timing import (
    compute_speed_ratios,
    format_spread,
    measure,
    repeat_and_synchronize,
)
from utils import processes, tables

Turn = Callable[[], None]


def make_uncached_turn(model: torch.nn.Module, ids: torch.Tensor, context: int) -> Turn:
    """Return a function that decodes the tokens of ids (B, T) after the context without a cache."""

    @torch.no_grad()
    def decode() -> None:
        for end in range(context + 1, ids.shape[1] + 1):
            model.logits(model.hidden(ids[:, :end])[:, -1])

    return decode


def make_cached_turn(model: torch.nn.Module, ids: torch.Tensor, context: int) -> tuple[Turn, Turn]:
    """Return a function that reads the context, and one that decodes the tokens after it."""
    cache = model.new_cache(ids.shape[1])
    tokens = ids[:, context:].split(1, dim=1)

    @torch.no_grad()
    def read(new_ids: torch.Tensor) -> None:
        model.logits(model.hidden(new_ids, cache, cache.reserve(new_ids))[:, -1])

    def read_context() -> None:
        nonlocal cache
        cache = model.new_cache(ids.shape[1])
        read(ids[:, :context])

    def decode() -> None:
        for token in tokens:
            read(token)

    return read_context, decode


def make_turns(
    name: str, model: torch.nn.Module, ids: torch.Tensor, args: SimpleNamespace
) -> dict[tuple[str, ...], Turn]:
    """Return the functions of each way to decode by (name, way).

    The function that reads the context comes before each, as (name, way, "context").
    """
    read_context, decode = make_cached_turn(model, ids, args.context)
    print(f"  built {name}", flush=True)
    return {
        (name, "uncached"): make_uncached_turn(model, ids, args.context),
        (name, "cached", "context"): read_context,
        (name, "cached"): decode,
    }


def list_models(
    args: SimpleNamespace, size: dict[str, Any], device: torch.device
) -> Iterator[tuple[str, Callable[[], torch.nn.Module]]]:
    """Yield the name of each model of `--models` and a function that builds it.

    On a GPU a model comes with and without fused kernels.

    Raises:
        ValueError: a model has settings of its kernels
    """

    def build_model(
        model_name: str, settings: dict[str, Any], kernel_setting: str
    ) -> torch.nn.Module:
        torch.manual_seed(0)
        model = build(model_name, **size, **settings).to(device).eval()
        kernels.use(model, kernel_setting, device)
        return model

    kernel_settings = ("off", "on") if device.type == "cuda" else ("off",)
    for text in args.models:
        model_name, settings, kernel_options = parse_model(text)
        if kernel_options:
            raise ValueError(
                f"--models: {text}: decoding is always measured with and without kernels; omit the "
                "plus and what follows it"
            )
        for kernel_setting in kernel_settings:
            suffix = ", fused kernels" if kernel_setting == "on" else ""
            yield (
                make_row_name(text) + suffix,
                partial(build_model, model_name, settings, kernel_setting),
            )


def make_rows(seconds: dict[tuple[str, str], list[float]], num_tokens: int) -> list[dict[str, Any]]:
    """Return tokens per second, and the speed relative to the same model without a cache.

    Args:
        seconds: of each round, by (name, way)
        num_tokens: decoded in a round
    """
    rows = []
    for (name, way), times in seconds.items():
        rows.append(
            {
                "model": name,
                "way": way,
                **compute_speed_ratios("tokens_per_second", [num_tokens] * len(times), times),
                **compute_speed_ratios("ratio", seconds[name, "uncached"], times),
            }
        )
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = ["model", "decoding", "tokens/s (10th to 90th percentile)", "relative to uncached"]
    cells = []
    for row in rows:
        cells.append(
            [
                f"`{row['model']}`",
                row["way"],
                format_spread(row, "tokens_per_second", ",.0f"),
                format_spread(row, "ratio", ".2f"),
            ]
        )
    return tables.format_markdown(header, cells)


@dataclass(frozen=True)
class Options(SizeOptions, MeasurementOptions):
    """What is decoded."""

    models: str | None = option(
        None,
        "models separated by commas, each as MODEL or MODEL:d_v (default: all models)",
    )
    batch_size: int = option(1, "number of sequences to decode together", low=1)
    context: int = option(128, "number of context tokens before the decoded ones", low=1)
    tokens: int = option(32, "number of tokens to decode per turn", low=1)
    rounds: int = option(10, "number of measured turns of each way to decode", low=1)
    note: str = option(
        "",
        "note to store with the figures, for example on other load on the machine",
    )


def check_arguments(args: SimpleNamespace, size: dict[str, Any]) -> None:
    """Raise ValueError if the text is too long."""
    num_tokens = args.context + args.tokens
    if num_tokens > size["block_size"]:
        raise ValueError(
            f"--context and --tokens: {num_tokens} together, more than "
            f"--block_size={size['block_size']}: give fewer"
        )


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py decode`."""
    device = processes.pick_device(args.device)
    size = {key: getattr(args, key) for key in SIZE_KEYS}
    args.models = args.models.split(",") if args.models else list(ALL_MODELS)
    check_arguments(args, size)
    shape = (args.batch_size, args.context + args.tokens)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size["vocab_size"], shape, generator=generator).to(device)
    settings = {
        "size": size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "note": args.note,
        "batch_size": args.batch_size,
        "context": args.context,
        "tokens": args.tokens,
        "rounds": args.rounds,
    }
    figures = Figures(args.json, device, settings, args.resume)
    for name, build_model in list_models(args, size, device):
        if figures.find(model=name):
            continue
        turns = make_turns(name, build_model(), ids, args)
        functions = {key: repeat_and_synchronize(turn, 1, device) for key, turn in turns.items()}
        seconds = measure(functions, warmup=1, rounds=args.rounds, label=f"decode, {name}")
        decoding_seconds = {key: times for key, times in seconds.items() if key[-1] != "context"}
        for row in make_rows(decoding_seconds, args.batch_size * args.tokens):
            figures.add(row, "model", "way")
    print(
        f"{size}, {figures.format_chip()}, {torch.get_num_threads()} threads, "
        f"batch_size={args.batch_size}\n\n{format_table(figures.rows)}"
    )
