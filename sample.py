"""Generate text from a trained model and print it as it is generated.

    python sample.py runs/demo_cpu --prompt="def " --num_samples=3 --temperature=0.8 --top_p=0.95
    python sample.py runs/demo_cpu --prompt="class A" --prompt=FILE:prompt.txt --stop="\\n\\n"
    cat prompt.txt | python sample.py runs/demo_cpu --prompt=-
    python sample.py runs/demo_cpu --serve            # write prompts on a web page

Samples are generated together, in batches of up to --batch_size sequences. They do not depend on the
batch that they are generated in. The generation speed is printed on stderr.
"""

# ruff: noqa: E402 (one import has to wait)
import sys
import time
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Literal

from utils import machine

machine.limit_spinning()  # before torch is imported

import torch

import model_folder
from configurator import argument, option, read_command_line
from data.tokenizer import Tokenizer, encode_prompt
from model import kernels
from model.generation import Sampling, generate_text
from model.gpt import GPT
from utils import errors, files
from utils.processes import get_compute_dtype, pick_device, restored_state

RULE = "-" * 80


@dataclass(frozen=True)
class ModelOptions:
    """The model"""

    run: str = argument(
        "run folder (its latest checkpoint is used), checkpoint folder, folder exported by "
        "export.py, or model released by the paper's authors"
    )
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto",
        "device to run on; auto uses the GPU if there is one",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "compute dtype (autocast); auto is bfloat16 on a GPU and float32 on a CPU",
    )


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    """Options of `Sampling`, with another default"""

    top_p: float = option(
        0.9,
        "sample from the smallest set of most likely tokens whose total probability reaches top_p "
        "(nucleus sampling); 1 disables it",
        above=0,
        high=1,
    )


@dataclass(frozen=True)
class TextOptions:
    """What is generated"""

    prompt: tuple[str, ...] = option(
        (),
        "text to continue; FILE:PATH reads the text from a file, and - reads it from standard "
        "input; may be repeated (default: an empty prompt)",
    )
    num_samples: int = option(
        1,
        "number of samples for each prompt",
        low=1,
    )
    max_new_tokens: int = option(
        300,
        "maximum number of tokens to generate for each sample; the model reads only the last "
        "block_size tokens of a longer text",
        low=1,
    )
    stop: tuple[str, ...] = option(
        (),
        r"end a sample before this string, in which \n stands for a line break; may be repeated "
        "(default: no stop string)",
    )
    seed: int = option(
        0,
        "random seed; the samples of a prompt use seed, seed + 1, ...",
        low=0,
        high=2**62 - 1,
    )
    batch_size: int = option(
        16,
        "maximum number of sequences to generate together",
        low=1,
    )


@dataclass(frozen=True)
class PageOptions:
    """The web page"""

    serve: bool = option(
        False,
        "serve a web page where you can enter prompts (needs requirements-page.txt)",
    )
    host: str = option(
        "127.0.0.1",
        "address that the page is served on; the default can only be reached from this machine",
    )
    port: int = option(
        8000,
        "port that the page is served on; 0 chooses a free port",
        low=0,
        high=2**16 - 1,
    )


def read_options() -> SimpleNamespace:
    """Return the options of the command line, with a line break for each \\n in `stop`.

    Raises:
        ValueError: an option contradicts another one
    """
    args = read_command_line(__doc__, ModelOptions, TextOptions, SamplingOptions, PageOptions)
    if args.serve and args.prompt:
        raise ValueError("--serve and --prompt exclude each other; give only one of them")
    if "" in args.stop:
        raise ValueError("--stop is an empty string: give one character or more, or omit --stop")
    args.stop = [text.replace("\\n", "\n") for text in args.stop]
    return args


def print_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[str],
    args: SimpleNamespace,
    sampling: Sampling,
) -> None:
    """Generate and print args.num_samples samples of each prompt; one alone while it grows."""
    ids = {prompt: encode_prompt(tokenizer, prompt) for prompt in prompts}
    longest = max(map(len, ids.values()))
    if longest > model.config.block_size:
        print(
            f"note: the longest prompt has {longest} tokens, of which the model reads the last "
            f"{model.config.block_size} (block_size)",
            file=sys.stderr,
        )
    jobs = [(prompt, args.seed + index) for prompt in prompts for index in range(args.num_samples)]
    num_tokens = 0
    started = time.perf_counter()
    for first in range(0, len(jobs), args.batch_size):
        batch = jobs[first : first + args.batch_size]
        texts = [prompt for prompt, _ in batch]
        if first > 0:
            print(RULE)
        if len(batch) == 1:
            print(texts[0], end="", flush=True)
        for row, piece, num_new_tokens in generate_text(
            model,
            tokenizer,
            [ids[prompt] for prompt, _ in batch],
            args.max_new_tokens,
            sampling,
            seeds=[seed for _, seed in batch],
            stop=args.stop,
        ):
            num_tokens += num_new_tokens
            if len(batch) == 1:
                print(piece, end="", flush=True)
            texts[row] += piece
        print("" if len(batch) == 1 else f"\n{RULE}\n".join(texts), flush=True)
    seconds = time.perf_counter() - started
    speed = f"{num_tokens / seconds:,.1f} tokens/s"
    print(f"{num_tokens} tokens in {seconds:.2f} s, {speed}", file=sys.stderr)


@restored_state()
def main() -> None:
    errors.end_quietly_on_closed_pipe()
    with errors.one_line_errors(out_of_memory_advice="give a smaller --batch_size"):
        args = read_options()
        sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})
        device = pick_device(args.device)
        prompts = [files.read_text_argument(text) for text in args.prompt or [""]]
        model, tokenizer, state = model_folder.load_model(args.run, device)
        kernels.use(model, "auto", device)
        dtype = get_compute_dtype(args.dtype, device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if not args.serve:
                print_samples(model, tokenizer, prompts, args, sampling)
                return
            # imported here, because other uses do without its packages
            from serving.app import serve

            serve(
                model,
                tokenizer,
                state,
                host=args.host,
                port=args.port,
                sampling=sampling,
                max_new_tokens=args.max_new_tokens,
                stop=args.stop,
                first_seed=args.seed,
            )


if __name__ == "__main__":
    main()
