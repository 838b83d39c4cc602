"""Figures on the pages, of the core and of research/, are those of the stored results."""

import csv
import json
import re

import pytest
from helpers import ROOT
from in_process import call
from pages import check_command, commands_of

import model
from research import compare
from research.benchmarks import costs, suites
from research.runs import parse_cell

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)
DOCS = ROOT / "research" / "docs"
DEMO = (DOCS / "demo.md").read_text(encoding="utf-8")


def remove_padding(table: str) -> str:
    """Remove the spaces and dashes that pad columns to equal widths."""
    return re.sub(r" +\|", " |", re.sub(r"-{3,}", "---", table).replace(" | ", " |"))


def test_the_tables_of_the_demo_are_the_stored_results():
    result = call(
        "research/report.py",
        "table",
        ROOT / "results/demo/runs.csv",
        "--by=model,init",
        "--against=gpt-mha-rope init=spectral",
    )
    assert remove_padding(result.stdout.decode().strip()) in remove_padding(DEMO)


def test_the_speed_of_decoding_is_the_stored_result():
    stored = json.loads((ROOT / "results" / "bench_generation_cpu.json").read_text())
    ratios = [row["ratio"] for row in stored["rows"] if row["way"] == "cached"]
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert f"{min(ratios):.0f} to {max(ratios):.0f} times as fast" in " ".join(page.split())


STUDIES = sorted((ROOT / "research" / "studies").glob("*/README.md"))


PAGES = [
    ROOT / "README.md",
    ROOT / "research" / "README.md",
    # the figures of cluster.md are not measured but computed, by the functions of training/
    *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "cluster.md"}),
    *sorted(DOCS.glob("*.md")),
    *STUDIES,
]


NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?%?")


SCALES = (1, 1e-9, 2**-10, 2**-20, 2**-30)  # as it is, GB, KiB, MiB, GiB


def tables_of_figures(page: str):
    """Yield the rows of cells of every table that has mostly numbers after its first column."""
    for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.M):
        rows = [
            [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]
        ]
        cells = [cell for row in rows for cell in row[1:]]
        if 2 * sum(bool(NUMBER.match(cell)) for cell in cells) > len(cells):
            yield rows


def numbers_in(value) -> list[float]:
    """Return every number of a JSON value."""
    if isinstance(value, dict):
        return numbers_in(list(value.values()))
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [float(value)]
    return []


def names_in(value) -> set[str]:
    """Return every string of a JSON value that is not the key of an entry."""
    if isinstance(value, dict):
        return names_in(list(value.values()))
    if isinstance(value, list):
        return {name for item in value for name in names_in(item)}
    return {value} if isinstance(value, str) else set()


def bytes_moved(row: dict) -> list[float]:
    """Return the bytes that a row's model moves in a forward and a backward pass together."""
    parts = [*row["forward"].values(), *row["backward"].values()]
    return [sum(part["bytes"] for part in parts)]


DERIVED = {  # what a page computes from a stored row
    "predicted_small_h200.json": bytes_moved,
}


def summarize_qualities(rows: list[dict]) -> list[dict]:
    """Return a row for each model of peers_demo_cpu.json: means over its reported seeds."""
    losses: dict[str, list[float]] = {}
    summaries = []
    for name in ("gpt-mha-rope", "GPT-2", "DDL-gpt-mha-rope"):
        reported = [row for row in rows if row["model"] == name and row["seed"] < 1000]
        losses[name] = [row["second"] for row in reported]
        bits = [row["second"] * row["val_bits_per_byte"] / row["val_loss"] for row in reported]
        differences = compare.estimate_paired_difference(losses[name], losses["gpt-mha-rope"])
        estimates = (compare.estimate_mean(losses[name]), compare.estimate_mean(bits), differences)
        summary = {key: reported[0][key] for key in ("model", "parameters", "learning_rate")}
        numbers = [
            number
            for estimate in estimates
            for number in (estimate.n, abs(estimate.mean), estimate.half_width)
        ]
        summaries.append({**summary, "numbers": [*numbers, differences.mean]})
    return summaries


SUMMARIES = {"peers_demo_cpu.json": summarize_qualities}  # rows that a page shows together


def files_in(text: str) -> set[str]:
    """Return the files of results/ with figures that a text names."""
    return set(re.findall(r"results/((?:\w+/)*\w+\.(?:json|csv))\b", text)) - {
        "published.csv",
        "archive.csv",
    }


def stored_in(name: str) -> dict:
    """Read a file of results/; of a runs.csv, return its rows."""
    path = ROOT / "results" / name
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with open(path, encoding="utf-8", newline="") as file:
        return {
            "rows": [
                {key: parse_cell(text) for key, text in row.items()} for row in csv.DictReader(file)
            ]
        }


