"""The audit of gates: every statistic against loops over tokens and numpy, and the command from end to end."""

import dataclasses
import json
import math

import naive_gates
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gates_helpers import READ_KINDS, build_moved
from helpers import one_line_error, small_run
from in_process import call
from naive import select
from naive_streams import depth_weights, hyper_weights, manifold_weights

from data import shards
from data.loader import ValidationBatches
from model import MODEL_NAMES
from research import compare
from research.analysis import gates, gates_page
from research.analysis.common import select_sequences

CLOSE = {"rel": 1e-6, "abs": 1e-6}
SITES = [(0, "attn"), (0, "mlp"), (1, "attn"), (1, "mlp")]
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def audit(model, corpus) -> tuple[dict, torch.Tensor]:
    """Return the audit of a model over three validation sequences, and their ids (3, T)."""
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, model.config.block_size)
    sequences = select_sequences(batches, 3)
    figures = gates.measure(model, batches, sequences, 2, torch.device("cpu"))
    ids, _ = batches.get(sequences, 3)
    return figures, ids


def get_weights(model) -> dict[str, torch.Tensor]:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights


def list_naive_writes(model_name: str, model, ids) -> list[dict]:
    """Return, for each sequence, the writes at each site by naive_gates.forward."""
    weights = get_weights(model)
    cfg = dataclasses.asdict(model.config)
    kind = READ_KINDS[model_name]
    sequences = []
    for sequence_ids in ids.tolist():
        _, writes = naive_gates.forward(
            weights, cfg, sequence_ids, kind, embedding_conv=model_name.endswith("EC")
        )
        sequences.append(writes)
    return sequences


def check_details(details: dict, values: np.ndarray, label: object) -> None:
    """Compare a detail with the moments over tokens of values (tokens, ...)."""
    assert np.allclose(details["mean"], values.mean(0), rtol=1e-6, atol=1e-6), label
    assert np.allclose(details["std"], values.std(0), rtol=1e-6, atol=1e-6), label


# ---- delta rewrites ----


def check_statistic(summary: dict, edges: list[float], values: list[float], label: object) -> None:
    """Compare the summary of a statistic with numpy's of its values."""
    assert summary["count"] == len(values), label
    expected = {
        "mean": np.mean(values),
        "std": np.std(values),
        "mean_abs": np.mean(np.abs(values)),
        "min": min(values),
        "max": max(values),
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected, **CLOSE), label
    quantiles = {str(quantile): np.quantile(values, quantile) for quantile in QUANTILES}
    assert summary["quantiles"] == pytest.approx(quantiles, **CLOSE), label
    assert len(edges) == 41
    # the outer edges are values themselves, apart from rounding
    edges = [edges[0] - 1e-9, *edges[1:-1], edges[-1] + 1e-9]
    assert summary["histogram"] == np.histogram(values, edges)[0].tolist(), label
    assert sum(summary["histogram"]) == len(values), label


def check_fractions(summary: dict, values: list[float], intervals: dict) -> None:
    """Compare the fractions of tokens in intervals with a count."""
    fractions = {
        label: sum(low < value < high for value in values) / len(values)
        for label, (low, high) in intervals.items()
    }
    assert summary["shares"] == pytest.approx(fractions, abs=1e-12)


@pytest.mark.parametrize(
    ("model_name", "keys"),
    [
        *((model_name, {}) for model_name in READ_KINDS),
    ],
    ids=str,
)
def test_statistics_are_those_of_loops_over_tokens(model_name, keys, corpus):
    model = build_moved(model_name, **keys)
    figures, ids = audit(model, corpus)
    sequences = list_naive_writes(model_name, model, ids)
    embedding = get_weights(model)["transformer.wte.weight"]
    assert [(site["layer"], site["site"]) for site in figures["sites"]] == SITES
    for index, (site, key) in enumerate(zip(figures["sites"], SITES)):
        expected: dict[str, list[float]] = {}
        for sequence_ids, writes in zip(ids, sequences):
            previous_writes = writes[SITES[index - 1]] if index > 0 else None
            statistics = naive_gates.compute_statistics(
                writes[key], previous_writes, embedding[sequence_ids]
            )
            for name, values in statistics.items():
                expected.setdefault(name, []).extend(values)
        assert site["statistics"].keys() == expected.keys()
        for name, values in expected.items():
            summary = site["statistics"][name]
            check_statistic(summary, figures["edges"][name], values, (key, name))
        # intervals that end at 0 or 2 are open there, but no gate is beyond
        intervals = {
            "skip": (-1, 0.5),
            "match": (0.5, 1.5),
            "over-relaxed": (1.5, 3),
        }
        negative = {"negative eigenvalue": (1, 3)}
        skipped_write = {"skipped write": (-1, 0.05)}
        check_fractions(
            site["statistics"]["beta"],
            expected["beta"],
            {**intervals, **negative, **skipped_write},
        )


