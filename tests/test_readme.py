"""The README and the pages of docs/ agree with the repository."""

import csv
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, SMALL, configure, every_option
from models import PAPER
from pages import check_command, commands_of

import configurator
import model
from configurator import collect_options
from model.ddl import DeltaRewrite
from model.ddl_config import ExpandedConfig
from model.gpt import GPTConfig
from training.config import TrainConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).read_bytes().startswith((b"\x89PNG", b"<svg"))


# ---- models and runs ----


def read_model_rows() -> list[tuple[str, str]]:
    """Return the model name and the cell of config files of each row of the table of the paper's models."""
    return re.findall(r"^\|.*`([\w-]+)\.py` \| (`[^|]*`)", README, flags=re.M)


def test_the_table_of_models_is_that_of_the_paper():
    assert [model_name for model_name, _ in read_model_rows()] == PAPER


def test_the_variants_page_names_every_model():
    page = read_page("variants")
    assert [name for name in model.MODEL_NAMES if f"`{name}`" not in page] == []


@pytest.mark.parametrize(("model_name", "config_files"), read_model_rows())
def test_the_table_of_models_names_files_that_fit(model_name, config_files):
    assert model_name in model.MODEL_NAMES
    for config_name in re.findall(r"`(\w+)\.py`", config_files):
        path = ROOT / "config" / f"{config_name}.py"
        assert configurator.read_config_files(path)["model"] == model_name


def read_reproduction_rows() -> list[list[str]]:
    """Return the cells of the table of the paper's runs."""
    rows = re.findall(r"^\| `(\w+_(?:small|medium))` \|(.*)\|$", README, flags=re.M)
    return [[name, *(cell.strip() for cell in cells.split("|"))] for name, cells in rows]


def test_the_table_of_the_papers_runs_has_each_of_them():
    names = [row[0] for row in read_reproduction_rows()]
    variants = ("gpt", "ddl_dv1", "ddl_dv4", "ddl_dv4_ec", "ddl_dv4_cc", "ddl_dv4_cc_ec")
    assert names == [f"{variant}_{size}" for size in ("small", "medium") for variant in variants]


@pytest.mark.parametrize("row", read_reproduction_rows(), ids=lambda row: row[0])
def test_a_row_of_the_papers_runs_is_computed_and_published(row):
    name, parameters, _, _, published_loss, own_loss = row
    config, model_config = configure([str(ROOT / "config" / f"{name}.py")])
    with torch.device("meta"):
        num_parameters = model.build(config.model, model_config).num_parameters()
    assert parameters == f"{num_parameters / 1e6:.0f}M"
    size = name.rpartition("_")[2]
    figures = (ROOT / "results" / "published.csv").read_text(encoding="utf-8")
    loss = re.search(rf"^{size},,{config.model},val_loss,([\d.]+),", figures, flags=re.M)[1]
    assert published_loss == f"{float(loss):.3f}"
    assert own_loss == find_own_loss(name, read_own_runs(), config, model_config)


def read_own_runs() -> list[dict[str, str]]:
    """Return the rows of results/paper_runs.csv, which `research/report.py runs` writes."""
    path = ROOT / "results" / "paper_runs.csv"
    return list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []


def list_settings(config: TrainConfig, model_config: GPTConfig) -> dict:
    """Return the settings that determine the result of a run."""
    settings = {**vars(config), **vars(model_config)}
    options = collect_options(TrainConfig, type(model_config))
    setting_names = {key for key, declared in options.items() if not declared.changeable}
    return {key: value for key, value in settings.items() if key in {*setting_names, "max_steps"}}


