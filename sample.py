"""Text from a trained model, streamed as it is made.

    python sample.py runs/demo_cpu --prompt="def " --num_samples=3 --temperature=0.8 --top_p=0.95
    python sample.py runs/demo_cpu --prompt=FILE:prompt.txt
    cat prompt.txt | python sample.py runs/demo_cpu --prompt=-

The run is a run folder (its newest checkpoint) or one checkpoint folder. The speed is printed at the end, on stderr.
"""

import argparse
import codecs
import signal
import sys
import time
from pathlib import Path

import torch

import configurator
from data.tokenizer import encode_prompt
from model import kernels
from model.decoding import Decoder
from training.checkpoint import load_model
from training.distributed import can_compile, pick_device


def next_token(logits, temperature: float, top_k: int | None, top_p: float, generator) -> int:
    """Draw from logits (vocab,): temperature 0 takes the likeliest; top_k and top_p keep the likeliest tokens only."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    values, tokens = probabilities.sort(descending=True, stable=True)
    if top_k is not None:
        values = values[:top_k]
    # The smallest set that reaches top_p: a token stays while the mass before it is below top_p.
    values = values[(values.cumsum(0) - values) < top_p * values.sum()]
    return int(tokens[torch.multinomial(values, 1, generator=generator)])


def generate(decoder: Decoder, prompt: list[int], max_new_tokens: int, draw, stop: int | None = None):
    """Yield new token ids, one by one, until `stop` or max_new_tokens; `draw` maps logits (vocab,) to a token id.

    Past the decoder's length the oldest half of the context is dropped and the rest read anew.
    """
    length, device = decoder.cache.length, decoder.token.device
    context, anew = prompt[-length:], True
    for _ in range(max_new_tokens):
        if len(context) > length:
            context, anew = context[-max(length // 2, 1) :], True
        if anew:
            logits, anew = decoder.prefill(torch.tensor([context], device=device)), False
        else:
            logits = decoder.step(torch.tensor(context[-1:], device=device))
        token = draw(logits[0])
        if token == stop:
            return
        yield token
        context = [*context, token]


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


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", help="run folder (its newest checkpoint) or checkpoint folder")
    parser.add_argument("--prompt", default="", help="text, FILE:path, or - for standard input")
    parser.add_argument("--num_samples", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, default=None, help="draw from the k likeliest tokens")
    parser.add_argument("--top_p", type=float, default=0.9, help="draw from the likeliest tokens of this total mass")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--compile",
        choices=("True", "False"),
        help="make the step once for all tokens: on a GPU a CUDA graph (the default there), on a CPU by torch.compile, "
        "which takes seconds (default: False)",
    )
    return parser.parse_args()


def make_decoder(model, device: torch.device, compiled: str | None, length: int) -> Decoder:
    """A decoder of one text of at most `length` tokens, as --compile says. ValueError: there is no compiler."""
    if compiled == "True" and not can_compile(device):
        raise ValueError("--compile=True needs a C++ compiler and Python's headers: give --compile=False")
    kernels.use(model, "auto", device)
    on = device.type == "cuda" if compiled is None else compiled == "True"
    return Decoder(model, 1, min(length, model.config.block_size), on)


def check(args) -> None:
    for name, value, fits, fix in (
        ("num_samples", args.num_samples, args.num_samples >= 1, "1 or more"),
        ("seed", args.seed, 0 <= args.seed < 2**63, "0 or more, below 2^63"),
        ("max_new_tokens", args.max_new_tokens, args.max_new_tokens >= 1, "1 or more"),
        ("temperature", args.temperature, 0 <= args.temperature < float("inf"), "0 or more"),
        ("top_k", args.top_k, args.top_k is None or args.top_k >= 1, "1 or more"),
        ("top_p", args.top_p, 0 < args.top_p <= 1, "a number above 0, at most 1"),
    ):
        if not fits:
            raise ValueError(f"--{name}={value}: give {fix}")


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the script, as any other
    args = arguments()
    with configurator.one_line_errors():
        check(args)
        device = pick_device(args.device)
        text = read_prompt(args.prompt)
        model, tokenizer, _ = load_model(args.run, device)
        prompt = encode_prompt(tokenizer, text)
        decoder = make_decoder(model, device, args.compile, len(prompt) + args.max_new_tokens)
    generator = torch.Generator(device).manual_seed(args.seed)
    # The embedding has more rows than the tokenizer has tokens; the rest is never drawn.
    vocabulary = tokenizer.n_vocab

    def draw(logits):
        return next_token(logits[:vocabulary], args.temperature, args.top_k, args.top_p, generator)

    made, started = 0, time.perf_counter()
    for index in range(args.num_samples):
        if index:
            print("\n" + "-" * 80)
        # A token may end inside a character: what is incomplete is held back.
        characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        print(text, end="", flush=True)
        for token in generate(decoder, prompt, args.max_new_tokens, draw, stop=tokenizer.eot_token):
            made += 1
            print(characters.decode(tokenizer.decode_single_token_bytes(token)), end="", flush=True)
        print(characters.decode(b"", final=True), flush=True)
    seconds = time.perf_counter() - started
    print(f"{made} tokens in {seconds:.2f} s, {made / seconds:,.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
