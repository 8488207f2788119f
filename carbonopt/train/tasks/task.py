"""The interface between a training task and the rest of carbonopt, and the table of all tasks.

The settings and texts of a task are read before anything is started, so modules of tasks import
torch, transformers and the like only inside methods.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import QUALITIES, Quality
from carbonopt.core.refusals import hint
from carbonopt.core.trial import Prediction
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import Prepared, Program, TrainingSpec, TrialSpec
from carbonopt.spec.workload_settings import Workload
from carbonopt.train.client import Speaker

if TYPE_CHECKING:
    from carbonopt.train.data.packing import Division

# Classes by the name that `workload.task` has in a study file. They are given as text, so that
# importing one task loads no other, and the winner's folder has a copy of that one alone.
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

# Examples in a forward pass. Evaluation keeps no gradients, so this many always fit beside the
# micro batch that training uses.
SMALLEST_EVAL_BATCH = 8


@dataclass(frozen=True)
class Card:
    """The terms of the Hugging Face hub that a model card uses for a task."""

    pipeline_tag: str  # https://huggingface.co/docs/hub/models-tasks
    pipeline_name: str
    trains: str  # in a sentence, such as "a causal language model"


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    `sum` and `count` are the quality's, over all evaluation data and all ranks; carbonopt divides
    them once. `others` has values of further qualities by name, `predictions` what the model
    generated for some examples.
    """

    sum: float
    count: int
    others: dict[str, float] = field(default_factory=dict)
    predictions: tuple[Prediction, ...] = ()  # for some examples, at a trial's end


@dataclass(frozen=True)
class TrialRun:
    spec: TrainingSpec
    workload: Workload
    folder: PreparedFolder
    prepared: Prepared
    total_steps: int

    @property
    def sequence_length(self) -> int:
        """The number of tokens in each example, for tasks whose examples all have the same."""
        assert self.prepared.sequence_length is not None
        return self.prepared.sequence_length

    @property
    def tokens_per_step(self) -> int | None:
        """The tokens of one step over all ranks; None if examples differ in length or have none."""
        length = self.prepared.sequence_length
        return None if length is None else self.spec.params.global_batch_size * length

    @property
    def division(self) -> "Division":
        """The division of the training examples into micro batches, for this rank."""
        from carbonopt.train import ranks
        from carbonopt.train.data.packing import Division

        params = self.spec.params
        sizes = (params.global_batch_size, params.micro_batch_size_per_gpu, self.total_steps)
        return Division(*sizes, self.spec.seed, ranks.rank(), params.world_size)

    @property
    def eval_batch_size_per_gpu(self) -> int:
        """The number of examples in a forward pass of an evaluation."""
        chosen = self.workload.eval_batch_size_per_gpu or self.prepared.eval_batch_size_per_gpu
        return chosen or max(self.spec.params.micro_batch_size_per_gpu, SMALLEST_EVAL_BATCH)


@dataclass(frozen=True)
class Trained:
    last: EvalPoint | None  # the evaluation at the trial's end; None: the trial was a probe
    # Writes model and tokenizer into a folder; it has to be called on every rank.
    save_model: Callable[[Path], None]


class Task(ABC):
    """One kind of training, with one study's settings.

    A task that trains with Hugging Face's Trainer derives from `trainer_task.TrainerTask`.
    """

    settings: ClassVar[type[Workload]]  # the task's part of the study file, under `workload`
    # Qualities that can judge the task, the usual one first. If empty, any quality can.
    qualities: ClassVar[tuple[Quality, ...]]
    # Modules that the task's trials need beside those that all trials need.
    imported_ahead: ClassVar[tuple[str, ...]] = ()
    # True: the user names the dimensions of the search space, and none of them is required.
    own_dimensions: ClassVar[bool] = False

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @property
    def takes_seed(self) -> bool:
        """True if trials of one configuration differ by their seeds."""
        return True

    @property
    @abstractmethod
    def card(self) -> Card:
        """The terms of the model card, a class attribute unless they depend on the workload."""

    def check(self, space: Space, launch: Launch) -> None:  # noqa: B027 – a task may have no checks
        """Check everything that can be checked before anything is started.

        Raises:
            BadInput: if a setting is wrong.
        """

    @property
    def tells_steps(self) -> bool:
        """True if a running trial reports its steps and evaluations, so that it can be stopped."""
        return True

    def notes(self, space: Space, quality: Quality) -> tuple[str, ...]:
        """Return remarks on the workload that `check` does not refuse.

        They are sentences without a full stop.
        """
        return ()

    def input_files(self) -> tuple[str, ...]:
        """Return the absolute paths of files and folders that trials read.

        Models and tokenizers are not among them.
        """
        return self.workload.data_files

    def program_files(self) -> tuple[str, ...]:
        """Return those of `input_files` that are code, which is the same in all trials."""
        return ()

    def program(self, spec: TrialSpec, quality: Quality) -> Program | None:
        """Return the program that the ranks of a trial run; None if carbonopt itself trains."""
        return None


class TrainingTask(Task):
    """A task whose data carbonopt prepares and whose model it trains.

    Dimensions are not defined here: a trial's parameters are one record, whatever the task.
    """

    @property
    def quality(self) -> Quality:
        """The quality by which this study judges the task."""
        return (
            self.qualities[0] if self.workload.quality is None else QUALITIES[self.workload.quality]
        )

    @abstractmethod
    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        """Write what all trials read into `folder`.

        Returns:
            A summary of what was written, with the given fingerprint.

        Raises:
            BadInput: if the workload or the space has a fault that would make every trial fail.
        """

    @abstractmethod
    def train(self, run: TrialRun, speaker: Speaker | None) -> Trained:
        """Train and evaluate one trial on this rank.

        Args:
            speaker: given on rank 0 of a study's trial; it reports the stages, the phases and each
                evaluation, as a sum and a count over all ranks.

        Raises:
            BadInput: if the parameters don't go with each other or with the data.
            Diverged: if a loss is not finite.
        """


def task_class(name: str) -> type[Task]:
    """Return the class of a task.

    Raises:
        BadInput: if there is no task of that name.
    """
    if name not in TASKS:
        raise BadInput(
            f"workload.task must be a task, but got {name!r}; {hint(name, sorted(TASKS))}"
        )
    task: type[Task] = pkgutil.resolve_name(TASKS[name])
    return task


def task_module(name: str) -> str:
    """Return the name of the module that defines a task."""
    return TASKS[name].partition(":")[0]


def task_for(workload: dict[str, Any]) -> Task:
    """Return the task that trains a workload, which is given as plain data.

    Raises:
        BadInput: if there is no such task.
        ValidationError: (pydantic's) if the settings aren't that task's.
    """
    kind = task_class(workload.get("task", Workload.model_fields["task"].default))
    return kind(kind.settings(**workload))


def training_task(workload: dict[str, Any]) -> TrainingTask:
    """Return the task of a workload that carbonopt trains itself; raises as `task_for` does."""
    task = task_for(workload)
    assert isinstance(task, TrainingTask)
    return task
