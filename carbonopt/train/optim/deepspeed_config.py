"""The DeepSpeed configuration of one trial."""

from typing import Any

from carbonopt.core.dimensions import TrainingParams
from carbonopt.spec.model_memory import LIVE_PARAMETERS, REDUCE_BUCKET_ELEMENTS
from carbonopt.spec.trial_spec import ZeroLeaves
from carbonopt.spec.workload_settings import Workload
from carbonopt.train.optim.deepspeed_keys import check_deepspeed_keys

# Parameters that ZeRO 3 gathers ahead: DeepSpeed's default of stage3_prefetch_bucket_size.
_PREFETCHED_PARAMETERS = 50_000_000


def deepspeed_config(
    params: TrainingParams, workload: Workload, on_gpu: bool, leaves: ZeroLeaves | None = None
) -> dict[str, Any]:
    """Return DeepSpeed's settings for these parameters, merged with `workload.deepspeed`.

    All numbers in it are written out.

    Args:
        leaves: The model's leaf modules, for ZeRO 3. None: DeepSpeed prepares each submodule by
            itself.

    Raises:
        BadInput: A key can't be set (see `check_deepspeed_keys`).
    """
    check_deepspeed_keys(workload.deepspeed)
    config = {
        "train_batch_size": params.global_batch_size,
        "train_micro_batch_size_per_gpu": params.micro_batch_size_per_gpu,
        "gradient_accumulation_steps": params.gradient_accumulation_steps,
        # 1 is the Trainer's default
        "gradient_clipping": float(workload.training_arguments.get("max_grad_norm", 1.0)),
        "zero_optimization": _zero_optimization(params, workload, on_gpu, leaves),
        # The Trainer chooses the optimizer: torch's AdamW, or DeepSpeed's CPU AdamW if a GPU
        # offloads.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Looking for infinite gradients takes a thousand small kernels a step, for which the GPU
        # waits: 7 % of the energy of GPT-2 124M on an H200. bf16 has the range of float32, and a
        # loss that is not finite ends the trial.
        "bf16": {"enabled": params.precision == "bf16", "check_grad_overflow": False},
        "fp16": {"enabled": params.precision == "fp16"},
    }
    merged: dict[str, Any] = _merged(config, workload.deepspeed)
    return merged


def _zero_optimization(
    params: TrainingParams, workload: Workload, on_gpu: bool, leaves: ZeroLeaves | None
) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": params.zero_stage}
    if params.zero_stage > 0:
        zero |= {
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "allgather_bucket_size": REDUCE_BUCKET_ELEMENTS,
        }
    if params.zero_stage == 3:
        # otherwise a saved model would have no weights
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if leaves is not None:
            if leaves.classes:
                zero["leaf_module"] = {"classes": list(leaves.classes)}
            # A block that is larger than this would not be gathered before it is needed.
            zero["stage3_prefetch_bucket_size"] = max(
                _PREFETCHED_PARAMETERS, leaves.largest_parameters
            )
            # DeepSpeed's own linear layers hold no weights between forward and backward pass, which
            # saves nothing where these stay gathered anyway, and takes a fifth of T5-large's time.
            chosen = workload.deepspeed.get("zero_optimization", {})
            kept = chosen.get("stage3_max_live_parameters", LIVE_PARAMETERS)
            zero["memory_efficient_linear"] = leaves.model_parameters > kept
    for part in {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[
        params.offload
    ]:
        zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": on_gpu}
    return zero


def _merged(base: Any, more: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(more, dict)):
        return more
    return base | {key: _merged(base.get(key), value) for key, value in more.items()}
