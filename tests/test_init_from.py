"""Training from the weights of a folder: what it settles, what it leaves to the run, and that it is
read once.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from export_helpers import export_run, save_released, save_run
from helpers import SMALL, change_default, one_line_error, small_run, write_checksums
from in_process import call
from safetensors.torch import load_file, save_file

from data import tokenizer
from model import build, model_class
from model.causality import move_parameters
from training import checkpoint, init_from
from training.residual_statistics import ObservedStream
from training.settings import configure

STEM = "DDL-gpt-mha-rope-CC-EC"
KEYS = {**SMALL, "ddl_value_channels": 2, "mup": True, "hidden_size_base": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model as a run, an exported folder (float32 and bfloat16) and a released one."""
    torch.manual_seed(3)
    folder, made = tmp_path_factory.mktemp("weights"), build(STEM, **KEYS)
    save_run(folder / "run", made, STEM)
    export_run(folder / "run", folder / "exported")
    export_run(folder / "run", folder / "rounded", "--dtype=bfloat16")
    save_released(made, folder / "released")
    return folder


def arguments(corpus, out: Path, **changes) -> list[str]:
    """A run that leaves the model to the folder."""
    given = small_run(corpus, out, **changes)
    settled = {f"--{key}" for key in ("model", *SMALL)} - {f"--{key}" for key in changes}
    return [each for each in given if each.partition("=")[0] not in settled]


def run(argv: list[str], code: int = 0) -> str:
    """What train.py prints; `code`: the exit code that is expected."""
    result = call("train.py", *argv)
    assert result.returncode == code, result.stderr.decode()
    return result.stdout.decode() + result.stderr.decode()


def weights(out: Path, step: int) -> dict:
    return load_file(out / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


@pytest.mark.parametrize("kind", ["run", "exported", "rounded", "released"])
def test_training_starts_from_the_weights(corpus, folders, tmp_path, kind):
    """Nothing is learned at a rate of zero, so the first checkpoint holds the folder's weights."""
    out = tmp_path / "out"
    run(
        arguments(
            corpus, out, init_from=folders / kind, learning_rate=0, max_steps=1, eval_full=False
        )
    )
    state = json.loads((out / "checkpoints" / "step_00000001" / "state.json").read_text())
    assert (state["step"], state["model"]) == (1, STEM)
    assert state["model_config"] == vars(build(STEM, **KEYS).config)
    assert state["run_config"]["init_from"] == str(folders / kind)
    wanted = load_file(folders / "exported" / "model.safetensors")
    for name, value in weights(out, 1).items():
        same = wanted[name].bfloat16().float() if kind == "rounded" else wanted[name]
        torch.testing.assert_close(value, same, rtol=0, atol=1e-6 if kind == "released" else 0)


def test_a_pair_stays_one(corpus, tmp_path):
    """Both of its parameters are trained, as in the authors' code."""
    torch.manual_seed(4)
    keys = {
        **KEYS,
        "ddl_value_channels": 3,
        "ddl_cc_read": "pair",
        "ddl_state_dv_shortconv_causal": True,
    }
    made = build(STEM, **keys, ddl_state_shortconv_kernel_size=2)
    folder = save_released(made, tmp_path / "released")
    for name, rate in (("still", 0), ("moved", 1e-3)):
        changes = {
            "init_from": folder,
            "learning_rate": rate,
            "min_lr": rate,
            "max_steps": 1,
            "eval_full": False,
        }
        run(arguments(corpus, tmp_path / name, **changes))
    still, moved = weights(tmp_path / "still", 1), weights(tmp_path / "moved", 1)
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in still.items())
    assert all(
        not torch.equal(moved[name], still[name]) for name in ("readout.read", "readout.weight")
    )
    state = json.loads(
        (tmp_path / "still" / "checkpoints" / "step_00000001" / "state.json").read_text()
    )
    names = ("ddl_cc_read", "ddl_state_dv_shortconv_causal", "ddl_state_shortconv_kernel_size")
    assert [state["model_config"][name] for name in names] == ["pair", True, 2]
    with pytest.raises(ValueError, match=r"ddl_cc_read='folded', but init_from=.* has 'pair'"):
        configure(arguments(corpus, tmp_path / "x", init_from=folder, ddl_cc_read="folded"))


def test_the_optimizer_begins_afresh_and_learns(corpus, folders, tmp_path):
    run(arguments(corpus, tmp_path / "out", init_from=folders / "exported"))
    moments = load_file(
        tmp_path / "out" / "checkpoints" / "step_00000003" / "optimizer.safetensors"
    )
    steps = {float(value) for name, value in moments.items() if name.endswith("step")}
    assert steps == {3.0}
    before = load_file(folders / "exported" / "model.safetensors")
    assert all(
        not torch.equal(value, before[name]) for name, value in weights(tmp_path / "out", 6).items()
    )


