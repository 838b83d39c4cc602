"""How the settings of a run follow from the command line, a config file and what is resumed."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import configurator
from configurator import Option, check_effects, collect_options
from data.sequences import SequenceLayout
from data.shards import find_folder, make_location_absolute, read_meta, read_vocab_size
from model import MODEL_NAMES, every_config, model_class
from model.gpt import GPTConfig
from training import checkpoint, init_from, resume
from training.config import Arguments, TrainConfig, check_run
from training.resume import Location
from utils import errors, machine

# the variant that has all keys of DDL
FULL_DDL = "DDL-gpt-mha-rope-CC-EC"


class Settings(NamedTuple):
    """The settings of a run, resolved and checked."""

    config: TrainConfig
    model_config: GPTConfig
    saved_state: dict  # state.json of the run that is resumed; {} for a new run


def locate_run(arguments: Arguments) -> Location:
    """Return which folder a run writes, and what it resumes, which may determine its settings.

    Raises:
        ValueError: a key is unknown, a value of a key of the run is wrong, or a checkpoint is resumed
            that does not lie in a run folder
    """
    # unknown keys come first: their suggestions explain most other mistakes
    declared_options = known_options(arguments.from_file, arguments.from_command_line)
    configurator.check_names(arguments.from_file, declared_options)
    configurator.check_names(arguments.from_command_line, declared_options, prefix="--")
    run_settings = read_run_settings(arguments)
    out_dir = run_settings.get("out_dir") or default_out_dir(arguments.file, run_settings)
    resumed = run_settings.get("resume")
    return Location(out_dir, resumed, run_settings.get("dry_run", TrainConfig.dry_run))


def read_run_settings(arguments: Arguments) -> dict[str, object]:
    """Return the settings of the run, without those of its model, that a user gives."""
    return configurator.read_settings(
        arguments.from_file, arguments.from_command_line, collect_options(TrainConfig)
    )


def resolve(
    arguments: Arguments,
    location: Location,
    resume_checkpoint: Path | None,
    note: Callable[[str], object] = print,
) -> Settings:
    """Return the settings of a run.

    The command line overrides the config file, and that the run that is resumed in what may change;
    in what may not, the run overrides the config file.

    Args:
        location: what `locate_run` returned
        resume_checkpoint: from which the run is resumed; None for a new run
        note: called with each line that a user may want to read

    Raises:
        ValueError: a key or a value is wrong, or differs from the run that is resumed
    """
    from_file = arguments.from_file
    typed = arguments.from_command_line
    run_options = collect_options(TrainConfig)
    run_settings = read_run_settings(arguments)
    saved_state = {}
    if resume_checkpoint is not None:
        saved_state = checkpoint.read_state(resume_checkpoint)
    saved = resume.saved_settings(saved_state)
    init_settings = {}
    # a resumed run no longer needs the folder
    if run_settings.get("init_from") is not None and not saved:
        init_settings = init_from.read_init_settings(
            run_settings["init_from"], run_settings.get("init_from_weights", "trained")
        )
    model = {"model": TrainConfig.model, **init_settings, **run_settings}["model"]
    if saved and "model" not in typed:
        model = saved["model"]

    # Only now is a model's file imported, which may be a user's.
    model_config_class = model_class(model).Config
    model_options = collect_options(model_config_class)
    options = {**run_options, **model_options}
    check_model_keys(model, run_options, model_options, typed)
    report_ignored_keys(model, arguments, options, note)
    in_file = read_layer(from_file, {}, options)
    on_command_line = read_layer({}, typed, options)
    # of a run that began with init_from, the trained weights decide in every restart
    trained = saved if saved.get("init_from") is not None else init_settings
    user_values = {**in_file, **on_command_line}
    ignored_keys = init_from.find_ignored_keys(user_values, trained, options, typed)
    if ignored_keys and not saved and machine.rank() == 0:
        note(f"note: init_from ignores {', '.join(ignored_keys)}: the weights are already trained")
    for key in ignored_keys:
        in_file.pop(key, None)
        on_command_line.pop(key, None)

    kept_keys = [key for key in saved if key not in resume.KEYS_OF_A_CALL]
    changeable_keys = [key for key in kept_keys if key in options and options[key].changeable]
    settings, origin_of = merge(
        # lowest precedence first; a key that is in none of these has its default
        ("corpus", {} if saved else corpus_defaults(user_values)),
        ("init_from", init_settings),
        ("run", {key: saved[key] for key in changeable_keys}),
        ("file", in_file),
        # the first command line may have changed what the config file says
        ("run", {key: saved[key] for key in kept_keys if key not in changeable_keys}),
        ("command line", on_command_line),
        ("location", {"out_dir": location.out_dir, "resume": location.resume}),
    )
    if saved:
        resume.check_unchanged(on_command_line, saved, resume_checkpoint)
    overruled = [
        f"{key}={settings[key]} (not {value})"
        for key, value in sorted(in_file.items())
        if origin_of[key] == "run" and value != settings[key]
    ]
    if overruled and machine.rank() == 0:
        note(f"note: the run keeps {', '.join(overruled)}, although {arguments.file} differs")
    user_settings = {
        key: settings[key] for key in settings if origin_of[key] in ("file", "command line")
    }
    init_from.check_not_contradicted(user_settings, init_settings, options)
    config = TrainConfig(**{key: settings[key] for key in settings if key in run_options})
    check_run(config, saved)
    model_config = model_config_class(
        **{key: settings[key] for key in settings if key in model_options}
    )
    keys_of_file = [key for key in origin_of if origin_of[key] == "file"]
    check_effects({**vars(config), **vars(model_config)}, options, typed, keys_of_file)
    return Settings(config, model_config, saved_state)


def read_layer(
    from_file: dict, from_command_line: dict[str, str | None], options: dict[str, Option]
) -> dict[str, object]:
    """Return the settings of a config file, or of a command line."""
    layer = configurator.read_settings(from_file, from_command_line, options)
    if "dataset" in layer:
        # the run may be resumed or evaluated from another working directory
        layer["dataset"] = make_location_absolute(layer["dataset"])
    return layer


def merge(*layers: tuple[str, dict[str, object]]) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings of layers, each of which overrides those before it, and their origins.

    layers: each a name and its settings
    """
    settings = {}
    origin_of = {}
    for name, layer in layers:
        settings.update(layer)
        origin_of.update(dict.fromkeys(layer, name))
    return settings, origin_of


