"""Draw tokens as transformers does, generate batches of texts, and stop at stop strings."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY, build_tiny

from data.tokenizer import byte_tokenizer, train_byte_pairs
from model import build
from model.generation import Generation, Sampling, Text, generate_text, sample
from model.gpt import GPT

BYTES = byte_tokenizer()
GREEDY = Sampling(temperature=0)


def expected_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return probabilities by the processors of transformers, in the order of that library."""
    transformers = pytest.importorskip("transformers")
    scores = transformers.TemperatureLogitsWarper(sampling.temperature)(None, logits.double())
    if sampling.top_k:
        scores = transformers.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = transformers.TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_p": 1e-9},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8},
    ],
)
def test_draws_follow_the_distribution_of_transformers(options):
    logits = torch.randn(1, 40, dtype=torch.float64) * 2
    sampling = Sampling(**options)
    num_draws = 20_000
    uniform = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    tokens = sample(logits.expand(num_draws, -1), sampling, uniform)
    frequencies = torch.bincount(tokens, minlength=40) / num_draws
    expected = expected_probabilities(logits, sampling)[0]
    torch.testing.assert_close(frequencies.double(), expected, rtol=0, atol=1.01 / num_draws)
    assert not (frequencies > 0)[expected == 0].any()


def test_temperature_zero_draws_the_most_likely_token_and_the_smallest_one_some_token():
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0]])
    assert sample(logits, GREEDY, None).tolist() == [1, 0]
    uniform = torch.tensor([0.5], dtype=torch.float64)
    logits = torch.tensor([[-1e4, 1e4, 3.0]])
    assert sample(logits, Sampling(temperature=1e-6), uniform).tolist() == [1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(top_k=2)])
def test_extreme_uniform_numbers_draw_only_what_is_possible(sampling):
    logits = torch.full((2, 300), -1e9)
    logits[:, 100:103] = torch.tensor([1.0, 2.0, 3.0])
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for scale in torch.linspace(0.1, 3, 200):  # so that sums of probabilities round differently
        tokens = sample(logits * scale, sampling, uniform)
        assert all(100 <= token <= 102 for token in tokens.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e-7}, "temperature=1e-07: give 0 or a finite number of at least 1e-06"),
        ({"temperature": math.inf}, "temperature=inf: give 0 or a finite number of at least"),
        ({"temperature": math.nan}, "temperature=nan: give a number at least 0"),
        ({"top_p": 0.0}, "top_p=0.0: give a number above 0"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=3, top_p=0.5)])
def test_logits_that_are_not_finite_are_an_error(sampling):
    model = build_tiny("gpt-mha-rope")
    torch.nn.init.constant_(model.ln_f.weight, math.nan)
    with pytest.raises(ValueError, match="the logits of the model are not finite"):
        generate(model, [[1, 2], [3]], 4, sampling)


