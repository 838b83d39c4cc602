"""The audit of gates: every statistic against loops over tokens and numpy, the command from end to end."""

import dataclasses
import json
import math

import naive_gates
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gates_helpers import KINDS, moved
from helpers import one_line_error, small_run
from in_process import call
from naive import select
from naive_streams import depth_weights, hyper_weights, manifold_weights

from data import shards
from data.loader import ValidationBatches
from model import MODEL_NAMES
from research import compare
from research.analysis import gates, gates_page
from research.analysis.common import whole_windows

CLOSE = {"rel": 1e-6, "abs": 1e-6}


def measured(model, corpus, count=3, rows=2):
    """(the audit, ids and targets of its windows)."""
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, model.config.block_size)
    windows = whole_windows(batches, count)
    found = gates.measure(model, batches, windows, rows, torch.device("cpu"))
    return found, *batches.get(windows, count)


def naive_run(stem, model, ids):
    """Of each sequence what naive_gates.forward records, with the weights it used."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    cfg = dataclasses.asdict(model.config)
    found = [
        naive_gates.forward(weights, cfg, row, KINDS[stem], stem.endswith("EC"))
        for row in ids.tolist()
    ]
    return weights, found


OWN_GATE = {"ddl_erase_gate": "own"}


@pytest.mark.parametrize(
    ("stem", "options"),
    [*((stem, {}) for stem in KINDS), *((stem, OWN_GATE) for stem in list(KINDS)[:2])],
    ids=str,
)
def test_statistics_are_those_of_loops_over_tokens(stem, options, corpus):
    model = moved(stem, **options)
    found, ids, _ = measured(model, corpus)
    weights, runs = naive_run(stem, model, ids)
    keys = [(layer, name) for layer in range(2) for name in ("attn", "mlp")]
    assert [(site["layer"], site["site"]) for site in found["sites"]] == keys
    for site, key in zip(found["sites"], keys):
        expected: dict[str, list[float]] = {}
        for row, (_, record) in zip(ids, runs):
            before = record[keys[keys.index(key) - 1]] if key != keys[0] else None
            embedded = weights["transformer.wte.weight"][row]
            for name, values in naive_gates.numbers(
                record[key], before, embedded, own_gate=bool(options)
            ).items():
                expected.setdefault(name, []).extend(values)
        assert site["statistics"].keys() == expected.keys()
        for name, values in expected.items():
            got, edges = site["statistics"][name], np.array(found["edges"][name])
            assert got["count"] == len(values), name
            wanted = {
                "mean": np.mean(values),
                "std": np.std(values),
                "mean_abs": np.mean(np.abs(values)),
            }
            wanted |= {"min": min(values), "max": max(values)}
            assert {field: got[field] for field in wanted} == pytest.approx(wanted, **CLOSE), (
                key,
                name,
            )
            quantiles = {
                str(q): np.quantile(values, q) for q in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
            }
            assert got["quantiles"] == pytest.approx(quantiles, **CLOSE), (key, name)
            assert len(edges) == 41
            edges[[0, -1]] += -1e-9, 1e-9  # the ends are values, but for rounding
            assert got["histogram"] == np.histogram(values, edges)[0].tolist(), (key, name)
            assert sum(got["histogram"]) == len(values), name
        beta = expected["beta"]
        ends = {
            "skip": (-1, 0.5),
            "match": (0.5, 1.5),
            "over-relaxed": (1.5, 3),
            "negative eigenvalue": (1, 3),
        }
        if options:
            ends["skipped erase"] = (-1, 0.05)
            check_shares(site, "beta_erase", expected["beta_erase"], ends)
            del ends["skipped erase"], ends["negative eigenvalue"]
        ends["skipped write"] = (-1, 0.05)
        check_shares(site, "beta", beta, ends)


def check_shares(site, name, values, ends):
    shares = {
        label: sum(low < value < high for value in values) / len(values)
        for label, (low, high) in ends.items()
    }
    assert site["statistics"][name]["shares"] == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize("stem", KINDS)
def test_columns_are_those_of_loops_over_tokens(stem, corpus):
    model = moved(stem)
    found, ids, _ = measured(model, corpus)
    weights, runs = naive_run(stem, model, ids)
    columns = model.config.ddl_value_channels
    for site in found["sites"]:
        tokens = [record[site["layer"], site["site"]] for _, record in runs]
        w = select(weights, f"transformer.h.{site['layer']}.compress.")
        values = np.array([token["t"].numpy() for row in tokens for token in row])
        wanted = {"value": values}
        if columns > 1:
            kernels = naive_gates.kernels(w, KINDS[stem], columns)
            cosines = [[naive_gates.cosine(a, b) for b in kernels] for a in kernels]
            wanted["column_cosine"] = np.array(
                [m for row in tokens for m in naive_gates.column_cosines(row)]
            )
            shares = [naive_gates.column_shares(w, row, KINDS[stem]) for row in tokens]
            wanted["column_share"] = np.array([share for row in shares for share in row])
            wanted["kernel_cosine"] = np.array([cosines])
            wanted["kernel_norm"] = np.array([[math.sqrt((kernel**2).sum()) for kernel in kernels]])
        assert site["details"].keys() == wanted.keys()
        for name, each in wanted.items():
            assert np.allclose(site["details"][name]["mean"], each.mean(0), rtol=1e-6, atol=1e-6), (
                name
            )
            assert np.allclose(site["details"][name]["std"], each.std(0), rtol=1e-6, atol=1e-6), (
                name
            )


def first_read(stem, model, ids, weights_of):
    """`weights_of(own parameters, embedding)` of every token at the first site, whose streams are the embedding."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return [
        weights_of(weights, weights["transformer.wte.weight"][i]) for i in ids.flatten().tolist()
    ]


