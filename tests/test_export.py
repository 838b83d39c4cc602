"""Exported folders: what transformers computes with them, in a process without this repository, is
what we compute.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from export_helpers import CC, TINY, build_noisy, export_run, save_run
from helpers import EXAMPLES, ROOT, one_line_error
from in_process import call
from safetensors.torch import load_file, save_file

import export
import model
from data import tokenizer
from huggingface import flatten
from model import MODEL_NAMES, build
from training import checkpoint

# Every variant and every kind of branch once; keys of parts that do not meet share a case.
PLAIN = {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False, "rope_base": 500.0}
VMAP = {"ddl_map": "v", "ddl_k_hidden_size": 3, "ddl_value_channels": 3}
GATE = {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5, "ddl_update": "write_only"}
POOLED = {"ddl_map": "v", "ddl_k_input": "flat", "ddl_k_norm": "shifted", "ddl_beta_input": "mean"}
NO_BIAS = {"ddl_v_bias": False, "ddl_beta_input": "residual"}
CAUSAL = {"ddl_state_dv_shortconv_causal": True, "ddl_state_shortconv_kernel_size": 3}
CASES = {
    CC: (CC, {}),
    "convolution": ("DDL-gpt-mha-rope", {}),
    "plain": ("gpt-mha-rope", PLAIN),
    "vmap": ("DDL-gpt-mha-rope-EC", VMAP),
    "attention": (f"{CC}-EC", {"ddl_map": "v", "ddl_k_branch": "attention"}),
    "pooled": (CC, POOLED),
    "no_bias": ("DDL-vdim1-gpt-mha-rope", NO_BIAS),
    "constant": ("DDL-vdim1-gpt-mha-rope", {"ddl_v_constant": True}),
    "causal_gate": (CC, {**CAUSAL, **GATE}),
    "folded_untied": (CC, {"ddl_cc_read": "folded", "tie_embeddings": False}),
    "gated": ("gated-gpt-mha-rope", {}),  # the README's example
    "capped": ("capped-gpt-mha-rope", {}),
    "shared": ("shared-gpt-mha-rope", {}),
    "by_id": ("Lambdas-gpt-mha-rope", {"lambda_value_embeddings": True, "lambda_skips": True}),
    "own_erase_gate": ("DDL-gpt-mha-rope", {"ddl_erase_gate": "own"}),
    "erase_only": ("DDL-gpt-mha-rope", {"ddl_update": "erase_only"}),
    "main_gain": (
        "Lambdas-gpt-mha-rope",
        {"lambda_input": False, "lambda_values": "none", "lambda_gain": True},
    ),
    "ways": ("MUDD-gpt-mha-rope", {}),
    "canon": ("conv-gpt-mha-rope", {"canon": "ABCD"}),
}
IN_BFLOAT16 = (CC, "convolution", "plain")
TEXTS = ["def f(x):\n    return größe", "", " \n\t尺寸", "<|endoftext|>a<|endoftext|>"]
PAIRS = [("def f(", "x):"), ("import", " os"), ("", "return"), ("class A", ":")]


@pytest.fixture(scope="module")
def example_stem(tmp_path_factory):
    """The README's stem, which has `import model.gpt as gpt`, in the place of a user's file."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    package = tmp_path_factory.mktemp("stems") / "model"
    package.mkdir()
    example = next(block for block in blocks if "class Model" in block)
    (package / "gated-gpt-mha-rope.py").write_text(example)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "__path__", [*model.__path__, str(package), str(EXAMPLES[0].parent)])
        patch.setattr(model, "MODEL_NAMES", [*MODEL_NAMES, *(path.stem for path in EXAMPLES)])
        yield


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 256, (3, 13), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory, example_stem, ids):
    """(folder, {case: (our model, transformers' tensors, facts)}, facts of all), by one process."""
    torch.manual_seed(1)
    folder, made = tmp_path_factory.mktemp("exported"), {}
    for case, (stem, keys) in CASES.items():
        made[case] = build_noisy(stem, keys)
        export_run(save_run(folder / f"{case}_run", made[case], stem), folder / case)
    for case in IN_BFLOAT16:
        export_run(folder / f"{case}_run", folder / f"{case}_bfloat16", "--dtype=bfloat16")
    shutil.copytree(folder / CC, folder / "lacking")
    weights = load_file(folder / CC / "model.safetensors")
    del weights["ln_f.weight"]
    save_file(weights, folder / "lacking" / "model.safetensors")
    job = {"ids": ids.tolist(), "folders": [str(folder / case) for case in CASES]}
    job |= {"lacking": str(folder / "lacking"), "text_folder": str(folder / CC)}
    job |= {"texts": TEXTS, "pairs": PAIRS}
    job["bfloat16"] = [str(folder / f"{x}{y}") for x in IN_BFLOAT16 for y in ("_bfloat16", "")]
    (folder / "job.json").write_text(json.dumps(job))
    home = {"HF_HOME": str(folder / "home"), "HF_MODULES_CACHE": str(folder / "home" / "m")}
    home |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-I", ROOT / "tests" / "reload_exported.py", folder / "job.json"]
    environment = {**os.environ, **home}
    result = subprocess.run(command, cwd=folder, capture_output=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr.decode()[-3000:]
    facts = json.loads((folder / "job.facts").read_text())
    cases = {
        case: (made[case], torch.load(folder / f"{case}.pt"), facts[str(folder / case)])
        for case in CASES
    }
    return folder, cases, facts


@pytest.fixture(params=list(CASES))
def case(request, reloaded):
    return reloaded[1][request.param]


def close(found, wanted, tolerance=1e-6):
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=tolerance * max(1, float(wanted.abs().max()))
    )


