"""`data/fineweb_edu/prepare.py` with the byte tokenizer in the place of GPT-2's, whose shards --pretokenized takes."""

from data import tokenizer
from data.fineweb_edu import prepare


def main():
    tokenizer.gpt2_tokenizer = tokenizer.byte_tokenizer
    prepare.main()
