"""The settings of a run: defaults < corpus < init_from < saved run < config files < command line.

What a resumed run may not change is that of the run, whatever its config file says.
"""

import ast
from pathlib import Path
from typing import NamedTuple, TextIO

import configurator
import model_folder
from configurator import collect_options
from data.shards import find_folder, make_location_absolute, read_meta
from model import MODEL_NAMES, describe_file, find_variant, make_config, model_class
from model.gpt import GPTConfig
from training import checkpoint
from training.config import TrainConfig, check_run
from utils import errors, files, machine

# Keys that say what one command does, and that a resumed run does not take from the saved one.
KEYS_OF_A_CALL = ("out_dir", "resume", "dry_run", "max_seconds", "profile_steps")
# Keys of a model on which no weight depends, so that they may differ from the folder of init_from.
KEYS_WITHOUT_WEIGHTS = ("block_size", "state_dtype")
# the variant that has all keys of DDL
FULL_DDL = "DDL-gpt-mha-rope-CC-EC"


class Arguments(NamedTuple):
    """What the command line of train.py holds."""

    files: tuple[str, ...]  # the config files
    from_files: dict[str, object]  # what they assign
    from_command_line: dict[str, str | None]  # the texts of --key=value, None of a bare --key


class RunSettings(NamedTuple):
    """The settings of a run, checked."""

    config: TrainConfig
    model_config: GPTConfig
    resume_checkpoint: Path | None = None  # None for a new run
    saved_state: dict = {}  # noqa: RUF012  its state.json
    notes: tuple[str, ...] = ()  # for the user
    lock: TextIO | None = None  # on the folder of a run that has started before


def read_arguments(argv: list[str]) -> Arguments:
    """Split a command line and read its config files.

    Raises:
        ValueError: a file cannot be read
    """
    files, options = configurator.split_arguments(argv)
    if options.get("resume", "") is None:  # a bare --resume
        options["resume"] = "auto"
    return Arguments(tuple(files), configurator.read_config_files(*files), options)


def join_stems(files: tuple[str, ...]) -> str:
    """Return the names of files, without folders and suffixes, joined by hyphens."""
    return "-".join(Path(file).stem for file in files)


def resolve(arguments: Arguments) -> RunSettings:
    """Find the run folder and the checkpoint to resume from, and return the settings of the run.

    Raises:
        ValueError: a key or a value is wrong, or differs from the run that is resumed; or the run
            folder cannot be used
    """
    user_settings = read_user_settings(arguments, collect_options(TrainConfig))
    out_dir = user_settings.get("out_dir")
    if out_dir is None:
        default_name = user_settings.get("model", TrainConfig.model)
        out_dir = f"runs/{join_stems(arguments.files) or default_name}"
    folder = Path(out_dir)
    lock = None
    # a run that is still training there may write or remove the files that are checked next
    if machine.rank() == 0 and (folder / "lock").exists() and not user_settings.get("dry_run"):
        lock = lock_run_folder(folder)
    resume_checkpoint = None
    if user_settings.get("resume"):
        resume_checkpoint = checkpoint.find_latest(folder, to_resume=True)
        if resume_checkpoint is None and checkpoint.list_checkpoints(folder):
            raise ValueError(f"out_dir={folder} has no valid checkpoint; give another --out_dir")
    resolved = merge(arguments, out_dir, resume_checkpoint)
    # after the keys, because a mistyped one would be the next error
    # a run that ended before its first checkpoint may have left the file that locks the folder
    is_used = folder.exists() and (
        not folder.is_dir() or any(path.name != "lock" for path in folder.iterdir())
    )
    if is_used and not resolved.config.resume and not resolved.config.dry_run:
        raise ValueError(
            f"out_dir={folder} is not empty; resume that run with --resume=auto, or give another "
            "--out_dir"
        )
    return resolved._replace(lock=lock)


def merge(arguments: Arguments, out_dir: str, resume_checkpoint: Path | None) -> RunSettings:
    """Return the settings of a run in a folder, which resumes a checkpoint, or is new."""
    user_settings = read_user_settings(arguments, collect_options(TrainConfig))
    saved_state = {}
    saved = {}
    trained = {}
    if resume_checkpoint is not None:
        saved_state = checkpoint.read_state(resume_checkpoint)
        refuse_removed_keys(saved_state)
        saved = saved_settings(saved_state)
    elif user_settings.get("init_from"):  # a resumed run no longer needs the folder
        trained = read_init_settings(user_settings["init_from"])

    model = arguments.from_command_line.get("model")
    if model is None:
        model = (saved or trained or user_settings).get("model", TrainConfig.model)
    options = options_of(model)
    notes = check_keys(arguments, model, options)
    in_file = read_user_settings(arguments._replace(from_command_line={}), options)
    typed = read_user_settings(arguments._replace(from_files={}), options)

    # what the run that is resumed, or the weights that it starts from, decide
    fixed = {}
    origin = ""
    if saved:
        saved_options = options_of(saved["model"])
        fixed = {key: saved[key] for key in saved if not saved_options[key].changeable}
        origin = str(resume_checkpoint)
    elif trained:
        fixed = {key: trained[key] for key in trained if key not in KEYS_WITHOUT_WEIGHTS}
        origin = f"init_from={user_settings['init_from']}"
    if differences := find_differences(typed, fixed):
        raise ValueError(
            f"{origin} was trained with {', '.join(differences)}; omit these keys, or start a new "
            "run in another --out_dir"
        )
    if differences := find_differences(in_file, fixed):
        notes.append(
            f"the run keeps {', '.join(differences)}, although {' '.join(arguments.files)} differs"
        )

    # lowest precedence first
    settings = {
        **({} if saved else corpus_defaults({**in_file, **typed})),
        **trained,
        **saved,
        **in_file,
        **fixed,  # `typed` agrees with it, as was just checked
        **typed,
        "model": model,
        "out_dir": out_dir,
    }
    config = TrainConfig(**select_keys(TrainConfig, settings))
    check_run(config)
    model_config_class = model_class(model).Config
    model_config = model_config_class(**select_keys(model_config_class, settings))
    if changes := find_differences(saved, settings):
        notes.append(f"this command changes {', '.join(changes)}")
    return RunSettings(config, model_config, resume_checkpoint, saved_state, tuple(notes))