@torch.no_grad()
def test_logits_are_ours(case, ids):
    ours, found, _ = case
    wanted = ours(ids)[0]
    close(found["logits"], wanted)
    close(found["cached"], wanted, 1e-5)
    assert torch.equal(found["again"], found["logits"])
    close(found["last"], found["logits"][:, -1:])
    assert found["double"].dtype == torch.float64
    close(found["double"].float(), ours.double()(ids)[0].float())
    ours.float()


@torch.no_grad()
def test_padding_changes_nothing(case, ids):
    ours, found, _ = case
    for row, tokens in ((0, slice(0, 13)), (1, slice(4, 13)), (2, slice(0, 9))):
        alone = ours(ids[row : row + 1, tokens])[0][0]
        close(found["padded_logits"][row, tokens], alone, 1e-5)
        if row < 2:
            close(found["padded_cached"][row, tokens], alone, 1e-5)


def test_weights_keep_their_names_and_stay_tied(case):
    ours, _, facts = case
    assert facts["tied"] == ours.config.tie_embeddings
    assert facts["dtype"] == "torch.float32"
    assert facts["names"] == sorted(ours.state_dict())


@torch.no_grad()
def likeliest(ours, prompt, count: int):
    """Tokens by full passes over everything so far; end-of-text and unused ids cannot come."""
    text = prompt
    for _ in range(count):
        text = torch.cat((text, ours(text[None])[0][0, -1, :256].argmax()[None]))
    return text


def test_greedy_text_is_ours(case, ids):
    ours, found, facts = case
    for row in (0, 1):
        wanted = likeliest(ours, ids[row, :7], 6)
        assert torch.equal(found["greedy_True"][row], wanted)
        if row == 1:
            wanted = likeliest(ours, ids[row, 4:7], 6)
        assert torch.equal(found["padded_greedy_True"][row, -6:], wanted[-6:])
    assert len(set(found["greedy_True"][:, 7:].flatten().tolist())) > 2
    prompt = torch.tensor(list(b"def f"))
    assert facts["text"] == bytes(likeliest(ours, prompt, 3).tolist()).decode(errors="replace")


def test_the_cache_changes_no_text(case):
    """Beams, samples and several continuations, whole and padded batches, against passes over all
    tokens each time.
    """
    _, found, _ = case
    names = sorted(name.removesuffix("_True") for name in found if name.endswith("_True"))
    assert len(names) == 11
    for name in names:
        assert torch.equal(found[f"{name}_True"], found[f"{name}_False"]), name
    assert all(
        tensor.max() < 257 for name, tensor in found.items() if name.endswith(("_True", "_False"))
    )
    assert found["returned_True"].shape == (6, 13)


