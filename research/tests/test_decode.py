"""`bench.py decode`: decoding is measured, and mistakes are refused."""

import json
import re

import pytest
from in_process import call

from model import MODEL_NAMES
from research import bench
from research.benchmarks import decode


def test_decoding_is_measured(tmp_path):
    out = tmp_path / "decode.json"
    result = call(
        "research/bench.py",
        "decode",
        "--vocab_size=64",
        "--block_size=16",
        "--num_hidden_layers=1",
        "--num_attention_heads=2",
        "--head_dim=8",
        "--hidden_size=16",
        "--device=cpu",
        "--rounds=2",
        "--context=6",
        "--tokens=3",
        f"--json={out}",
        "--note=a test",
    )
    assert result.returncode == 0, result.stderr.decode()
    stored = json.loads(out.read_text())
    assert stored.keys() >= {"command", "commit", "machine", "threads", "size", "context"}
    assert stored["note"] == "a test"
    rows = stored["rows"]
    assert sorted({row["model"] for row in rows}) == MODEL_NAMES
    assert {row["way"]: row["ratio"] for row in rows}.keys() == {"uncached", "cached"}
    assert all(row["tokens_per_second_p10"] <= row["tokens_per_second"] for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["way"] == "uncached")
    assert decode.format_table(rows) in result.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--context=250"],
            "--context and --tokens: 282 together, more than --block_size=256: give fewer",
        ),
        (["--models=gpt-mha-rope+kernels=off"], "omit the plus"),
        (["--models=gpt-mha-rop"], "did you mean gpt-mha-rope"),
    ],
)
def test_mistakes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        decode.run(bench.parse_arguments(["decode", "--device=cpu", *arguments]))