def read_user_settings(
    arguments: Arguments, options: dict[str, configurator.Option]
) -> dict[str, object]:
    """Return what the config file and the command line say of some options."""
    user_settings = configurator.read_settings(
        arguments.from_files, arguments.from_command_line, options
    )
    if "dataset" in user_settings:  # the run may be resumed from another working directory
        user_settings["dataset"] = make_location_absolute(user_settings["dataset"])
    return user_settings


def check_keys(
    arguments: Arguments, model: str, options: dict[str, configurator.Option]
) -> list[str]:
    """Raise ValueError for unknown keys; return a note on keys of a file that is for another model."""
    configurator.check_names(arguments.from_command_line, options, "--")
    unknown_names = [
        name
        for name, value in sorted(arguments.from_files.items())
        if name not in options and not configurator.is_definition(value)
    ]
    if model == arguments.from_files.get("model", TrainConfig.model):
        configurator.check_names(unknown_names, options)
    if unknown_names:
        return [f"model={model} has no {', '.join(unknown_names)} of {' '.join(arguments.files)}"]
    return []


def select_keys(config_class: type, settings: dict[str, object]) -> dict[str, object]:
    """Return those of the settings that are keys of a configuration."""
    return {key: settings[key] for key in collect_options(config_class) if key in settings}


def find_differences(settings: dict[str, object], others: dict[str, object]) -> list[str]:
    """Return the keys of both whose values differ, as `learning_rate=0.001 (not 0.5)`."""
    return [
        f"{key}={others[key]!r} (not {settings[key]!r})"
        for key in sorted(settings.keys() & others.keys())
        if settings[key] != others[key]
    ]


def options_of(model: str) -> dict[str, configurator.Option]:
    """Return the options of a run, and those of a model.

    Raises:
        ValueError: the model has a key of the run
    """
    model_config_class = model_class(model).Config
    if clashes := collect_options(model_config_class).keys() & collect_options(TrainConfig).keys():
        raise ValueError(
            f"{describe_file(model)}: {min(clashes)} is already a key of the run; rename the key of "
            "the model"
        )
    return collect_options(model_config_class, TrainConfig)


def saved_settings(state: dict) -> dict[str, object]:
    """Return all keys of a saved run and of its model, without those of a call.

    Keys that were added after the run was saved have their default, and keys that were removed since
    are left out.
    """
    saved = {**state["model_config"], **state["run_config"], "model": state["model"]}
    return {
        name: declared.convert(saved[name]) if name in saved else declared.default
        for name, declared in options_of(state["model"]).items()
        if name not in KEYS_OF_A_CALL
    }


def refuse_removed_keys(state: dict) -> None:
    """Raise a ValueError if a saved run has keys that were removed since: it may be another model."""
    saved_keys = {*state["model_config"], *state["run_config"]}
    if removed_keys := saved_keys - options_of(state["model"]).keys():
        raise ValueError(
            f"the run was saved by a version with other keys ({', '.join(sorted(removed_keys))}); "
            "resume it with the commit that trained it"
        )


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


def corpus_defaults(user_settings: dict[str, object]) -> dict[str, object]:
    """Return the defaults that follow from the corpus of a new run.

    block_size: the length of the sequences of a synthetic task.
    vocab_size: that of the corpus, rounded up to a multiple of 64 for the GPU.
    """
    # meta.json alone: the shards are opened later, and may not have been prepared yet
    meta = read_meta(find_folder(user_settings.get("dataset", TrainConfig.dataset)))
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
    given_model = texts.get("model", arguments.from_files.get("model"))
    options = collect_options(TrainConfig, model_class(given_model or FULL_DDL).Config)
    values = configurator.read_settings(arguments.from_files, texts, options)
    print(f"{usage.strip()}\n\n{configurator.help_text(options, values)}")
    if given_model is None:
        print("\nModels (`--model=NAME --help` lists the keys of each):\n")
        for name in MODEL_NAMES:
            print(configurator.format_entry(f"  {name}", summarize_model(name)))


def summarize_model(name: str) -> str:
    """Return the first paragraph of the docstring of a model's file, without importing it."""
    source = Path(find_variant(name).origin).read_bytes()
    try:
        docstring = ast.get_docstring(ast.parse(source)) or ""
    except SyntaxError as error:
        return f"(its file has a syntax error in line {error.lineno})"
    return " ".join(docstring.partition("\n\n")[0].split())
