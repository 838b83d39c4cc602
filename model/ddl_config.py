"""The keys of Deep Delta Learning (DDL), which `ddl.py` computes."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from configurator import option

from .config import GPTConfig

CONV_INIT_HELP = (
    "initialization of the convolution in the compressor; normal draws from N(0, "
    "hidden_init_std_factor / sqrt(hidden_size)); mean averages over the kernel; identity passes on the "
    "current token or value channel; None is mean with init=spectral, as in the authors' current code, "
    "and normal with init=normal"
)


@dataclass
class DeltaConfig(GPTConfig):
    """Keys of Deep Delta Learning (DDL)."""

    expansion_key: ClassVar[str | None] = "ddl_value_channels"

    ddl_value_channels: int = option(
        4,
        "number of value channels d_v of the state X in R^{d x d_v}",
        low=1,
    )
    ddl_beta_init: float | Literal["1/L"] = option(
        1.0,
        "initial value of the gate beta; 0 leaves the state unchanged, 1 overwrites and 2 reflects "
        "the component of the state along k; 1/L means 1 / num_hidden_layers",
        low=0,
        high=2,
    )
    ddl_beta_single_linear: bool = option(
        True,
        "compute the logit of the gate beta with one linear layer; False uses two linear layers "
        "with a tanh in between",
    )
    ddl_beta_hidden_size: int = option(
        128,
        "hidden size of the two-layer gate, with ddl_beta_single_linear=False",
        low=1,
    )
    ddl_beta_input: Literal["context", "residual", "mean", "flat"] = option(
        "context",
        "input of the gate beta; context is the normalized context c, residual is the compressed "
        "state x_in, mean is the mean of X over the value channels, flat is X flattened to one "
        "vector",
    )
    ddl_k_eps: float = option(
        1e-5,
        "epsilon in the normalization of the direction k; see ddl_k_norm",
        low=0,
    )
    ddl_k_norm: Literal["guarded", "shifted"] = option(
        "guarded",
        "normalization of the direction k; guarded is k~ / sqrt(||k~||^2 + ddl_k_eps^2), "
        "shifted is k~ / (||k~|| + ddl_k_eps)",
    )
    ddl_v_sigmoid: bool = option(
        False,
        "replace the write value v by ddl_v_sigmoid_scale * sigmoid(v), which bounds it, as in the "
        "authors' code",
    )
    ddl_v_sigmoid_scale: float = option(
        1.0,
        "factor on the sigmoid of the write value v, with ddl_v_sigmoid=True",
    )
    ddl_v_constant: bool = option(
        False,
        "write the constant ddl_v_constant_value instead of a learned write value v",
    )
    ddl_v_constant_value: float = option(
        2.0,
        "constant write value v, with ddl_v_constant=True",
    )
    ddl_v_input: Literal["residual", "context"] = option(
        "residual",
        "input of the linear layer for the write value v in the k-Map; residual is the compressed "
        "state x_in, context is the normalized context c",
    )
    ddl_v_bias: bool = option(
        False,
        "add a bias to the linear layer for the write value v, as in the authors' code",
    )
    ddl_map: Literal["k", "v"] = option(
        "k",
        "role of the sublayer output h; k (k-Map) makes h the direction k, and computes the write "
        "value v from ddl_v_input; v (v-Map) computes the write value v from h, and the direction "
        "k in a branch of its own, ddl_k_branch",
    )
    ddl_k_branch: Literal["mlp", "attention"] = option(
        "mlp",
        "branch that computes the direction k in the v-Map; mlp applies an MLP to ddl_k_input, "
        "attention attends over the value channels of X with a learned query",
    )
    ddl_k_input: Literal["read", "mean", "flat"] = option(
        "read",
        "input of the MLP for the direction k in the v-Map; read is the compressed state x_in, or "
        "the normalized context c if d_v = 1; mean is the mean of X over the value channels; flat "
        "is X flattened to one vector",
    )
    ddl_k_hidden_size: int = option(
        128,
        "hidden size of the MLP for the direction k in the v-Map",
        low=1,
    )
    ddl_update: Literal["delta", "write_only", "erase_only"] = option(
        "delta",
        "update of the state; delta is X' = X + beta k (v^T - k^T X), which erases before it "
        "writes; write_only is X' = X + beta k v^T, a control without the erase; erase_only is "
        "X' = X - beta k k^T X, a control without the write, whose value v is 0",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ddl_k_branch == "attention" and self.ddl_value_channels == 1:
            raise ValueError(
                "ddl_k_branch=attention attends over the value channels, but ddl_value_channels "
                "is 1; use --ddl_k_branch=mlp"
            )
        if self.ddl_map == "v" and self.ddl_v_constant:
            raise ValueError(
                "ddl_v_constant=True with ddl_map=v leaves the sublayer outputs unused; omit one "
                "of them"
            )
        if self.ddl_map == "v" and self.ddl_update == "erase_only":
            raise ValueError(
                "ddl_update=erase_only with ddl_map=v leaves the sublayer outputs unused, from which "
                "the v-Map computes the write value v; omit one of them"
            )

    @property
    def erases(self) -> bool:
        """Return whether the update has the term -beta k k^T X."""
        return self.ddl_update != "write_only"

    @property
    def constant_value(self) -> float | None:
        """Return the write value v if it is a constant, 0 for the erase alone; None if computed."""
        if self.ddl_update == "erase_only":
            return 0.0
        return self.ddl_v_constant_value if self.ddl_v_constant else None

    @property
    def beta_start(self) -> float:
        """Return the gate beta at initialization."""
        return 1 / self.num_hidden_layers if self.ddl_beta_init == "1/L" else self.ddl_beta_init

    def notes(self) -> list[str]:
        """Return warnings about equal value channels and about a first gradient that is too large."""
        notes = super().notes()
        if self.ddl_value_channels > 1 and self.constant_value is not None:
            notes.append(
                "every value channel gets the same update, so the channels differ only to the "
                "extent that the embedding convolution (EC) makes them differ, and without one they "
                "remain equal; "
                "--ddl_value_channels=1 is a similar model at less cost"
            )
        # The erase bounds the state, so each sublayer changes a constant fraction of it, and these
        # changes multiply over depth. The factor 0.4 was measured (docs/variants.md).
        num_sublayers = 2 * self.num_hidden_layers
        beta = self.branch_mult * self.beta_start
        growth = 0.4 * num_sublayers * beta / math.sqrt(self.hidden_size)
        if growth > 3 and self.erases:
            notes.append(
                f"with ddl_beta_init={self.ddl_beta_init}, the first gradient of "
                f"{self.num_hidden_layers} blocks of width {self.hidden_size} may be about "
                f"e^{growth:.0f} times too large to train; try --ddl_beta_init=1/L"
            )
        return notes

    @property
    def k_guard(self) -> float:
        """Return the epsilon of the direction k: ddl_k_eps, or a tiny number in place of 0."""
        # 1e-15 changes only the direction of a zero vector, which becomes zero instead of NaN.
        return max(self.ddl_k_eps, 1e-15)


@dataclass
class SingleChannelConfig(DeltaConfig):
    """Keys of DDL with one value channel (d_v = 1)."""

    ddl_value_channels: int = option(
        1,
        "number of value channels d_v of the state X in R^{d x d_v}; this model has one",
        low=1,
    )
    ddl_v_sigmoid: bool = option(
        True,
        "replace the write value v by ddl_v_sigmoid_scale * sigmoid(v), which bounds it",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ddl_value_channels != 1:
            raise ValueError(
                f"ddl_value_channels={self.ddl_value_channels}, but this model has one value "
                "channel; for more, use --model=DDL-gpt-mha-rope"
            )


@dataclass
class ValueChannelsConfig(GPTConfig):
    """Keys of models with several value channels (d_v > 1)."""

    expansion_key: ClassVar[str | None] = "ddl_value_channels"

    ddl_value_channels: int = option(
        4,
        "number of value channels d_v of the state X in R^{d x d_v}",
        low=1,
    )
    ddl_state_shortconv_kernel_size: int | None = option(
        None,
        "kernel size of the convolution in the compressor, which maps X to x_in (default: 4 for a "
        "convolution over tokens, ddl_value_channels for one over value channels)",
        low=1,
    )
    ddl_state_read_init: float | None = option(
        None,
        "initial value of the read vector, with which the compressor sums over the value channels "
        "(default: 1 / ddl_value_channels)",
    )
    ddl_state_conv_init: Literal["normal", "mean", "identity"] | None = option(
        None,
        CONV_INIT_HELP,
    )

    @property
    def conv_start(self) -> str:
        """Return how the convolution in the compressor is initialized."""
        if self.ddl_state_conv_init is not None:
            return self.ddl_state_conv_init
        return "mean" if self.init == "spectral" else "normal"

    @property
    def read_start(self) -> float:
        """Return the initial value of the read vector."""
        if self.ddl_state_read_init is not None:
            return self.ddl_state_read_init
        return 1 / self.ddl_value_channels


@dataclass
class ExpandedConfig(ValueChannelsConfig, DeltaConfig):
    """Keys of DDL with several value channels (d_v > 1)."""

    # The texts do not say how the compressor starts; this is the start of the authors' older code. With
    # a mean, the readout would keep the embedding of the current token, beside which the first writes
    # are nothing, and the tied head would predict this token: a first loss of 20 at the small size
    # (docs/recipe.md).
    ddl_state_conv_init: Literal["normal", "mean", "identity"] | None = option(
        "normal",
        CONV_INIT_HELP,
    )

    def notes(self) -> list[str]:
        """Return a note if the model is mistaken for the paper's with d_v = 1, and others."""
        notes = super().notes()
        if self.ddl_value_channels == 1:
            notes.append(
                "the paper's model with d_v = 1 is DDL-vdim1-gpt-mha-rope, without a compressor and with "
                "a sigmoid on v"
            )
        return notes


@dataclass
class ChannelConvConfig(ExpandedConfig):
    """Keys of the compressor over value channels (CC)."""

    ddl_cc_read: Literal["pair", "folded"] = option(
        "folded",
        "parameters of the compressor; folded is a single weight for each feature and value channel; "
        "pair is a convolution over value channels followed by a read vector, as in the authors' "
        "code",
    )
    ddl_state_dv_shortconv_causal: bool = option(
        False,
        "make the convolution over value channels of ddl_cc_read=pair causal",
    )


@dataclass
class EmbeddingConvConfig(ExpandedConfig):
    """Keys of the embedding convolution (EC)."""

    input_embed_shortconv_kernel_size: int = option(
        4,
        "kernel size, in tokens, of the causal convolution that expands the embedding into the "
        "value channels",
        low=1,
    )


@dataclass
class EmbeddingChannelConvConfig(EmbeddingConvConfig, ChannelConvConfig):
    """Keys of DDL with both convolutions (CC and EC)."""
