"""Which published figures (results/published.csv) stand beside a run: those of the same corpus,
number of tokens, recipe and model. Small deviations are named under the table; others leave the
figures out, with the reasons.
"""

import csv
import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from huggingface.card import records_of
from model import model_class
from model.options import collect_options, legacy_defaults
from training.config import TrainConfig
from training.optimizer import get_learning_rate

FILE = Path(__file__).parents[1] / "results/published.csv"
TOKENS, VALIDATION_TOKENS = 100_000 * 480 * 1024, 100_000_000
# Table 4 of the January text, 6 of the July text; both train with muP.
SHAPE = ("num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size")
SIZES = {
    "small": dict(zip(SHAPE, (12, 6, 128, 768))) | {"mup": True},
    "medium": dict(zip(SHAPE, (24, 8, 128, 1024))) | {"mup": True},
}
CODE, JANUARY, JULY = "the released code", "the January text", "the July text"
# Keys that a run cannot change, but on which the texts are silent or which do not change training.
UNSAID = set(
    "model eval_batches seed dtype muon_dtype min_lr vocab_size ddl_v_bias init ddl_cc_read".split()
)
# What None means with the paper's four columns.
MEANT_BY_NONE = {"ddl_state_shortconv_kernel_size": 4, "ddl_state_read_init": 1 / 4}
# Keys that change nothing where another key has this value.
IDLE = {
    "ddl_beta_hidden_size": ("ddl_beta_single_linear", True),
    "ddl_v_constant_value": ("ddl_v_constant", False),
    "ddl_v_sigmoid_scale": ("ddl_v_sigmoid", False),
    "ddl_k_hidden_size": ("ddl_map", "k"),
}
REASONS_SHOWN = 3


@dataclass(frozen=True)
class Published:
    """The published figures of a run.

    text: which description of the model its keys follow; reasons: why it has no figures; notes: in
    what it deviates; corpus: the one it was trained on.
    """

    stem: str
    size: str | None
    text: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    corpus: dict | None = None

    def beside(
        self, label: str, shots: int | str, *reasons: str, notes=()
    ) -> tuple[dict[str, float], str]:
        """(figures by metric or task, {} for none; the line that goes under the table).

        shots: "" for the validation split. reasons, notes: what else keeps the figures out of this
        table, or deviates in it.
        """
        why, texts = [*self.reasons, *reasons], {"both", "july"}
        if self.text == JANUARY:
            texts = {"both"}
        row = figures().get((self.size, str(shots), self.stem), {})
        row = {name: value for name, (value, text) in row.items() if text in texts}
        if not row and not why:
            why = [f"no such figures in {JANUARY if self.text == JANUARY else 'the texts'}"]
        if why:
            more = [f"and {len(why) - REASONS_SHOWN} more"] * (len(why) > REASONS_SHOWN)
            return {}, f"No published row beside {label}: {'; '.join(why[:REASONS_SHOWN] + more)}."
        remarks = "; ".join([*self.notes, *notes])
        return row, f"Published row beside {label}: {remarks}." if remarks else ""

    def beside_validation(self, label: str, entry: dict) -> tuple[dict[str, float], str]:
        """`beside` for an entry of the validation split."""
        other = self.corpus and entry["settings"]["corpus"] != self.corpus
        reasons = ["validated on another corpus than its own"] if other else []
        return self.beside(label, "", *reasons, notes=other_size(entry["tokens"]))


def other_size(tokens: int) -> list[str]:
    """A note where a validation split has not about as many tokens as the texts'."""
    note = f"{tokens:,} validation tokens, the texts' {VALIDATION_TOKENS:,}"
    return [note] if abs(tokens / VALIDATION_TOKENS - 1) > 0.05 else []


@cache
def figures() -> dict[tuple[str, str, str], dict[str, tuple[float, str]]]:
    """{(size, shots, stem): {metric or task: (value, text)}}.

    shots: "0", "1", or "" for the validation split and what else has none. text: "july" or "both".
    """
    rows: dict = {}
    lines = FILE.read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = row["size"], row["shots"], row["model"]
        rows.setdefault(key, {})[row["metric"]] = float(row["value"]), row["text"]
    return rows


def find(subject, stem: str, config, rates: dict[int, float] | None = None) -> Published:
    """What stands beside a Subject (subjects.py) with a model of this stem and configuration.

    rates: its learning rates by step, as far as they are known; by default those of the
    metrics.jsonl beside it.
    """
    size, text, reasons, notes = compare_model(stem, config)
    if (state := subject.state) is None:  # who knows what its weights have gone through since
        reasons = ["the folder does not say how it was trained", *reasons]
        return Published(stem, size, text, tuple(reasons), ())
    defaults = dataclasses.asdict(TrainConfig()) | legacy_defaults(TrainConfig)
    run = SimpleNamespace(**(defaults | state["run_config"]))
    if rates is None:
        records = records_of(subject.folder.resolve(), state["step"])
        rates = {record["step"]: record["lr"] for record in records if "lr" in record}
    tokens = state["step"] * run.global_batch_size * config.block_size
    corpus_reasons, corpus_notes = compare_corpus(state["corpus"], tokens)
    reasons = corpus_reasons + compare_recipe(run, rates) + reasons
    notes += corpus_notes + silent(run, config)
    if skipped := state.get("skipped"):
        notes.append(f"{skipped} steps skipped")
    if not rates:
        notes.append("no metrics.jsonl beside it to show that its rates were those of one schedule")
    return Published(stem, size, text, tuple(reasons), tuple(notes), state["corpus"])