def test_gradients_are_ours(case, ids):
    ours, found, _ = case
    targets = ids[:, 1:].clone()
    targets[0, :2] = -1
    loss = ours(ids[:, :-1], targets)[1]
    loss.backward()
    close(found["loss"], loss.detach())
    # A gate's bias has one number, a sum over tokens that may nearly cancel: it is as exact as what
    # was summed.
    largest = max(float(p.grad.abs().max()) for p in ours.parameters() if p.requires_grad)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            scale = 1e-5 * float(parameter.grad.abs().max()) + 1e-7 * largest
            for prefix in ("gradient.", "checkpointed."):
                torch.testing.assert_close(
                    found[f"{prefix}{name}"], parameter.grad, rtol=1e-4, atol=scale
                )
        else:
            assert f"gradient.{name}" not in found
    ours.zero_grad()
    assert found["changed"]


def test_what_cannot_be_served_is_said(reloaded):
    said = reloaded[2]["refusals"]
    wanted = {
        "gap": "a gap between the tokens of a sequence",
        "right": "pad on the left",
        "short": r"attention_mask has the shape \(1, 3\); give one number for each of the 5 tokens",
        "long": "45 tokens do not fit block_size=24",
        "generate_long": "25 tokens do not fit a cache of length=24",
        "attentions": "output_attentions is not supported",
        "resize": "cannot be resized",
        "static": "this model has its own cache",
    }
    assert said.keys() == wanted.keys()
    for name, message in wanted.items():
        assert re.search(message, said[name]), (name, said[name])
    assert reloaded[2]["missing"] == "the file of weights lacks ln_f.weight"


def test_the_tokenizer_is_ours(reloaded):
    found, encoding = reloaded[2]["tokenizer"], tokenizer.byte_tokenizer()
    assert found["ids"] == [encoding.encode(text, allowed_special="all") for text in TEXTS]
    assert found["decoded"] == TEXTS
    assert found["special"] == ["<|endoftext|>"] * 3
    assert found["batch"]["input_ids"] == [[256, 256, 97], [98, 99, 100]]
    assert found["batch"]["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
    assert found["size"] == 257


@torch.no_grad()
def test_lm_eval_scores_as_we_do(reloaded):
    ours = reloaded[1][CC][0]
    for pair, (score, greedy) in zip(PAIRS, reloaded[2]["loglikelihood"]):
        wanted = score_of(ours, *pair)
        assert score == pytest.approx(wanted[0], abs=1e-4)
        assert greedy == wanted[1]


def test_bfloat16_is_ours_rounded_and_read_back(reloaded):
    folder, cases, facts = reloaded
    assert facts["bfloat16"] == "torch.bfloat16"
    back, encoding, state = checkpoint.load_model(folder / f"{CC}_bfloat16", "cpu")
    assert encoding.n_vocab == 257
    assert state == {"model": CC, "model_config": vars(cases[CC][0].config)}
    for name, value in cases[CC][0].state_dict().items():
        assert torch.equal(back.state_dict()[name], value.bfloat16().float()), name


def near(found, wanted, rounding: float):
    """The norm of the difference, as a share of wanted's; bfloat16 itself rounds by 2^-8 = 0.4%."""
    assert float((found.double() - wanted.double()).norm() / wanted.double().norm()) < rounding


@pytest.mark.parametrize("dtype", ["_bfloat16", ""], ids=["of_bfloat16", "of_float32"])
@pytest.mark.parametrize("case", IN_BFLOAT16)
def test_every_folder_runs_in_bfloat16(reloaded, ids, case, dtype):
    """A pass, its gradients, text and lm-eval's scores are near those of the rounded weights in
    float32.
    """
    folder, cases, _ = reloaded
    found = torch.load(folder / f"{case}{dtype}.bfloat16.pt")
    exact = copy.deepcopy(cases[case][0]).bfloat16().float()
    logits, loss = exact(ids[:, :-1], ids[:, 1:], return_logits=True)
    loss.backward()
    near(
        found["gradient"],
        torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None]),
        0.08,
    )
    near(found["loss"], loss.detach(), 0.02)
    with torch.no_grad():
        logits = exact(ids)[0]
        near(found["logits"], logits, 0.04)
        near(found["cached"], logits, 0.04)
        scores = torch.tensor([score_of(exact, *pair)[0] for pair in PAIRS])
        near(found["scores"], scores, 0.02)
        for name, start, beside in (
            ("text_True", 0, 0),
            ("text_False", 0, 0),
            ("padded_text", 4, 1),
        ):
            text = found[name][beside:, start:]
            made = exact(text[:, :-1])[0][:, -6:]
            lost = made.amax(-1) - made.gather(-1, text[:, -6:, None]).squeeze(-1)
            # any other token would lose most of the range
            assert lost.max() < 0.1 * made.abs().max(), name


