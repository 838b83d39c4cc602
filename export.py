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
    parser.add_argument(
        "run", help="run folder (its newest checkpoint), checkpoint folder, or released folder"
    )
    parser.add_argument("out_dir", help="folder to make; empty or absent")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder that was exported before"
    )
    return parser.parse_args()


def check_out(out: Path, overwrite: bool) -> None:
    """ValueError: the folder may not be (over)written."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"{out} is not empty: give another OUT_DIR, or --overwrite")
        if not (out / "modeling_ddl.py").is_file():
            raise ValueError(
                f"{out} holds something else than an exported model: give another OUT_DIR"
            )


def config_json(stem: str, model, encoding, dtype: str) -> dict:
    """config.json: the model's keys, and what transformers asks for."""
    classes = {
        "AutoConfig": "configuration_ddl.DDLConfig",
        "AutoModelForCausalLM": "modeling_ddl.DDLForCausalLM",
    }
    head = {
        "architectures": ["DDLForCausalLM"],
        "auto_map": classes,
        "model_type": "ddl",
        "stem": stem,
        "dtype": dtype,
    }
    tied = bool(aliases(model))  # transformers asks it of all weights
    return {
        **head,
        "tie_word_embeddings": tied,
        **token_ids(encoding),
        **dataclasses.asdict(model.config),
    }


def token_ids(encoding) -> dict:
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), encoding.eot_token)


def generation_json(model, encoding) -> dict:
    """generation_config.json: rows of the embedding beyond the tokenizer's tokens are never
    drawn.
    """
    unused = list(range(encoding.n_vocab, model.config.vocab_size))
    return {**token_ids(encoding), **({"suppress_tokens": unused} if unused else {})}


def tokenizer_files(model, encoding) -> dict[str, dict]:
    """tokenizer.json and tokenizer_config.json of transformers.

    ValueError: a vocabulary that it cannot express.
    """
    tokens = [
        token for token, _ in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    ]
    special = dict.fromkeys(
        ("bos_token", "eos_token", "pad_token", "unk_token"), tokenizer.END_OF_TEXT
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "padding_side": "left"}
    settings |= {"model_max_length": model.config.block_size, "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": tokenizer_json.write(encoding._pat_str, tokens, tokenizer.END_OF_TEXT),
        "tokenizer_config.json": settings,
    }


def check_exportable(model) -> None:
    """ValueError: something of the model that the wrapper for transformers would leave out."""
    if type(model).forward is not GPT.forward:
        raise ValueError(
            "the variant has a forward of its own, which cannot be exported: put it into hidden or "
            "logits"
        )
    for name in [
        name
        for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))
    ]:
        if name not in ("rope_cos", "rope_sin"):
            raise ValueError(
                f"{name} belongs to the model itself: put it into a module of the model to export "
                "it"
            )
    # transformers builds models without values: a buffer that is not stored would be lost.
    stored = model.state_dict().keys()
    for name, _ in model.named_buffers():
        if name not in stored and name not in ("rope_cos", "rope_sin"):
            raise ValueError(
                f"{name} is a buffer that is not stored: register it with persistent=True to "
                "export it"
            )


def write(folder: Path, name: str, source: Path, dtype: str) -> None:
    """Fill an empty folder with the model of `source`.

    ValueError: damaged, or code that cannot stand alone.
    """
    model, encoding, state = checkpoint.load_model(source, "cpu")
    if encoding.name == "ids":
        raise ValueError(
            f"{source}: its tokens are ids, not text, for which transformers has no tokenizer file"
        )
    check_exportable(model)
    texts = modelling_files(state["model"])
    jsons = {
        "config.json": config_json(state["model"], model, encoding, dtype),
        **tokenizer_files(model, encoding),
    }
    jsons["generation_config.json"] = generation_json(model, encoding)
    texts |= {
        file: json.dumps(content, indent=1, ensure_ascii=False) for file, content in jsons.items()
    }
    records = card.records_of(source, state["step"]) if "step" in state else []
    texts["README.md"] = card.card(
        name, state["model"], model, dtype, provenance()["commit"], state, records
    )
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    weights = checkpoint.weights_of(model.to(getattr(torch, dtype)))
    checkpoint.write_tensors(folder / "model.safetensors", weights)


def replace(out: Path, new: Path) -> None:
    """Put the folder `new` in the place of `out`, which may hold an older one."""
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        out.replace(old)
        new.replace(out)
        shutil.rmtree(old)
    else:
        new.replace(out)


def main():
    args = arguments()
    with configurator.one_line_errors():
        out, run = Path(args.out_dir).resolve(), Path(args.run)
        check_out(out, args.overwrite)
        source = run if checkpoint.is_folder_of_weights(run) else checkpoint.find(run)
        out.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            new.chmod(checkpoint.permitted(0o777))
            write(new, out.name, source, args.dtype)
            replace(out, new)
        finally:
            shutil.rmtree(new, ignore_errors=True)  # nothing is left there unless it failed
    sizes = [f"{file.name} ({metrics.size(file.stat().st_size)})" for file in sorted(out.iterdir())]
    print(f"{args.out_dir}: {', '.join(sizes)}\n{card.LOAD.format(folder=args.out_dir)}")


if __name__ == "__main__":
    main()
