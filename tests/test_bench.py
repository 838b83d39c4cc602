"""bench.py: what it computes from its timings, and that it runs. Timings themselves are not asserted."""

import json

import pytest
from conftest import ROOT, one_line_error, script

import bench


def test_rows_are_medians_of_ratios_of_one_round():
    seconds = {"gpt-mha-rope": [1.0, 2.0, 4.0], "other": [2.0, 2.0, 16.0]}
    base, other = bench.rows_of(seconds, {"gpt-mha-rope": 10, "other": 20}, tokens=8)
    assert base["tokens_per_second"] == 4
    assert (base["ratio"], base["ratio_p10"], base["ratio_p90"]) == (1, 1, 1)
    assert other["tokens_per_second"] == 4
    assert (other["ratio"], other["ratio_p10"], other["ratio_p90"]) == (0.5, 0.25, 1.0)


def test_models_take_turns():
    calls = []
    steps = {name: lambda n=name: calls.append(n) for name in "ab"}
    seconds = bench.measure(steps, warmup=2, rounds=3)
    assert "".join(calls) == "aabb" + "ababab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_the_script_measures_every_model(tmp_path):
    out = tmp_path / "rows.json"
    size = ["--vocab_size=64", "--block_size=16", "--num_hidden_layers=1", "--hidden_size=32", "--micro_batch_size=1"]
    size += ["--head_dim=8", "--compile=False", "--rounds=2", "--warmup=1", "--device=cpu"]
    result = script("bench.py", "step", *size, f"--json={out}")
    assert result.returncode == 0, result.stderr.decode()
    stored = json.loads(out.read_text())
    assert len(stored["rows"]) == 6
    assert stored["rows"][0]["ratio"] == 1
    assert stored.keys() >= {"command", "commit", "machine", "date"}
    assert bench.markdown(stored["rows"]) in result.stdout.decode()


@pytest.mark.parametrize("arguments", [["--models=DDL-gpt-mha-rope"], ["--rounds=0"]])
def test_mistakes_end_in_one_line(arguments):
    assert "must contain gpt-mha-rope" in one_line_error(script("bench.py", "step", *arguments))


def test_the_data_pipeline_is_measured(tmp_path):
    out = tmp_path / "data.json"
    sizes = ["--megabytes=0.3", "--vocab_size=600", "--rounds=2", "--steps=4", "--block_size=64", "--workers=1"]
    result = script("bench.py", "data", f"--source={ROOT / 'data'}", *sizes, f"--json={out}", env={"CXX": "none"})
    assert result.returncode == 0, result.stderr.decode()
    [row] = json.loads(out.read_text())["rows"]
    assert row["tokens"] > 10_000
    assert 0 < row["ratio_worst"] <= row["ratio"]
    assert row["peak_memory_bytes"] > 2**24
    assert row["loader_tokens_per_second"] > 0
    assert f"{row['ratio']:.3f}" in result.stdout.decode()
