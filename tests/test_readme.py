"""What the README shows is what the repository does."""

import importlib
import json
import re
import shlex
import sys

import pytest
from conftest import ROOT, SMALL
from test_model import PAPER

import configurator
import model
import report
import train
from benchmarks import ceiling, step

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)


DEMO = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")


def squeezed(table: str) -> str:
    """Without what pads columns to equal widths."""
    return re.sub(r" +\|", " |", re.sub(r"-{3,}", "---", table).replace(" | ", " |"))


def test_the_tables_of_the_demo_are_the_stored_results():
    stored = json.loads((ROOT / "results" / "demo.json").read_text())
    assert squeezed(report.markdown(stored["rows"])) in squeezed(DEMO)
    trained = json.loads((ROOT / "results" / "demo_variants.json").read_text())["rows"]
    measured = {row["model"]: row for row in json.loads((ROOT / "results" / "bench_step_cpu.json").read_text())["rows"]}
    for row in trained:
        speed = measured[row["model"]]
        spread = f"{speed['ratio']:.2f} ({speed['ratio_p10']:.2f} to {speed['ratio_p90']:.2f})"
        assert f"| `{row['model']}` | {row['parameters']:,} | {row['val_bits_per_byte']:.3f} | {spread} |" in DEMO
        assert row["parameters"] == speed["parameters"]


def test_the_table_of_ceilings_is_the_stored_result():
    stored = json.loads((ROOT / "results" / "ceiling_sm90.json").read_text())
    assert ceiling.markdown(stored["rows"]) in (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_the_table_of_speeds_is_the_stored_result():
    stored = json.loads((ROOT / "results" / "bench_quick_cpu.json").read_text())
    assert step.markdown(stored["rows"]) in (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_the_speed_of_evaluation_is_the_stored_results():
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    stored = [json.loads((ROOT / "results" / f"bench_eval_{name}.json").read_text()) for name in ("cpu", "cpu_gpt2")]
    ratios = [row["ratio"] for each in stored for row in each["rows"] if row["format"] == "all"]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as fast" in " ".join(page.split())


def test_the_speed_of_decoding_is_the_stored_result():
    stored = json.loads((ROOT / "results" / "bench_generation_cpu.json").read_text())
    ratios = [row["ratio"] for row in stored["rows"] if row["way"] == "cached"]
    assert f"{min(ratios):.0f} to {max(ratios):.0f} times as fast" in " ".join(README.split())


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    assert all((ROOT / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_the_excerpt_is_from_the_stored_sample():
    stored = (ROOT / "results" / "demo_sample.txt").read_text(encoding="utf-8")
    excerpt = next(text for language, text in BLOCKS if language == "python")
    assert excerpt.strip() in stored


def test_the_variant_table_names_files_that_fit():
    rows = re.findall(r"^\|.*`([\w-]+)\.py` \| `(\w+)\.py`, `(\w+)\.py`", README, flags=re.M)
    assert [stem for stem, _, _ in rows] == PAPER
    for stem, *configs in rows:
        for config in configs:
            assert configurator.read_file(str(ROOT / "config" / f"{config}.py"))["model"] == stem


def commands_of(text: str) -> list[str]:
    """Lines of the shell blocks, comments cut off."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "pip "))]


def check_command(command: str, monkeypatch) -> None:
    """Fails if a file is not there or an option is unknown."""
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M)
        schema = configurator.knobs(train.TrainConfig, *(model.model_class(stem).Config for stem in model.STEMS))
        assert set(re.findall(r"--(\w+)=", command)) <= schema.keys()
        return
    place = next(i for i, word in enumerate(words) if word.endswith((".py", ".sbatch")))
    script, arguments = words[place], words[place + 1 :]
    assert (ROOT / script).is_file()
    configs = [word for word in arguments if word.startswith("config/")]
    if script == "train.py":
        for config in configs:
            train.configure([config])
        schema = configurator.knobs(train.TrainConfig, *(model.model_class(stem).Config for stem in model.STEMS))
        options = [word[2:].partition("=")[0] for word in arguments if word.startswith("--")]
        assert set(options) <= schema.keys()
    elif script in ("eval.py", "sample.py", "export.py"):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        module = importlib.import_module(script.removesuffix(".py"))
        args = module.arguments()
        getattr(module, "check", vars)(args)


@pytest.mark.usefixtures("example_streams")
@pytest.mark.parametrize("command", commands_of(README))
def test_commands_exist(command, monkeypatch):
    check_command(command, monkeypatch)


def test_the_example_stream_is_that_of_the_contract():
    """tests/test_contract.py trains it, among much else."""
    source = [text for language, text in BLOCKS if language == "python"][1]
    assert source == (ROOT / "tests" / "streams" / "gated-gpt-mha-rope.py").read_text(encoding="utf-8")


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
    token, column = (L + 1) * (d * v * K + v), (L + 1) * d * v
    extra = {"gpt-mha-rope": 0, "DDL-vdim1-gpt-mha-rope": 2 * L * (2 * d + 2), "DDL-gpt-mha-rope": ddl + token}
    extra |= {"DDL-gpt-mha-rope-EC": ddl + token + d * v * K_e, "DDL-gpt-mha-rope-CC": ddl + column}
    extra |= {"DDL-gpt-mha-rope-CC-EC": ddl + column + d * v * K_e}
    size = {**SMALL, "hidden_size": d, "num_hidden_layers": L}
    baseline = model.build("gpt-mha-rope", **size).num_parameters()
    for stem in PAPER:
        assert f"| `{stem}` |" in page
        assert model.build(stem, **size).num_parameters() - baseline == extra[stem]


def test_the_speed_of_the_data_is_the_stored_result():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    [row] = json.loads((ROOT / "results" / "bench_data_cpu.json").read_text())["rows"]
    for text in (
        f"{row['prepare_tokens_per_second']:,.0f} tokens/s: {row['ratio']:.2f}",
        f"{row['ratio_worst']:.2f}) of",
    ):
        assert text in page
    for text in (
        f"| {row['peak_memory_bytes'] / 2**20:.0f} MiB |",
        f"| {row['loader_tokens_per_second']:,.0f} tokens/s |",
    ):
        assert text in page
    assert f"| {row['waiting_share']:.3%}; {row['making_share']:.3%} of the step |" in page


@pytest.mark.parametrize("page", ["data", "demo", "evaluation", "export", "mup", "runs", "serving", "sweeps"])
def test_commands_of_the_pages_exist(page, monkeypatch):
    commands = commands_of((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        check_command(command, monkeypatch)