@torch.no_grad()
def generate_without_cache(
    model: GPT, prompt: list[int], count: int, length: int
) -> tuple[list[int], float]:
    """Continue a prompt by full passes over at most `length` tokens.

    Returns:
        The most likely tokens, and the smallest difference between the logits of a choice and of
        the second best token.
    """
    context = list(prompt)
    tokens = []
    smallest_margin = float("inf")
    for _ in range(count):
        if len(context) > length:
            context = context[-(length // 2) :]
        best = model(torch.tensor([context]))[0][0, -1].topk(2)
        smallest_margin = min(smallest_margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        context.append(tokens[-1])
    return tokens, smallest_margin


def build_varied(model_name: str, **settings) -> GPT:
    """Build a model in float64 whose most likely text does not repeat one token."""
    model = build_tiny(model_name, **settings)
    torch.nn.init.normal_(model.ln_f.weight)
    torch.nn.init.normal_(model.transformer.wte.weight)
    return model


def generate(
    model: GPT,
    prompts: list[list[int]],
    count: int,
    sampling: Sampling = GREEDY,
    seeds: list[int] | None = None,
    eot_token: int | None = None,
) -> list[list[int | None]]:
    """Return the tokens of each text; None after its end."""
    seeds = [0] * len(prompts) if seeds is None else seeds
    steps = Generation(model, prompts, count, sampling, seeds, eot_token, TINY["vocab_size"])
    return [list(row) for row in zip(*steps)]


@pytest.mark.parametrize(
    ("model_name", "settings"),
    [
        ("gpt-mha-rope", {}),
        ("DDL-gpt-mha-rope", {"ddl_state_shortconv_kernel_size": 7}),
        ("DDL-gpt-mha-rope-EC", {"ddl_map": "v", "ddl_k_branch": "attention"}),
        ("DDL-gpt-mha-rope-CC-EC", {"input_embed_shortconv_kernel_size": 7}),
    ],
)
def test_cached_text_equals_recomputed_text(model_name, settings):
    """The prompts differ in length, one exceeds block_size, and all texts exceed it twice."""
    model = build_varied(model_name, **settings)
    prompts = [[5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(20)), [2, 7, 1]]
    texts = generate(model, prompts, 30)
    assert len(texts) == 4
    for prompt, text in zip(prompts, texts):
        expected, smallest_margin = generate_without_cache(model, prompt[-16:], 30, 16)
        assert smallest_margin > 1e-9
        assert text == expected


def test_a_text_does_not_depend_on_its_batch():
    model = build_varied("DDL-gpt-mha-rope-EC")
    sampling = Sampling(top_p=0.95)

    def texts_of(prompts, seeds):
        texts = generate(model, prompts, 25, sampling, seeds, eot_token=3)
        return [[token for token in text if token is not None] for text in texts]

    prompts = [[1], [4, 4, 4, 4, 9], [8, 1]]
    seeds = [0, 1, 5]
    batch = texts_of(prompts, seeds)
    for prompt, seed, text in zip(prompts, seeds, batch):
        assert texts_of([prompt], [seed]) == [text]
    assert texts_of(prompts[::-1], seeds[::-1]) == batch[::-1]
    assert texts_of(prompts, [7, 8, 9]) != batch


def test_end_of_text_and_a_stop_end_one_text_alone():
    model = build_varied("DDL-gpt-mha-rope")
    prompts = [[1, 2], [7]]
    endless = generate(model, prompts, 12)
    eot_token = endless[0][4]
    first_end = endless[0].index(eot_token)
    second_end = endless[1].index(eot_token) if eot_token in endless[1] else 12
    texts = generate(model, prompts, 12, eot_token=eot_token)
    assert texts[0] == [*endless[0][:first_end], *[None] * len(texts[0][first_end:])]
    assert texts[1][:second_end] == endless[1][:second_end]
    generation = Generation(model, prompts, 12, GREEDY, [0, 0], None, TINY["vocab_size"])
    steps = []
    for tokens in generation:
        steps.append(tokens)
        if len(steps) == 3:
            generation.stop(1)
    assert [token for token, _ in steps] == endless[0]
    assert [token for _, token in steps] == [*endless[1][:3], *[None] * 9]


def test_a_text_that_ended_with_a_full_context_does_not_stop_the_others():
    model = build_varied("DDL-gpt-mha-rope")
    prompts = [list(range(16)), [7]]
    alone = generate(model, prompts[1:], 20)[0]
    generation = Generation(model, prompts, 20, GREEDY, [0, 0], None, TINY["vocab_size"])
    text = []
    for tokens in generation:
        generation.stop(0)
        text.append(tokens[1])
    assert text == alone


def test_an_empty_prompt_is_refused():
    model = build("gpt-mha-rope", **TINY)
    with pytest.raises(ValueError, match="a sequence is empty; give each sequence at least one"):
        generate(model, [[1], []], 1)


def show_text(tokens: list[int], stop: list[str]) -> tuple[str, int]:
    """Return the text of tokens as `Text` shows it in pieces, and how many tokens it took."""
    text = Text(BYTES, stop)
    shown = ""
    for count, token in enumerate(tokens, 1):
        shown += text.add(token)
        if text.stopped:
            return shown, count
    return shown + text.end(), len(tokens)


@settings(max_examples=300, deadline=None)
@given(
    st.text("abé🙂", max_size=30), st.lists(st.text("abé🙂", min_size=1, max_size=5), max_size=3)
)
def test_text_ends_before_the_first_stop_string(text, stop):
    end = min((text.find(s) + len(s) for s in stop if s in text), default=len(text))
    # The stop string that ends first ends the text, also if a longer one begins earlier.
    start = min((text[:end].find(s) for s in stop if s in text[:end]), default=end)
    assert show_text(list(text.encode()), stop) == (text[:start], len(text[:end].encode()))


def test_text_is_shown_as_early_as_possible():
    text = Text(BYTES, ["\n\n", "END"])
    assert [text.add(byte) for byte in b"a\nbEN"] == ["a", "", "\nb", "", ""]
    assert [text.add(byte) for byte in "é!".encode()] == ["", "ENé", "!"]
    assert text.add(ord("\n")) == ""
    assert text.end() == "\n"
    text = Text(BYTES, [])
    assert text.add(0xFF) + text.add(0xC3) + text.end() == "\ufffd\ufffd"


def test_tokens_of_several_characters_are_the_text_up_to_the_first_stop_string():
    """Random text of multi-byte characters, cut into tokens; against str.find on the whole."""
    draw = random.Random(0)
    alphabet = ["a", "b", "ab", "é", "日", "🙂", "\n"]
    encoding = train_byte_pairs(["".join(draw.choices(alphabet, k=2000))], 300)
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 12)))
        lengths = [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
        stop = ["".join(draw.choices(alphabet, k=length)) for length in lengths]
        starts = [text.find(stop_string) for stop_string in stop if stop_string in text]
        expected = text[: min(starts)] if starts else text
        growing_text = Text(encoding, stop)
        shown = ""
        for token in encoding.encode(text):
            shown += growing_text.add(token)
            assert expected.startswith(shown)
            if growing_text.stopped:
                break
        assert shown + growing_text.end() == expected


@given(st.lists(st.integers(0, 255), max_size=8))
def test_tokens_that_are_no_text_become_replacement_characters(tokens):
    shown, _ = show_text(tokens, [])
    assert shown == bytes(tokens).decode(errors="replace")


BYTE_PROMPTS = [[256, 65], [256, 66, 67, 68]]
SEEDS = [0, 1]


@pytest.fixture
def byte_model() -> GPT:
    return build("DDL-gpt-mha-rope", **{**TINY, "vocab_size": 257})


def generate_bytes(model: GPT, count: int, stop: list[str]) -> tuple[list[str], list[int]]:
    """Return the text of each prompt, and its number of tokens."""
    texts = ["", ""]
    counts = [0, 0]
    for row, piece, num_tokens in generate_text(
        model, BYTES, BYTE_PROMPTS, count, Sampling(), SEEDS, stop
    ):
        texts[row] += piece
        counts[row] += num_tokens
    return texts, counts


def test_pieces_of_a_text_are_its_tokens_up_to_a_stop_string(byte_model):
    steps = Generation(byte_model, BYTE_PROMPTS, 40, Sampling(), SEEDS, 256, 257)
    tokens = [[token for token in row if token is not None] for row in zip(*steps)]
    texts, counts = generate_bytes(byte_model, 40, [])
    assert texts == [bytes(row).decode(errors="replace") for row in tokens]
    assert counts == [len(row) for row in tokens]
    stop = [text[5] for text in texts]
    stopped_texts, stopped_counts = generate_bytes(byte_model, 40, stop)
    for text, stopped in zip(texts, stopped_texts):
        assert stopped == text[: min(text.find(each) for each in stop if each in text)]
    assert max(stopped_counts) <= 3 * 6  # nothing is generated after the texts ended


def test_an_empty_stop_string_is_refused(byte_model):
    with pytest.raises(ValueError, match="an empty stop string"):
        generate_bytes(byte_model, 40, ["a", ""])
