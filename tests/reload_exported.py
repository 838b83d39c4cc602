"""Exported folders as a user of transformers meets them: run in a process that has no access to
this repository.

    python -I reload_exported.py JOB.json

For each folder of the job, what transformers computes goes to a file beside it, for the tests to
compare.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

MODULES = ("model", "training", "data", "configurator", "huggingface")
assert not any(importlib.util.find_spec(name) for name in MODULES), "the repository can be imported"


def load(folder, **keys):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **keys)


def cache_of(output):
    """The cache of an output: transformers 5.24 renamed it."""
    return output.cache if "cache" in output else output.past_key_values


def generated(model, ids, **keys):
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=6, min_new_tokens=6, **keys)


def generation(model, ids) -> dict:
    """Ways to generate, with the cache and without."""
    prompts, found = ids[:2, :7], {}
    masks = torch.ones_like(prompts)
    padded = prompts.clone()
    masks[1, :4], padded[1, :4] = 0, model.config.pad_token_id
    ways = {"greedy": {"do_sample": False}, "beams": {"num_beams": 3}}
    ways |= {"sampled": {"do_sample": True}}
    ways["returned"] = {"do_sample": True, "num_return_sequences": 3}
    ways["several_beams"] = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}
    for way, keys in ways.items():
        for name, given, mask in (("", prompts, None), ("padded_", padded, masks)):
            for use_cache in (True, False):
                text = generated(model, given, attention_mask=mask, use_cache=use_cache, **keys)
                found[f"{name}{way}_{use_cache}"] = text
    first = generated(model, padded, attention_mask=masks, return_dict_in_generate=True)
    longer = torch.cat((first.sequences, ids[:2, :2]), dim=1)
    mask = torch.cat((masks, masks.new_ones(2, 8)), dim=1)
    rest = {"attention_mask": mask, "do_sample": False}
    kept = cache_of(first)
    found["continued_True"] = generated(model, longer, past_key_values=kept, **rest)
    found["continued_False"] = generated(model, longer, use_cache=False, **rest)
    return found


def cached_logits(model, ids):
    """Of all tokens: five at once, then two, then one by one."""
    out = model(ids[:, :5], use_cache=True)
    logits, cache = [out.logits], cache_of(out)
    for part in (ids[:, 5:7], *ids[:, 7:].split(1, dim=1)):
        logits.append(model(part, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def gradients(model, ids) -> dict:
    """Loss and gradients of a pass, checkpointed as well; then a step that must change weights."""
    model.train()
    labels = ids.clone()
    labels[0, :3] = -100
    found = {}
    for prefix in ("gradient.", "checkpointed."):
        model.zero_grad()
        out = model(ids, labels=labels)
        out.loss.backward()
        trained = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        found |= {f"{prefix}{name}": p.grad.clone() for name, p in trained}
        model.gradient_checkpointing_enable()
    before = model.transformer.wte.weight.detach().clone()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    changed = (model.transformer.wte.weight != before).any()
    return {"loss": out.loss.detach(), "changed": changed, **found}


def padded_logits(model, ids):
    """A whole row, one padded on the left, one on the right (without a cache only)."""
    mask = torch.ones_like(ids[:3])
    mask[1, :4], mask[2, -4:] = 0, 0
    rows = ids[:3].masked_fill(mask == 0, model.config.pad_token_id)
    cached = model(rows[:2], attention_mask=mask[:2], use_cache=True).logits
    return {"padded_logits": model(rows, attention_mask=mask).logits, "padded_cached": cached}


def examine(folder: str, ids) -> tuple[dict, dict]:
    """(tensors, facts) of one exported folder."""
    # generates before any forward pass
    text = pipeline("text-generation", model=folder, trust_remote_code=True)
    text = text("def f", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    model = load(folder)
    tied = model.lm_head.weight is model.transformer.wte.weight
    facts = {"tied": tied, "dtype": str(model.dtype), "text": text}
    facts["names"] = sorted(model.state_dict())
    with torch.no_grad():
        found = {"logits": model(ids).logits, "cached": cached_logits(model, ids)}
        found |= padded_logits(model, ids)
        found["last"] = model(ids, logits_to_keep=1).logits
        found |= {"cos": model.gpt.rope_cos, "sin": model.gpt.rope_sin}
        found |= generation(model, ids)
        model.save_pretrained(f"{folder}_again")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        tokenizer.save_pretrained(f"{folder}_again")
        found["again"] = load(f"{folder}_again")(ids).logits
        found["double"] = load(folder, dtype=torch.float64)(ids).logits
    return found | gradients(model, ids), facts


def refusals(folder: str) -> dict:
    """What a call that the model cannot serve says."""
    model, ids, said = load(folder), torch.zeros(1, 5, dtype=torch.int64), {}
    mask = torch.tensor([[1, 0, 1, 1, 1]])
    calls = {
        "gap": lambda: model(ids, attention_mask=mask),
        "right": lambda: model(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 0]]), use_cache=True),
        "short": lambda: model(ids, attention_mask=mask[:, :3]),
        "long": lambda: model(ids.repeat(1, 9)),
        "generate_long": lambda: model.generate(ids, max_new_tokens=99, min_new_tokens=99),
        "attentions": lambda: model(ids, output_attentions=True),
        "resize": lambda: model.resize_token_embeddings(300),
        "static": lambda: model.generate(ids, max_new_tokens=2, cache_implementation="static"),
    }
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def missing(folder: str) -> str:
    try:
        load(folder)
    except ValueError as error:
        return str(error)
    return "nothing"


def tokenizers(folder: str, texts: list[str]) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    batch = tokenizer(["a", "bcd"], padding=True)
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    found = {"ids": ids, "decoded": [tokenizer.decode(each) for each in ids], "special": special}
    return found | {"batch": dict(batch), "size": len(tokenizer)}


def rounded(folder: str, ids, pairs) -> dict:
    """What a folder computes when it is loaded in bfloat16: a pass with its gradients, text,
    lm-eval's scores.
    """
    model = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    out = model(ids, labels=ids)
    out.loss.backward()
    given = [p.grad for p in model.parameters() if p.grad is not None]
    gradient = torch.cat([each.float().flatten() for each in given])
    found = {"logits": out.logits.detach(), "loss": out.loss.detach(), "gradient": gradient}
    masks, padded = torch.ones_like(ids[:2]), ids[:2].clone()
    masks[1, :4], padded[1, :4] = 0, model.config.pad_token_id
    with torch.no_grad():
        found["cached"] = cached_logits(model, ids)
        for use_cache in (True, False):
            keys = {"do_sample": False, "use_cache": use_cache}
            found[f"text_{use_cache}"] = generated(model, ids[:2], **keys)
        found["padded_text"] = generated(model, padded, attention_mask=masks, do_sample=False)
    found["scores"] = torch.tensor([score for score, _ in evaluated(folder, pairs, "bfloat16")])
    return found


def evaluated(folder: str, pairs, dtype: str = "float32") -> list:
    """Log-likelihoods by lm-eval's own model for transformers."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=2, dtype=dtype)
    given = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
    said = model.loglikelihood(given, disable_tqdm=True)
    return [[float(score), bool(greedy)] for score, greedy in said]


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    ids, facts = torch.tensor(job["ids"]), {}
    for folder in job["folders"]:
        tensors, facts[folder] = examine(folder, ids)
        torch.save(tensors, f"{folder}.pt")
    first = job["folders"][0]
    facts["refusals"], facts["missing"] = refusals(first), missing(job["lacking"])
    facts["tokenizer"] = tokenizers(job["text_folder"], job["texts"])
    facts["loglikelihood"] = evaluated(job["text_folder"], job["pairs"])
    facts["bfloat16"] = str(load(job["bfloat16"][0]).dtype)
    for folder in job["bfloat16"]:
        torch.save(rounded(folder, ids, job["pairs"]), f"{folder}.bfloat16.pt")
    Path(sys.argv[1]).with_suffix(".facts").write_text(json.dumps(facts))


main()
