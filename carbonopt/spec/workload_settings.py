"""The part `workload` of a study file: model, tokenizer and data set.

Tasks derive their own settings from it (`carbonopt.train.tasks`).
"""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
)

from carbonopt.spec.base_settings import Name, PublicName, Settings


class Model(Settings):
    """A Hugging Face model: pretrained, or made from a configuration with random weights.

    A pretrained model is given by its hub name or by a local folder that has its weights.
    """

    name_or_path: PublicName | None = None
    """A hub name, or a local folder with the model's weights and, unless `workload.tokenizer` is
    given, its tokenizer."""

    from_config: dict[str, Any] | None = None
    """A model with random weights: `model_type` and the fields of its configuration class."""

    revision: str | None = None
    """The hub model's revision."""

    trust_remote_code: bool = False
    """Runs the code that comes with the model."""

    one_of = ("name_or_path", "from_config")

    def violations(self) -> dict[str, bool]:
        untyped = self.from_config is not None and "model_type" not in self.from_config
        return {"from_config needs model_type, such as gpt2 or llama": untyped}


class Tokenizer(Settings):
    """A tokenizer: pretrained, trained on the training text, or without any training.

    A pretrained one is given by its hub name or folder; `train_bpe` trains a byte-level BPE; `kind`
    makes one token of each character or byte.
    """

    name_or_path: PublicName | None = None
    """A tokenizer other than the model's own: hub name or folder."""

    # the least holds 256 bytes and the end of text
    train_bpe: Annotated[int, Field(ge=257, le=1_000_000)] | None = None
    """Trains a byte-level BPE with this many tokens (257 or more) on the training text. Refused
    with pretrained weights, which were trained on other tokens."""

    kind: Literal["char", "byte"] | None = None
    """`char` or `byte`: one token for each character or byte."""

    one_of = ("name_or_path", "train_bpe", "kind")


class Dataset(Settings, extra="allow"):
    """A data set: built in, from the hub, from a folder, or from files.

    Files can be text, jsonl, csv, tsv or parquet. Each task's own class names the columns and the
    built-in data sets.
    """

    builtin: Name | None = None
    """A data set that needs no download. `python-docs`: Python's language reference, which every
    Python carries. For `classification`, `digits`: scikit-learn's images."""

    name_or_path: PublicName | None = None
    """A hub data set, or a local folder of one. Splits are the folders directly below it (`train`,
    `validation`, `test`), or follow from the names of its files."""

    config: str | None = None
    """The hub data set's configuration."""

    train_split: str = "train"
    """The hub data set's split to train on."""

    eval_split: str = "validation"
    """The hub data set's split to evaluate on. If it equals `train_split`, the last `eval_fraction`
    is held out."""

    train_files: tuple[str, ...] | None = None
    """Files to train on: text, jsonl, csv, tsv or parquet; also compressed, as in
    `train.jsonl.gz`."""

    eval_files: tuple[str, ...] | None = None
    """Files to evaluate on, of the same kinds. Left out: the last `eval_fraction` of the training
    rows is held out."""

    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """The fraction to hold out for evaluation when there are no `eval_files`."""

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
    """The kind of training: `causal_lm` (a causal language model on text), `sft`, `reward`, `dpo`,
    `rlhf`, `classification`, `seq2seq` or `script`. [Kinds of training](tasks.md) has the keys of
    each."""

    quality: Name | None = None
    """Set by `target`; leave out."""

    model: Model | None = None  # None: the script has its own
    tokenizer: Tokenizer | None = None  # None: the model's own
    dataset: Dataset | None = None  # None: the script has its own
    sequence_length: SequenceLength | None = None
    """The length in tokens; required, except for images and scripts."""

    evaluations: int = Field(default=8, ge=1, le=1000)
    """Evaluations of each trial, evenly spaced; the last one is at its end. A repeat has that one
    alone, because it is never stopped for its quality."""

    eval_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """The batch of an evaluation. Left out: on GPUs what pays and fits, 2^15 tokens at most; for
    images, `rlhf` and on a CPU the micro batch, at least 8."""

    training_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `transformers.TrainingArguments`."""

    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Further keys of DeepSpeed's configuration."""

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
