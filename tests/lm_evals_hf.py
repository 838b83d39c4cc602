"""Evaluate an exported folder with lm-eval's own `hf` model.

    python tests/lm_evals_hf.py FOLDER SHOTS TASK...

prints JSON, {"samples": {task: samples}, "results": {task: results}}.
"""

import json
import sys

import lm_eval.evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

if __name__ == "__main__":
    folder, shots, *names = sys.argv[1:]
    lm_eval.evaluator.add_env_info = lambda results: None  # seconds of pip list
    model = HFLM(folder, trust_remote_code=True, device="cpu", dtype="float32", batch_size=16)
    evaluation = lm_eval.evaluator.simple_evaluate(
        model, tasks=names, num_fewshot=int(shots), task_manager=TaskManager(), bootstrap_iters=0
    )
    keys = ("doc_id", "filtered_resps", "acc")
    samples = {
        name: [{key: sample[key] for key in keys} for sample in evaluation["samples"][name]]
        for name in names
    }
    results = {name: evaluation["results"][name] for name in names}
    print(json.dumps({"samples": samples, "results": results}))
