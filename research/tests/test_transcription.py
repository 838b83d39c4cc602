"""The straight transcription computes what the models compute: bench.py compares their speed."""

import pytest
import torch
from models import PAPER, TINY, build_tiny

from research.benchmarks.transcription import Transcription

TWO = {"ddl_value_channels": 2, "mup": True, "rope_ratio": 0.5}
EIGHT = {"ddl_value_channels": 8, "use_qk_rmsnorm": False, "ddl_v_sigmoid_scale": 3.0}
CASES = [(stem, {}) for stem in PAPER]
CASES += [("DDL-gpt-mha-rope-CC-EC", TWO), ("DDL-gpt-mha-rope", EIGHT)]


def transcribed(stem, model):
    """The transcription of a model, with its weights."""
    result = Transcription(stem, model.config).to(model.lm_head.weight.dtype)
    result.load_state_dict(model.state_dict())
    return result


@pytest.mark.parametrize(("stem", "keys"), CASES)
def test_values_and_gradients_are_the_models(stem, keys):
    model = build_tiny(stem, **keys)
    peer = transcribed(stem, model)
    ids, targets = torch.randint(0, TINY["vocab_size"], (2, 2, 9))
    targets[1, 4] = -1
    torch.testing.assert_close(peer(ids)[0], model(ids)[0], rtol=1e-9, atol=1e-9)
    losses = [each(ids, targets)[1] for each in (model, peer)]
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    for loss in losses:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in peer.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)
