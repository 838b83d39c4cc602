"""MGT (Su and You, "Geometric and Dynamic Scaling in Deep Transformers") and its ablations.

MGT stands for Manifold-Geometric Transformer: a gate on the sublayer output and one on the update.
The key mgt_arm selects the model, or one of the seven arms that it is compared with. Equations are
those of the paper, sections 3.4 and 3.5; the state X is (B, T, d). The paper's "mHC" is a gate on
the sublayer output, not the streams of `hyper_connections.py`, and its "DDL" erases along X itself,
not along a direction k.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from configurator import option

from .block import Past, WritingBlock
from .gpt import GPT, GPTConfig
from .layers import LayerNorm
from .parameters import HIDDEN, Rule, constant, linear, normal
from .precision import at_least_fp32, for_product


@dataclass
class MGTConfig(GPTConfig):
    """Keys of the Manifold-Geometric Transformer (MGT)."""

    mgt_arm: Literal[
        "full", "ddl", "mhc", "standard", "additive", "mhc_pre", "ddl_post", "full_post"
    ] = option(
        "full",
        "variant of the paper's ablation; full is MGT; ddl has only the gate beta, which may erase; "
        "mhc has only the gate on the sublayer output (post-norm); standard is the post-norm "
        "Transformer; additive is the pre-norm Transformer; mhc_pre, ddl_post and full_post are mhc, "
        "ddl and full with the other placement of the norm",
    )
    mgt_lambda: float = option(
        1.0,
        "scale lambda of the gate beta = lambda * tanh(X W + b) + epsilon, in the arms with beta",
    )
    mgt_epsilon: float = option(
        0.0,
        "offset epsilon of the same gate",
    )
    mgt_alpha_init: float = option(
        0.0,
        "initial value of the learned erase coefficient alpha in X' = X + beta (V - alpha X)",
    )
    mgt_beta_bias_init: float = option(
        1.0,
        "initial bias b of the gate beta; with 1, beta starts near tanh(1) = 0.76",
    )

    @property
    def has_gate(self) -> bool:
        """Return whether sublayer outputs are gated (the mHC of the paper)."""
        return self.mgt_arm in ("full", "full_post", "mhc", "mhc_pre")

    @property
    def has_beta(self) -> bool:
        """Return whether updates have the gate beta and the erase (the DDL of the paper)."""
        return self.mgt_arm in ("full", "full_post", "ddl", "ddl_post")

    @property
    def post_norm(self) -> bool:
        """Return whether the LayerNorm follows the update instead of preceding the sublayer."""
        return self.mgt_arm in ("standard", "mhc", "ddl_post", "full_post")


class MGTWrite(nn.Module):
    """The write X' = X + beta * (V - alpha X) (equation 7).

    V = h * sigmoid(LN(X W_gate)) (equation 5), or V = h without the gate.
    beta = lambda tanh(X W + b) + epsilon (equation 6); without it, X' = X + V.
    residual_branch_mult multiplies the update X' - X, before the LayerNorm of the post-norm arms.
    """

    ranges: ClassVar = {"beta_negative": (0.0, 1.0), "gate": (0.0, 1.0)}

    def __init__(self, config: MGTConfig):
        super().__init__()
        self.config = config
        d = config.hidden_size
        matrix_rule = Rule(normal(config.hidden_init_std), HIDDEN, decay=True)
        if config.has_gate:
            self.gate = linear(d, d, matrix_rule)
            self.gate_norm = LayerNorm(d)
        if config.has_beta:
            self.beta = linear(d, d, matrix_rule, Rule(constant(config.mgt_beta_bias_init)))
            self.alpha = nn.Parameter(torch.empty(1))
            self.rules = {"alpha": Rule(constant(config.mgt_alpha_init))}

    def compute_gate(self, state: torch.Tensor) -> torch.Tensor | float:
        """Return sigmoid(LN(X W_gate)), (B, T, d) in at least fp32, or 1 without the gate."""
        if not self.config.has_gate:
            return 1.0
        logits = self.gate(for_product(state, self.gate.weight)).to(at_least_fp32(state.dtype))
        return self.gate_norm(logits).sigmoid()

    def compute_beta(self, state: torch.Tensor) -> torch.Tensor | float:
        """Return beta, (B, T, d) in at least fp32, or 1 without it."""
        if not self.config.has_beta:
            return 1.0
        logits = self.beta(for_product(state, self.beta.weight)).to(at_least_fp32(state.dtype))
        return self.config.mgt_lambda * logits.tanh() + self.config.mgt_epsilon

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        x = state.to(at_least_fp32(state.dtype))
        # V = h * sigmoid(LN(X W_gate)) (equation 5)
        update = self.compute_gate(state) * h.to(x.dtype)
        # X' = X + beta * (V - alpha X) (equation 7)
        if self.config.has_beta:
            update = self.compute_beta(state) * (update - self.alpha * x)
        if self.config.branch_mult != 1:
            update = self.config.branch_mult * update
        return (x + update).to(state.dtype)

    def statistics(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        written: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return statistics over the features of each token, (B, T).

        They are the mean and variance of beta, its fraction of negative values, and the mean of the
        gate, as far as the arm has them.
        """
        statistics = {}
        if self.config.has_beta:
            beta = self.compute_beta(state)
            statistics["beta"] = beta.mean(-1)
            statistics["beta_variance"] = beta.var(-1, unbiased=False)
            statistics["beta_negative"] = (beta < 0).to(beta.dtype).mean(-1)
        if self.config.has_gate:
            statistics["gate"] = self.compute_gate(state).mean(-1)
        return statistics


class MGTBlock(WritingBlock):
    """A block with LayerNorm before each sublayer or, if post-norm, after the write: LN(X')."""

    Write = MGTWrite

    def __init__(self, config: MGTConfig, layer: int):
        super().__init__(config, layer)
        self.ln_1 = LayerNorm(config.hidden_size)
        self.ln_2 = LayerNorm(config.hidden_size)
        attn, mlp = self.sites
        if config.post_norm:
            self.sites = (
                replace(attn, norm=None, post_write=self.ln_1),
                replace(mlp, norm=None, post_write=self.ln_2),
            )
        else:
            self.sites = (
                replace(attn, norm=self.ln_1),
                replace(mlp, norm=self.ln_2),
            )


def norm_after_last_block(config: MGTConfig) -> nn.Module:
    """Return the norm before the output layer; none if post-norm, as the last write has one."""
    return nn.Identity() if config.post_norm else LayerNorm(config.hidden_size)


class Model(GPT):
    Config = MGTConfig
    Block = MGTBlock
    FinalNorm = staticmethod(norm_after_last_block)
