"""One rank of one trial.

    python -m carbonopt.train.worker SPEC.json

SPEC.json is a trial.TrialSpec. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment, as
torchrun sets them; rank 0 inherits the channel. With CARBONOPT_SAVE_MODEL=1 the trained model is kept.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from carbonopt.core.config import Workload
from carbonopt.core.errors import BadInput
from carbonopt.core.events import CHANNEL_FD
from carbonopt.core.files import PreparedFolder, write_json
from carbonopt.core.trial import Prepared, Stage, TrialSpec
from carbonopt.train import ranks
from carbonopt.train.client import Speaker
from carbonopt.train.data.packing import MicroBatches, open_tokens, total_steps
from carbonopt.train.failures import reported

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from carbonopt.train.loop import EvaluationSchedule, TrialTrainer
    from carbonopt.train.output_layer import FusedOutputLayer

SAVE_MODEL = "CARBONOPT_SAVE_MODEL"  # environment variable: 1 keeps the trained model in the trial's folder
_SMALLEST_EVAL_BATCH = 8  # sequences; no gradients are kept, so more than the micro batch always fits


def run_trial(spec: TrialSpec, speaker: Speaker | None) -> dict[str, Any]:
    """Trains and evaluates; returns the summary of what happened.

    Raises:
        BadInput: if the parameters don't go with each other or with the data set.
        Diverged: when a loss is not finite.
    """
    from carbonopt.train import imports as warm  # noqa: F401, all imports at once; a fork has them already
    from carbonopt.train.versions import package_versions

    _begin(speaker, Stage.DATA)
    workload = Workload(**spec.workload)
    folder = PreparedFolder(Path(spec.prepared_dir))
    prepared = folder.read_summary()
    _check_ranks(spec)
    ranks.check_devices()
    steps = total_steps(prepared.train_sequences, spec.params.global_batch_size, spec.params.epochs)
    trainer = _trainer(spec, workload, folder, _plan(spec, workload, prepared, folder, steps), speaker)
    trainer.train()
    if os.environ.get(SAVE_MODEL) == "1":
        _save_model(trainer, folder, Path(spec.trial_dir) / "model")
    return {
        "step": trainer.state.global_step,
        "tokens": trainer.state.global_step * spec.params.global_batch_size * workload.sequence_length,
        "versions": package_versions(),
    }


def _begin(speaker: Speaker | None, stage: Stage) -> None:
    if speaker is not None:
        speaker.stage(stage)


def _check_ranks(spec: TrialSpec) -> None:
    if spec.params.world_size != ranks.world_size():
        raise BadInput(
            f"world_size must be the number of processes, but got {spec.params.world_size} and {ranks.world_size()}."
        )


def _plan(
    spec: TrialSpec, workload: Workload, prepared: Prepared, folder: PreparedFolder, steps: int
) -> "EvaluationSchedule":
    from carbonopt.train.evaluation import evaluation_steps
    from carbonopt.train.loop import EvaluationSchedule

    batch_size = workload.eval_batch_size_per_gpu or prepared.eval_batch_size_per_gpu
    return EvaluationSchedule(
        total_steps=steps,
        evaluation_steps=tuple(evaluation_steps(steps, workload.evaluations)),
        eval_tokens=open_tokens(folder.evaluation),
        eval_batch_size=batch_size or max(spec.params.micro_batch_size_per_gpu, _SMALLEST_EVAL_BATCH),
        sequence_length=prepared.sequence_length,
        tokens_per_step=spec.params.global_batch_size * prepared.sequence_length,
    )


def _trainer(
    spec: TrialSpec, workload: Workload, folder: PreparedFolder, plan: "EvaluationSchedule", speaker: Speaker | None
) -> "TrialTrainer":
    from carbonopt.train.loop import Evaluations, TokenLoss, TrialTrainer

    params = spec.params
    _begin(speaker, Stage.MODEL)
    arguments, model, output_layer = _arguments_and_model(spec, workload, folder, plan.total_steps)
    _begin(speaker, Stage.ENGINE)
    loss = TokenLoss(plan.tokens_per_step, params.world_size, arguments.torch_compile, output_layer)
    evaluations = Evaluations(plan, loss, speaker)
    trainer = TrialTrainer(
        model=model,
        args=arguments,
        train_dataset=MicroBatches(
            open_tokens(folder.train), plan.sequence_length, params.global_batch_size, params.micro_batch_size_per_gpu,
            plan.total_steps, spec.seed, ranks.rank(), params.world_size,
        ),
        compute_loss_func=loss,
        callbacks=[evaluations],
        optimizer_cls_and_kwargs=_offloaded_optimizer(spec, workload, arguments),
    )  # fmt: skip
    evaluations.trainer = trainer
    return trainer


def _arguments_and_model(
    spec: TrialSpec, workload: Workload, folder: PreparedFolder, steps: int
) -> "tuple[TrainingArguments, Any, FusedOutputLayer | None]":
    """In the order that each kind of model needs (see `random_model` and `pretrained_model`)."""
    from transformers import AutoConfig, set_seed

    from carbonopt.train import prefetch as ahead
    from carbonopt.train.arguments import max_grad_norm, training_arguments
    from carbonopt.train.deepspeed_config import deepspeed_config
    from carbonopt.train.model import fuse_output_layer, pretrained_model, random_model, with_lora

    params = spec.params
    on_gpu = torch.cuda.is_available()
    settings = deepspeed_config(params, workload, on_gpu, max_grad_norm(workload))
    if ranks.rank() == 0:
        write_json(Path(spec.trial_dir) / "ds_config.json", settings)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The kernels stay as Hugging Face has them, deterministic or not: slower ones would change the energy that is
    # measured. On a CPU they are deterministic anyway; training_arguments.full_determinism asks for it on a GPU.
    set_seed(spec.seed)
    model = None
    if workload.model.from_config is not None and (model := ahead.taken(spec)) is None:
        config = AutoConfig.from_pretrained(folder.model_config)
        model = random_model(config, params.attention_implementation, workload.model.trust_remote_code)
    arguments = training_arguments(params, workload, steps, spec.seed, on_gpu, spec.trial_dir, settings)
    if model is None:
        model = pretrained_model(workload.model, params.attention_implementation)
    output_layer = None
    if params.has_fused_output_layer:
        compiled = on_gpu or arguments.torch_compile
        output_layer = fuse_output_layer(model, str(params.output_layer), compiled)
    if params.lora_rank:
        set_seed(spec.seed)
        model = with_lora(model, params.lora_rank, bool(arguments.gradient_checkpointing))
    return arguments, model, output_layer


def _offloaded_optimizer(
    spec: TrialSpec, workload: Workload, arguments: "TrainingArguments"
) -> tuple[type, dict[str, Any]] | None:
    """DeepSpeed's CPU AdamW where optimizer states leave a GPU, unless the study chose an optimizer: torch's steps
    several times slower there. Given to the Trainer, not to DeepSpeed, it gets the same parameter groups as torch's, so
    that offload changes no weight decay. On a host without GPU torch's AdamW needs no compiler."""
    if spec.params.offload == "none" or not torch.cuda.is_available() or "optim" in workload.training_arguments:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return DeepSpeedCPUAdam, {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}


def _save_model(trainer: "TrialTrainer", folder: PreparedFolder, target: Path) -> None:
    from transformers import AutoTokenizer

    trainer.save_model(str(target))  # on every rank: ZeRO-3 gathers
    if ranks.rank() == 0:
        (target / "training_args.bin").unlink()  # a pickle, which nobody should have to trust
        AutoTokenizer.from_pretrained(folder.tokenizer).save_pretrained(target)


def main(spec_json: str) -> int:
    speaker = Speaker.inherited() if CHANNEL_FD in os.environ else None
    with reported(speaker, ranks.peak_memory_gib) as outcome:
        spec = TrialSpec(**json.loads(spec_json))
        summary = run_trial(spec, speaker)
        if speaker is not None:
            speaker.finished(summary)
    if torch.distributed.is_initialized() and outcome.exit_code == 0:
        torch.distributed.destroy_process_group()
    return outcome.exit_code


if __name__ == "__main__":
    code = main(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is said and written; taking down the interpreter would cost the trial another second
