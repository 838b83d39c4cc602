"""Prompts and texts in a terminal: `sample.py RUN --interactive`."""

import contextlib
import dataclasses
import sys
import time
from dataclasses import dataclass

import configurator
from data.tokenizer import encode_prompt
from model.decoding import Decoder
from model.generation import Sampling, generate_text
from model.options import collect_options, option

HELP = """A line is a prompt, which the model continues; a line that ends in \\ goes on in the next.
An empty line lets the last text go on. Ctrl-C ends a text, Ctrl-D or /quit the program.
/KEY=VALUE sets one of these, /help shows them; what begins with // is a prompt:"""


@dataclass(frozen=True)
class Settings(Sampling):
    """What /KEY=VALUE can set."""

    max_new_tokens: int = option(
        300,
        "most tokens of a text",
    )
    seed: int = option(
        0,
        "the next text's; it grows by one with each text",
    )
    stop: str | None = option(
        None,
        "end a text before this string; \\n is a line break",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.stop == "":
            what = "an empty stop string would stop every text at once"
            raise ValueError(f"{what}: /stop=None for none")
        if self.max_new_tokens < 1 or not 0 <= self.seed < 2**62:
            what = f"max_new_tokens={self.max_new_tokens}, seed={self.seed}"
            raise ValueError(f"{what}: give 1 or more, 0 or more")

    def help(self) -> str:
        schema = collect_options(Settings)
        lines = [f"  /{k}={value}".ljust(30) + schema[k].help for k, value in vars(self).items()]
        return "\n".join([HELP, *lines])

    def changed(self, command: str) -> "Settings":
        """After /KEY=VALUE. ValueError: an unknown key, or a value that does not fit."""
        key, equals, value = command.partition("=")
        if not equals:
            raise ValueError(f"/{command} is no command: /KEY=VALUE, /help and /quit are")
        schema = collect_options(Settings)
        configurator.check_names([key], schema, prefix="/")
        return dataclasses.replace(self, **{key: configurator.parse(schema[key], value)})


def read_line() -> str | None:
    """The next prompt, None at the end of the input. Without a terminal no prompt sign is shown."""
    lines = []
    with contextlib.suppress(EOFError):
        while not lines or lines[-1].endswith("\\"):
            lines.append(input((">>> ", "... ")[bool(lines)] if sys.stdin.isatty() else ""))
    return "\n".join(line.removesuffix("\\") for line in lines) if lines else None


def reply(decoder: Decoder, tokenizer, text: str, settings: Settings) -> str:
    """Print what follows the text, as it is made, and the speed on stderr; returns it.

    Ctrl-C ends it.
    """
    reply, made, started = "", 0, time.perf_counter()
    stop = [] if settings.stop is None else [settings.stop.replace("\\n", "\n")]
    options = settings.max_new_tokens, settings, [settings.seed], stop
    prompts = [encode_prompt(tokenizer, text)]
    with contextlib.suppress(KeyboardInterrupt):
        for _, piece, new in generate_text(decoder, tokenizer, prompts, *options):
            reply += piece or ""
            made += new
            print(piece or "", end="", flush=True)
    seconds = time.perf_counter() - started
    print(flush=True)
    print(f"{made} tokens, {made / seconds:,.1f} tokens/s", file=sys.stderr, flush=True)
    return reply


def converse(decoder: Decoder, tokenizer, args, sampling: Sampling) -> None:
    """Answer prompts until the input ends; args: sample.py's."""
    rest = args.max_new_tokens, args.seed, args.stop[0] if args.stop else None
    settings, text = Settings(*vars(sampling).values(), *rest), ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() then has a history and arrow keys)
        print(settings.help())
    while True:
        try:
            line = read_line()
            if line in (None, "/quit"):
                return
            if line == "/help":
                print(settings.help())
            elif line.startswith("/") and not line.startswith("//"):
                settings = settings.changed(line[1:])
            else:
                text = line or text
                print(text, end="", flush=True)
                text += reply(decoder, tokenizer, text, settings)
                settings = dataclasses.replace(settings, seed=settings.seed + 1)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print()
