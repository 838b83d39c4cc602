"""The logit lens: against every depth's state run through the model's end by hand, and loops over tokens."""

import json
import math

import naive
import pytest
import torch
from helpers import EXAMPLES, SMALL, one_line_error, small_run
from in_process import call

from data import shards
from data.loader import ValidationBatches
from model import MODEL_NAMES, build
from model.block import Stream
from model.causality import move_parameters
from research.analysis import common, lens


def ids_of(*shape):
    return torch.randint(0, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stem", [*MODEL_NAMES, *(path.stem for path in EXAMPLES)])
def test_the_last_depth_is_the_model_and_depth_0_has_no_site(stem, example_streams):
    model, ids, said = move_parameters(build(stem, **SMALL)), ids_of(2, 7), {}
    with torch.no_grad(), model.through(lens.Lens(model, said.__setitem__)):
        last = model(ids)[0]
    wanted, _ = model(ids)
    sites = sum(len(block.sites) for block in model.transformer.h)
    assert sorted(said) == list(range(len(lens.list_depths(model)))) == list(range(1 + sites))
    assert torch.equal(said[max(said)], wanted)
    assert torch.equal(last, wanted)
    state = Stream().begin(model, model.transformer.wte(ids), None)
    assert torch.equal(said[0], model.logits(model.ln_f(model.readout(state))))


def naive_depths(model, ids) -> list[list[torch.Tensor]]:
    """[depth][token] -> logits of the one-column stream, whose state is cut off after each site: loops of naive.py."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    cfg = vars(model.config)
    xs = [weights["transformer.wte.weight"][i] for i in ids]
    depths = [xs]
    for layer in range(cfg["num_hidden_layers"]):
        w = naive.select(weights, f"transformer.h.{layer}.")
        for norm, sublayer, name in (
            ("ln_1.weight", naive.attention, "attn"),
            ("ln_2.weight", naive.mlp, "mlp"),
        ):
            cs = [naive.rms_norm(x, w[norm], 1e-5) for x in xs]
            hs = sublayer(naive.select(w, f"{name}."), cs, cfg)
            site = naive.select(w, f"ddl_{name}.")
            xs = [
                naive.rewrite(site, x[:, None], h, x, c, cfg)[:, 0] for x, h, c in zip(xs, hs, cs)
            ]
            depths.append(xs)
    table = weights["transformer.wte.weight"]
    return [
        [table @ naive.rms_norm(x, weights["ln_f.weight"], 1e-5) for x in states]
        for states in depths
    ]


def test_measured_as_by_loops_over_tokens(corpus):
    model = move_parameters(build("DDL-vdim1-gpt-mha-rope", **{**SMALL, "block_size": 6}).double())
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 6)
    windows, told = common.select_sequences(batches, 3), []
    found = lens.measure(model, batches, windows, 2, told.append)
    assert told == [2, 3]
    sums = {name: [0.0] * 5 for name in ("loss", "kl", "agrees", "right", "overwritten", "settles")}
    ids, targets = batches.get(windows, 3)
    for row, goals in zip(ids.tolist(), targets.tolist()):
        depths = naive_depths(model, row)
        for t, goal in enumerate(goals):
            shares = [(scores[t] - scores[t].max()).exp() for scores in depths]
            shares = [(share / share.sum()).tolist() for share in shares]
            top = [max(range(len(share)), key=share.__getitem__) for share in shares]
            last_change = 0
            for depth, share in enumerate(shares):
                sums["loss"][depth] -= math.log(share[goal])
                sums["kl"][depth] += sum(p * math.log(p / q) for p, q in zip(shares[-1], share))
                sums["agrees"][depth] += top[depth] == top[-1]
                sums["right"][depth] += top[depth] == goal
                if depth and top[depth] != top[depth - 1]:
                    sums["overwritten"][depth] += 1
                    last_change = depth
            sums["settles"][last_change] += 1
    assert found["tokens"] == 18
    for name, values in sums.items():
        assert found[name] == pytest.approx([value / 18 for value in values], rel=1e-6, abs=1e-9), (
            name
        )
    assert found["kl"][-1] == pytest.approx(0, abs=1e-12)
    assert 0 < found["overwritten"][1] < 1 or found["overwritten"][2] > 0


def test_settled_is_the_last_change():
    top = torch.tensor([[1, 1, 1, 5], [1, 2, 2, 6], [1, 2, 1, 6], [1, 2, 1, 7]])
    assert lens.find_settled_depth(top).tolist() == [0, 1, 2, 3]


def test_a_text_is_a_table_of_what_changes():
    from data.tokenizer import byte_tokenizer

    model, encoding = move_parameters(build("DDL-gpt-mha-rope", **SMALL)), byte_tokenizer()
    ids = torch.tensor([[256, *b"a| \n"]])
    positions, state = model.positions(ids), model.input_embed(model.transformer.wte(ids))
    by_block = [state]
    for block in model.transformer.h:
        by_block.append(block(by_block[-1], positions)[0])
    likeliest = [
        model.logits(model.ln_f(model.readout(each))).argmax(-1)[0].tolist() for each in by_block
    ]
    lines = lens.format_text_table(model, encoding, ids).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]][1:5] == [
        "token",
        "next",
        "embedding",
        "0 attn",
    ]
    assert len(lines) == 7
    for t, line in enumerate(lines[2:]):
        cells = [cell.strip() for cell in line.replace("\\|", "¦").split("|")[1:-1]]
        assert cells[0] == str(t)
        assert cells[1] == ["<¦endoftex…", "a", "¦", "·", "⏎"][t] or t == 0
        current, said = None, []
        for cell in cells[3:]:
            current = cell or current
            said.append(current)
        expected = [
            lens.format_token(encoding, tokens[t]).replace("\\|", "¦") for tokens in likeliest
        ]
        assert [said[0], said[2], said[4]] == expected


def test_the_command_stores_rows_and_draws_them(corpus, tmp_path):
    for name, keys in {"a": {}, "b": {"model": "AttnRes-gpt-mha-rope"}}.items():
        run = small_run(corpus, tmp_path / name, max_steps=2, warmup_steps=1, **keys)
        assert call("train.py", *run).returncode == 0
    result = call(
        "research/analyze.py", "lens", tmp_path / "a", tmp_path / "b", "--windows=2", "--text=ab"
    )
    assert result.returncode == 0, result.stderr.decode()
    assert "a, step 2: loss " in result.stdout.decode()
    rows = json.loads((tmp_path / "lens.json").read_text())["rows"]
    assert [(row["model"], row["tokens"]) for row in rows] == [
        ("DDL-gpt-mha-rope", 32), ("AttnRes-gpt-mha-rope", 32),
    ]  # fmt: skip
    assert all(sum(row["settles"]) == pytest.approx(1) for row in rows)
    assert (tmp_path / "lens.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "lens.json").read_bytes()
    said = one_line_error(call("research/analyze.py", "lens", tmp_path / "a", f"--text={'a' * 99}"))
    assert "the text has 100 tokens: give at most block_size=16" in said
    assert "--text is empty" in one_line_error(
        call("research/analyze.py", "lens", tmp_path / "a", "--text=")
    )
    assert "no checkpoint" in one_line_error(call("research/analyze.py", "lens", tmp_path))
    assert (tmp_path / "lens.json").read_bytes() == before
