"""The peer of `bench.py quality` is GPT-2, and all models are trained alike and chosen fairly."""

import json

import pytest
import torch
from helpers import SMALL
from in_process import call

from model import model_class
from research import compare
from research.benchmarks import peer_quality
from research.benchmarks.gpt2_peer import GPT2
from training import optimizer

CONFIG = model_class("gpt-mha-rope").Config(**{**SMALL, "hidden_size": 16})


def transformers_weights(peer: GPT2) -> dict:
    """The peer's weights by the names of `transformers`, whose layers hold theirs transposed and three in one."""
    result = {
        "transformer.wte.weight": peer.tokens.weight,
        "transformer.wpe.weight": peer.positions.weight,
    }
    result |= {f"transformer.ln_f.{name}": value for name, value in peer.norm.named_parameters()}
    for number, block in enumerate(peer.blocks):
        at, attention = f"transformer.h.{number}.", block.attention
        parts = {"ln_1": block.norm_1, "ln_2": block.norm_2}
        result |= {
            f"{at}{name}.{key}": value
            for name, part in parts.items()
            for key, value in part.named_parameters()
        }
        three = attention.query, attention.key, attention.value
        result |= {f"{at}attn.c_attn.weight": torch.cat([layer.weight for layer in three]).T}
        result |= {f"{at}attn.c_attn.bias": torch.cat([layer.bias for layer in three])}
        for name, layer in (
            ("attn.c_proj", attention.out),
            ("mlp.c_fc", block.up),
            ("mlp.c_proj", block.down),
        ):
            result |= {f"{at}{name}.weight": layer.weight.T, f"{at}{name}.bias": layer.bias}
    return {**result, "lm_head.weight": peer.tokens.weight}


def test_the_peer_is_gpt2():
    transformers = pytest.importorskip("transformers")
    peer = GPT2(CONFIG).double()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_(std=0.3)
    names = {
        "n_positions": CONFIG.block_size,
        "n_embd": CONFIG.hidden_size,
        "n_layer": CONFIG.num_hidden_layers,
    }
    names |= {"n_head": CONFIG.num_attention_heads, "vocab_size": CONFIG.vocab_size}
    oracle = transformers.GPT2LMHeadModel(transformers.GPT2Config(**names)).double().eval()
    oracle.load_state_dict(transformers_weights(peer))
    ids = torch.randint(0, CONFIG.vocab_size, (3, 17))
    with torch.no_grad():
        expected = oracle(ids[:, :-1]).logits
        logits, loss = peer(ids[:, :-1], ids[:, 1:], return_logits=True)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    targets = ids[:, 1:].reshape(-1, 1)
    assert loss.item() == pytest.approx(
        -expected.log_softmax(-1).flatten(0, 1).gather(1, targets).mean().item()
    )
    assert (
        len(list(peer.parameters()))
        == len(list(oracle.parameters())) + 4 * CONFIG.num_hidden_layers
    )


def test_the_peer_starts_and_decays_as_gpt2():
    config = model_class("gpt-mha-rope").Config(
        **{**SMALL, "hidden_size": 64, "num_hidden_layers": 8}
    )
    peer = GPT2(config)
    for name, parameter in peer.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1 if "norm" in name and name.endswith("weight") else 0)).all()
        else:
            std = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1)
    groups, muon = optimizer.build_parameter_groups(peer, 0.1, with_muon=False)
    assert not muon
    decay = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decay == {name: 0.1 if p.ndim > 1 else 0.0 for name, p in peer.named_parameters()}


def test_the_grid_grows_until_its_best_is_inside():
    def search(loss):
        tried = {}
        while (rate := peer_quality.choose_next_rate(tried, [1.0, 2.0, 4.0])) is not None:
            tried[rate] = loss(rate)
        return sorted(tried), peer_quality.find_best_rate(tried)

    assert search(lambda rate: abs(rate - 2)) == ([1, 2, 4], 2)
    assert search(lambda rate: abs(rate - 16)) == ([1, 2, 4, 8, 16, 32], 16)
    assert search(lambda rate: abs(rate - 0.25)) == ([0.125, 0.25, 0.5, 1, 2, 4], 0.25)
    assert search(lambda rate: float("nan") if rate > 2 else -rate) == ([1, 2, 4], 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus):
    keys = {
        "dataset": str(corpus),
        "device": "cpu",
        **SMALL,
        "dtype": "float32",
        "compile": False,
        "max_steps": 6,
    }
    keys |= {"global_batch_size": 4, "micro_batch_size": 4, "warmup_steps": 2, "eval_batches": 1000}
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in keys.items()))
    return path