def score_of(ours, context: str, rest: str) -> tuple[float, bool]:
    """(log-likelihood of rest after context, whether it is the likeliest)."""
    given, wanted = list(context.encode()) or [256], list(rest.encode())
    log_p = ours(torch.tensor([given + wanted]))[0][0].log_softmax(-1)[len(given) - 1 : -1]
    return float(log_p[range(len(wanted)), wanted].sum()), log_p.argmax(-1).tolist() == wanted


@pytest.mark.parametrize("again", ["", "_again"])
def test_our_scripts_read_every_folder(case, reloaded, again, ids):
    """As exported, and as transformers has saved it since; nothing in it is imported."""
    ours, _, _ = case
    name = next(name for name, (made, *_) in reloaded[1].items() if made is ours)
    before = set(sys.modules)
    back, encoding, _ = checkpoint.load_model(reloaded[0] / f"{name}{again}", "cpu")
    assert torch.equal(back(ids)[0], ours(ids)[0])
    assert vars(back.config) == vars(ours.config)
    assert (back.lm_head.weight is back.transformer.wte.weight) == back.config.tie_embeddings
    assert encoding.name == "bytes"
    assert not {
        module for module in set(sys.modules) - before if "ddl" in module or "stem" in module
    }


NAMED = "from .gpt import __name__ as _\nfrom . import gpt as"


@pytest.mark.parametrize(
    ("text", "wanted", "needed"),
    [
        ("from model.gpt import GPT, Block as B\n", "from .gpt import GPT, Block as B\n", ["gpt"]),
        ("import model.gpt as g  # x\n", f"{NAMED} g  # x\n", ["gpt"]),
        ("from model import gpt\n", f"{NAMED} gpt\n", ["gpt"]),
        ("from model.gpt import (\n    GPT,\n)\nx = 1\n", "from .gpt import GPT\nx = 1\n", ["gpt"]),
        ("import torch, math\n", "import torch, math\n", []),
        ("if x:\n    from model.loss import y\n", "if x:\n    from .loss import y\n", ["loss"]),
    ],
)
def test_imports_become_relative(text, wanted, needed):
    assert flatten.make_imports_relative(text, "x") == (wanted, needed)


@pytest.mark.parametrize(
    "text",
    [
        *("import model", "import model.gpt", "from data import tokenizer", "import configurator"),
        "from model.kernels.stream import DeltaStream",
    ],
)
def test_code_that_cannot_stand_alone_is_refused(text):
    with pytest.raises(ValueError, match="cannot be exported"):
        flatten.make_imports_relative(text, "model/mine.py")


@pytest.mark.parametrize("module", ["model.kernels", "model.build"])
def test_modules_that_are_no_files_are_refused(module):
    with pytest.raises(ValueError, match="is not one file"):
        flatten.read_source(module)


