"""Check the keys of a workload that are handed on to DeepSpeed and transformers."""

import json

from carbonopt.core.errors import BadInput
from carbonopt.spec.space_settings import Space
from carbonopt.train.tasks.task import task_for
from carbonopt.train.tasks.trainer_task import TrainerTask


def answer(question: str) -> str:
    """Return null in JSON, or the sentence that refuses a key of the workload.

    Values that depend on the machine are left to the preparation on the machine that trains.

    Args:
        question: A workload and its search space in JSON.
    """
    from carbonopt.train.optim import arguments_check, deepspeed_keys

    workload, space = json.loads(question)
    task = task_for(workload)
    try:
        deepspeed_keys.check_deepspeed_keys(task.workload.deepspeed)
        if isinstance(task, TrainerTask) and (given := task.workload.training_arguments):
            kind = task.arguments_class()
            arguments_check.check_keys(given, Space.model_validate(space), kind)
    except BadInput as error:
        return json.dumps(str(error))
    return json.dumps(None)