NO_ERASE = {"ddl_update": "write_only"}


@pytest.mark.parametrize(
    ("keys", "gate"),
    [
        ({"residual_branch_mult": 0.8}, "beta"),
        ({"residual_branch_mult": 2.0}, "beta"),
        ({"residual_branch_mult": 0.4}, "beta"),
        (NO_ERASE, "beta"),
    ],
    ids=str,
)
def test_the_share_of_negative_eigenvalues_is_that_of_the_maps(keys, gate, corpus):
    model = build_moved("DDL-gpt-mha-rope", **keys)
    figures, ids = audit(model, corpus)
    sequences = list_naive_writes("DDL-gpt-mha-rope", model, ids)
    maps_flip = []
    for site in figures["sites"]:
        writes = [
            write for sequence in sequences for write in sequence[site["layer"], site["site"]]
        ]
        share = np.mean([np.linalg.eigvalsh(write.A.numpy()).min() < 0 for write in writes])
        shares = site["statistics"][gate]["shares"]
        assert shares.get("negative eigenvalue", 0) == pytest.approx(share, abs=1e-12)
        maps_flip.append(share > 0)
    can_flip = keys not in ({"residual_branch_mult": 0.4}, NO_ERASE)
    assert any(maps_flip) == can_flip
    row = {"label": "run", "model": "m", **figures, "effects": []}
    page = gates_page.format_page([gates_page.Group("m", [row])], [])
    assert ("negative eigenvalue" in page) == can_flip


@pytest.mark.parametrize("model_name", READ_KINDS)
def test_details_of_value_channels_are_those_of_loops_over_tokens(model_name, corpus):
    model = build_moved(model_name)
    figures, ids = audit(model, corpus)
    sequences = list_naive_writes(model_name, model, ids)
    weights = get_weights(model)
    kind = READ_KINDS[model_name]
    num_channels = model.config.ddl_value_channels
    for site in figures["sites"]:
        writes_by_sequence = [writes[site["layer"], site["site"]] for writes in sequences]
        read_weights = select(weights, f"transformer.h.{site['layer']}.compress.")
        expected = {"value": [write.v.numpy() for writes in writes_by_sequence for write in writes]}
        if num_channels > 1:
            kernels = naive_gates.list_kernels(read_weights, kind, num_channels)
            expected["column_cosine"] = [
                cosines
                for writes in writes_by_sequence
                for cosines in naive_gates.compute_channel_cosines(writes)
            ]
            expected["column_share"] = [
                fractions
                for writes in writes_by_sequence
                for fractions in naive_gates.compute_channel_fractions(read_weights, writes, kind)
            ]
            expected["kernel_cosine"] = [
                [[naive_gates.cosine(a, b) for b in kernels] for a in kernels]
            ]
            expected["kernel_norm"] = [[math.sqrt((kernel**2).sum()) for kernel in kernels]]
        assert site["details"].keys() == expected.keys()
        for name, values in expected.items():
            check_details(site["details"][name], np.array(values), name)


# ---- other streams, at a site whose input is known ----


@pytest.mark.parametrize(
    ("model_name", "keys"),
    [("HC-gpt-mha-rope", {}), ("HC-gpt-mha-rope", {"hc_dynamic": False}), ("mHC-gpt-mha-rope", {})],
)
def test_mixing_matrices_at_the_first_site(model_name, keys, corpus):
    model = build_moved(model_name, **keys)
    figures, ids = audit(model, corpus)
    cfg = dataclasses.asdict(model.config)
    weights = get_weights(model)
    connection = select(weights, "transformer.h.0.hc_attn.")
    expected = {"read": [], "write": [], "mix": []}
    for token in ids.flatten().tolist():
        # every stream is the embedding
        H = torch.stack([weights["transformer.wte.weight"][token]] * cfg["hc_streams"])
        if model_name.startswith("HC"):
            write, read, mix = hyper_weights(connection, H, cfg)
            expected["read"].append(read[:, 0].numpy())
            expected["write"].append(write[0].numpy())
            expected["mix"].append(mix.numpy())
        else:
            read, write, mix = manifold_weights(connection, H, cfg)
            expected["read"].append(read.numpy())
            expected["write"].append(write.numpy())
            expected["mix"].append(mix.T.numpy())
    for name, values in expected.items():
        check_details(figures["sites"][0]["details"][name], np.array(values), name)


