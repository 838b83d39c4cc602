"""The Manifold-Geometric Transformer (MGT): a gated sublayer output, and a signed gate per feature
on the update.

Equations are those of the paper, sections 3.4 and 3.5; the state X is (B, T, d). Its "mHC" is a
gate on the sublayer's output, not the streams of `hyper_connections.py`, and its "DDL" erases along
X itself, not along a direction k.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from model.block import Past, WritingBlock
from model.gpt import GPTConfig
from model.layers import LayerNorm, at_least_fp32, for_product
from model.options import option
from model.parameters import HIDDEN, Rule, constant, linear, normal


@dataclass
class MGTConfig(GPTConfig):
    """Keys of the Manifold-Geometric Transformer (MGT)."""

    mgt_arm: Literal["full", "ddl", "mhc", "standard", "additive"] = option(
        "full",
        "variant in the paper's ablation; full is MGT, ddl is +DDL only, mhc is +mHC only (post-norm), "
        "standard is the post-norm Transformer, additive is the pre-norm Transformer",
    )
    mgt_lambda: float = option(
        1.0,
        "scale lambda of the gate beta = lambda * tanh(X W + b) + epsilon",
    )
    mgt_epsilon: float = option(
        0.0,
        "offset epsilon of the gate beta = lambda * tanh(X W + b) + epsilon",
    )
    mgt_alpha_init: float = option(
        0.0,
        "initial value of the learned erase coefficient alpha in X' = X + beta (V - alpha X)",
        initial=True,
    )
    mgt_beta_bias_init: float = option(
        1.0,
        "initial bias b of the gate beta; with 1, beta starts near tanh(1) = 0.76",
        initial=True,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.has_beta:
            return
        for key in ("mgt_lambda", "mgt_epsilon", "mgt_alpha_init", "mgt_beta_bias_init"):
            if getattr(self, key) != getattr(MGTConfig, key):
                raise ValueError(
                    f"{key}={getattr(self, key)} has no effect with mgt_arm={self.mgt_arm}; omit "
                    "it, or use --mgt_arm=full or --mgt_arm=ddl"
                )

    @property
    def has_gate(self) -> bool:
        """Return whether sublayer outputs are gated (the mHC of the paper)."""
        return self.mgt_arm in ("full", "mhc")

    @property
    def has_beta(self) -> bool:
        """Return whether updates have the gate beta and the erase (the DDL of the paper)."""
        return self.mgt_arm in ("full", "ddl")

    @property
    def post_norm(self) -> bool:
        """Return whether the LayerNorm follows the update instead of preceding the sublayer."""
        return self.mgt_arm in ("standard", "mhc")


class MGTWrite(nn.Module):
    """X' = X + beta * (V - alpha X).

    V = h * sigmoid(LN(X W_gate)), beta = lambda tanh(X W + b) + eps: equations 7, 5, 6.
    Without the gate V = h; without beta X' = X + V.
    """

    def __init__(self, config: MGTConfig):
        super().__init__()
        d, self.config = config.hidden_size, config
        matrix = Rule(normal(config.hidden_init_std), HIDDEN, decay=True, rounded=True)
        if config.has_gate:
            self.gate, self.gate_norm = linear(d, d, matrix), LayerNorm(d)
        if config.has_beta:
            self.beta = linear(d, d, matrix, Rule(constant(config.mgt_beta_bias_init)))
            self.alpha = nn.Parameter(torch.empty(1))
            self.rules = {"alpha": Rule(constant(config.mgt_alpha_init))}

    def elementwise_flops(self) -> int:
        return (1 + self.config.has_gate + 3 * self.config.has_beta) * self.config.hidden_size

    def gates(self, state):
        """sigmoid(LN(X W_gate)) and beta, each (B, T, d) in at least fp32, or 1."""
        x, dtype, gate, beta = state, at_least_fp32(state.dtype), 1.0, 1.0
        if self.config.has_gate:
            gate = self.gate_norm(self.gate(for_product(x, self.gate.weight)).to(dtype)).sigmoid()
        if self.config.has_beta:
            logits = self.beta(for_product(x, self.beta.weight)).to(dtype)
            beta = self.config.mgt_lambda * logits.tanh() + self.config.mgt_epsilon
        return gate, beta

    def forward(self, state, h, x_in, c, past: Past | None = None, **forced: float):
        """forced: numbers in the place of the learned gate, beta and alpha (for analyses)."""
        gate, beta = self.gates(state)
        gate, beta = forced.get("gate", gate), forced.get("beta", beta)
        x = state.to(at_least_fp32(state.dtype))
        value = gate * h.to(x.dtype)
        if self.config.has_beta:
            value = beta * (value - forced.get("alpha", self.alpha) * x)
        return (x + value).to(state.dtype)

    ranges: ClassVar = {"beta_negative": (0.0, 1.0), "gate": (0.0, 1.0)}

    def statistics(self, state, h, x_in, c, written) -> dict:
        """Of each token (B, T), over its features: the mean and the variance of beta, the share of
        negative ones, and the mean of the gate.
        """
        gate, beta = self.gates(state)
        found = {}
        if self.config.has_beta:
            found |= {"beta": beta.mean(-1), "beta_variance": beta.var(-1, unbiased=False)}
            found["beta_negative"] = (beta < 0).to(beta.dtype).mean(-1)
        return found | ({"gate": gate.mean(-1)} if self.config.has_gate else {})


class MGTBlock(WritingBlock):
    """Norms before the sublayer, or, in the post-LN arms, after the write: X' = LN(X + V)."""

    Write = MGTWrite

    def __init__(self, config: MGTConfig, layer: int):
        super().__init__(config, layer)
        self.ln_1, self.ln_2 = LayerNorm(config.hidden_size), LayerNorm(config.hidden_size)
        where, nowhere = ("post_write", "norm") if config.post_norm else ("norm", "post_write")
        norms = zip(self.sites, (self.ln_1, self.ln_2))
        self.sites = tuple(replace(site, **{where: norm, nowhere: None}) for site, norm in norms)


def final_norm(config: MGTConfig) -> nn.Module:
    """The norm before the output layer; none in the post-LN arms, whose last write has one."""
    return nn.Identity() if config.post_norm else LayerNorm(config.hidden_size)
