"""The plain GPT of research/benchmarks/peers.py is the model of its equations."""

import pytest
import torch
from helpers import SMALL

from research.benchmarks.peers import PlainGPT
from research.benchmarks.suites import SIZE_KEYS

SIZE = {key: SMALL[key] for key in SIZE_KEYS if key in SMALL} | {
    "vocab_size": 320,
    "block_size": 32,
}


def make_transformers_weights(plain: PlainGPT) -> dict[str, torch.Tensor]:
    """Return the weights by the names of transformers, whose layers are transposed and have biases."""
    weights = {
        "transformer.wte.weight": plain.tokens.weight,
        "transformer.wpe.weight": plain.positions.weight,
        "transformer.ln_f.weight": plain.norm.weight,
        "lm_head.weight": plain.tokens.weight,
    }
    for number, block in enumerate(plain.blocks):
        prefix = f"transformer.h.{number}"
        weights[f"{prefix}.ln_1.weight"] = block.norm_1.weight
        weights[f"{prefix}.attn.c_attn.weight"] = block.query_key_value.weight.T
        weights[f"{prefix}.attn.c_proj.weight"] = block.out.weight.T
        weights[f"{prefix}.ln_2.weight"] = block.norm_2.weight
        weights[f"{prefix}.mlp.c_fc.weight"] = block.up.weight.T
        weights[f"{prefix}.mlp.c_proj.weight"] = block.down.weight.T
    return weights


def test_the_plain_gpt_is_gpt2_without_biases():
    transformers = pytest.importorskip("transformers")
    plain = PlainGPT(SIZE).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.3)
    config = transformers.GPT2Config(
        n_positions=SIZE["block_size"],
        n_embd=SIZE["hidden_size"],
        n_layer=SIZE["num_hidden_layers"],
        n_head=SIZE["num_attention_heads"],
        vocab_size=SIZE["vocab_size"],
        activation_function="gelu",
    )
    oracle = transformers.GPT2LMHeadModel(config).double().eval()
    result = oracle.load_state_dict(make_transformers_weights(plain), strict=False)
    assert result.unexpected_keys == []
    assert all(name.endswith(".bias") for name in result.missing_keys)  # they start at zero
    ids = torch.randint(0, SIZE["vocab_size"], (3, 17))
    with torch.no_grad():
        expected = oracle(ids, labels=ids)
        logits, _ = plain(ids)
        _, loss = plain(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-9)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
