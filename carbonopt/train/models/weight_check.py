"""Check whether pretrained models have the weights that a study needs."""

import json

from carbonopt.core.errors import BadInput
from carbonopt.train.tasks.task import task_for
from carbonopt.train.tasks.trainer_task import TrainerTask


def answer(question: str) -> str:
    """Return in JSON a list of sentences on tensors left unused, or the sentence of a refusal.

    Args:
        question: A list of workloads in JSON, each with the keys whose models are checked.
    """
    notes = []
    try:
        for workload, keys in json.loads(question):
            if isinstance(task := task_for(workload), TrainerTask):
                notes.append(task.check_weights(keys))
    except BadInput as error:
        return json.dumps(str(error))
    return json.dumps([note for note in notes if note is not None])
