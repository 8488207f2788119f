"""What a task is to the rest of carbonopt, and which tasks there are. Their settings and words are read before anything
is started: torch, transformers and the like are imported inside methods."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from carbonopt.core.config import Space, Workload
from carbonopt.core.dimensions import TrainingParams
from carbonopt.core.errors import BadInput, hint
from carbonopt.core.files import PreparedFolder
from carbonopt.core.quality import QUALITIES, Quality
from carbonopt.core.trial import EvalPoint, Prediction, Prepared, Program, TrialSpec
from carbonopt.train.client import Speaker

if TYPE_CHECKING:
    from carbonopt.train.data.packing import Division

# By the name that `workload.task` has in a study file. As text: whoever needs one task imports that one alone, and the
# winner's folder has a copy of no other.
TASKS = {
    "causal_lm": "carbonopt.train.tasks.causal_lm:CausalLM",
    "script": "carbonopt.train.tasks.script:Script",
    "reward": "carbonopt.train.tasks.reward:Reward",
    "dpo": "carbonopt.train.tasks.dpo:DPO",
    "rlhf": "carbonopt.train.tasks.rlhf:RLHF",
    "sft": "carbonopt.train.tasks.sft:SFT",
    "classification": "carbonopt.train.tasks.classification:Classification",
    "seq2seq": "carbonopt.train.tasks.seq2seq:Seq2Seq",
}

SMALLEST_EVAL_BATCH = 8  # examples; no gradients are kept, so more than the micro batch always fits


@dataclass(frozen=True)
class Card:
    """What a model card calls the task, in the words of the Hugging Face hub."""

    pipeline_tag: str  # https://huggingface.co/docs/hub/models-tasks
    pipeline_name: str
    trains: str  # "a causal language model"


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: the quality's sum and count over all evaluation data and all ranks, which carbonopt
    divides once, values of other qualities, by name, and what the model made of some examples."""

    sum: float
    count: int
    others: dict[str, float] = field(default_factory=dict)
    predictions: tuple[Prediction, ...] = ()  # some, at a trial's end


@dataclass(frozen=True)
class TrialRun:
    spec: TrialSpec
    workload: Workload
    folder: PreparedFolder
    prepared: Prepared
    total_steps: int

    @cached_property
    def params(self) -> TrainingParams:
        return TrainingParams.of(self.spec.params)

    @property
    def sequence_length(self) -> int:
        """Of tasks whose examples have one."""
        assert self.prepared.sequence_length is not None
        return self.prepared.sequence_length

    @property
    def tokens_per_step(self) -> int | None:
        """Over all ranks; None: examples differ in length, or are no tokens."""
        length = self.prepared.sequence_length
        return None if length is None else self.params.global_batch_size * length

    @property
    def division(self) -> "Division":
        """Of the training examples, for this rank."""
        from carbonopt.train import ranks
        from carbonopt.train.data.packing import Division

        params = self.params
        sizes = (params.global_batch_size, params.micro_batch_size_per_gpu, self.total_steps)
        return Division(*sizes, self.spec.seed, ranks.rank(), params.world_size)

    @property
    def eval_batch_size_per_gpu(self) -> int:
        """Examples in a forward pass of an evaluation."""
        chosen = self.workload.eval_batch_size_per_gpu or self.prepared.eval_batch_size_per_gpu
        return chosen or max(self.params.micro_batch_size_per_gpu, SMALLEST_EVAL_BATCH)


@dataclass(frozen=True)
class Trained:
    last: EvalPoint | None  # the evaluation at its end; None: it was a probe
    save_model: Callable[[Path], None]  # writes model and tokenizer into a folder; to be called on every rank


class Task(ABC):
    """One kind of training, for one study's settings. A task that trains with a Trainer derives from
    `trainer_task.TrainerTask`."""

    settings: ClassVar[type[Workload]]  # its part of the study file, under `workload`
    qualities: ClassVar[tuple[Quality, ...]]  # by one of which it is judged, usually the first; none listed: by any
    imported_ahead: ClassVar[tuple[str, ...]] = ()  # modules that its trials need beside what all need
    own_dimensions: ClassVar[bool] = False  # the search space is the user's: any names, none of them required

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @property
    def takes_seed(self) -> bool:
        """Whether trials of one configuration differ by their seeds."""
        return True

    @property
    @abstractmethod
    def card(self) -> Card:
        """What a task has as a class attribute, unless it depends on the workload."""

    def check(self, space: Space) -> None:  # noqa: B027
        """Raises BadInput for what can be known to be wrong before anything is started."""

    def input_files(self) -> tuple[str, ...]:
        """Files and folders that its trials read, beside models and tokenizers; absolute."""
        return self.workload.data_files

    def program(self, spec: TrialSpec, quality: Quality) -> Program | None:
        """What the ranks of a trial run; None: carbonopt trains."""
        return None


class TrainingTask(Task):
    """One that carbonopt prepares and trains. Dimensions are not here: a trial's parameters are one record, whatever
    the task."""

    @property
    def quality(self) -> Quality:
        """By which this study judges it."""
        return self.qualities[0] if self.workload.quality is None else QUALITIES[self.workload.quality]

    @abstractmethod
    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        """Writes what all trials read into `folder`, and returns its summary, with that fingerprint. Raises BadInput
        for whatever in the workload or the space would make every trial fail."""

    @abstractmethod
    def train(self, run: TrialRun, speaker: Speaker | None) -> Trained:
        """Trains and evaluates one trial on this rank. `speaker`, on rank 0 of a study's trial, is told the stages, the
        phases and each evaluation, as a sum and a count over all ranks. Raises BadInput if the parameters don't go with
        each other or with the data, Diverged when a loss is not finite."""


def task_class(name: str) -> type[Task]:
    """Raises BadInput if there is no task of that name."""
    if name not in TASKS:
        raise BadInput(f"workload.task must be a task, but got {name!r}; {hint(name, sorted(TASKS))}")
    task: type[Task] = pkgutil.resolve_name(TASKS[name])
    return task


def task_module(name: str) -> str:
    """The module that has the task of that name."""
    return TASKS[name].partition(":")[0]


def task_for(workload: dict[str, Any]) -> Task:
    """The task that trains a workload, which is given as plain data. Raises BadInput if there is no such task,
    pydantic's ValidationError if the settings aren't that task's."""
    kind = task_class(workload.get("task", Workload.model_fields["task"].default))
    return kind(kind.settings(**workload))


def training_task(workload: dict[str, Any]) -> TrainingTask:
    """Of a workload that carbonopt trains; raises as `task_for`."""
    task = task_for(workload)
    assert isinstance(task, TrainingTask)
    return task
