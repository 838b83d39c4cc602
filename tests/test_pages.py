"""The pages agree with the repository: their links, commands and code, and the tables of the paper's models."""

import functools
import hashlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, SMALL, configure, every_option
from in_process import call
from models import PAPER

import model
from configurator import collect_options
from model.ddl import DeltaRewrite
from model.ddl_config import ExpandedConfig
from training.config import TrainConfig

HAS_RESEARCH = (ROOT / "research").exists()
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "research/**/*.md", "results/**/*.md")
    for page in sorted(ROOT.glob(pattern))
]


def read_page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


README = read_page("README.md")
VARIANTS = read_page("docs/variants.md")
RECIPE = read_page("docs/recipe.md")


# ---- links ----


@functools.cache
def list_anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        if path.startswith("http") or ("research/" in path and not HAS_RESEARCH):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in list_anchors(target), f"{path}#{anchor}"


# ---- tables ----


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_have_a_head_and_as_many_cells_in_each_row(page):
    """An empty line within a table, for example, would end it."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    tables = re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.M)
    for table in tables:
        head, rule, *rows = [re.split(r"(?<!\\)\|", line) for line in table.splitlines()]
        assert {cell.strip(" -:") for cell in rule} == {""}, head
        assert {len(row) for row in (rule, *rows)} == {len(head)}, head


# ---- commands ----


def list_commands(text: str) -> list[str]:
    """Return the commands of a page that start a script, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text.replace("\\\n", " "), flags=re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    # the files in a loop have no fixed names
    return [line for line in lines if re.search(r"\w\.(py|sbatch)\b", line) and "${" not in line]


