"""Results of operations without numbers, made from those of earlier ones."""

from typing import Any

import pytest
import torch
from memory_specs import memory_spec
from torch import Tensor

from carbonopt.spec.model_memory import ModelMemory
from carbonopt.train.models import memory_probe
from carbonopt.train.models.memory_probe import expected_memory
from carbonopt.train.models.meta_results import MetaResults

ATEN = torch.ops.aten
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operation that counts how often it has run."""

    def __init__(self, operation: Any) -> None:
        self.operation, self._schema, self.count = operation, operation._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.operation(*args, **kwargs)


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        (ATEN.mul.Tensor, (meta(4, 1, 3).transpose(0, 2), meta(2, 1))),
        (ATEN.mul.Tensor, (meta(2, 3), 2)),
        (ATEN.mul.Tensor, (meta(2, 3, dtype=torch.int64), 2.0)),
        (ATEN.mul.Tensor, (meta(2, 3, dtype=torch.int64), 2)),
        (ATEN.native_layer_norm.default, (meta(2, 5, 3), [3], meta(3), meta(3), 1e-5)),
        (ATEN.cat.default, ([meta(2, 3), meta(4, 3)], 0)),
    ],
)
def test_an_equal_operation_runs_once_and_gives_the_same_again(
    operation: Any, args: tuple[Any, ...]
) -> None:
    results, counted = MetaResults(), Counted(operation)
    expected = operation(*args)
    for _ in range(3):
        made = results.run(counted, args, {})
        assert type(made) is type(expected)
        for ours, own in zip(
            made if isinstance(made, tuple) else (made,),
            expected if isinstance(expected, tuple) else (expected,),
            strict=True,
        ):
            assert (ours.shape, ours.stride(), ours.dtype) == (own.shape, own.stride(), own.dtype)
            assert ours.is_meta
            assert ours.untyped_storage().nbytes() == own.untyped_storage().nbytes()
    assert counted.count == 1


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        (ATEN.view.default, (meta(2, 3), [6])),  # shares its argument's storage
        (ATEN.mul_.Tensor, (meta(2, 3), 2)),  # changes its argument
        (ATEN.mul.Tensor, (torch.ones(2, 3), 2)),  # has numbers
    ],
)
def test_what_shares_or_changes_storages_or_has_numbers_runs_each_time(
    operation: Any, args: tuple[Any, ...]
) -> None:
    results, counted = MetaResults(), Counted(operation)
    for times in (1, 2):
        made = results.run(counted, args, {})
        assert counted.count == times
        assert torch.equal(made, operation(*args)) if not made.is_meta else made.is_meta


def test_arguments_that_are_equal_but_of_other_types_are_others() -> None:
    results, whole = MetaResults(), meta(2, dtype=torch.int64)
    dtypes = [results.run(ATEN.mul.Tensor, (whole, by), {}).dtype for by in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def run_each(self: MetaResults, operation: Any, args: Any, kwargs: Any) -> Any:
    return operation(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task", "batches"),
    [
        (LLAMA, "causal_lm", {"global_batch_size": {"choices": [4, 8]}}),
        (T5, "seq2seq", {"global_batch_size": 4, "micro_batch_size_per_gpu": 4}),
    ],
    ids=("llama", "t5"),
)
def test_estimates_are_those_of_operations_that_each_run(
    model: dict, task: str, batches: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_probe, "MOST_CPU_S", 600.0)
    spec = memory_spec(
        task,
        model,
        **batches,
        gradient_checkpointing={"choices": [False, True]},
        lora_rank=4,
        torch_compile={"choices": [False, True]},
    )

    def estimated() -> ModelMemory:
        return expected_memory(spec)

    remembered = estimated()
    monkeypatch.setattr(MetaResults, "run", run_each)
    assert len(remembered.profiles) == 3
    assert remembered == estimated()
