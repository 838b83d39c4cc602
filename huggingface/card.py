"""The model card of an exported folder, written from what the run has recorded."""

import importlib
import re
from pathlib import Path

from model.gpt import GPT
from utils import tables

# Keys of the run that the card lists.
OPTIMIZER_KEYS = (
    "optimizer",
    "learning_rate",
    "muon_learning_rate",
    "embedding_learning_rate",
    "min_lr",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "weight_decay",
    "weight_decay_rate",
    "mixing_decay",
    "beta1",
    "beta2",
    "grad_clip",
    "global_batch_size",
    "dtype",
    "seed",
    "init_from",
)
VALIDATION_METRICS = {
    "val_loss": "loss",
    "val_perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
}
LOADING_CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=False)"""
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- {stem}
---

# {name}

This is a base language model with {num_parameters:,} parameters, where a tied embedding counts once. It is a \
Transformer with the residual connections of the variant `{stem}`, which `stem.py` in this folder defines.
{description}
## Use

With version 5 of transformers, load the model and continue a text as follows. `FOLDER_OR_REPOSITORY` is \
the path of this folder, or the repository to which it was uploaded, such as `OWNER/NAME`.

```python
{loading_code}
ids = tokenizer(tokenizer.bos_token + "The", return_tensors="pt")  # every document in training began with this token
print(tokenizer.decode(model.generate(**ids, do_sample=True, top_p=0.9, max_new_tokens=100)[0]))
```

`trust_remote_code` executes the Python files in this folder, so read them first.
"""
LIMITS = """## Limits and license

The model continues text. It was trained neither to follow instructions nor to refuse them, and what it \
writes may be false or offensive. A sequence has at most {block_size:,} tokens, including the prompt.

The code is under the license in `LICENSE`, which does not cover the weights or the training data. Whoever \
publishes this folder states theirs as `license` in the header of this file.
"""


def describe_variant(variant: str) -> str:
    """Return the first line of a variant's docstring as a paragraph, with a link to its paper."""
    docstring = importlib.import_module(f"model.{variant}").__doc__
    if not docstring:
        return ""
    first_line = docstring.strip().partition("\n")[0]
    text, num_papers = re.subn(
        r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", first_line
    )
    if num_papers:
        text += " If you use the model, please cite this paper."
    return f"\n{text}\n"


def describe_corpus(state: dict) -> str:
    """Return the name of the corpus of a run, its source and its size, as far as they are known."""
    corpus = state.get("corpus", {})
    details = []
    source = corpus.get("source", "")
    # a source of local files may name folders of the machine
    if source and not any(Path(word).is_absolute() for word in source.split()):
        details.append(source)
    if "train" in corpus:
        details.append(f"{corpus['train']['tokens']:,} tokens")
    name = Path(state["run_config"]["dataset"]).name
    return f"{name} ({', '.join(details)})" if details else name


def describe_training(state: dict, records: list[dict]) -> list[tuple[str, str]]:
    """Return what is known of the training, as rows (property, value).

    Args:
        state: state.json of the checkpoint; without the settings of a run there are no rows
        records: the lines of metrics.jsonl up to the checkpoint
    """
    run_config = state.get("run_config")
    if not run_config:
        return []
    block_size = state["model_config"]["block_size"]
    num_tokens = state["step"] * run_config["global_batch_size"] * block_size
    rows = [
        ("steps", f"{state['step']:,}"),
        ("tokens", f"{num_tokens:,}, in sequences of {block_size:,}"),
        ("corpus", describe_corpus(state)),
    ]
    evaluations = [record for record in records if "val_loss" in record]
    if evaluations:
        last = evaluations[-1]
        origin = f"step {last['step']:,}, {last['val_sequences']:,} sequences"
        rows += [
            (f"validation {name}", f"{last[key]:.4f} ({origin})")
            for key, name in VALIDATION_METRICS.items()
            if key in last
        ]
    for key in OPTIMIZER_KEYS:
        value = run_config.get(key)
        if value is None:
            continue
        if key == "init_from":
            value = Path(value).name  # without folders of the machine
        rows.append((f"`{key}`", f"`{value}`"))
    return rows


def write_card(
    name: str,
    variant: str,
    model: GPT,
    *,
    dtype: str,
    commit: str | None,
    state: dict,
    records: list[dict],
) -> str:
    """Return README.md: a YAML header, what the model is, its use, training, limits and keys.

    Args:
        state, records: as in `describe_training`
    """
    sections = [
        CARD.format(
            name=name,
            stem=variant,
            description=describe_variant(variant),
            num_parameters=model.num_parameters(),
            loading_code=LOADING_CODE.format(folder="FOLDER_OR_REPOSITORY"),
        )
    ]
    training_rows = describe_training(state, records)
    if training_rows:
        table = tables.format_markdown(("property", "value"), training_rows)
        sections.append(f"## Training\n\n{table}\n")
    sections.append(LIMITS.format(block_size=model.config.block_size))
    model_rows = [(f"`{key}`", f"`{value}`") for key, value in vars(model.config).items()]
    sections.append(
        f"## Model\n\nThe weights are stored in {dtype}.\n\n"
        f"{tables.format_markdown(('key', 'value'), model_rows)}\n"
    )
    if commit:
        sections.append(f"This folder was exported with the training code at commit `{commit}`.\n")
    return "\n".join(sections)
