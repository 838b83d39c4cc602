"""The paper's eight tasks as data sets of a hub, in the layouts that lm-eval reads, of random
words.
"""

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
from lm_eval_tasks import phrase

LETTERS = "ABCDE"


def arc(draw, number):
    count = 5 if number % 7 == 0 else 4
    choices = {"text": [phrase(draw, 1, 5) for _ in range(count)], "label": list(LETTERS[:count])}
    key = LETTERS[draw.randrange(count)]
    return {
        "id": f"q{number}",
        "question": phrase(draw, 5, 15),
        "choices": choices,
        "answerKey": key,
    }


def hellaswag(draw, number):
    first, second = phrase(draw, 5, 15), phrase(draw, 1, 4)
    found = {
        "ind": number,
        "activity_label": "Washing [title] hands",
        "ctx_a": first,
        "ctx_b": second,
    }
    found |= {
        "ctx": f"{first} {second}",
        "endings": [phrase(draw, 3, 9) for _ in range(4)],
        "source_id": f"v_{number}",
    }
    return found | {"split": "val", "split_type": "indomain", "label": str(draw.randrange(4))}


def openbookqa(draw, number):
    choices = {"text": [phrase(draw, 1, 5) for _ in range(4)], "label": list(LETTERS[:4])}
    key = LETTERS[draw.randrange(4)]
    return {
        "id": f"7-{number}",
        "question_stem": phrase(draw, 3, 9),
        "choices": choices,
        "answerKey": key,
    }


def piqa(draw, number):
    found = {"goal": phrase(draw, 3, 9), "sol1": phrase(draw, 3, 9), "sol2": phrase(draw, 3, 9)}
    return found | {"label": draw.randrange(2)}


def sciq(draw, number):
    found = {
        key: phrase(draw, 1, 3)
        for key in ("distractor1", "distractor2", "distractor3", "correct_answer")
    }
    return found | {
        "question": phrase(draw, 5, 12),
        "support": phrase(draw, 9, 30) if number % 5 else "",
    }


def siqa(draw, number):
    found = {key: phrase(draw, 1, 5) for key in ("answerA", "answerB", "answerC")}
    found |= {"context": phrase(draw, 5, 15), "question": phrase(draw, 3, 6)}
    return found | {"label": str(draw.randrange(1, 4))}


def winogrande(draw, number):
    found = {
        "sentence": f"{phrase(draw, 3, 7)} _ {phrase(draw, 3, 7)}.",
        "option1": phrase(draw, 1, 2),
    }
    return found | {"option2": phrase(draw, 1, 2), "answer": str(draw.randrange(1, 3))}


REPOSITORIES = {
    "allenai/ai2_arc": (("ARC-Easy", "ARC-Challenge"), arc),
    "Rowan/hellaswag": (("default",), hellaswag),
    "allenai/openbookqa": (("main",), openbookqa),
    "baber/piqa": (("default",), piqa),
    "allenai/sciq": (("default",), sciq),
    "lighteval/siqa": (("default",), siqa),
    "allenai/winogrande": (("winogrande_xl",), winogrande),
}


def repositories(rows: int):
    """(name, files) of each data set."""
    for name, (configurations, row) in REPOSITORIES.items():
        files, card = {}, "---\nconfigs:\n"
        for configuration in configurations:
            card += f"- config_name: {configuration}\n  data_files:\n"
            for split in ("train", "validation", "test"):
                draw = random.Random(f"{name} {configuration} {split}")
                content = io.BytesIO()
                pq.write_table(
                    pa.Table.from_pylist([row(draw, number) for number in range(rows)]), content
                )
                files[f"{configuration}/{split}-00000-of-00001.parquet"] = content.getvalue()
                card += f"  - split: {split}\n    path: {configuration}/{split}-*\n"
        yield name, {"README.md": f"{card}---\n".encode(), **files}
