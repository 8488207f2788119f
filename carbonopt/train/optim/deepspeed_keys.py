"""Refuse settings in `workload.deepspeed` that DeepSpeed would ignore or that carbonopt sets.

DeepSpeed refuses unknown keys in the blocks that it reads with pydantic, and ignores them
everywhere else. Here its own reader gets a dictionary that notes which keys it asks for: it knows
no others, whichever version is installed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.core.errors import BadInput
from carbonopt.core.refusals import hint
from carbonopt.train.failures import refused

# Keys that a study may not set, by the reason: carbonopt sets them (the text says where instead),
# or they would have no effect or do harm in a trial.
_WHY_OWNED = {
    "it is derived from the batch sizes": (
        "gradient_accumulation_steps managed_gradient_accumulation"
    ),
    "use workload.training_arguments.max_grad_norm": "gradient_clipping",
    "use search.space.learning_rate and workload.training_arguments.optim": "optimizer",
    "use search.space.lr_scheduler": "scheduler",
    "the Trainer makes the optimizer": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "its name is bf16": "bfloat16",
    "use search.space.precision": "torch_autocast",
    "carbonopt trains data-parallel with ZeRO only": (
        "tensor_parallel sequence_parallel_size data_parallel_size expert_parallel pipeline"
    ),
    "carbonopt only trains": "hybrid_engine weight_quantization",
    "without it ZeRO 3 saves a model that has no weights": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        " zero_optimization.stage3_gather_fp16_weights_on_model_save"
    ),
    "the search is carbonopt's": "autotuning",
    "carbonopt feeds the data itself": "data_efficiency dataloader_drop_last",
    "use track in the study file": "tensorboard wandb csv_monitor comet",
}
OWNED = {
    **{
        key: f"use search.space.{name}"
        for name, dimension in DIMENSIONS.items()
        for key in dimension.deepspeed
    },
    **{key: why for why, keys in _WHY_OWNED.items() for key in keys.split()},
}


def check_deepspeed_keys(settings: dict[str, Any]) -> None:
    """Raise BadInput for a key, at any depth, that can't be set.

    It is unknown to DeepSpeed, has a wrong value, or is carbonopt's to set.
    """
    if not settings:
        return
    for path, instead in OWNED.items():
        if _has_path(settings, path.split(".")):
            raise BadInput(f"workload.deepspeed can't have {path}: carbonopt sets it; {instead}.")
    if not isinstance(zero := settings.get("zero_optimization", {}), dict):
        raise BadInput(
            "workload.deepspeed.zero_optimization must hold keys and their values, but got"
            f" {zero!r:.80}."
        )
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for name, field in DeepSpeedZeroConfig.model_fields.items():
        # DeepSpeed takes its own name for it, too, which would be read nowhere else.
        if field.alias not in (None, name) and name in zero:
            raise BadInput(
                f"unknown key workload.deepspeed.zero_optimization.{name}; its name is"
                f" {field.alias}."
            )
    own_errors = (
        DeepSpeedConfigError,
        ValueError,
        TypeError,
        AssertionError,
        KeyError,
        AttributeError,
    )
    watched = _Watched(
        {**settings, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    )
    with refused("workload.deepspeed is not what DeepSpeed takes: {}.", *own_errors):
        try:
            DeepSpeedConfig(watched)
        except ValidationError as error:
            raise BadInput(_sentence(error, watched)) from error
    watched.refuse_unasked("workload.deepspeed")


def _sentence(error: ValidationError, watched: "_Watched") -> str:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    first = error.errors()[0]
    place = first["loc"]
    within = next(
        (f".{name}" for name, block in watched.blocks() if block.whole and _has_path(block, place)),
        "",
    )
    where = f"workload.deepspeed{within}.{'.'.join(map(str, place))}"
    model = next(
        (model for model in DeepSpeedConfigModel.__subclasses__() if model.__name__ == error.title),
        None,
    )
    if first["type"] == "extra_forbidden" and model is not None:
        for part in place[:-1]:  # go to the block that has the key
            field = next(
                field for name, field in model.model_fields.items() if part in (name, field.alias)
            )
            kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
            model = next(
                kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)
            )
        # as they are written in a file
        names = [field.alias or name for name, field in model.model_fields.items()]
        return f"unknown key {where}; {hint(str(place[-1]), sorted(names))}"
    return f"{where}: {first['msg']}, but got {first['input']!r:.80}."


def _has_path(value: Any, path: Sequence[int | str]) -> bool:
    if not path:
        return True
    return (
        isinstance(value, dict)
        and path[0] in dict.keys(value)
        and _has_path(dict.get(value, path[0]), path[1:])
    )


class _Watched(dict[str, Any]):
    """A dictionary that notes which keys its reader asked for.

    If it is read as a whole, the reader has checked it.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(
            {
                key: _Watched(value) if isinstance(value, dict) else value
                for key, value in content.items()
            }
        )
        self.asked: set[str] = set()
        self.whole = False

    def blocks(self) -> list[tuple[str, "_Watched"]]:
        return [(key, value) for key, value in dict.items(self) if isinstance(value, _Watched)]

    def refuse_unasked(self, where: str) -> None:
        if self.whole:
            return
        for key in dict.keys(self):
            if key not in self.asked:
                raise BadInput(f"unknown key {where}.{key}; {hint(str(key), sorted(self.asked))}")
        for key, block in self.blocks():
            block.refuse_unasked(f"{where}.{key}")

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:  # ** uses it too, once it is overridden
        self.whole = True
        return super().__iter__()

    def keys(self) -> Any:
        return self  # asking whether a key is among the keys asks the dictionary

    def items(self) -> Any:
        self.whole = True
        return super().items()

    def __copy__(self) -> "_Watched":
        return self
