"""Load exported folders with transformers, in a process that cannot import this repository.

    python -I reload_exported.py JOB.json

What transformers computes with a folder of the job is written to a file beside the folder, which
test_export.py compares with our own results.
"""

import importlib.util
import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline
from transformers.generation.utils import GenerateOutput
from transformers.utils import ModelOutput

MODULES = ("model", "training", "data", "configurator", "huggingface", "model_folder")
assert not any(importlib.util.find_spec(name) for name in MODULES), "the repository can be imported"


def load(folder: str, **options) -> PreTrainedModel:
    """Load an exported model; options are those of from_pretrained."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def cache_of(output: ModelOutput) -> object:
    """Return the cache of an output, which transformers 5.24 renamed."""
    return output.cache if "cache" in output else output.past_key_values


def generate(model: PreTrainedModel, ids: torch.Tensor, **options) -> torch.Tensor | GenerateOutput:
    """Generate six tokens; options are those of `model.generate`."""
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=6, min_new_tokens=6, **options)


METHODS = {
    "greedy": {"do_sample": False},
    "returned": {"do_sample": True, "num_return_sequences": 3},
    "several_beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
}


def pad_second_row(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (2, T) whose second row begins with four padding tokens, and their mask."""
    padded = ids.clone()
    padded[1, :4] = model.config.pad_token_id
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return padded, mask


def generation(
    model: PreTrainedModel,
    ids: torch.Tensor,
    methods: list[str],
    caches: tuple[bool, ...] = (True, False),
) -> dict:
    """Generate from a padded batch by several methods, with the cache and without."""
    padded, mask = pad_second_row(model, ids[:2, :7])
    return {
        f"{method}_{use_cache}": generate(
            model, padded, attention_mask=mask, use_cache=use_cache, **METHODS[method]
        )
        for method in methods
        for use_cache in caches
    }


