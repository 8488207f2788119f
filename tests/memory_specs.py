"""Questions for an estimate of memory, for tests."""

from typing import Any

from carbonopt.spec.model_memory import MemorySpec


def memory_spec(task: str, model: dict[str, Any], **space: Any) -> MemorySpec:
    """One rank in bf16, with this model from its configuration and these further dimensions."""
    columns = {"source_column": "a", "target_column": "b", "train_files": ["rows.jsonl"]}
    return MemorySpec(
        workload={
            "task": task,
            "model": {"from_config": model},
            "tokenizer": {"kind": "byte"},
            "dataset": columns if task == "seq2seq" else {"builtin": "python-docs"},
            "sequence_length": 64,
        },
        space={
            "global_batch_size": {"choices": [4, 8]},
            "learning_rate": 1e-3,
            "epochs": 1,
            "precision": "bf16",
            **space,
        },
        world_size=1,
    )
