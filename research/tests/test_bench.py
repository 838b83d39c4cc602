"""bench.py: what it computes from its timings, and that it runs. Timings themselves are not asserted."""

import dataclasses
import gc
import json
import sys
import weakref

import pytest
import torch
from helpers import run_script

from model import MODEL_NAMES, build
from model.kernels.launch import choose_launch
from research import bench
from research.benchmarks import contender, kernel_bandwidth, step, suites, timing
from research.benchmarks.figures import Figures
from utils import provenance

TINY = [
    "--vocab_size=64",
    "--block_size=16",
    "--num_hidden_layers=1",
    "--hidden_size=32",
    "--micro_batch_size=1",
    "--num_attention_heads=4",
    "--head_dim=8",
    "--compile=False",
    "--rounds=2",
    "--warmup=1",
    "--device=cpu",
]
CPU = torch.device("cpu")


def test_figures_are_medians_of_ratios_of_one_round():
    baseline = [1.0, 2.0, 4.0]
    seconds = [2.0, 2.0, 16.0]
    same = step.compute_speed_figures(baseline, baseline, "", num_tokens=8)
    assert (same["tokens_per_second"], same["baseline_tokens_per_second"]) == (4, 4)
    assert (same["ratio"], same["ratio_p10"], same["ratio_p90"]) == (1, 1, 1)
    other = step.compute_speed_figures(seconds, baseline, "forward_", num_tokens=8)
    assert other["forward_tokens_per_second"] == 4
    assert other["forward_baseline_tokens_per_second"] == 4
    # the percentiles lie a fifth of the way from 0.25 to 0.5, and from 1 to 0.5
    assert other["forward_ratio"] == pytest.approx(0.5)
    assert other["forward_ratio_p10"] == pytest.approx(0.3)
    assert other["forward_ratio_p90"] == pytest.approx(0.9)
    assert other["forward_tokens_per_second_p10"] == pytest.approx(0.5 + 0.2 * 3.5)
    assert other["forward_tokens_per_second_p90"] == pytest.approx(4)


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
    printed = capsys.readouterr().out
    assert stored.keys() >= {
        "command",
        "commit",
        "machine",
        "torch",
        "triton",
        "date",
        "suite",
        "threads",
        "dtype",
    }
    assert stored["sizes"]["quick (changed)"]["hidden_size"] == 32
    names = [row["model"] for row in stored["rows"]]
    assert sorted(names) == sorted(MODEL_NAMES)
    assert stored["rows"][0]["model"] == "gpt-mha-rope"
    assert stored["rows"][0]["ratio"] == stored["rows"][0]["forward_ratio"] == 1
    for row in stored["rows"]:
        assert row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"]
        assert row["forward_ratio_p10"] <= row["forward_ratio"] <= row["forward_ratio_p90"]
        assert row["activation_bytes_per_token"] > 0
        assert row["parameters"] > 0
        assert not row.keys() & {"mfu", "peak_memory_bytes"}
    assert step.format_table(stored["rows"]) in printed