def values_for(cells: list[str], files: set[str]) -> list[float]:
    """Return the numbers of the stored rows that belong to a row of a table.

    In each file these are the rows that have the most names in common with the table's row.
    """
    values = []
    for name in files:
        stored = stored_in(name)
        verdicts = [row for row in stored.get("verdicts", []) if row.get("hypothesis") in cells]
        rows = verdicts or stored.get("language") or stored.get("groups")
        if not rows:
            rows = SUMMARIES.get(name, list)(stored.get("rows", []))
        num_shared_names = []
        for row in rows:
            names = [value for value in row.values() if isinstance(value, str)]
            num_shared_names.append(sum(name in cells for name in names))
        for row, count in zip(rows, num_shared_names):
            if count == max(num_shared_names):
                values += numbers_in(row) + DERIVED.get(name, numbers_in)(row)
    return values


def is_one_of(text: str, values: list[float]) -> bool:
    """Return whether some value, in some unit, is rounded to the number of a text."""
    digits, _, exponent_text = text.replace(",", "").strip("%").partition("e")
    exponent = int(exponent_text or 0)
    number = float(digits) * 10.0**exponent
    num_decimals = len(digits.partition(".")[2]) - exponent
    scales = (100,) if text.endswith("%") else SCALES
    tolerance = 0.501 * 10.0**-num_decimals
    return any(abs(value * scale - number) <= tolerance for value in values for scale in scales)


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "mup.md"], ids=str)
def test_every_table_of_figures_names_its_files_and_shows_their_numbers(path):
    page = path.read_text(encoding="utf-8")
    for rows in tables_of_figures(page):
        files = files_in(page)
        assert files, f"this table names no file of results/: {rows[0]}"
        names = names_in([stored_in(file) for file in files])
        for row in rows:
            values = values_for(row, files)
            # a name may have a number in it, as "lm-eval's hf, batch 8" has
            cells = [cell for cell in row[1:] if cell not in names]
            numbers = [number for cell in cells for number in NUMBER.findall(cell)]
            unknown = [number for number in numbers if not is_one_of(number, values)]
            assert unknown == [], (row, files)


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_every_measured_figure_in_the_text_is_in_a_file_that_the_page_names(path):
    """A measured figure has three decimals, is a percentage with decimals, or a speed."""
    page = path.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|^\|[^\n]*\n", "", page, flags=re.S | re.M)
    values = numbers_in([stored_in(name) for name in files_in(page)])
    values = [abs(value) for value in values]  # a text need not write the sign
    numbers = re.findall(r"(?<![\w./])\d+\.\d{3}\b|\d+\.\d+%|\d[\d,]*(?=\stokens/s)", text)
    assert [number for number in numbers if not is_one_of(number, values)] == []


def test_figures_are_of_committed_code():
    commits = []
    for path in (ROOT / "results").rglob("*.json"):
        stored = json.loads(path.read_text())
        # each run of an entry of the track has its own commit
        rows = stored["runs"] if path.parent.name == "cpu-1" else [stored]
        commits += [(path.stem, row["commit"]) for row in rows]
    assert [name for name, commit in commits if not re.fullmatch(r"[0-9a-f]{7,12}", commit)] == []


def test_every_stored_figure_is_named_on_a_page():
    pages = "".join(
        path.read_text(encoding="utf-8")
        for path in (*PAGES, ROOT / "research" / "track.md", *(ROOT / "results").rglob("*.md"))
    )
    stored = []
    for path in (ROOT / "results").rglob("*.*"):
        if path.parent.name == "cpu-1":
            # the track's table names entries, not their files
            model_name, is_released_form, _ = path.stem.partition("+ddl_")
            note = " (released code's form)" if is_released_form else ""
            stored.append(f"| {model_name}{note} |")
        elif path.suffix != ".md":
            stored.append(path.name)
    assert [name for name in stored if name not in pages] == []


def test_the_variants_page_has_every_stream_and_what_it_costs():
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in model.MODEL_NAMES)
    stored = json.loads((ROOT / "results" / "costs_small.json").read_text())
    assert [row["model"] for row in stored["rows"]] == list(suites.ALL_MODELS)
    assert costs.format_table(stored["rows"]) in page


@pytest.mark.parametrize(
    "models",
    [
        ["gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC", "mHC-gpt-mha-rope"],
        pytest.param(list(suites.ALL_MODELS), marks=pytest.mark.slow),
    ],
    ids=["three", "all"],
)
def test_the_costs_of_the_variants_page_are_counted(models):
    stored = json.loads((ROOT / "results" / "costs_small.json").read_text())
    stored_by_model = {row["model"]: row for row in stored["rows"]}
    rows = costs.make_rows(models, stored["size"])
    assert rows == [stored_by_model[name] for name in models]


@pytest.mark.parametrize(
    "page",
    [*(DOCS / f"{name}.md" for name in ("demo", "speed", "sweeps")), *STUDIES],
    ids=str,
)
def test_commands_of_the_pages_exist(page, monkeypatch):
    commands = commands_of(page.read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        check_command(command, monkeypatch)
