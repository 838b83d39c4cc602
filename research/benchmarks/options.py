"""Options that several commands of bench.py have."""

from dataclasses import dataclass
from typing import Literal

from configurator import option
from research.benchmarks.suites import QUICK


@dataclass(frozen=True)
class MeasurementOptions:
    """Where it is measured, and where the results are stored."""

    device: Literal["auto", "cuda", "cpu"] = option(
        "auto",
        "device to measure on; auto uses the GPU if there is one",
    )
    json: str | None = option(
        None,
        "file to store the results in; it is updated after each of them",
    )
    resume: bool = option(
        False,
        "keep the results in the file that were measured with the same code, processor and settings",
    )


@dataclass(frozen=True)
class SizeOptions:
    """Size of the models."""

    vocab_size: int = option(QUICK["vocab_size"], "vocabulary size", low=1)
    block_size: int = option(QUICK["block_size"], "number of tokens per sequence", low=1)
    num_hidden_layers: int = option(QUICK["num_hidden_layers"], "number of blocks", low=1)
    num_attention_heads: int = option(
        QUICK["num_attention_heads"], "number of attention heads", low=1
    )
    head_dim: int = option(QUICK["head_dim"], "features per attention head", low=1)
    hidden_size: int = option(QUICK["hidden_size"], "width d", low=1)


@dataclass(frozen=True)
class SuiteOptions:
    """Models, and sizes (default: those of the suite)."""

    suite: Literal["quick", "targets", "paper", "rehearsal"] = option(
        "quick",
        "sizes and models to measure",
    )
    sizes: str | None = option(None, "measure only these sizes of the suite, as in --sizes=small")
    models: str | None = option(
        None,
        "models separated by commas, each as MODEL or MODEL:d_v, optionally followed by "
        "+kernels=off, +state_checkpoint_interval=4 or +KEY=VALUE",
    )
    kernels: Literal["auto", "on", "off"] = option("auto", "train.py's key kernels")
    state_checkpoint_interval: int = option(2, "train.py's key state_checkpoint_interval", low=1)
    vocab_size: int | None = option(None, "vocabulary size", low=1)
    block_size: int | None = option(None, "number of tokens per sequence", low=1)
    num_hidden_layers: int | None = option(None, "number of blocks", low=1)
    num_attention_heads: int | None = option(None, "number of attention heads", low=1)
    head_dim: int | None = option(None, "features per attention head", low=1)
    hidden_size: int | None = option(None, "width d", low=1)
    micro_batch_size: int | None = option(None, "number of sequences per step", low=1)
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "dtype of autocast")
    compile: bool = option(True, "compile the models")
