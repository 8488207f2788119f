"""transformers.TrainingArguments of one trial: the study's own, and what carbonopt sets."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import Trainer, TrainingArguments

from carbonopt.core.config import Workload
from carbonopt.core.dimensions import TrainingParams, scheduler_arguments


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
    """The trial's arguments, of a class and with more of its fields that the task says. Making them starts
    torch.distributed and announces the ZeRO stage to transformers."""
    searched = params.arguments(steps)
    del searched["num_train_epochs"]  # the steps say it
    owned = {"output_dir": folder, "deepspeed": deepspeed, "max_steps": steps, "seed": seed, "use_cpu": not on_gpu}
    owned |= {"bf16": params.precision == "bf16", "fp16": params.precision == "fp16"}
    owned |= {"gradient_accumulation_steps": params.gradient_accumulation_steps, "disable_tqdm": True}
    owned |= {"report_to": "none", "eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no"}
    owned["logging_nan_inf_filter"] = False  # it would wait for the GPU at every step, and hide a divergence
    owned["average_tokens_across_devices"] = False  # the loss is already divided by the whole global batch's tokens
    given: dict[str, Any] = {"optim": "adamw_torch_fused", "dataloader_pin_memory": on_gpu, **more}
    given = given | workload.training_arguments | searched | owned
    if needed := scheduler_arguments(given.get("lr_scheduler_type"), params.decay_ratio, steps):
        given["lr_scheduler_kwargs"] = needed | (given.get("lr_scheduler_kwargs") or {})
    arguments = kind(**given)
    if not on_gpu and params.world_size > 1:
        # There accelerate starts torch.distributed without DeepSpeed's part, and ZeRO-3, loading, would see one rank.
        from deepspeed import comm

        comm.init_distributed("gloo", auto_mpi_discovery=False)
    if arguments.torch_compile:
        # Layer by layer, not the whole model: on an H200 (GPT-2 124M, 128 x 512 tokens, torch 2.11) 1.24 mJ a token
        # against 1.31, after 8 s of compilation against 15. Before torch 2.14 transformers can't tell, while all of it
        # is traced, that the mask is causal, and attention computes the half that is masked, too.
        os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    return arguments


def chosen_optimizer(params: TrainingParams, workload: Workload, trainer: Trainer) -> Any:
    """Class and options of Muon where it is searched, and of DeepSpeed's CPU AdamW where states leave a GPU, unless the
    study chose an optimizer: torch's is several times slower there. Given to the Trainer, not to DeepSpeed, it gets the
    same parameter groups as torch's, so that offload changes no weight decay. None: `arguments.optim`; on a host
    without GPU torch's AdamW needs no compiler. Raises BadInput as `muon.groups_of`."""
    arguments, model = trainer.args, trainer.model
    assert model is not None
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    options = {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}
    if params.optimizer == "muon":
        from carbonopt.train.muon import Muon, groups_of

        groups = groups_of(model, trainer.get_decay_parameter_names(model), arguments.weight_decay)
        return Muon, {**options, "params": groups}
    if params.offload == "none" or arguments.use_cpu or "optim" in workload.training_arguments:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam, options