@pytest.mark.parametrize(
    ("stem", "keys"),
    [("HC-gpt-mha-rope", {}), ("HC-gpt-mha-rope", {"hc_dynamic": False}), ("mHC-gpt-mha-rope", {})],
)
def test_mixing_matrices_at_the_first_site(stem, keys, corpus):
    model = moved(stem, **keys)
    found, ids, _ = measured(model, corpus)
    cfg, hyper = dataclasses.asdict(model.config), stem.startswith("HC")

    def weights_of(weights, x):
        H = torch.stack([x] * cfg["hc_streams"])
        own = select(weights, "transformer.h.0.hc_attn.")
        if hyper:
            write, read, mix = hyper_weights(own, H, cfg)
            return {"read": read[:, 0], "write": write[0], "mix": mix}
        read, write, mix = manifold_weights(own, H, cfg)
        return {"read": read, "write": write, "mix": mix.T}

    wanted = first_read(stem, model, ids, weights_of)
    for name in ("read", "write", "mix"):
        each = np.array([one[name].numpy() for one in wanted])
        assert np.allclose(found["sites"][0]["details"][name]["mean"], each.mean(0), atol=1e-6), (
            name
        )
        assert np.allclose(found["sites"][0]["details"][name]["std"], each.std(0), atol=1e-6), name


def test_gates_of_streams_at_the_first_site(corpus):
    """Compare with formulas: every stream is the embedding there, so that u_i differ by weights alone."""
    model = moved("GatedResidual-gpt-mha-rope", hc_streams=2)
    audit, ids, _ = measured(model, corpus)
    own = {
        name.removeprefix("transformer.h.0.gated_attn."): p.detach()
        for name, p in model.named_parameters()
    }
    x = model.transformer.wte(ids).detach().flatten(0, 1)  # (tokens, d)
    norm = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    u = torch.cat([norm * weight for weight in own["norm_weight"]], dim=-1)
    hidden = F.silu(u @ own["down.weight"].T / 2)
    gate = 1 / (1 + torch.exp(-hidden @ own["up.weight"].T))
    inject = 2 / (1 + torch.exp(-u @ own["inject.weight"].T / 2))
    expected = {
        "read_gate_of_stream": gate.view(len(x), 2, -1).mean(-1),
        "inject_of_stream": inject,
    }
    for name, values in expected.items():
        details = audit["sites"][0]["details"][name]
        assert np.allclose(details["mean"], values.mean(0), atol=1e-6), name
        assert np.allclose(details["std"], values.std(0, unbiased=False), atol=1e-6), name


