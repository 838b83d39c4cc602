"""Local tasks for lm-eval, of random words.

Four of them offer choices in a format each, one has texts to score, and one has texts to continue.
"""

import json
import random
from pathlib import Path

WORDS = "a be sun dog tree under walks slowly because of the red house, and then it was 12 o'clock; never mind Ünder"
WORDS = [*WORDS.split(), "<|endoftext|>", "3.14", "naïve", "don't", "two\n\nlines", "tab\t"]
CHOICES = """dataset_path: json
output_type: multiple_choice
test_split: test
fewshot_split: train
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
FORMATS = {
    # questions with two to five answers, as in ARC
    "questions": """doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: label
doc_to_choice: choices
""",
    # continuations of a text, as in HellaSwag; some texts are empty, which leaves no context
    "endings": """doc_to_text: question
doc_to_target: label
doc_to_choice: choices
target_delimiter: ""
""",
    # several contexts and one ending, as in WinoGrande
    "gaps": """doc_to_text: label
doc_to_target: !function gaps.target
doc_to_choice: !function gaps.contexts
""",
    # answers of (nearly) one token; the prompt ends with a space
    "letters": """doc_to_text: "{{question}} "
doc_to_target: label
doc_to_choice: ["A", "B", "no"]
target_delimiter: ""
""",
}
GAPS = """
def contexts(doc):
    return [doc["question"] + " " + choice for choice in doc["choices"]]

def target(doc):
    return doc["ending"]
"""
ROLLING = """dataset_path: json
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
CONTINUED = """dataset_path: json
output_type: generate_until
test_split: test
fewshot_split: train
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: "\\n\\n", max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""


def phrase(draw: random.Random, low: int, high: int) -> str:
    """Return `low` to `high` random words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


def document(draw: random.Random, task: str) -> dict:
    """Return one random document of a task."""
    count = draw.randint(2, 5) if task != "gaps" else 2
    choices = [phrase(draw, 1, 5) for _ in range(count)]
    low, high = {"texts": (20, 60), "endings": (0, 12)}.get(task, (1, 12))
    return {
        "question": phrase(draw, low, high).strip(),
        "choices": choices,
        "ending": " " + phrase(draw, 1, 4),
        "label": draw.randrange(3 if task == "letters" else count),
    }


def write_tasks(folder: Path, items: int) -> Path:
    """Write all tasks to a folder, with `items` documents in each task of choices."""
    draw = random.Random(0)
    settings = {
        **{name: CHOICES + text for name, text in FORMATS.items()},
        "texts": ROLLING,
        "continued": CONTINUED,
    }
    (folder / "gaps.py").write_text(GAPS)
    for name, text in settings.items():
        files = {}
        for split, count in (("train", 20), ("test", items if name in FORMATS else 12)):
            files[split] = str(folder / f"{name}_{split}.jsonl")
            lines = [json.dumps(document(draw, name)) for _ in range(count)]
            Path(files[split]).write_text("\n".join(lines) + "\n")
        keys = {"data_files": files, "cache_dir": str(folder / "cache")}
        data = f"task: {name}\ndataset_kwargs: {json.dumps(keys)}\n"
        (folder / f"{name}.yaml").write_text(data + text)
    (folder / "absent.yaml").write_text(
        "task: absent\ndataset_path: nobody/has_this\n" + CHOICES.partition("\n")[2]
    )
    return folder
