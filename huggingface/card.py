"""The model card of an exported folder: what the run says of itself, and nothing else."""

from pathlib import Path

from training import metrics
from utils import tables

OPTIMISER = (
    "optimizer learning_rate muon_learning_rate embedding_learning_rate min_lr schedule "
    "warmup_steps decay_steps weight_decay weight_decay_rate beta1 beta2 grad_clip "
    "global_batch_size dtype seed init_from"
).split()
SCORES = {"val_loss": "loss", "val_perplexity": "perplexity", "val_bits_per_byte": "bits per byte"}
LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=True)"""
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- deep-delta-learning
- {stem}
---

# {name}

A language model of {parameters:,} parameters (the tied embedding counts once), weights in \
{dtype}, variant `{stem}` of [Deep Delta Learning](https://arxiv.org/abs/2601.00417): see its \
text, and `stem.py`. A base model: it continues text, and follows no instructions.

## Use

With transformers 5:

```python
{load}
ids = tokenizer(tokenizer.bos_token + "The", return_tensors="pt")  # every document began with this token
print(tokenizer.decode(model.generate(**ids, do_sample=True, top_p=0.9, max_new_tokens=100)[0]))
```

It reads at most {block_size:,} tokens. `trust_remote_code` runs the Python files of this folder: \
read them first.
"""


def records_of(checkpoint: Path, step: int) -> list[dict]:
    """The lines of the run's metrics.jsonl up to a checkpoint's step, none without that file."""
    path = checkpoint.parent.parent / "metrics.jsonl"
    if checkpoint.parent.name != "checkpoints" or not path.is_file():
        return []
    return [record for record in metrics.read(path) if record.get("step", step + 1) <= step]


def training_rows(state: dict, records: list[dict]) -> list[tuple[str, str]]:
    """(what, figure) of the training, from state.json and metrics.jsonl; none without the first."""
    if not (run := state.get("run_config")):
        return []
    step, block_size = state["step"], state["model_config"]["block_size"]
    tokens = step * run["global_batch_size"] * block_size
    rows = [("steps", f"{step:,}"), ("tokens", f"{tokens:,}, in sequences of {block_size:,}")]
    rows.append(("corpus", Path(run["dataset"]).name))
    for last in [record for record in records if "val_loss" in record][-1:]:
        share = f"step {last['step']:,}, {last['val_sequences']:,} sequences"
        scores = {name: last[key] for key, name in SCORES.items() if key in last}
        rows += [(f"validation {k}", f"{value:.4f} ({share})") for k, value in scores.items()]
    values = {key: run[key] for key in OPTIMISER if run.get(key) is not None}
    if "init_from" in values:
        values["init_from"] = Path(values["init_from"]).name
    return rows + [(f"`{key}`", f"`{value}`") for key, value in values.items()]


def card(name, stem, model, dtype: str, commit: str, state: dict, records: list[dict]) -> str:
    """README.md: a YAML head, how to use the model, its training, and its keys."""
    text = CARD.format(
        name=name,
        stem=stem,
        dtype=dtype,
        parameters=model.num_parameters(),
        block_size=model.config.block_size,
        load=LOAD.format(folder=name),
    )
    if training := training_rows(state, records):
        text += f"\n## Training\n\n{tables.format_markdown(('figure', 'value'), training)}\n"
    keys = [(f"`{key}`", f"`{value}`") for key, value in vars(model.config).items()]
    text += f"\n## Model\n\n{tables.format_markdown(('key', 'value'), keys)}\n"
    return text + (f"\nExported by the training code at commit `{commit}`.\n" if commit else "")
