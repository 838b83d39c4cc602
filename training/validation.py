"""The loss over validation windows, and, where a corpus defines it, how many of its answers are right."""

from data.loader import ValidationBatches, prefetched


def evaluate(
    model, batches: ValidationBatches, windows: list[int], rows: int, world, autocast, scored_from=None, stop=None
) -> dict | None:
    """{"loss": mean cross-entropy in nats per token} over the windows, each read by one process; every process gets it.

    With `scored_from`, a position in the window: "accuracy", the share of targets from there on that are the model's
    first choice, and "exact_match", the share of windows in which all of them are. None: `stop()` became true.
    Gradients stay enabled and the shape is that of training: a compiled model is not compiled a second time.
    """
    sums = [0.0] * 5  # nats, tokens, right answers, answers, windows that are all right
    # Every process makes as many passes, the last one perhaps with nothing to count: their collectives must match.
    passes = -(-len(windows) // (rows * world.world_size))
    chunks = [windows[(i * world.world_size + world.rank) * rows :][:rows] for i in range(passes)]
    for ids, targets in prefetched(lambda chunk: batches.get(chunk, rows), chunks, world.device):
        if stop and world.sum(float(bool(stop())))[0]:
            return None
        count = (targets != -1).sum().item()
        with autocast:
            logits, loss = model(ids, targets, return_logits=scored_from is not None)
        if count:
            sums[0], sums[1] = sums[0] + loss.item() * count, sums[1] + count
        if scored_from is not None:
            answers = targets[:, scored_from:]
            hits = ((logits[:, scored_from:].argmax(-1) == answers) & (answers != -1)).sum(-1)  # (rows,)
            lengths = (answers != -1).sum(-1)
            sums[2], sums[3] = sums[2] + hits.sum().item(), sums[3] + lengths.sum().item()
            sums[4] += ((hits == lengths) & (lengths > 0)).sum().item()
        del logits, loss  # with them goes the graph, before the next pass makes its own
    nats, tokens, right, scored, exact = world.sum(*sums)
    result = {"loss": nats / tokens}
    return result | ({"accuracy": right / scored, "exact_match": exact / len(windows)} if scored else {})
