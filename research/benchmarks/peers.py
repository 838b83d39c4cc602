"""Speed beside nanoGPT's own code and transformers: training steps, and generation of text.

    git clone https://github.com/karpathy/nanoGPT FOLDER
    OMP_NUM_THREADS=1 python research/bench.py peers --nanogpt=FOLDER [--json=FILE]

All models have the same numbers of layers, heads, features and tokens, about the same number of
parameters, and random weights. They take turns in one process, so that whatever else the machine
does slows all of them, and a ratio compares two of them within the same round. With one thread the
time is that of the CPU, which does not count the time that other processes take; with several it is
that of the clock.
"""

import importlib.util
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from model import build
from model.decoding import Decoder
from model.generation import Generation, Sampling
from research.benchmarks.figures import Figures
from training import distributed, optimizer
from training.config import TrainConfig
from utils import machine, tables

BASELINE = "gpt-mha-rope"
# Names of models here, with their settings.
OUR_MODELS = {
    BASELINE: {},
    "DDL-gpt-mha-rope": {"ddl_value_channels": 4},
    "DDL-gpt-mha-rope-CC-EC": {"ddl_value_channels": 4},
}
NANOGPT = "nanoGPT"
TRANSFORMERS = "transformers GPT-2"
# AdamW's settings, which are those of nanoGPT's train.py
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0

PROMPT_LENGTH = 8


def load_nanogpt(folder: Path) -> ModuleType:
    """Import model.py of a copy of nanoGPT.

    Raises:
        ValueError: the folder is not a copy of it
    """
    file = folder / "model.py"
    if not file.is_file():
        raise ValueError(
            f"--nanogpt={folder} has no model.py; clone https://github.com/karpathy/nanoGPT and "
            "give its folder"
        )
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "GPTConfig") or not hasattr(module.GPT, "configure_optimizers"):
        raise ValueError(f"--nanogpt={folder}: model.py is not that of nanoGPT")
    return module


def build_ours(name: str, size: dict[str, int]) -> torch.nn.Module:
    torch.manual_seed(0)
    return build(name, **size, **OUR_MODELS[name])


def build_nanogpt(nanogpt: ModuleType, size: dict[str, int]) -> torch.nn.Module:
    torch.manual_seed(0)
    config = nanogpt.GPTConfig(
        block_size=size["block_size"],
        vocab_size=size["vocab_size"],
        n_layer=size["num_hidden_layers"],
        n_head=size["num_attention_heads"],
        n_embd=size["hidden_size"],
        dropout=0.0,
        bias=False,
    )
    return nanogpt.GPT(config)


def build_transformers(size: dict[str, int]) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=size["vocab_size"],
        n_positions=size["block_size"],
        n_embd=size["hidden_size"],
        n_layer=size["num_hidden_layers"],
        n_head=size["num_attention_heads"],
        # no token ends a text
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).eval()


# ---- what is timed ----


def make_training_step(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    clip: Callable[[torch.nn.Module], object],
    batch: tuple[torch.Tensor, torch.Tensor],
    compiled: bool,
) -> Callable[[], None]:
    """Return a function that trains a model (ids, targets) -> (logits, loss) for one step."""
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        _, loss = forward(*batch)
        loss.backward()
        clip(model)
        for each_optimizer in optimizers:
            each_optimizer.step()
            each_optimizer.zero_grad(set_to_none=True)

    return step


def make_our_step(
    name: str, size: dict[str, int], batch: tuple[torch.Tensor, torch.Tensor], compiled: bool
) -> Callable[[], None]:
    model = build_ours(name, size)
    config = TrainConfig(
        model=name,
        learning_rate=LEARNING_RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
    )
    optimizers = optimizer.build_optimizers(model, config)
    return make_training_step(
        model,
        optimizers,
        clip=lambda model: distributed.clip_grad_norm(model, GRAD_CLIP),
        batch=batch,
        compiled=compiled,
    )


def make_nanogpt_step(
    nanogpt: ModuleType,
    size: dict[str, int],
    batch: tuple[torch.Tensor, torch.Tensor],
    compiled: bool,
) -> Callable[[], None]:
    model = build_nanogpt(nanogpt, size)
    adamw = model.configure_optimizers(WEIGHT_DECAY, LEARNING_RATE, BETAS, "cpu")
    return make_training_step(
        model,
        [adamw],
        clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP),
        batch=batch,
        compiled=compiled,
    )


def make_our_generation(
    name: str, size: dict[str, int], batch_size: int, num_tokens: int, compiled: bool
) -> Callable[[], None]:
    """Return a function that generates texts with a cache; compiling is not part of it."""
    model = build_ours(name, size).eval()
    decoder = Decoder(model, batch_size, PROMPT_LENGTH + num_tokens, compiled)

    def generate() -> None:
        generation = Generation(
            decoder,
            prompts=[[0] * PROMPT_LENGTH] * batch_size,
            max_new_tokens=num_tokens,
            sampling=Sampling(),
            seeds=list(range(batch_size)),
            stop_token=None,
            vocab_size=size["vocab_size"],
        )
        for _ in generation:
            pass

    return generate


def make_nanogpt_generation(
    nanogpt: ModuleType, size: dict[str, int], batch_size: int, num_tokens: int
) -> Callable[[], None]:
    model = build_nanogpt(nanogpt, size).eval()
    prompt = torch.zeros(batch_size, PROMPT_LENGTH, dtype=torch.int64)
    return lambda: model.generate(prompt, num_tokens)