def test_gates_of_streams_at_the_first_site(corpus):
    """Compare with formulas: every stream is the embedding there, so that u_i differ by weights alone."""
    model = build_moved("GatedResidual-gpt-mha-rope", hc_streams=2)
    figures, ids = audit(model, corpus)
    read = select(get_weights(model), "transformer.h.0.gated_attn.")
    x = model.transformer.wte(ids).detach().flatten(0, 1)  # (tokens, d)
    norm = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    u = torch.cat([norm * weight for weight in read["norm_weight"]], dim=-1)
    hidden = F.silu(u @ read["down.weight"].T / 2)
    gate = 1 / (1 + torch.exp(-hidden @ read["up.weight"].T))
    inject = 2 / (1 + torch.exp(-u @ read["inject.weight"].T / 2))
    expected = {
        "read_gate_of_stream": gate.view(len(x), 2, -1).mean(-1),
        "inject_of_stream": inject,
    }
    for name, values in expected.items():
        details = figures["sites"][0]["details"][name]
        assert np.allclose(details["mean"], values.mean(0), atol=1e-6), name
        assert np.allclose(details["std"], values.std(0, unbiased=False), atol=1e-6), name


def test_weights_over_depth_at_the_second_site(corpus):
    model = build_moved("AttnRes-gpt-mha-rope", attn_res_blocks=None)
    figures, ids = audit(model, corpus)
    outputs = []

    def record_output(module, args, output):
        outputs.append(output.detach().flatten(0, 1))

    hook = model.transformer.h[0].attn.register_forward_hook(record_output)
    model(ids)
    hook.remove()
    query = model.transformer.h[0].depth_mlp.query.detach()
    embeddings = model.transformer.wte(ids).detach().flatten(0, 1)
    expected = np.array(
        [depth_weights(query, [x, h]).numpy() for x, h in zip(embeddings, outputs[0])]
    )
    weights_by_site = [site["details"]["source_weight"]["mean"] for site in figures["sites"]]
    assert list(map(len, weights_by_site)) == [1, 2, 3, 4]
    assert np.allclose(weights_by_site[1], expected.mean(0), atol=1e-6)


def test_beta_of_every_feature_at_the_first_site(corpus):
    model = build_moved("MGT-gpt-mha", mgt_lambda=0.7, mgt_epsilon=0.1)
    figures, ids = audit(model, corpus)
    layer = model.transformer.h[0].write_attn.beta
    x = model.transformer.wte(ids).detach().flatten(0, 1).numpy()
    logits = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    beta = 0.7 * np.tanh(logits) + 0.1
    site = figures["sites"][0]
    assert np.allclose(site["details"]["beta_of_feature"]["mean"], beta.mean(0), atol=1e-6)
    assert site["statistics"]["beta_negative"]["mean"] == pytest.approx((beta < 0).mean(), abs=1e-9)


# ---- every stream ----


def audit_as_group(model_name: str, corpus) -> gates_page.Group:
    """Return a group of one untrained float32 model, without effects."""
    figures, _ = audit(build_moved(model_name).float(), corpus)
    row = {"label": model_name, "model": model_name, **figures, "effects": []}
    return gates_page.Group(model_name, [row])


@pytest.mark.parametrize(
    ("model_name", "pictures"),
    [
        ("gpt-mha-rope", ["gates_course.png", "gates_histograms.png"]),
        (
            "AttnRes-gpt-mha-rope",
            ["gates_course.png", "gates_histograms.png", "gates_details.png"],
        ),
    ],
)
def test_a_stream_is_drawn_with_what_it_names(model_name, pictures, corpus, tmp_path):
    group = audit_as_group(model_name, corpus)
    files = gates_page.draw(group, tmp_path / "gates.json", in_several_groups=False)
    assert [path.name for path in files] == pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


@pytest.mark.parametrize(
    "model_name",
    [*MODEL_NAMES, "gated-gpt-mha-rope", "momentum-gpt-mha-rope", "measured-gpt-mha-rope"],
)
def test_every_stream_is_audited_and_has_a_page(model_name, corpus, example_streams):
    group = audit_as_group(model_name, corpus)
    common_names = {"rank_state", "rank_direction", "cosine_tokens", "cosine_embedding"}
    assert all(site["statistics"].keys() >= common_names for site in group.rows[0]["sites"])
    page = gates_page.format_page([group], [])
    assert all(f"| {name} " in page for name in group.statistics)
    assert "nan" not in page


def test_numbers_that_are_not_finite_stop_the_audit(corpus):
    model = build_moved("DDL-vdim1-gpt-mha-rope")
    torch.nn.init.constant_(model.transformer.h[0].ddl_attn.beta.bias, math.nan)
    with pytest.raises(ValueError, match="not finite"):
        audit(model, corpus)


# ---- several runs ----

# Student's 97.5% quantiles at two and three degrees of freedom
T_2 = 4.302653
T_3 = 3.182446
MEANS = (1.0, 2.0, 6.0)
# the means' standard deviation is sqrt(7)
HALF_WIDTH = T_2 * math.sqrt(7 / 3)


