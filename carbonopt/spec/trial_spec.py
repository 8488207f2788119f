"""The values that a study sends to a trial's processes: the prepared data and the trial itself."""

from typing import Any

from pydantic import Field

from carbonopt.core.dimensions import TrainingParams, TrialParams
from carbonopt.core.values import Frozen
from carbonopt.spec.auto_facts import AutoSpace
from carbonopt.spec.model_memory import ModelMemory
from carbonopt.spec.quality_source import QualitySource


class ZeroLeaves(Frozen):
    """The blocks of a model that ZeRO-3 gathers and reduces as one (`train.models.zero_leaves`)."""

    classes: tuple[str, ...]  # with their modules' names; empty: `workload.deepspeed` chooses them
    largest_parameters: int  # parameters of the largest block
    model_parameters: int  # parameters of the whole model


class Prepared(Frozen):
    """The findings of reading the data set once, before the first trial (`prepared.json`)."""

    fingerprint: str  # identifies the workload; a folder prepared for another one is made again
    # examples of an epoch, which a global batch counts: sequences, images, pairs, …
    train_examples: int
    eval_examples: int
    train_tokens: int | None = None  # None: the examples have no tokens
    # tokens that one evaluation predicts, each counted once; None: it predicts no tokens
    eval_tokens: int | None = None
    # tokens of each example; None: they differ, or the examples have no tokens
    sequence_length: int | None = None
    vocab_size: int | None = None
    model_parameters: int | None = None  # None: a script's model is not known
    # whether the model has experts, of which a token meets only some; None: not known
    has_experts: bool | None = None
    notes: tuple[str, ...] = ()  # sentences on the data: what was left out or cut
    versions: dict[str, str]  # versions of the packages that trials run on
    # batch size of evaluations, chosen to fit the GPU's memory; None: the study file or the micro
    # batch decides
    eval_batch_size_per_gpu: int | None = None
    # memory of the model on a GPU; None: it is on a CPU, or could not be found out
    memory: ModelMemory | None = None
    # None: no trial uses ZeRO 3, or the model has no such blocks
    zero_leaves: ZeroLeaves | None = None
    auto: AutoSpace | None = None  # the chosen space, where the study file has `space: auto`
    # bytes of each file, by its name in the folder, to detect damage
    files: dict[str, int] = Field(default_factory=dict)


class Program(Frozen):
    """A user's script, which each rank runs instead of carbonopt's own training."""

    argv: tuple[str, ...]
    folder: str  # the folder in which it runs; absolute
    environment: dict[str, str]  # variables beside those of the launch
    starts_ranks: bool = False  # it starts ranks itself, as torchrun does, and is started once
    # it is started on each of several machines, not on the first alone
    on_each_machine: bool = True
    # texts of files, by path, that are written before it starts
    files: dict[str, str] = Field(default_factory=dict)
    # where its quality is read; None: the script reports or prints it
    quality_from: QualitySource | None = None
    # its code uses DeepSpeed: even a single rank gets the variables of a rank, which DeepSpeed
    # needs; on a CPU accelerate is not told so, because that would switch DeepSpeed off
    uses_deepspeed: bool = False
    # it surely reports its steps: what it does before its first report is no training
    has_lines: bool = False
    # it is a Python script whose trials can be forked from a process that has imported its imports
    warm: bool = False
    # it saves itself into the trial's `checkpoint_dir`, and goes on from there
    keeps_checkpoints: bool = False


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder, in the folder of the trial's checkpoints."""
    return f"step-{step}"


class TrialCheckpoints(Frozen):
    """Where and how often a trial's training is saved, and where this attempt goes on."""

    folder: str  # absolute
    every_s: float
    # the step after which the attempt goes on, from that step's checkpoint; None: it begins anew
    continue_from: int | None = None


class TrialSpec(Frozen):
    """Everything that a trial's process needs to know, sent to it as JSON.

    Paths are absolute.
    """

    number: int
    attempt: int
    seed: int
    params: TrialParams
    repeat_of: int | None = None  # the trial whose configuration it repeats with another seed
    replaces_repeat: bool = False  # whether the confirmation tries it in place of a repeat
    workload: dict[str, Any]  # `Workload`, dumped
    prepared_dir: str  # the tokenized, memory-mapped data set and its tokenizer
    trial_dir: str  # for what the trial writes: log, DeepSpeed configuration, optionally its model
    saves_model: bool = False  # True if it saves its model, into `model`
    # a probe ends after so many seconds of steps beside the first; None: this is a trial
    probe_s: float | None = None
    program: Program | None = None  # None: carbonopt trains
    checkpoints: TrialCheckpoints | None = None  # None: the training is not saved

    @property
    def checkpoint_dir(self) -> str:
        """The folder of checkpoints, which all attempts share."""
        return f"{self.trial_dir}/checkpoints"

    @property
    def output_dir(self) -> str:
        """The folder that a script writes into.

        Each attempt has its own, so that none goes on from another's checkpoints.
        """
        return f"{self.trial_dir}/output" + (f"-{self.attempt}" if self.attempt > 1 else "")


class TrainingSpec(TrialSpec):
    """The spec of a trial that carbonopt itself trains, as its ranks read it."""

    params: TrainingParams
