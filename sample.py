"""Generate text from a trained model and print it as it is generated.

    python sample.py runs/demo_cpu --prompt="def " --num_samples=3 --temperature=0.8 --top_p=0.95
    python sample.py runs/demo_cpu --prompt="class A" --prompt=FILE:prompt.txt --stop="\\n\\n"
    cat prompt.txt | python sample.py runs/demo_cpu --prompt=-
    python sample.py runs/demo_cpu --serve            # write prompts on a web page

Prompts and samples are generated together, in batches of up to --batch_size sequences. Samples do
not depend on the batch they are generated in. The generation speed is printed on stderr.
"""

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Literal

import torch

import model_folder
from configurator import argument, option, read_command_line
from data.tokenizer import Tokenizer, encode_prompt
from model import kernels
from model.decoding import Decoder, round_matrices
from model.generation import Piece, Sampling, generate_text
from model.gpt import GPT
from utils import errors, files, machine
from utils.processes import get_compute_dtype, pick_device

RULE = "-" * 80
# Multiply-adds of a decoding step on a CPU for each thread. At every operation the threads wait for
# each other: on an idle machine, a step with 12M parameters took 14 ms with one thread and 21 with two,
# one with 88M 55 and 54. Beside other work, two threads are up to 10 times slower.
WORK_PER_THREAD = 30_000_000


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
    compile: Literal["auto", True, False] = option(
        "auto",
        "capture the decoding step as a CUDA graph on a GPU, or compile it with torch.compile on a "
        "CPU, which saves time in long texts; auto does so on a GPU only; the web page does not, "
        "because it records statistics of the residual stream",
    )


@dataclass(frozen=True)
class PageOptions:
    """The web page"""

    serve: bool = option(
        False,
        "serve a web page where you can enter prompts (needs the packages fastapi and uvicorn)",
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


def make_decoder(
    model: GPT, device: torch.device, args: SimpleNamespace, batch_size: int, length: int
) -> Decoder:
    """Return a decoder for sequences of up to `length` tokens, or up to block_size if that is less.

    Raises:
        ValueError: --compile=True without a C++ compiler
    """
    if args.compile is True and not machine.can_compile(device.type):
        raise ValueError(
            "--compile=True needs a C++ compiler and Python's header files; install them, or give "
            "--compile=False"
        )
    compiled = args.compile
    if compiled == "auto":
        compiled = device.type == "cuda"
    if compiled and device.type == "cpu":
        print("compiling: the first token takes up to a minute or two", file=sys.stderr, flush=True)
    return Decoder(
        model,
        batch_size=batch_size,
        length=min(length, model.config.block_size),
        compiled=compiled,
    )


def choose_num_threads(num_parameters: int, batch_size: int) -> int:
    """Return how many threads decode a token of each sequence on a CPU, at most torch's default."""
    work = num_parameters * batch_size
    return max(min(torch.get_num_threads(), work // WORK_PER_THREAD), 1)


def sample(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[str],
    args: SimpleNamespace,
    sampling: Sampling,
    device: torch.device,
) -> None:
    """Generate and print args.num_samples samples of each prompt."""
    ids_of_prompt = {prompt: encode_prompt(tokenizer, prompt) for prompt in prompts}
    longest_prompt = max(len(ids) for ids in ids_of_prompt.values())
    if longest_prompt > model.config.block_size:
        print(
            f"note: the longest prompt has {longest_prompt} tokens, of which the model reads the "
            f"last {model.config.block_size} (block_size)",
            file=sys.stderr,
            flush=True,
        )
    # a sample depends on its prompt and seed alone, so batches may mix prompts
    jobs = [(prompt, args.seed + index) for prompt in prompts for index in range(args.num_samples)]
    batch_size = min(len(jobs), args.batch_size)
    # one decoder serves all batches, because it may take seconds to compile
    decoder = make_decoder(
        model, device, args, batch_size, length=longest_prompt + args.max_new_tokens
    )
    num_tokens = 0
    started = time.perf_counter()
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        batch_prompts = [prompt for prompt, _ in batch]
        pieces = generate_text(
            decoder,
            tokenizer,
            prompts=[ids_of_prompt[prompt] for prompt in batch_prompts],
            max_new_tokens=args.max_new_tokens,
            sampling=sampling,
            seeds=[seed for _, seed in batch],
            stop=args.stop,
        )
        if first > 0:
            print(RULE)
        num_tokens += print_samples(batch_prompts, pieces)
    seconds = time.perf_counter() - started
    print(
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:,.1f} tokens/s",
        file=sys.stderr,
    )


def print_samples(prompts: list[str], pieces: Iterable[Piece]) -> int:
    """Print each prompt with its continuation, in the order of the prompts.

    All samples of a batch grow at the same time, but only one can be printed at a time. The pieces
    of the others are held back until it is their turn.

    Args:
        pieces: what `generate_text` yields

    Returns:
        the number of generated tokens
    """
    held_back = [[prompt] for prompt in prompts]
    finished = set()
    printing = 0  # the row that is being printed
    num_tokens = 0
    for row, piece, num_new_tokens in pieces:
        num_tokens += num_new_tokens
        if piece is None:
            finished.add(row)
        else:
            held_back[row].append(piece)
        while printing < len(prompts):
            print("".join(held_back[printing]), end="", flush=True)
            held_back[printing].clear()
            if printing not in finished:
                break
            printing += 1
            print(f"\n{RULE}" if printing < len(prompts) else "", flush=True)
    return num_tokens


def main() -> None:
    errors.end_quietly_on_closed_pipe()
    with errors.one_line_errors(out_of_memory_advice="give a smaller --batch_size"):
        args = read_options()
        sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})
        device = pick_device(args.device)
        prompts = [files.read_text_argument(text) for text in args.prompt or [""]]
        model, tokenizer, state = model_folder.load_model(args.run, device)
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # --serve has one prompt and one sample
            batch_size = min(len(prompts) * args.num_samples, args.batch_size)
            torch.set_num_threads(choose_num_threads(model.num_parameters(), batch_size))
        kernels.use(model, "auto", device)
        dtype = get_compute_dtype(args.dtype, device)
        # autocast would otherwise round the same weights again at every token
        if dtype != torch.float32:
            round_matrices(model, dtype)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if not args.serve:
                sample(model, tokenizer, prompts, args, sampling, device)
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
