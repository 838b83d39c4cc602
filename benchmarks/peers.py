"""What the models are measured against, beside the additive baseline: implementations that one could take instead."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch
from torch import nn

from model.gpt import GPT, Block, GPTConfig

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
    """liger-kernel's `LigerMHC` around one sublayer, its forward pass split into what comes before and after it."""

    def __init__(self, config: GPTConfig):
        from liger_kernel.transformers import LigerMHC, functional

        super().__init__()
        # phi in bfloat16 multiplies the streams on tensor cores: the package's advice.
        self.mhc = LigerMHC(nn.Identity(), hc=STREAMS, c=config.hidden_size, phi_dtype=torch.bfloat16, allow_fp32=True)
        self.functional = functional

    def init_parameters(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.named_parameters())  # as LigerMHC leaves them

    def before(self, state):
        """state (B, T, n, d) -> the sublayer's input (B, T, d), coefficients (B, T, n) and (B, T, n, n)."""
        mhc = self.mhc
        coefficients = mhc.phi, mhc.b, mhc.alpha_pre, mhc.alpha_post, mhc.alpha_res
        pre, post, mix = self.functional.liger_mhc_coeffs(state, *coefficients, allow_fp32=True)
        return self.functional.liger_mhc_pre(state, pre), (post, mix)

    def after(self, state, h, post, mix):
        return self.functional.liger_mhc_post_res(state, h, post, mix)


class HyperBlock(Block):
    """The backbone's block with manifold-constrained hyper-connections for its two residual connections."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.connections = nn.ModuleDict({site: HyperConnection(config) for site in ("attn", "mlp")})

    def read_state(self, site: str, state, cache):
        return self.connections[site].before(state)

    def write_state(self, site: str, state, h, c, aux):
        return self.connections[site].after(state, h.to(state.dtype), *aux)


class Spread(nn.Module):
    """Expander: the embedding in every stream, (B, T, d) -> (B, T, n, d)."""

    def __init__(self, config: GPTConfig):
        super().__init__()

    def forward(self, x, cache=None, slot: str = ""):
        return x.unsqueeze(2).repeat(1, 1, STREAMS, 1)


class Sum(Spread):
    """Readout: the sum of the streams."""

    def forward(self, state, cache=None, slot: str = ""):
        return state.sum(2)


class HyperConnectionsGPT(GPT):
    """The additive backbone with mHC by liger-kernel (arXiv 2512.24880, n = 4).

    Written against liger-kernel 0.8.5, whose kernels need a GPU. What has run so far: these classes and the package's
    own code in Triton's interpreter on a CPU, eagerly; not compiled, and never on a GPU.
    """

    Expander, Block, Readout = Spread, HyperBlock, Sum
