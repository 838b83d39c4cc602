"""report.py paper: the figures, whose legends hide nothing, the folder, and LaTeX."""

import json
import re
import shutil
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from helpers import one_line_error
from in_process import call
from matplotlib.backends.backend_agg import FigureCanvasAgg
from paper_helpers import BASE, DDL, loaded, write_run

from evaluation import tables
from research import intervals
from research.reporting import bands, figures, paper


def drawn(number, name, size="small", stem=None, points=8, published=None):
    """A group of two runs whose loss falls; the curves of different groups are apart."""
    steps = np.linspace(100, 800, points)
    mean = 3 + 200 / steps - 0.05 * number
    x = {"steps": steps, "tokens": 2048 * steps, "flops": 1e10 * steps, "seconds": 0.2 * steps}
    curve = bands.Curve(steps, x, mean, np.full(points, 0.02), 2)
    group = figures.Drawn(name, number, size, stem or name, number == 0, published=published)
    group.curves = {"training": curve, "validation": curve} | ({"difference": curve} if number else {})
    values = np.stack([np.linspace(0, 1, points), np.linspace(1, 0, points)], axis=1)
    group.residual = {site: {"beta": (steps, values)} for site in ("attn", "mlp")} if number else {}
    return group


def boxes(figure):
    """(legend, [each panel with its labels]) in pixels, as they are laid out."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    return [each.get_window_extent(renderer) for each in figure.legends], [
        axis.get_tightbbox(renderer) for axis in figure.axes if axis.get_visible()
    ]


def made(groups):
    """Every figure of these groups, by name."""
    rows = [(g, intervals.Estimate(-0.1 * g.number, 0.03, 1, 2), "undecided") for g in groups if not g.is_baseline]
    residual = next(iter(figures.kinds_of([group for group in groups if group.residual]).values()))
    with figures.printed():
        return {
            "curves": figures.curves(groups),
            "costs": figures.costs(groups),
            "differences": figures.differences(groups, BASE, "bits per byte"),
            "final": figures.forest(rows, BASE, "bits per byte"),
            "residual": figures.residual(residual),
        }


def many(count):
    return [drawn(n, f"{BASE} learning_rate={0.001 * n:.3f} beta2=0.95") for n in range(count)]


def sizes():
    """Of three sizes, the last with a run that was not evaluated."""
    names = "12 layers, width 768", "24 layers, width 1024", "100 layers, width 10240"
    groups = [drawn(n, f"{DDL}-{n}, {size}", size, f"{DDL}-{n}") for size in names for n in range(2)][:-1]
    del groups[-1].curves["validation"]
    return groups


@pytest.mark.parametrize("groups", [many(2), many(20), sizes()], ids=["2", "20", "sizes"])
def test_nothing_in_a_figure_covers_anything(groups):
    for name, figure in made(groups).items():
        with figures.printed():
            legends, panels = boxes(figure)
        inside = figure.bbox.padded(1)
        assert len(legends) == (name in ("curves", "costs", "differences")), name
        for index, box in enumerate(panels + legends):
            assert inside.x0 <= box.x0 <= box.x1 <= inside.x1, name
            assert inside.y0 <= box.y0 <= box.y1 <= inside.y1, name
            assert not any(box.padded(-1).overlaps(other) for other in (panels + legends)[:index]), name
        for axis in figure.axes:
            texts = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
            low, high = axis.get_xlim()
            shown = [b for b, tick in zip(texts, axis.get_xticks()) if low <= tick <= high]
            assert not any(one.overlaps(two) for one, two in pairwise(shown)), name


def test_a_panel_without_curves_says_so():
    figure = made(sizes())["curves"]
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert texts == ["not evaluated"]
    assert len(made(sizes())["costs"].axes) == 2 * 4


def test_text_is_readable_and_every_line_differs():
    figure = made([drawn(number, f"model {number}") for number in range(20)])["curves"]
    text = figure.findobj(matplotlib.text.Text)
    assert min(each.get_fontsize() for each in text if each.get_text()) >= 8
    looks = {(line.get_color(), line.get_linestyle(), line.get_label()) for line in figure.axes[0].lines}
    assert len({look[:2] for look in looks}) == len(looks) == 20


def test_the_papers_six_panels():
    stems = [BASE, "DDL-vdim1-gpt-mha-rope", DDL]
    groups = [drawn(n, f"{s}, {size}", size, s) for size in ("small", "medium") for n, s in enumerate(stems)]
    groups += [drawn(n, f"{DDL}-{way}, small", "small", f"{DDL}-{way}") for n, way in enumerate(("EC", "CC"), 3)]
    with figures.printed():
        figure = figures.curves(groups)
    top, bottom = np.reshape(figure.axes, (2, 3))
    assert [axis.get_title() for axis in top] == ["small", "medium", "small,\nDDL variants"]
    assert {axis.get_xlabel() for axis in bottom} == {figures.AXES["tokens"]}
    for axes in (top, bottom):
        names = [[line.get_label() for line in axis.lines] for axis in axes]
        assert names[0] == [f"{stem}, small" for stem in stems]
        assert names[1] == [f"{stem}, medium" for stem in stems]
        assert names[2] == [f"{stem}, small" for stem in (BASE, DDL, f"{DDL}-EC", f"{DDL}-CC")]
    curve = groups[0].curves["validation"]
    assert bottom[0].lines[0].get_ydata().tolist() == curve.mean.tolist()
    assert bottom[0].lines[0].get_xdata().tolist() == curve.x["tokens"].tolist()
    band = bottom[0].collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((min(curve.mean - curve.half), max(curve.mean + curve.half)))


def test_an_interval_is_drawn_as_it_is():
    rows = [
        (drawn(1, "a"), intervals.interval([1.0, 2.0]), "undecided"),
        (drawn(2, "b"), intervals.interval([3.0]), "x"),
    ]
    with figures.printed():
        axis = figures.forest(rows, BASE, "loss").axes[0]
    (bars,) = axis.containers[0][2]
    assert sorted(bars.get_segments()[0][:, 0]) == pytest.approx([1.5 - 6.3531, 1.5 + 6.3531], rel=1e-4)
    assert len(axis.containers) == 2
    assert [text.get_text() for text in axis.texts] == ["+1.5000 ± 6.3531 (2)  undecided", "+3.0000 (1)  x"]


def test_numbers_on_axes_are_short():
    for value, letters, text in (
        (0, "KMBT", "0"),
        (1500, "KMBT", "1.5K"),
        (4.9e10, "KMBT", "49B"),
        (2e13, "KMGT", "20T"),
    ):
        assert figures.short(value, letters) == text
    assert figures.short(0.5, "KMBT") == "0.5"
    assert figures.short(3e21, "KMBT") == "3e+09T"


def test_latex_is_whole():
    header, rows = ["model & co", "a_b"], [["x % y", "1 ± 2"], ["{z}", None], ["published", "#~^\\"]]
    text = tables.latex(header, rows, below=("published",))
    plain = re.sub(r"\\[&%$#_{}]", "", text)
    assert plain.count("{") == plain.count("}")
    lines = [line for line in plain.splitlines() if line.endswith("\\\\")]
    assert [line.count("&") for line in lines] == [1] * 4
    assert plain.count("$") % 2 == 0
    assert not set("#%_^~") & set(plain)
    assert plain.splitlines()[0] == r"\begin{tabular}{lr}"
    assert [plain.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")] == [1, 2, 1, 1]
    assert r"x \% y & 1 $\pm$ 2 \\" in text
    assert r"\{z\} & - \\" in text


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report that the script has written of four runs."""
    folder = tmp_path_factory.mktemp("paper")
    for number, (stem, seed) in enumerate(((BASE, 0), (BASE, 1), (DDL, 0), (DDL, 1))):
        write_run(folder / f"runs/{number}", stem, seed, better=0.5 * number)
    ended = call("research/report.py", "paper", folder / "runs", f"--out={folder / 'out'}")
    assert ended.stdout.decode() == f"wrote {folder / 'out' / 'report.md'}\n"
    return folder


