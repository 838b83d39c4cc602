"""bench.py: what it computes from its timings, and that it runs. Timings themselves are not asserted."""

import gc
import json
import sys
import weakref

import pytest
import torch
from helpers import run_script

from model import MODEL_NAMES, build
from research import bench
from research.benchmarks import kernels, models, step, timing
from research.commands import read_command

TINY = ["--size=tiny", "--compile=False", "--rounds=2", "--warmup=1", "--device=cpu"]
CPU = torch.device("cpu")
CC = "DDL-gpt-mha-rope-CC"


def test_figures_are_medians_of_ratios_of_one_round():
    baseline = [1.0, 2.0, 4.0]
    seconds = [2.0, 2.0, 16.0]
    same = step.compute_speed_figures(baseline, baseline, num_tokens=8)
    assert (same["tokens_per_second"], same["baseline_tokens_per_second"]) == (4, 4)
    assert (same["ratio"], same["ratio_p10"], same["ratio_p90"]) == (1, 1, 1)
    other = step.compute_speed_figures(seconds, baseline, num_tokens=8)
    assert (other["tokens_per_second"], other["baseline_tokens_per_second"]) == (4, 4)
    # the percentiles lie a fifth of the way from 0.25 to 0.5, and from 1 to 0.5
    assert other["ratio"] == pytest.approx(0.5)
    assert other["ratio_p10"] == pytest.approx(0.3)
    assert other["ratio_p90"] == pytest.approx(0.9)


def test_models_take_turns():
    calls = []
    steps = {name: lambda n=name: calls.append(n) for name in "ab"}
    seconds = timing.measure(steps, warmup=2, rounds=3)
    assert "".join(calls) == "aabb" + "ababab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def main(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["research/bench.py", *map(str, arguments)])
    bench.main()


