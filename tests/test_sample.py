"""sample.py as a user runs it; tests/test_generation.py has how texts are made."""

import pytest
from helpers import one_line_error, run_script, small_run
from in_process import call


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "sampled"
    assert call("train.py", *small_run(corpus, out, eval_full=False)).returncode == 0
    return out


def test_prompt_from_argument_file_and_standard_input(run, tmp_path):
    prompt = "def ü(x):\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    keys = ["--max_new_tokens=20", "--seed=3", "--temperature=1.2"]
    saved = run / "checkpoints" / "step_00000006"
    outputs = [call("sample.py", run, f"--prompt={prompt}", *keys).stdout]
    outputs.append(call("sample.py", saved, f"--prompt=FILE:{file}", *keys).stdout)
    outputs.append(run_script("sample.py", run, "--prompt=-", *keys, stdin=prompt.encode()).stdout)
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0].startswith(prompt.encode())
    assert len(outputs[0]) > len(prompt.encode()) + 1  # and the line break
    assert call("sample.py", run, f"--prompt={prompt}", *keys[:1], "--seed=4").stdout != outputs[0]


def test_several_samples_differ(run):
    output = call("sample.py", run, "--num_samples=3", "--max_new_tokens=30").stdout
    assert len({part.strip() for part in output.split(b"-" * 80)}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=a<|im_start|>b"], "the prompt has the special token <|im_start|>"),
        (["--prompt=FILE:nowhere.txt"], "nowhere.txt"),
        (["--temperature=-1"], "temperature=-1.0: give 0 or more"),
        (["--top_p=0"], "top_p=0.0: give a number above 0"),
        (["--min_p=2"], "min_p=2.0: give a number from 0 to 1"),
        (["--batch_size=0"], "--batch_size=0: give 1 or more"),
        (["--stop="], "--stop is an empty string: give one character or more"),
        (["--interactive", "--prompt=a"], "--serve, --interactive and --prompt exclude each other"),
        (["--interactive", "--stop=a", "--stop=b"], "--interactive takes only one --stop"),
        (["--serve", "--num_samples=2"], "--num_samples=2 has no effect with --serve and"),
        (["--serve", "--compile=True"], "--compile=True has no effect with --serve"),
    ],
)
def test_mistakes_end_in_one_line(run, arguments, message):
    result = call("sample.py", run, *arguments)
    assert message in one_line_error(result)
    assert not result.stdout


def test_a_prompt_that_is_no_text_ends_in_one_line(run):
    result = call("sample.py", run, "--prompt=-", stdin=b"\xff\xfe")
    assert "the prompt is not UTF-8" in one_line_error(result)
    assert "holds no checkpoint" in one_line_error(call("sample.py", run.parent))


def test_prompts_together_are_as_each_alone(run):
    keys = ["--max_new_tokens=25", "--temperature=1.2"]
    prompts = [f"--prompt={prompt}" for prompt in ("def f(", "", "class Reader:\n    ")]
    together = [run, *prompts, "--num_samples=2", "--seed=3", *keys]
    outputs = [call("sample.py", *together, f"--batch_size={rows}").stdout for rows in (6, 4, 1)]
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]
    texts = outputs[0].split(b"-" * 80 + b"\n")
    assert len(set(texts)) == 6
    assert texts[1] == call("sample.py", run, prompts[0], "--seed=4", *keys).stdout


def test_stop_strings_end_texts(run):
    keys = ["--prompt=def ", "--max_new_tokens=60", "--temperature=2", "--top_p=1"]
    text = call("sample.py", run, *keys).stdout.decode(errors="replace")[4:-1]
    stop = text[30:33]
    cut = call("sample.py", run, *keys, f"--stop={stop}", "--stop=zzzzzz").stdout
    assert cut.decode(errors="replace")[4:-1] == text[: text.index(stop)]


def test_a_conversation(run):
    """Prompts, settings and mistakes from a pipe give the same texts as command-line arguments."""
    lines = ["def f(x):", "def f(x):", "/seed=7", "/temperature=1.5", "class A\\", ""]
    lines += ["/top_k=0", "/stop=", "/stop", "/sead=1", "", "/quit", "x"]
    keys = ["--max_new_tokens=12", "--temperature=0.7"]
    result = call("sample.py", run, "--interactive", *keys, stdin="\n".join(lines).encode())
    assert result.returncode == 0, result.stderr.decode()
    same = [run, "--prompt=def f(x):", *keys]
    first = b"".join(call("sample.py", *same, f"--seed={seed}").stdout for seed in (0, 1))
    other = [run, "--prompt=class A\n", keys[0], "--temperature=1.5", "--seed=7"]
    second = call("sample.py", *other).stdout
    assert result.stdout.startswith(first + second)
    rest = result.stdout[len(first + second) :]
    assert rest.startswith(second[:-1])  # the empty line continues the last text
    errors = [line for line in result.stderr.decode().splitlines() if line.startswith("error:")]
    assert errors == [
        "error: top_k=0: give 1 or more",
        "error: an empty stop string would end every text at once; give /stop=None to have no "
        "stop string",
        "error: /stop is not a command; the commands are /KEY=VALUE, /help and /quit",
        "error: unknown key /sead, did you mean seed?",
    ]
    assert result.stderr.decode().count(" tokens/s") == 4