def find_own_loss(name: str, rows: list[dict], config: TrainConfig, model_config: GPTConfig) -> str:
    """Return the loss of the finished run of a config file with its settings, or "pending"."""
    for row in rows:
        has_settings = all(
            json.loads(row[key]) == value
            if not isinstance(value, str)
            else Path(row[key]).name == value
            for key, value in list_settings(config, model_config).items()
        )
        if row["name"] == name and has_settings and int(row["val_step"]) == config.max_steps:
            return f"{float(row['val_loss']):.3f}"
    return "pending"


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, "2.835"),
        ({"learning_rate": "0.002"}, "pending"),
        ({"state_dtype": "bfloat16"}, "pending"),
        ({"val_step": "50000"}, "pending"),
        ({"name": "gpt_small"}, "pending"),
    ],
    ids=str,
)
def test_a_result_may_be_filled_in_if_its_run_is_stored(changes, loss):
    config, model_config = configure([str(ROOT / "config/ddl_dv4_small.py")])
    row = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in list_settings(config, model_config).items()
    }
    row |= {"name": "ddl_dv4_small", "val_step": "100000", "val_loss": "2.83491", **changes}
    assert find_own_loss("ddl_dv4_small", [row], config, model_config) == loss


# ---- code and commands ----


@pytest.mark.usefixtures("example_streams")
@pytest.mark.parametrize("command", commands_of(README))
def test_commands_exist(command, monkeypatch):
    check_command(command, monkeypatch)


def test_the_readme_has_commands():
    assert len(commands_of(README)) > 10


@pytest.mark.parametrize(
    "page",
    [
        "cluster",
        "data",
        "evaluation",
        "export",
        "kernels",
        "recipe",
        "runs",
        "serving",
        "variants",
    ],
)
def test_commands_of_the_pages_exist(page, monkeypatch):
    commands = commands_of(read_page(page))
    assert commands
    for command in commands:
        check_command(command, monkeypatch)


def find_block(text: str) -> str:
    """Return the block of code with some text in it."""
    return next(block for _, block in BLOCKS if text in block)


def test_the_code_of_the_delta_write_is_that_of_the_model():
    """The README shows the write of config/ddl_dv4_small.py, here with the mean as its read."""
    torch.manual_seed(0)
    config = ExpandedConfig(
        hidden_size=6, num_hidden_layers=1, ddl_v_sigmoid=False, ddl_v_bias=False, ddl_k_eps=0.0
    )
    delta = DeltaRewrite(config).double()
    for parameter in delta.parameters():
        torch.nn.init.normal_(parameter)
    state = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    block = SimpleNamespace(
        read=lambda state: state.mean(2), norm=torch.tanh, beta=delta.beta, value=delta.v_proj
    )
    names = {"torch": torch, "F": torch.nn.functional}
    exec(find_block("def write(self"), names)
    written = names["write"](block, state, torch.sin)
    x_in = state.mean(2)
    c = x_in.tanh()
    torch.testing.assert_close(written, delta(state, c.sin(), x_in, c), rtol=1e-12, atol=1e-12)


def test_the_example_stream_is_that_of_the_contract():
    """The README shows the file that tests/test_contract.py trains."""
    source = find_block("class GatedWrite")
    path = ROOT / "tests" / "streams" / "gated-gpt-mha-rope.py"
    assert source == path.read_text(encoding="utf-8")


# ---- pages of docs/ ----


