"""model/generation.py: how a token is drawn, against transformers' own processors; batches; and
stop strings.
"""

import pytest
import torch
from decoding_helpers import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY, build_tiny

from data.tokenizer import byte_tokenizer
from model import build
from model.decoding import Decoder
from model.generation import Generation, Sampling, Text, generate_text, sample

BYTES = byte_tokenizer()


def reference(logits, sampling: Sampling, ids):
    """Probabilities by the processors of the transformers library, in the order in which it applies
    them.
    """
    transformers = pytest.importorskip("transformers")
    scores = logits.double()
    if sampling.repetition_penalty != 1:
        scores = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(
            ids, scores
        )
    scores = transformers.TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = transformers.TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = transformers.TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = transformers.MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.4},
        {"top_k": 5},
        {"top_k": 1000, "top_p": 0.7},
        {"top_p": 0.6},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
    ],
)
def test_draws_follow_the_distribution_of_transformers(options):
    logits, sampling = torch.randn(1, 40, dtype=torch.float64) * 2, Sampling(**options)
    ids = torch.tensor([[3, 7, 7, 11, *logits[0].topk(3).indices.tolist()]])
    present = torch.zeros(1, 40, dtype=torch.bool).scatter_(1, ids, True)
    draws = 20_000
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = sample(logits.expand(draws, -1), sampling, uniform, present.expand(draws, -1))
    found = torch.bincount(tokens, minlength=40) / draws
    wanted = reference(logits, sampling, ids)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1.01 / draws)
    assert torch.equal(found > 0, wanted > 1 / draws) or not (found > 0)[wanted == 0].any()