def known_options(from_file: dict, from_command_line: dict[str, str | None]) -> dict[str, Option]:
    """Return the options of the run and of the models that are named.

    A sweep names several models, separated by commas. Only their files are imported, unless a key
    belongs to none of them: then the options of all models are returned, for the error message.
    """
    models = str(from_command_line.get("model", from_file.get("model", TrainConfig.model)))
    options = collect_options(
        TrainConfig,
        *(model_class(name).Config for name in models.split(",") if name in MODEL_NAMES),
    )
    if options.keys() >= from_file.keys() | from_command_line.keys():
        return options
    return every_option()


def every_option() -> dict[str, Option]:
    """Return the options of the run and of every model whose file can be imported."""
    return collect_options(TrainConfig, *every_config())


def default_out_dir(config_file: Path | None, run_settings: dict) -> str:
    """Return the run folder that follows from the other keys.

    Raises:
        ValueError: a checkpoint is resumed that does not lie in a run folder
    """
    resumed = run_settings.get("resume")
    if resumed not in (None, "auto"):
        if not (Path(resumed) / "state.json").is_file():
            return str(resumed)  # a run folder
        # not resolved: checkpoints/ may be a link to other storage
        path = Path(resumed).absolute()
        # <run>/checkpoints/step_00001000 belongs to <run>
        if path.parent.name == "checkpoints" and path.parents[1].name != "nonfinite":
            return str(path.parents[1])
        raise ValueError(
            f"resume={resumed} is not one of a run's checkpoints; give the run folder as --out_dir"
        )
    if config_file is not None:
        return f"runs/{config_file.stem}"
    model = run_settings.get("model", TrainConfig.model)
    if "model" not in run_settings and run_settings.get("init_from"):
        model = init_from.read_init_settings(run_settings["init_from"])["model"]
    return f"runs/{model}"