def test_weights_over_depth_at_the_second_site(corpus):
    model = moved("AttnRes-gpt-mha-rope", attn_res_blocks=None)
    found, ids, _ = measured(model, corpus)
    outputs = []
    handle = model.transformer.h[0].attn.register_forward_hook(
        lambda *call: outputs.append(call[2].detach())
    )
    model(ids)
    handle.remove()
    query = model.transformer.h[0].depth_mlp.query.detach()
    pairs = zip(model.transformer.wte(ids).detach().flatten(0, 1), outputs[0].flatten(0, 1))
    wanted = np.array([depth_weights(query, list(pair)).numpy() for pair in pairs])
    assert [len(site["details"]["source_weight"]["mean"]) for site in found["sites"]] == [
        1,
        2,
        3,
        4,
    ]
    assert np.allclose(
        found["sites"][1]["details"]["source_weight"]["mean"], wanted.mean(0), atol=1e-6
    )


def test_beta_of_every_feature_at_the_first_site(corpus):
    model = moved("MGT-gpt-mha", mgt_lambda=0.7, mgt_epsilon=0.1)
    found, ids, _ = measured(model, corpus)
    write = model.transformer.h[0].write_attn
    x = model.transformer.wte(ids).detach().flatten(0, 1).numpy()
    beta = (
        0.7 * np.tanh(x @ write.beta.weight.detach().numpy().T + write.beta.bias.detach().numpy())
        + 0.1
    )
    got = found["sites"][0]
    assert np.allclose(got["details"]["beta_of_feature"]["mean"], beta.mean(0), atol=1e-6)
    assert got["statistics"]["beta_negative"]["mean"] == pytest.approx((beta < 0).mean(), abs=1e-9)


def audited(stem, corpus) -> dict:
    return {"label": stem, "model": stem, **measured(moved(stem).float(), corpus)[0], "effects": []}


@pytest.mark.parametrize(
    ("stem", "kinds"),
    [("gpt-mha-rope", "course histograms"), ("AttnRes-gpt-mha-rope", "course histograms details")],
)
def test_what_a_stream_names_is_drawn(stem, kinds, corpus, tmp_path):
    drawn = gates_page.draw(
        gates_page.Group(stem, [audited(stem, corpus)]), tmp_path / "gates.json", False
    )
    assert [path.name for path in drawn] == [f"gates_{kind}.png" for kind in kinds.split()]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize(
    "stem", [*MODEL_NAMES, "gated-gpt-mha-rope", "momentum-gpt-mha-rope", "sparse-gpt-mha-rope"]
)
def test_every_stream_is_audited_and_said(stem, corpus, example_streams):
    group = gates_page.Group(stem, [audited(stem, corpus)])
    every = {"rank_state", "rank_direction", "cosine_tokens", "cosine_embedding"}
    assert all(site["statistics"].keys() >= every for site in group.rows[0]["sites"])
    text = gates_page.markdown([group], [])
    assert all(f"| {name} " in text for name in group.names)
    assert "nan" not in text


def test_numbers_that_are_not_finite_stop_the_audit(corpus):
    model = moved("DDL-vdim1-gpt-mha-rope")
    torch.nn.init.constant_(model.transformer.h[0].ddl_attn.beta.bias, math.nan)
    with pytest.raises(ValueError, match="not finite"):
        measured(model, corpus)


def effect(difference, error, windows, edit="beta=0", layer=0, site="attn"):
    half = compare.Estimate(difference, error, windows - 1, windows).half_width
    key = {"layer": layer, "site": site, "edit": edit}
    return {
        **key,
        "difference": difference,
        "standard_error": error,
        "ci95": half,
        "windows": windows,
    }


