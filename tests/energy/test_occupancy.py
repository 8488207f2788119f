"""Whether a trial finds the GPUs' memory free: a stand-in NVML tells what living processes hold
(see tests/nvml).
"""

from pathlib import Path

import pytest
from energy.test_gpu_energy import with_gpus

pytestmark = pytest.mark.timed

HOLDERS = """
import subprocess, threading
from pathlib import Path
from carbonopt.energy.occupancy import GpuMemory
holders = Path(os.environ["STAND_IN_MEMORY"])
def hold(gpu, gib):
    process = subprocess.Popen(["sleep", "600"])
    with holders.open("a") as file:
        file.write(f"{gpu} {gib} {process.pid}\\n")
    return process
def free(process):
    process.kill()
    process.wait()
"""

MEMORY = """
def ask(interrupted=lambda: False):
    began = time.monotonic()
    said = memory.await_free(interrupted)
    print(json.dumps([said, time.monotonic() - began]))
others = hold(0, 30)
memory = GpuMemory([0, 1], patience_s=3)
waiting = [hold(gpu, 1.5) for gpu in (0, 1)]
ask()
killed = hold(1, 40)
threading.Timer(1.0, free, [killed]).start()
ask()
leak = [hold(0, 9), hold(1, 40)]
ask(interrupted=lambda: True)
ask()
ask()
for one in (others, *leak):
    free(one)
ask()
leak = [hold(0, 3)]
ask()
for one in (*leak, *waiting):
    free(one)
def refuse(*_):
    raise pynvml.NVMLError_NotSupported("Not Supported")
leak = [hold(0, 40)]
pynvml.nvmlDeviceGetMemoryInfo = refuse
ask()
memory = GpuMemory([0])
ask()
free(*leak)
"""


@pytest.mark.slow
def test_a_trial_waits_until_the_memory_of_the_one_before_is_free(tmp_path: Path) -> None:
    (tmp_path / "holders").touch()
    answers = with_gpus(
        [300, 300], HOLDERS + MEMORY, tmp_path, STAND_IN_MEMORY=str(tmp_path / "holders")
    )
    free, late, interrupted, held, again, freed, leak, *untold = answers
    assert free[0] is None and free[1] < 1, "another's memory and the ranks that wait are no leak"
    assert late[0] is None and 0.9 < late[1] < 3
    assert interrupted[0] is None and interrupted[1] < 1
    assert (
        "GPU 0 holds 40.5 GiB, 10.5 GiB more and GPU 1 holds 41.5 GiB, 41.5 GiB more than at 20"
        in held[0]
    )
    assert "still after 3 s of waiting" in held[0] and held[1] >= 3
    assert again[0] is None and again[1] < 1, "said and waited for once"
    assert freed[0] is None and freed[1] < 1
    assert "GPU 0 holds 4.5 GiB, 3.0 GiB more" in leak[0], (
        "what others have given back counts as free from then on"
    )
    assert [said for said, _ in untold] == [None, None] and max(took_s for _, took_s in untold) < 1


STUDY = """
from carbonopt.study_file.study_checks import check
from carbonopt.study.run_study import run_study
from carbonopt.study.session import Session
from carbonopt.study_file.reader import parse_study
from search.test_study import Replayed, Silent
memory = GpuMemory([0], patience_s=0.5)
seen, leaks = [], []
class Display(Silent):
    def warn(self, text):
        seen.append(text)
    def trial_started(self, spec, started_at):
        seen.append(spec.number)
    def trial_ended(self, record):
        if record.trial == 1:
            leaks.append(hold(0, 20))
replayed = Replayed(Path(os.environ["FOLDER"]))
replayed.study["budget"] = {"trials": 4}
checked = check(parse_study(replayed.study, "test"))
checked.engine.await_free = memory.await_free
run_study(Session(checked, "", replayed.paths, Display(), Silent(), lambda: False))
print(json.dumps(seen))
memory.close()
free(*leaks)
"""


@pytest.mark.slow
def test_a_study_says_before_which_trial_memory_was_not_free(tmp_path: Path) -> None:
    (tmp_path / "holders").touch()
    environment = {"FOLDER": str(tmp_path / "study"), "STAND_IN_MEMORY": str(tmp_path / "holders")}
    (seen,) = with_gpus([300], HOLDERS + STUDY, tmp_path, **environment)
    warning = seen.pop(2)
    assert seen == [0, 1, 2, 3]
    assert warning.startswith("GPU 0 holds 20.0 GiB, 20.0 GiB more than at ")
