"""Text from a trained model, streamed as it is made.

    python sample.py runs/demo_cpu --prompt="def " --num_samples=3 --temperature=0.8 --top_p=0.95
    python sample.py runs/demo_cpu --prompt="def " --prompt="class A" --prompt=FILE:prompt.txt --stop="\\n\\n"
    cat prompt.txt | python sample.py runs/demo_cpu --prompt=-
    python sample.py runs/demo_cpu --interactive
    python sample.py runs/demo_cpu --serve            # a page in the browser

The run is a run folder (its newest checkpoint), one checkpoint folder, or a folder made by
export.py. Several prompts and samples are generated together, up to --batch_size; a text is the
same whatever it shares its batch with. The speed is printed at the end, on stderr.
"""

import signal
import sys
import time
from pathlib import Path

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import torch

from data.tokenizer import encode_prompt
from model import kernels
from model.decoding import Decoder, round_matrices
from model.generation import Sampling, generate_text
from training.checkpoint import load_model
from training.distributed import can_compile, computes_in_bfloat16, pick_device

RULE = "-" * 80
LABELLED = (
    "note: this model was trained on labels: the first token that it writes is the answer at the "
    "prompt's last one, what follows means nothing: give --max_new_tokens=1 --temperature=0"
)


def arguments():
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add("run", help="run folder (its newest checkpoint), checkpoint folder or exported folder")
    add("--prompt", action="append", help="text, FILE:path, or - for stdin; may be repeated")
    add("--num_samples", type=int, default=1, help="texts for each prompt")
    add("--max_new_tokens", type=int, default=300)
    add("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    add("--top_k", type=int, help="draw from the k likeliest tokens")
    add("--top_p", type=float, default=0.9, help="draw from the likeliest tokens of this mass")
    add("--min_p", type=float, default=0.0, help="and of this share of the likeliest one's")
    add("--repetition_penalty", type=float, default=1.0, help="above 1: fewer repetitions")
    stop = r"end a text before this string; \n is a line break; may be repeated"
    add("--stop", action="append", default=[], help=stop)
    add("--seed", type=int, default=0, help="of the first sample; sample i has seed + i")
    add("--batch_size", type=int, default=16, help="most texts that are generated together")
    add("--interactive", action="store_true", help="prompts from the terminal, one by one")
    add("--serve", action="store_true", help="a page in the browser (needs fastapi, uvicorn)")
    add("--host", default="127.0.0.1", help="--serve: address to listen on; this machine alone")
    add("--port", type=int, default=8000, help="--serve: port to listen on")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", choices=dtypes, default="auto", help="of computing; auto: bfloat16 on a GPU")
    compiled = (
        "make the step once for all tokens: on a GPU a CUDA graph (the default there), on a CPU "
        "by torch.compile, which takes seconds (default: False)"
    )
    add("--compile", choices=("True", "False"), help=compiled)
    return parser.parse_args()


def check(args) -> Sampling:
    """How tokens are drawn. ValueError: an option out of range, or against another."""
    for name, fits, fix in (
        ("num_samples", args.num_samples >= 1, "1 or more"),
        ("batch_size", args.batch_size >= 1, "1 or more"),
        ("seed", 0 <= args.seed < 2**62, "0 or more, below 2^62"),
        ("max_new_tokens", args.max_new_tokens >= 1, "1 or more"),
        ("port", 0 <= args.port < 2**16, "0 (any free one) to 65535"),
        ("stop", "" not in args.stop, "a text of one character or more"),
    ):
        if not fits:
            raise ValueError(f"--{name}={getattr(args, name)}: give {fix}")
    if args.serve + args.interactive + bool(args.prompt) > 1:
        raise ValueError("--serve, --interactive and --prompt: give one of them")
    if (args.serve or args.interactive) and args.num_samples > 1:
        at_a_time = "--serve and --interactive make one text at a time"
        raise ValueError(f"--num_samples={args.num_samples}: {at_a_time}")
    if args.serve and args.compile == "True":
        why = "--serve, which looks at every gate"
        raise ValueError(f"--compile=True has no effect with {why}: leave it out")
    if args.interactive and len(args.stop) > 1:
        raise ValueError("--interactive takes one --stop: leave the others out")
    args.stop = [text.replace("\\n", "\n") for text in args.stop]
    return Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)


