"""Everything that trials share, done once before the first: data to arrays, the checks, DeepSpeed's ops.

python -m carbonopt.train.prepare SPEC.json, which is a PrepareSpec.
"""

import gc
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from carbonopt.core.config import Space, may_be_other_than
from carbonopt.core.errors import BadInput
from carbonopt.core.files import PreparedFolder, write_json
from carbonopt.core.memory import ModelMemory
from carbonopt.core.trial import Phase, Prepared
from carbonopt.core.values import Frozen
from carbonopt.train.client import Speaker
from carbonopt.train.deepspeed_ops import op_builders
from carbonopt.train.failures import reason, reported
from carbonopt.train.tasks.base import TrainingTask, training_task
from carbonopt.train.tasks.trainer_task import TrainerTask

# What takes seconds to import.
_IMPORTED_AHEAD = ("deepspeed.runtime.config", "transformers.training_args", "transformers.models.auto.modeling_auto")


class PrepareSpec(Frozen):
    workload: dict[str, Any]  # the task's settings, dumped
    space: Space  # without a dimension where it is to be chosen
    auto: bool = False  # it is
    world_size: int = 1  # of its trials
    prepared_dir: str
    fingerprint: str


def prepare(spec: PrepareSpec) -> Prepared:
    """Makes the prepared folder, or takes it as it is when it was made for the same workload; DeepSpeed's operators are
    loaded in any case, and compiled where they aren't there. Raises BadInput for whatever in the workload would make
    every trial fail."""
    from transformers import AutoConfig

    from carbonopt.train import arguments_check, deepspeed_keys, model_check, ranks
    from carbonopt.train.space_facts import chosen_space

    folder = PreparedFolder(Path(spec.prepared_dir))
    if (prepared := folder.made_for(spec.fingerprint)) is not None:
        _load_ops(_chosen(spec, prepared))
        return prepared
    if folder.root.exists() and not folder.root.is_dir():
        raise BadInput(f"{folder.root} must be a folder, but is a file; move it away.")
    if folder.root.exists() and not folder.summary.is_file() and any(folder.root.iterdir()):
        raise BadInput(f"{folder.root} must be empty or a prepared data set, but holds other files; move them away.")
    ranks.check_devices()
    task = training_task(spec.workload)
    deepspeed_keys.check_deepspeed_keys(task.workload.deepspeed)
    if isinstance(task, TrainerTask):
        given, kind = task.workload.training_arguments, task.arguments_class()
        arguments_check.check_training_arguments(given, spec.space, kind)
    aside, old = (folder.root.with_name(f".{folder.root.name}.{os.getpid()}.{kind}") for kind in ("part", "old"))
    try:
        aside.mkdir(parents=True)
        made = PreparedFolder(aside)
        prepared = task.prepare(spec.space, made, spec.fingerprint)
        if isinstance(task, TrainerTask):
            config = AutoConfig.from_pretrained(made.model_config)
            model_check.check_model(task, config, spec.space, made)
            if spec.auto:
                prepared = prepared.model_copy(update={"auto": chosen_space(task, config, prepared, spec.world_size)})
                spec = _chosen(spec, prepared)
        write_json(made.workload, spec.workload)
        _load_ops(spec)
        update = {"files": made.sizes(), "memory": _memory(task, spec, made, prepared)}
        prepared = prepared.model_copy(update=update)
        write_json(made.summary, prepared.model_dump())
        if folder.root.exists():
            folder.root.rename(old)
        aside.rename(folder.root)  # a reader finds a whole folder there or none
    finally:
        for rest in (aside, old):
            shutil.rmtree(rest, ignore_errors=True)
    return prepared


def _chosen(spec: PrepareSpec, prepared: Prepared) -> PrepareSpec:
    """With the space that was chosen, where one was."""
    return spec if prepared.auto is None else spec.model_copy(update={"space": prepared.auto.space})


def _memory(task: TrainingTask, spec: PrepareSpec, folder: PreparedFolder, prepared: Prepared) -> ModelMemory | None:
    """What the report sets beside the measured memory of GPUs. None: on a CPU, whose memory is measured otherwise, and
    where it can't be told, which stops no study."""
    import torch
    from transformers import AutoConfig

    from carbonopt.train.memory import model_memory

    if not torch.cuda.is_available() or not isinstance(task, TrainerTask):
        return None
    config = AutoConfig.from_pretrained(folder.model_config)
    eval_batch_size = task.workload.eval_batch_size_per_gpu or prepared.eval_batch_size_per_gpu
    try:
        return model_memory(task, config, spec.space, spec.world_size, eval_batch_size, folder)
    except BadInput as error:
        print(f"Memory is not estimated: {reason(error)}.", file=sys.stderr)
        return None


def _load_ops(spec: PrepareSpec) -> None:
    for builder in op_builders(with_cpu_adam=may_be_other_than(spec.space["offload"], "none")):
        builder.load(verbose=False)


def main(spec_json: str) -> int:
    """The program: prepares what a PrepareSpec in JSON says and tells the study; returns the exit code."""
    speaker = Speaker.inherited()

    def work() -> None:
        gc.disable()  # as in engines.process.fork_server
        for module in _IMPORTED_AHEAD:
            importlib.import_module(module)
        gc.enable()
        speaker.phase(Phase.PREPARE)  # from its answer on the GPUs' idle power is known, and they may be touched
        speaker.finished(prepare(PrepareSpec.model_validate_json(spec_json)).model_dump())

    return reported(work, speaker)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).read_text(encoding="utf-8")))
