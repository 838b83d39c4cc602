"""What only a GPU can show; run with `pytest -m gpu`.

GPU_TESTS_DEVICE=cpu rehearses these tests on a CPU, so that the minutes of a GPU show nothing else.
"""

import contextlib
import copy
import functools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import small_run
from in_process import find_free_port
from models import PAPER
from torch._dynamo.utils import counters

import train
from data.loader import prefetched
from model import build, kernels
from model.causality import move_parameters
from model.loss import linear_cross_entropy
from model.precision import linear_fp32
from training import checkpoint, distributed, metrics
from training.batches import MicroBatch
from training.config import TrainConfig
from training.graphs import StepGraph
from utils.processes import World

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
SIZE = {
    "vocab_size": 512,
    "block_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 64,
    "hidden_size": 128,
}
# two layers of the paper's small model
WIDE = {
    "vocab_size": 2048,
    "block_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 128,
    "hidden_size": 768,
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """After eight compilations of a function, torch.compile would run it eagerly."""
    torch.compiler.reset()


@pytest.fixture
def capture(request):
    """Capture steps as CUDA graphs, or on a CPU as recordings."""
    if DEVICE == "cpu":
        request.getfixturevalue("recordings")


def run_training(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Run train.py in this process."""
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    train.main()


def collect_gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradients of all parameters as one vector, float64 on the CPU."""
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("model_name", PAPER)
def test_gradients_equal_the_cpus(model_name, dtype, tolerance):
    check_gradients(model_name, dtype, tolerance, compiled=False)


# two models only, because each takes many seconds to compile
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("model_name", ["gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC"])
def test_compiled_gradients_equal_the_cpus(model_name, dtype, tolerance):
    check_gradients(model_name, dtype, tolerance, compiled=True)


def check_gradients(model_name, dtype, tolerance, compiled) -> None:
    """Compare the gradients of a plain model with those of float64 on the CPU."""
    model = build(model_name, **SIZE)
    ids, targets = torch.randint(0, 512, (2, 4, 128))
    model.double()(ids, targets)[1].backward()
    expected = collect_gradient(model)
    model.zero_grad()
    model.float().to(DEVICE)
    torch.compiler.reset()  # all models share code, which is recompiled only a few times
    forward = torch.compile(model, fullgraph=True) if compiled else model
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, loss = forward(ids.to(DEVICE), targets.to(DEVICE))
    loss.backward()
    assert (collect_gradient(model) - expected).norm() < tolerance * expected.norm()


def compute_loss_and_gradient(model, ids, targets, kernels_setting, dtype) -> tuple:
    """Return the loss and all gradients of a model that is compiled unless it is float32."""
    kernels.use(model, kernels_setting, "cuda")
    torch.compiler.reset()
    is_plain = dtype == torch.float32
    forward = model if is_plain else torch.compile(model, fullgraph=True)
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=not is_plain):
        _, loss = forward(ids, targets)
    loss.backward()
    return loss.item(), collect_gradient(model)


@pytest.mark.skipif(DEVICE == "cpu", reason="interpreted kernels take too long at this width")
@pytest.mark.parametrize(
    ("model_name", "state_dtype"),
    [
        ("gpt-mha-rope", "bfloat16"),
        ("DDL-vdim1-gpt-mha-rope", "float32"),
        ("DDL-gpt-mha-rope", "bfloat16"),
        ("DDL-gpt-mha-rope-CC-EC", "bfloat16"),
        ("DDL-gpt-mha-rope-CC-EC", "float32"),
    ],
)
def test_a_fused_model_is_as_accurate_as_a_plain_one(model_name, state_dtype):
    """At the small model's width, under the compiler and autocast, as in training."""
    model = build(model_name, **WIDE, state_dtype=state_dtype)
    model = move_parameters(model, std=0.02).cuda()
    ids, targets = torch.randint(0, WIDE["vocab_size"], (2, 4, 1024), device="cuda")
    exact_loss, exact = compute_loss_and_gradient(model, ids, targets, "off", torch.float32)
    plain_loss, plain = compute_loss_and_gradient(model, ids, targets, "off", torch.bfloat16)
    fused_loss, fused = compute_loss_and_gradient(model, ids, targets, "on", torch.bfloat16)
    plain_error = ((plain - exact).norm() / exact.norm()).item()
    fused_error = ((fused - exact).norm() / exact.norm()).item()
    # shown by `pytest -rP`
    print(f"loss {exact_loss:.6f}, plain {plain_loss:.6f}, fused {fused_loss:.6f}")
    print(f"error of the gradient: plain {plain_error:.5f}, fused {fused_error:.5f}")
    assert fused_loss == pytest.approx(exact_loss, rel=2e-3)
    assert fused_error < 1.2 * plain_error


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_by_chunks_equals_that_of_float64(compiled):
    hidden = torch.randn(1000, 64).bfloat16()
    weight = torch.randn(3000, 64) * 0.5
    targets = torch.randint(0, 3000, (1000,))
    targets[::7] = -1
    exact_inputs = [x.double().requires_grad_() for x in (hidden, weight.bfloat16())]
    logits = exact_inputs[0] @ exact_inputs[1].T
    expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1)
    expected_gradients = torch.autograd.grad(expected, exact_inputs)
    compute_loss = linear_cross_entropy
    if compiled:
        compute_loss = torch.compile(linear_cross_entropy, fullgraph=True)
    inputs = [x.to(DEVICE).requires_grad_() for x in (hidden, weight)]
    value = compute_loss(*inputs, targets.to(DEVICE), chunk_size=256)
    gradients = torch.autograd.grad(value, inputs)
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        error = (gradient.cpu().double() - expected_gradient).norm()
        assert error < 0.01 * expected_gradient.norm()
    assert (gradients[0][::7] == 0).all()


