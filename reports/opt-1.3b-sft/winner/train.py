"""Trains the recommended configuration once more and says which quality it reaches: ./run.sh [--data FOLDER]

The folder carbonopt/ beside this file has all that is needed of carbonopt, as it was when this was written; params.json
and workload.yaml say what is trained. What inputs.json lists, if there is one, has to lie in data/ or in FOLDER.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


if __name__ == "__main__":
    places = {}
    if (FOLDER / "inputs.json").exists():
        import inputs  # inputs.py, beside this file

        # The ranks but the first needn't read all of it, too.
        places = inputs.places(contents=os.environ.get("RANK", "0") == "0")
    from carbonopt.train.rerun import rerun

    rerun(FOLDER, places)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. DeepSpeed holds on to groups, and so to Gloo's threads; one that still drops a tensor while the
    # interpreter is taken down aborts the process, and with it the others: github.com/pytorch/pytorch/issues/190489
    os._exit(0)
