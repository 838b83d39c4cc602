"""Export a trained model as a folder for Hugging Face transformers, or a stream as a package.

    python export.py runs/demo_cpu exported/demo
    python export.py runs/demo_cpu exported/demo --dtype=bfloat16 --overwrite
    python export.py DDL-gpt-mha-rope-CC-EC myproject/ddl_streams

The folder of a model holds the weights, config.json, the tokenizer, a model card, and modeling code
that does not depend on this repository. That of a variant holds the code of its residual stream, for
a model of your own. It is written completely or not at all.
"""

import dataclasses
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import model_folder
from configurator import argument, option, read_command_line
from data import tokenizer
from huggingface import card
from huggingface.modeling_files import EXAMPLE, collect_modeling_files, collect_package_files
from model import MODEL_NAMES
from model.gpt import GPT
from model.parameters import find_aliases
from training import checkpoint, metrics
from utils import errors, units
from utils.provenance import collect_provenance


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
    overwrite: bool = option(
        False,
        "replace out_dir if it holds what this command has written: an exported model, or a package",
    )


def check_out(out_dir: Path, overwrite: bool, content: str, marker: str) -> None:
    """Raise ValueError if the folder must not be written, or replaced for lack of the file `marker`."""
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"{out_dir} is a file; give a folder as out_dir")
    if not out_dir.is_dir() or not any(out_dir.iterdir()):
        return
    if not overwrite:
        raise ValueError(
            f"{out_dir} is not empty; give another out_dir, or --overwrite to replace {content}"
        )
    if not (out_dir / marker).is_file():
        raise ValueError(
            f"{out_dir} does not hold {content}, and --overwrite replaces nothing else; give "
            "another out_dir"
        )
    folders = sorted(path.name for path in out_dir.iterdir() if path.is_dir())
    if folders == ["__pycache__"]:
        return
    if folders:
        raise ValueError(
            f"{out_dir} contains {folders[0]}/, which --overwrite would delete; move it elsewhere"
        )


def check_exportable(model: GPT) -> None:
    """Raise ValueError if the model has something that its transformers wrapper would lose."""
    recomputed = {"rope_cos", "rope_sin"}  # the wrapper computes these by itself
    if type(model).forward is not GPT.forward:
        raise ValueError(
            "a model that overrides GPT.forward cannot be exported; override hidden or logits "
            "instead"
        )
    own_tensors = [
        *model.named_parameters(recurse=False),
        *model.named_buffers(recurse=False),
    ]
    for name, _ in own_tensors:
        if name not in recomputed:
            raise ValueError(
                f"{name} is a tensor of the model itself, which cannot be exported; register it in "
                "one of the model's submodules"
            )
    # transformers builds a model without values and then loads the stored tensors, so a
    # non-persistent buffer would keep no value.
    buffers = dict(model.named_buffers()).keys()
    for name in buffers - model.state_dict().keys() - recomputed:
        raise ValueError(
            f"{name} is a non-persistent buffer, whose value would not be exported; register it "
            "with persistent=True"
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


def read_records(checkpoint_folder: Path, step: int) -> list[dict]:
    """Return the lines of the run's metrics.jsonl up to a step; [] if there is no such file."""
    file = checkpoint_folder.parent.parent / "metrics.jsonl"
    if checkpoint_folder.parent.name != "checkpoints" or not file.is_file():
        return []
    return [record for record in metrics.read(file) if record["step"] <= step]


def write(folder: Path, name: str, source: Path, dtype: str) -> None:
    """Write the model of `source` into an empty folder.

    Args:
        name: the model's name on its card
        source: a checkpoint folder, an exported or a released model

    Raises:
        ValueError: the source is damaged, or its model cannot be exported
    """
    model, model_tokenizer, state = model_folder.load_model(source, "cpu")
    model_name = state["model"]
    # everything that can fail comes before the first file is written
    check_exportable(model)
    texts = collect_modeling_files(model_name)
    for file, content in make_json_files(model_name, model, model_tokenizer, dtype).items():
        texts[file] = json.dumps(content, indent=1, ensure_ascii=False)
    texts["README.md"] = card.write_card(
        name,
        model_name,
        model,
        dtype=dtype,
        commit=collect_provenance()["commit"],
        state=state,
        records=read_records(source, state["step"]) if "step" in state else [],
    )
    write_texts(folder, texts)
    weights = checkpoint.get_model_tensors(model.to(getattr(torch, dtype)))
    checkpoint.save_tensors(folder / "model.safetensors", weights)


def check_package(args: Options, out_dir: Path) -> None:
    """Raise ValueError if a package must not be written there."""
    check_out(out_dir, args.overwrite, "the package of a stream", marker=f"{EXAMPLE}.py")
    for key, default in (("dtype", "float32"), ("weights", "trained")):
        value = getattr(args, key)
        if value != default:
            raise ValueError(
                f"{key}={value} has no effect on {args.run}, which has no weights; omit {key}"
            )
    if out_dir.with_name(f"{out_dir.name}.py").exists():
        raise ValueError(
            f"a package {out_dir} would hide {out_dir.name}.py beside it; give it another name"
        )


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Write text files, and the license, into a folder."""
    texts["LICENSE"] = (Path(__file__).parent / "LICENSE").read_text(encoding="utf-8")
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


def main() -> None:
    args = read_command_line(__doc__, Options)
    with errors.one_line_errors():
        out_dir = Path(args.out_dir).resolve()
        run = Path(args.run)
        is_variant = args.run in MODEL_NAMES and not run.exists()
        if is_variant:
            check_package(args, out_dir)
        else:
            check_out(out_dir, args.overwrite, "an exported model", marker="modeling_ddl.py")
            also_accepted = f", or the name of a variant{errors.suggest(args.run, MODEL_NAMES)}"
            source = run if model_folder.is_exported(run) else checkpoint.find(run, also_accepted)
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        # The folder is written beside its place and then moved there, so that a failure leaves
        # nothing half-written.
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        try:
            (temporary / "new").mkdir()
            if is_variant:
                write_texts(temporary / "new", collect_package_files(args.run))
            else:
                write(temporary / "new", out_dir.name, source, args.dtype)
            if out_dir.exists():
                out_dir.replace(temporary / "old")
            (temporary / "new").replace(out_dir)
        except BaseException:
            if (temporary / "old").exists():
                (temporary / "old").replace(out_dir)
            shutil.rmtree(temporary)
            raise
        shutil.rmtree(temporary)
    sizes = [
        f"{file.name} ({units.format_bytes(file.stat().st_size)})"
        for file in sorted(out_dir.iterdir())
    ]
    print(f"wrote {args.out_dir}: {', '.join(sizes)}")
    if is_variant:
        print(
            f"{out_dir.name} is a package with the class ResidualStream; this repository's "
            "README.md says how to use it"
        )
    else:
        print(card.LOADING_CODE.format(folder=args.out_dir))


if __name__ == "__main__":
    main()