def continuation(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Continue the greedy text of a padded batch and two more tokens, with its cache and without."""
    padded, mask = pad_second_row(model, ids[:2, :7])
    first = generate(model, padded, attention_mask=mask, return_dict_in_generate=True)
    longer = torch.cat((first.sequences, ids[:2, :2]), dim=1)
    options = {
        "attention_mask": torch.cat((mask, mask.new_ones(2, 8)), dim=1),
        "do_sample": False,
    }
    return {
        "continued_True": generate(model, longer, past_key_values=cache_of(first), **options),
        "continued_False": generate(model, longer, use_cache=False, **options),
    }


def cached_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of all tokens: of five at once, then of two, then one by one."""
    out = model(ids[:, :5], use_cache=True)
    logits = [out.logits]
    cache = cache_of(out)
    for part in (ids[:, 5:7], *ids[:, 7:].split(1, dim=1)):
        logits.append(model(part, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def gradients(model: PreTrainedModel, ids: torch.Tensor) -> dict:
    """Return the loss and the gradients, also with checkpointing."""
    model.train()
    labels = ids.clone()
    labels[0, :3] = -100
    gradients = {}
    for prefix in ("gradient.", "checkpointed."):
        model.zero_grad()
        out = model(ids, labels=labels)
        out.loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[f"{prefix}{name}"] = parameter.grad.clone()
        model.gradient_checkpointing_enable()
    return {"loss": out.loss.detach(), **gradients}


def padded_logits(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits of a full row, one padded on the left, and one on the right.

    With a cache, padding on the right is not possible.
    """
    mask = torch.ones_like(ids[:3])
    mask[1, :4] = 0
    mask[2, -4:] = 0
    rows = ids[:3].masked_fill(mask == 0, model.config.pad_token_id)
    cached = model(rows[:2], attention_mask=mask[:2], use_cache=True).logits
    return {"padded_logits": model(rows, attention_mask=mask).logits, "padded_cached": cached}


def examine(folder: str, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict]:
    """Return the tensors that a folder's model computes, and a summary as JSON has it."""
    model = load(folder)
    summary = {
        "tied": model.lm_head.weight is model.transformer.wte.weight,
        "dtype": str(model.dtype),
        "names": sorted(model.state_dict()),
    }
    with torch.no_grad():
        tensors = {
            "logits": model(ids).logits,
            "cached": cached_logits(model, ids),
            **padded_logits(model, ids),
            "last": model(ids, logits_to_keep=1).logits,
            **generation(model, ids, ["greedy"], (True,)),
        }
    return {**tensors, **gradients(model, ids)}, summary


def examine_further(folder: str, ids: torch.Tensor) -> dict:
    """Return texts by every method of generation, and logits of further ways to load a folder."""
    # this generates before any forward pass
    pipe = pipeline("text-generation", model=folder, trust_remote_code=True)
    text = pipe("def f", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    model = load(folder)
    with torch.no_grad():
        texts = {**generation(model, ids, list(METHODS)), **continuation(model, ids)}
        model.save_pretrained(f"{folder}_again")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        tokenizer.save_pretrained(f"{folder}_again")
        return {
            "pipeline": text,
            "texts": texts,
            "again": load(f"{folder}_again")(ids).logits,
            "double": load(folder, dtype=torch.float64)(ids).logits,
            "converted": model.double()(ids).logits,
        }


def error_messages(folder: str, lacking: str) -> dict[str, str]:
    """Return the error message of each call that the model cannot serve.

    lacking: a folder without one of its weights
    """
    model = load(folder)
    ids = torch.zeros(1, 5, dtype=torch.int64)
    mask = torch.tensor([[1, 0, 1, 1, 1]])
    calls = {
        "gap": lambda: model(ids, attention_mask=mask),
        "right": lambda: model(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 0]]), use_cache=True),
        "short": lambda: model(ids, attention_mask=mask[:, :3]),
        "long": lambda: model(ids.repeat(1, 9)),
        "generate_long": lambda: model.generate(ids, max_new_tokens=99, min_new_tokens=99),
        "attentions": lambda: model(ids, output_attentions=True),
        "static": lambda: model.generate(ids, max_new_tokens=2, cache_implementation="static"),
        "range": lambda: load(folder, rope_ratio=2.0),
        "lacking": lambda: load(lacking),
    }
    return {name: error_message(call) for name, call in calls.items()}


def error_message(call: Callable[[], object]) -> str:
    """Return the message of the ValueError that a call raises, or "nothing"."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def examine_tokenizer(folder: str, texts: list[str]) -> dict:
    """Return what the tokenizer makes of texts, of a padded batch, and its special tokens.

    It is loaded without the code of the folder.
    """
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("transformers").addHandler(handler)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    logging.getLogger("transformers").removeHandler(handler)
    batch = tokenizer(["a", "bcd"], padding=True)
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return {
        "ids": ids,
        "decoded": [tokenizer.decode(text_ids) for text_ids in ids],
        "special": special,
        "batch": dict(batch),
        "size": len(tokenizer),
        "log": log.getvalue(),
    }


@torch.no_grad()
def examine_in_bfloat16(folder: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits and loss of a folder loaded in bfloat16."""
    model = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    out = model(ids, labels=ids)
    return {"logits": out.logits, "cached": cached_logits(model, ids), "loss": out.loss}


def main() -> None:
    """Examine the folders of the job, and write the summary beside it."""
    job_path = Path(sys.argv[1])
    job = json.loads(job_path.read_text())
    ids = torch.tensor(job["ids"])
    summaries = {}
    for folder in job["folders"]:
        tensors, summaries[folder] = examine(folder, ids)
        torch.save(tensors, f"{folder}.pt")
    for folder in job["further"]:
        torch.save(examine_further(folder, ids), f"{folder}.further.pt")
    for folder in job["bfloat16"]:
        torch.save(examine_in_bfloat16(folder, ids), f"{folder}.bfloat16.pt")
    summary = {
        "folders": summaries,
        "refusals": error_messages(job["folders"][0], job["lacking"]),
        "tokenizers": [
            examine_tokenizer(folder, job["texts"]) for folder in job["tokenizer_folders"]
        ],
        "bfloat16": str(load(job["bfloat16"][0]).dtype),
    }
    job_path.with_suffix(".summary").write_text(json.dumps(summary))


main()
