"""Compare the logits of a model with a cache with those without one, in float64."""

import pytest
import torch
from models import DDL, EXPANDED, INPUTS, PAPER, TINY, build_tiny

from model.cache import Cache, pad_left
from model.ddl import ChannelConvRead, EmbeddingConv, TokenConvRead
from model.gpt import GPT

CC = "DDL-gpt-mha-rope-CC"
EC = "DDL-gpt-mha-rope-EC"

# (model name, its settings)
CASES = [
    *((model_name, {}) for model_name in PAPER),
    *((model_name, {"ddl_map": "v", "ddl_k_hidden_size": 3}) for model_name in DDL),
    *((model_name, {"ddl_map": "v", "ddl_k_branch": "attention"}) for model_name in EXPANDED),
    *(("DDL-gpt-mha-rope", {"ddl_state_shortconv_kernel_size": size}) for size in (1, 2, 7)),
    *(
        (EC, {"input_embed_shortconv_kernel_size": size, "ddl_value_channels": 2})
        for size in (1, 2, 7)
    ),
    (
        CC,
        {
            "ddl_beta_single_linear": False,
            "ddl_beta_hidden_size": 5,
            "ddl_update": "write_only",
        },
    ),
    ("DDL-gpt-mha-rope", {"ddl_update": "erase_only"}),
    ("DDL-vdim1-gpt-mha-rope", INPUTS["read"]),
    (EC, INPUTS["mean"]),
    (CC, INPUTS["flat"]),
    ("gpt-mha-rope", {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False}),
]


def tokens_of(B: int, T: int) -> torch.Tensor:
    """Return ids (B, T), which are the same at every call."""
    return torch.randint(0, TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def read(model: GPT, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, vocab_size) after ids (B, T), which are added to the cache."""
    return model(ids, cache=cache)[0][:, -1]


def decode_logits(model: GPT, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Read the first `prompt` of ids (B, T) at once and the rest token by token.

    Returns:
        logits after the prompt and after each further token, (B, T - prompt + 1, vocab_size)
    """
    cache = model.new_cache()
    steps = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    return torch.stack([read(model, cache, step) for step in steps], dim=1)


@torch.no_grad()
def uncached_logits(model: GPT, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the same logits of one pass over all tokens."""
    return model(ids)[0][:, prompt - 1 :]


def check(model: GPT, ids: torch.Tensor, prompt: int, tolerance: float = 1e-9) -> None:
    """Compare the model with a cache with the model without one."""
    logits = decode_logits(model, ids, prompt)
    expected = uncached_logits(model, ids, prompt)
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("model_name", "settings"), [*CASES, (EC, {"ddl_k_eps": 0.0}), (CC, {"ddl_k_eps": 0.0})]
)
def test_prompts_of_unequal_lengths_are_as_each_alone(model_name, settings):
    """Some prompts are shorter than the convolutions.

    After five steps, some rows are selected, and continue with two tokens at once.
    """
    model = build_tiny(model_name, **settings)
    if model.config.use_qk_rmsnorm:
        torch.nn.init.normal_(model.transformer.h[0].attn.k_rms.weight)
    lengths = (1, 9, 2, 6)
    ids = tokens_of(4, TINY["block_size"])
    prompts = [row[:length].tolist() for row, length in zip(ids, lengths)]
    cache = model.new_cache()
    logits = [read(model, cache, pad_left(prompts))]

    def step(index: int) -> None:
        tokens = [row[length + index] for row, length in zip(ids, lengths)]
        logits.append(read(model, cache, torch.stack(tokens)[:, None]))

    for index in range(5):
        step(index)
    selected_rows = torch.tensor([2, 0, 2])
    next_pairs = [ids[row, lengths[row] + 5 :][:2] for row in selected_rows]
    selected_logits, _ = model(torch.stack(next_pairs), cache=cache.select(selected_rows))
    step(5)
    for row, length in enumerate(lengths):
        expected = uncached_logits(model, ids[row : row + 1], length)[0]
        own = torch.stack(logits, dim=1)[row]
        torch.testing.assert_close(own, expected[:7], rtol=1e-9, atol=1e-9)
        for index in (selected_rows == row).nonzero():
            torch.testing.assert_close(
                selected_logits[index[0]], expected[6:8], rtol=1e-9, atol=1e-9
            )
    assert cache.num_tokens == 15


def test_padding_attends_to_something():
    """The softmax over nothing is 0 / 0 in some backends."""
    model = build_tiny("gpt-mha-rope")
    ids = pad_left([[1], [2, 3, 4]])
    cache = model.new_cache()
    mask = model.positions(ids, cache, cache.reserve(ids)).mask
    assert mask[0, 0].tolist() == [[True, False, False], [False, True, False], [False, False, True]]
    assert torch.equal(mask[1, 0], torch.ones(3, 3).tril().bool())


@pytest.mark.parametrize("model_name", PAPER)
def test_bfloat16_is_as_exact_as_the_uncached_model(model_name):
    model = build_tiny(model_name)
    ids = tokens_of(2, 16)
    exact = uncached_logits(model, ids, 6)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        uncached = uncached_logits(model, ids, 6)
        decoded = decode_logits(model, ids, 6)
    uncached_error = (uncached - exact).norm() / exact.norm()
    decoded_error = (decoded - exact).norm() / exact.norm()
    assert decoded_error < 1.5 * uncached_error + 1e-3
    assert decoded_error < 0.1


@pytest.mark.parametrize("model_name", ["gpt-mha-rope", pytest.param(CC, marks=pytest.mark.slow)])
def test_fused_streams(model_name):
    fused = pytest.importorskip("fused")
    model = build_tiny(model_name, num_hidden_layers=1)
    check(fused.fuse(model.float()), tokens_of(2, 6), 3, 1e-4)


def test_tokens_that_do_not_fit_the_cache_are_refused_before_anything_is_computed(monkeypatch):
    model = build_tiny(EC)
    ids = tokens_of(2, 9)
    cache = model.new_cache(8)
    read(model, cache, ids[:, :7])
    monkeypatch.setattr(type(model), "hidden", None)
    with pytest.raises(ValueError, match="9 tokens do not fit a cache of length=8: give fewer"):
        read(model, cache, ids[:, 7:])
    with pytest.raises(ValueError, match="batch_size=1: this cache is for 2 sequences"):
        read(model, cache, ids[:1, 7:8])
    assert cache.num_tokens == 7


def test_only_the_output_layer_of_a_cached_pass_has_a_gradient():
    model = build_tiny(EC)
    logits, _ = model(tokens_of(2, 5), cache=model.new_cache())
    logits.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "transformer.wte.weight"
    ]


@pytest.mark.parametrize("name", [CC, EC, "DDL-gpt-mha-rope"])
def test_weights_that_follow_from_parameters_are_folded_once(name, monkeypatch):
    """Each read and the expander fold their weights at the first call, and not for each token."""
    num_calls = 0

    def count(weights):
        def counted(*arguments):
            nonlocal num_calls
            num_calls += 1
            return weights(*arguments)

        return counted

    for part in (ChannelConvRead, EmbeddingConv, TokenConvRead):
        monkeypatch.setattr(part, "weights", count(part.weights))
    model = build_tiny(name)
    decode_logits(model, tokens_of(2, 6), 3)
    # two sites of each block and the readout, which share their parts, and the expander
    has_expander = type(model.input_embed) is EmbeddingConv
    assert num_calls == 2 * model.config.num_hidden_layers + 1 + has_expander
