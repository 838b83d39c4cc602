"""The model card of an exported folder: what the run says of itself, and nothing that it does
not.
"""

from pathlib import Path

from evaluation import tables
from training import metrics

OPTIMISER = (
    "optimizer learning_rate muon_learning_rate embedding_learning_rate min_lr schedule "
    "warmup_steps decay_steps "
    "weight_decay weight_decay_rate beta1 beta2 grad_clip global_batch_size dtype seed init_from"
).split()
HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- deep-delta-learning
- {stem}
---"""
LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=True)"""
GENERATE = """ids = tokenizer(tokenizer.bos_token + "The", return_tensors="pt")  # every document began with this token
print(tokenizer.decode(model.generate(**ids, do_sample=True, top_p=0.9, max_new_tokens=100)[0]))"""


def records_of(checkpoint: Path, step: int) -> list[dict]:
    """The lines of the run's metrics.jsonl up to a checkpoint's step; none where there is no such
    file.
    """
    path = checkpoint.parent.parent / "metrics.jsonl"
    if checkpoint.parent.name != "checkpoints" or not path.is_file():
        return []
    return [record for record in metrics.read(path) if record.get("step", step + 1) <= step]


def training_rows(state: dict, records: list[dict]) -> list[tuple[str, str]]:
    """(what, figure) of the training that state.json and metrics.jsonl tell of; none of a folder
    without state.json.
    """
    if not (run := state.get("run_config")):
        return []
    block_size = state["model_config"]["block_size"]
    tokens = state["step"] * run["global_batch_size"] * block_size
    rows = [
        ("steps", f"{state['step']:,}"),
        ("tokens", f"{tokens:,}, in sequences of {block_size:,}"),
    ]
    rows.append(("corpus", Path(run["dataset"]).name))
    if scores := [record for record in records if "val_loss" in record]:
        last, names = (
            scores[-1],
            {"val_loss": "validation loss", "val_perplexity": "validation perplexity"},
        )
        names["val_bits_per_byte"] = "validation bits per byte"
        share = f"step {last['step']:,}, {last['val_sequences']:,} sequences"
        rows += [(name, f"{last[key]:.4f} ({share})") for key, name in names.items() if key in last]
    for key in OPTIMISER:
        if run.get(key) is not None:
            rows.append(
                (f"`{key}`", f"`{Path(run[key]).name if key == 'init_from' else run[key]}`")
            )
    return rows


def card(
    name: str, stem: str, model, dtype: str, commit: str, state: dict, records: list[dict]
) -> str:
    """README.md: a YAML head, the model and its keys, its training, how to use it."""
    training = training_rows(state, records)
    keys = [(f"`{key}`", f"`{value}`") for key, value in vars(model.config).items()]
    parts = [
        HEAD.format(stem=stem),
        f"# {name}",
        f"A language model of {model.num_parameters():,} parameters (the tied embedding counts "
        "once), weights in "
        f"{dtype}, variant `{stem}` of [Deep Delta Learning](https://arxiv.org/abs/2601.00417): "
        "see its text, and "
        "`stem.py`. A base model: it continues text, and follows no instructions.",
        "## Use",
        f"With transformers 5:\n\n```python\n{LOAD.format(folder=name)}\n{GENERATE}\n```",
        f"It reads at most {model.config.block_size:,} tokens. `trust_remote_code` runs the Python "
        "files of this "
        "folder: read them first.",
    ]
    if training:
        parts += ["## Training", tables.markdown(("figure", "value"), training)]
    parts += ["## Model", tables.markdown(("key", "value"), keys)]
    if commit:
        parts.append(f"Exported by the training code at commit `{commit}`.")
    return "\n\n".join(parts) + "\n"
