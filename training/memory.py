"""What a run needs, said before it starts: parameters, least memory, tokens, FLOPs and time."""

import dataclasses

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import build, errors_as_value_errors
from training.distributed import computes_in_bfloat16
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import machine
from utils.units import format_bytes, format_duration

PROCESS = 420 * 2**20  # bytes that Python and torch take on a CPU
COMPILED = 0.28  # a compiled step keeps at least this share of an eager one's, measured on a CPU


def describe_run(config, model, sequences_per_epoch: int | None, device: torch.device) -> str:
    """Lines for `--dry_run`: parameters, memory, tokens, FLOPs, and the time on a known GPU."""
    c, sequences = model.config, config.max_steps * config.global_batch_size
    tokens, bf16 = sequences * c.block_size, computes_in_bfloat16(config.dtype, device)
    dtype = c.state_dtype if bf16 else "float32"
    state = model.state_bytes_per_token(getattr(torch, dtype))
    lines = [f"{config.model}: {model.num_parameters():,} parameters"]
    if device.type == "cpu":
        there = format_bytes(machine.available_memory())
        lines.append(f"at least {format_bytes(least_memory(config, c))} of {there} on {device}")
    lines += [
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x {c.block_size} tokens"
        f" = {tokens:,} tokens"
        + (f", {sequences / sequences_per_epoch:.2f} epochs" if sequences_per_epoch else ""),
        f"{tokens * model.flops_per_token():.3g} FLOPs, {state} bytes of {dtype} state per token",
    ]
    if peak := get_peak_flops(device):
        # MFU counts nominal FLOPs, so the time at a given utilisation follows from them.
        seconds = (
            tokens * compute_nominal_flops_per_token(model) / (0.45 * peak * machine.world_size())
        )
        lines.append(
            f"about {format_duration(seconds)} on {machine.world_size()} GPUs at 45% utilisation"
        )
    return "\n".join(lines)


MOST_BLOCKS = 256  # that are made, without memory, to count their parameters


def count_parameters(stem: str, model_config) -> int:
    """Parameters of a model, without its memory; of more blocks than that, as if each had so many
    more than the one before as the third has more than the second.
    """

    def count(layers: int) -> int:
        sized = dataclasses.replace(model_config, num_hidden_layers=layers)
        with torch.device("meta"):
            return build(stem, sized).num_parameters()

    if model_config.num_hidden_layers <= MOST_BLOCKS:
        return count(model_config.num_hidden_layers)
    (one, two, three), more = map(count, (1, 2, 3)), model_config.num_hidden_layers - 1
    return one + more * (two - one) + more * (more - 1) // 2 * (three - 2 * two + one)


def least_memory(config, model_config) -> int:
    """Bytes that one process on a CPU cannot do without in a training step.

    Weights, gradients and the optimizer's moments, and what autograd saves of the sequences of one
    forward pass: that of one block for each. ValueError: the model cannot be made.
    """
    try:
        with errors_as_value_errors(
            config.model
        ):  # the first time that a model of a user's is made
            parameters = count_parameters(config.model, model_config)
    except ValueError as error:
        if "overflow" in str(error.__cause__):
            return 2**63
        raise
    per_weight = 12 if config.optimizer == "muon" else 16  # Muon has one moment
    weights = per_weight * parameters // (machine.world_size() if config.engine == "fsdp" else 1)
    kept = 0
    if not config.activation_checkpointing:
        one, two = (bytes_saved_for_backward(config, model_config, layers) for layers in (1, 2))
        kept = one + (model_config.num_hidden_layers - 1) * (two - one)
    return (
        PROCESS
        + weights
        + int(config.local_micro_batch_size * kept * (COMPILED if config.compile else 1.0))
    )


def bytes_saved_for_backward(config, model_config, layers: int) -> int:
    """Bytes that autograd saves of one sequence in an eager pass through so many blocks.

    No tensor has data. 0 of a model that looks at the values of its tensors.
    """
    bf16, saved = computes_in_bfloat16(config.dtype, torch.device("cpu")), {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # held, so that no other gets its address
        return tensor

    sized = dataclasses.replace(model_config, num_hidden_layers=layers)
    try:
        with FakeTensorMode():
            model = build(config.model, sized)
            ids = torch.zeros(1, model_config.block_size, dtype=torch.int64)
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                model(ids, ids)
    except Exception:  # torch raises many kinds; such a model can be trained all the same
        return 0
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in weights)


def check_fits(config, model_config, device: torch.device) -> None:
    """ValueError: a run on a CPU needs more memory than there is; the message names what helps.

    A full machine kills a process without a word; a full GPU says so in one line.
    """
    if device.type != "cpu" or machine.available_memory() is None:
        return
    there, least = machine.available_memory(), least_memory(config, model_config)
    if least <= there:
        return
    one = least_memory(dataclasses.replace(config, micro_batch_size=1), model_config)
    # Memory grows by as much with every sequence.
    fits = (
        int((there - one) * (config.local_micro_batch_size - 1) / max(least - one, 1)) + 1
        if one <= there
        else 0
    )
    smaller = next((rows for rows in range(fits, 0, -1) if config.local_batch_size % rows == 0), 0)
    advice = f"give --micro_batch_size={smaller} or less" if smaller else "give a smaller model"
    if not config.activation_checkpointing:
        advice += ", or --activation_checkpointing=True"
    what = f"micro_batch_size={config.local_micro_batch_size} needs more than {format_bytes(least)}"
    raise ValueError(f"{what}, and {device} has {format_bytes(there)}: {advice}")