def make_transformers_generation(
    size: dict[str, int], batch_size: int, num_tokens: int
) -> Callable[[], None]:
    model = build_transformers(size)
    prompt = torch.zeros(batch_size, PROMPT_LENGTH, dtype=torch.int64)
    mask = torch.ones_like(prompt)
    return lambda: model.generate(
        prompt, attention_mask=mask, max_new_tokens=num_tokens, do_sample=True, top_k=0
    )


# ---- rounds and rows ----


def measure(turns: dict[str, Callable[[], None]], rounds: int, work: str) -> dict[str, list[float]]:
    """Return the seconds of each function in each round, in which all of them take a turn."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for name, turn in turns.items():
        start = time.perf_counter()
        turn()
        turn()
        print(f"  {work}: warmed up {name} in {time.perf_counter() - start:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            start = clock()
            turn()
            seconds[name].append(clock() - start)
    return seconds


def summarize(
    work: str, seconds: dict[str, list[float]], pairs: list[tuple[str, str]], num_tokens: int
) -> list[dict]:
    """Return a row for each pair (here, beside): medians, and how many times faster "here" is.

    num_tokens: of one turn
    """
    rows = []
    for here, beside in pairs:
        ratios = [
            other_seconds / own_seconds
            for own_seconds, other_seconds in zip(seconds[here], seconds[beside])
        ]
        rows.append(
            {
                "work": work,
                "here": here,
                "beside": beside,
                "seconds": statistics.median(seconds[here]),
                "seconds_beside": statistics.median(seconds[beside]),
                "tokens_per_second": num_tokens / statistics.median(seconds[here]),
                "tokens_per_second_beside": num_tokens / statistics.median(seconds[beside]),
                "ratio": statistics.median(ratios),
                "ratio_least": min(ratios),
                "ratio_greatest": max(ratios),
            }
        )
    return rows


def measure_training(
    nanogpt: ModuleType, size: dict[str, int], batch_size: int, rounds: int, compiled: bool
) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, batch_size, size["block_size"])
    ids, targets = torch.randint(size["vocab_size"], shape, generator=generator)
    turns = {
        name: make_our_step(name, size, (ids, targets), compiled=compiled) for name in OUR_MODELS
    }
    turns[NANOGPT] = make_nanogpt_step(nanogpt, size, (ids, targets), compiled=compiled)
    form = "compiled" if compiled else "eager"
    work = f"training step, {form}, d = {size['hidden_size']}"
    seconds = measure(turns, rounds, work)
    pairs = [(BASELINE, NANOGPT)]
    pairs += [(name, BASELINE) for name in OUR_MODELS if name != BASELINE]
    return summarize(work, seconds, pairs, num_tokens=ids.numel())


def measure_generation(
    nanogpt: ModuleType, size: dict[str, int], batch_size: int, num_tokens: int, rounds: int
) -> list[dict]:
    turns = {}
    for compiled in (False, True):
        for name in OUR_MODELS:
            title = f"{name}, compiled" if compiled else name
            turns[title] = make_our_generation(name, size, batch_size, num_tokens, compiled)
    turns[NANOGPT] = make_nanogpt_generation(nanogpt, size, batch_size, num_tokens)
    turns[TRANSFORMERS] = make_transformers_generation(size, batch_size, num_tokens)
    work = f"generate {num_tokens} tokens, batch {batch_size}"
    seconds = measure(turns, rounds, work)
    compiled_baseline = f"{BASELINE}, compiled"
    pairs = [(BASELINE, NANOGPT), (BASELINE, TRANSFORMERS), (compiled_baseline, BASELINE)]
    for name in OUR_MODELS:
        if name != BASELINE:
            pairs += [(name, BASELINE), (f"{name}, compiled", compiled_baseline)]
    return summarize(work, seconds, pairs, num_tokens=batch_size * num_tokens)


def format_rows(rows: list[dict]) -> str:
    """Return the rows as a Markdown table."""
    cells = [
        [
            row["work"],
            f"`{row['here']}`",
            f"{row['tokens_per_second']:,.0f}",
            row["beside"],
            f"{row['tokens_per_second_beside']:,.0f}",
            f"{row['ratio']:.2f} [{row['ratio_least']:.2f} to {row['ratio_greatest']:.2f}]",
        ]
        for row in rows
    ]
    header = ["work", "here", "tokens/s", "beside", "tokens/s", "times faster [least to greatest]"]
    return tables.format_markdown(header, cells)


def run(arguments: Namespace) -> None:
    """Print and store the figures of `bench.py peers`."""
    nanogpt = load_nanogpt(arguments.nanogpt)
    if not machine.can_compile("cpu"):
        raise ValueError("peers compares compiled models; install a C++ compiler and Python.h")
    distributed.keep_freed_memory()  # as in training
    # all models share the code that is compiled; by default torch refuses the ninth
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    num_heads = arguments.hidden_size // 64
    size = {
        "vocab_size": arguments.vocab_size,
        "block_size": arguments.block_size,
        "num_hidden_layers": arguments.num_hidden_layers,
        "num_attention_heads": num_heads,
        "hidden_size": arguments.hidden_size,
        "head_dim": 64,
    }
    settings = {
        "size": size,
        "micro_batch_size": arguments.micro_batch_size,
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "dtype": "float32",
    }
    figures = Figures(arguments.json, torch.device("cpu"), settings)
    rows = []
    for compiled in (False, True):
        rows += measure_training(
            nanogpt, size, arguments.micro_batch_size, arguments.rounds, compiled=compiled
        )
    for batch_size in (1, 8):
        rows += measure_generation(nanogpt, size, batch_size, arguments.tokens, arguments.rounds)
    for row in rows:
        figures.add(row, "work", "here", "beside")
    print(f"\n{size}, {torch.get_num_threads()} threads, {figures.on_what()}\n")
    print(format_rows(rows))
