"""The sampler as a package of its own."""

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "configs" / "sampler"
ALONE = """
import sys, time


class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name in ("carbonopt", "torch", "deepspeed", "transformers"):
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Nowhere())
"""
TIMED = """
begin = time.process_time()
import optuna, pydantic, scipy.linalg, scipy.optimize
dependencies = time.process_time()
import carbonopt_sampler
print(dependencies - begin, time.process_time() - dependencies)
"""


def test_it_imports_quickly_and_searches_without_carbonopt_and_torch(tmp_path: Path) -> None:
    """Its own files take less time than what they import from others."""
    subprocess.run([sys.executable, str(FOLDER / "build.py"), str(tmp_path)], check=True)
    (example,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    program = f"{ALONE}{TIMED}{example}\nprint(min(trial.values[1] for trial in study.trials))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    dependencies_cpu_s, own_cpu_s, perplexity = map(float, done.stdout.split())
    assert own_cpu_s < dependencies_cpu_s
    assert perplexity <= 33
    assert (tmp_path / "carbonopt_sampler" / "core" / "dimensions.py").is_file()
    assert not (tmp_path / "carbonopt_sampler" / "study").exists()


def test_it_is_made_in_an_empty_folder_only(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "build.py"), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "must be an empty folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
