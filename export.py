"""A trained model as a folder for Hugging Face transformers.

    python export.py runs/demo_cpu exported/demo
    python export.py runs/demo_cpu exported/demo --dtype=bfloat16 --overwrite

The run is a run folder (its newest checkpoint), a checkpoint folder, or a folder of the paper's
released code. OUT_DIR receives the weights, config.json, the tokenizer, a model card and modelling
code that needs nothing of this repository. It is complete or absent.
"""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import torch

from data import tokenizer, tokenizer_json
from huggingface import card
from huggingface.flatten import modelling_files
from model.gpt import GPT
from model.parameters import aliases
from training import checkpoint, metrics
from training.provenance import provenance


def arguments():
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add("run", help="run folder (its newest checkpoint), checkpoint folder, or released folder")
    add("out_dir", help="folder to make; empty or absent")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--overwrite", action="store_true", help="replace a folder that was exported before")
    return parser.parse_args()


def check_out(out: Path, overwrite: bool) -> None:
    """ValueError: the folder may not be (over)written."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"{out} is not empty: give another OUT_DIR, or --overwrite")
        if not (out / "modeling_ddl.py").is_file():
            what = "something else than an exported model"
            raise ValueError(f"{out} holds {what}: give another OUT_DIR")


def check_exportable(model) -> None:
    """ValueError: something of the model that the wrapper for transformers would leave out."""
    rope = {"rope_cos", "rope_sin"}  # the wrapper computes these anew
    if type(model).forward is not GPT.forward:
        what = "the variant has a forward of its own, which cannot be exported"
        raise ValueError(f"{what}: put it into hidden or logits")
    own = *model.named_parameters(recurse=False), *model.named_buffers(recurse=False)
    for name in [name for name, _ in own if name not in rope]:
        fix = "put it into a module of the model to export it"
        raise ValueError(f"{name} belongs to the model itself: {fix}")
    # transformers builds models without values: a buffer that is not stored would be lost.
    for name in dict(model.named_buffers()).keys() - model.state_dict().keys() - rope:
        fix = "register it with persistent=True to export it"
        raise ValueError(f"{name} is a buffer that is not stored: {fix}")


def json_files(stem: str, model, encoding, dtype: str) -> dict[str, dict]:
    """The JSON files of an exported folder. ValueError: a vocabulary that they cannot express."""
    end = encoding.eot_token
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    code = {
        "AutoConfig": "configuration_ddl.DDLConfig",
        "AutoModelForCausalLM": "modeling_ddl.DDLForCausalLM",
    }
    config = {"architectures": ["DDLForCausalLM"], "auto_map": code, "model_type": "ddl"}
    # transformers asks whether weights are tied of all of them
    config |= {"stem": stem, "dtype": dtype, "tie_word_embeddings": bool(aliases(model)), **ids}
    # rows of the embedding beyond the tokenizer's tokens are never drawn
    unused = list(range(encoding.n_vocab, model.config.vocab_size))
    ranks = encoding._mergeable_ranks
    tokens = sorted(ranks, key=ranks.get)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= dict.fromkeys(names, tokenizer.END_OF_TEXT) | {"padding_side": "left"}
    settings |= {"model_max_length": model.config.block_size, "clean_up_tokenization_spaces": False}
    return {
        "config.json": config | dataclasses.asdict(model.config),
        "tokenizer.json": tokenizer_json.write(encoding._pat_str, tokens, tokenizer.END_OF_TEXT),
        "tokenizer_config.json": settings,
        "generation_config.json": ids | ({"suppress_tokens": unused} if unused else {}),
    }


def write(folder: Path, name: str, source: Path, dtype: str) -> None:
    """Fill an empty folder with the model of `source`.

    ValueError: damaged, or code that cannot stand alone.
    """
    model, encoding, state = checkpoint.load_model(source, "cpu")
    stem = state["model"]
    if encoding.name == "ids":
        why = "its tokens are ids, not text, for which transformers has no tokenizer file"
        raise ValueError(f"{source}: {why}")
    check_exportable(model)
    texts = modelling_files(stem)
    for file, content in json_files(stem, model, encoding, dtype).items():
        texts[file] = json.dumps(content, indent=1, ensure_ascii=False)
    records = card.records_of(source, state["step"]) if "step" in state else []
    commit = provenance()["commit"]
    texts["README.md"] = card.card(name, stem, model, dtype, commit, state, records)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    weights = checkpoint.weights_of(model.to(getattr(torch, dtype)))
    checkpoint.write_tensors(folder / "model.safetensors", weights)


def main():
    args = arguments()
    with configurator.one_line_errors():
        out, run = Path(args.out_dir).resolve(), Path(args.run)
        check_out(out, args.overwrite)
        source = run if checkpoint.is_folder_of_weights(run) else checkpoint.find(run)
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            (beside / "new").mkdir()
            write(beside / "new", out.name, source, args.dtype)
        except BaseException:
            shutil.rmtree(beside)
            raise
        if out.exists():
            out.replace(beside / "old")
        (beside / "new").replace(out)
        shutil.rmtree(beside)
    sizes = [f"{file.name} ({metrics.size(file.stat().st_size)})" for file in sorted(out.iterdir())]
    print(f"{args.out_dir}: {', '.join(sizes)}\n{card.LOAD.format(folder=args.out_dir)}")


if __name__ == "__main__":
    main()