def test_what_the_wrapper_would_leave_out_is_refused():
    made = build(CC, **TINY)
    export.check_exportable(made)
    made.transformer.h[0].register_buffer("scale", torch.ones(2))
    export.check_exportable(made)
    made.transformer.h[0].register_buffer("steps", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.steps is a non-persistent buffer"):
        export.check_exportable(made)
    for name, attribute in (("out_gain", torch.nn.Parameter(torch.ones(2))), ("forward", None)):
        made = build(CC, **TINY)
        if attribute is None:
            made.__class__ = type("Capped", (type(made),), {"forward": lambda self, *_: None})
        else:
            setattr(made, name, attribute)
        with pytest.raises(ValueError, match=name):
            export.check_exportable(made)


def test_the_two_files_that_transformers_loads_name_all_others(reloaded):
    """Its versions before 5.10 copy what these import, and no further."""
    folder = reloaded[0] / next(iter(reloaded[1]))
    others = {path.stem for path in folder.glob("*.py")} - {"modeling_ddl", "configuration_ddl"}
    for name in ("modeling_ddl", "configuration_ddl"):
        assert others <= set(
            re.findall(r"^from \.(\w+) import", (folder / f"{name}.py").read_text(), flags=re.M)
        )


def test_others_can_read_what_is_written(reloaded):
    folder, mask = reloaded[0] / next(iter(reloaded[1])), os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask


def test_the_card_tells_what_is_known(tmp_path):
    run = save_run(tmp_path / "run", build_noisy(CC, {}), CC)
    lines = [{"step": step, "loss": float(step)} for step in range(1, 9)]
    validation = {"step": 7, "val_loss": 1.25, "val_perplexity": 3.49, "val_sequences": 33}
    lines += [{**validation, "val_bits_per_byte": 1.8}]
    lines += [{**validation, "step": 8, "val_loss": 9.0}]  # after the checkpoint
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = re.sub(" +", " ", (export_run(run, tmp_path / "out") / "README.md").read_text())
    assert text.startswith("---\nlibrary_name: transformers\n")
    rows = ["| steps | 7 |", "| tokens | 672, in sequences of 24 |", "| corpus | stories |"]
    rows += ["| `hidden_size` | `12` |", "| validation loss | 1.2500 (step 7, 33 sequences) |"]
    rows += ["| validation bits per byte | 1.8000 (step 7"]
    for row in (*rows, "| `learning_rate` | `0.01` |"):
        assert row in text, row
    assert "min_lr" not in text
    assert "/some" not in text
    assert f"{build(CC, **TINY).num_parameters():,} parameters" in text
    text = (export_run(tmp_path / "out", tmp_path / "second") / "README.md").read_text()
    assert "## Training" not in text
    assert "None" not in text.partition("## Model")[0]


def test_the_code_in_the_card_compiles(reloaded):
    """In this process, for its syntax and names: from_pretrained is the other tests' affair."""
    text = (reloaded[0] / CC / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, flags=re.S)[1]
    compile(code, "README.md", "exec")
    assert f"'{CC}', trust_remote_code=True" in code


def test_nothing_is_half_written(tmp_path, monkeypatch):
    run = save_run(tmp_path / "run", build_noisy(CC, {}), CC)
    out = export_run(run, tmp_path / "made" / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(
        checkpoint, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full"))
    )
    for arguments in ([run, out, "--overwrite"], [run, tmp_path / "made" / "other"]):
        assert "disk full" in one_line_error(call("export.py", *arguments))
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_only_exported_folders_are_replaced(tmp_path):
    run = save_run(tmp_path / "run", build_noisy(CC, {}), CC)
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    export_run(run, out)  # an empty one is taken
    (out / "old").touch()
    other.mkdir()
    (other / "config.json").touch()
    (tmp_path / "file").touch()
    for arguments, message in (
        ([out], "is not empty; give another out_dir, or --overwrite"),
        ([other, "--overwrite"], "does not hold an exported model"),
        ([run, "--overwrite"], "does not hold an exported model"),
        ([tmp_path / "file", "--overwrite"], "is a file; give a folder as out_dir"),
    ):
        assert message in one_line_error(call("export.py", run, *arguments))
    export_run(run, out, "--overwrite")
    assert not (out / "old").exists()
    export_run(out, out, "--overwrite")  # onto itself
    assert (out / "model.safetensors").is_file()


def test_the_script(tmp_path):
    run = save_run(tmp_path / "run", build_noisy(CC, {}), CC)
    result = call("export.py", run, tmp_path / "out", "--dtype=bfloat16")
    assert result.returncode == 0, result.stderr.decode()
    lines = result.stdout.decode().splitlines()
    assert "model.safetensors (" in lines[0]
    assert lines[1:] == [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"model = AutoModelForCausalLM.from_pretrained('{tmp_path}/out', trust_remote_code=True)",
        f"tokenizer = AutoTokenizer.from_pretrained('{tmp_path}/out', trust_remote_code=True)",
    ]
    assert call("sample.py", tmp_path / "out", "--max_new_tokens=5", "--device=cpu").returncode == 0
    assert "holds no checkpoint" in one_line_error(call("export.py", tmp_path, tmp_path / "x"))
