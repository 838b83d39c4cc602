"""`bench.py peers`: the speed of the additive model beside a plain GPT and transformers' GPT-2.

The plain GPT is of nanoGPT's kind, with any number of heads. For the token ids t of a sequence it computes

    x = E[t] + P                                                    embeddings of tokens and positions
    x = x + W_o attention(W_q n, W_k n, W_v n),  n = LayerNorm(x)   in each of the blocks
    x = x + W_2 gelu(W_1 LayerNorm(x))
    logits = E LayerNorm(x)

without biases, and generates without a cache, as nanoGPT does. transformers' GPT-2 has a cache. All models
have the same width, depth, heads and vocabulary. They take turns, so that other load on the machine slows all
of them; a ratio compares two turns of one round. `bench.py step` and `decode` compare the other streams.
"""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from configurator import option
from data.tokenizer import END_OF_TEXT, byte_tokenizer
from evaluation.tasks import import_lm_eval
from model import build
from model.decoding import Decoder
from model.generation import Generation, Sampling
from research.benchmarks import timing
from research.benchmarks.contender import Contender
from research.benchmarks.figures import Figures
from research.benchmarks.options import MeasurementOptions, SizeOptions
from research.benchmarks.suites import BASELINE, SIZE_KEYS
from training import distributed
from utils import tables

PLAIN = "plain GPT"
TRANSFORMERS = "transformers GPT-2"
PROMPT_LENGTH = 8
STORED_KEYS = ("micro_batch_size", "rounds", "dtype", "compile")

Size = dict[str, int]


