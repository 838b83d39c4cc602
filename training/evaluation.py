"""The loss over validation windows, and, where a corpus defines it, how many of its answers are right."""

from data.loader import ValidationBatches, prefetched


def evaluate(model, batches: ValidationBatches, windows: list[int], rows: int, world, autocast, scored_from=None):
    """{"loss": mean cross-entropy in nats per token} over the windows, each read by one process; every process gets it.

    With `scored_from`, a position in the window: "accuracy", the share of targets from there on that are the model's
    first choice, and "exact_match", the share of windows in which all of them are.
    Gradients stay enabled and the shape is that of training: a compiled model is not compiled a second time.
    """
    nats = tokens = right = scored = exact = 0.0
    mine = windows[world.rank :: world.world_size]
    chunks = [mine[i : i + rows] for i in range(0, len(mine), rows)]
    for ids, targets in prefetched(lambda chunk: batches.get(chunk, rows), chunks, world.device):
        count = (targets != -1).sum().item()
        with autocast:
            logits, loss = model(ids, targets, return_logits=scored_from is not None)
        nats, tokens = nats + loss.item() * count, tokens + count
        if scored_from is not None:
            answers = targets[:, scored_from:]
            hits = ((logits[:, scored_from:].argmax(-1) == answers) & (answers != -1)).sum(-1)  # (rows,)
            lengths = (answers != -1).sum(-1)
            right, scored = right + hits.sum().item(), scored + lengths.sum().item()
            exact += ((hits == lengths) & (lengths > 0)).sum().item()
    nats, tokens, right, scored, exact = world.sum(nats, tokens, right, scored, exact)
    result = {"loss": nats / tokens}
    return result | ({"accuracy": right / scored, "exact_match": exact / len(windows)} if scored else {})
