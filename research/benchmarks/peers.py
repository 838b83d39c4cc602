"""Speed beside nanoGPT's own code, transformers and lm-eval's own model.

    git clone https://github.com/karpathy/nanoGPT FOLDER
    OMP_NUM_THREADS=1 python research/bench.py peers --nanogpt=FOLDER [--json=FILE]
    python research/bench.py peers --nanogpt=FOLDER --only=training --hidden_size=512

What is timed: training steps, generation of text, evaluation of multiple-choice questions, and
preparation of a corpus. All models have the same numbers of layers, heads, features and tokens,
about the same number of parameters, and random weights. Everything takes turns, so that whatever
else the machine does slows all of it, and a ratio compares two turns of the same round. With one
thread the time is that of the CPU, which does not count the time that other processes take; with
several it is that of the clock.
"""

import importlib.util
import json
import os
import random
import resource
import shutil
import statistics
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet
import torch

from data.tokenizer import END_OF_TEXT, byte_tokenizer
from evaluation.tasks import import_lm_eval
from model import build
from model.decoding import Decoder
from model.generation import Generation, Sampling
from research.benchmarks.figures import Figures
from training import distributed, optimizer
from training.config import TrainConfig
from utils import machine, tables

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

PARTS = ("training", "generation", "evaluation", "preparation")
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

# Of the questions: their number, the choices of each, and how many bytes a context and a
# continuation have at least and at most.
NUM_QUESTIONS = 100
NUM_CHOICES = 4
CONTEXT_BYTES = (60, 220)
CONTINUATION_BYTES = (5, 30)
OUR_BATCH_SIZE = 32
BATCH_SIZES_OF_LM_EVAL = (8, 32)

ROOT = Path(__file__).resolve().parents[2]
PREPARATION = "data/openwebtext/prepare.py"
# nanoGPT's script writes each split in so many pieces, and fails if it has fewer documents.
NUM_PIECES = "total_batches = 1024"
# Runs nanoGPT's script on a parquet file: the data set that it asks the hub for is this file.
RUN_NANOGPTS_PREPARATION = """
import runpy, sys
import datasets
load_dataset = datasets.load_dataset
datasets.load_dataset = lambda name, **options: load_dataset("parquet", data_files=sys.argv[2])
runpy.run_path(sys.argv[1], run_name="__main__")
"""
# Encodes the same documents, and writes nothing.
RUN_TIKTOKEN = """
import sys
import pyarrow.parquet, tiktoken
encoding = tiktoken.get_encoding("gpt2")
for text in pyarrow.parquet.read_table(sys.argv[1])["text"].to_pylist():
    encoding.encode_ordinary(text)
"""


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


def make_questions() -> list[tuple[str, str]]:
    """Return (context, continuation) for each choice of every question: random letters."""
    draw = random.Random(0)

    def draw_text(bounds: tuple[int, int]) -> str:
        return "".join(draw.choices(string.ascii_letters, k=draw.randint(*bounds)))

    requests = []
    for _ in range(NUM_QUESTIONS):
        context = draw_text(CONTEXT_BYTES)
        requests += [(context, draw_text(CONTINUATION_BYTES)) for _ in range(NUM_CHOICES)]
    return requests


def make_our_evaluation(model: torch.nn.Module) -> "TemplateLM":
    """Return our model as lm-eval uses it."""
    from evaluation.language_model import LanguageModel

    world = distributed.World(0, 1, torch.device("cpu"))
    return LanguageModel(model, byte_tokenizer(), world, OUR_BATCH_SIZE)


def make_lm_evals_evaluation(model: torch.nn.Module, batch_size: int) -> "TemplateLM":
    """Return lm-eval's own `hf` model around the same weights."""
    import tokenizers
    import transformers
    from lm_eval.models.huggingface import HFLM

    class ForTransformers(transformers.PreTrainedModel):
        """A model behind the interface of transformers."""

        config_class = transformers.PretrainedConfig

        def __init__(self) -> None:
            block_size = model.config.block_size
            super().__init__(transformers.PretrainedConfig(max_position_embeddings=block_size))
            self.model = model

        def forward(self, input_ids: torch.Tensor, **_: object):
            logits, _ = self.model(input_ids)
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(
            json.dumps(byte_tokenizer().to_hugging_face())
        ),
        eos_token=END_OF_TEXT,
    )
    return HFLM(ForTransformers(), tokenizer=tokenizer, batch_size=batch_size)


def make_scoring(
    language_model: "TemplateLM", requests: list[tuple[str, str]]
) -> Callable[[], list]:
    """Return a function that scores all requests with a model of lm-eval."""
    from lm_eval.api.instance import Instance

    instances = [
        Instance("loglikelihood", {}, request, number) for number, request in enumerate(requests)
    ]
    return lambda: language_model.loglikelihood(instances, disable_tqdm=True)


