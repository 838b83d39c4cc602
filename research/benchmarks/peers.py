"""Other programs' models, whose training steps research/gpu.py measures beside the additive model.

The plain GPT is of nanoGPT's kind, with any number of heads. For the token ids t of a sequence it computes

    x = E[t] + P                                                    embeddings of tokens and positions
    x = x + W_o attention(W_q n, W_k n, W_v n),  n = LayerNorm(x)   in each of the blocks
    x = x + W_2 gelu(W_1 LayerNorm(x))
    logits = E LayerNorm(x)

without biases. All models have the same width, depth, heads and vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

PLAIN = "plain GPT"
TRANSFORMERS = "transformers GPT-2"

Size = dict[str, int]


class PlainBlock(nn.Module):
    """Attention and an MLP, each added to its input x (B, T, d)."""

    def __init__(self, d: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(d, bias=False)
        self.query_key_value = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.norm_2 = nn.LayerNorm(d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, num_heads, T, d / num_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """The plain GPT, with the interface of `model.gpt.GPT`: logits, loss = model(ids, targets)."""

    def __init__(self, size: Size):
        super().__init__()
        d = size["hidden_size"]
        self.tokens = nn.Embedding(size["vocab_size"], d)
        self.positions = nn.Embedding(size["block_size"], d)
        self.blocks = nn.Sequential(
            *(PlainBlock(d, size["num_attention_heads"]) for _ in range(size["num_hidden_layers"]))
        )
        self.norm = nn.LayerNorm(d, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, ids: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits (B, T, vocab_size) and, with targets (B, T), the mean loss in nats."""
        x = self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class TransformersGPT2(nn.Module):
    """transformers' GPT-2 with the interface of `model.gpt.GPT`, for training steps."""

    def __init__(self, size: Size):
        super().__init__()
        self.model = build_transformers_gpt2(size)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return None and the mean loss in nats."""
        logits = self.model(ids, use_cache=False).logits.float().flatten(0, 1)
        return None, F.cross_entropy(logits, targets.flatten())


def build_transformers_gpt2(size: Size) -> nn.Module:
    """Build transformers' GPT-2, without dropout as long as it is in evaluation mode."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=size["vocab_size"],
        n_positions=size["block_size"],
        n_embd=size["hidden_size"],
        n_layer=size["num_hidden_layers"],
        n_head=size["num_attention_heads"],
        # no token ends a text
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).eval()