def test_models_by_choice(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    models = "--models=DDL-gpt-mha-rope-CC:2,DDL-gpt-mha-rope-CC:8"
    main(monkeypatch, "step", *TINY, models, f"--json={out}", "--dtype=float32")
    base, two, eight = json.loads(out.read_text())["rows"]
    names = ["gpt-mha-rope", "DDL-gpt-mha-rope-CC d_v=2", "DDL-gpt-mha-rope-CC d_v=8"]
    assert [base["model"], two["model"], eight["model"]] == names
    assert base["parameters"] < two["parameters"] < eight["parameters"]
    assert (
        base["activation_bytes_per_token"]
        < two["activation_bytes_per_token"]
        < eight["activation_bytes_per_token"]
    )


MISTAKES = [
    (["--rounds=0"], "0: give a number at least 1"),
    (["--models=DDL-gpt-mha-rope-CX"], "did you mean DDL-gpt-mha-rope"),
    (["--models=DDL-gpt-mha-rope:four"], "number of value channels"),
    (["--models=DDL-vdim1-gpt-mha-rope:2"], "ddl_value_channels=2"),
    (["--suite=paper"], "--suite=quick, or --device=cuda"),
    (["--sizes=smal"], "the quick suite has no smal"),
    (["--models=DDL-gpt-mha-rope+kernels=maybe"], "kernels=auto, on or off"),
    (
        ["--models=DDL-gpt-mha-rope+state_checkpoint_interval=0"],
        "state_checkpoint_interval=1 or more",
    ),
    (["--head_dim=0"], "0: give a number at least 1"),
    (["--compile=True"], "--compile=False"),  # there is no compiler
    (["kernels", "--tune"], "select kernels with --match"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_in_one_line_before_anything_is_measured(
    arguments, message, monkeypatch, capsys
):
    monkeypatch.setattr(step, "Bench", None)
    monkeypatch.setenv("CXX", "none")
    command = arguments if arguments[0] == "kernels" else ["step", "--compile=False", *arguments]
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, *command, "--device=cpu")
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.py")
    assert message in line


def test_the_paper_suite_has_the_papers_sizes_and_value_channels():
    args = bench.parse_arguments(
        ["--suite=paper", "--device=cuda", "--sizes=medium", "--kernels=off"]
    )
    args.compile = False
    [[name, medium]] = suites.complete_arguments(args, torch.device("cuda")).items()
    with torch.device("meta"):
        assert (name, build("gpt-mha-rope", **medium).num_parameters()) == ("medium", 353_508_352)
        assert build("gpt-mha-rope", **suites.SMALL).num_parameters() == 123_590_400
    forms = {
        f"{suites.CC_EC}{form}"
        for form in (":2", ":8", "+state_checkpoint_interval=4", "+kernels=off")
    }
    assert {*MODEL_NAMES, *forms, "gpt-mha-rope+kernels=off"} == set(args.models)
    assert (args.micro_batch_size, args.steps) == (16, 4)


def test_a_model_may_have_its_own_value_channels_and_kernels():
    name = "DDL-gpt-mha-rope-CC"
    assert suites.parse_model(f"{name}:2+kernels=off") == (
        name,
        {"ddl_value_channels": 2},
        {"setting": "off"},
    )
    assert suites.parse_model(f"{name}+state_checkpoint_interval=4") == (
        name,
        {},
        {"state_checkpoint_interval": 4},
    )
    assert suites.parse_model(f"{name}+state_dtype=float32+ddl_beta_init=0.5") == (
        name,
        {"state_dtype": "float32", "ddl_beta_init": 0.5},
        {},
    )


def test_kernels_are_measured_against_a_copy(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "kernels.json"
    arguments = [
        "kernels",
        "--device=cpu",
        "--widths=8",
        "--micro_batch_size=1",
        "--block_size=2",
        "--rounds=1",
        "--copied=4096",
        "--match=v=4",
        f"--json={out}",
    ]
    kernel_bandwidth.run(bench.parse_arguments(arguments))
    rows = {row["kernel"]: row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 8
    # bytes of two tokens: a state of 4 value channels of 8 features in bf16, a vector of 8 features in
    # bf16, a number in fp32
    state = 2 * 4 * 8 * 2
    vector = 2 * 8 * 2
    number = 2 * 4
    # reads X, h, y, z; writes c, the next y and z, n, delta, u, rho
    not_stored = state + 2 * vector + number * (4 + 4 * 4)
    assert rows["step forward K=1 v=4 not stored"]["bytes"] == not_stored
    # also reads the write to replay, and writes X'
    replayed_and_written = state + vector + 4 * number
    assert rows["step forward K=1 v=4 stored"]["bytes"] == not_stored + replayed_and_written


def test_rotation_and_norm_are_measured_but_have_no_launches_to_tune(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "kernels.json"
    arguments = [
        "kernels",
        "--device=cpu",
        "--widths=8,256",
        "--micro_batch_size=2",
        "--block_size=3",
        "--rounds=1",
        "--copied=4096",
        "--match=rope",
    ]
    kernel_bandwidth.run(bench.parse_arguments([*arguments, f"--json={out}"]))
    measured = {}
    for row in json.loads(out.read_text())["rows"]:
        measured[row["kernel"], row["d"]] = row["bytes"]
    expected = {}
    for d, head_dim in ((8, 8), (256, 128)):
        vector = 6 * d * 2  # six tokens in bf16
        tables = 2 * 3 * head_dim // 2 * 4  # cos and sin of three positions in fp32
        # reads and writes queries and keys
        expected["rope_norm forward", d] = 4 * vector + tables
        # reads three gradients, queries and keys, and writes the gradient of all three
        expected["rope_norm backward", d] = 8 * vector + tables
    assert measured == expected
    with pytest.raises(
        ValueError, match="no kernel with launches to tune has that in its name; try step"
    ):
        kernel_bandwidth.run(bench.parse_arguments([*arguments, "--tune"]))


FORWARD = "step forward K=1 v=1 not stored"
LAUNCHES = [
    "kernels",
    "--device=cpu",
    "--tune",
    "--match=step K=1 v=1 not stored",
    "--widths=8",
    "--micro_batch_size=1",
    "--block_size=1",
    "--rounds=1",
    "--copied=4096",
]


def test_launches_are_timed_one_by_one_and_kept(tmp_path, monkeypatch):
    """The table's own launch comes first, stored launches are not timed again, the table is kept."""
    pytest.importorskip("triton")
    from model.kernels.launch import FORCED

    out = tmp_path / "tuned.json"

    def launches(*more):
        kernel_bandwidth.run(bench.parse_arguments([*LAUNCHES, f"--json={out}", "--resume", *more]))
        return {row["kernel"]: row["launches"] for row in json.loads(out.read_text())["rows"]}

    first = launches("--launches=1")
    assert first.keys() == {FORWARD, FORWARD.replace("forward", "backward")}
    [own] = first[FORWARD]
    assert dataclasses.asdict(choose_launch("step forward", 8)).items() <= own.items()
    stored_counts = []
    store = Figures.store

    def count_and_store(figures):
        stored_counts.append(len(figures.rows))
        store(figures)

    monkeypatch.setattr(Figures, "store", count_and_store)
    second = launches("--launches=3")
    assert len(stored_counts) == 4  # two launches more of two kernels
    for first_launches, second_launches in zip(first.values(), second.values()):
        assert len(second_launches) == 3
        assert first_launches[0] in second_launches
    times = [launch["microseconds"] for launch in second[FORWARD]]
    assert times == sorted(times)
    assert not FORCED
    monkeypatch.setattr(kernel_bandwidth, "measure_launch", None)
    assert launches("--launches=3") == second


def test_many_launches_are_tried_after_the_one_in_use():
    pytest.importorskip("triton")
    args = bench.parse_arguments([*LAUNCHES])
    key, tried = kernel_bandwidth.list_launches_to_try(args, 768, "step forward K=4 v=2 not stored")
    assert key == "step forward v=2 K>1"
    assert tried[0] == choose_launch("step forward", 768, 2, 4)
    assert {launch.num_warps for launch in tried} == {1, 2, 4, 8, 16}
    assert len(set(tried)) == len(tried)


def test_figures_are_kept_for_the_same_code_chip_and_settings(tmp_path, capsys):
    """A row is in the file as soon as it is added; rows of other code or settings are dropped."""

    def open_figures(code="a", rounds=2, resume=True):
        return Figures(
            tmp_path / "f.json", CPU, {"rounds": rounds}, resume, code, notes={"left_out": []}
        )

    first = open_figures()
    first.notes["left_out"].append("one")
    first.add({"model": "m", "x": 1}, "model")
    first.add({"model": "n", "x": 2}, "model")
    first.add({"model": "m", "x": 3}, "model")
    stored = json.loads((tmp_path / "f.json").read_text())
    assert [(row["model"], row["x"], row["code"]) for row in stored["rows"]] == [
        ("m", 3, "a"),
        ("n", 2, "a"),
    ]
    assert all(row["chip"] == provenance.get_cpu_name() for row in stored["rows"])
    assert stored.keys() >= {"command", "commit", "machine", "date", "rounds"}
    second = open_figures()
    assert second.rows == stored["rows"]
    assert second.notes == {"left_out": ["one"]}
    assert second.find(model="n")["x"] == 2
    for other in (open_figures(code="b"), open_figures(rounds=3), open_figures(resume=False)):
        assert other.rows == []
    printed = capsys.readouterr().out
    assert "2 of 2 figures were measured with other code" in printed
    assert "was measured with a different rounds" in printed


def rows_by_model(file):
    """Return the rows of a file by their model."""
    return {row["model"]: row for row in json.loads(file.read_text())["rows"]}


def test_a_benchmark_that_was_killed_is_resumed(tmp_path, monkeypatch):
    """Stored rows keep their bits; the model that was being measured is measured again."""
    out = tmp_path / "rows.json"
    model = "DDL-gpt-mha-rope-CC"
    arguments = [*TINY, f"--models={model}", f"--json={out}", "--resume"]
    measure_memory = step.measure_memory

    def interrupt(contender, num_tokens):
        if contender.name == model:
            raise KeyboardInterrupt
        return measure_memory(contender, num_tokens)

    monkeypatch.setattr(step, "measure_memory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step.run(bench.parse_arguments(arguments))
    first_rows = rows_by_model(out)
    assert first_rows.keys() == {"gpt-mha-rope"}
    monkeypatch.setattr(step, "measure_memory", measure_memory)
    step.run(bench.parse_arguments(arguments))
    all_rows = rows_by_model(out)
    assert all_rows.keys() == {"gpt-mha-rope", model}
    assert all_rows["gpt-mha-rope"] == first_rows["gpt-mha-rope"]
    with monkeypatch.context() as patch:
        patch.setattr(step, "Bench", None)  # nothing is left to measure
        step.run(bench.parse_arguments(arguments))
    assert rows_by_model(out) == all_rows
    # figures of other settings are not kept
    assert {"compile", "kernels", "dtype"} <= json.loads(out.read_text()).keys()


class SquareModel(torch.nn.Module):
    """The loss is the mean of (x W)^2, with W (d, d) of ones."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(d, d))

    def forward(self, x, targets):
        return None, (x @ self.weight).square().mean()


def make_square_contender(num_rows: int, d: int) -> contender.Contender:
    """Return a contender with SquareModel and x (num_rows, d) of ones."""
    x = torch.ones(num_rows, d)
    return contender.Contender(
        "square",
        SquareModel(d),
        make_batch=lambda: (x, x),
        device=CPU,
        dtype=torch.float32,
        compiled=False,
    )


def test_saved_bytes_are_those_that_backward_needs():
    # x for the product and its result for the square, both of 3 x 5 numbers of 4 bytes; the weight does not count.
    assert contender.measure_saved_bytes(make_square_contender(3, 5)) == 2 * 3 * 5 * 4


def test_a_turn_is_a_training_step_or_changes_nothing():
    square = make_square_contender(3, 5)
    initial_weight = square.model.weight.detach().clone()
    square.evaluate()
    assert torch.equal(square.model.weight, initial_weight)
    square.train()
    assert (square.model.weight < initial_weight).all()
    assert square.model.weight.grad is None


def make_small_bench(*arguments) -> step.Bench:
    """Return the measurement of one tiny size, which stores nothing."""
    args = bench.parse_arguments([*TINY, *arguments])
    [[name, size]] = suites.complete_arguments(args, CPU).items()
    return step.Bench(args, name, size, CPU, Figures(None, CPU, {}))


def test_the_models_of_a_group_are_freed_when_it_is_measured(monkeypatch):
    small_bench = make_small_bench()
    build_model = suites.build_model
    references = []

    def build_and_watch(*arguments):
        model = build_model(*arguments)
        references.append(weakref.ref(model))
        return model

    monkeypatch.setattr(suites, "build_model", build_and_watch)
    small_bench.measure("DDL-gpt-mha-rope-CC")
    gc.collect()
    assert [reference() for reference in references] == [None]
    names = [row["model"] for row in small_bench.figures.rows]
    assert names == ["DDL-gpt-mha-rope-CC"]


def test_every_figure_is_of_rounds_in_which_the_baseline_ran(monkeypatch):
    small_bench = make_small_bench()
    seconds = iter([([0.5, 1.0], [0.75, 2.0]), ([1.0, 1.0], [2.0, 4.0])])  # training, forward

    def measure(turns, warmup, rounds, label):
        assert (list(turns), warmup, rounds) == (["gpt-mha-rope", "DDL-gpt-mha-rope-CC"], 1, 2)
        return dict(zip(turns, next(seconds)))

    monkeypatch.setattr(step, "measure", measure)
    small_bench.measure("DDL-gpt-mha-rope-CC")
    [row] = small_bench.figures.rows
    assert (row["ratio_p10"], row["ratio_p90"]) == pytest.approx((0.5 + 0.1 / 6, 0.5 + 0.9 / 6))
    ends = row["tokens_per_second_p10"], row["tokens_per_second_p90"]
    assert ends == pytest.approx((8 + 4 / 3, 16 + 4))
    assert row["forward_baseline_tokens_per_second"] == 16
    assert row["forward_ratio"] == pytest.approx(0.375)
    cells = [cell.strip() for cell in step.format_table([row]).splitlines()[-1].split("|")]
    assert cells[3:6] == ["15 (9 to 20)", "24", "0.583 (0.517 to 0.650)"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_a_gpu_is_weights_gradients_moments_and_activations(tmp_path):
    out = tmp_path / "rows.json"
    result = run_script(
        "research/bench.py",
        *TINY,
        "--device=cuda",
        "--hidden_size=256",
        "--block_size=128",
        "--models=DDL-gpt-mha-rope-CC",
        f"--json={out}",
    )
    assert result.returncode == 0, result.stderr.decode()
    for row in json.loads(out.read_text())["rows"]:
        activations = 128 * row["activation_bytes_per_token"]
        assert activations > 0
        # AdamW's state: two moments, and a step counter for each parameter.
        assert row["peak_memory_bytes"] - activations == pytest.approx(
            16 * row["parameters"], rel=0.01
        )
