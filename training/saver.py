"""Save checkpoints of a run, with several writers and in the background."""

import sys
import threading
import time
from pathlib import Path

import torch

from training import checkpoint, sharded_checkpoint, stopping, timeouts
from training.config import TrainConfig
from training.distributed import World
from training.peers import GroupPeers, Peers
from training.sharded_checkpoint import CheckpointShard
from utils import machine


class CheckpointSaver:
    """Save the checkpoints of a run, one at a time. All ranks must call its methods together.

    With save_in_background, training stands still only while each writer copies what it writes to
    the host's memory. A thread of each writer then writes, flushes and hashes its files, and that
    of the main process gives the checkpoint its name when all writers have finished. A kill before
    that leaves a temporary folder, which the next save removes, and the earlier checkpoints.
    """

    def __init__(self, config: TrainConfig, world: World, stop: stopping.Stop):
        """Form the group of writers. Every rank must call it."""
        self.config = config
        self.world = world
        self.stop = stop
        self.in_background = config.save_in_background
        if self.in_background is None:
            self.in_background = world.device.type == "cuda"
        self.writer_ranks = sharded_checkpoint.choose_writers(
            config.checkpoint_writers or machine.num_machines(),
            world.world_size,
            config.shard_size if config.engine == "fsdp" else None,
        )
        self.writers = Peers()
        if len(self.writer_ranks) > 1:
            self.writers = GroupPeers(self.writer_ranks, timeouts.PATIENT_TIMEOUT)
        self.thread: threading.Thread | None = None
        self.thread_error: Exception | None = None  # a bug, or another rank that died
        # only the main process knows whether all writers have succeeded
        self.last_save_succeeded = not world.is_main

    def save(
        self,
        run_folder: Path,
        step: int,
        model_tensors: dict[str, torch.Tensor],
        optimizer_tensors: dict[str, torch.Tensor],
        state: dict,
        tokenizer_json: dict,
    ) -> None:
        """Save a checkpoint, or start to. `wait` returns whether it was saved.

        Args:
            model_tensors, optimizer_tensors: of this rank, as DTensors if they are sharded
            state: for state.json; only that of the main process is used
        """
        # the copies of two checkpoints might not fit into memory
        self.wait()
        save_start = time.perf_counter()
        rank = self.world.rank
        shards = [
            sharded_checkpoint.gather_shard(
                kind, tensors, self.writer_ranks, rank, copy=self.in_background
            )
            for kind, tensors in (("model", model_tensors), ("optimizer", optimizer_tensors))
        ]
        if rank not in self.writer_ranks:
            return
        path = checkpoint.name_folder(run_folder, step)
        if not self.in_background:
            self.write(path, shards, state, tokenizer_json, save_start)
            return
        # a stop would first have to wait for this save, and then save again
        self.stop.save_seconds *= 2
        # not a daemon, so that the process does not exit before the checkpoint is complete
        self.thread = threading.Thread(
            target=self.write_in_thread,
            args=(path, shards, state, tokenizer_json, save_start),
            name="checkpoint",
        )
        self.thread.start()

    def wait(self) -> bool:
        """Wait for the save in the background.

        Returns:
            On the main process, whether the last checkpoint was saved; True on the other ranks.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.thread_error is not None:
            raise self.thread_error
        return self.last_save_succeeded

    def write_in_thread(self, *arguments) -> None:
        """Call `write` and keep its error, which `wait` raises."""
        try:
            self.write(*arguments)
        except Exception as error:
            self.thread_error = error

    def write(
        self,
        path: Path,
        shards: list[CheckpointShard],
        state: dict,
        tokenizer_json: dict,
        save_start: float,
    ) -> None:
        """Write the shards of this rank; the main process completes and reports the checkpoint."""
        failure = None
        try:
            checkpoint.write(path, shards, state, tokenizer_json, self.writers)
        except OSError as error:
            failure = error
        if not self.world.is_main:
            return
        # how early a run with max_seconds must stop
        self.stop.save_seconds = time.perf_counter() - save_start
        self.last_save_succeeded = failure is None
        # each line is written at once, because the training loop may print at the same time
        if failure is not None:
            print(
                f"warning: could not save the checkpoint of step {checkpoint.get_step(path)} "
                f"({failure}); the previous one is kept\n",
                end="",
                file=sys.stderr,
            )
            return
        print(f"saved {path}\n", end="", flush=True)
        run_folder = path.parent.parent
        checkpoint.remove_old(run_folder, self.config.keep_last, self.config.keep_every)
