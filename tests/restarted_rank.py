"""A rank that meets the others: rank 1 dies after the first meeting, and torchrun restarts the job.

    torchrun ... restarted_rank.py FOLDER

Each start of a rank appends to FOLDER/rank_RANK the numbers of the starts that it has met.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from utils import processes

path = Path(sys.argv[1]) / f"rank_{os.environ['RANK']}"
meetings = path.read_text().splitlines() if path.exists() else []
world = processes.start(torch.device("cpu"))
starts = [None] * world.world_size
dist.all_gather_object(starts, len(meetings))
with open(path, "a") as file:
    file.write(json.dumps(starts) + "\n")
if not meetings:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a forward pass, in which nobody notices that rank 1 is dead
processes.stop(world)
