"""Speed of the data pipeline: documents to shards against tiktoken alone, and shards to batches."""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.step import BASELINE, Contender
from data.loader import TrainBatches, prefetched
from data.shards import read_shard, write_shard
from data.sources import Files
from data.token_reader import START, TokenReader
from data.tokenizer import gpt2_tokenizer
from model import build
from training import distributed
from training.metrics import size
from training.provenance import provenance

SHARD_TOKENS = 100_000_000


def texts_of(megabytes: float, source: list[str]) -> list[str]:
    """Texts of files and folders, as many as asked for."""
    texts, size = [], 0
    for batch in Files(source, suffixes=(".py", ".txt", ".md", ".rst")).read():
        texts += batch.texts
        size += sum(map(len, batch.texts))
        if size > megabytes * 1e6:
            break
    return texts


def write_parquet(folder: Path, texts: list[str], files: int = 4) -> None:
    """Texts in FineWeb-Edu's layout: rows with `text` and `id`, 1,000 to a row group."""
    import pyarrow
    import pyarrow.parquet

    share = -(-len(texts) // files)
    for index in range(files):
        rows = texts[index * share : (index + 1) * share]
        table = pyarrow.table({"text": rows, "id": [str(row) for row in range(len(rows))]})
        pyarrow.parquet.write_table(table, folder / f"{index:03d}.parquet", row_group_size=1000)


def tokenisation(encoding, texts: list[str], folder: Path, workers: int, rounds: int) -> tuple[dict, list]:
    """tiktoken alone on texts in memory, and parquet files to shards on the disk, in turns; and the shards."""
    plan_source = Files([f"{folder}/*.parquet"])
    seconds = {"tiktoken": [], "prepare": []}
    for number in range(rounds):
        started = time.perf_counter()
        count = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=workers)))
        seconds["tiktoken"].append(time.perf_counter() - started)
        started = time.perf_counter()
        reader = TokenReader(plan_source, encoding, workers, START)
        shards = []
        while (tokens := reader.take(SHARD_TOKENS)[0]).size:
            write_shard(folder / f"bench_train_{len(shards):06d}.bin", tokens)
            shards.append(read_shard(folder / f"bench_train_{len(shards):06d}.bin"))
        seconds["prepare"].append(time.perf_counter() - started)
        print(f"round {number + 1}: {seconds['tiktoken'][-1]:.1f} s and {seconds['prepare'][-1]:.1f} s", flush=True)
    assert sum(map(len, shards)) == count + len(texts)  # one end-of-text a document
    ratios = sorted(alone / whole for alone, whole in zip(*seconds.values()))
    rates = {f"{name}_tokens_per_second": count / statistics.median(times) for name, times in seconds.items()}
    row = {"tokens": count, "megabytes": sum(len(t.encode()) for t in texts) / 1e6, "workers": workers, **rates}
    return row | {"ratio": statistics.median(ratios), "ratio_worst": ratios[0]}, shards


def peak_memory(folder: Path, workers: int) -> int:
    """Largest resident memory, in bytes, of a process (it has no children) that prepares the parquet files."""
    code = (
        "import sys; sys.argv[0] = 'prepare.py'; from data.fineweb_edu import prepare\n"
        f"sys.argv[1:] = ['--source={folder}/*.parquet', '--out={folder}/out', '--workers={workers}']\n"
        "sys.argv += ['--val_tokens=1000']; prepare.main()\n"
        # Not getrusage, whose figure is inherited from the process that started this one.
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"the preparation failed: {result.stderr.strip()}")
    return 1024 * int(result.stdout.split()[-1])


def loading(shards: list, seq_len: int, rows: int, seconds: float) -> float:
    """Tokens/s of training batches from the shards, as a training loop receives them."""
    batches = TrainBatches(shards, seq_len, rows, 0)
    served = prefetched(lambda step: batches.get(step, 0, rows), itertools.count(), torch.device("cpu"))
    for _ in range(10):
        next(served)
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        next(served)
        count += rows * seq_len
    return count / elapsed


def loading_share(shards: list, vocab_size: int, rounds: int) -> dict:
    """What loading adds to a CPU training step of the demo's size, three ways, the last the surest on a busy machine.

    Seconds of a step with loaded batches over those with one batch kept, in turns; the share of a step in which it
    waits for its batch; and the processor time that making a batch takes, as a share of a step.
    """
    size = {"vocab_size": vocab_size, "block_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    size |= {"head_dim": 32, "hidden_size": 128}
    batches, making = TrainBatches(shards, 256, 8, 0), []

    def make(step):
        started = time.thread_time()
        result = batches.get(step, 0, 8)
        making.append(time.thread_time() - started)
        return result

    kept, ratios, waits, seconds = batches.get(0, 0, 8), [], [], []
    compiled = distributed.can_compile()
    model = build(BASELINE, **size)
    step = Contender(BASELINE, model, lambda: batch, torch.device("cpu"), torch.bfloat16, compiled).train
    batch, served = kept, prefetched(make, itertools.count(), torch.device("cpu"))
    for _ in range(5):
        step()
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        between = time.perf_counter()
        batch = next(served)
        arrived = time.perf_counter()
        step()
        seconds.append(between - started)
        waits.append(arrived - between)
        ratios.append((time.perf_counter() - between) / seconds[-1])
        batch = kept
    ratios.sort()
    row = {"step_ratio": statistics.median(ratios)}
    row |= {"step_ratio_p25": ratios[len(ratios) // 4], "step_ratio_p75": ratios[-1 - len(ratios) // 4]}
    row |= {"step_seconds": statistics.median(seconds)}
    row |= {"waiting_share": statistics.median(waits) / row["step_seconds"]}
    return row | {"making_share": statistics.fmean(making) / row["step_seconds"]}


def run(args) -> None:
    """Print and store the figures of `bench.py data`."""
    encoding, texts = gpt2_tokenizer(), texts_of(args.megabytes, args.source)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_parquet(folder, texts)
        row, shards = tokenisation(encoding, texts, folder, args.workers, args.rounds)
        del texts
        row["peak_memory_bytes"] = peak_memory(folder, args.workers)
        row["loader_tokens_per_second"] = loading(shards, args.block_size, 16, seconds=5)
        row |= loading_share(shards, encoding.n_vocab, args.steps)
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "rows": [row]}, indent=1) + "\n", encoding="utf-8")
    spread = f"{row['step_ratio_p25']:.3f} to {row['step_ratio_p75']:.3f}"
    print(
        f"{encoding.name}, {row['megabytes']:.0f} MB, {row['workers']} threads: parquet to shards "
        f"{row['prepare_tokens_per_second']:,.0f} tokens/s, {row['ratio']:.3f} (worst round {row['ratio_worst']:.3f}) "
        f"of tiktoken's encode_ordinary_batch alone; peak memory {size(row['peak_memory_bytes'])}\n"
        f"loader: {row['loader_tokens_per_second']:,.0f} tokens/s at {args.block_size} tokens a sequence; a step "
        f"with it takes {row['step_ratio']:.3f} ({spread}) of one without; waiting for the batch takes "
        f"{row['waiting_share']:.3%} of a step, making it {row['making_share']:.3%}"
    )
