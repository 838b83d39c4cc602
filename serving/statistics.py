"""What the writes of a model say of every token, by the names of their statistics, as passes are
made.
"""

import contextlib
import math
from collections import Counter

import torch
from torch import nn

from model.residual import DeltaRewrite
from training.residual_statistics import Watched


class Recorder(Watched):
    """Every step by itself; `take` hands out what was seen since it was last called."""

    def __init__(self):
        super().__init__(self.see)
        # statistic -> site -> (B, T) of each pass
        self.passes: dict[str, dict[str, list[torch.Tensor]]] = {}
        self.about: dict[
            str, list[tuple]
        ] = {}  # statistic -> of each site, its range and whether it is the gate of DDL

    def begin(self, model, x, cache):
        self.met = Counter()
        return super().begin(model, x, cache)

    def see(self, site, quantities: dict) -> None:
        label = f"{site.layer} {site.name}"
        self.met[label] += 1
        if self.met[label] > 1:  # a block that occurs several times in a model
            label += f" ({self.met[label]})"
        for name, values in quantities["statistics"].items():
            self.passes.setdefault(name, {}).setdefault(label, []).append(values)
            gate = name == "beta" and isinstance(site.write, DeltaRewrite)
            self.about.setdefault(name, []).append(
                (getattr(site.write, "ranges", {}).get(name), gate)
            )

    def take(self, tokens: int) -> list[dict[str, list[float | None]]]:
        """Of each of the first sequence's newest `tokens` tokens: {statistic: a number of each site
        that has it}, None for one that is not finite.

        A pass that read older tokens anew is known by its length: what was handed out before is
        left out.
        """
        found: list[dict] = [{} for _ in range(tokens)]
        for name, sites in self.passes.items():
            rows = torch.stack(
                [torch.cat(each, dim=1)[0, -tokens:] for each in sites.values()], dim=1
            ).tolist()
            for token, row in zip(found, rows):
                token[name] = [value if math.isfinite(value) else None for value in row]
            for each in sites.values():
                each.clear()
        return found


@contextlib.contextmanager
def recorded(model: nn.Module):
    """A `Recorder` of the passes made inside, which must be of a decoder that is not compiled."""
    recorder = Recorder()
    with model.through(recorder):
        yield recorder


@torch.no_grad()
def declared(model: nn.Module) -> list[dict]:
    """The statistics of a model's writes: "name", "sites" in the order of a pass (`0 attn`, `0
    mlp`, ...), "range" as the writes declare it or None, and "gate": whether it is the beta of a
    delta rewrite, of which 0 keeps, 1 overwrites and 2 reflects.
    """
    with recorded(model) as recorder:
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.rope_cos.device))
    found = []
    for name, sites in recorder.passes.items():
        limits, gates = map(set, zip(*recorder.about[name]))
        one_range = limits.pop() if len(limits) == 1 else None
        found.append(
            {"name": name, "sites": list(sites), "range": one_range, "gate": gates == {True}}
        )
    return found