def check_model_keys(
    model: str,
    run_options: dict[str, Option],
    model_options: dict[str, Option],
    from_command_line: dict[str, str | None],
) -> None:
    """Raise ValueError if a key of the model is also one of the run, or an option is of neither."""
    for key in sorted(run_options.keys() & model_options.keys()):
        raise ValueError(
            f"model/{model}.py: {key} is already a key of the run; rename the key of the model"
        )
    for key in sorted(from_command_line.keys() - run_options.keys() - model_options.keys()):
        raise ValueError(f"--{key} is not a key of {model}; omit it, or choose another --model")


def report_ignored_keys(
    model: str,
    arguments: Arguments,
    options: dict[str, Option],
    note: Callable[[str], object],
) -> None:
    """Print a note on keys of a config file that the chosen model does not have."""
    ignored = sorted(arguments.from_file.keys() - options.keys())
    if ignored and machine.rank() == 0:
        note(f"note: {', '.join(ignored)} of {arguments.file} have no effect with model={model}")


def corpus_defaults(settings: dict) -> dict[str, object]:
    """Return the defaults that follow from the corpus of a new run.

    block_size: the length of the corpus's documents, if they all have one length.
    vocab_size: that of the corpus, rounded up to a multiple of 64 for the GPU.

    Raises:
        ValueError: the corpus is damaged
    """
    # meta.json alone: the shards are opened later, and may not have been prepared yet
    dataset = settings.get("dataset", TrainConfig.dataset)
    layout = SequenceLayout.from_meta(read_meta(find_folder(dataset)))
    defaults = {}
    if layout is not None:
        defaults["block_size"] = layout.seq_len
    if vocab_size := read_vocab_size(dataset):
        defaults["vocab_size"] = (vocab_size + 63) // 64 * 64
    return defaults


# ---- --help ----


def print_help(arguments: Arguments, usage: str) -> None:
    """Print the keys that a command line may have, with the values that it gives them.

    With a config file or --model these are the keys of the run and of that model. Without either,
    they are the keys of the run, of every model and of DDL, and the names of the other models.
    """
    errors.end_quietly_on_closed_pipe()
    from_command_line = {
        key: text for key, text in arguments.from_command_line.items() if key != "help"
    }
    given_model = from_command_line.get("model", arguments.from_file.get("model"))
    options = collect_options(TrainConfig, model_class(given_model or FULL_DDL).Config)
    settings = configurator.read_settings(arguments.from_file, from_command_line, options)
    if arguments.file is not None and "out_dir" not in settings:
        settings["out_dir"] = default_out_dir(arguments.file, settings)
    print(usage.strip())
    print("\nKeys with the values of this command:\n" if settings else "\nKeys and defaults:\n")
    print(configurator.help_text(options, settings))
    if given_model is None:
        print("\nModels (`--model=NAME --help` lists the keys of each):\n")
        for name in MODEL_NAMES:
            print(configurator.format_two_columns(f"  {name}", summarize_model(name)))


def summarize_model(name: str) -> str:
    """Return the first paragraph of the docstring of a model's file, without importing it."""
    file = importlib.util.find_spec(f"model.{name}").origin
    try:
        tree = ast.parse(Path(file).read_bytes())
    except SyntaxError as error:
        return f"(its file has a syntax error in line {error.lineno})"
    paragraph = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())
