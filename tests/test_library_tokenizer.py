"""A user's tokenizer.json makes the ids that transformers makes, in corpora, runs and exports."""

import json
import random
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import one_line_error, small_run
from in_process import call

from data import documents as documents_module
from data import preparation, shards, tokenizer
from data.loader import TrainBatches, ValidationBatches
from data.shards import Corpus, open_corpus

tokenizers = pytest.importorskip("tokenizers")

FINEWEB = "data/fineweb_edu/prepare.py"
SCRIPTS = {
    "Latin": "the quick brown fox größer façade naïve it's 12 345 don't über",
    "Cyrillic": "быстрая коричневая лиса прыгает через ленивую собаку ёж",
    "Arabic": "الثعلب البني السريع يقفز فوق الكلب الكسول",
    "CJK": "敏捷的棕色狐狸 跳过了懒狗 日本語 の 文章 です 한국어",
    "Devanagari": "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है",
}
EXTRA = ["👩‍👩‍👧", "🙂🙂", "  ", "\t", "\n\n", "   \n", "…", "\U0001d518", "\u00a0"]


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of one script each, in turn, with emoji and whitespace."""
    generator = random.Random(seed)
    texts = []
    for index in range(count):
        words = list(SCRIPTS.values())[index % len(SCRIPTS)].split()
        num_words = generator.randrange(1, 60)
        texts.append(" ".join(generator.choices([*words, *EXTRA], k=num_words)))
    return texts


TEXTS = make_texts(200)


def save(folder: Path, library, eos_token: str | dict | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if eos_token is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    return folder


def train_byte_level(folder: Path) -> Path:
    """Train a tokenizer of GPT-2's kind, whose post-processor adds a beginning-of-text token."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(make_texts(400, seed=1), trainer)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return save(folder, library, {"content": "</s>"})


def train_unigram(folder: Path) -> Path:
    """Train a tokenizer of SentencePiece's kind, with byte fallback."""
    library = tokenizers.Tokenizer(tokenizers.models.Unigram())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=1200,
        special_tokens=["<unk>", "</s>", *byte_tokens],
        unk_token="<unk>",
        show_progress=False,
    )
    library.train_from_iterator(make_texts(400, seed=1), trainer)
    description = json.loads(library.to_str())
    description["model"]["byte_fallback"] = True
    description["added_tokens"] = [
        entry for entry in description["added_tokens"] if entry["content"] not in byte_tokens
    ]
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    description["decoder"] = {
        "type": "Sequence",
        "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    return save(folder, tokenizers.Tokenizer.from_str(json.dumps(description)), "</s>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte-level": train_byte_level(root / "byte_level"),
        "unigram": train_unigram(root / "unigram"),
    }


def load(folder: Path, **options):
    return tokenizer.read_own(str(folder), **options)


