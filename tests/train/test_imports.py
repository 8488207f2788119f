"""What is done ahead of a trial's first step."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from carbonopt.train import imports
from carbonopt.train.training_loop import _kernels

imports.load_compiler()
imports.practise_compiling(torch.device("cpu"))
assert _kernels() is None
loaded = set(sys.modules)
layer = torch.compile(torch.nn.Linear(4, 4))
layer(torch.ones(1, 4)).sum().backward()
assert _kernels() is not None
late = {name for name in sys.modules.keys() - loaded if name.startswith("torch.") and "compile_tasks" not in name}
print(len(late), sorted(late))
"""


@pytest.mark.slow
def test_the_compilers_modules_are_loaded_ahead_and_practice_is_not_counted() -> None:
    """Three hundred modules otherwise, in the first step."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) < 5, done.stdout


@pytest.mark.slow
def test_a_trials_process_leaves_mlflow_and_torchao_out_and_a_trial_can_still_import_them() -> None:
    """Nor does it look for garbage among what it imports, but afterwards again."""
    script = (
        "import gc, sys\n"
        "class Imports:\n"
        "    searched = []\n"
        "    def find_spec(self, name, *_):\n"
        "        self.searched += [gc.isenabled()] * (name == 'transformers.trainer')\n"
        "sys.meta_path.insert(0, Imports())\n"
        "import carbonopt.train.fork_template\n"
        "assert Imports.searched == [False] and gc.isenabled()\n"
        "assert {'deepspeed', 'transformers.trainer'} <= sys.modules.keys()\n"
        "assert not {'mlflow', 'torchao'} & sys.modules.keys()\n"
        "import mlflow\nassert mlflow.__version__\n"
        "from torchao.float8 import convert_to_float8_training\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
