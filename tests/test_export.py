"""Exported folders: transformers computes with them what we do, without this repository."""

import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from export_helpers import CC, TINY, build_noisy, export_run, save_run
from helpers import ROOT, find_example_streams, one_line_error
from in_process import call
from models import AUTHORS_CC
from safetensors.torch import load_file, save_file

import export
import model.gpt
import model_folder
from data import tokenizer
from huggingface.modeling_files import collect_modeling_files
from model import MODEL_NAMES, build, find_variant

# A residual connection, DDL in all of its parts, blocks that share weights, several streams with a
# file of their own, and a read that depends on token ids.
PLAIN = {
    "rope_ratio": 0.5,
    "mup": True,
    "use_qk_rmsnorm": False,
    "rope_base": 500.0,
    "tie_embeddings": False,
}
CASES = {
    "ddl": (f"{CC}-EC", AUTHORS_CC),
    "plain": ("gpt-mha-rope", PLAIN),
    "shared": ("shared-gpt-mha-rope", {}),
    "streams": ("mHC-gpt-mha-rope", {"mhc_readout": "sigmoid"}),
    "by_id": ("Lambdas-gpt-mha-rope", {"lambda_value_embeddings": True, "lambda_skips": True}),
}
# A case with convolutions over tokens, and one without and with an untied head.
EXAMINED_FURTHER = ("ddl", "plain")
IN_BFLOAT16 = ("ddl_bfloat16", "plain")
TEXTS = ["def f(x):\n    return größe", "", " \n\t尺寸", "<|endoftext|>a<|endoftext|>"]


class Case(NamedTuple):
    """One exported model."""

    ours: model.gpt.GPT
    folder: Path

    # what transformers computes with it (reload_exported.examine)
    tensors: dict[str, torch.Tensor]
    summary: dict


class Reloaded(NamedTuple):
    """All exported models."""

    # it has the folder of each case
    folder: Path
    cases: dict[str, Case]

    # what was found beyond single cases (reload_exported.main)
    summary: dict


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 256, (3, 13), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, tokenizer.Tokenizer]:
    """Make a tokenizer of each kind that can be exported."""
    pairs = tokenizer.train_byte_pairs(["def f(x):\n    return x\n" * 9], 259)
    own = tokenizer.LibraryTokenizer("library:own", pairs.to_hugging_face(), tokenizer.END_OF_TEXT)
    return {"bytes": tokenizer.byte_tokenizer(), "pairs": pairs, "own": own}


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory, ids, tokenizers) -> Reloaded:
    """Export every case, and compute with transformers in one process for all of them."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("exported")
    models = {}
    with find_example_streams():
        for case, (model_name, settings) in CASES.items():
            models[case] = build_noisy(model_name, settings)
            export_run(save_run(folder / f"{case}_run", models[case], model_name), folder / case)
    export_run(folder / "ddl_run", folder / "ddl_bfloat16", "--dtype=bfloat16")
    for kind, encoding in tokenizers.items():
        run = save_run(folder / f"{kind}_run", models["plain"], "gpt-mha-rope", encoding)
        export_run(run, folder / f"{kind}_tokenizer")
    shutil.copytree(folder / "ddl", folder / "lacking")
    weights = load_file(folder / "ddl" / "model.safetensors")
    del weights["ln_f.weight"]
    save_file(weights, folder / "lacking" / "model.safetensors")
    job = {
        "ids": ids.tolist(),
        "folders": [str(folder / case) for case in CASES],
        "lacking": str(folder / "lacking"),
        "tokenizer_folders": [str(folder / f"{kind}_tokenizer") for kind in tokenizers],
        "texts": TEXTS,
        "further": [str(folder / case) for case in EXAMINED_FURTHER],
        "bfloat16": [str(folder / name) for name in IN_BFLOAT16],
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "home" / "m"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-I", ROOT / "tests" / "reload_exported.py", folder / "job.json"]
    result = subprocess.run(command, cwd=folder, capture_output=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr.decode()[-3000:]
    summary = json.loads((folder / "job.summary").read_text())
    cases = {
        case: Case(
            ours=models[case],
            folder=folder / case,
            tensors=torch.load(folder / f"{case}.pt"),
            summary=summary["folders"][str(folder / case)],
        )
        for case in CASES
    }
    return Reloaded(folder, cases, summary)


@pytest.fixture(params=list(CASES))
def case(request, reloaded) -> Case:
    return reloaded.cases[request.param]


def check_close(theirs: torch.Tensor, ours: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Check that two tensors differ by at most the tolerance, relative to the largest entry."""
    torch.testing.assert_close(
        theirs, ours, rtol=0, atol=tolerance * max(1, float(ours.abs().max()))
    )