@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
def test_ids_are_those_of_transformers(folders, kind):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folders[kind] / "tokenizer.json")
    )
    expected = [oracle(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    encoding = load(folders[kind])
    assert [encoding.encode(text) for text in TEXTS] == expected
    assert [ids.tolist() for ids in encoding.encode_batch(TEXTS)] == expected
    assert encoding.n_vocab == max(oracle.get_vocab().values()) + 1
    assert encoding.eot_token == oracle.get_vocab()["</s>"] == 1


@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
def test_tokens_decode_to_the_text(folders, kind):
    encoding = load(folders[kind])
    for text in TEXTS:
        # SentencePiece begins a text with a space
        expected = text if kind == "byte-level" or text.startswith(" ") else f" {text}"
        ids = encoding.encode(text)
        assert encoding.decode(ids) == expected
        assert b"".join(map(encoding.decode_single_token_bytes, ids)) == expected.encode()
        assert encoding.bytes_by_token()[ids].sum() == len(expected.encode())


def test_special_tokens_are_text_in_a_document_and_tokens_in_a_prompt(folders):
    encoding = load(folders["byte-level"])
    [ids] = encoding.encode_batch(["a</s>b"])
    assert 1 not in ids
    assert encoding.decode(ids.tolist()) == "a</s>b"
    assert encoding.encode("a</s>b") == ids.tolist()
    assert encoding.encode("a</s>b", allowed_special="all")[1] == 1
    assert tokenizer.encode_prompt(encoding, "a") == [1, *encoding.encode("a")]
    assert encoding.special_tokens_set == {"<s>", "</s>"}
    assert encoding.bytes_by_token()[[0, 1]].tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
def test_a_stored_description_rebuilds_the_tokenizer(folders, tmp_path, kind):
    encoding = load(folders[kind])
    (tmp_path / "tokenizer.json").write_text(json.dumps(encoding.to_json()))
    rebuilt = tokenizer.read(tmp_path)
    assert rebuilt.to_json() == encoding.to_json()
    assert rebuilt.encode(TEXTS[0]) == encoding.encode(TEXTS[0])
    assert tokenizer.same_tokens(rebuilt, encoding)
    assert not tokenizer.same_tokens(rebuilt, tokenizer.byte_tokenizer())


# ---- corpora ----


def write_documents(path: Path, texts: list[str]) -> Path:
    """Write a .jsonl file with a document for each text, and return its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def documents(tmp_path, monkeypatch) -> Path:
    """Return a .jsonl file of documents, which is read in small batches."""
    monkeypatch.setattr(documents_module, "BATCH_CHARACTERS", 300)
    return write_documents(tmp_path / "documents.jsonl", TEXTS)


def prepare(documents: Path, folder: Path, out: Path, *options: str) -> subprocess.CompletedProcess:
    """Prepare a corpus with the tokenizer of a folder."""
    return call(
        FINEWEB,
        f"--source={documents}",
        f"--tokenizer={folder}",
        f"--out={out}",
        "--val_tokens=500",
        "--shard_tokens=700",
        "--workers=2",
        *options,
    )


def read_tokens(corpus) -> list[int]:
    return np.concatenate(corpus.val + corpus.train).tolist()


def run_script(*arguments) -> bytes:
    """Run a script, expect success, and return what it prints."""
    result = call(*arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


def test_corpora_runs_and_exports_use_the_tokenizer(folders, documents, tmp_path):
    out = tmp_path / "corpus"
    run = tmp_path / "run"
    exported = tmp_path / "exported"
    assert prepare(documents, folders["unigram"], out).returncode == 0
    corpus = open_corpus(str(out))
    encoding = load(folders["unigram"])
    assert read_tokens(corpus) == [i for text in TEXTS for i in (1, *encoding.encode(text))]
    assert corpus.meta["tokenizer"] == encoding.name == "hf:unigram"
    assert tokenizer.read(out).to_json() == encoding.to_json()
    assert "dtype" not in corpus.meta  # uint16
    run_script("train.py", *small_run(out, run, vocab_size=1216, max_steps=3))
    run_script("export.py", run, exported)
    run_script("eval.py", exported, "--device=cpu", f"--val={out}", f"--out={tmp_path / 'eval'}")
    options = ("--prompt=fox", "--max_new_tokens=5", "--device=cpu")
    sampled = run_script("sample.py", run, *options)
    assert sampled.decode().startswith("fox")
    assert run_script("sample.py", exported, *options) == sampled


# ---- a vocabulary above 65536 ----


# the tokens of a corpus of these words, with end of text, 70,000, before each document


WORDS = [[1, 69_999, 65_535, 65_536], [70_000 - i for i in range(1, 900)], [3, 66_000]] * 3
# the tokens of a corpus of these words, with end of text, 70,000, before each document
WORD_TOKENS = [i for words in WORDS for i in (70_000, *words)]


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory) -> Corpus:
    """Prepare a corpus with a tokenizer of 70,000 words, whose ids need more than 16 bits."""
    folder = tmp_path_factory.mktemp("large_corpus")
    vocabulary = {"<unk>": 0, **{f"w{i}": i for i in range(1, 70_000)}}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<|end|>"])
    texts = [" ".join(f"w{i}" for i in words) for words in WORDS]
    documents = write_documents(folder / "words.jsonl", texts)
    result = prepare(documents, save(folder / "large", library, "<|end|>"), folder / "out")
    assert result.returncode == 0, result.stderr.decode()
    return open_corpus(str(folder / "out"))


def test_a_vocabulary_above_65536_has_uint32_shards_in_the_format_of_llm_c(large_corpus):
    assert shards.choose_format(65_536) == shards.UINT16_FORMAT
    assert shards.choose_format(65_537) == shards.UINT32_FORMAT
    assert large_corpus.meta["dtype"] == "uint32"
    assert large_corpus.meta["vocab_size"] == 70_001
    assert read_tokens(large_corpus) == WORD_TOKENS
    content = (large_corpus.path / "fineweb_edu_val_000000.bin").read_bytes()
    assert struct.unpack("<256i", content[:1024])[:4] == (20240801, 7, 500, 0)
    assert list(struct.unpack("<500I", content[1024:])) == WORD_TOKENS[:500]


def test_batches_are_read_from_uint32_shards(large_corpus):
    batches = ValidationBatches(large_corpus.val, 16, large_corpus.meta["vocab_size"])
    ids, targets = batches.get([0], 1)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids[0].tolist() == WORD_TOKENS[:16]
    assert targets[0].tolist() == WORD_TOKENS[1:17]
    ids, targets = TrainBatches(large_corpus.train, 16, 40, 0, 70_001).get(0, 0, 40)
    assert ids[:, 1:].tolist() == targets[:, :-1].tolist()
    assert ids.max() > 65_535


# ---- errors ----


def test_the_end_of_text_token_is_the_given_one_or_that_of_the_files(folders, tmp_path):
    file = shutil.copy(folders["byte-level"] / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match=r"does not say .*--eot_token"):
        load(tmp_path)
    message = "has no end-of-text token <eos>; its special tokens are </s>, <s>$"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, eot_text="<eos>")
    assert load(tmp_path, eot_text="<s>").eot_token == 0
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert load(file).eot_token == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokenizer.json is missing"),
        ('{"model": {"vocab": {"a": 0}}}', "cannot be read by the tokenizers library"),
    ],
)
def test_mistakes_end_in_one_line(documents, tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    result = prepare(documents, tmp_path, tmp_path / "out", "--eot_token=a")
    assert message in one_line_error(result)
    assert not list((tmp_path / "out").glob("*.bin"))


def test_a_repository_of_the_hub_is_read_once(folders, documents, tmp_path, monkeypatch):
    requests = []

    def download(repository, allow_patterns):
        requests.append(repository)
        return str(folders["byte-level"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for _ in range(2):
        result = prepare(documents, Path("org/name"), tmp_path / "out")
        assert result.returncode == 0, result.stderr.decode()
        assert open_corpus(str(tmp_path / "out")).meta["tokenizer"] == "hf:org/name"
    assert requests == ["org/name"]


def test_a_preparation_without_shards_may_get_other_options(folders, documents, tmp_path):
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "write_shards", None)
        with pytest.raises(TypeError):
            prepare(documents, folders["unigram"], out)
    assert prepare(documents, folders["byte-level"], out, "--val_tokens=400").returncode == 0
    assert open_corpus(str(out)).meta["tokenizer"] == "hf:byte_level"
