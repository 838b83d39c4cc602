"""The keys of every model; a variant adds its own in a subclass of `GPTConfig`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from configurator import check_ranges, option

from .parameters import by_shape, normal


@dataclass
class GPTConfig:
    """Keys of every model.

    Raises:
        ValueError: a value is out of range; the message names the key, the value and the fix
    """

    # name of the key with the number of vectors of width d that the state of a token holds; None
    # for a model without such a key
    expansion_key: ClassVar[str | None] = None

    vocab_size: int = option(
        50304,
        "vocabulary size; unless you set it, train.py uses the vocabulary size of the dataset, "
        "rounded up to a multiple of 64",
        low=1,
    )
    block_size: int = option(
        1024,
        "context length in tokens; unless you set it, train.py uses the document length if all "
        "documents of the dataset have the same length",
        low=1,
    )
    num_hidden_layers: int = option(
        12,
        "number of Transformer blocks; each has an attention and an MLP sublayer",
        low=1,
    )
    num_attention_heads: int = option(
        6,
        "number of attention heads per block",
        low=1,
    )
    hidden_size: int = option(
        768,
        "width d of the residual stream",
        low=1,
    )
    head_dim: int = option(
        128,
        "number of features per attention head",
        low=1,
    )
    intermediate_size: int | None = option(
        None,
        "inner width of the MLP (default: 8/3 hidden_size, rounded down)",
        low=1,
    )
    rope_base: float = option(
        10000.0,
        "base of the rotary position embedding (RoPE); no effect with rope_ratio=0",
        above=1,
    )
    rope_ratio: float = option(
        1.0,
        "fraction of the features of each head that RoPE rotates; 0 disables RoPE",
        low=0,
        high=1,
    )
    state_dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16",
        "dtype of the residual state in a run that computes in bfloat16 or float16; bfloat16 means "
        "the dtype in which the run computes",
    )
    use_qk_rmsnorm: bool = option(
        True,
        "apply RMSNorm to the queries and keys of each head, after RoPE",
    )
    tie_embeddings: bool = option(
        True,
        "tie the weights of the output layer to the token embedding",
    )
    embedding_init_std: float = option(
        0.02,
        "standard deviation of the initial token embedding, and of an output layer that is not "
        "tied to the embedding",
        low=0,
    )
    init: Literal["spectral", "normal"] = option(
        "spectral",
        "initialization of the matrices; spectral scales each matrix by its own shape, as the "
        "current code of the DDL authors does; normal draws every matrix from "
        "N(0, hidden_init_std_factor / sqrt(hidden_size)), as their earlier code did",
    )
    hidden_init_std_factor: float = option(
        0.5,
        "factor in the initial standard deviation of all matrices except embeddings; see init",
        low=0,
    )
    residual_branch_mult: float | None = option(
        None,
        "factor on each sublayer's update X' - X of the residual state (default: 1); B / "
        "num_hidden_layers is the depth scaling of CompleteP from a base depth of B blocks, which "
        "makes hyperparameters tuned at it transfer to other depths; streams whose write has "
        "weights of its own for the state and the update do not apply it",
        above=0,
    )
    mup: bool = option(
        False,
        "use muP, which scales the logits by hidden_size_base / hidden_size and the learning rates "
        "of matrices by powers of this ratio, so that hyperparameters tuned at width "
        "hidden_size_base transfer to other widths",
    )
    hidden_size_base: int = option(
        1024,
        "with mup=True, base width of muP, at which it changes nothing",
        low=1,
    )

    def __post_init__(self):
        check_ranges(self)

    @property
    def hidden_init_std(self) -> float:
        """Return the standard deviation of a matrix with init=normal."""
        return self.hidden_init_std_factor / math.sqrt(self.hidden_size)

    def notes(self) -> list[str]:
        """Return warnings about the training of this model, a sentence each."""
        if self.num_attention_heads * self.head_dim == self.hidden_size:
            return []
        return [
            f"attention has {self.num_attention_heads} heads of head_dim={self.head_dim}, whose "
            f"product is not hidden_size={self.hidden_size}"
        ]

    def matrix_start(self, last: bool = False) -> Callable[[nn.Parameter], object]:
        """Return the function that initializes a matrix in place.

        Args:
            last: for the output matrix of a sublayer, which is scaled down because the outputs of
                all sublayers add up in the residual stream
        """
        layers = self.num_hidden_layers
        if self.init == "spectral":
            return by_shape(self.hidden_init_std_factor / (layers if last else 1))
        return normal(self.hidden_init_std / (math.sqrt(layers) if last else 1))

    @property
    def branch_mult(self) -> float:
        """Return the factor on the update X' - X of every sublayer."""
        return 1.0 if self.residual_branch_mult is None else self.residual_branch_mult

    @property
    def mup_scale(self) -> float:
        """Return muP's factor on the logits; learning rates are scaled by powers of it."""
        return self.hidden_size_base / self.hidden_size if self.mup else 1.0
