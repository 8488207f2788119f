"""Prepare everything that trials share, once before the first: data, checks, DeepSpeed's operators.

`python -m carbonopt.train.prepare SPEC.json` runs it; SPEC.json is a PrepareSpec.
"""

import gc
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from carbonopt.core.errors import BadInput
from carbonopt.core.files import write_json
from carbonopt.core.trial import Phase
from carbonopt.core.values import Frozen
from carbonopt.spec.model_memory import ModelMemory
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, may_be, may_be_other_than
from carbonopt.spec.trial_spec import Prepared
from carbonopt.train.client import Speaker
from carbonopt.train.data.data_notes import data_notes
from carbonopt.train.failures import as_bad_input, reason, reported
from carbonopt.train.speed.deepspeed_ops import load_operator, op_builders
from carbonopt.train.tasks.task import TrainingTask, training_task
from carbonopt.train.tasks.trainer_task import TrainerTask

# modules that take seconds to import
_IMPORTED_AHEAD = (
    "deepspeed.runtime.config",
    "transformers.training_args",
    "transformers.models.auto.modeling_auto",
)


class PrepareSpec(Frozen):
    workload: dict[str, Any]  # the task's settings, dumped
    space: Space  # lacks the dimensions that are still to be chosen
    auto: bool = False  # whether the space is still to be chosen
    world_size: int = 1  # number of ranks of its trials
    prepared_dir: str
    fingerprint: str


def prepare(spec: PrepareSpec) -> Prepared:
    """Make the prepared folder, or reuse one that was made for the same workload.

    DeepSpeed's operators are loaded in any case, and compiled where they are missing.

    Raises:
        BadInput: Something in the workload would make every trial fail.
    """
    from carbonopt.train import ranks

    folder = PreparedFolder(Path(spec.prepared_dir))
    if (prepared := folder.made_for(spec.fingerprint)) is not None:
        _load_ops(_chosen(spec, prepared))
        return prepared
    _check_is_free(folder)
    ranks.check_devices()
    task = training_task(spec.workload)
    _check_settings(task, spec.space)
    aside, old = (
        folder.root.with_name(f".{folder.root.name}.{os.getpid()}.{kind}")
        for kind in ("part", "old")
    )
    try:
        aside.mkdir(parents=True)
        prepared = _prepare_in(PreparedFolder(aside), task, spec)
        if folder.root.exists():
            folder.root.rename(old)
        aside.rename(folder.root)  # a reader finds a whole folder there or none
    finally:
        for left_over in (aside, old):
            shutil.rmtree(left_over, ignore_errors=True)
    return prepared


def _check_is_free(folder: PreparedFolder) -> None:
    """Raise BadInput if something else lies where the prepared folder would be made."""
    if folder.root.exists() and not folder.root.is_dir():
        raise BadInput(f"{folder.root} must be a folder, but is a file; move it away.")
    if folder.root.exists() and not folder.summary.is_file() and any(folder.root.iterdir()):
        raise BadInput(
            f"{folder.root} must be empty or a prepared data set, but holds other files; move them"
            " away."
        )


def _check_settings(task: TrainingTask, space: Space) -> None:
    """Raise BadInput if there is no whole model, or DeepSpeed or the Trainer refuses settings."""
    from carbonopt.train.models.model import MODEL_KEY, check_source
    from carbonopt.train.optim import arguments_check, deepspeed_keys

    deepspeed_keys.check_deepspeed_keys(task.workload.deepspeed)
    if isinstance(task, TrainerTask):
        if (name := task.workload.model.name_or_path) is not None:
            check_source(str(name), MODEL_KEY, task.workload.model.revision)
        arguments = task.workload.training_arguments
        arguments_check.check_training_arguments(arguments, space, task.arguments_class())


