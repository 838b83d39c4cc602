"""What only a GPU can show; run with `pytest -m gpu`."""

import copy

import pytest
import torch
from helpers import precision, small_run
from models import PAPER

import train
from data.loader import prefetched
from model import build, layers
from training import checkpoint, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = {
    "vocab_size": 512,
    "block_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 64,
}
SIZE |= {"hidden_size": 128}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stem", PAPER)
def test_gradients_equal_the_cpus(stem, compiled):
    model = build(stem, **SIZE)
    ids, targets = torch.randint(0, 512, (2, 4, 128))
    model.double()(ids, targets)[1].backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    model.float().cuda()
    run = torch.compile(model, fullgraph=True) if compiled else model
    # With TF32 emulated: 3.0e-3.
    cases = [("high", torch.float32, 1e-2), ("high", torch.bfloat16, 0.1)]
    for setting, dtype, tolerance in cases + [("highest", torch.float32, 1e-3)] * (not compiled):
        with precision(setting):
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                _, loss = run(ids.cuda(), targets.cuda())
            loss.backward()
        gradient = torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])
        assert (gradient - expected).norm() < tolerance * expected.norm()
        model.zero_grad()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_that_asks_for_it_is_not_rounded(compiled):
    """Nor are those of its gradients.

    The plain one is, to the 10 bits of TF32: the setting is on.
    """
    layer, x = torch.nn.Linear(512, 64).cuda(), torch.randn(4096, 512, device="cuda")
    weight = torch.randn(4096, 64, device="cuda")

    def made(product, layer, x):
        """The result, and the gradients of x and the layer's parameters."""
        y = product(layer, x.requires_grad_())
        return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), weight.to(y.dtype))

    exact = made(layers.linear_fp32, copy.deepcopy(layer).double(), x.detach().double())
    for product, rounds in ((layers.linear_fp32, False), (lambda layer, x: layer(x), True)):
        run = torch.compile(product, fullgraph=True) if compiled else product
        found = made(run, layer, x.detach())
        assert torch.get_float32_matmul_precision() == "high"
        errors = [((got - want).norm() / want.norm()).item() for got, want in zip(found, exact)]
        if rounds:
            assert min(errors[:3]) > 1e-4, errors  # the bias's gradient is no product
        else:
            assert max(errors) < 1e-5, errors


def test_a_run_trains_and_resumes(corpus, tmp_path, monkeypatch):
    for steps in (6, 12):
        keys = {
            "device": "cuda",
            "dtype": "bfloat16",
            "compile": True,
            "max_steps": steps,
            "resume": "auto",
        }
        monkeypatch.setattr("sys.argv", ["train.py", *small_run(corpus, tmp_path / "run", **keys)])
        train.main()
    records = [r for r in metrics.read(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in records] == list(range(1, 13))
    assert records[-1]["loss"] < records[0]["loss"]


def test_prefetched_batches_arrive_whole():
    device = torch.device("cuda", torch.cuda.current_device())
    made = [torch.arange(i, i + 1_000_000) for i in range(20)]
    for i, (tensor,) in enumerate(prefetched(lambda i: (made[i],), range(20), device)):
        assert tensor.device == device
        assert torch.equal(tensor.cpu(), made[i])


def test_a_resumed_run_is_the_whole_one_bit_for_bit(corpus, tmp_path, monkeypatch):
    constant = {
        "schedule": "wsd",
        "decay_steps": 0,
        "eval_full": False,
        "resume": "auto",
        "checkpoint_interval": 100,
    }
    keys = {
        "device": "cuda",
        "dtype": "bfloat16",
        "compile": True,
        "deterministic": True,
        **constant,
    }
    for name, ends in (("whole", [12]), ("parts", [5, 12])):
        for steps in ends:
            monkeypatch.setattr(
                "sys.argv",
                ["train.py", *small_run(corpus, tmp_path / name, **keys, max_steps=steps)],
            )
            train.main()
    whole, parts = (checkpoint.find(tmp_path / name) for name in ("whole", "parts"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()


def test_a_step_that_is_no_number_leaves_the_state_before_it(corpus, tmp_path, monkeypatch, capsys):
    """The device leaves it out before the program knows."""
    run = tmp_path / "run"
    keys = {
        "learning_rate": 1e30,
        "warmup_steps": 0,
        "grad_clip": 0.0,
        "checkpoint_interval": 1,
        "device": "cuda",
    }
    monkeypatch.setattr("sys.argv", ["train.py", *small_run(corpus, run, **keys)])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 1
    assert "step 2: loss" in (said := capsys.readouterr().err)
    assert "transformer.wte.weight" in (run / "nonfinite" / "diagnosis.json").read_text(), said
    before, kept = checkpoint.find(run), checkpoint.find(run / "nonfinite")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (before / file).read_bytes() == (kept / file).read_bytes()
