"""The model card of an exported folder, written from what the run has recorded."""

import importlib
from pathlib import Path

from model import find_variant
from model.gpt import GPT

LOADING_CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=False)"""
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- {variant}
---

# {name}

This is a base language model with {num_parameters:,} parameters, where a tied embedding counts once. It is a \
Transformer with the residual connections of the variant `{variant}`, which `stem.py` in this folder defines. \
{first_line} {training}It was trained neither to follow instructions nor to refuse them, and what it writes may be \
false or offensive.

```python
{loading_code}
ids = tokenizer(tokenizer.bos_token + "The", return_tensors="pt")  # every document in training began with this token
print(tokenizer.decode(model.generate(**ids, do_sample=True, top_p=0.9, max_new_tokens=100)[0]))
```

`FOLDER_OR_REPOSITORY` is the path of this folder, or the repository to which it was uploaded. `trust_remote_code` \
executes the Python files in this folder, so read them first. A sequence has at most {block_size:,} tokens.

The code is under the license in `LICENSE`, which does not cover the weights or the training data. Whoever publishes \
this folder states theirs as `license` in the header of this file.
"""


def describe_training(state: dict) -> str:
    """Return how much the model was trained on which corpus; "" if the state does not say."""
    run_config = state.get("run_config")
    if not run_config:
        return ""
    block_size = state["model_config"]["block_size"]
    num_tokens = state["step"] * run_config["global_batch_size"] * block_size
    corpus = Path(run_config["dataset"]).name  # without folders of the machine
    loss = state.get("best_val_loss")
    validation = (
        "" if loss is None else f", with a best validation loss of {loss:.4f} nats per token"
    )
    return (
        f"It was trained for {state['step']:,} steps, on {num_tokens:,} tokens of the corpus "
        f"`{corpus}`{validation}. "
    )


def write_card(name: str, variant: str, model: GPT, state: dict) -> str:
    """Return README.md: what the model is, how it was trained, and how to load it.

    state: state.json of the checkpoint; {} if it is not known how the model was trained
    """
    docstring = importlib.import_module(find_variant(variant).name).__doc__ or ""
    return CARD.format(
        name=name,
        variant=variant,
        num_parameters=model.num_parameters(),
        first_line=docstring.strip().partition("\n")[0],
        training=describe_training(state),
        loading_code=LOADING_CODE.format(folder="FOLDER_OR_REPOSITORY"),
        block_size=model.config.block_size,
    )