def compare_corpus(corpus: dict, tokens: int) -> tuple[list[str], list[str]]:
    """(why a corpus of which so many tokens were read is not the paper's, in what it deviates)."""
    reasons, notes, source = [], [], corpus.get("source")
    if corpus.get("tokenizer") != "gpt2":
        reasons.append(f"tokens of {corpus.get('tokenizer')}, not GPT-2's")
    if not source or not re.search("fineweb.?edu", source, re.IGNORECASE):
        trained_on = source or "a corpus that does not name its source"
        reasons.append(f"trained on {trained_on}, not on FineWeb-Edu")
    elif source != "HuggingFaceFW/fineweb-edu" or corpus.get("name") != "sample-100BT":
        notes.append(f"trained on {' '.join(filter(None, (source, corpus.get('name'))))}")
    there = corpus.get("train", {}).get("tokens", 0)
    if tokens != TOKENS:
        reasons.append(f"{tokens:,} tokens seen, not {TOKENS:,}")
    elif there < tokens:
        reasons.append(f"{there:,} training tokens, seen more than once")
    return reasons, notes


def compare_recipe(run, rates: dict[int, float]) -> list[str]:
    """Why the training is not the paper's, whose values are the defaults of TrainConfig."""
    settled = [n for n, key in collect_options(TrainConfig).items() if not key.changeable]
    values = {
        name: (getattr(run, name), getattr(TrainConfig, name))
        for name in ("max_steps", *settled)
        if name not in UNSAID
    }
    reasons = [f"{n}={own!r}, not {paper!r}" for n, (own, paper) in values.items() if own != paper]
    for step, rate in rates.items():  # of a run that began with other max_steps
        if abs(rate - get_learning_rate(step - 1, run)) > run.learning_rate / 100:
            reason = f"step {step:,} had the rate {rate:.2e}, which is not the schedule's"
            return [*reasons, reason]
    return reasons


def silent(run, config) -> list[str]:
    """In what a run deviates where the texts are silent."""
    notes = []
    if run.dtype == "float32":
        notes.append("dtype=float32, the texts do not say theirs")
    elif config.state_dtype == "bfloat16":
        notes.append("its residual state is bfloat16, the released code's float32")
    if run.min_lr not in (None, run.learning_rate / 20):
        notes.append(f"min_lr={run.min_lr}, the texts do not say theirs")
    return notes


def compare_model(stem: str, config) -> tuple[str | None, str, list[str], list[str]]:
    """(size, nearest description, why it is none of the paper's models, in what it deviates)."""
    if stem not in {name for _, _, name in figures()}:
        return None, CODE, [f"no text has {stem}"], []
    shapes = {size: [keys[key] for key in SHAPE] for size, keys in SIZES.items()}
    own = [getattr(config, key) for key in SHAPE]
    size = next((size for size, shape in shapes.items() if shape == own), None)
    if not size:
        shape = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
        return None, CODE, [f"{shape}, no size of the texts"], []
    by_text = {text: differences(config, size, keys) for text, keys in descriptions(stem).items()}
    text = min(by_text, key=lambda each: len(by_text[each].keys() - UNSAID))  # the first of equals
    words = {k: f"{k}={getattr(config, k)!r}, not {v!r}" for k, v in by_text[text].items()}
    notes = [words[key] for key in words if key in UNSAID]
    if len(by_text) > 1:
        others = " or ".join(other for other in by_text if other != text)
        unknown = "(which one was published is not known)"
        notes.insert(0, f"its write value is that of {text}, not of {others} {unknown}")
    return size, text, [words[key] for key in words if key not in UNSAID], notes


def descriptions(stem: str) -> dict[str, dict]:
    """{text: model keys}: the write values that the code and the two texts describe.

    All three stand beside one figure, and none says which one was measured.
    """
    if stem == "gpt-mha-rope":
        return {CODE: {}}
    # Sections 4.1 and 4.2; of July section 3 and appendix A.1.
    january = {"ddl_v_sigmoid_scale": 1.0} if "vdim1" in stem else {"ddl_v_sigmoid": False}
    july = {"ddl_v_input": "context", "ddl_v_sigmoid": False}
    bias = (
        {"ddl_v_bias": False} if "ddl_v_bias" in collect_options(model_class(stem).Config) else {}
    )
    return {CODE: {}, JANUARY: january | bias, JULY: july | bias}


def differences(config, size: str, keys: dict) -> dict:
    """{key: the published model's value} where the configuration computes or learns otherwise."""
    published = type(config)(**SIZES[size], **keys)
    unused = {key for key, (k, value) in IDLE.items() if getattr(config, k, None) == value}
    unused.add("state_dtype")  # `silent` looks at it
    if config.mup_scale == published.mup_scale:
        unused |= {"mup", "hidden_size_base"}

    def meant(key, value):
        return MEANT_BY_NONE.get(key) if value is None else value

    return {
        key: value
        for key, value in dataclasses.asdict(published).items()
        if key not in unused and meant(key, value) != meant(key, getattr(config, key))
    }
