"""Check whether pretrained models have the weights that a study needs, as a program.

`python -m carbonopt.train.models.weight_check` reads a list of workloads, each with the keys whose
models are checked, from standard input as JSON. It prints null, or the sentence that refuses one of
them.
"""

import json
import os
import sys

from carbonopt.core.errors import BadInput
from carbonopt.train.tasks.task import task_for
from carbonopt.train.tasks.trainer_task import TrainerTask


def main() -> None:
    """Run the program; standard output has the answer only."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        refusal = None
        try:
            for workload, keys in json.load(sys.stdin):
                if isinstance(task := task_for(workload), TrainerTask):
                    task.check_weights(keys)
        except BadInput as error:
            refusal = str(error)
        print(json.dumps(refusal), file=answers)


if __name__ == "__main__":
    main()
