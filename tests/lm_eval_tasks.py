"""Local tasks for lm-eval from generated text: four formats of choices, a text to score and one to
continue.
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
    # Questions with two to five answers, as ARC.
    "questions": 'doc_to_text: "Question: {{question}}\\nAnswer:"\ndoc_to_target: '
    "label\ndoc_to_choice: choices\n",
    # How a text goes on, as HellaSwag; some texts are empty, which leaves no context.
    "endings": "doc_to_text: question\ndoc_to_target: label\ndoc_to_choice: "
    'choices\ntarget_delimiter: ""\n',
    # Several contexts and one ending, as WinoGrande.
    "gaps": "doc_to_text: label\ndoc_to_target: !function gaps.target\ndoc_to_choice: !function "
    "gaps.contexts\n",
    # Answers that are (nearly) one token; the prompt ends with a space.
    "letters": 'doc_to_text: "{{question}} "\ndoc_to_target: label\ndoc_to_choice: ["A", "B", '
    '"no"]\n'
    'target_delimiter: ""\n',
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
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


def document(draw: random.Random, task: str) -> dict:
    count = draw.randint(2, 5) if task != "gaps" else 2
    choices = [phrase(draw, 1, 5) for _ in range(count)]
    low, high = (20, 60) if task == "texts" else (0, 12) if task == "endings" else (1, 12)
    found = {
        "question": phrase(draw, low, high).strip(),
        "choices": choices,
        "ending": " " + phrase(draw, 1, 4),
    }
    return found | {"label": draw.randrange(3 if task == "letters" else count)}


def write_tasks(folder: Path, items: int) -> Path:
    """Task files of all formats, with `items` documents each, in folder."""
    draw = random.Random(0)
    settings = {name: CHOICES + text for name, text in FORMATS.items()} | {
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