def write_documents(path: Path, num_bytes: int) -> None:
    """Write the source files of Python's standard library as documents of a parquet file.

    Args:
        num_bytes: of the documents together; the library has about 30 MB
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for file in sorted(library.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        text = file.read_text(encoding="utf-8", errors="ignore")[:num_bytes]
        texts.append(text)
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            break
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)


def copy_nanogpts_preparation(nanogpt_folder: Path, path: Path) -> None:
    """Copy nanoGPT's script, and let the copy write each split in one piece.

    Raises:
        ValueError: the folder does not have nanoGPT's script
    """
    script = nanogpt_folder / PREPARATION
    if not script.is_file():
        raise ValueError(f"--nanogpt={nanogpt_folder} has no {PREPARATION}")
    text = script.read_text(encoding="utf-8")
    if NUM_PIECES not in text:
        raise ValueError(f"{script} is not nanoGPT's: it does not set {NUM_PIECES}")
    path.write_text(text.replace(NUM_PIECES, "total_batches = 1"), encoding="utf-8")


def run_python(folder: Path, *arguments: str | Path) -> None:
    """Run Python in a process of its own, which finds nothing that an earlier one has stored.

    Args:
        folder: where it may store what it has read

    Raises:
        subprocess.CalledProcessError: it failed; its output is shown
    """
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "HF_DATASETS_CACHE": str(cache)},
        capture_output=True,
        check=False,
    )
    if result.returncode != 0:
        sys.stderr.write(result.stderr.decode())
        result.check_returncode()


# ---- rounds and rows ----


def read_cpu_clock() -> float:
    """Return the CPU seconds of this process, its threads, and its child processes that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(turns: dict[str, Callable[[], None]], rounds: int, work: str) -> dict[str, list[float]]:
    """Return the seconds of each function in each round, in which all of them take a turn."""
    clock = read_cpu_clock if torch.get_num_threads() == 1 else time.perf_counter
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
    """Return a row for each pair of names: medians, and how many times faster the first is.

    num_tokens: of one turn
    """
    rows = []
    for name, beside in pairs:
        ratios = [
            other_seconds / own_seconds
            for own_seconds, other_seconds in zip(seconds[name], seconds[beside])
        ]
        rows.append(
            {
                "work": work,
                "here": name,
                "beside": beside,
                "seconds": statistics.median(seconds[name]),
                "seconds_beside": statistics.median(seconds[beside]),
                "tokens_per_second": num_tokens / statistics.median(seconds[name]),
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


def measure_evaluation(size: dict[str, int], rounds: int) -> list[dict]:
    """Return rows of our evaluation beside lm-eval's own model at several batch sizes.

    Raises:
        RuntimeError: the two do not give the same log-likelihoods
    """
    import_lm_eval()
    model = build_ours(BASELINE, size).eval()
    requests = make_questions()
    turns = {BASELINE: make_scoring(make_our_evaluation(model), requests)}
    for batch_size in BATCH_SIZES_OF_LM_EVAL:
        name = f"lm-eval's hf, batch {batch_size}"
        turns[name] = make_scoring(make_lm_evals_evaluation(model, batch_size), requests)
    ours, *others = [[score for score, _ in turn()] for turn in turns.values()]
    for scores in others:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(scores), atol=1e-3, rtol=0)
    work = f"score {NUM_QUESTIONS} questions with {NUM_CHOICES} choices"
    seconds = measure(turns, rounds, work)
    num_tokens = sum(len(context) + len(continuation) for context, continuation in requests)
    pairs = [(BASELINE, name) for name in turns if name != BASELINE]
    return summarize(work, seconds, pairs, num_tokens)


def measure_preparation(nanogpt_folder: Path, megabytes: int, rounds: int) -> list[dict]:
    """Return rows of preparing GPT-2's tokens beside nanoGPT's script and tiktoken alone.

    Raises:
        ValueError: nanoGPT's script is not there
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "nanogpt_prepare.py"  # it writes beside itself
        copy_nanogpts_preparation(nanogpt_folder, script)
        documents = folder / "documents.parquet"
        write_documents(documents, megabytes * 1_000_000)
        out = folder / "out"
        our_arguments = [
            ROOT / "data" / "text" / "prepare.py",
            f"--source={documents}",
            "--tokenizer=gpt2",
            f"--workers={torch.get_num_threads()}",
            f"--out={out}",
        ]

        def prepare_here() -> None:
            shutil.rmtree(out, ignore_errors=True)
            run_python(folder, *our_arguments)

        our_name = "data/text/prepare.py"
        turns = {
            our_name: prepare_here,
            NANOGPT: lambda: run_python(folder, "-c", RUN_NANOGPTS_PREPARATION, script, documents),
            "tiktoken alone": lambda: run_python(folder, "-c", RUN_TIKTOKEN, documents),
        }
        work = f"tokenize {megabytes} MB"
        seconds = measure(turns, rounds, work)
        meta = json.loads((out / "meta.json").read_text())
    num_tokens = meta["train"]["tokens"] + meta["val"]["tokens"]
    return summarize(work, seconds, [(our_name, NANOGPT), (our_name, "tiktoken alone")], num_tokens)


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
    header = [
        "task",
        "this repository",
        "tokens/s",
        "other program or model",
        "tokens/s",
        "speedup [minimum to maximum]",
    ]
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
    if arguments.hidden_size % 64 != 0:
        raise ValueError(
            f"--hidden_size={arguments.hidden_size}: give a multiple of 64, the size of a head, so "
            "that all models have the same heads"
        )
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
    rounds = arguments.rounds
    rows = []
    if "training" in arguments.only:
        for compiled in (False, True):
            rows += measure_training(
                nanogpt, size, arguments.micro_batch_size, rounds, compiled=compiled
            )
    if "generation" in arguments.only:
        for batch_size in (1, 8):
            rows += measure_generation(nanogpt, size, batch_size, arguments.tokens, rounds)
    if "evaluation" in arguments.only:
        rows += measure_evaluation(size, rounds)
    if "preparation" in arguments.only:
        rows += measure_preparation(arguments.nanogpt, arguments.megabytes, rounds)
    for row in rows:
        figures.add(row, "work", "here", "beside")
    print(f"\n{size}, {torch.get_num_threads()} threads, {figures.format_chip()}\n")
    print(format_rows(rows))
