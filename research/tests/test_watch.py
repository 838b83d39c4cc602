"""report.py curves --watch: what is read of a run that trains, and the page beside the picture."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, small_run
from in_process import call
from report_helpers import write_run
from runs_helpers import lines_of_a_run, only, write

from research.reporting import records, watch
from training import stopping


def append(folder, lines):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def curve(followed):
    """(losses, steps of evaluations) so far."""
    run = followed.run()
    return run and (run.training["loss"].to_list(), run.evaluations["step"].to_list())


def read_at_once(folder):
    metrics = records.read(folder / "metrics.jsonl", 10**6)
    return metrics.training["loss"].to_list(), metrics.evaluations["step"].to_list()


def test_a_file_that_grows_is_read_once(tmp_path, monkeypatch):
    """In parts of any length, cut anywhere; every byte is parsed once."""
    whole = write(tmp_path / "whole", lines_of_a_run(200)) / "metrics.jsonl"
    data, folder = whole.read_bytes(), tmp_path / "run"
    folder.mkdir()
    followed, parsed = watch.Followed(folder), []
    original = records.parsed
    monkeypatch.setattr(records, "parsed", lambda part: parsed.append(part) or original(part))
    for start in range(0, len(data), 997):
        with open(folder / "metrics.jsonl", "ab") as file:
            file.write(data[start : start + 997])
        followed.advance()
        if followed.offset:
            read = data[: followed.offset]
            assert read.endswith(b"\n")
            assert len(data[: start + 997]) - len(read) < 400
    assert b"".join(parsed) == data
    assert curve(followed) == read_at_once(tmp_path / "whole")
    assert not followed.advance()


@pytest.mark.parametrize("steps", [40, 120, 200])  # shorter than before, as long, longer
def test_a_run_that_went_on_from_an_earlier_step_is_read_again(tmp_path, steps):
    folder = write(tmp_path / "run", lines_of_a_run(120))
    followed = watch.Followed(folder)
    followed.advance()
    before = [line for line in lines_of_a_run(120) if line["step"] <= 30]
    after = [{**line, "seconds": line["seconds"] + 9} for line in lines_of_a_run(steps, seed=1) if line["step"] > 30]
    write(folder, [*before, *after])
    assert followed.advance()
    assert curve(followed) == read_at_once(folder)
    append(folder, [line for line in lines_of_a_run(steps + 20) if line["step"] > steps])
    assert followed.advance()
    assert curve(followed) == read_at_once(folder)


def test_a_run_that_is_not_there_yet_and_one_that_is_removed(tmp_path):
    folder = tmp_path / "run"
    followed = watch.Followed(folder)
    assert not followed.advance()
    assert followed.run() is None
    write(folder, lines_of_a_run(30))
    assert followed.advance()
    (folder / "metrics.jsonl").rename(tmp_path / "gone")
    assert followed.advance()
    assert followed.run() is None
    assert followed.cells()[1] == "no step yet"
    (tmp_path / "gone").rename(folder / "metrics.jsonl")
    assert followed.advance()
    assert curve(followed) == read_at_once(folder)


def test_damage_in_the_middle_is_named_and_the_rest_is_drawn(tmp_path):
    folder = write(tmp_path / "run", ["}{", *lines_of_a_run(30)])
    followed = watch.Followed(folder)
    followed.advance()
    assert "no JSON" in followed.run().notes[0]
    assert curve(followed) == read_at_once(folder)


def test_the_cells_of_the_page(tmp_path):
    folder = write_run(tmp_path / "run", [4.0, 3.0, 2.5], val=2.0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write(folder, [{**line, "tokens_per_second": 5.0} if "loss" in line else line for line in lines])
    stopping.write_status(folder, 3, 103, None)
    followed = watch.Followed(folder)
    followed.advance()
    # Ten tokens a step at five a second: the hundred steps to come take 200 seconds.
    assert followed.cells() == ["run", "3 of 103", "2.5000", "2.0000", "5", "3:20", ""]
    stopping.write_status(folder, 3, 103, "stopped")
    assert followed.advance()
    assert followed.cells()[-2:] == ["", "stopped"]


def test_a_finished_run_is_drawn_once_and_nothing_is_left_half_written(tmp_path):
    folder = write_run(tmp_path / "a <run>", [4, 3, 2, 1])
    stopping.write_status(folder, 4, 4, "finished")
    printed = call("research/report.py", "curves", folder, "--watch=0.01")
    assert printed.returncode == 0
    assert printed.stdout.decode().splitlines()[-1] == f"drew {folder / 'loss.png'}"
    page = (folder / "loss.html").read_text()
    assert "a &lt;run&gt;" in page
    assert "http-equiv" not in page
    assert re.search(r'src="loss.png\?\d+"', page)
    names = {path.name for path in folder.iterdir()}
    assert names == {"metrics.jsonl", "status.json", "checkpoints", "loss.png", "loss.html"}


def test_a_real_run_is_watched_from_before_its_start_to_its_end(corpus, tmp_path):
    """The watcher is there first; the run begins, is drawn while it trains, and ends with the watcher after it."""
    out = tmp_path / "runs" / "small"
    words = [sys.executable, "research/report.py", "curves", out, "--watch=0.2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    watcher = subprocess.Popen([*map(str, words)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout.readline().startswith(f"watching: open {out}/loss.html")
    assert watcher.stdout.readline() == "waiting for the first step of small\n"
    assert not out.exists()
    result = subprocess.run(
        [sys.executable, "train.py", *small_run(corpus, out, max_steps=40)],
        cwd=ROOT, env=environment, capture_output=True, check=False, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rest, _ = watcher.communicate(timeout=120)
    assert watcher.returncode == 0
    assert rest == f"drew {out / 'loss.png'}\n"
    page = (out / "loss.html").read_text()
    assert "<td>40 of 40</td>" in page
    assert "<td>finished</td>" in page
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    run = only(out)
    assert (run.finished, run.processes, run.machine["device"]) == (True, 1, "cpu")
    assert run.machine.keys() >= {"machine", "torch", "python"}
    assert run.parameters > 0
    # What a picture leaves in the folder does not keep the run from going on.
    for checkpoint in (out / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    assert call("train.py", *small_run(corpus, out, max_steps=40), "--resume=auto", "--dry_run=True").returncode == 0


def test_ctrl_c_ends_it_in_one_line(tmp_path):
    words = [sys.executable, "research/report.py", "curves", str(tmp_path / "run"), "--watch=60"]
    watcher = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watcher.stdout.readline()
    watcher.stdout.readline()
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=60)
    assert (watcher.returncode, err) == (130, "report.py: interrupted\n")


def test_a_sweep_is_watched_from_before_its_first_run(tmp_path, monkeypatch):
    """The folder itself is no run once there are runs in it; it ends with them."""
    sweep, waits = tmp_path / "sweep", []
    sweep.mkdir()

    def sleep(_):
        waits.append(1)
        assert len(waits) < 5, "it would never end"
        if len(waits) == 2:
            stopping.write_status(write_run(sweep / "a", [4, 3, 2, 1]), 4, 4, "finished")

    monkeypatch.setattr(watch.time, "sleep", sleep)
    out = tmp_path / "loss.png"
    watch.watch([str(sweep)], 0.01, out, lambda found: out.write_text(f"{[run.name for run in found]}"))
    assert out.read_text() == "['a']"
    assert "no step yet" not in (tmp_path / "loss.html").read_text()


def test_a_picture_that_cannot_be_written_is_tried_again(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", [4, 3, 2, 1])
    drawn = []

    def draw(found):
        drawn.append(found)
        if len(drawn) == 1:
            raise OSError(28, "No space left on device")
        (folder / "loss.png").write_text("")
        stopping.write_status(folder, 4, 4, "finished")

    monkeypatch.setattr(watch.time, "sleep", lambda _: None)
    watch.watch([str(folder)], 0.01, folder / "loss.png", draw)
    out = capsys.readouterr().out
    assert "cannot be written (No space left on device): trying again" in out
    assert out.splitlines()[-1] == f"drew {folder / 'loss.png'}"
    assert (folder / "loss.html").exists()
