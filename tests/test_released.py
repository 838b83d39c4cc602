"""Folders of the released model code: by name, folded, and refused where this code lacks the option."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_model import PAPER

from model import build, released

TINY = {"vocab_size": 29, "block_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 6}
TINY |= {"hidden_size": 10}
LIBRARY = {"architectures": ["X"], "model_type": "x", "transformers_version": "4.40", "torch_dtype": "float32"}


def write(folder, weights, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LIBRARY, **TINY, **config}))
    save_file({name: value.clone().contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def noisy(stem, **keys):
    model = build(stem, **TINY, **keys)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("stem", PAPER)
def test_round_trip_through_the_released_names(stem, tmp_path):
    model = noisy(stem)
    written = released.state_dict(model)
    assert any(name.endswith("compress.read") for name in written) == ("vdim1" not in stem and stem != "gpt-mha-rope")
    extra = {"ddl_v_dim1_constant": False, "use_k_shift": False, "dropout": 0.0, "intermediate_size": 26}
    loaded = released.load(write(tmp_path / "r", written, **extra))
    assert type(loaded).__module__ == f"model.{stem}"
    ids = torch.randint(0, 29, (2, 9))
    torch.testing.assert_close(loaded(ids)[0], model(ids)[0], rtol=0, atol=0)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_a_pair_computes_its_convolution(v, tmp_path):
    """x_in of the loaded model against conv1d over columns and the read vector, on the model's own state."""
    weights = released.state_dict(noisy("DDL-gpt-mha-rope-CC", ddl_value_channels=v))
    for name in list(weights):
        if name.endswith(("compress.read", "readout.read", "compress.weight", "readout.weight")):
            weights[name] = torch.randn_like(weights[name])
    keys = {"ddl_value_channels": v, "ddl_state_shortconv_kernel_size": v}
    model = released.load(write(tmp_path / "r", weights, **keys))
    state = torch.randn(7, 10, v)  # (tokens, d, v)
    kernel, read = weights["transformer.h.1.compress.weight"], weights["transformer.h.1.compress.read"]
    padded = F.pad(state, ((v - 1) // 2, v - 1 - (v - 1) // 2))
    expected = F.conv1d(padded, kernel[:, None], groups=10) @ read
    torch.testing.assert_close(model.transformer.h[1].compress(state.mT[None])[0], expected)


def test_constant_value_is_renamed(tmp_path):
    weights = released.state_dict(noisy("DDL-vdim1-gpt-mha-rope"))
    keys = {"ddl_v_dim1_constant": True, "ddl_v_dim1_constant_value": 3.0}
    config = released.load(write(tmp_path / "r", weights, **keys)).config
    assert (config.ddl_v_constant, config.ddl_v_constant_value) == (True, 3.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_k_shift": True}, "use_k_shift=True in the released config: only False"),
        ({"intermediate_size": 40}, "intermediate_size=40"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        ({"hidden_sizes": 10}, "unknown key hidden_sizes in the released config, did you mean hidden_size"),
        ({"ddl_beta_intt": 0.3}, "unknown key ddl_beta_intt in the released config, did you mean ddl_beta_init"),
        ({"num_hidden_layers": 3}, "does not fit DDL-gpt-mha-rope-CC: transformer.h.2"),
    ],
)
def test_what_this_code_lacks_is_refused(tmp_path, config, message):
    folder = write(tmp_path / "r", released.state_dict(noisy("DDL-gpt-mha-rope-CC")), **config)
    with pytest.raises(ValueError, match=message):
        released.load(folder)


def test_bfloat16_pairs_fold_in_fp32(tmp_path):
    weights = released.state_dict(noisy("DDL-gpt-mha-rope-CC"))
    weights["readout.read"] = torch.rand(4)
    rounded = {name: value.bfloat16() for name, value in weights.items()}
    loaded = released.load(write(tmp_path / "r", rounded))
    assert loaded.readout.weight.dtype == torch.float32
    exact = released.fold({name: value.double() for name, value in rounded.items()})["readout.weight"]
    torch.testing.assert_close(loaded.readout.weight.double(), exact, rtol=1e-6, atol=1e-7)


def test_damaged_weights_are_refused(tmp_path):
    folder = write(tmp_path / "r", released.state_dict(noisy("gpt-mha-rope")))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        released.load(folder)
    file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo executed'\ntR.")  # a pickle that runs a command
    with pytest.raises(ValueError, match="is damaged"):
        released.load(folder)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        released.load(tmp_path)
