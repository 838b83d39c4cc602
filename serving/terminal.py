"""Continue prompts that are typed in a terminal: `python sample.py RUN --interactive`."""

import contextlib
import dataclasses
import sys
import time
from dataclasses import dataclass

import configurator
from configurator import collect_options, option
from data.tokenizer import Tokenizer, encode_prompt
from model.decoding import Decoder
from model.generation import Sampling, generate_text, note_truncation

HELP = """Type a prompt, and the model continues it. End a line with \\ to continue on the next line.
An empty line continues the last text. Ctrl+C ends a text; Ctrl+D or /quit ends the program.
/KEY=VALUE changes one of these settings, and /help shows them. A line that begins with // is a
prompt."""


@dataclass(frozen=True)
class Settings(Sampling):
    """The settings that /KEY=VALUE changes."""

    max_new_tokens: int = option(
        300,
        "maximum number of tokens to generate",
        low=1,
    )
    seed: int = option(
        0,
        "random seed of the next text; it increases by 1 after each text",
    )
    stop: str | None = option(
        None,
        "end a text before this string, in which \\n stands for a line break",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.stop == "":
            raise ValueError(
                "an empty stop string would end every text at once; give /stop=None to have no "
                "stop string"
            )
        if not 0 <= self.seed < 2**62:
            raise ValueError(f"seed={self.seed}: give 0 or more, below 2^62")

    def format_help(self) -> str:
        """Return the help text, with the current values."""
        options = collect_options(Settings)
        lines = [
            f"  /{name}={value}".ljust(30) + options[name].help
            for name, value in vars(self).items()
        ]
        return "\n".join([HELP, *lines])

    def change(self, command: str) -> "Settings":
        """Return the settings after a command KEY=VALUE.

        Raises:
            ValueError: the key is unknown, or the value is not one of its values
        """
        key, equals, value = command.partition("=")
        if not equals:
            raise ValueError(
                f"/{command} is not a command; the commands are /KEY=VALUE, /help and /quit"
            )
        options = collect_options(Settings)
        configurator.check_names([f"/{key}"], [f"/{name}" for name in options])
        new_value = configurator.parse(options[key], value, prefix="/")
        return dataclasses.replace(self, **{key: new_value})


def read_prompt() -> str | None:
    """Read the next prompt, which may have several lines; None at the end of the input."""
    is_terminal = sys.stdin.isatty()
    lines: list[str] = []
    with contextlib.suppress(EOFError):
        while not lines or lines[-1].endswith("\\"):
            sign = "... " if lines else ">>> "
            lines.append(input(sign if is_terminal else ""))
    if not lines:
        return None
    return "\n".join(line.removesuffix("\\") for line in lines)


def generate(decoder: Decoder, tokenizer: Tokenizer, prompt: list[int], settings: Settings) -> str:
    """Print the continuation of a prompt as it is generated, and return it.

    Ctrl+C ends it. The speed is printed on stderr.
    """
    continuation = ""
    num_tokens = 0
    start = time.perf_counter()
    pieces = generate_text(
        decoder,
        tokenizer,
        prompts=[prompt],
        max_new_tokens=settings.max_new_tokens,
        sampling=settings,
        seeds=[settings.seed],
        stop=[] if settings.stop is None else [settings.stop.replace("\\n", "\n")],
    )
    with contextlib.suppress(KeyboardInterrupt):
        for _, piece, num_new_tokens in pieces:
            num_tokens += num_new_tokens
            continuation += piece or ""
            print(piece or "", end="", flush=True)
    seconds = time.perf_counter() - start
    print(flush=True)
    speed = num_tokens / seconds
    print(f"{num_tokens} tokens, {speed:,.1f} tokens/s", file=sys.stderr, flush=True)
    return continuation


def converse(decoder: Decoder, tokenizer: Tokenizer, settings: Settings) -> None:
    """Continue prompts until the input ends."""
    if sys.stdin.isatty():
        # input() then has a history and arrow keys
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        print(settings.format_help())
    block_size = decoder.model.config.block_size
    text = ""
    while True:
        try:
            line = read_prompt()
            if line in (None, "/quit"):
                return
            if line == "/help":
                print(settings.format_help())
            elif line.startswith("/") and not line.startswith("//"):
                settings = settings.change(line[1:])
            else:
                # an empty line continues the last text, which a prompt with a mistake leaves as it is
                prompt = encode_prompt(tokenizer, line or text)
                text = line or text
                if line:
                    note_truncation("the prompt", len(prompt), block_size)
                # the output has the whole text, as that of sample.py without --interactive
                print(text, end="", flush=True)
                text += generate(decoder, tokenizer, prompt, settings)
                settings = dataclasses.replace(settings, seed=settings.seed + 1)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
        # while a prompt is typed, it discards the line
        except KeyboardInterrupt:
            print()
