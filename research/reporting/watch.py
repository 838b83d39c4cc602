"""`report.py curves --watch`: the picture of runs that train, drawn again as their metrics.jsonl grow.

No server: beside the picture lies a page that a browser opens as a file and loads again by itself. Of a metrics.jsonl
only what is new is read.
"""

import html
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import configurator
from research.reporting import records, runs
from training import metrics, stopping

OVER = {"finished", "failed"}  # a run that was stopped may go on
NO_STATUS = {"step": 0, "of": None, "ended": None, "reason": ""}
RECENT = 20  # training steps whose speed counts
TAIL = 256  # bytes by which a file is known again
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
{refresh}<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 1rem auto; padding: 0 1rem }}
img {{ max-width: 100%; background: white }}
table {{ border-collapse: collapse }}
th, td {{ padding: 0.1rem 1.2rem 0.1rem 0; text-align: left; font-variant-numeric: tabular-nums }}
</style>
<h1>{title}</h1>
{picture}
<table>
<tr><th>run</th><th>step</th><th>loss</th><th>validation</th><th>tokens/s</th><th>time left</th><th></th></tr>
{rows}
</table>
<p>{note}</p>
</html>
"""


@dataclass
class Followed:
    """A run folder whose metrics.jsonl is read as it grows. `tail`: the last bytes before `offset`."""

    folder: Path
    offset: int = 0
    tail: bytes = b""
    lines: list = field(default_factory=list)  # frames of records.NUMBERS
    evaluated: list[dict] = field(default_factory=list)
    residual: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    status: dict = field(default_factory=NO_STATUS.copy)

    def forget(self) -> None:
        self.offset, self.tail = 0, b""
        self.lines, self.evaluated, self.residual, self.notes = [], [], [], []

    def advance(self) -> bool:
        """Read what is new; whether anything is."""
        before, status = self.offset, self.read_status()
        changed, self.status = status != self.status, status
        try:
            with open(self.folder / "metrics.jsonl", "rb") as file:
                start = max(self.offset - len(self.tail), 0)
                file.seek(start)
                data = file.read()
                if data[: len(self.tail)] != self.tail:  # a run that went on from an earlier step
                    self.forget()
                    file.seek(0)
                    data = file.read()
        except OSError:
            self.forget()
            return changed or before > 0
        new = data[len(self.tail) : data.rfind(b"\n") + 1]
        if new:
            self.take(new)
            self.offset += len(new)
            self.tail = (self.tail + new)[-TAIL:]
        return changed or self.offset != before

    def take(self, data: bytes) -> None:
        """Whole lines."""
        lines, evaluated, residual, notes = records.parsed(data)
        self.lines.append(lines)
        self.evaluated += evaluated
        self.residual += residual
        self.notes += notes

    def read_status(self) -> dict:
        try:
            return stopping.read_status(self.folder)
        except ValueError:  # damaged
            return NO_STATUS

    def run(self, points: int = runs.POINTS) -> runs.Run | None:
        """The run so far; None before its first step."""
        pl = records.polars()
        self.lines = [pl.concat(self.lines)] if self.lines else []
        if not self.lines or not self.lines[0].height:
            return None
        read = (self.lines[0], self.evaluated, self.residual, points, list(self.notes))
        return runs.run_of(self.folder, records.metrics_of(pl, *read))

    def cells(self) -> list[str]:
        """Run, step, loss, validation loss, tokens/s, time left, how it ended."""
        steps, ended = self.status.get("of"), self.status.get("ended") or ""
        name, of = self.folder.resolve().name, f" of {steps:,}" if steps else ""
        if not self.lines:
            return [name, "no step yet", "", "", "", "", ended]
        training = self.lines[0].drop_nulls("loss").tail(RECENT)
        validation = f"{self.evaluated[-1]['val_loss']:.4f}" if self.evaluated else ""
        if not training.height:
            return [name, "", "", validation, "", "", ended]
        step, loss, rate = int(training["step"][-1]), training["loss"][-1], training["tokens_per_second"].mean()
        left = ""
        if steps and rate and not ended:
            left = metrics.duration((steps - step) * training["tokens"][-1] / step / rate)
        return [name, f"{step:,}{of}", f"{loss:.4f}", validation, f"{rate:,.0f}" if rate else "", left, ended]


def watch(paths: list[str], every: float, out: Path, draw) -> None:
    """Until all runs are over: draw(runs) where something is new, and write the page beside `out`.

    paths: run folders, also such as are not there yet, and folders of runs. draw: takes a list of `Run`, writes `out`.
    """
    followed: dict[Path, Followed] = {}
    said, page, drawn = "", out.with_suffix(".html"), False
    print(f"watching: open {page.resolve()} in a browser; Ctrl+C ends it", flush=True)
    while True:
        for folder in [folder for path in map(Path, paths) for folder in folders_of(path)]:
            followed.setdefault(folder, Followed(folder))
        followed = {folder: each for folder, each in followed.items() if not holds_runs(folder)}
        news = [each.advance() for each in followed.values()]
        over = all(each.status["ended"] in OVER for each in followed.values())
        if any(news) or over or not drawn:
            drawn, text = refresh(list(followed.values()), out, page, draw, None if over else every)
            said = say(text, said)
        if over and drawn:
            return
        waiting = [each.folder.name for each in followed.values() if not each.offset]
        said = say(f"waiting for the first step of {', '.join(waiting)}" if waiting else "", said)
        time.sleep(every)


def say(text: str, said: str) -> str:
    """Print a line that is not the last one that was printed."""
    if text and text != said:
        print(text, flush=True)
    return text or said


def folders_of(path: Path) -> list[Path]:
    """Run folders below a path, or the path where it holds none yet."""
    return (runs.run_folders(path) if path.is_dir() else []) or [path]


def holds_runs(folder: Path) -> bool:
    """Whether it is no run itself, but runs are below it: a sweep that was named before its first run."""
    return folder.is_dir() and not runs.is_run(folder) and bool(runs.run_folders(folder))


def refresh(followed: list[Followed], out: Path, page: Path, draw, every: float | None) -> tuple[bool, str]:
    """Draw the picture and write the page: (whether both are there, what is to be said).

    every: None where nothing more will come. ValueError: there is nothing to draw then.
    """
    found = [run for run in (each.run() for each in followed) if run]
    if not found:
        return False, ""
    try:
        draw(found)
        write_page(followed, out, page, every)
    except OSError as error:
        return False, f"{out} cannot be written ({error.strerror or error}): trying again"
    except ValueError as error:  # before the first checkpoint nobody knows the size of its text
        if every is None:
            raise
        return False, f"{error}: trying again"
    return True, f"drew {out}"


def write_page(followed: list[Followed], out: Path, page: Path, every: float | None) -> None:
    rows = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in each.cells()) + "</tr>" for each in followed]
    version = f"{os.stat(out).st_mtime_ns}"
    refresh = f'<meta http-equiv="refresh" content="{max(every, 1):g}">\n' if every else ""
    note = "Loads itself again while the runs train." if every else "All runs are over."
    text = PAGE.format(
        refresh=refresh,
        title=html.escape(", ".join(each.folder.resolve().name for each in followed)),
        picture=f'<img src="{html.escape(out.name)}?{version}" alt="loss curves of the runs below">',
        rows="\n".join(rows),
        note=note,
    )
    configurator.replace_text(page, text)