def test_several_runs_give_intervals_over_their_means():
    site = {"layer": 0, "site": "attn", "details": {}}
    rows = []
    for value in (1.0, 2.0, 6.0):
        about = {
            "mean": value,
            "mean_abs": value,
            "shares": {"low": value / 10},
            "intervals": {"low": (0, 1)},
        }
        sites = [site | {"statistics": {"beta": about}}]
        rows.append(
            {
                "label": f"run {value}",
                "sites": sites,
                "sequences": 4,
                "effects": [effect(value, 1e-3, 4)],
            }
        )
    group = gates_page.Group("runs", rows)
    # Three values with mean 3 and standard deviation sqrt(7); Student's 97.5% quantile at two degrees is 4.302653.
    half = 4.302653 * math.sqrt(7 / 3)
    assert compare.estimate_mean(group.per_run("beta")).half_width == pytest.approx(half, rel=1e-6)
    assert np.mean(group.per_run("beta", "low")) == pytest.approx(0.3)
    change = group.effect(0, "attn", "beta=0")
    assert (change.mean, change.half_width, change.n) == (
        pytest.approx(3),
        pytest.approx(half, rel=1e-6),
        3,
    )
    assert group.verdicts("beta=0")[0, "attn"][1] == "undecided"
    alone = gates_page.Group("run", rows[:1])
    assert alone.effect(0, "attn", "beta=0").half_width == pytest.approx(3.182446 * 1e-3, rel=1e-6)
    assert alone.verdicts("beta=0")[0, "attn"][1] == "worse"
    assert "| +1.0000 ± 0.0032 |" in gates_page.table_of_edits(alone)
    assert "| (+3.0000 ± 6.5724) |" in gates_page.table_of_edits(group)


def test_the_command_measures_once_stores_and_says_what_it_found(corpus, tmp_path, capsys):
    runs = [tmp_path / "a", tmp_path / "b"]
    for seed, run in enumerate(runs):
        keys = {"max_steps": 2, "warmup_steps": 1, "seed": seed}
        assert call("train.py", *small_run(corpus, run, **keys)).returncode == 0
    wanted = ("research/analyze.py", "gates", *runs, "--windows=3", "--rows=2")
    result = call(*wanted)
    assert result.returncode == 0, result.stderr.decode()
    stored = json.loads((tmp_path / "gates.json").read_text())
    assert [row["label"] for row in stored["rows"] if row["kind"] == "statistics"] == [
        "a, step 2",
        "b, step 2",
    ]
    assert (
        len([row for row in stored["rows"] if row["kind"] == "losses"]) == 2 * 2 * 3
    )  # runs, batches, layers and all
    [group] = stored["summary"].values()
    assert group["runs"] == ["a, step 2", "b, step 2"]
    assert group["interval_over"] == "2 seeds"
    assert len(group["effects"]) == 4 * (1 + 4)  # edits, at all sites and at each
    text = (tmp_path / "gates.md").read_text()
    assert text in result.stdout.decode()
    names = {path.name for path in tmp_path.glob("gates_*.png")}
    assert names == {f"gates_{kind}.png" for kind in ("course", "histograms", "edits", "details")}
    # What is stored is not measured again; other edits are.
    again = call(*wanted[:3], *wanted[4:], f"--json={tmp_path / 'gates.json'}", "--edits=no erase")
    assert "sites over" not in again.stdout.decode()
    rows = json.loads((tmp_path / "gates.json").read_text())["rows"]
    assert rows[: len(stored["rows"])] == stored["rows"]
    assert [row["names"] for row in rows[len(stored["rows"]) :]] == [["no erase"]] * 2 * 3


def test_mistakes_are_one_line(corpus, tmp_path):
    assert (
        call("train.py", *small_run(corpus, tmp_path / "a", max_steps=1, warmup_steps=0)).returncode
        == 0
    )
    wrong = call("research/analyze.py", "gates", tmp_path / "a", "--edits=beta=3,no erase")
    assert "--edits=beta=3: this model has beta=0, beta=1, beta=2, no erase" in one_line_error(
        wrong
    )
    assert not (tmp_path / "a" / "gates.json").exists()
    assert "no checkpoint" in one_line_error(call("research/analyze.py", "gates", tmp_path))
    assert "--rows=0" in one_line_error(call("research/analyze.py", "gates", tmp_path, "--rows=0"))
