"""Refuses settings in `workload.deepspeed` that DeepSpeed would ignore, or that carbonopt sets itself.

DeepSpeed refuses an unknown key in the blocks that it reads with pydantic, and ignores it everywhere else. Here its own
reader is given a dictionary that notes which keys were asked for; a key that nobody asked for is one that it doesn't
know. So the list of known keys is always that of the installed DeepSpeed.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.core.errors import BadInput, hint

_DATA_PARALLEL = "carbonopt trains data-parallel with ZeRO only"
_OWN_DATA = "carbonopt feeds the data itself"
_OWN_TRACKING = "use track in the study file"

# What carbonopt sets (say where instead), or what would have no effect or harm in a trial (say why).
OWNED = {
    **{key: f"use search.space.{name}" for name, dimension in DIMENSIONS.items() for key in dimension.deepspeed},
    "gradient_accumulation_steps": "it is derived from the batch sizes",
    "managed_gradient_accumulation": "it is derived from the batch sizes",
    "gradient_clipping": "use workload.training_arguments.max_grad_norm",
    "optimizer": "use search.space.learning_rate and workload.training_arguments.optim",
    "scheduler": "use search.space.lr_scheduler",
    "zero_allow_untested_optimizer": "the Trainer makes the optimizer",
    "zero_force_ds_cpu_optimizer": "the Trainer makes the optimizer",
    "bfloat16": "its name is bf16",
    "torch_autocast": "use search.space.precision",
    "tensor_parallel": _DATA_PARALLEL,
    "sequence_parallel_size": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "expert_parallel": _DATA_PARALLEL,
    "pipeline": _DATA_PARALLEL,
    "hybrid_engine": "carbonopt only trains",
    "autotuning": "the search is carbonopt's",
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "tensorboard": _OWN_TRACKING,
    "wandb": _OWN_TRACKING,
    "csv_monitor": _OWN_TRACKING,
    "comet": _OWN_TRACKING,
}


def check_deepspeed_keys(settings: dict[str, Any]) -> None:
    """Raises BadInput for a key, at any depth, that is unknown to DeepSpeed, has a wrong value, or is carbonopt's."""
    if not settings:
        return
    _refuse_owned(settings)
    watched = _Watched({**settings, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    _read(watched)
    _refuse_unasked(watched, "workload.deepspeed")


def _refuse_owned(settings: dict[str, Any]) -> None:
    for path, instead in OWNED.items():
        block: Any = settings
        for part in path.split("."):
            if not isinstance(block, dict) or part not in block:
                break
            block = block[part]
        else:
            raise BadInput(f"workload.deepspeed can't have {path}: carbonopt sets it; {instead}.")


def _read(watched: "_Watched") -> None:
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        DeepSpeedConfig(watched)
    except ValidationError as error:
        raise BadInput(_sentence(error, watched)) from error
    except (DeepSpeedConfigError, ValueError, TypeError, AssertionError, KeyError, AttributeError) as error:
        raise BadInput(f"workload.deepspeed is not what DeepSpeed takes: {' '.join(str(error).split())}") from error


def _sentence(error: ValidationError, watched: "_Watched") -> str:
    first = error.errors()[0]
    model = _model_named(error.title)
    block = next((f".{name}" for name, value in watched.handed_over() if _has_path(value, first["loc"])), "")
    where = f"workload.deepspeed{block}.{'.'.join(map(str, first['loc']))}"
    if first["type"] == "extra_forbidden" and model is not None:
        return f"unknown key {where}; {hint(str(first['loc'][-1]), sorted(_field_names(model, first['loc'][:-1])))}"
    return f"{where}: {first['msg']}, but got {first['input']!r:.80}."


def _has_path(value: Any, loc: tuple[int | str, ...]) -> bool:
    for part in loc:
        if not isinstance(value, dict) or not dict.__contains__(value, part):
            return False
        value = dict.__getitem__(value, part)
    return True


def _model_named(name: str) -> type[BaseModel] | None:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    return next((model for model in _subclasses(DeepSpeedConfigModel) if model.__name__ == name), None)


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)


def _field_names(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that the block at `loc` of `model` takes: its fields by the names that are written in a file."""
    for part in loc:
        field = next(
            field for name, field in model.model_fields.items() if part in (name, field.alias)
        )  # fmt: skip
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return [field.alias or name for name, field in model.model_fields.items()]


def _refuse_unasked(block: "_Watched", where: str) -> None:
    for key, value in dict.items(block):
        if not block.is_known(key):
            raise BadInput(f"unknown key {where}.{key}; {hint(str(key), sorted(block.asked))}")
        if isinstance(value, _Watched) and not block.whole:
            _refuse_unasked(value, f"{where}.{key}")


class _Watched(dict[str, Any]):
    """A dictionary that notes which keys its reader asked for. Read as a whole, it counts as checked by the reader."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__({key: _Watched(value) if isinstance(value, dict) else value for key, value in content.items()})
        self.asked: set[str] = set()
        self.whole = False

    def is_known(self, key: str) -> bool:
        return self.whole or key in self.asked

    def handed_over(self) -> list[tuple[str, "_Watched"]]:
        """The blocks that went to their reader as a whole."""
        return [(key, value) for key, value in dict.items(self) if isinstance(value, _Watched) and value.whole]

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:  # also what ** uses, once it is overridden
        self.whole = True
        return super().__iter__()

    def keys(self) -> Any:
        return _Keys(self)

    def items(self) -> Any:
        self.whole = True
        return super().items()

    def __copy__(self) -> "_Watched":
        return self


class _Keys:
    """The watched dictionary's keys(): asking whether a key is in it is asking the dictionary."""

    def __init__(self, owner: _Watched) -> None:
        self._owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)