def read_page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_the_code_on_the_variants_page_is_the_models():
    paths = [*(ROOT / "model").glob("*.py"), *(ROOT / "model" / "streams").glob("*.py")]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    lines = {line.strip() for line in sources.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", read_page("variants"), flags=re.S)
    assert len(blocks) == 4
    for block in blocks:
        assert {line.strip() for line in block.splitlines()} <= lines


# number of parameters that a model has besides those of the baseline, as the variants page states it
d, v, L, K, K_e = 10, 4, 2, 4, 4
DDL_PARAMETERS = 2 * L * (d + 1 + d * v)
TOKEN_READ_PARAMETERS = (L + 1) * (d * v * K + v)
COLUMN_READ_PARAMETERS = (L + 1) * d * v
EXTRA_PARAMETERS = {
    "gpt-mha-rope": 0,
    "DDL-vdim1-gpt-mha-rope": 2 * L * (2 * d + 1),
    "DDL-gpt-mha-rope": DDL_PARAMETERS + TOKEN_READ_PARAMETERS,
    "DDL-gpt-mha-rope-EC": DDL_PARAMETERS + TOKEN_READ_PARAMETERS + d * v * K_e,
    "DDL-gpt-mha-rope-CC": DDL_PARAMETERS + COLUMN_READ_PARAMETERS,
    "DDL-gpt-mha-rope-CC-EC": DDL_PARAMETERS + COLUMN_READ_PARAMETERS + d * v * K_e,
}


@pytest.mark.parametrize("model_name", PAPER)
def test_parameter_formulas_of_the_variants_page(model_name):
    assert f"| `{model_name}` |" in read_page("variants")
    size = {**SMALL, "hidden_size": d, "num_hidden_layers": L}
    baseline = model.build("gpt-mha-rope", **size).num_parameters()
    num_parameters = model.build(model_name, **size).num_parameters()
    assert num_parameters - baseline == EXTRA_PARAMETERS[model_name]


def collect_defaults() -> dict[str, set]:
    """Return the defaults that each option has in train.py and in the paper's models."""
    defaults: dict[str, set] = {}
    for config_class in (TrainConfig, *(model.model_class(name).Config for name in PAPER)):
        for key, declared in collect_options(config_class).items():
            defaults.setdefault(key, set()).add(declared.default)
    return defaults


def test_every_value_on_the_recipe_page_is_valid():
    options = every_option()
    settings = re.findall(r"`(\w+)=([^`]+)`", read_page("recipe"))
    assert settings
    for key, text in settings:
        options[key].parse(text)  # raises ValueError if the option refuses the value


def read_recipe_defaults() -> dict[str, str]:
    """Return the defaults in the last columns of the tables of the recipe page."""
    rows = [line for line in read_page("recipe").splitlines() if line.startswith("| ")]
    last_columns = " ".join(row.split(" | ")[-1] for row in rows)
    return dict(re.findall(r"`(\w+)=([^`]+)`", last_columns))


def test_defaults_on_the_recipe_page_are_those_of_the_options():
    options = every_option()
    defaults = collect_defaults()
    for key, text in read_recipe_defaults().items():
        assert options[key].parse(text) in defaults[key], key


def test_the_recipe_page_has_every_option_that_changes_training():
    train_options = collect_options(TrainConfig)
    fixed = {key for key, declared in train_options.items() if not declared.changeable}
    model_keys = collect_defaults().keys() - train_options.keys()
    assert read_recipe_defaults().keys() >= fixed | model_keys | {"max_steps"}


def list_headings(page: str) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", read_page(page), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", ["README", "cluster", "evaluation", "export", "recipe", "runs", "variants"]
)
def test_links_between_pages_lead_to_headings(page):
    links = re.findall(r"\]\((\w+)\.md(?:#([\w-]+))?\)", read_page(page))
    assert links
    for target, heading in links:
        headings = list_headings(target)
        assert not heading or heading in headings


# ---- results/gpu/README.md ----


def test_the_page_of_the_gpu_knows_which_kernels_have_changed_since_they_ran():
    """Each file of model/kernels/ has a row, with the digest of the file that ran on the GPU."""
    page = (ROOT / "results/gpu/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\| `(\w+\.py)` \| ?(\w*) \| (.*) \|$", page, flags=re.M)
    files = {path.name: path for path in (ROOT / "model/kernels").glob("*.py")}
    assert sorted(name for name, _, _ in rows) == sorted(files)
    for name, digest, today in rows:
        is_same = hashlib.sha256(files[name].read_bytes()).hexdigest().startswith(digest)
        expected = "unchanged" if is_same else "changed"
        assert today == (expected if digest else "never ran"), name
