"""Generate text from a trained model and print it as it is generated.

    python sample.py runs/demo_cpu --prompt="def " --num_samples=3 --temperature=0.8 --top_p=0.95
    python sample.py runs/demo_cpu --prompt="class A" --prompt=FILE:prompt.txt --stop="\\n\\n"
    cat prompt.txt | python sample.py runs/demo_cpu --prompt=-
    python sample.py runs/demo_cpu --serve            # write prompts on a web page

Prompts and samples are generated together, in batches of up to --batch_size sequences. Samples do
not depend on the batch they are generated in. The generation speed is printed on stderr.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import torch

import configurator
from data.tokenizer import Tokenizer, encode_prompt
from model import kernels
from model.decoding import Decoder, round_matrices
from model.generation import Piece, Sampling, generate_text
from model.gpt import GPT
from training.distributed import computes_in_bfloat16, pick_device
from training.model_folder import load_model
from utils import files, machine

RULE = "-" * 80
DEFAULT_BATCH_SIZE = 16
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
# Multiply-adds of a decoding step on a CPU for each thread. At every operation the threads wait for
# each other: on an idle machine, a step with 12M parameters took 14 ms with one thread and 21 with two,
# one with 88M 55 and 54. Beside other work, two threads are up to 10 times slower.
WORK_PER_THREAD = 30_000_000
LABELS_NOTE = (
    "note: this model was trained on labels, not on text; its first new token is the answer to the "
    "last token of the prompt, and later tokens are meaningless, so give --max_new_tokens=1 "
    "--temperature=0"
)


def parse_arguments() -> argparse.Namespace:
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add(
        "run",
        help="run folder (its latest checkpoint is used), checkpoint folder, folder exported by "
        "export.py, or model released by the paper's authors",
    )
    add(
        "--prompt",
        action="append",
        help="text to continue; FILE:PATH reads the text from a file, and - reads it from standard "
        "input; may be repeated (default: an empty prompt)",
    )
    add(
        "--num_samples",
        type=int,
        default=1,
        help="number of samples for each prompt, 1 or more",
    )
    add(
        "--max_new_tokens",
        type=int,
        default=300,
        help="maximum number of tokens to generate for each sample, 1 or more; the model "
        "reads only the last block_size tokens of a longer text",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="divide the logits by this value, 0 or more; 0 always picks the most likely token",
    )
    add(
        "--top_k",
        type=int,
        help="sample from the top_k most likely tokens only, 1 or more (default: all tokens)",
    )
    add(
        "--top_p",
        type=float,
        default=0.9,
        help="sample from the smallest set of most likely tokens whose probabilities add up to "
        "top_p or more; above 0 and at most 1, where 1 keeps all tokens",
    )
    add(
        "--min_p",
        type=float,
        default=0.0,
        help="discard tokens less probable than min_p times the most likely one; 0 to 1, where 0 "
        "keeps all tokens (default: 0)",
    )
    add(
        "--repetition_penalty",
        type=float,
        default=1.0,
        help="factor that lowers the logits of tokens that already occur in the prompt or the "
        "sample; above 0, where 1 is no penalty",
    )
    add(
        "--stop",
        action="append",
        default=[],
        help=r"end a sample before this string, in which \n stands for a line break; may be "
        "repeated (default: no stop string)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="random seed, 0 or more and below 2^62; the samples of a prompt use seed, seed + 1, "
        "... (default: 0)",
    )
    add(
        "--batch_size",
        type=int,
        help="maximum number of sequences to generate together, 1 or more (default: "
        f"{DEFAULT_BATCH_SIZE})",
    )
    add(
        "--serve",
        action="store_true",
        help="serve a web page where you can enter prompts (needs the packages fastapi and "
        "uvicorn)",
    )
    add(
        "--host",
        help="address that --serve listens on; the default can only be reached from this machine "
        f"(default: {DEFAULT_HOST})",
    )
    add(
        "--port",
        type=int,
        help="port that --serve listens on, 0 to 65535; 0 chooses a free port (default: "
        f"{DEFAULT_PORT})",
    )
    add(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="device to run on; auto uses the GPU if there is one",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="compute dtype (autocast); auto is bfloat16 on a GPU and float32 on a CPU",
    )
    add(
        "--compile",
        choices=("auto", "True", "False"),
        default="auto",
        help="capture the decoding step as a CUDA graph on a GPU, or compile it with "
        "torch.compile on a CPU, which takes seconds; auto does so on a GPU, and on a CPU if "
        f"{machine.MIN_STEPS_TO_COMPILE:,} tokens or more are to be generated one after the other",
    )
    return parser.parse_args()


def check(args: argparse.Namespace) -> Sampling:
    """Check the options, and return those that say how a token is sampled.

    Line breaks take the place of \\n in args.stop, and options that only some modes take get their
    defaults.

    Raises:
        ValueError: an option is out of range, or contradicts another one
    """
    check_mode(args)
    if args.batch_size is None:
        args.batch_size = DEFAULT_BATCH_SIZE
    if args.host is None:
        args.host = DEFAULT_HOST
    if args.port is None:
        args.port = DEFAULT_PORT
    for name in ("num_samples", "batch_size", "max_new_tokens"):
        value = getattr(args, name)
        if value < 1:
            raise ValueError(f"--{name}={value}: give 1 or more")
    if not 0 <= args.seed < 2**62:
        raise ValueError(f"--seed={args.seed}: give 0 or more, below 2^62")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port={args.port}: give a port from 1 to 65535, or 0 for any free port")
    if "" in args.stop:
        raise ValueError("--stop is an empty string: give one character or more, or omit --stop")
    args.stop = [text.replace("\\n", "\n") for text in args.stop]
    return Sampling(
        repetition_penalty=args.repetition_penalty,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
    )


def check_mode(args: argparse.Namespace) -> None:
    """Raise ValueError if --serve, --host or --port contradicts another option."""
    if args.serve and args.prompt:
        raise ValueError("--serve and --prompt exclude each other; give only one of them")
    if args.serve and args.num_samples > 1:
        raise ValueError(
            f"--num_samples={args.num_samples} has no effect with --serve, which generates one "
            "sample at a time; omit it"
        )
    if args.serve and args.batch_size is not None:
        raise ValueError(
            f"--batch_size={args.batch_size} has no effect with --serve, which generates one "
            "sample at a time; omit it"
        )
    for name in ("host", "port"):
        value = getattr(args, name)
        if value is not None and not args.serve:
            raise ValueError(f"--{name}={value} has no effect without --serve; omit it")
    if args.serve and args.compile == "True":
        raise ValueError(
            "--compile=True has no effect with --serve, which records statistics of the residual "
            "stream for every token; omit it"
        )


def make_decoder(
    model: GPT,
    device: torch.device,
    args: argparse.Namespace,
    batch_size: int,
    length: int,
    num_steps: int,
) -> Decoder:
    """Return a decoder for sequences of up to `length` tokens, or up to block_size if that is less.

    num_steps: how often it will decode a token, at most; for --compile=auto

    Raises:
        ValueError: --compile=True without a C++ compiler
    """
    if args.compile == "True" and not machine.can_compile(device.type):
        raise ValueError(
            "--compile=True needs a C++ compiler and Python's header files; install them, or give "
            "--compile=False"
        )
    compiled = args.compile == "True"
    if args.compile == "auto":
        compiled = machine.compiled_decoding_pays(device.type, num_steps)
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
    args: argparse.Namespace,
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
    num_batches = -(-len(jobs) // batch_size)
    decoder = make_decoder(
        model,
        device,
        args,
        batch_size,
        length=longest_prompt + args.max_new_tokens,
        num_steps=num_batches * args.max_new_tokens,
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
    args = parse_arguments()
    with errors.one_line_errors(out_of_memory_advice="give a smaller --batch_size"):
        sampling = check(args)
        device = pick_device(args.device)
        prompts = [files.read_text_argument(argument) for argument in args.prompt or [""]]
        model, tokenizer, state = load_model(args.run, device)
        if state.get("corpus", {}).get("labels"):
            for prompt in prompts:
                encode_prompt(tokenizer, prompt)  # an error in a prompt comes before the note
            print(LABELS_NOTE, file=sys.stderr)
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # --serve has one prompt and one sample
            batch_size = min(len(prompts) * args.num_samples, args.batch_size)
            torch.set_num_threads(choose_num_threads(model.num_parameters(), batch_size))
        kernels.use(model, "auto", device)
        use_bfloat16 = computes_in_bfloat16(args.dtype, device)
        # autocast would otherwise round the same weights again at every token
        if use_bfloat16:
            round_matrices(model)
        with torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16):
            # imported here, because other uses do without these packages
            if args.serve:
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
            else:
                sample(model, tokenizer, prompts, args, sampling, device)


if __name__ == "__main__":
    main()
