"""What the README and the pages of docs/ show is what the repository does."""

import re

import pytest
import torch
from helpers import ROOT, SMALL
from models import PAPER
from pages import check_command, commands_of

import configurator
import model
from model.options import collect_options
from training.config import TrainConfig
from training.memory import estimate_memory
from training.settings import configure, every_option

README = (ROOT / "README.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).read_bytes().startswith((b"\x89PNG", b"<svg"))


def test_the_variant_table_names_files_that_fit():
    rows = re.findall(r"^\|.*`([\w-]+)\.py` \| (`[^|]*`)", README, flags=re.M)
    assert [stem for stem, _ in rows][: len(PAPER)] == PAPER
    assert {stem for stem, _ in rows} <= set(
        model.MODEL_NAMES
    )  # a newcomer's own file is in no table
    for stem, configs in rows:
        for config in re.findall(r"`(\w+)\.py`", configs):
            assert (
                configurator.read_config_file(str(ROOT / "config" / f"{config}.py"))["model"]
                == stem
            )


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
    name, parameters, memory_per_gpu, _, published_loss, own_loss = row
    config, model_config = configure([str(ROOT / "config" / f"{name}.py")], note=lambda _: None)
    with torch.device("meta"):
        num_parameters = model.build(config.model, model_config).num_parameters()
    assert parameters == f"{num_parameters / 1e6:.0f}M"
    size = name.rpartition("_")[2]
    if size == "small":  # the estimate of a medium one takes seconds
        num_bytes = estimate_memory(config, model_config, "cuda", 4).total
        assert memory_per_gpu == f"≈ {num_bytes / 2**30:.0f} GiB"
    figures = (ROOT / "results" / "published.csv").read_text(encoding="utf-8")
    loss = re.search(rf"^{size},,{config.model},val_loss,([\d.]+),", figures, flags=re.M)[1]
    assert published_loss == f"{float(loss):.3f}"
    assert own_loss == "pending"


@pytest.mark.usefixtures("example_streams")
@pytest.mark.parametrize("command", commands_of(README))
def test_commands_exist(command, monkeypatch):
    check_command(command, monkeypatch)


def test_the_example_stream_is_that_of_the_contract():
    """tests/test_contract.py trains it, among much else."""
    source = next(text for language, text in BLOCKS if language == "python")
    assert source == (ROOT / "tests" / "streams" / "gated-gpt-mha-rope.py").read_text(
        encoding="utf-8"
    )


def test_the_code_on_the_variants_page_is_the_models():
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "model").glob("*.py"))
    lines = {line.strip() for line in sources.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(blocks) == 4
    for block in blocks:
        assert {line.strip() for line in block.splitlines()} <= lines


def test_parameter_formulas_of_the_variants_page():
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    d, v, L, K, K_e = 10, 4, 2, 4, 4
    ddl = 2 * L * (d + 1 + d * v + v)
    token, column = (L + 1) * (d * v * K + v), (L + 1) * (d * v + v)
    extra = {
        "gpt-mha-rope": 0,
        "DDL-vdim1-gpt-mha-rope": 2 * L * (2 * d + 2),
        "DDL-gpt-mha-rope": ddl + token,
    }
    extra |= {"DDL-gpt-mha-rope-EC": ddl + token + d * v * K_e, "DDL-gpt-mha-rope-CC": ddl + column}
    extra |= {"DDL-gpt-mha-rope-CC-EC": ddl + column + d * v * K_e}
    size = {**SMALL, "hidden_size": d, "num_hidden_layers": L}
    baseline = model.build("gpt-mha-rope", **size).num_parameters()
    for stem in PAPER:
        assert f"| `{stem}` |" in page
        assert model.build(stem, **size).num_parameters() - baseline == extra[stem]


@pytest.mark.parametrize("page", ["cluster", "data", "evaluation", "export", "runs", "serving"])
def test_commands_of_the_pages_exist(page, monkeypatch):
    commands = commands_of((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        check_command(command, monkeypatch)


def recipe_keys() -> dict[str, set]:
    """{key: its defaults} of the run and of the paper's variants."""
    found: dict[str, set] = {}
    for schema in (TrainConfig, *(model.model_class(stem).Config for stem in PAPER)):
        for name, knob in collect_options(schema).items():
            found.setdefault(name, set()).add(knob.default)
    return found


def test_the_recipe_page_has_every_key_and_its_default():
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    schema = every_option()
    for name, text in re.findall(r"`(\w+)=([^`]+)`", page):
        configurator.parse(schema[name], text)  # ValueError: no such value
    columns = [line.split(" | ")[-1] for line in page.splitlines() if line.startswith("| ")]
    stated = dict(re.findall(r"`(\w+)=([^`]+)`", " ".join(columns)))
    defaults = recipe_keys()
    for name, text in stated.items():
        assert configurator.parse(schema[name], text) in defaults[name], name
    of_run = {name for name, key in collect_options(TrainConfig).items() if not key.changeable}
    of_model = defaults.keys() - collect_options(TrainConfig).keys()
    assert stated.keys() >= of_run | of_model | {"max_steps"}


@pytest.mark.parametrize("page", ["cluster", "evaluation", "recipe", "runs", "variants"])
def test_links_between_pages_lead_to_headings(page):
    folder = ROOT / "docs"
    links = re.findall(
        r"\]\((\w+\.md)(?:#([\w-]+))?\)", (folder / f"{page}.md").read_text(encoding="utf-8")
    )
    assert links
    for target, heading in links:
        headings = re.findall(
            r"^#+ (.*)$", (folder / target).read_text(encoding="utf-8"), flags=re.M
        )
        assert not heading or heading in {
            re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
        }
