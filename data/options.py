"""The options of data/*/prepare.py: declared by `option`, read by one parser.

    @dataclass(frozen=True)
    class Options(PreparationOptions):
        column: str = option("text", "name of the text column")

    args = OptionParser(__doc__, collect_options(Options)).parse_args()

--help shows each option with its default, and its choices or range. A mistake ends the script with
one line that says what to give instead.
"""

import argparse

import configurator
from model.options import Option


class OptionParser(configurator.Parser):
    """Reads options from the command line, and checks their ranges.

    Args:
        description: the script's docstring
        options: by name
        fixed: values of options that the script does not have
    """

    def __init__(
        self, description: str, options: dict[str, Option], fixed: dict[str, object] | None = None
    ):
        super().__init__(description=description)
        fixed = fixed or {}
        self.options = {name: declared for name, declared in options.items() if name not in fixed}
        for declared in self.options.values():
            self._add_option(declared)
        self.set_defaults(**fixed)

    def _add_option(self, declared: Option) -> None:
        # argparse formats help texts with %
        help_text = describe_option(declared).replace("%", "%%")
        if bool in declared.types:
            # a flag, which is given without a value
            self.add_argument(f"--{declared.name}", action="store_true", help=help_text)
            return
        [value_type] = [accepted for accepted in declared.types if accepted is not type(None)]
        self.add_argument(
            f"--{declared.name}",
            type=value_type,
            choices=declared.choices or None,
            default=declared.default,
            help=help_text,
        )

    def parse_args(
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed = super().parse_args(args, namespace)
        for name, declared in self.options.items():
            try:
                declared.check_range(declared.convert(getattr(parsed, name)))
            except ValueError as error:
                self.error(f"--{error}")
        return parsed


def describe_option(declared: Option) -> str:
    """Return the text of --help for an option: what it does, its default, and choices or range."""
    details = []
    has_default = declared.default is not None and bool not in declared.types
    if has_default and "(default: " not in declared.help:
        details.append(f"default: {declared.default}")
    if declared.choices:
        details.append(" | ".join(map(str, declared.choices)))
    elif declared.range:
        details.append(declared.range)
    if not details:
        return declared.help
    if "(default: " in declared.help and declared.help.endswith(")"):
        return f"{declared.help.removesuffix(')')}; {'; '.join(details)})"
    return f"{declared.help} ({'; '.join(details)})"
