"""Requests per second of evaluation next to lm-eval's own `hf` model: `bench.py eval`.

Both score the same requests of generated text with the same weights, batch size, dtype and threads, in turns: log-
likelihoods of continuations, as multiple-choice tasks ask for. lm-eval's model runs ours behind the interface of
transformers, so that what differs is how requests are read. Four formats, with the lengths of the tasks they stand for.
"""

import json
import random
import string

import torch

from benchmarks.contender import waiting
from benchmarks.figures import Figures
from benchmarks.suites import QUICK, SIZE_KEYS, row_name, split_model
from benchmarks.timing import compared, measure
from data import tokenizer_json
from data.tokenizer import END_OF_TEXT, byte_tokenizer
from evaluation.tasks import import_lm_eval
from model import build, kernels
from training import distributed

# Tokens (here bytes) of the shared context, of what differs before the continuation, and of the continuation; choices.
FORMATS = {
    "ARC-like": ((60, 250), (0, 0), (5, 30), 4),
    "HellaSwag-like": ((60, 120), (0, 0), (20, 45), 4),
    "WinoGrande-like": ((10, 25), (1, 3), (5, 15), 2),
    "one-token choices": ((60, 250), (0, 0), (1, 1), 4),
}


def wrapped(model):
    """The model behind the interface of transformers. ValueError: not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("lm-eval's hf model needs transformers: pip install transformers accelerate") from error

    class Wrapped(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self):
            super().__init__(transformers.PretrainedConfig(max_position_embeddings=model.config.block_size))
            self.inner = model

        def forward(self, input_ids, **kwargs):
            return transformers.modeling_outputs.CausalLMOutput(logits=self.inner(input_ids)[0])

    return Wrapped()


def byte_tokenizer_of_transformers():
    """`byte_tokenizer()` as transformers has tokenizers."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    encoding = byte_tokenizer()
    description = tokenizer_json.write(encoding._pat_str, [bytes([value]) for value in range(256)], END_OF_TEXT)
    fast = Tokenizer.from_str(json.dumps(description))
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END_OF_TEXT)


def requests_of(name: str, items: int) -> list[tuple[str, str]]:
    """(context, continuation) of every choice of `items` questions."""
    shared, own, continuation, choices = FORMATS[name]
    draw, pairs = random.Random(name), []

    def text(bounds):
        return "".join(draw.choices(string.ascii_letters, k=draw.randint(*bounds)))

    for _ in range(items):
        context, ending = text(shared), text(continuation)
        for _ in range(choices):
            # With contexts of their own, choices share the continuation.
            pairs.append((context + text(own), ending if own[1] else text(continuation)))
    return pairs


def contenders(model, args, device: torch.device) -> dict:
    """{name: function from requests to their (log-likelihood, greedy)}."""
    import_lm_eval()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from evaluation.language_model import LanguageModel

    half = args.dtype == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)
    world = distributed.World(0, 1, device)
    ours = LanguageModel(model, byte_tokenizer(), world, args.batch_size, autocast)
    theirs = HFLM(
        wrapped(model), tokenizer=byte_tokenizer_of_transformers(), batch_size=args.batch_size,
        mixed_precision_dtype=torch.bfloat16 if half else None, softmax_dtype=torch.float32,
    )  # fmt: skip

    def scorer(language_model):
        def score(pairs):
            instances = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
            return language_model.loglikelihood(instances, disable_tqdm=True)

        return score

    return {"ours": scorer(ours), "hf": scorer(theirs)}


def difference(ours: list, theirs: list) -> float:
    """The largest difference of two lists of log-likelihoods."""
    return max(abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True))


def rows_of(model: str, requests: dict, seconds: dict, differences: dict) -> list[dict]:
    """Requests/s of both and our speed relative to hf's, by format and in all: medians, 10th and 90th percentiles."""
    total = {way: [sum(turns) for turns in zip(*(seconds[f, way] for f in requests))] for way in ("ours", "hf")}
    times = {(f, way): seconds[f, way] for f in requests for way in total}
    times |= {("all", way): turns for way, turns in total.items()}
    rows = []
    for name in (*requests, "all"):
        count = sum(map(len, requests.values())) if name == "all" else len(requests[name])
        row = {"model": model, "format": name, "requests": count}
        row["difference"] = max(differences.values()) if name == "all" else differences[name]
        for way in ("ours", "hf"):
            row |= compared(f"{way}_requests_per_second", [count] * len(total[way]), times[name, way])
        rows.append(row | compared("ratio", times[name, "hf"], times[name, "ours"]))
    return rows


def markdown(rows: list[dict]) -> str:
    lines = [
        "| model | requests | ours/s | lm-eval's hf/s | ratio (10th to 90th percentile) | largest difference in nats |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        speeds = f"{r['ours_requests_per_second']:,.0f} | {r['hf_requests_per_second']:,.0f}"
        ratio = f"{r['ratio']:.2f} ({r['ratio_p10']:.2f} to {r['ratio_p90']:.2f})"
        what = f"{r['requests']:,} {r['format']}"
        lines.append(f"| `{r['model']}` | {what} | {speeds} | {ratio} | {r['difference']:.1e} |")
    return "\n".join(lines)


def check(args, size: dict) -> None:
    if min(args.rounds, args.batch_size, args.items) < 1:
        raise ValueError("--rounds, --batch_size and --items: give 1 or more")
    if size["vocab_size"] < 257:
        raise ValueError(f"--vocab_size={size['vocab_size']}: the requests are bytes, give 257 or more")


def run(args) -> None:
    """Print and store the figures of `bench.py eval`."""
    device = distributed.pick_device(args.device)
    size = {**QUICK, "block_size": 512} | {k: getattr(args, k) for k in SIZE_KEYS if getattr(args, k) is not None}
    check(args, size)
    settings = {"size": size, "device": str(device), "threads": torch.get_num_threads(), "note": args.note}
    settings |= {key: getattr(args, key) for key in ("batch_size", "dtype", "items", "rounds")}
    figures, requests = (
        Figures(args.json, device, settings, args.resume),
        {f: requests_of(f, args.items) for f in FORMATS},
    )
    for text in args.models.split(","):
        if figures.find(model=row_name(text)):
            continue
        stem, keys, given = split_model(text)
        torch.manual_seed(0)
        model = build(stem, **size, **keys).to(device).eval()
        kernels.use(model, given.get("setting", "auto"), device)
        score = contenders(model, args, device)
        found = {name: difference(score["ours"](pairs), score["hf"](pairs)) for name, pairs in requests.items()}
        turns = {
            (name, way): waiting(lambda score=each, pairs=pairs: score(pairs), 1, device)
            for name, pairs in requests.items()
            for way, each in score.items()
        }
        for row in rows_of(row_name(text), requests, measure(turns, 0, args.rounds, "eval"), found):
            figures.add(row, "model", "format")
    where = f"{figures.on_what()}, {torch.get_num_threads()} threads"
    print(f"{size}, {args.dtype} on {where}, batch_size={args.batch_size}\n\n{markdown(figures.rows)}")
