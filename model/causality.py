"""Causality: whether any output of a model depends on tokens that come after it.

    leak = find_leak(model, ids)  # None, or where the first output moves
    if leak is not None:
        print(leak)  # block 0, attn: the state that the write returns changes by 0.12 at position 0 ...

Each token is changed in turn, and everything that the stream returns is compared at the positions
before it: expander, reads, norms, sublayers, writes, readout and logits. No position may move there,
by a single bit: compute in float64 on a CPU, where changing one token does not round another one
differently.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .block import Site, State, Stream


@dataclass(frozen=True)
class Leak:
    """The first output, in the order of computation, that depends on a later token."""

    # index of the output in the order of computation
    step: int

    # where it is computed: index of the block and name of the site; None before and after the blocks
    layer: int | None
    site: str | None

    # what moves, for example "the state that the write returns"
    output: str

    # the first position that moves
    position: int

    # a later position, that of the token whose change moves it
    changed_position: int

    # the largest change of a number of the output at that position
    difference: float

    def __str__(self) -> str:
        place = "" if self.layer is None else f"block {self.layer}, {self.site}: "
        return (
            f"{place}{self.output} changes by {self.difference:.2g} at position {self.position} "
            f"when the token at position {self.changed_position} changes"
        )


@dataclass(frozen=True)
class Output:
    """Tensors that a step of the model returns, each (B, T, ...)."""

    layer: int | None
    site: str | None
    description: str
    tensors: list[torch.Tensor]


class RecordingStream(Stream):
    """Runs one operation at a time and keeps what each returns, in the order of computation.

    num_tokens: T; tensors that are not (B, T, ...), such as weights that all tokens share, are left
        out
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self.outputs: list[Output] = []

    def record(self, description: str, values: object, site: Site | None = None) -> None:
        """Keep the tensors (B, T, ...) of a tensor, or of a tuple of tensors."""
        tensors = [
            leaf.clone()  # a later step may change it in place
            for leaf in tree_leaves(values)
            if torch.is_tensor(leaf) and leaf.ndim > 1 and leaf.shape[1] == self.num_tokens
        ]
        layer = None if site is None else site.layer
        name = None if site is None else site.name
        self.outputs.append(Output(layer, name, description, tensors))

    def begin(self, model: nn.Module, x: torch.Tensor, cache: dict | None) -> State:
        state = super().begin(model, x, cache)
        self.record("the state that the expander returns", state)
        return state

    def read(
        self, site: Site, state: State, cache: dict | None
    ) -> tuple[State, torch.Tensor | tuple, torch.Tensor]:
        state, read_output, c = super().read(site, state, cache)
        self.record("what the read returns", read_output, site)
        self.record("the normalized input of the sublayer", c, site)
        return state, read_output, c

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        self.record("what the sublayer returns", h, site)
        written = super().write(site, state, h, x_in, c, cache)
        self.record("the state that the write returns", written, site)
        return written

    def finish(self, model: nn.Module, state: State, cache: dict | None) -> torch.Tensor:
        hidden = super().finish(model, state, cache)
        self.record("the normalized readout", hidden)
        return hidden


@torch.no_grad()
def record_outputs(model: nn.Module, ids: torch.Tensor) -> list[Output]:
    """Return everything that the model computes of ids (1, T), in the order of computation."""
    recorder = RecordingStream(ids.shape[1])
    with model.through(recorder):
        logits, _ = model(ids)
    recorder.record("the logits", logits)
    return recorder.outputs


def find_leak(model: nn.Module, ids: torch.Tensor) -> Leak | None:
    """Return the first output that depends on a later token, or None if there is none.

    A parameter that starts at zero may hide a leak: move the parameters of an untrained model off
    their initial values first (`move_parameters`).

    Args:
        model: in evaluation mode, best in float64 on a CPU
        ids: token ids (1, T), int64

    Raises:
        ValueError: there is one token, or the outputs are not finite, or not the same in two calls
            with the same tokens
    """
    if ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ValueError(
            f"ids have the shape {tuple(ids.shape)}; give one sequence of two or more tokens, "
            "(1, T)"
        )
    original = record_outputs(model, ids)
    for output in original:
        if not all(tensor.isfinite().all() for tensor in output.tensors):
            raise ValueError(
                f"{output.description} is not finite, so its changes cannot be detected; give a "
                "model that has not diverged"
            )
    if first_movement(original, record_outputs(model, ids), ids.shape[1]) is not None:
        raise ValueError(
            "the model returns different outputs for the same tokens, so the effect of a changed "
            "token cannot be detected; make its stream deterministic in evaluation mode"
        )
    leaks = []
    for changed_position in range(1, ids.shape[1]):
        changed_ids = ids.clone()
        changed_ids[0, changed_position] = (ids[0, changed_position] + 1) % model.config.vocab_size
        changed = record_outputs(model, changed_ids)
        leak = first_movement(original, changed, changed_position)
        if leak is not None:
            leaks.append(leak)
    return min(leaks, key=lambda leak: (leak.step, leak.position), default=None)


def first_movement(
    original: list[Output], changed: list[Output], changed_position: int
) -> Leak | None:
    """Return the first output that differs before the changed position, or None."""
    for step, (output, changed_output) in enumerate(zip(original, changed, strict=True)):
        differences = [
            (old[:, :changed_position].double() - new[:, :changed_position].double()).abs()
            for old, new in zip(output.tensors, changed_output.tensors, strict=True)
        ]
        # (T,) of each tensor: the largest change at each position
        by_position = [
            difference.transpose(0, 1).flatten(1).amax(1)
            for difference in differences
            if difference.numel() > 0
        ]
        if not by_position:
            continue
        largest = torch.stack(by_position).amax(0)
        # NaN differs as well
        moved = (largest != 0).nonzero()
        if len(moved) > 0:
            position = moved[0].item()
            return Leak(
                step=step,
                layer=output.layer,
                site=output.site,
                output=output.description,
                position=position,
                changed_position=changed_position,
                difference=largest[position].item(),
            )
    return None


@torch.no_grad()
def move_parameters(model: nn.Module, std: float = 0.3, seed: int = 1) -> nn.Module:
    """Add N(0, std) to every parameter, so that none that starts at zero hides what it multiplies."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.add_(std * noise)
    return model
