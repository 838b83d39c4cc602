"""sample.py as a user runs it; tests/test_generation.py tests how texts are generated."""

import importlib
import re
import signal
import sys
from pathlib import Path

import pytest
from helpers import one_line_error, small_run
from in_process import call

SEPARATOR = b"-" * 80 + b"\n"  # between samples


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """Return the folder of a trained run."""
    out = tmp_path_factory.mktemp("runs") / "sampled"
    assert call("train.py", *small_run(corpus, out, eval_full=False)).returncode == 0
    return out


def sample(*arguments) -> bytes:
    """Return what sample.py prints."""
    result = call("sample.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


# ---- prompts ----

PROMPT = "def ü(x):\n"
OPTIONS = ("--max_new_tokens=20", "--seed=3", "--temperature=1.2")


def test_a_prompt_from_a_file_or_standard_input_and_a_checkpoint(run, tmp_path):
    sampled = sample(run, f"--prompt={PROMPT}", *OPTIONS)
    assert sampled.startswith(PROMPT.encode())
    assert len(sampled) > len(PROMPT.encode()) + 1  # a line break ends the output
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    assert sample(run, f"--prompt=FILE:{file}", *OPTIONS) == sampled
    result = call("sample.py", run, "--prompt=-", *OPTIONS, stdin=PROMPT.encode())
    assert result.stdout == sampled
    checkpoint = run / "checkpoints" / "step_00000006"
    assert sample(checkpoint, f"--prompt={PROMPT}", *OPTIONS) == sampled


def test_signals_have_their_handlers_again_after_sampling(run, monkeypatch, capsys):
    """As after `%run sample.py` in a notebook, whose kernel a closed pipe must not end."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert handlers[signal.SIGPIPE] == signal.SIG_IGN
    monkeypatch.setattr(sys, "argv", ["sample.py", str(run), "--max_new_tokens=2"])
    importlib.import_module("sample").main()
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_the_speed_and_a_prompt_that_is_cut_are_noted_on_stderr(run):
    result = call("sample.py", run, f"--prompt={'a' * 20}", "--max_new_tokens=7", "--temperature=2")
    note, speed = result.stderr.decode().splitlines()
    assert note == (
        "note: the longest prompt has 21 tokens, of which the model reads the last 16 (block_size)"
    )
    assert re.fullmatch(r"[1-7] tokens in .* tokens/s", speed)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=a<|im_start|>b"], "the prompt has the special token <|im_start|>"),
        (["--prompt=-"], "the prompt is not UTF-8"),
        (["--temperature=-1"], "temperature=-1.0: give a number at least 0"),
        (["--stop="], "--stop is an empty string: give one character or more"),
        (["--serve", "--prompt=a"], "--serve and --prompt exclude each other"),
        (["--serve", "--max_new_tokens=5000"], "--max_new_tokens=5000: give at most 2048 with"),
    ],
)
def test_mistakes_end_in_one_line(run, arguments, message):
    result = call("sample.py", run, *arguments, stdin=b"\xff\xfe")
    assert message in one_line_error(result)
    assert not result.stdout


# ---- several prompts ----

PROMPTS = ("--prompt=def f(", "--prompt=", "--prompt=class Reader:\n    ")
SAMPLING = ("--max_new_tokens=25", "--temperature=1.2")


@pytest.fixture(scope="module")
def samples_of_prompts(run) -> bytes:
    """Return two samples of each prompt, generated in one batch."""
    return sample(run, *PROMPTS, "--num_samples=2", "--seed=3", *SAMPLING, "--batch_size=6")


@pytest.mark.parametrize("batch_size", [4, 1])
def test_samples_do_not_depend_on_the_batch_size(run, samples_of_prompts, batch_size):
    options = ("--num_samples=2", "--seed=3", *SAMPLING, f"--batch_size={batch_size}")
    assert sample(run, *PROMPTS, *options) == samples_of_prompts


def test_the_second_sample_is_that_of_the_next_seed(run, samples_of_prompts):
    samples = samples_of_prompts.split(SEPARATOR)
    assert len(set(samples)) == 6
    assert samples[1] == sample(run, PROMPTS[0], "--seed=4", *SAMPLING)


def test_stop_strings_end_texts(run):
    options = ("--prompt=def ", "--max_new_tokens=60", "--temperature=2", "--top_p=1")
    text = sample(run, *options).decode(errors="replace")[4:-1]
    stop = text[30:33]
    stopped = sample(run, *options, f"--stop={stop}", "--stop=zzzzzz").decode(errors="replace")
    assert stopped[4:-1] == text[: text.index(stop)]
