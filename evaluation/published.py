"""Which published figures (results/published.csv) stand beside a run: those measured on the same
corpus, number of tokens, recipe and model. Small deviations are named under the table; others leave
the figures out, with the reasons.
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
from model.keys import keys_of, values_before
from train import TrainConfig
from training.optimizer import learning_rate_at

ROOT = Path(__file__).parents[1]
TOKENS, VALIDATION_TOKENS = 100_000 * 480 * 1024, 100_000_000
SIZES = {  # table 4 of the January text, 6 of the July text; both train with muP
    "small": {
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "head_dim": 128,
        "hidden_size": 768,
        "mup": True,
    },
    "medium": {
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
        "mup": True,
    },
}
CODE, JANUARY, JULY = "the released code", "the January text", "the July text"
# Of the keys that a run cannot change, these say nothing of its training, or the texts are silent
# on them.
UNSAID = {
    "model",
    "eval_batches",
    "seed",
    "dtype",
    "muon_dtype",
    "min_lr",
    "vocab_size",
    "ddl_v_bias",
}
UNSAID |= {"init", "ddl_cc_read"}
# with the paper's four columns
MEANT_BY_NONE = {"ddl_state_shortconv_kernel_size": 4, "ddl_state_read_init": 1 / 4}
REASONS_SHOWN = 3


@dataclass(frozen=True)
class Published:
    """The published figures of a run.

    text: which description of the model its keys follow; reasons: why there are none, notes: in
    what it deviates.
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
        """(the figures by metric or task, {} for none; the line that goes under the table).

        shots "": validation.

        reasons, notes: what else keeps the figures out, or deviates, in this table alone.
        """
        why = [*self.reasons, *reasons]
        found = figures().get((self.size, str(shots), self.stem), {})
        found = {
            name: value
            for name, (value, text) in found.items()
            if text == "both" or self.text != JANUARY
        }
        if not why and not found:
            why = [f"no such figures in {JANUARY if self.text == JANUARY else 'the texts'}"]
        if why:
            more = len(why) - REASONS_SHOWN
            said = "; ".join(why[:REASONS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            return {}, f"No published row beside {label}: {said}."
        said = "; ".join([*self.notes, *notes])
        return found, f"Published row beside {label}: {said}." if said else ""

    def beside_validation(self, label: str, entry: dict) -> tuple[dict[str, float], str]:
        """`beside` for an entry of the validation split."""
        other = self.corpus and entry["settings"]["corpus"] != self.corpus
        count, notes = entry["tokens"], []
        if abs(count / VALIDATION_TOKENS - 1) > 0.05:
            notes = [f"{count:,} validation tokens, the texts' {VALIDATION_TOKENS:,}"]
        return self.beside(
            label, "", *["validated on another corpus than its own"] * bool(other), notes=notes
        )


def find(subject, stem: str, config, rates: dict[int, float] | None = None) -> Published:
    """What stands beside an evaluation.subjects.Subject with a model of this stem and
    configuration.

    rates: its learning rates by step, as far as they are known; None: those of the metrics.jsonl
    beside it.
    """
    size, text, model_reasons, notes = compare_model(stem, config)
    if subject.state is None:  # who knows what its weights have gone through since
        return Published(
            stem, size, text, ("the folder does not say how it was trained", *model_reasons), ()
        )
    state = subject.state
    run = SimpleNamespace(
        **{**dataclasses.asdict(TrainConfig()), **values_before(TrainConfig), **state["run_config"]}
    )
    reasons, own = compare_corpus(state["corpus"])
    tokens, there = (
        state["step"] * run.global_batch_size * config.block_size,
        trained_on(state["corpus"]),
    )
    if tokens != TOKENS:
        reasons.append(f"{tokens:,} tokens seen, not {TOKENS:,}")
    elif there < tokens:
        reasons.append(f"{there:,} training tokens, seen more than once")
    if rates is None:
        rates = {
            r["step"]: r["lr"]
            for r in records_of(subject.folder.resolve(), state["step"])
            if "lr" in r
        }
    reasons += compare_recipe(run) + compare_rates(run, rates)
    notes += own + unsaid(run, config)
    notes += [f"{state['skipped']} steps skipped"] if state.get("skipped") else []
    notes += (
        []
        if rates
        else ["no metrics.jsonl beside it to show that its rates were those of one schedule"]
    )
    return Published(stem, size, text, (*reasons, *model_reasons), tuple(notes), state["corpus"])


def trained_on(corpus: dict) -> int:
    """Training tokens of a corpus, as a checkpoint knows it (`Corpus.identity`)."""
    return corpus.get("train", {}).get("tokens", 0)


def compare_corpus(corpus: dict) -> tuple[list[str], list[str]]:
    """(why it is not the paper's, in what it deviates)."""
    reasons, notes, source = [], [], corpus.get("source")
    if corpus.get("tokenizer") != "gpt2":
        reasons.append(f"tokens of {corpus.get('tokenizer')}, not GPT-2's")
    if not source or not re.search("fineweb.?edu", source, re.IGNORECASE):
        reasons.append(
            f"trained on {source or 'a corpus that does not name its source'}, not on FineWeb-Edu"
        )
    elif source != "HuggingFaceFW/fineweb-edu" or corpus.get("name") != "sample-100BT":
        notes.append(f"trained on {' '.join(filter(None, (source, corpus.get('name'))))}")
    return reasons, notes


def compare_recipe(run) -> list[str]:
    """Why it is not the paper's: run keys that settle the training, whose defaults are the paper's
    values.
    """
    settled = [
        name
        for name, key in keys_of(TrainConfig).items()
        if not key.changeable and name not in UNSAID
    ]
    values = {
        name: (getattr(run, name), getattr(TrainConfig, name)) for name in ("max_steps", *settled)
    }
    return [
        f"{name}={own!r}, not {paper!r}" for name, (own, paper) in values.items() if own != paper
    ]


def compare_rates(run, rates: dict[int, float]) -> list[str]:
    """The first of the learning rates by step that is not the schedule's: of a run that began with
    other max_steps.
    """
    for step, rate in rates.items():
        if abs(rate - learning_rate_at(step - 1, run)) > run.learning_rate / 100:
            return [f"step {step:,} had the rate {rate:.2e}, which is not the schedule's"]
    return []


def unsaid(run, config) -> list[str]:
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
    """(size, text, why it is none of the paper's models, in what it deviates) for the nearest
    description.
    """
    if stem not in {name for _, _, name in figures()}:
        return None, CODE, [f"no text has {stem}"], []
    own = dataclasses.asdict(config)
    shapes = {
        size: {key: keys[key] for key in keys if key != "mup"} for size, keys in SIZES.items()
    }
    size = next((size for size, shape in shapes.items() if shape.items() <= own.items()), None)
    if not size:
        shape = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
        return None, CODE, [f"{shape}, no size of the texts"], []
    found = {text: differences(config, size, keys) for text, keys in descriptions(stem).items()}
    # of equal ones the first, the released code
    text = min(found, key=lambda each: len(found[each].keys() - UNSAID))
    reasons = [
        f"{key}={own[key]!r}, not {value!r}"
        for key, value in found[text].items()
        if key not in UNSAID
    ]
    notes = [
        f"{key}={own[key]!r}, not {value!r}" for key, value in found[text].items() if key in UNSAID
    ]
    if len(found) > 1:
        others = " or ".join(other for other in found if other != text)
        notes.insert(
            0,
            f"its write value is that of {text}, not of {others} (which one was published is not "
            "known)",
        )
    return size, text, reasons, notes


def descriptions(stem: str) -> dict[str, dict]:
    """{text: model keys}: the write values that the released code and the texts describe, all
    beside one figure.
    """
    if stem == "gpt-mha-rope":
        return {CODE: {}}
    # sections 4.1 and 4.2
    january = {"ddl_v_sigmoid_scale": 1.0} if "vdim1" in stem else {"ddl_v_sigmoid": False}
    july = {"ddl_v_input": "context", "ddl_v_sigmoid": False}  # section 3 and appendix A.1
    bias = {"ddl_v_bias": False} if "ddl_v_bias" in keys_of(model_class(stem).Config) else {}
    return {CODE: {}, JANUARY: january | bias, JULY: july | bias}


def differences(config, size: str, keys: dict) -> dict:
    """{key: the published model's value} where the configuration computes or learns something
    else.
    """
    published = type(config)(**SIZES[size], **keys)
    # which `unsaid` looks at
    own, unused = dataclasses.asdict(config), without_effect(config) | {"state_dtype"}
    if config.mup_scale == published.mup_scale:
        unused |= {"mup", "hidden_size_base"}
    theirs = {
        key: value for key, value in dataclasses.asdict(published).items() if key not in unused
    }
    means = MEANT_BY_NONE.get
    return {
        key: value
        for key, value in theirs.items()
        if (means(key) if value is None else value)
        != (means(key) if own[key] is None else own[key])
    }


def without_effect(config) -> set[str]:
    """Keys whose value changes nothing in this configuration."""
    conditions = {
        "ddl_beta_hidden_size": ("ddl_beta_single_linear", True),
        "ddl_v_constant_value": ("ddl_v_constant", False),
        "ddl_v_sigmoid_scale": ("ddl_v_sigmoid", False),
        "ddl_k_hidden_size": ("ddl_map", "k"),
    }
    return {
        key for key, (other, value) in conditions.items() if getattr(config, other, None) == value
    }


@cache
def figures() -> dict[tuple[str, str, str], dict[str, tuple[float, str]]]:
    """{(size, shots, stem): {metric or task: (value, text)}}; shots "0", "1", or "" for what has
    none; text: "july" or "both".
    """
    found: dict = {}
    lines = (ROOT / "results/published.csv").read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = row["size"], row["shots"], row["model"]
        found.setdefault(key, {})[row["metric"]] = float(row["value"]), row["text"]
    return found