def _prepare_in(folder: PreparedFolder, task: TrainingTask, spec: PrepareSpec) -> Prepared:
    """Prepare the data and what is known of the model, and write them into an empty folder."""
    from carbonopt.train.models import model_check, weights
    from carbonopt.train.models.model import empty_model, has_experts, saved_config
    from carbonopt.train.models.zero_leaves import zero_leaves
    from carbonopt.train.space_facts import chosen_space

    with data_notes() as notes:
        prepared = task.prepare(spec.space, folder, spec.fingerprint)
    prepared = prepared.model_copy(update={"notes": (*prepared.notes, *notes)})
    if isinstance(task, TrainerTask):
        config = saved_config(folder, task.workload.model.trust_remote_code)
        with as_bad_input("model"):
            weights.check_values(task.model_kind, task.workload.model, config)
        model_check.check_model(task, config, spec.space, folder)
        trusted = task.workload.model.trust_remote_code
        if padding := model_check.padding_note(task.model_kind, config, trusted):
            prepared = prepared.model_copy(update={"notes": (*prepared.notes, padding)})
        model = empty_model(task.model_kind, config, trusted)
        prepared = prepared.model_copy(update={"has_experts": has_experts(model)})
        if spec.auto:
            auto = chosen_space(task, config, prepared, spec.world_size)
            prepared = prepared.model_copy(update={"auto": auto})
            spec = _chosen(spec, prepared)
        if may_be(spec.space["zero_stage"], 3):
            leaves = zero_leaves(task, config, folder, spec.space["lora_rank"])
            prepared = prepared.model_copy(update={"zero_leaves": leaves})
    write_json(folder.workload, spec.workload)
    _load_ops(spec)
    update = {"files": folder.sizes(), "memory": _memory(task, spec, folder, prepared)}
    prepared = prepared.model_copy(update=update)
    write_json(folder.summary, prepared.model_dump())
    return prepared


def _chosen(spec: PrepareSpec, prepared: Prepared) -> PrepareSpec:
    """Return the specification with the space that was chosen, if one was."""
    return spec if prepared.auto is None else spec.model_copy(update={"space": prepared.auto.space})


def _memory(
    task: TrainingTask, spec: PrepareSpec, folder: PreparedFolder, prepared: Prepared
) -> ModelMemory | None:
    """Return what the search and the report estimate the memory of GPUs from.

    None on a CPU, whose memory is measured otherwise, and where no estimate can be made, which
    stops no study.
    """
    import torch

    from carbonopt.train.models.memory_probe import model_memory
    from carbonopt.train.models.model import saved_config

    if not torch.cuda.is_available() or not isinstance(task, TrainerTask):
        return None
    config = saved_config(folder, task.workload.model.trust_remote_code)
    eval_batch_size = task.workload.eval_batch_size_per_gpu or prepared.eval_batch_size_per_gpu
    try:
        return model_memory(
            task,
            config,
            spec.space,
            spec.world_size,
            eval_batch_size,
            folder,
            eval_tokens=task.evaluation_tokens(prepared.eval_examples),
        )
    except BadInput as error:
        print(f"Memory is not estimated: {reason(error)}.", file=sys.stderr)
        return None


def _load_ops(spec: PrepareSpec) -> None:
    for builder in op_builders(with_cpu_adam=may_be_other_than(spec.space["offload"], "none")):
        load_operator(builder)


def main(spec_json: str) -> int:
    """Prepare what a PrepareSpec in JSON says, report to the study, and return the exit code."""
    speaker = Speaker.inherited()

    def work() -> None:
        gc.disable()  # for the reason given in engines.process.fork_server
        for module in _IMPORTED_AHEAD:
            importlib.import_module(module)
        gc.enable()
        # After its answer the GPUs' idle power is known, and they may be touched.
        speaker.phase(Phase.PREPARE)
        speaker.finished(prepare(PrepareSpec.model_validate_json(spec_json)).model_dump())

    return reported(work, speaker)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).read_text(encoding="utf-8")))
