"""The loss over validation windows, and, where a corpus is a task, how many answers are right."""

import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import configurator
from data.loader import ValidationBatches, prefetched
from model.loss import LOGITS_AT_ONCE


def evaluate(
    model, batches: ValidationBatches, windows: list[int], rows: int, world, autocast, stop=None,
    each: bool = False,
) -> dict | None:  # fmt: skip
    """{"loss": mean cross-entropy in nats per token} over the windows, each read by one process;
    every process gets it.

    With `batches.scored`, positions in the window: "accuracy", the share of the targets there that
    are the model's first choice, and "exact_match", the share of windows in which all of them are.
    None: `stop()` became true. each: also "losses", the loss of every window by itself
    (`losses_of_rows`), float32 (windows,). Gradients stay enabled and the shape is that of
    training: a compiled model is not compiled a second time.
    """
    scored = None if batches.scored is None else batches.scored.to(world.device)
    sums = [0.0] * 5  # nats, tokens, right answers, answers, windows that are all right
    # Every process makes as many passes, the last one perhaps with nothing to count: their
    # collectives must match.
    passes = -(-len(windows) // (rows * world.world_size))
    chunks = [windows[(i * world.world_size + world.rank) * rows :][:rows] for i in range(passes)]
    losses = np.zeros(len(windows))
    read = prefetched(lambda chunk: batches.get(chunk, rows), chunks, world.device)
    for number, (ids, targets) in enumerate(read):
        if stop and world.sum(float(bool(stop())))[0]:
            return None
        count = (targets != -1).sum().item()
        with autocast:
            logits, loss = model(ids, targets, return_logits=scored is not None)
        if count:
            sums[0], sums[1] = sums[0] + loss.item() * count, sums[1] + count
        if scored is not None:
            answers = (targets != -1) & scored  # (rows, seq_len)
            hits = ((logits.argmax(-1) == targets) & answers).sum(-1)  # (rows,)
            lengths = answers.sum(-1)
            sums[2], sums[3] = sums[2] + hits.sum().item(), sums[3] + lengths.sum().item()
            sums[4] += ((hits == lengths) & (lengths > 0)).sum().item()
        if each:
            first = (number * world.world_size + world.rank) * rows
            own = losses_of_rows(model, ids, targets, logits, autocast)
            losses[first : first + rows] = own[: len(losses[first : first + rows])]
        del logits, loss  # with them goes the graph, before the next pass makes its own
    nats, tokens, right, asked, exact = world.sum(*sums)
    result = {"loss": nats / tokens if tokens else math.nan}
    if each:
        result["losses"] = np.array(world.sum(*losses), dtype=np.float32)
    if asked:
        result |= {"accuracy": right / asked, "exact_match": exact / len(windows)}
    return result


@torch.no_grad()
def losses_of_rows(model, ids, targets, logits, autocast) -> np.ndarray:
    """The mean loss of each row in nats per counted token, float64 (rows,); nan without any.

    ids and targets (rows, seq_len), logits (rows, seq_len, vocab_size). Without logits (None) they
    are made again, of as many rows at a time as keep them within LOGITS_AT_ONCE. A compiled model
    makes them uncompiled: it is not compiled a second time for a shape that only this needs.
    """
    at_once, sums = len(ids), []
    if logits is None:
        row = ids.shape[1] * model.config.vocab_size
        at_once = max(LOGITS_AT_ONCE.get(ids.device.type, 2**27) // row, 1)
    for i, t in zip(ids.split(at_once), targets.split(at_once)):
        if logits is None:
            with torch.compiler.set_stance("force_eager"), autocast:
                part = model(i)[0]
        else:
            part = logits
        nats = F.cross_entropy(part.flatten(0, 1), t.flatten(), ignore_index=-1, reduction="none")
        sums.append(nats.view(t.shape).double().sum(1))
        del part, nats  # before the next rows have theirs
    return (torch.cat(sums) / (targets != -1).sum(1)).cpu().numpy()


def save_losses(file: Path, step: int, windows: list[int], losses: np.ndarray) -> None:
    """Write the loss of every window, with its number, to a .npz that is complete or absent.

    A full disk costs a warning: the older file stays.
    """
    try:
        with configurator.whole(file) as temporary, open(temporary, "wb") as stream:
            np.savez(stream, loss=losses, window=np.array(windows), step=np.array(step))
    except OSError as error:
        print(f"warning: step {step}: {file} is not written ({error.strerror})", file=sys.stderr)