def test_a_run_that_goes_on_is_bit_for_bit_the_whole_one_and_does_not_need_the_folder(
    corpus, folders, tmp_path
):
    source = Path(shutil.copytree(folders / "exported", tmp_path / "source"))
    keys = {"init_from": source, "resume": "auto", "eval_full": False, "checkpoint_interval": 2}
    run(arguments(corpus, tmp_path / "out", **keys))
    wanted = weights(tmp_path / "out", 6)
    shutil.rmtree(source)
    # nothing to go on from, and no folder
    run(arguments(corpus, tmp_path / "fresh", **keys), code=2)
    assert not (tmp_path / "fresh").exists()
    another = {**keys, "init_from": folders / "run"}
    assert "init_from=" in run(arguments(corpus, tmp_path / "out", **another, max_steps=8), code=2)
    damaged = tmp_path / "out" / "checkpoints" / "step_00000006"  # the one before it counts
    (damaged / "state.json").write_text("")
    run(arguments(corpus, tmp_path / "out", **keys))
    assert all(
        torch.equal(value, wanted[name]) for name, value in weights(tmp_path / "out", 6).items()
    )


def test_a_longer_context_is_legal(corpus, folders, tmp_path):
    """RoPE tables are computed for it; the folder's length is the default."""
    config, model_config = configure(
        arguments(corpus, tmp_path, init_from=folders / "released", block_size=40)
    )
    assert (config.model, model_config.block_size, model_config.ddl_value_channels) == (STEM, 40, 2)
    assert (
        configure(arguments(corpus, tmp_path, init_from=folders / "released"))[1].block_size == 16
    )
    argv = arguments(corpus, tmp_path / "x", init_from=folders / "run", block_size=40, dry_run=True)
    assert "parameters" in run(argv)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 24}, r"hidden_size=24, but init_from=.* has 12; omit the key"),
        ({"mup": False}, r"mup=False, but init_from=.* has True"),
        (
            {"model": "DDL-gpt-mha-rope"},
            r"model='DDL-gpt-mha-rope', but init_from=.* has 'DDL-gpt-mha-rope-CC-EC'",
        ),
        ({"init_from": "nowhere"}, "nowhere does not exist"),
        ({"init_from": "resume"}, "init_from=resume: resume a run with --resume=auto"),
        ({"init_from": "docs"}, "docs holds no checkpoint"),
    ],
)
def test_contradictions_are_refused_by_name(corpus, folders, tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        configure(arguments(corpus, tmp_path, **{"init_from": folders / "exported", **keys}))


def test_a_config_file_counts_as_the_user(corpus, folders, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        f"init_from = {str(folders / 'run')!r}\nhidden_size = 12\nddl_beta_init = 0.25\n"
    )
    _, model_config = configure([str(file)])
    # an initialisation that does not take place
    assert vars(model_config) == vars(build(STEM, **KEYS).config)
    assert "note: ddl_beta_init: no effect with init_from" in capsys.readouterr().out
    file.write_text(f"init_from = {str(folders / 'run')!r}\nrope_base = 5e5\n")
    with pytest.raises(ValueError, match=r"rope_base=500000\.0, but init_from=.* has 10000\.0"):
        configure([str(file)])
    file.write_text("init_from = 5\n")
    with pytest.raises(ValueError, match="init_from=5: give text or None"):
        configure([str(file)])


def test_another_tokenizer_is_refused(corpus, folders, tmp_path):
    made, other = build("gpt-mha-rope", **SMALL), tokenizer.train_byte_pairs(["ab ab ab"] * 5, 258)
    save_run(tmp_path / "run", made, "gpt-mha-rope", other)
    export_run(tmp_path / "run", tmp_path / "exported")
    for name in ("run", "exported"):
        line = run(
            arguments(corpus, tmp_path / "out", init_from=tmp_path / name, dry_run=True), code=2
        )
        assert "was trained with the tokenizer bpe258" in line
        assert "was tokenized with bytes" in line
    small = build("gpt-mha-rope", **{**SMALL, "vocab_size": 200})
    (tmp_path / "released").mkdir()
    save_file(checkpoint.get_model_tensors(small), tmp_path / "released" / "model.safetensors")
    (tmp_path / "released" / "config.json").write_text(json.dumps(vars(small.config)))
    # Released folders have no tokenizer: its size must do.
    assert "vocab_size=200, but" in run(
        arguments(corpus, tmp_path / "out", init_from=tmp_path / "released"), code=2
    )
    assert not (tmp_path / "out").exists()


def test_damaged_weights_end_with_one_line(corpus, folders, tmp_path):
    folder = Path(shutil.copytree(folders / "exported", tmp_path / "e"))
    tensors = load_file(folder / "model.safetensors")
    tensors["ln_f.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    line = one_line_error(call("train.py", *arguments(corpus, tmp_path / "out", init_from=folder)))
    assert "model.safetensors: ln_f.weight holds NaN or infinite numbers" in line
    assert not (tmp_path / "out").exists()


# as if it were newer than what is stored, and not 4 by default
SCALE = "ddl_v_sigmoid_scale"


@pytest.mark.parametrize("kind", ["run", "exported", "released"])
def test_a_folder_that_is_older_than_a_key_means_what_it_meant(
    folders, tmp_path, monkeypatch, kind
):
    shutil.copytree(folders / kind, tmp_path / kind)
    [file] = [
        path for name in ("state", "config") for path in (tmp_path / kind).rglob(f"{name}.json")
    ]
    stored = json.loads(file.read_text())
    del (stored["model_config"] if kind == "run" else stored)[SCALE]
    file.write_text(json.dumps(stored))
    if kind == "run":
        write_checksums(file.parent)
    change_default(monkeypatch, model_class(STEM), SCALE, float, 1.0, before=4.0)
    assert init_from.read_decided_settings(str(tmp_path / kind))[SCALE] == 4.0
    if kind != "released":  # those have no tokenizer
        assert checkpoint.load_model(tmp_path / kind, "cpu")[0].config.ddl_v_sigmoid_scale == 4.0


def test_a_run_keeps_what_a_key_meant_when_it_began(corpus, tmp_path, monkeypatch):
    """Its first checkpoint does not know the key, its second does; what is typed still counts."""
    keys = {
        "model": STEM,
        "resume": "auto",
        "eval_full": False,
        "schedule": "wsd",
        "decay_steps": 0,
    }
    for name, steps in (("whole", (9,)), ("parts", (3,))):
        for last in steps:
            run(small_run(corpus, tmp_path / name, **keys, max_steps=last))
    folder = checkpoint.find(tmp_path / "parts")
    state = json.loads((folder / "state.json").read_text())
    del state["model_config"][SCALE]
    (folder / "state.json").write_text(json.dumps(state))
    write_checksums(folder)
    change_default(monkeypatch, model_class(STEM), SCALE, float, 1.0, before=4.0)
    for last in (6, 9):
        run(small_run(corpus, tmp_path / "parts", **keys, max_steps=last))
    whole, parts = (weights(tmp_path / name, 9) for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    said = run(
        small_run(corpus, tmp_path / "parts", **keys, max_steps=12, ddl_v_sigmoid_scale=1.0), code=2
    )
    assert "ddl_v_sigmoid_scale=4.0 (not 1.0" in said


# ---- a stream begun from a trained additive model ----

BEGUN = [
    ("HC-gpt-mha-rope", {}),
    ("HC-gpt-mha-rope", {"hc_dynamic": False}),
    ("mHC-gpt-mha-rope", {}),
    ("mHC-gpt-mha-rope", {"mhc_mix": "identity", "mhc_readout": "sigmoid"}),
    ("GatedResidual-gpt-mha-rope", {}),
    ("GatedResidual-gpt-mha-rope", {"gated_residual_eps": 1e-5, "hc_streams": 3}),
    ("mHC-gpt-mha-rope", {"mhc_mix": "orthogonal", "mhc_readout": "mean"}),
    (
        "mHC-gpt-mha-rope",
        {
            "mhc_mix": "permutations",
            "mhc_readout": "sigmoid",
            "mhc_bias_init": "zeros",
            "mhc_scale_init": 1.0,
            "mhc_read_eps": 0.01,
            "mhc_write_eps": 0.02,
            "mhc_write_magnitude": 1.5,
        },
    ),
    ("DenseFormer-gpt-mha-rope", {}),
    ("LAuReL-gpt-mha-rope", {}),
    ("LAuReL-gpt-mha-rope", {"laurel_form": "rw"}),
    ("ReZero-gpt-mha-rope", {}),
    ("MUDD-gpt-mha-rope", {}),
    ("Lambdas-gpt-mha-rope", {"lambda_value_embeddings": True, "lambda_skips": True}),
    (
        "Lambdas-gpt-mha-rope",
        {"lambda_input": False, "lambda_values": "none", "lambda_gain": True},
    ),
    ("AttnRes-gpt-mha-rope", {"attn_res_form": "delta"}),
    ("conv-gpt-mha-rope", {}),
    ("conv-gpt-mha-rope", {"canon": "ABCD"}),
]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("stem", "keys"), BEGUN, ids=str)
def test_a_stream_begins_as_the_additive_model_and_trains_what_is_its_own(stem, keys, moved):
    """From a model as it starts, whose states are so small that ln_f's eps counts, and from one
    whose every parameter is somewhere else."""
    additive = build("gpt-mha-rope", **SMALL).double()
    additive = move_parameters(additive) if moved else additive
    model = build(stem, **{**SMALL, "num_hidden_layers": 2, **keys}).double()
    weights = model.convert_additive(additive.state_dict())
    own = model.load_state_dict(weights, strict=False).missing_keys
    model.from_additive()
    ids = torch.randint(0, SMALL["vocab_size"], (2, 9))
    with torch.no_grad():
        if "mHC" in stem and "mhc_readout" not in keys:
            # its mixes of streams cannot be divided by their number before the readout adds them
            close = 1e-4 if moved else 1e-3
        elif "Gated" in stem and "gated_residual_eps" not in keys:
            close = 1e-3 if moved else 1e-2  # every norm has another eps
        else:
            close = 1e-9
        torch.testing.assert_close(model(ids)[0], additive(ids)[0], rtol=0, atol=close)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        adamw.step()
        adamw.zero_grad()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert own
    alone = {"transformer.h.0.depth_attn.query"}  # over a single source
    assert moved >= (set(own) & before.keys()) - alone


def test_streams_of_gated_residual_part_after_an_additive_start():
    """They begin equal, and a few steps take each another way, because their norms differ."""
    additive = move_parameters(build("gpt-mha-rope", **SMALL)).double()
    model = build("GatedResidual-gpt-mha-rope", **SMALL).double()
    model.load_state_dict(model.convert_additive(additive.state_dict()), strict=False)
    model.from_additive()
    own = model.transformer.h[0].gated_mlp.norm_weight
    expected = 2 * additive.transformer.h[0].ln_2.weight
    torch.testing.assert_close(own.mean(0), expected, rtol=0, atol=1e-6)

    ids = torch.randint(0, SMALL["vocab_size"], (2, 9))
    assert spread_of_streams(model, ids) < 1e-12
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        adamw.step()
        adamw.zero_grad()
    assert spread_of_streams(model, ids) > 0.01


@torch.no_grad()
def spread_of_streams(model, ids: torch.Tensor) -> float:
    """Return the distance of the last state's streams from their mean, relative to their norm."""
    states = []
    with model.through(ObservedStream(lambda site, write: states.append(write.state))):
        model(ids)
    streams = states[-1]  # (B, T, n, d)
    return ((streams - streams.mean(2, keepdim=True)).norm() / streams.norm()).item()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mhc_write_magnitude": 1.0}, "mhc_write_magnitude=1 has no additive start"),
        ({"mhc_read_eps": 0.3}, "mhc_read_eps=0.3 has no additive start, whose reads are 1/4"),
    ],
)
def test_weights_that_cannot_be_those_of_the_additive_stream_are_refused(keys, message):
    model = build("mHC-gpt-mha-rope", **{**SMALL, "num_hidden_layers": 2, **keys})
    with pytest.raises(ValueError, match=message):
        model.from_additive()


def test_training_begins_from_an_additive_run(corpus, tmp_path):
    torch.manual_seed(5)
    additive = build("gpt-mha-rope", **SMALL)
    save_run(tmp_path / "run", additive, "gpt-mha-rope")
    export_run(tmp_path / "run", tmp_path / "exported")
    keys = {"init_from": tmp_path / "run", "learning_rate": 0, "max_steps": 1}
    losses = []
    for stem, source in (("gpt-mha-rope", "run"), ("MUDD-gpt-mha-rope", "exported")):
        out = tmp_path / stem
        run(arguments(corpus, out, model=stem, **{**keys, "init_from": tmp_path / source}))
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append(records[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    refused = {
        "DDL-gpt-mha-rope": "with beta = 0 its state does not change, and the direction k is normalized",
        "AttnRes-gpt-mha-rope": "attn_res_form=replace has no additive residual stream; use --attn_res_form=delta",
        "wide-gpt-mha-rope": "its residual stream has no such start",
    }
    for stem, why in refused.items():
        line = run(arguments(corpus, tmp_path / "x", model=stem, **keys), code=2)
        assert f"is an additive model, which this model cannot start as: {why}" in line
        assert not (tmp_path / "x").exists()