@torch.no_grad()
def test_logits_are_ours(case, ids):
    tensors = case.tensors
    expected, _ = case.ours(ids)
    check_close(tensors["logits"], expected)
    check_close(tensors["cached"], expected, 1e-5)
    check_close(tensors["last"], tensors["logits"][:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("name", EXAMINED_FURTHER)
def test_a_folder_may_be_saved_by_transformers_and_used_in_float64(reloaded, ids, name):
    case = reloaded.cases[name]
    further = torch.load(f"{case.folder}.further.pt")
    assert torch.equal(further["again"], case.tensors["logits"])
    expected, _ = copy.deepcopy(case.ours).double()(ids)
    for logits in (further["double"], further["converted"]):
        check_close(logits, expected, 1e-12)


@torch.no_grad()
def test_padding_changes_nothing(case, ids):
    tensors = case.tensors
    for row, tokens in ((0, slice(0, 13)), (1, slice(4, 13)), (2, slice(0, 9))):
        alone = case.ours(ids[row : row + 1, tokens])[0][0]
        check_close(tensors["padded_logits"][row, tokens], alone, 1e-5)
        if row < 2:
            check_close(tensors["padded_cached"][row, tokens], alone, 1e-5)


def test_weights_keep_their_names_and_stay_tied(case):
    assert case.summary["tied"] == case.ours.config.tie_embeddings
    assert case.summary["dtype"] == "torch.float32"
    assert case.summary["names"] == sorted(case.ours.state_dict())


@torch.no_grad()
def continue_greedily(ours: model.gpt.GPT, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """Append the most likely tokens to a prompt (T,), without a cache.

    End-of-text and unused ids are not generated.
    """
    text = prompt
    for _ in range(count):
        text = torch.cat((text, ours(text[None])[0][0, -1, :256].argmax()[None]))
    return text


def test_greedy_text_of_a_padded_batch_is_ours(case, ids):
    texts = case.tensors["greedy_True"]
    for row, prompt in ((0, ids[0, :7]), (1, ids[1, 4:7])):
        assert torch.equal(texts[row, -6:], continue_greedily(case.ours, prompt, 6)[-6:])
    assert len(set(texts[:, 7:].flatten().tolist())) > 1


@pytest.mark.parametrize("name", EXAMINED_FURTHER)
def test_every_method_of_generation_is_served(reloaded, name):
    """Each gives one text with the cache and without, in which no unused id is."""
    case = reloaded.cases[name]
    further = torch.load(f"{case.folder}.further.pt")
    text = continue_greedily(case.ours, torch.tensor(list(b"def f")), 3)
    assert further["pipeline"] == bytes(text.tolist()).decode(errors="replace")
    texts = further["texts"]
    for method in ("greedy", "returned", "several_beams", "continued"):
        assert torch.equal(texts[f"{method}_True"], texts[f"{method}_False"]), method
        assert texts[f"{method}_True"].max() < 257
    assert texts["returned_True"].shape == (6, 13)


def test_gradients_are_ours(case, ids):
    ours = case.ours
    tensors = case.tensors
    targets = ids[:, 1:].clone()
    targets[0, :2] = -1
    loss = ours(ids[:, :-1], targets)[1]
    loss.backward()
    check_close(tensors["loss"], loss.detach())
    # The gradient of a gate's bias is one number, a sum over tokens that may nearly cancel; it is
    # as exact as its summands.
    largest = max(float(p.grad.abs().max()) for p in ours.parameters() if p.requires_grad)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            # processors sum in different orders: 2e-5 was seen on one of them
            scale = 4e-5 * float(parameter.grad.abs().max()) + 1e-7 * largest
            for prefix in ("gradient.", "checkpointed."):
                torch.testing.assert_close(
                    tensors[f"{prefix}{name}"], parameter.grad, rtol=1e-4, atol=scale
                )
        else:
            assert f"gradient.{name}" not in tensors
    ours.zero_grad()


def test_calls_that_the_model_cannot_serve_are_refused(reloaded):
    messages = reloaded.summary["refusals"]
    expected = {
        "gap": "no gap between the tokens of a sequence",
        "right": "pad on the left",
        "short": "attention_mask must have a number for each of the 5 tokens",
        "long": "45 tokens do not fit block_size=24",
        "generate_long": "25 tokens do not fit a cache of length=24",
        "attentions": "output_attentions is not supported",
        "static": "this model has its own cache",
        "range": "rope_ratio=2.0: give a number of at most 1",
        "lacking": "the weights file lacks ln_f.weight",
    }
    assert messages.keys() == expected.keys()
    for name, message in expected.items():
        assert message in messages[name]


def test_the_tokenizer_is_ours(reloaded, tokenizers):
    for ours, theirs in zip(tokenizers.values(), reloaded.summary["tokenizers"], strict=True):
        assert theirs["ids"] == [ours.encode(text, allowed_special="all") for text in TEXTS]
        assert theirs["decoded"] == TEXTS
        assert theirs["special"] == ["<|endoftext|>"] * 3
        assert theirs["size"] == ours.n_vocab
        ids = [ours.encode("a"), ours.encode("bcd")]
        assert theirs["batch"]["input_ids"] == [[ours.eot_token] * 2 + ids[0], ids[1]]
        assert theirs["batch"]["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
        assert theirs["log"] == ""  # it is loaded without a warning


def test_a_folder_exported_in_bfloat16_holds_our_rounded_weights(reloaded):
    assert reloaded.summary["bfloat16"] == "torch.bfloat16"
    ours = reloaded.cases["ddl"].ours
    read, encoding, state = model_folder.load_model(reloaded.folder / "ddl_bfloat16", "cpu")
    assert encoding.n_vocab == 257
    assert state == {"model": f"{CC}-EC", "model_config": vars(ours.config)}
    for name, value in ours.state_dict().items():
        assert torch.equal(read.state_dict()[name], value.bfloat16().float()), name


def check_relative_error(theirs: torch.Tensor, ours: torch.Tensor, largest_error: float) -> None:
    """Check the norm of the difference, relative to ours; bfloat16 itself rounds by 2^-8 = 0.4%."""
    error = (theirs.double() - ours.double()).norm() / ours.double().norm()
    assert float(error) < largest_error


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_folder_of_either_dtype_runs_in_bfloat16(reloaded, ids, name):
    """Results in bfloat16 are near those of the rounded weights in float32."""
    theirs = torch.load(reloaded.folder / f"{name}.bfloat16.pt")
    ours = reloaded.cases[name.removesuffix("_bfloat16")].ours
    exact = copy.deepcopy(ours).bfloat16().float()
    with torch.no_grad():
        logits = exact(ids)[0]
        _, loss = exact(ids[:, :-1], ids[:, 1:])
    check_relative_error(theirs["loss"], loss, 0.02)
    check_relative_error(theirs["logits"], logits, 0.04)
    check_relative_error(theirs["cached"], logits, 0.04)


@pytest.mark.parametrize("name", [*CASES, *(f"{name}_again" for name in EXAMINED_FURTHER)])
def test_our_scripts_read_every_folder(reloaded, example_streams, name, ids):
    """The folder may be as exported or as transformers has saved it since ("_again").

    Nothing in it is imported.
    """
    modules = set(sys.modules)
    case = reloaded.cases[name.removesuffix("_again")]
    read, encoding, _ = model_folder.load_model(reloaded.folder / name, "cpu")
    assert torch.equal(read(ids)[0], case.ours(ids)[0])
    assert vars(read.config) == vars(case.ours.config)
    assert (read.lm_head.weight is read.transformer.wte.weight) == read.config.tie_embeddings
    assert tokenizer.same_tokens(encoding, tokenizer.byte_tokenizer())
    new_modules = set(sys.modules) - modules
    assert not {module for module in new_modules if "ddl" in module or "stem" in module}


@pytest.mark.parametrize("variant", MODEL_NAMES)
def test_a_folder_has_every_file_that_its_code_imports(variant):
    files = collect_modeling_files(Path(find_variant(variant).origin))
    for name, code in files.items():
        imported = re.findall(r"^ *from (\.[.\w]*) import", code, flags=re.M)
        assert {f"{module[1:]}.py" for module in imported} <= files.keys(), name
        assert "configurator" not in code, name


def test_a_variant_that_imports_what_its_copy_lacks_is_refused(tmp_path):
    variant_file = tmp_path / "own-gpt.py"
    variant_file.write_text("from utils import units\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"own-gpt\.py cannot be exported with `from utils import"):
        collect_modeling_files(variant_file)


def test_what_the_wrapper_would_lose_is_refused():
    """It copies no parameters and temporary buffers of its own, and does not call forward."""
    plain = build(CC, **TINY)
    plain.transformer.h[0].register_buffer("scale", torch.ones(2))
    export.check_exportable(plain)
    plain.transformer.h[0].register_buffer("steps", torch.ones(2), persistent=False)
    plain.out_gain = torch.nn.Parameter(torch.ones(2))
    plain.__class__ = type("Capped", (type(plain),), {"forward": lambda *_: None})
    message = r"because GPT\.forward, .*, out_gain, transformer\.h\.0\.steps would be lost"
    with pytest.raises(ValueError, match=message):
        export.check_exportable(plain)


def test_other_users_can_read_an_exported_folder_and_its_license(reloaded):
    folder = reloaded.cases["ddl"].folder
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory) -> Path:
    """Return a run folder of a model with noisy weights, whose checkpoint is of step 7."""
    return save_run(tmp_path_factory.mktemp("runs") / "run", build_noisy(CC, {}), CC)


def test_the_card_says_how_the_model_was_trained_if_its_folder_does(noisy_run, tmp_path):
    first = export_run(noisy_run, tmp_path / "first")
    card = (first / "README.md").read_text()
    assert "It was trained for 7 steps, on 672 tokens of the corpus `stories`. It" in card
    code = re.search(r"```python\n(.*?)```", card, flags=re.S)[1]
    compile(code, "README.md", "exec")
    text = (export_run(first, tmp_path / "second") / "README.md").read_text()
    assert "(arXiv 2601.00417)" in text
    assert "It was trained neither" in text
    assert "steps" not in text


def test_executing_its_code_keeps_the_operators_that_exist(reloaded, tmp_path, monkeypatch):
    importlib.import_module("model.streams.hyper_connections")
    first = torch.ops.ddl.sinkhorn_knopp.default
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("copy_1", "copy-2"):
        shutil.copytree(reloaded.folder / "streams", tmp_path / name)
        hyper_connections = importlib.import_module(f"{name}.hyper_connections")
        mix = hyper_connections.sinkhorn_knopp(torch.zeros(1, 1, 2, 2), 1, 0.0)
        assert (mix == 0.5).all()
    # an operator of the same name would have freed the first, and taken its place
    assert torch.ops.ddl.sinkhorn_knopp.default is first


def test_an_interrupted_export_leaves_no_weights(noisy_run, tmp_path, monkeypatch):
    """Those of an earlier export would not belong to the new config.json."""
    out = export_run(noisy_run, tmp_path / "out")

    def press_ctrl_c(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.checkpoint.save_tensors", press_ctrl_c)
    result = call("export.py", noisy_run, out, "--overwrite")
    assert (result.returncode, result.stderr) == (130, b"export.py: interrupted\n")
    assert (out / "config.json").exists()
    assert not (out / "model.safetensors").exists()


def test_a_folder_is_written_over_with_overwrite_only(noisy_run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export_run(noisy_run, out)  # it is empty
    (out / "mine").touch()
    line = one_line_error(call("export.py", noisy_run, out))
    assert "is not empty; give another out_dir, or --overwrite" in line
    export_run(out, out, "--overwrite", "--dtype=bfloat16")  # onto itself
    assert (out / "mine").exists()
    file = out / "model.safetensors"
    assert load_file(file)["ln_f.weight"].dtype == torch.bfloat16


def test_the_script_prints_how_to_load_the_folder(noisy_run, tmp_path):
    out = tmp_path / "out"
    output = call("export.py", noisy_run, out).stdout.decode()
    assert output.startswith(f"wrote {out}\nfrom transformers import")
    assert f"AutoModelForCausalLM.from_pretrained('{out}', trust_remote_code=True)" in output