class PlainBlock(nn.Module):
    """Attention and an MLP, each added to its input x (B, T, d)."""

    def __init__(self, d: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(d, bias=False)
        self.query_key_value = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.norm_2 = nn.LayerNorm(d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, num_heads, T, d / num_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """The plain GPT, with the interface of `model.gpt.GPT`: logits, loss = model(ids, targets)."""

    def __init__(self, size: Size):
        super().__init__()
        d = size["hidden_size"]
        self.tokens = nn.Embedding(size["vocab_size"], d)
        self.positions = nn.Embedding(size["block_size"], d)
        self.blocks = nn.Sequential(
            *(PlainBlock(d, size["num_attention_heads"]) for _ in range(size["num_hidden_layers"]))
        )
        self.norm = nn.LayerNorm(d, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, ids: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits (B, T, vocab_size) and, with targets (B, T), the mean loss in nats."""
        x = self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Append sampled tokens to ids (B, T), each after a forward pass over the whole text."""
        for _ in range(num_tokens):
            logits, _ = self(ids)
            next_ids = torch.multinomial(logits[:, -1].softmax(-1), num_samples=1)
            ids = torch.cat([ids, next_ids], dim=1)
        return ids


class TransformersGPT2(nn.Module):
    """transformers' GPT-2 with the interface of `model.gpt.GPT`, for training steps."""

    def __init__(self, size: Size):
        super().__init__()
        self.model = build_transformers_gpt2(size)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return None and the mean loss in nats."""
        logits = self.model(ids, use_cache=False).logits.float().flatten(0, 1)
        return None, F.cross_entropy(logits, targets.flatten())


def build_transformers_gpt2(size: Size) -> nn.Module:
    """Build transformers' GPT-2, without dropout as long as it is in evaluation mode."""
    import transformers

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


def build_models(size: Size, device: torch.device) -> dict[str, nn.Module]:
    """Build the three models by their names."""
    torch.manual_seed(0)
    models = {
        BASELINE: build(BASELINE, **size),
        PLAIN: PlainGPT(size),
        TRANSFORMERS: build_transformers_gpt2(size),
    }
    return {name: model.to(device).eval() for name, model in models.items()}


class Task(NamedTuple):
    """Work that the models do in turns: a function for each, and the tokens of one turn."""

    name: str
    num_tokens: int
    turns: dict[str, Callable[[], object]]


def make_training_task(args: SimpleNamespace, size: Size, device: torch.device) -> Task:
    """Return a training step of the additive model and of the plain GPT."""
    shape = (2, args.micro_batch_size, args.block_size)
    batch = torch.randint(args.vocab_size, shape).to(device)
    models = build_models(size, device)
    dtype = getattr(torch, args.dtype)
    compiled = args.compile
    turns = {
        name: Contender(name, models[name], lambda: batch, device, dtype, compiled).train
        for name in (BASELINE, PLAIN)
    }
    return Task(f"training step, d = {args.hidden_size}", batch[0].numel(), turns)


def make_generation_task(args: SimpleNamespace, size: Size, device: torch.device) -> Task:
    """Return the generation of `--micro_batch_size` texts, eagerly."""
    models = build_models(size, device)
    prompts = torch.zeros(args.micro_batch_size, PROMPT_LENGTH, dtype=torch.int64, device=device)
    decoder = Decoder(models[BASELINE], len(prompts), PROMPT_LENGTH + args.tokens, compiled=False)

    def generate_here() -> None:
        generation = Generation(
            decoder,
            prompts=prompts.tolist(),
            max_new_tokens=args.tokens,
            sampling=Sampling(),
            seeds=list(range(len(prompts))),
            stop_token=None,
            vocab_size=args.vocab_size,
        )
        list(generation)

    turns = {
        BASELINE: generate_here,
        PLAIN: lambda: models[PLAIN].generate(prompts, args.tokens),
        TRANSFORMERS: lambda: models[TRANSFORMERS].generate(
            prompts, max_new_tokens=args.tokens, do_sample=True, top_k=0
        ),
    }
    name = f"generate {args.tokens} tokens, batch {len(prompts)}"
    return Task(name, len(prompts) * args.tokens, turns)


def make_evaluation_task(args: SimpleNamespace, size: Size, device: torch.device) -> Task:
    """Return the scoring of questions, here and by lm-eval's `hf` model with transformers' GPT-2."""
    import_lm_eval()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from evaluation.language_model import LanguageModel

    models = build_models(size, device)
    tokenizer_object = Tokenizer.from_str(json.dumps(byte_tokenizer().to_hugging_face()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_object, eos_token=END_OF_TEXT)
    ours = LanguageModel(models[BASELINE], byte_tokenizer(), distributed.World(0, 1, device), 32)
    peer = HFLM(models[TRANSFORMERS], tokenizer=tokenizer, batch_size=32)
    letters = 5 * string.ascii_letters  # each is a token
    contexts = [letters[number : 2 * number + 60] for number in range(100)]
    requests = [(context, letters[:length]) for context in contexts for length in (5, 12, 19, 26)]
    instances = [Instance("loglikelihood", {}, request, 0) for request in requests]
    turns = {
        BASELINE: lambda: ours.loglikelihood(instances, disable_tqdm=True),
        TRANSFORMERS: lambda: peer.loglikelihood(instances, disable_tqdm=True),
    }
    num_tokens = sum(len(context) + len(continuation) for context, continuation in requests)
    return Task("score 100 questions with 4 choices", num_tokens, turns)


def measure_task(task: Task, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each peer: the speeds, and the speed of the additive model relative to it."""
    turns = {
        name: timing.repeat_and_synchronize(turn, 1, device) for name, turn in task.turns.items()
    }
    seconds = timing.measure(turns, warmup=2, rounds=rounds, label=task.name)
    tokens = [task.num_tokens] * rounds
    return [
        {
            "task": task.name,
            "peer": peer,
            **timing.compute_speed_ratios("tokens_per_second", tokens, seconds[BASELINE]),
            **timing.compute_speed_ratios("peer_tokens_per_second", tokens, seconds[peer]),
            **timing.compute_speed_ratios("ratio", seconds[peer], seconds[BASELINE]),
        }
        for peer in list(turns)[1:]
    ]


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = ["task", f"tokens/s of {BASELINE}", "peer", "its tokens/s", "speed relative to it"]
    cells = [
        [
            row["task"],
            timing.format_spread(row, "tokens_per_second", ",.0f"),
            row["peer"],
            timing.format_spread(row, "peer_tokens_per_second", ",.0f"),
            timing.format_spread(row, "ratio", ".2f"),
        ]
        for row in rows
    ]
    return tables.format_markdown(header, cells)


@dataclass(frozen=True)
class Options(SizeOptions, MeasurementOptions):
    """What is measured."""

    micro_batch_size: int = option(
        8,
        "number of sequences per training step, and of texts to generate",
        low=1,
    )
    tokens: int = option(200, "number of tokens to generate per turn", low=1)
    rounds: int = option(7, "number of measured turns of each model", low=1)
    dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of autocast")
    compile: bool = option(True, "compile training steps")


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py peers`."""
    device = distributed.pick_device(args.device)
    size = {key: getattr(args, key) for key in SIZE_KEYS}
    settings = {key: getattr(args, key) for key in STORED_KEYS}
    settings.update({"size": size, "threads": torch.get_num_threads()})
    figures = Figures(args.json, device, settings)
    for make_task in (make_training_task, make_generation_task, make_evaluation_task):
        for row in measure_task(make_task(args, size, device), args.rounds, device):
            figures.add(row, "task", "peer")
    print(f"\n{size}, {settings['threads']} threads, {figures.format_chip()}\n")
    print(format_table(figures.rows))