def product_and_gradients(layer, x, weight, autocast):
    """Return linear_fp32(layer, x), and the gradients of x and of the layer's parameters."""
    with autocast:
        y = linear_fp32(layer, x.requires_grad_())
    gradients = torch.autograd.grad(y, (x, *layer.parameters()), weight.to(y.dtype))
    return y.detach(), *gradients


def test_gates_are_not_rounded_to_bfloat16_or_tf32():
    layer = torch.nn.Linear(512, 64, device=DEVICE)
    x = torch.randn(4096, 512, device=DEVICE)
    weight = torch.randn(4096, 64, device=DEVICE)
    exact_layer = copy.deepcopy(layer).double()
    expected = product_and_gradients(exact_layer, x.double(), weight, contextlib.nullcontext())
    autocast = torch.autocast(DEVICE, torch.bfloat16)
    results = product_and_gradients(layer, x.detach(), weight, autocast)
    for result, reference in zip(results, expected):
        assert (result - reference).norm() < 1e-5 * reference.norm()


def test_a_run_trains_and_resumes(corpus, tmp_path, monkeypatch):
    run = tmp_path / "run"
    for max_steps in (6, 12):
        arguments = small_run(
            corpus,
            run,
            device=DEVICE,
            dtype="bfloat16",
            compile=True,
            max_steps=max_steps,
            resume="auto",
        )
        run_training(monkeypatch, arguments)
    records = [record for record in metrics.read(run / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, 13))
    assert records[-1]["loss"] < records[0]["loss"]


GRAPHED_MODELS = [
    "DDL-gpt-mha-rope",
    "AttnRes-gpt-mha-rope",
    "Lambdas-gpt-mha-rope",
    "mHC-gpt-mha-rope",
]


@pytest.mark.parametrize("model_name", GRAPHED_MODELS)
def test_cuda_graphs_change_no_bits(corpus, tmp_path, monkeypatch, model_name):
    counters.clear()
    check_bits_with_graphs(corpus, tmp_path, monkeypatch, "auto", model_name)
    assert counters["inductor"]["cudagraph_skips"] == 0


# research/gpu.py runs the tests of the graph of a step in a process of their own
@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize("model_name", GRAPHED_MODELS)
def test_the_graph_of_a_step_changes_no_bits(corpus, tmp_path, monkeypatch, model_name):
    check_bits_with_graphs(corpus, tmp_path, monkeypatch, "step", model_name)