def list_all_commands() -> list[str]:
    commands = [command for page in PAGES for command in list_commands(read_page(page))]
    cells = json.loads(read_page("docs/colab.ipynb"))["cells"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    variables = {"{OPTIONS}": "--max_steps=800", "{CHANGES}": "--ddl_beta_init=0.5"}
    for line in lines:
        if line.startswith("!python "):
            for name, value in variables.items():
                line = line.replace(name, value)
            commands.append(line.removeprefix("!"))
    return sorted(set(commands))


@functools.cache
def read_help(*words: str) -> str:
    """Return what --help prints for a script, its command or its config files."""
    result = call(*words, "--help")
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def find_subcommand(script: str, arguments: list[str]) -> list[str]:
    """Return the word that selects one of the commands of a script of research/, if it has several."""
    if script in ("research/analyze.py", "research/report.py"):
        return arguments[:1]
    if script == "research/bench.py":
        return ["kernels"] if "kernels" in arguments else ["step"]
    return []


@pytest.mark.usefixtures("example_streams")
@pytest.mark.parametrize("command", list_all_commands())
def test_commands_name_files_and_options_that_exist(command):
    words = shlex.split(command)
    [script_index, *_] = [i for i, word in enumerate(words) if re.search(r"\.(py|sbatch)$", word)]
    script = words[script_index]
    arguments = words[script_index + 1 :]
    assert (ROOT / script).is_file() or (script.startswith("research/") and not HAS_RESEARCH)
    if words[0] == "cp" or "pytest" in words or not (ROOT / script).is_file():
        return
    option_names = {word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
    config_files = [word for word in arguments if word.startswith("config/")]
    if script in ("train.py", "docs/slurm.sbatch"):
        configure(config_files)
        assert option_names - {"help"} <= every_option().keys()
    elif script in ("research/sweep.py", "research/track.py"):
        names_in_help = re.findall(r"--(\w+)", read_help(script))
        assert option_names <= every_option().keys() | set(names_in_help)
    else:
        subcommand = find_subcommand(script, arguments)
        assert option_names <= set(re.findall(r"--(\w+)", read_help(script, *subcommand)))


def test_the_notebook_is_stored_without_outputs_and_imports_what_exists():
    cells = json.loads(read_page("docs/colab.ipynb"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = "".join(line for cell in cells for line in [*cell["source"], "\n"])
    imports = re.findall(r"^from (?!IPython)[\w.]+ import .*$", code, flags=re.M)
    assert imports
    exec("\n".join(imports), {})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("", "--seed=1"),
        ("--dataset=a/b", "--dataset=a_b"),
        ("--seed=1 " + "--weight_decay=0.1 " * 40, "--seed=1 " + "--weight_decay=0.1 " * 41),
    ],
    ids=["none", "same characters", "long"],
)
def test_make_gives_other_arguments_another_run_folder(first, second):
    folders = []
    for arguments in (first, second):
        command = ["make", "--dry-run", "train", f"ARGS={arguments}"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        folders += re.findall(r'--out_dir="(runs/[\w.,=-]{1,90})" --resume=auto', result.stdout)
    assert len(set(folders)) == 2


# ---- code ----


def find_block(text: str) -> str:
    """Return the block of code of the README with some text in it."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    return next(block for block in blocks if text in block)


def test_the_code_of_the_delta_write_is_that_of_the_model():
    """The README shows the write of config/ddl_dv4_small.py, here with the mean as its read."""
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
    assert find_block("class GatedWrite") == read_page("tests/streams/gated-gpt-mha-rope.py")


def test_the_code_on_the_variants_page_is_the_models():
    paths = [*(ROOT / "model").glob("*.py"), *(ROOT / "model" / "streams").glob("*.py")]
    lines = {line.strip() for path in paths for line in read_page(path).splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", VARIANTS, flags=re.S)
    assert blocks
    for block in blocks:
        assert {line.strip() for line in block.splitlines()} <= lines


# ---- the paper's models ----


def test_the_tables_name_the_models():
    rows = re.findall(r"^\|.*`([\w-]+)\.py` \| (`[^|]*`)", README, flags=re.M)
    assert [model_name for model_name, _ in rows] == PAPER
    for model_name, config_files in rows:
        for config_name in re.findall(r"`(\w+\.py)`", config_files):
            config, _ = configure([str(ROOT / "config" / config_name)])
            assert config.model == model_name
    assert [name for name in model.MODEL_NAMES if f"`{name}`" not in VARIANTS] == []


def test_the_table_of_the_papers_runs_has_their_parameters_and_published_losses():
    published = read_page("results/published.csv")
    rows = re.findall(r"^\| `(\w+_(small|medium))` \| (\w+) \|.*\| ([\d.]+) \|", README, flags=re.M)
    assert len(rows) == 12
    for name, size, parameters, published_loss in rows:
        config, model_config = configure([str(ROOT / "config" / f"{name}.py")])
        with torch.device("meta"):
            num_parameters = model.build(config.model, model_config).num_parameters()
        assert parameters == f"{num_parameters / 1e6:.0f}M"
        loss = re.search(rf"^{size},,{config.model},val_loss,([\d.]+),", published, flags=re.M)[1]
        assert published_loss == f"{float(loss):.3f}"


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


def read_stated_defaults() -> dict[str, str]:
    """Return the defaults in the last columns of the tables of the recipe page."""
    rows = [line for line in RECIPE.splitlines() if line.startswith("| ")]
    last_columns = " ".join(row.split(" | ")[-1] for row in rows)
    return dict(re.findall(r"`(\w+)=([^`]+)`", last_columns))


def test_values_and_defaults_on_the_recipe_page_are_those_of_the_options():
    options = every_option()
    for key, text in re.findall(r"`(\w+)=([^`]+)`", RECIPE):
        options[key].parse(text)  # raises ValueError if the option refuses the value
    defaults = collect_defaults()
    for key, text in read_stated_defaults().items():
        assert options[key].parse(text) in defaults[key], key


def test_the_recipe_page_has_every_option_that_changes_training():
    train_options = collect_options(TrainConfig)
    fixed = {key for key, declared in train_options.items() if not declared.changeable}
    model_keys = collect_defaults().keys() - train_options.keys()
    assert read_stated_defaults().keys() >= fixed | model_keys | {"max_steps"}


def test_the_page_of_the_gpu_knows_which_kernels_have_changed_since_they_ran():
    """Each file of model/kernels/ has a row, with the digest of the file that ran on the GPU."""
    page = read_page("results/gpu/README.md")
    rows = re.findall(r"^\|[^|]*\| `(\w+\.py)` \| ?(\w*) \| (.*) \|$", page, flags=re.M)
    files = {path.name: path for path in (ROOT / "model/kernels").glob("*.py")}
    assert sorted(name for name, _, _ in rows) == sorted(files)
    for name, digest, today in rows:
        is_same = hashlib.sha256(files[name].read_bytes()).hexdigest().startswith(digest)
        expected = "unchanged" if is_same else "changed"
        assert today == (expected if digest else "never ran"), name
