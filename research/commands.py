"""Scripts that have several commands, each with its own options, as `report.py curves` is."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from configurator import format_entry, read_command_line
from utils import errors


class Command(NamedTuple):
    """A command of a script."""

    # what it does; the list of commands shows the first line
    help: str

    # the dataclass of its options
    options: type

    # is called with the options
    run: Callable[[SimpleNamespace], None]


def read_command(
    usage: str,
    commands: dict[str, Command],
    default: str | None = None,
    argv: list[str] | None = None,
) -> SimpleNamespace:
    """Return the options of a command, and its name as `command`.

    --help prints the usage and all commands, COMMAND --help the options of one, and both end the
    script. A mistake ends it with one line.

    Args:
        usage: the script's docstring
        commands: by name
        default: the command of a command line that names none
        argv: the command line; by default that of the process
    """
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in ("-h", "--help"):
        print_commands(usage, commands)
        sys.exit(0)
    if default is not None and (not words or words[0].startswith("-")):
        words = [default, *words]
    with errors.one_line_errors():
        if not words:
            raise ValueError(f"give a command: {', '.join(commands)}")
        name = words[0]
        if name not in commands:
            suggestion = errors.suggest(name, commands) or f"; give one of {', '.join(commands)}"
            raise ValueError(f"no command {name}{suggestion}")
    usage_of_command = f"{Path(sys.argv[0]).name} {name}: {commands[name].help}"

    options = commands[name].options
    args = read_command_line(usage_of_command, options, argv=words[1:])
    args.command = name
    return args


def run_command(usage: str, commands: dict[str, Command], default: str | None = None) -> None:
    """Run the command of this process's command line; the arguments are those of `read_command`."""
    args = read_command(usage, commands, default)
    with errors.one_line_errors():
        commands[args.command].run(args)


def print_commands(usage: str, commands: dict[str, Command]) -> None:
    """Print the usage of a script and its commands."""
    errors.end_quietly_on_closed_pipe()
    print(usage.strip())
    print("\nCommands, whose options COMMAND --help lists:\n")
    for name, command in commands.items():
        summary = command.help.partition("\n")[0].removesuffix(".")
        print(format_entry(f"  {name}", summary))