def test_temperature_zero_is_the_likeliest_after_the_penalty():
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0]])
    present = torch.tensor([[False, True, False], [True, False, False]])
    assert sample(logits, Sampling(temperature=0), None).tolist() == [1, 0]
    assert sample(
        logits, Sampling(temperature=0, repetition_penalty=2.5), None, present
    ).tolist() == [2, 2]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_p=0.9), Sampling(top_k=2), Sampling(min_p=0.5)]
)
def test_extreme_uniform_numbers_draw_only_what_is_possible(sampling):
    logits = torch.full((2, 300), -1e9)
    logits[:, 100:103] = torch.tensor([1.0, 2.0, 3.0])
    for scale in torch.linspace(0.1, 3, 200):  # sums of probabilities that round in many ways
        tokens = sample(
            logits * scale, sampling, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
        )
        assert all(100 <= token <= 102 for token in tokens.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: give 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan: give 0 or more"),
        ({"top_k": 0}, "top_k=0: give 1 or more"),
        ({"top_p": 0.0}, "top_p=0.0: give a number above 0"),
        ({"top_p": 1.1}, "top_p=1.1: give a number above 0"),
        ({"min_p": -0.1}, "min_p=-0.1: give a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: give a number above 0"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        Sampling(**options)


GREEDY = Sampling(temperature=0)


@torch.no_grad()
def recomputed(model, prompt, count: int, length: int):
    """The likeliest continuation by whole passes, and the smallest lead of a choice over the next
    best.
    """
    context, made, lead = list(prompt), [], float("inf")
    for _ in range(count):
        if len(context) > length:
            context = context[-(length // 2) :]
        best = model(torch.tensor([context]))[0][0, -1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        made.append(int(best.indices[0]))
        context.append(made[-1])
    return made, lead


def lively(stem, **keys):
    """A model in float64 whose likeliest text is no loop of one token."""
    model = build_tiny(stem, **keys)
    torch.nn.init.normal_(model.ln_f.weight)
    torch.nn.init.normal_(model.transformer.wte.weight)
    return model


def greedy(decoder, prompts, count):
    steps = list(
        Generation(decoder, prompts, count, GREEDY, [0] * len(prompts), None, TINY["vocab_size"])
    )
    return [list(row) for row in zip(*steps)]


@pytest.mark.parametrize(("stem", "keys"), CASES)
def test_cached_text_equals_recomputed_text(stem, keys):
    """Unequal prompts, one longer than the model reads, twice and more past block_size."""
    model = lively(stem, **keys)
    prompts = [[5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(20)), [2, 7, 1]]
    texts = greedy(Decoder(model, 5), prompts, 30)
    assert len(texts) == 4
    for prompt, text in zip(prompts, texts):
        wanted, lead = recomputed(model, prompt[-16:], 30, 16)
        assert lead > 1e-9
        assert text == wanted


def test_the_penalty_lies_on_all_tokens_of_a_text():
    transformers = pytest.importorskip("transformers")
    penalty = transformers.RepetitionPenaltyLogitsProcessor(3.0)
    model, prompts = lively("DDL-gpt-mha-rope"), [[5, 6, 7, 5], [1]]
    sampling = Sampling(temperature=0, repetition_penalty=3.0)
    texts = zip(
        *Generation(Decoder(model, 2), prompts, 12, sampling, [0, 0], None, TINY["vocab_size"])
    )
    for prompt, text in zip(prompts, texts):
        for token in text:
            ids = torch.tensor([prompt])
            assert token == int(penalty(ids, model(ids)[0][:, -1]).argmax())
            prompt.append(token)


def test_a_text_does_not_depend_on_its_batch():
    model, sampling = lively("DDL-gpt-mha-rope-EC"), Sampling(top_p=0.95, repetition_penalty=1.2)

    def run(prompts, seeds, rows, length=16):
        steps = Generation(
            Decoder(model, rows, length), prompts, 25, sampling, seeds, 3, TINY["vocab_size"]
        )
        return [[token for token in row if token is not None] for row in zip(*steps)]

    prompts, seeds = [[1], [4, 4, 4, 4, 9], [8, 1]], [0, 1, 5]
    together = run(prompts, seeds, 4)
    for prompt, seed, text in zip(prompts, seeds, together):
        assert run([prompt], [seed], 1) == [text]
    assert run(prompts[::-1], seeds[::-1], 3) == together[::-1]
    assert run(prompts, [7, 8, 9], 3) != together


def test_a_row_ends_alone():
    model = lively("DDL-gpt-mha-rope")
    whole = greedy(Decoder(model, 2), [[1, 2], [7]], 12)
    stop = whole[0][4]
    first = whole[0].index(stop)
    generation = Generation(
        Decoder(model, 2), [[1, 2], [7]], 12, GREEDY, [0, 0], stop, TINY["vocab_size"]
    )
    rows = [list(row) for row in zip(*generation)]
    assert rows[0][: first + 1] == [*whole[0][:first], None]
    assert set(rows[0][first:]) == {None}
    second = whole[1].index(stop) if stop in whole[1] else 12
    assert rows[1][:second] == whole[1][:second]
    generation = Generation(
        Decoder(model, 2), [[1, 2], [7]], 12, GREEDY, [0, 0], None, TINY["vocab_size"]
    )
    steps = []
    for tokens in generation:
        steps.append(tokens)
        if len(steps) == 3:
            generation.stop(1)
    assert [token for token, _ in steps] == whole[0]
    assert [token for _, token in steps] == [*whole[1][:3], *[None] * 9]


def test_a_row_that_ended_full_does_not_stop_the_others():
    model, prompts = lively("DDL-gpt-mha-rope"), [list(range(16)), [7]]
    alone = greedy(Decoder(model, 1), prompts[1:], 20)[0]
    generation = Generation(
        Decoder(model, 2), prompts, 20, GREEDY, [0, 0], None, TINY["vocab_size"]
    )
    found = []
    for tokens in generation:
        generation.stop(0)
        found.append(tokens[1])
    assert found == alone


def test_random_numbers_are_a_seeds_own(monkeypatch):
    monkeypatch.setattr("model.generation.UNIFORMS_PER_DRAW", 4)
    decoder = Decoder(build("gpt-mha-rope", **TINY), 3)
    generation = Generation(decoder, [[1], [2]], 10, Sampling(), [5, 6], None, 29)
    found = torch.stack([generation.uniform(step) for step in range(10)], dim=1)
    for row, seed in enumerate((5, 6)):
        generator = torch.Generator().manual_seed(seed)
        wanted = torch.cat(
            [torch.rand(4, generator=generator, dtype=torch.float64) for _ in range(3)]
        )
        assert torch.equal(found[row], wanted[:10])


def test_what_the_decoder_has_no_row_for_is_refused():
    decoder = Decoder(build("gpt-mha-rope", **TINY), 2)
    for prompts in ([], [[1], [2], [3]], [[1], []]):
        with pytest.raises(
            ValueError, match=r"prompts for 2 rows: give 1 to that many, each of 1 token or more"
        ):
            Generation(decoder, prompts, 1, GREEDY, [0] * len(prompts), None, 29)


def shown(tokens: list[int], stop: list[str]):
    """(text, how many tokens were taken) as `Text` shows it, which never takes back what it has
    shown.
    """
    text, pieces = Text(BYTES, stop), []
    for count, token in enumerate(tokens, 1):
        pieces.append(text.add(token))
        if text.stopped:
            return "".join(pieces), count
    return "".join([*pieces, text.end()]), len(tokens)


@settings(max_examples=300, deadline=None)
@given(
    st.text("abé🙂", max_size=30), st.lists(st.text("abé🙂", min_size=1, max_size=5), max_size=3)
)
def test_text_ends_before_the_first_stop_string(text, stop):
    end = min((text.find(s) + len(s) for s in stop if s in text), default=len(text))
    wanted = text[: min((text[:end].find(s) for s in stop if s in text[:end]), default=end)]
    # Where a longer one begins earlier but ends later, the one that ends first ends the text.
    assert shown(list(text.encode()), stop) == (wanted, len(text[:end].encode()))


def test_text_is_shown_as_early_as_it_can_be():
    text = Text(BYTES, ["\n\n", "END"])
    assert [text.add(byte) for byte in b"a\nbEN"] == ["a", "", "\nb", "", ""]
    assert [text.add(byte) for byte in "é!".encode()] == ["", "ENé", "!"]
    assert [text.add(byte) for byte in b"\n"] == [""]
    assert text.end() == "\n"
    assert Text(BYTES, []).add(0xFF) == "\ufffd"


def test_pieces_of_several_texts():
    config = {**TINY, "vocab_size": 257}
    model = build("DDL-gpt-mha-rope", **config)
    decoder, sampling = Decoder(model, 3), Sampling()
    prompts, seeds = [[256, 65], [256, 66, 67, 68]], [0, 1]
    pieces = list(generate_text(decoder, BYTES, prompts, 40, sampling, seeds, []))
    steps = list(zip(*Generation(decoder, prompts, 40, sampling, seeds, 256, 257)))
    for row in range(2):
        tokens = [token for token in steps[row] if token is not None]
        assert "".join(piece for r, piece, _ in pieces if r == row and piece) == bytes(
            tokens
        ).decode(errors="replace")
        assert sum(new for r, _, new in pieces if r == row) == len(tokens)
        assert [piece for r, piece, _ in pieces if r == row].index(None) == sum(
            r == row for r, _, _ in pieces
        ) - 1
    stop = [bytes([row[5]]).decode(errors="replace") for row in steps]
    pieces = list(generate_text(decoder, BYTES, prompts, 10, sampling, seeds, stop))
    assert not any(text in "".join(piece for _, piece, _ in pieces if piece) for text in stop)
    assert decoder.cache.num_tokens <= 4 + 6  # nothing is computed for texts that have ended
    with pytest.raises(ValueError, match="an empty stop string"):
        list(generate_text(decoder, BYTES, prompts, 40, sampling, seeds, ["a", ""]))
