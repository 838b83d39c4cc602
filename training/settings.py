"""The settings of a run: defaults < corpus < init_from < saved run < config file < command line.

What a resumed run may not change is that of the run, whatever its config file says.
"""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple, TextIO

import configurator
import model_folder
from configurator import collect_options
from data.shards import find_folder, make_location_absolute, read_meta
from model import MODEL_NAMES, make_config, model_class
from model.gpt import GPTConfig
from training import checkpoint
from training.config import TrainConfig, check_run
from utils import errors, files, machine

# Keys that say what one call of train.py does; a resumed run does not take them from the saved one.
KEYS_OF_A_CALL = ("out_dir", "resume", "dry_run", "max_seconds", "profile_steps")
# Keys of a model on which no weight depends, so that they may differ from the folder of init_from.
KEYS_WITHOUT_WEIGHTS = ("block_size", "state_dtype")
# the variant that has all keys of DDL
FULL_DDL = "DDL-gpt-mha-rope-CC-EC"


class Arguments(NamedTuple):
    """What the command line of train.py holds."""

    file: Path | None  # the config file
    from_file: dict[str, object]  # what the file assigns
    from_command_line: dict[str, str | None]  # the texts of --key=value, None of a bare --key


class Settings(NamedTuple):
    """The settings of a run, checked."""

    config: TrainConfig
    model_config: GPTConfig
    resumed: Path | None = None  # the checkpoint that is resumed; None for a new run
    saved_state: dict = {}  # noqa: RUF012  its state.json
    notes: tuple[str, ...] = ()  # for the user
    lock: TextIO | None = None  # on the folder of a run that has started before


def read_arguments(argv: list[str]) -> Arguments:
    """Split a command line and read its config file.

    Raises:
        ValueError: there are several config files, or the file cannot be read
    """
    config_files, options = configurator.split_arguments(argv)
    if len(config_files) > 1:
        raise ValueError(f"give one config file, then --key=value; got {' '.join(config_files)}")
    if options.get("resume", "") is None:  # a bare --resume
        options["resume"] = "auto"
    if not config_files:
        return Arguments(None, {}, options)
    return Arguments(Path(config_files[0]), configurator.read_config_file(config_files[0]), options)


def resolve(arguments: Arguments) -> Settings:
    """Find the run folder and the checkpoint to resume from, and return the settings of the run.

    Raises:
        ValueError: a key or a value is wrong, or differs from the run that is resumed; or the run
            folder cannot be used
    """
    given = configurator.read_settings(
        arguments.from_file, arguments.from_command_line, collect_options(TrainConfig)
    )
    out_dir = given.get("out_dir")
    if out_dir is None:
        default_name = given.get("model", TrainConfig.model)
        out_dir = f"runs/{arguments.file.stem if arguments.file else default_name}"
    folder = Path(out_dir)
    lock = None
    # a run that is still training there may write or remove the files that are checked next
    if machine.rank() == 0 and (folder / "lock").exists() and not given.get("dry_run"):
        lock = lock_run_folder(folder)
    resumed = None
    if given.get("resume"):
        resumed = checkpoint.find_latest(folder, to_resume=True)
        if resumed is None and checkpoint.list_checkpoints(folder):
            raise ValueError(f"out_dir={folder} has no valid checkpoint; give another --out_dir")
    elif folder.exists() and not given.get("dry_run"):
        if not folder.is_dir() or any(folder.iterdir()):
            raise ValueError(
                f"out_dir={folder} is not empty; resume that run with --resume=auto, or give "
                "another --out_dir"
            )
    return merge(arguments, out_dir, resumed)._replace(lock=lock)


def merge(arguments: Arguments, out_dir: str, resumed: Path | None) -> Settings:
    """Return the settings of a run in a folder, which resumes a checkpoint, or is new."""
    typed_texts = arguments.from_command_line
    run_options = collect_options(TrainConfig)
    given = configurator.read_settings(arguments.from_file, typed_texts, run_options)
    saved_state = {} if resumed is None else checkpoint.read_state(resumed)
    saved = saved_settings(saved_state) if saved_state else {}
    trained = {}
    if given.get("init_from") and not saved:  # a resumed run no longer needs the folder
        trained = read_init_settings(given["init_from"])

    model = typed_texts.get("model") or (saved or trained or given).get("model", TrainConfig.model)
    model_config_class = model_class(model).Config
    model_options = collect_options(model_config_class)
    for key in sorted(model_options.keys() & run_options.keys()):
        raise ValueError(
            f"model/{model}.py: {key} is already a key of the run; rename the key of the model"
        )
    options = {**model_options, **run_options}
    configurator.check_names(typed_texts, options, "--")
    notes = []
    ignored = sorted(arguments.from_file.keys() - options.keys())
    if ignored and model == arguments.from_file.get("model", TrainConfig.model):
        configurator.check_names(ignored, options)
    elif ignored:
        notes.append(f"model={model} has no {', '.join(ignored)} of {arguments.file}")
    in_file = configurator.read_settings(arguments.from_file, {}, options)
    typed = configurator.read_settings({}, typed_texts, options)
    for layer in (in_file, typed):
        if "dataset" in layer:  # the run may be resumed from another working directory
            layer["dataset"] = make_location_absolute(layer["dataset"])

    # fixed keys: those that the run that is resumed, or the weights that it starts from, decide
    fixed, origin = {}, resumed
    if saved:
        fixed = {
            key: value for key, value in saved.items() if not options_of(saved)[key].changeable
        }
    elif trained:
        fixed = {key: value for key, value in trained.items() if key not in KEYS_WITHOUT_WEIGHTS}
        origin = f"init_from={given['init_from']}"
    if differences := fixed and find_differences(typed, fixed):
        raise ValueError(
            f"{origin} was trained with {', '.join(differences)}; omit these keys, or start a new "
            "run in another --out_dir"
        )
    if differences := fixed and find_differences(in_file, fixed):
        notes.append(f"the run keeps {', '.join(differences)}, although {arguments.file} differs")
    settings = {
        **({} if saved else corpus_defaults({**in_file, **typed})),
        **trained,
        **saved,
        **in_file,
        **fixed,
        **typed,
        "model": model,
        "out_dir": out_dir,
    }
    config = TrainConfig(**{key: settings[key] for key in run_options if key in settings})
    check_run(config)
    model_config = model_config_class(
        **{key: settings[key] for key in model_options if key in settings}
    )
    if changes := saved and find_differences(saved, settings):
        notes.append(f"this command changes {', '.join(changes)}")
    return Settings(config, model_config, resumed, saved_state, tuple(notes))


