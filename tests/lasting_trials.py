"""Studies of a script whose trials last until they are interrupted. They import no library, and
sleep most of the time.
"""

import sys
from pathlib import Path

SCRIPT = """
import re, sys, time
import carbonopt.script as carbon
steps = 10 if re.search(BRIEF, sys.argv[1]) else 10_000
run = carbon.run(total_steps=steps)
for step in range(steps):
    busy_until_s = time.process_time() + 0.02
    while time.process_time() < busy_until_s:
        pass
    time.sleep(0.08)
    run.step()
run.report(accuracy=0.9, count=100)
"""


def lasting(study: dict, folder: Path, brief: str) -> dict:
    """Make this study one of such trials, in this folder. Those whose output folder `brief`, a
    regular expression, finds take a second.
    """
    (folder / "train.py").write_text(SCRIPT.replace("BRIEF", repr(brief)))
    command = f"{sys.executable} train.py {{output_dir}} {{my_width}}"
    study["workload"] = {"task": "script", "command": command}
    study["target"] = {"accuracy": 0.5}
    study["search"] = {
        "space": {"my_width": {"choices": [1, 2, 3]}},
        "sampler": "random",
        "pruning": {"target": False, "cap": False},
    }
    return study
