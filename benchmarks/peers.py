"""What the models are measured against, beside the additive baseline: implementations that one could take instead."""

import importlib.metadata
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from model.block import Block
from model.gpt import GPT, GPTConfig
from model.parameters import Rule

STREAMS = 4  # of the hyper-connections


def transcription(stem: str, model) -> nn.Module | None:
    """tests/transcription.py's model of that stem with the weights of `model`; None where the stem has none."""
    tests = str(Path(__file__).parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)  # no package: pytest imports from the folder as well
    from transcription import READS, Transcription

    if stem != "gpt-mha-rope" and stem not in READS:
        return None
    result = Transcription(stem, model.config)
    result.load_state_dict(model.state_dict())
    return result


def liger_version() -> str | None:
    """The installed liger-kernel; None where there is none."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    try:
        return importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "of unknown version"


class HyperConnection(nn.Module):
    """liger-kernel's `LigerMHC` around one sublayer, its forward pass split into the read and the write."""

    def __init__(self, config: GPTConfig):
        from liger_kernel.transformers import LigerMHC, functional

        super().__init__()
        # phi in bfloat16 multiplies the streams on tensor cores: the package's advice.
        self.mhc = LigerMHC(nn.Identity(), hc=STREAMS, c=config.hidden_size, phi_dtype=torch.bfloat16, allow_fp32=True)
        self.functional = functional
        # They start as LigerMHC leaves them.
        self.rules = {name: Rule(nn.Identity(), decay=p.ndim >= 2) for name, p in self.named_parameters()}

    def read(self, state, past=None):
        """state (B, T, n, d) -> the sublayer's input (B, T, d), coefficients (B, T, n) and (B, T, n, n)."""
        mhc = self.mhc
        coefficients = mhc.phi, mhc.b, mhc.alpha_pre, mhc.alpha_post, mhc.alpha_res
        pre, post, mix = self.functional.liger_mhc_coeffs(state, *coefficients, allow_fp32=True)
        return self.functional.liger_mhc_pre(state, pre), post, mix

    def write(self, state, h, x_in, c, past=None):
        _, post, mix = x_in
        return self.functional.liger_mhc_post_res(state, h.to(state.dtype), post, mix)


class HyperBlock(Block):
    """The backbone's block with manifold-constrained hyper-connections for its two residual connections."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.connections = nn.ModuleDict({site.name: HyperConnection(config) for site in self.sites})
        pairs = zip(self.sites, self.connections.values())
        self.sites = tuple(replace(site, read=each.read, write=each.write) for site, each in pairs)


class Spread(nn.Module):
    """Expander: the embedding in every stream, (B, T, d) -> (B, T, n, d)."""

    def __init__(self, config: GPTConfig):
        super().__init__()

    def forward(self, x, past=None):
        return x.unsqueeze(2).repeat(1, 1, STREAMS, 1)


class Sum(Spread):
    """Readout: the sum of the streams."""

    def forward(self, state, past=None):
        return state.sum(2)


class HyperConnectionsGPT(GPT):
    """The additive backbone with mHC by liger-kernel (arXiv 2512.24880, n = 4).

    Written against liger-kernel 0.8.5, whose kernels need a GPU. What has run so far: these classes and the package's
    own code in Triton's interpreter on a CPU, eagerly; not compiled, and never on a GPU.
    """

    Expander, Block, Readout = Spread, HyperBlock, Sum