def find_differences(settings: dict[str, object], others: dict[str, object]) -> list[str]:
    """Return the keys of both whose values differ, as `learning_rate=0.001 (not 0.5)`."""
    return [
        f"{key}={others[key]!r} (not {settings[key]!r})"
        for key in sorted(settings.keys() & others.keys())
        if settings[key] != others[key]
    ]


def options_of(settings: dict[str, object]) -> dict[str, configurator.Option]:
    """Return the options of a run and of its model."""
    return collect_options(TrainConfig, model_class(settings["model"]).Config)


def saved_settings(state: dict) -> dict[str, object]:
    """Return all keys of a saved run and of its model, without those of a call.

    Keys that were added after the run was saved have their default, and keys that this version does
    not have any more are left out.
    """
    saved = {**state["model_config"], **state["run_config"], "model": state["model"]}
    return {
        name: declared.convert(saved[name]) if name in saved else declared.default
        for name, declared in options_of(saved).items()
        if name not in KEYS_OF_A_CALL
    }


def read_init_settings(folder: str) -> dict[str, object]:
    """Return the settings that the folder of init_from decides: "model", and the keys of the model.

    Raises:
        ValueError: the folder is missing or damaged
    """
    try:
        described = model_folder.describe(Path(folder))
        return {
            "model": described.model,
            **vars(make_config(described.model, described.config)),
        }
    except ValueError as error:
        raise ValueError(f"init_from={folder}: {error}") from error


def corpus_defaults(given: dict[str, object]) -> dict[str, object]:
    """Return the defaults that follow from the corpus of a new run.

    block_size: the length of the sequences of a synthetic task.
    vocab_size: that of the corpus, rounded up to a multiple of 64 for the GPU.
    """
    # meta.json alone: the shards are opened later, and may not have been prepared yet
    meta = read_meta(find_folder(given.get("dataset", TrainConfig.dataset)))
    defaults = {"block_size": meta["block_size"]} if "block_size" in meta else {}
    if type(meta.get("vocab_size")) is int:
        defaults["vocab_size"] = (meta["vocab_size"] + 63) // 64 * 64
    return defaults


def lock_run_folder(folder: Path) -> TextIO:
    """Make the run folder if it is missing, and lock it as long as the returned file is open.

    Raises:
        ValueError: another process is training in it
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return files.lock_file(folder / "lock")
    except BlockingIOError as error:
        raise ValueError(f"out_dir={folder}: another process is training in this folder") from error


# ---- --help ----


def print_help(arguments: Arguments, usage: str) -> None:
    """Print the keys of the run and of its model, with the values that a command line gives them.

    Without a model they are those of DDL, followed by the names of the other models.
    """
    errors.end_quietly_on_closed_pipe()
    texts = {key: text for key, text in arguments.from_command_line.items() if key != "help"}
    given_model = texts.get("model", arguments.from_file.get("model"))
    options = options_of({"model": given_model or FULL_DDL})
    values = configurator.read_settings(arguments.from_file, texts, options)
    print(f"{usage.strip()}\n\n{configurator.help_text(options, values)}")
    if given_model is None:
        print("\nModels (`--model=NAME --help` lists the keys of each):\n")
        for name in MODEL_NAMES:
            print(configurator.format_entry(f"  {name}", summarize_model(name)))


def summarize_model(name: str) -> str:
    """Return the first paragraph of the docstring of a model's file, without importing it."""
    source = Path(importlib.util.find_spec(f"model.{name}").origin).read_bytes()
    try:
        docstring = ast.get_docstring(ast.parse(source)) or ""
    except SyntaxError as error:
        return f"(its file has a syntax error in line {error.lineno})"
    return " ".join(docstring.partition("\n\n")[0].split())
