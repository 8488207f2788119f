"""The part `workload` of a study file: model, tokenizer and data set.

Tasks derive their own settings from it (`carbonopt.train.tasks`).
"""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
)

from carbonopt.spec.base_settings import Name, Settings


class Model(Settings):
    """A Hugging Face model: pretrained, or made from a configuration with random weights.

    A pretrained model is given by its hub name or by a local folder that has its weights.
    """

    name_or_path: Name | None = None
    # model_type, and fields of that type's configuration class
    from_config: dict[str, Any] | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    one_of = ("name_or_path", "from_config")

    def violations(self) -> dict[str, bool]:
        untyped = self.from_config is not None and "model_type" not in self.from_config
        return {"from_config needs model_type, such as gpt2 or llama": untyped}


class Tokenizer(Settings):
    """A tokenizer: pretrained, trained on the training text, or without any training.

    A pretrained one is given by its hub name or folder; `train_bpe` trains a byte-level BPE; `kind`
    makes one token of each character or byte.
    """

    name_or_path: Name | None = None
    # vocabulary size; the least holds 256 bytes and the end of text
    train_bpe: Annotated[int, Field(ge=257, le=1_000_000)] | None = None
    kind: Literal["char", "byte"] | None = None

    one_of = ("name_or_path", "train_bpe", "kind")


class Dataset(Settings, extra="allow"):
    """A data set: built in, from the hub, from a folder, or from files.

    Files can be text, jsonl, csv, tsv or parquet. Each task's own class names the columns and the
    built-in data sets.
    """

    builtin: Name | None = None  # each task's own class says which names there are
    name_or_path: Name | None = None
    config: str | None = None  # the hub data set's configuration
    train_split: str = "train"
    eval_split: str = "validation"  # if it is the training split: the last eval_fraction of that
    train_files: tuple[str, ...] | None = None
    eval_files: tuple[str, ...] | None = None  # None: the last eval_fraction of the training rows
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)

    one_of = ("builtin", "name_or_path", "train_files")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the task reads; each task's own class names them."""
        return ()

    def violations(self) -> dict[str, bool]:
        return {
            "train_files must name at least one file": self.train_files == (),
            "eval_files must name at least one file; leave it out to hold back eval_fraction": (
                self.eval_files == ()
            ),
            "eval_files needs train_files beside it": (
                self.eval_files is not None and self.train_files is None
            ),
        }


# Keys of the task rlhf that say where a reward comes from, a model or a function.
REWARDS = (
    "reward",
    "gold_reward",
)
SequenceLength = Annotated[int, Field(ge=2, le=1_048_576)]  # tokens


class Workload(Settings, extra="allow"):
    """The training that every trial does and its evaluation: the keys that all tasks share.

    Each task's file derives a class from this one with its other keys. This class keeps those keys
    unchecked, so that storage, records and reports need no task.
    """

    task: str = "causal_lm"
    quality: Name | None = None  # the target's quality, where it is not the task's first
    model: Model | None = None  # None: the script has its own
    tokenizer: Tokenizer | None = None  # None: the model's own
    dataset: Dataset | None = None  # None: the script has its own
    sequence_length: SequenceLength | None = None  # None: images, or the script has its own
    # evaluations of a trial, evenly spaced; the last one is at its end
    evaluations: int = Field(default=8, ge=1, le=1000)
    # None: the micro batch, at least 8
    eval_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    # further arguments for transformers.TrainingArguments
    training_arguments: dict[str, Any] = Field(default_factory=dict)
    # further keys of DeepSpeed's configuration
    deepspeed: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_script(self) -> bool:
        """True if the workload is a user's own script, which alone knows its model."""
        return self.model is None

    @property
    def data_files(self) -> tuple[str, ...]:
        """All files that the data set names."""
        if (dataset := self.dataset) is None:
            return ()
        database = getattr(dataset, "database", None)  # only some tasks have one
        return (
            *(dataset.train_files or ()),
            *(dataset.eval_files or ()),
            *([database] if database else []),
        )

    @property
    def names_or_paths(self) -> dict[str, str]:
        """Hub names and folders, by the key that has them."""
        parts = {"model": self.model, "tokenizer": self.tokenizer, "dataset": self.dataset}
        names = {
            key: part.name_or_path
            for key, part in parts.items()
            if part and part.name_or_path is not None
        }
        return names | {
            key: model
            for key in REWARDS
            if (model := dict(getattr(self, key, None) or {}).get("model"))
        }


class ModelWorkload(Workload):
    """The workload of a task that trains one of Hugging Face's models."""

    model: Model
    dataset: Dataset
