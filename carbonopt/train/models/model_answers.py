"""Answer questions about models that need no GPU, as a program.

`python -m carbonopt.train.models.model_answers` reads questions from standard input, a line of JSON
each: `["weights", question]`, for one. For each it prints the answer, a line with
a string in JSON.
"""

import gc
import json
import os
import sys


def main() -> None:
    """Run the program; standard output has the answers only."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # libraries print what they like
        # Looking for garbage among what is imported takes 0.7 of 4.3 s, and there is hardly any.
        gc.disable()
        from carbonopt.train.imports import hidden

        # transformers' losses of object detection import SciPy, a tenth of the imports' time.
        with hidden("scipy"):
            from carbonopt.train.models import memory_probe, weight_check
            from carbonopt.train.optim import settings_check

        gc.freeze()
        gc.enable()
        programs = {
            "keys": settings_check.answer,
            "memory": memory_probe.answer,
            "weights": weight_check.answer,
        }
        for line in sys.stdin:
            about, question = json.loads(line)
            print(json.dumps(programs[about](question)), file=answers, flush=True)


if __name__ == "__main__":
    main()
