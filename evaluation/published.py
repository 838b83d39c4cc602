"""The results that the paper reports (results/published.csv), to be shown beside a model's own.

A model has a row in the paper if the paper trained its variant in its size. Whether the model was
trained as the paper's was is left to the reader: a line under the table lists every setting that
differs from the config file that follows the paper's text of January, and names a loss of July's.
"""

import csv
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import configurator
from configurator import Option, collect_options
from model import model_class
from model.gpt import GPTConfig
from training.config import TrainConfig
from training.settings import saved_settings

ROOT = Path(__file__).parents[1]
RESULTS_FILE = ROOT / "results/published.csv"

# The paper's sizes, by which its rows are found: table 4 of the January version, table 6 of July.
SIZES = {
    "small": {"num_hidden_layers": 12, "hidden_size": 768},
    "medium": {"num_hidden_layers": 24, "hidden_size": 1024},
}

# The recipes of the text of January 29, 2026: config/NAME_SIZE.py with these names.
CONFIG_NAMES = {
    "gpt-mha-rope": "gpt",
    "DDL-vdim1-gpt-mha-rope": "ddl_dv1",
    "DDL-gpt-mha-rope": "ddl_dv4",
    "DDL-gpt-mha-rope-CC": "ddl_dv4_cc",
    "DDL-gpt-mha-rope-EC": "ddl_dv4_ec",
    "DDL-gpt-mha-rope-CC-EC": "ddl_dv4_cc_ec",
}

# A resumed run may change these keys, but they change the result.
CHANGEABLE_KEYS_OF_RECIPE = ("dataset", "max_steps", "decay_steps")
# The paper does not state its seeds.
KEYS_NOT_OF_RECIPE = ("seed",)


@dataclass(frozen=True)
class Published:
    """The paper's results for the variant and size of a model."""

    # by number of shots ("0", "1"; "" for the validation split), then by task or metric;
    # {} if the paper did not train this variant in this size
    results: dict[str, dict[str, float]]

    # variant and size of the model, for a message
    description: str

    # the config file with the paper's recipe, and the settings that differ from it
    config_file: str = ""
    differences: tuple[str, ...] = ()

    # whether July's text alone, which computes v from c, has the loss
    has_loss_of_july: bool = False

    def remark(self, label: str) -> str:
        """Return the line that belongs under a table with this model; "" if nothing differs."""
        if not self.results:
            return f"The paper reports no results for {label} ({self.description})."
        sentences = []
        if self.has_loss_of_july:
            sentences.append(
                f"The paper's loss of {label} is that of its July text (ddl_v_input=context)."
            )
        if self.differences:
            sentences.append(
                f"Settings of {label} that differ from the paper's ({self.config_file}): "
                f"{', '.join(self.differences)}."
            )
        return " ".join(sentences)


@cache
def read_rows() -> list[dict[str, str]]:
    """Return the rows of results/published.csv."""
    lines = RESULTS_FILE.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@cache
def read_results() -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    """Return the paper's results by (variant, size), number of shots, and task or metric."""
    results: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in read_rows():
        by_shots = results.setdefault((row["model"], row["size"]), {})
        by_shots.setdefault(row["shots"], {})[row["metric"]] = float(row["value"])
    return results


def find(
    variant: str, model_config: GPTConfig, state: dict | None, val_dataset: str = ""
) -> Published:
    """Find the paper's results for a model.

    Args:
        variant: name of the model variant
        state: state.json of its checkpoint; empty if it is not known how the model was trained
        val_dataset: name of the corpus that it was validated on; "" for that of its training
    """
    size = find_size(model_config)
    results = read_results().get((variant, size), {})
    description = (
        f"{variant} with {model_config.num_hidden_layers} layers and "
        f"hidden_size={model_config.hidden_size}"
    )
    if not results:
        return Published(results, description)
    config_file = f"config/{CONFIG_NAMES[variant]}_{size}.py"
    options = collect_options(TrainConfig, model_class(variant).Config)
    recipe = read_recipe(config_file, options)
    settings = saved_settings(state) if state else asdict(model_config)
    differences = find_differences(settings, recipe, options)
    if not state:
        differences.append("it is not known how it was trained")
    elif state["step"] != settings["max_steps"]:
        differences.append(f"trained for {state['step']:,} of max_steps={settings['max_steps']}")
    train_dataset = Path(settings.get("dataset", "")).name
    if val_dataset not in ("", train_dataset, recipe["dataset"]):
        differences.append(f"validated on {val_dataset} (paper: {recipe['dataset']})")
    loss = {"model": variant, "size": size, "metric": "val_loss", "text": "july"}
    has_loss_of_july = any(loss.items() <= row.items() for row in read_rows())
    return Published(results, description, config_file, tuple(differences), has_loss_of_july)


def find_size(model_config: GPTConfig) -> str | None:
    """Return the name of the paper's size that a model has; None if it has another size."""
    for name, size in SIZES.items():
        if all(getattr(model_config, key) == value for key, value in size.items()):
            return name
    return None


def read_recipe(config_file: str, options: dict[str, Option]) -> dict[str, object]:
    """Return all settings of a recipe: those of its config file, and the defaults of the others."""
    return {
        **{name: option.default for name, option in options.items()},
        **configurator.read_config_files(ROOT / config_file),
    }


def find_differences(
    settings: dict[str, object],
    recipe: dict[str, object],
    options: dict[str, Option],
) -> list[str]:
    """Return the settings that differ from a recipe, as `learning_rate=0.002 (paper: 0.001)`.

    Args:
        settings: all settings of a run, or only those of its model
        recipe: all settings of the recipe
        options: the keys to compare
    """
    differences = []
    for name, option in options.items():
        if option.changeable and name not in CHANGEABLE_KEYS_OF_RECIPE:
            continue
        if name in KEYS_NOT_OF_RECIPE or name not in settings:
            continue
        value = settings[name]
        if name == "dataset":  # the same data may lie in another folder
            value = Path(value).name
        if value != recipe[name]:
            differences.append(f"{name}={value} (paper: {recipe[name]})")
    return differences
