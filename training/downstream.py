"""Evaluate the model on tasks of lm-evaluation-harness during training, as eval.py does.

lm-eval is imported only if the key eval_tasks names a task.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from data.tokenizer import Tokenizer
from training.config import TrainConfig
from training.validation import evaluation_mode
from utils.processes import World

if TYPE_CHECKING:
    from evaluation.tasks import LoadedTask

DEFAULT_BATCH_SIZES = {"cuda": 512, "cpu": 64}  # requests per forward pass, as in eval.py


class StoppedError(Exception):
    """A stop was requested during an evaluation."""


def load_tasks(config: TrainConfig, world: World) -> "list[LoadedTask]":
    """Load the tasks of a run. Every rank must call it.

    Raises:
        ValueError: there is no such task or folder, or a task cannot be loaded
    """
    if config.eval_tasks is None:
        return []
    from evaluation import tasks

    names = [name for name in config.eval_tasks.replace(" ", "").split(",") if name]
    if not names:
        raise ValueError(f"eval_tasks={config.eval_tasks} names no task; omit it")
    loaded_tasks, messages = tasks.load_tasks(
        list(dict.fromkeys(names)),
        config.eval_tasks_path,
        world,
        keys=("eval_tasks", "eval_tasks_path"),
    )
    if messages:
        raise ValueError(f"eval_tasks: {messages[0]}")
    for task in loaded_tasks:
        tasks.set_num_shots(task, 0)
    return loaded_tasks


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Tokenizer,
    loaded_tasks: "list[LoadedTask]",
    world: World,
    autocast: AbstractContextManager,
    *,
    limit: int | None,
    should_stop: Callable[[], object],
) -> dict[str, dict[str, float]] | None:
    """Evaluate a model on tasks. Every rank must call it.

    Ranks share the requests. With FSDP each of them computes all requests, because they gather the
    parameters of a block together and would have to make the same number of passes.

    Args:
        limit: number of items of each task; None for all
        should_stop: polled before every batch; if it is true on any rank, all ranks stop

    Returns:
        For each task {metric: value}, the metric that eval.py's tables show, in the same unit; None
        if should_stop() was true.

    Raises:
        ValueError: a task has a request that the model cannot answer
    """
    from evaluation import tasks
    from evaluation.language_model import LanguageModel

    class StoppableLanguageModel(LanguageModel):
        def show_progress(self, batches: list, disable_tqdm: bool) -> Iterator[list]:
            batches_of_rank = iter(super().show_progress(batches, disable_tqdm))
            # ranks poll together, also those with one batch less
            for _ in range(math.ceil(len(batches) / self.world.world_size)):
                [num_stop_requests] = world.sum(float(bool(should_stop())))
                if num_stop_requests:
                    raise StoppedError
                batch = next(batches_of_rank, None)
                if batch is not None:
                    yield batch

    request_world = world
    if isinstance(model, FSDPModule):
        request_world = World(0, 1, world.device)
    language_model = StoppableLanguageModel(
        model,
        tokenizer,
        request_world,
        DEFAULT_BATCH_SIZES[world.device.type],
        autocast=autocast,
    )
    language_model.hide_progress = True
    evaluator = tasks.import_lm_eval().evaluator
    values: dict[str, dict[str, float]] = {}
    # compiled blocks would be compiled again for each length of a batch
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        for task in loaded_tasks:
            try:
                results = evaluator.evaluate(
                    lm=language_model, task_dict=task.content, limit=limit, bootstrap_iters=0
                )
            except StoppedError:
                return None
            except ValueError as error:
                raise ValueError(f"eval_tasks: task {task.name}: {error}") from error
            for name, metric in tasks.choose_metrics(task, results["results"]).items():
                values[name] = {metric.name: metric.value}
    return values