def test_the_folder(written):
    out = written / "out"
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    drawings = {
        f"figures/{name}.{kind}"
        for name in ("curves", "costs", "differences", "final", "residual_beta")
        for kind in ("png", "svg")
    }
    assert names == drawings | {"report.md", "report.json", "tables.tex", "curves.csv"} | {
        f"{name}.csv" for name in ("validation", "differences", "costs", "runs")
    }
    stored = json.loads((out / "report.json").read_text())
    assert stored.keys() >= {"command", "commit", "machine", "date", "tables", "left_out"}
    assert [row["run"] for row in stored["tables"]["runs"]["rows"]] == ["0", "1", "2", "3"]
    latex = (out / "tables.tex").read_text()
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == 4
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in drawings if name.endswith("png"))
    markdown = (out / "report.md").read_text()
    assert all((out / name).is_file() for name in re.findall(r"\]\((.*?)\)", markdown))


def test_mistakes_end_in_one_line(written, tmp_path):
    run = written / "runs/0"
    (tmp_path / "mine.txt").write_text("kept")
    assert "no report" in one_line_error(call("research/report.py", "paper", run, f"--out={tmp_path}"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    out = f"--out={tmp_path / 'new'}"
    assert "not there" in one_line_error(call("research/report.py", "paper", tmp_path / "nothing", out))
    for option, said in (("--against=nobody", "none of the rows"), ("--by=sead", "sead"), ("--where=seed=9", "no run")):
        ended = call("research/report.py", "paper", run, out, option)
        lines = ended.stderr.decode().strip().splitlines()
        assert ended.returncode == 2, option
        assert said in lines[-1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "mine", ["notes.txt", "checkpoints/a/b.bin", "figures/mine.png", "mine.csv", "figures/costs.pdf"]
)
def test_a_report_with_something_else_beside_it_is_refused(written, tmp_path, mine):
    out, run = tmp_path / "out", written / "runs/0"
    assert call("research/report.py", "paper", run, f"--out={out}").returncode == 0
    assert (
        call("research/report.py", "paper", run, f"--out={out}").returncode == 0
    )  # of an earlier report nothing is refused
    (out / mine).parent.mkdir(parents=True, exist_ok=True)
    (out / mine).write_text("kept")
    error = one_line_error(call("research/report.py", "paper", run, f"--out={out}"))
    assert mine.split("/")[0] in error
    assert (out / mine).read_text() == "kept"


def test_every_file_of_a_report_is_known_as_one(written, tmp_path):
    shutil.copytree(written / "out", out := tmp_path / "out")
    for name in ("accuracy_0_shot_float32.csv", "figures/residual_gate.svg"):  # of other runs
        (out / name).touch()
    paper.check(out)
    for text in ("{}", "[]", '{"tables": {}}', "no JSON"):  # somebody else's report.json
        (out / "report.json").write_text(text)
        with pytest.raises(ValueError, match="no report"):
            paper.check(out)


def test_an_interrupted_report_leaves_the_earlier_one(written, tmp_path, monkeypatch):
    made = paper.make(loaded(written / "runs/0"), [], [], None, "tokens")
    out = tmp_path / "out"
    paper.write(made, out)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    def interrupted(*_):
        raise KeyboardInterrupt

    for name in ("store", "texts"):
        with monkeypatch.context() as patch:
            patch.setattr(paper, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                paper.write(made, out)
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    out.rename(tmp_path / ".out.old")  # killed as it put the new one in its place
    with monkeypatch.context() as patch:
        patch.setattr(paper, "texts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            paper.write(made, out)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    paper.write(made, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
