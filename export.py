"""Export a trained model as a folder for Hugging Face transformers, or a stream as a package.

    python export.py runs/demo_cpu exported/demo
    python export.py runs/demo_cpu exported/demo --dtype=bfloat16 --overwrite
    python export.py DDL-gpt-mha-rope-CC-EC myproject/ddl_streams

The folder of a model holds the weights, config.json, the tokenizer, a short model card, and modeling
code that does not depend on this repository. That of a variant holds the code of its residual stream,
for a model of your own.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import model_folder
from configurator import argument, option, read_command_line
from data import tokenizer
from huggingface import card
from huggingface.modeling_files import collect_modeling_files, collect_package_files
from model import MODEL_NAMES, find_variant
from model.gpt import GPT
from model.parameters import find_aliases
from training import checkpoint
from utils import errors, files


@dataclass(frozen=True)
class Options:
    """What is exported, and where"""

    run: str = argument(
        "run folder (its latest checkpoint is used), checkpoint folder, exported model, model "
        "released by the paper's authors, or the name of a variant, whose stream becomes a package"
    )
    out_dir: str = argument(
        "folder to write; it must be empty or not exist yet, unless --overwrite is given"
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "dtype of the exported weights",
    )
    overwrite: bool = option(False, "write into out_dir even if it is not empty")


def check_exportable(model: GPT) -> None:
    """Raise ValueError if the model has something that its transformers wrapper would lose."""
    own_tensors = {name for name, _ in model.named_parameters(recurse=False)}
    buffers = {name for name, _ in model.named_buffers()}
    # the wrapper computes the tables of RoPE by itself
    lost = (own_tensors | buffers - model.state_dict().keys()) - {"rope_cos", "rope_sin"}
    if type(model).forward is not GPT.forward:
        lost.add("GPT.forward, which the model overrides")
    if lost:
        raise ValueError(
            f"the model cannot be exported, because {', '.join(sorted(lost))} would be lost; "
            "override hidden or logits instead of forward, and register tensors in submodules and "
            "buffers with persistent=True"
        )


def make_json_files(
    model_name: str, model: GPT, model_tokenizer: tokenizer.Tokenizer, dtype: str
) -> dict[str, dict]:
    """Return the JSON files of an exported folder by name.

    Raises:
        ValueError: the files cannot express the tokenizer's vocabulary
    """
    end_of_text = model_tokenizer.eot_token
    special_ids = {
        "bos_token_id": model_tokenizer.bos_token,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
    }
    # It has no model_type, which DDLConfig states: AutoTokenizer reads this file as well, and without
    # trust_remote_code transformers would warn that it does not know the type.
    config = {
        "architectures": ["DDLForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_ddl.DDLConfig",
            "AutoModelForCausalLM": "modeling_ddl.DDLForCausalLM",
        },
        "stem": model_name,
        "dtype": dtype,
        # transformers has one flag for all tied weights of a model
        "tie_word_embeddings": bool(find_aliases(model)),
        **special_ids,
        **dataclasses.asdict(model.config),
    }
    generation_config: dict[str, object] = dict(special_ids)
    # The embedding can have more rows than the tokenizer has tokens. These must not be sampled.
    unused_ids = list(range(model_tokenizer.n_vocab, model.config.vocab_size))
    if unused_ids:
        generation_config["suppress_tokens"] = unused_ids
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": model_tokenizer.bos_text,
        "eos_token": model_tokenizer.eot_text,
        "pad_token": model_tokenizer.eot_text,
        "unk_token": model_tokenizer.eot_text,
        "padding_side": "left",
        "model_max_length": model.config.block_size,
        "clean_up_tokenization_spaces": False,
    }
    if model_tokenizer.name_or_path is not None:
        tokenizer_config["name_or_path"] = model_tokenizer.name_or_path
    return {
        "config.json": config,
        "tokenizer.json": model_tokenizer.to_hugging_face(),
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }


def collect_model_files(
    name: str, model: GPT, model_tokenizer: tokenizer.Tokenizer, state: dict, dtype: str
) -> dict[str, str]:
    """Return all files of an exported model but the weights, by name.

    Args:
        name: the model's name on its card
        state: as `model_folder.load_model` returns it

    Raises:
        ValueError: the model or its tokenizer cannot be exported
    """
    check_exportable(model)
    variant = state["model"]
    json_files = make_json_files(variant, model, model_tokenizer, dtype)
    return {
        **collect_modeling_files(Path(find_variant(variant).origin)),
        **{
            file: json.dumps(content, indent=1, ensure_ascii=False)
            for file, content in json_files.items()
        },
        "README.md": card.write_card(name, variant, model, state),
    }


def main() -> None:
    args = read_command_line(__doc__, Options)
    with errors.one_line_errors():
        out_dir = Path(args.out_dir)
        run = Path(args.run)
        if out_dir.is_dir() and any(out_dir.iterdir()) and not args.overwrite:
            raise ValueError(f"{out_dir} is not empty; give another out_dir, or --overwrite")
        model = None
        if args.run in MODEL_NAMES and not run.exists():
            texts = collect_package_files(args.run, Path(find_variant(args.run).origin))
        else:
            also_accepted = f", or the name of a variant{errors.suggest(args.run, MODEL_NAMES)}"
            source = run if model_folder.is_exported(run) else checkpoint.find(run, also_accepted)
            model, model_tokenizer, state = model_folder.load_model(source, "cpu")
            name = out_dir.resolve().name
            texts = collect_model_files(name, model, model_tokenizer, state, args.dtype)
        texts["LICENSE"] = (Path(__file__).parent / "LICENSE").read_text(encoding="utf-8")
        out_dir.mkdir(parents=True, exist_ok=True)
        # a folder with weights is complete: those of an earlier export go first, the new ones last
        (out_dir / "model.safetensors").unlink(missing_ok=True)
        for file, text in texts.items():
            files.write_text(out_dir / file, text)
        if model is not None:
            weights = checkpoint.get_model_tensors(model.to(getattr(torch, args.dtype)))
            checkpoint.save_tensors(out_dir / "model.safetensors", weights)
    if model is None:
        print(f"wrote {out_dir}, a package with the class ResidualStream (docs/export.md)")
    else:
        print(f"wrote {out_dir}\n{card.LOADING_CODE.format(folder=args.out_dir)}")


if __name__ == "__main__":
    main()
