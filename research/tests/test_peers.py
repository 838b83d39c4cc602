"""The peer of `bench.py quality` is GPT-2, and all models are trained and chosen in the same way."""

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
    """Return the peer's weights by the names of `transformers`.

    Its layers have transposed weights, and one layer for query, key and value.
    """
    weights = {
        "transformer.wte.weight": peer.tokens.weight,
        "transformer.wpe.weight": peer.positions.weight,
        "transformer.ln_f.weight": peer.norm.weight,
        "transformer.ln_f.bias": peer.norm.bias,
        "lm_head.weight": peer.tokens.weight,
    }
    for number, block in enumerate(peer.blocks):
        prefix = f"transformer.h.{number}"
        qkv = (block.attention.query, block.attention.key, block.attention.value)
        weights[f"{prefix}.attn.c_attn.weight"] = torch.cat([layer.weight for layer in qkv]).T
        weights[f"{prefix}.attn.c_attn.bias"] = torch.cat([layer.bias for layer in qkv])
        for name, norm in (("ln_1", block.norm_1), ("ln_2", block.norm_2)):
            weights[f"{prefix}.{name}.weight"] = norm.weight
            weights[f"{prefix}.{name}.bias"] = norm.bias
        for name, layer in (
            ("attn.c_proj", block.attention.out),
            ("mlp.c_fc", block.up),
            ("mlp.c_proj", block.down),
        ):
            weights[f"{prefix}.{name}.weight"] = layer.weight.T
            weights[f"{prefix}.{name}.bias"] = layer.bias
    return weights


def test_the_peer_is_gpt2():
    transformers = pytest.importorskip("transformers")
    peer = GPT2(CONFIG).double()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_(std=0.3)
    oracle_config = transformers.GPT2Config(
        n_positions=CONFIG.block_size,
        n_embd=CONFIG.hidden_size,
        n_layer=CONFIG.num_hidden_layers,
        n_head=CONFIG.num_attention_heads,
        vocab_size=CONFIG.vocab_size,
    )
    oracle = transformers.GPT2LMHeadModel(oracle_config).double().eval()
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
    def search(compute_loss):
        loss_by_rate = {}
        while True:
            rate = peer_quality.choose_next_rate(loss_by_rate, [1.0, 2.0, 4.0])
            if rate is None:
                return sorted(loss_by_rate), peer_quality.find_best_rate(loss_by_rate)
            loss_by_rate[rate] = compute_loss(rate)

    assert search(lambda rate: abs(rate - 2)) == ([1, 2, 4], 2)
    assert search(lambda rate: abs(rate - 16)) == ([1, 2, 4, 8, 16, 32], 16)
    assert search(lambda rate: abs(rate - 0.25)) == ([0.125, 0.25, 0.5, 1, 2, 4], 0.25)
    assert search(lambda rate: float("nan") if rate > 2 else -rate) == ([1, 2, 4], 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus):
    """Return the config file of a tiny model."""
    settings = {
        "dataset": str(corpus),
        "device": "cpu",
        **SMALL,
        "dtype": "float32",
        "compile": False,
        "max_steps": 6,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "warmup_steps": 2,
        "eval_batches": 1000,
    }
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    return path


def run_quality(config, out, *options):
    """Run `bench.py quality` with two seeds."""
    return call(
        "research/bench.py",
        "quality",
        f"--config={config}",
        "--rates=1e-2,2e-2,4e-2",
        "--seeds=2",
        f"--json={out}",
        *options,
    )


def find_row(rows, model, seed):
    """Return the row of a reported run."""
    return next(row for row in rows if (row["model"], row["seed"]) == (model, seed))


def test_models_are_trained_as_train_py_trains_them(config, tmp_path):
    """The loss is train.py's. Rates are chosen by one half of the text, and results are the other's."""
    out = tmp_path / "peers.json"
    result = run_quality(config, out)
    assert result.returncode == 0, result.stderr.decode()
    printed = result.stdout.decode()
    stored = json.loads(out.read_text())
    rows = stored["rows"]
    for model in peer_quality.MODELS:
        search = {}
        reported = []
        for row in rows:
            if row["model"] == model and row["seed"] == peer_quality.SEARCH_SEED:
                search[row["learning_rate"]] = row["first"]
            elif row["model"] == model:
                reported.append(row)
        [best] = {row["learning_rate"] for row in reported}
        assert min(search, key=search.get) == best
        assert min(search) < best < max(search)
        assert sorted(row["seed"] for row in reported) == [0, 1]

    # the loss over both halves, whose last sequence is shorter than the others
    row = find_row(rows, "gpt-mha-rope", 1)
    trained = call(
        "train.py",
        str(config),
        "--model=gpt-mha-rope",
        "--optimizer=adamw",
        "--seed=1",
        f"--out_dir={tmp_path / 'run'}",
        f"--learning_rate={row['learning_rate']}",
    )
    assert trained.returncode == 0
    last_line = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    record = json.loads(last_line)
    assert row["val_loss"] == pytest.approx(record["val_loss"], rel=1e-7)
    assert row["val_bits_per_byte"] == pytest.approx(record["val_bits_per_byte"], rel=1e-7)

    losses = {}
    for model in peer_quality.MODELS:
        losses[model] = [find_row(rows, model, seed)["second"] for seed in (0, 1)]
    groups = {group["model"]: group for group in peer_quality.make_groups(rows)}
    others = peer_quality.MODELS[1:]
    differences = [
        compare.estimate_paired_difference(losses[model], losses["gpt-mha-rope"])
        for model in others
    ]
    verdicts = compare.judge_differences(differences)
    for model, difference, verdict in zip(others, differences, verdicts):
        assert groups[model]["against"]["text"] == difference.format("+.3f")
        assert f"| {verdict} " in printed
        assert groups[model]["second"]["values"] == losses[model]
    assert peer_quality.format_table(list(groups.values())) in printed

    # a resumed measurement trains the missing run, and only that
    stored["rows"] = [row for row in rows if (row["model"], row["seed"]) != ("GPT-2", 1)]
    out.write_text(json.dumps(stored))
    resumed = run_quality(config, out, "--resume").stdout.decode()
    assert resumed.count("| seed ") == 1
    assert "GPT-2 | rate" in resumed
    repeated = find_row(json.loads(out.read_text())["rows"], "GPT-2", 1)
    assert repeated["second"] == find_row(rows, "GPT-2", 1)["second"]


def test_mistakes(config, tmp_path):
    text = config.read_text().replace("micro_batch_size = 4", "micro_batch_size = 2")
    (tmp_path / "small.py").write_text(
        text.replace("global_batch_size = 2", "global_batch_size = 4")
    )
    failed = call("research/bench.py", "quality", f"--config={tmp_path / 'small.py'}")
    assert failed.returncode == 2
    assert b"micro_batch_size=2: this benchmark needs steps of one micro-batch" in failed.stderr
    assert call("research/bench.py", "quality", "--rates=1e-3,x").returncode == 2
