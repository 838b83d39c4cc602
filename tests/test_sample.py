"""sample.py: how a token is drawn, that the cache changes nothing, and the script as a user runs it."""

import pytest
import torch
from conftest import SMALL, one_line_error, script, small_run

from model import STEMS, build
from model.decoding import Decoder
from sample import generate, next_token


def draw_many(logits, count=4000, **options):
    options = {"temperature": 1.0, "top_k": None, "top_p": 1.0, **options}
    generator = torch.Generator().manual_seed(0)
    draws = [next_token(logits, generator=generator, **options) for _ in range(count)]
    return torch.bincount(torch.tensor(draws), minlength=len(logits)) / count


LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.3, 0.2]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_p": 0.65}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 4 / 9, 3 / 9, 2 / 9]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 3 / 7, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
)
def test_next_token_draws_from_the_right_distribution(options, expected):
    assert draw_many(LOGITS, **options).tolist() == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("stem", STEMS)
def test_generation_equals_recomputing_everything(stem):
    """Text of likeliest tokens through the cache, past block_size too, against full passes."""
    model = build(stem, **{**SMALL, "embedding_init_std": 1.0})
    # Off its identity-like start, where the last token predicts itself.
    torch.nn.init.normal_(model.ln_f.weight)
    prompt = [3, 1, 4, 1, 5]
    made = list(generate(Decoder(model, 1), prompt, 30, lambda logits: int(logits.argmax())))
    context = list(prompt)
    for token in made:
        if len(context) > 16:
            context = context[-8:]
        assert token == int(model(torch.tensor([context]))[0][0, -1].argmax())
        context.append(token)
    assert len(made) == 30
    assert len(set(made)) > 3


def test_generation_stops_at_end_of_text_and_crops_long_prompts():
    model = build("gpt-mha-rope", **SMALL)
    draws = iter([7, 8, 9, 10])
    assert list(generate(Decoder(model, 1), list(range(40)), 10, lambda logits: next(draws), stop=9)) == [7, 8]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "sampled"
    assert script("train.py", *small_run(corpus, out, eval_full=False)).returncode == 0
    return out


def test_prompt_from_argument_file_and_standard_input(run, tmp_path):
    prompt = "def ü(x):\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    keys = ["--max_new_tokens=20", "--seed=3", "--temperature=1.2"]
    outputs = [
        script("sample.py", run, f"--prompt={prompt}", *keys).stdout,
        script("sample.py", run / "checkpoints" / "step_00000006", f"--prompt=FILE:{file}", *keys).stdout,
        script("sample.py", run, "--prompt=-", *keys, stdin=prompt.encode()).stdout,
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0].startswith(prompt.encode())
    assert len(outputs[0]) > len(prompt.encode()) + 10
    assert script("sample.py", run, f"--prompt={prompt}", *keys[:1], "--seed=4").stdout != outputs[0]


def test_several_samples_differ(run):
    output = script("sample.py", run, "--num_samples=3", "--max_new_tokens=30").stdout.decode(errors="replace")
    parts = output.split("-" * 80)
    assert len({part.strip() for part in parts}) == 3


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--prompt=a<|im_start|>b"], None, "the prompt has the token <|im_start|>"),
        (["--prompt=-"], b"\xff\xfe", "the prompt is not UTF-8"),
        (["--prompt=FILE:nowhere.txt"], None, "nowhere.txt"),
        (["--temperature=-1"], None, "--temperature=-1.0: give 0 or more"),
        (["--top_p=0"], None, "--top_p=0.0: give a number above 0"),
    ],
)
def test_mistakes_end_in_one_line(run, arguments, stdin, message):
    assert message in one_line_error(script("sample.py", run, *arguments, stdin=stdin))


def test_missing_checkpoint_ends_in_one_line(tmp_path):
    assert "holds no checkpoint" in one_line_error(script("sample.py", tmp_path))