def read_prompt(argument: str) -> str:
    """The text itself, of FILE:path, or of standard input for `-`. ValueError: not UTF-8."""
    try:
        if argument == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        if argument.startswith("FILE:"):
            return Path(argument[5:]).read_bytes().decode("utf-8")
        return argument.encode("utf-8").decode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text ({error}): convert it first") from error


def make_decoder(model, device: torch.device, args, rows: int, length: int) -> Decoder:
    """A decoder of texts of at most `length` tokens. ValueError: there is no compiler."""
    if args.compile == "True" and not can_compile(device):
        needed = "a C++ compiler and Python's headers"
        raise ValueError(f"--compile=True needs {needed}: give --compile=False")
    on = device.type == "cuda" if args.compile is None else args.compile == "True"
    return Decoder(model, rows, min(length, model.config.block_size), on)


def sample(model, tokenizer, prompts: list[str], args, sampling, device: torch.device) -> None:
    """Print args.num_samples texts for each prompt."""
    tokens = {prompt: encode_prompt(tokenizer, prompt) for prompt in prompts}
    longest, block_size = max(map(len, tokens.values())), model.config.block_size
    if longest > block_size:
        note = f"of a prompt's {longest} tokens the model reads the last {block_size}"
        print(f"note: {note}", file=sys.stderr)
    jobs = [(text, args.seed + index) for text in prompts for index in range(args.num_samples)]
    rows = min(len(jobs), args.batch_size)
    decoder = make_decoder(model, device, args, rows, longest + args.max_new_tokens)
    made, started = 0, time.perf_counter()
    for first in range(0, len(jobs), rows):
        texts, seeds = map(list, zip(*jobs[first : first + rows]))
        ids = [tokens[text] for text in texts]
        pieces = generate_text(
            decoder, tokenizer, ids, args.max_new_tokens, sampling, seeds, args.stop
        )
        if first:
            print(RULE)
        made += show(texts, pieces)
    seconds = time.perf_counter() - started
    print(f"{made} tokens in {seconds:.2f} s, {made / seconds:,.1f} tokens/s", file=sys.stderr)


def show(texts: list[str], pieces) -> int:
    """Print texts and what follows them, in their order and as early as that allows.

    pieces: as `generate_text` yields them. Returns how many tokens they were.
    """
    waiting, ended, turn, made = [[text] for text in texts], set(), 0, 0
    for row, piece, new in pieces:
        made += new
        if piece is None:
            ended.add(row)
        else:
            waiting[row].append(piece)
        while turn < len(texts):
            print("".join(waiting[turn]), end="", flush=True)
            waiting[turn].clear()
            if turn not in ended:
                break
            turn += 1
            print(f"\n{RULE}" if turn < len(texts) else "", flush=True)
    return made


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the script, as any other
    args = arguments()
    with configurator.one_line_errors(memory="give a smaller --batch_size"):
        sampling, device = check(args), pick_device(args.device)
        prompts = [read_prompt(argument) for argument in args.prompt or [""]]
        model, tokenizer, state = load_model(args.run, device)
        if state.get("corpus", {}).get("labels"):
            for prompt in prompts:
                encode_prompt(tokenizer, prompt)  # a mistake in one comes first, and alone
            print(LABELLED, file=sys.stderr)
        kernels.use(model, "auto", device)
        bf16 = computes_in_bfloat16(args.dtype, device)
        if bf16:
            round_matrices(model)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            if args.serve:
                from serving.app import serve

                serve(model, tokenizer, state, args, sampling)
            elif args.interactive:
                from serving.terminal import converse

                decoder = make_decoder(model, device, args, 1, model.config.block_size)
                converse(decoder, tokenizer, args, sampling)
            else:
                sample(model, tokenizer, prompts, args, sampling, device)


if __name__ == "__main__":
    main()
