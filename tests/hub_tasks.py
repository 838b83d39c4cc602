"""The data sets of the paper's eight tasks, of random words, in the layouts that lm-eval reads."""

import io
import random
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from lm_eval_tasks import phrase

LETTERS = "ABCDE"

# Each of these functions draws one row of a data set.


def arc(draw: random.Random, number: int) -> dict:
    count = 5 if number % 7 == 0 else 4
    choices = {"text": [phrase(draw, 1, 5) for _ in range(count)], "label": list(LETTERS[:count])}
    key = LETTERS[draw.randrange(count)]
    return {
        "id": f"q{number}",
        "question": phrase(draw, 5, 15),
        "choices": choices,
        "answerKey": key,
    }


def hellaswag(draw: random.Random, number: int) -> dict:
    first = phrase(draw, 5, 15)
    second = phrase(draw, 1, 4)
    return {
        "ind": number,
        "activity_label": "Washing [title] hands",
        "ctx_a": first,
        "ctx_b": second,
        "ctx": f"{first} {second}",
        "endings": [phrase(draw, 3, 9) for _ in range(4)],
        "source_id": f"v_{number}",
        "split": "val",
        "split_type": "indomain",
        "label": str(draw.randrange(4)),
    }


def openbookqa(draw: random.Random, number: int) -> dict:
    choices = {"text": [phrase(draw, 1, 5) for _ in range(4)], "label": list(LETTERS[:4])}
    key = LETTERS[draw.randrange(4)]
    return {
        "id": f"7-{number}",
        "question_stem": phrase(draw, 3, 9),
        "choices": choices,
        "answerKey": key,
    }


def piqa(draw: random.Random, number: int) -> dict:
    return {
        "goal": phrase(draw, 3, 9),
        "sol1": phrase(draw, 3, 9),
        "sol2": phrase(draw, 3, 9),
        "label": draw.randrange(2),
    }


def sciq(draw: random.Random, number: int) -> dict:
    return {
        "distractor1": phrase(draw, 1, 3),
        "distractor2": phrase(draw, 1, 3),
        "distractor3": phrase(draw, 1, 3),
        "correct_answer": phrase(draw, 1, 3),
        "question": phrase(draw, 5, 12),
        "support": phrase(draw, 9, 30) if number % 5 else "",
    }


def siqa(draw: random.Random, number: int) -> dict:
    return {
        "answerA": phrase(draw, 1, 5),
        "answerB": phrase(draw, 1, 5),
        "answerC": phrase(draw, 1, 5),
        "context": phrase(draw, 5, 15),
        "question": phrase(draw, 3, 6),
        "label": str(draw.randrange(1, 4)),
    }


def winogrande(draw: random.Random, number: int) -> dict:
    return {
        "sentence": f"{phrase(draw, 3, 7)} _ {phrase(draw, 3, 7)}.",
        "option1": phrase(draw, 1, 2),
        "option2": phrase(draw, 1, 2),
        "answer": str(draw.randrange(1, 3)),
    }


# name: (its configurations, the function that draws a row)
REPOSITORIES = {
    "allenai/ai2_arc": (("ARC-Easy", "ARC-Challenge"), arc),
    "Rowan/hellaswag": (("default",), hellaswag),
    "allenai/openbookqa": (("main",), openbookqa),
    "baber/piqa": (("default",), piqa),
    "allenai/sciq": (("default",), sciq),
    "lighteval/siqa": (("default",), siqa),
    "allenai/winogrande": (("winogrande_xl",), winogrande),
}


def repositories(num_rows: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the name and the files of each data set."""
    for name, (configurations, draw_row) in REPOSITORIES.items():
        files = {}
        card = "---\nconfigs:\n"
        for configuration in configurations:
            card += f"- config_name: {configuration}\n  data_files:\n"
            for split in ("train", "validation", "test"):
                draw = random.Random(f"{name} {configuration} {split}")
                content = io.BytesIO()
                rows = [draw_row(draw, number) for number in range(num_rows)]
                pq.write_table(pa.Table.from_pylist(rows), content)
                files[f"{configuration}/{split}-00000-of-00001.parquet"] = content.getvalue()
                card += f"  - split: {split}\n    path: {configuration}/{split}-*\n"
        yield name, {"README.md": f"{card}---\n".encode(), **files}