@pytest.fixture
def three_runs() -> gates_page.Group:
    """Return a group of runs over four sequences, whose gates and effects have the means MEANS."""
    rows = []
    for mean in MEANS:
        beta = {
            "mean": mean,
            "mean_abs": mean,
            "shares": {"low": mean / 10},
            "intervals": {"low": (0, 1)},
        }
        effect = {
            "layer": 0,
            "site": "attn",
            "edit": "beta=0",
            "difference": mean,
            "standard_error": 1e-3,
            "ci95": T_3 * 1e-3,
            "windows": 4,
        }
        site = {"layer": 0, "site": "attn", "details": {}, "statistics": {"beta": beta}}
        rows.append(
            {
                "label": f"run {mean}",
                "sites": [site],
                "sequences": 4,
                "effects": [effect],
            }
        )
    return gates_page.Group("runs", rows)


def test_several_runs_give_intervals_over_their_means(three_runs):
    interval = compare.estimate_mean(three_runs.average_over_sites("beta"))
    assert interval.half_width == pytest.approx(HALF_WIDTH, rel=1e-6)
    assert np.mean(three_runs.average_over_sites("beta", "low")) == pytest.approx(0.3)


def test_the_effect_of_an_edit_in_several_runs_has_an_interval_over_runs(three_runs):
    effect = three_runs.get_effect(0, "attn", "beta=0")
    assert effect.mean == pytest.approx(3)
    assert effect.half_width == pytest.approx(HALF_WIDTH, rel=1e-6)
    assert effect.n == 3
    _, word = three_runs.verdicts["beta=0"][0, "attn"]
    assert word == "undecided"
    assert "| (+3.0000 ± 6.5724) |" in gates_page.format_edit_table(three_runs)


def test_the_effect_of_an_edit_in_one_run_has_an_interval_over_sequences(three_runs):
    one_run = gates_page.Group("run", three_runs.rows[:1])
    effect = one_run.get_effect(0, "attn", "beta=0")
    assert effect.half_width == pytest.approx(T_3 * 1e-3, rel=1e-6)
    _, word = one_run.verdicts["beta=0"][0, "attn"]
    assert word == "worse"
    assert "| +1.0000 ± 0.0032 |" in gates_page.format_edit_table(one_run)


# ---- the command ----


def test_the_command_measures_once_and_stores_and_prints_its_page(corpus, tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for seed, run in enumerate(runs):
        arguments = small_run(corpus, run, max_steps=2, warmup_steps=1, seed=seed)
        assert call("train.py", *arguments).returncode == 0
    result = call("research/analyze.py", "gates", runs[0], runs[1], "--windows=3", "--rows=2")
    assert result.returncode == 0, result.stderr.decode()
    file = tmp_path / "gates.json"
    stored = json.loads(file.read_text())
    labels = [row["label"] for row in stored["rows"] if row["kind"] == "statistics"]
    assert labels == ["a, step 2", "b, step 2"]
    loss_rows = [row for row in stored["rows"] if row["kind"] == "losses"]
    assert len(loss_rows) == 2 * 2 * 3  # runs, batches, and two layers and all at once
    [group] = stored["summary"].values()
    assert group["runs"] == ["a, step 2", "b, step 2"]
    assert group["interval_over"] == "2 seeds"
    assert len(group["effects"]) == 4 * (1 + 4)  # edits, at all sites and at each
    assert (tmp_path / "gates.md").read_text() in result.stdout.decode()
    assert {path.name for path in tmp_path.glob("gates_*.png")} == {
        "gates_course.png",
        "gates_histograms.png",
        "gates_edits.png",
        "gates_details.png",
    }

    # what is stored is not measured again; other edits are
    again = call(
        "research/analyze.py",
        "gates",
        runs[0],
        "--windows=3",
        "--rows=2",
        f"--json={file}",
        "--edits=no erase",
    )
    assert "sites over" not in again.stdout.decode()
    rows = json.loads(file.read_text())["rows"]
    num_stored = len(stored["rows"])
    assert rows[:num_stored] == stored["rows"]
    assert [row["names"] for row in rows[num_stored:]] == [["no erase"]] * 2 * 3


def test_mistakes_are_one_line(corpus, tmp_path):
    run = tmp_path / "a"
    arguments = small_run(corpus, run, max_steps=1, warmup_steps=0)
    assert call("train.py", *arguments).returncode == 0
    unknown_edit = call("research/analyze.py", "gates", run, "--edits=beta=3,no erase")
    message = "--edits=beta=3: the edits of this model are beta=0, beta=1, beta=2, no erase"
    assert message in one_line_error(unknown_edit)
    assert not (run / "gates.json").exists()
    no_run = call("research/analyze.py", "gates", tmp_path)
    assert "no checkpoint" in one_line_error(no_run)
    no_rows = call("research/analyze.py", "gates", tmp_path, "--rows=0")
    assert "--rows=0" in one_line_error(no_rows)