def check_bits_with_graphs(
    corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, model_name: str
) -> None:
    """Train with and without CUDA graphs, with two micro-batches a step, and compare."""
    for name, cuda_graphs in (("with", setting), ("without", "off")):
        arguments = small_run(
            corpus,
            folder / name,
            model=model_name,
            device=DEVICE,
            dtype="bfloat16",
            compile=True,
            cuda_graphs=cuda_graphs,
            deterministic=True,
            global_batch_size=4,
            micro_batch_size=2,
            max_steps=8,
        )
        run_training(monkeypatch, arguments)
    for file in ("model.safetensors", "optimizer.safetensors"):
        with_graphs = checkpoint.find(folder / "with") / file
        without_graphs = checkpoint.find(folder / "without") / file
        assert with_graphs.read_bytes() == without_graphs.read_bytes(), file


@pytest.fixture
def one_rank():
    """A process group of NCCL with one rank, because a GPU cannot have two."""
    address = f"tcp://localhost:{find_free_port()}"
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank", "capture")
def test_the_graph_of_a_step_contains_the_buckets_of_ddp():
    """NCCL itself has nothing to do with one rank."""
    world = World(0, 2, torch.device(DEVICE))  # of two ranks, so that DDP is used
    steps = [
        [MicroBatch(*torch.randint(0, 512, (2, 2, 128), device=DEVICE)) for _ in range(2)]
        for _ in range(2)
    ]
    results = {}
    for setting in ("off", "step"):
        torch.manual_seed(0)
        model = build("DDL-gpt-mha-rope-CC-EC", **SIZE)
        train_model, _ = distributed.parallelize(
            model, world, engine="ddp", compile=True, cuda_graphs=setting
        )
        config = TrainConfig(global_batch_size=4, micro_batch_size=2, grad_clip=0.1)
        run = SimpleNamespace(
            config=config,
            model=model,
            train_model=train_model,
            autocast=contextlib.nullcontext(),
            scaler=None,
        )
        compute_gradients = functools.partial(train.compute_gradients, run)
        if setting == "step":
            compute_gradients = StepGraph(model, compute_gradients)
        results[setting] = []
        for batches in steps:
            loss, norm = compute_gradients(batches)
            results[setting].append((loss.item(), norm.item(), collect_gradient(model)))
            model.zero_grad(set_to_none=True)
    for (loss, norm, gradient), expected in zip(results["step"], results["off"], strict=True):
        assert (loss, norm) == pytest.approx(expected[:2], rel=1e-3)
        # the embedding's gradient is added up in another order each time
        assert (gradient - expected[2]).norm() < 1e-3 * expected[2].norm()


def test_prefetched_batches_arrive_completely():
    device = torch.device(DEVICE, 0 if DEVICE == "cuda" else None)
    batches = [torch.arange(i, i + 1_000_000) for i in range(20)]
    for i, (tensor,) in enumerate(prefetched(lambda i: (batches[i],), range(20), device)):
        assert tensor.device == device
        assert torch.equal(tensor.cpu(), batches[i])


def test_a_resumed_run_has_the_same_bits(corpus, tmp_path, monkeypatch):
    def train_until(run, max_steps):
        arguments = small_run(
            corpus,
            run,
            device=DEVICE,
            dtype="bfloat16",
            compile=True,
            deterministic=True,
            # a learning rate that does not depend on the length of the run
            schedule="wsd",
            decay_steps=0,
            eval_full=False,
            resume="auto",
            checkpoint_interval=100,
            max_steps=max_steps,
        )
        run_training(monkeypatch, arguments)

    uninterrupted = tmp_path / "uninterrupted"
    resumed = tmp_path / "resumed"
    train_until(uninterrupted, 12)
    train_until(resumed, 5)
    train_until(resumed, 12)
    for file in ("model.safetensors", "optimizer.safetensors"):
        expected = (checkpoint.find(uninterrupted) / file).read_bytes()
        assert (checkpoint.find(resumed) / file).read_bytes() == expected


def test_a_nonfinite_step_changes_no_weights(corpus, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    arguments = small_run(
        corpus,
        run,
        learning_rate=1e30,
        warmup_steps=0,
        grad_clip=0.0,
        checkpoint_interval=1,
        device=DEVICE,
    )
    with pytest.raises(SystemExit) as stopped:
        run_training(monkeypatch, arguments)
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    assert "step 2: loss" in message
    assert "the gradient of transformer.wte.weight is not finite" in message
    last_checkpoint = checkpoint.find(run)
    saved_state = checkpoint.find(run / "nonfinite")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (last_checkpoint / file).read_bytes() == (saved_state / file).read_bytes()