def test_every_model_is_measured(tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "rows.json"
    main(monkeypatch, *TINY, f"--json={out}")
    stored = json.loads(out.read_text())
    assert stored.keys() >= {"command", "commit", "machine", "torch", "date", "size", "threads"}
    names = [row["model"] for row in stored["rows"]]
    assert sorted(names) == sorted(MODEL_NAMES)
    assert names[0] == "gpt-mha-rope"
    assert stored["rows"][0]["ratio"] == 1
    for row in stored["rows"]:
        assert row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"]
        assert row["activation_bytes_per_token"] > 0
    assert step.format_table(stored["rows"]) in capsys.readouterr().out


def test_models_by_choice(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    main(
        monkeypatch,
        "step",
        *TINY,
        f"--models={CC}+ddl_value_channels=2,{CC}+kernels=on",
        f"--json={out}",
    )
    base, two, fused = json.loads(out.read_text())["rows"]
    assert [two["model"], fused["model"]] == [f"{CC} ddl_value_channels=2", f"{CC} kernels=on"]
    assert base["parameters"] < two["parameters"] < fused["parameters"]


MISTAKES = [
    (["--models=gpt-mha-rope+ddl_value_channels=2"], "unknown key"),
    (["--models=DDL-gpt-mha-rope+kernels=maybe"], "kernels='maybe': give 'auto'"),
    (["--compile=True"], "--compile=False"),  # there is no compiler
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_in_one_line_before_anything_is_measured(
    arguments, message, monkeypatch, capsys
):
    monkeypatch.setattr(step, "Bench", None)
    monkeypatch.setenv("CXX", "none")
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, "step", "--compile=False", *arguments, "--device=cpu")
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(("size", "parameters"), [("small", 123_590_400), ("medium", 353_508_352)])
def test_the_papers_sizes(size, parameters):
    with torch.device("meta"):
        assert build("gpt-mha-rope", **models.SIZES[size]).num_parameters() == parameters


class SquareModel(torch.nn.Module):
    """The loss is the mean of (x W)^2, with W (d, d) of ones."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(d, d))

    def forward(self, x, targets):
        return None, (x @ self.weight).square().mean()


@pytest.fixture
def square() -> models.Contender:
    """Return a contender with SquareModel and x (3, 5) of ones."""
    x = torch.ones(3, 5, requires_grad=True)
    return models.Contender(
        "square",
        SquareModel(5),
        batch=(x, x),
        device=CPU,
        dtype=torch.float32,
        compiled=False,
    )


def test_saved_bytes_are_those_that_backward_needs(square):
    # x and the weight for the product, and its result for the square; the weight does not count
    assert models.measure_saved_bytes(square) == 2 * 3 * 5 * 4


def test_a_turn_is_a_training_step(square):
    initial_weight = square.model.weight.detach().clone()
    square.train()
    assert (square.model.weight < initial_weight).all()
    assert square.model.weight.grad is None


def test_a_model_is_freed_when_it_is_measured(monkeypatch):
    args = read_command("", bench.COMMANDS, argv=["step", *TINY])
    step.complete_arguments(args, CPU)
    small_bench = step.Bench(args, CPU)
    build_model = models.build_model
    references = []

    def build_and_watch(*arguments):
        model = build_model(*arguments)
        references.append(weakref.ref(model))
        return model

    monkeypatch.setattr(models, "build_model", build_and_watch)
    assert small_bench.measure(CC)["model"] == CC
    gc.collect()
    assert [reference() for reference in references] == [None]


# ---- kernels ----

SPEC = kernels.InputSpec(1, 2, CPU, torch.bfloat16)


def count_bytes(calls: dict[str, kernels.KernelCall]) -> dict[str, int]:
    """Return the bytes that each kernel must move."""
    return {name: kernels.count_bytes(call.tensors) for name, call in calls.items()}


def test_a_step_moves_the_bytes_of_its_inputs_and_results():
    pytest.importorskip("triton")
    # bytes of two tokens: a state of 4 value channels of 8 features in bf16, a vector of 8 features in
    # bf16, a number in fp32
    state = 2 * 4 * 8 * 2
    vector = 2 * 8 * 2
    number = 2 * 4
    # reads X, h, y, z; writes c, the next y and z, n, delta, u, rho
    not_stored = state + 2 * vector + number * (4 + 4 * 4)
    calls = kernels.make_step_calls(SPEC, 8, value_channels=4, kernel_size=1, stored=False)
    assert count_bytes(calls)["step forward K=1 v=4 not stored"] == not_stored
    # also reads the write to replay, and writes X'
    calls = kernels.make_step_calls(SPEC, 8, value_channels=4, kernel_size=1, stored=True)
    stored = not_stored + state + vector + 4 * number
    assert count_bytes(calls)["step forward K=1 v=4 stored"] == stored


def test_kernels_are_measured_against_a_copy(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    spec = SPEC._replace(sequence_length=6)
    rotation = kernels.make_rope_norm_calls(spec, 8)
    monkeypatch.setattr(kernels, "list_operations", lambda spec, d: [rotation])
    out = tmp_path / "kernels.json"
    words = ["kernels", "--device=cpu", "--widths=8", "--rounds=1", "--copied=4096"]
    main(monkeypatch, *words, f"--json={out}")
    rows = {row["kernel"]: row for row in json.loads(out.read_text())["rows"]}
    vector = 6 * 8 * 2  # six tokens in bf16
    tables = 2 * 6 * 8 // 2 * 4  # cos and sin of six positions in fp32
    # reads and writes queries and keys
    assert rows["rope_norm forward"]["bytes"] == 4 * vector + tables
    # reads three gradients, queries and keys, and writes the gradient of all three
    assert rows["rope_norm backward"]["bytes"] == 8 * vector + tables
    for row in rows.values():  # of a single round
        assert row["share"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_memory_on_a_gpu_is_that_of_activations(tmp_path):
    out = tmp_path / "rows.json"
    result = run_script(
        "research/bench.py", *TINY, "--device=cuda", f"--models={CC}", f"--json={out}"
    )
    assert result.returncode == 0, result.stderr.decode()
    for row in json.loads(out.read_text())["rows"]:
        assert row["activation_bytes_per_token"] > 0


@pytest.mark.gpu
@needs_gpu
def test_calls_are_timed_on_the_gpu():
    clock = timing.Clock(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(2**20, device=clock.device)
    for _ in range(3):
        seconds = clock.measure({"once": lambda: x * 2, "twice": lambda: (x * 2, x * 2)})
    assert seconds.keys() == {"once", "twice"}
    assert min(seconds.values()) > 0
