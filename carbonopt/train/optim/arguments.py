"""The transformers.TrainingArguments of one trial: the study's own, and what carbonopt sets."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import Trainer, TrainingArguments

from carbonopt.core.dimensions import TrainingParams, scheduler_arguments
from carbonopt.spec.workload_settings import Workload

_IN_ALL_TRIALS = {
    "disable_tqdm": True,
    "report_to": "none",
    "eval_strategy": "no",
    "save_strategy": "no",
    "logging_strategy": "no",
    # The filter would wait for the GPU at every step, and hide a divergence.
    "logging_nan_inf_filter": False,
    # The loss is already divided by the whole global batch's tokens.
    "average_tokens_across_devices": False,
}


def training_arguments(
    params: TrainingParams,
    workload: Workload,
    steps: int,
    seed: int,
    on_gpu: bool,
    folder: str,
    deepspeed: dict[str, Any],
    kind: type[TrainingArguments] = TrainingArguments,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingArguments:
    """Return the trial's arguments.

    Making them starts torch.distributed and announces the ZeRO stage to transformers.

    Args:
        params: The trial's parameters.
        workload: The study's workload.
        steps: The number of optimizer steps.
        seed: The trial's seed.
        on_gpu: Whether the trial trains on a GPU.
        folder: The trial's folder.
        deepspeed: DeepSpeed's settings.
        kind: The task's class of arguments.
        more: Values that the task sets for fields of this class.
    """
    chosen = params.arguments(steps)
    del chosen["num_train_epochs"]  # max_steps replaces it
    owned = {
        "output_dir": folder,
        "deepspeed": deepspeed,
        "max_steps": steps,
        "seed": seed,
        "use_cpu": not on_gpu,
        "bf16": params.precision == "bf16",
        "fp16": params.precision == "fp16",
        "gradient_accumulation_steps": params.gradient_accumulation_steps,
    }
    given: dict[str, Any] = {"optim": "adamw_torch_fused", "dataloader_pin_memory": on_gpu, **more}
    given = given | workload.training_arguments | chosen | owned | _IN_ALL_TRIALS
    if needed := scheduler_arguments(given.get("lr_scheduler_type"), params.decay_ratio, steps):
        given["lr_scheduler_kwargs"] = needed | (given.get("lr_scheduler_kwargs") or {})
    arguments = kind(**given)
    if not on_gpu and params.world_size > 1:
        # Here accelerate starts torch.distributed without DeepSpeed's part, and ZeRO-3 would see
        # one rank when it loads a model.
        from deepspeed import comm

        comm.init_distributed("gloo", auto_mpi_discovery=False)
    if arguments.torch_compile:
        # Compile layer by layer, not the whole model: on an H200 (GPT-2 124M, 128 x 512 tokens,
        # torch 2.11) it takes 1.24 mJ a token against 1.31, after 8 s of compilation against 15.
        # Before torch 2.14 transformers can't tell, while the whole model is traced, that the mask
        # is causal, and attention then computes the masked half, too.
        os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    return arguments


def chosen_optimizer(params: TrainingParams, workload: Workload, trainer: Trainer) -> Any:
    """Return class and options of an optimizer that replaces `arguments.optim`, or None.

    It is Muon if the trial's parameters say so. If a GPU's optimizer states are offloaded and the
    study chose no optimizer, it is DeepSpeed's CPU AdamW: torch's is several times slower there. It
    is given to the Trainer, not to DeepSpeed, and so gets the same parameter groups as torch's:
    offload changes no weight decay. On a host without GPU torch's AdamW is used, which needs no
    compiler.

    Raises:
        BadInput: See `muon.groups_of`.
    """
    arguments, model = trainer.args, trainer.model
    assert model is not None
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    options = {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}
    if params.optimizer == "muon":
        from carbonopt.train.optim.muon import Muon, groups_of

        groups = groups_of(model, trainer.get_decay_parameter_names(model), arguments.weight_decay)
        return Muon, {**options, "params": groups}
    if params.offload == "none" or arguments.use_cpu or "optim" in workload.training_arguments:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam, options