def test_models_are_trained_as_train_py_trains_them(config, tmp_path):
    """The loss is that of train.py; rates are chosen by one half of the text, and results are those of the other."""
    out = tmp_path / "peers.json"
    command = (
        "research/bench.py",
        "quality",
        f"--config={config}",
        "--rates=1e-2,2e-2,4e-2",
        "--seeds=2",
        f"--json={out}",
    )
    printed = call(*command)
    assert printed.returncode == 0, printed.stderr.decode()
    stored = json.loads(out.read_text())
    rows = stored["rows"]
    for model in peer_quality.MODELS:
        own = [row for row in rows if row["model"] == model]
        rates = {row["learning_rate"]: row["first"] for row in own if row["seed"] == 1000}
        [best] = {row["learning_rate"] for row in own if row["seed"] != 1000}
        assert min(rates, key=rates.get) == best
        assert min(rates) < best < max(rates)
        assert sorted(row["seed"] for row in own if row["seed"] != 1000) == [0, 1]
    # In tokens: half the windows are full, the last one is not.
    row = next(row for row in rows if row["model"] == "gpt-mha-rope" and row["seed"] == 1)
    arguments = [
        str(config),
        "--model=gpt-mha-rope",
        "--optimizer=adamw",
        "--seed=1",
        f"--out_dir={tmp_path / 'run'}",
    ]
    assert call("train.py", *arguments, f"--learning_rate={row['learning_rate']}").returncode == 0
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["val_loss"] == pytest.approx(records[-1]["val_loss"], rel=1e-7)
    assert row["val_bits_per_byte"] == pytest.approx(records[-1]["val_bits_per_byte"], rel=1e-7)

    losses = {
        model: [
            row["second"]
            for seed in (0, 1)
            for row in rows
            if (row["model"], row["seed"]) == (model, seed)
        ]
        for model in peer_quality.MODELS
    }
    groups = {group["model"]: group for group in peer_quality.make_groups(rows)}
    differences = [
        compare.estimate_paired_difference(losses[model], losses["gpt-mha-rope"])
        for model in peer_quality.MODELS[1:]
    ]
    for model, difference, word in zip(
        peer_quality.MODELS[1:], differences, compare.judge_differences(differences)
    ):
        assert groups[model]["against"]["text"] == difference.format("+.3f")
        assert f"| {word} " in printed.stdout.decode()
        assert groups[model]["second"]["values"] == losses[model]
    assert peer_quality.format_table(list(groups.values())) in printed.stdout.decode()

    # A second start trains what is missing, and only that.
    stored["rows"] = [each for each in rows if (each["model"], each["seed"]) != ("GPT-2", 1)]
    out.write_text(json.dumps(stored))
    again = call(*command, "--resume").stdout.decode()
    assert again.count("| seed ") == 1
    assert "GPT-2 | rate" in again
    lost = next(
        row
        for row in json.loads(out.read_text())["rows"]
        if (row["model"], row["seed"]) == ("GPT-2", 1)
    )
    assert lost["second"] == next(
        row["second"] for row in rows if (row["model"], row["seed"]) == ("GPT-2", 1)
    )


def test_mistakes(config, tmp_path):
    text = config.read_text().replace("micro_batch_size = 4", "micro_batch_size = 2")
    (tmp_path / "small.py").write_text(
        text.replace("global_batch_size = 2", "global_batch_size = 4")
    )
    failed = call("research/bench.py", "quality", f"--config={tmp_path / 'small.py'}")
    assert failed.returncode == 2
    assert b"micro_batch_size=2: here a step is one micro-batch" in failed.stderr
    assert call("research/bench.py", "quality", "--rates=1e-3,x").returncode == 2
