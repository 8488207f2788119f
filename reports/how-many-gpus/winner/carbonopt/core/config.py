"""What a study file holds, as frozen models. What a model can check by itself, it refuses."""

import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    create_model,
    model_validator,
)

from carbonopt.core import values
from carbonopt.core.dimensions import DIMENSIONS, SEARCHED, ToldAffects, TrialParams
from carbonopt.core.errors import shortened
from carbonopt.core.hostfile import MOST_HOSTS, Host
from carbonopt.core.quality import QUALITIES, Quality, quality_of
from carbonopt.core.quality import Target as QualityTarget
from carbonopt.core.values import Given, Scalar


def _one_line(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f-\x9f]", text):
        raise ValueError(f"must hold no line break and no other control character, but got {text!r}")
    return text


Name = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True), AfterValidator(_one_line)]


def _name_of_a_report(text: str) -> str:
    if not text.isidentifier() or text in ("count", "step"):
        must = "must be a word of letters, digits and _, and neither count nor step, which reports have beside it"
        raise ValueError(f"{must}, but got {text!r}")
    return text


def _not_dots_only(text: str) -> str:
    if not text.strip("."):
        raise ValueError(f"must not be of dots only, because a folder is called by it, but got {text!r}; give a word")
    return text


def _three_letters(text: str) -> str:
    if not re.fullmatch("[A-Z]{3}", text):
        raise ValueError(f"must be three capital letters, such as USA, but got {text!r}")
    return text


class Frozen(values.Frozen, allow_inf_nan=False):
    """What a user gives; its numbers are finite."""

    one_of: ClassVar[tuple[str, ...]] = ()  # of these fields exactly one is given

    def faults(self) -> dict[str, bool]:
        """What can't be, in words, and whether it is so."""
        return {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in self.one_of if getattr(self, name) is not None]
        if self.one_of and len(given) != 1:
            names = " and ".join(given) or "none of them"
            raise ValueError(f"must have exactly one of {', '.join(self.one_of)}, but has {names}")
        if fault := next((text for text, is_so in self.faults().items() if is_so), None):
            raise ValueError(fault)
        return self


# ---------------------------------------------------------------------------------------------------------- workload


class Model(Frozen):
    """A Hugging Face model: by hub name or local folder with its weights, or from a configuration with random ones."""

    name_or_path: Name | None = None
    from_config: dict[str, Any] | None = None  # model_type and the fields of that type's configuration class
    revision: str | None = None
    trust_remote_code: bool = False

    one_of = ("name_or_path", "from_config")

    def faults(self) -> dict[str, bool]:
        untyped = self.from_config is not None and "model_type" not in self.from_config
        return {"from_config needs model_type, such as gpt2 or llama": untyped}


class Tokenizer(Frozen):
    """By name or folder, a byte-level BPE trained on the training text, or one token a character or byte."""

    name_or_path: Name | None = None
    train_bpe: Annotated[int, Field(ge=257, le=1_000_000)] | None = None  # vocabulary size; 256 bytes and end of text
    kind: Literal["char", "byte"] | None = None

    one_of = ("name_or_path", "train_bpe", "kind")


class Dataset(Frozen, extra="allow"):
    """Built in, a hub name or folder, or files (text, jsonl, csv, parquet). Its columns are the task's to say, and what
    is built in."""

    builtin: Name | None = None  # which there are, each task's own class says
    name_or_path: Name | None = None
    config: str | None = None  # the hub data set's configuration
    train_split: str = "train"
    eval_split: str = "validation"  # the training split: its last eval_fraction
    train_files: tuple[str, ...] | None = None
    eval_files: tuple[str, ...] | None = None  # none: the last eval_fraction of the training rows
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)

    one_of = ("builtin", "name_or_path", "train_files")

    def faults(self) -> dict[str, bool]:
        return {
            "train_files must name at least one file": self.train_files == (),
            "eval_files must name at least one file; leave it out to hold back eval_fraction": self.eval_files == (),
            "eval_files needs train_files beside it": self.eval_files is not None and self.train_files is None,
        }


REWARDS = ("reward", "gold_reward")  # of the task rlhf: where a reward comes from, a model or a function
SequenceLength = Annotated[int, Field(ge=2, le=1_048_576)]  # tokens


class Workload(Frozen, extra="allow"):
    """What every trial trains and how it is judged: the keys that tasks share. Each task's file derives a class from
    this one with its other keys. Here these are kept as they are: storage, records and reports need no task."""

    task: str = "causal_lm"
    quality: Name | None = None  # the target's, where that is not the first of the task's
    model: Model | None = None  # none: a script's own
    tokenizer: Tokenizer | None = None  # none: the model's own
    dataset: Dataset | None = None  # none: a script's own
    sequence_length: SequenceLength | None = None  # none: images, or a script's own
    evaluations: int = Field(default=8, ge=1, le=1000)  # at even fractions of a trial; the last one is at its end
    eval_batch_size_per_gpu: int | None = Field(default=None, ge=1)  # none: the micro batch, at least 8
    training_arguments: dict[str, Any] = Field(default_factory=dict)  # more of transformers.TrainingArguments
    deepspeed: dict[str, Any] = Field(default_factory=dict)  # more of the DeepSpeed configuration

    @property
    def is_script(self) -> bool:
        """Whether it is a script of the user's own, which alone knows its model."""
        return self.model is None

    @property
    def data_files(self) -> tuple[str, ...]:
        """All that the data set names."""
        if (dataset := self.dataset) is None:
            return ()
        database = getattr(dataset, "database", None)  # of tasks that have one
        return (*(dataset.train_files or ()), *(dataset.eval_files or ()), *([database] if database else []))

    @property
    def names_or_paths(self) -> dict[str, str]:
        """Hub names and folders, by the key that has them."""
        parts = {"model": self.model, "tokenizer": self.tokenizer, "dataset": self.dataset}
        names = {key: part.name_or_path for key, part in parts.items() if part and part.name_or_path is not None}
        return names | {key: model for key in REWARDS if (model := dict(getattr(self, key, None) or {}).get("model"))}


class ModelWorkload(Workload):
    """Of a task that trains one of Hugging Face's models."""

    model: Model
    dataset: Dataset


# ------------------------------------------------------------------------------------------------------------ search


AUTO = "auto"  # in the place of a space


class Choices(Frozen):
    choices: tuple[Given, ...]
    affects: ToldAffects | None = None  # what a dimension of the user's own does; None: both, as far as the trials tell

    def faults(self) -> dict[str, bool]:
        different = {(isinstance(choice, bool), choice) for choice in self.choices}  # a study file's 1 is not its true
        alike = len(set(map(str, self.choices))) < len(self.choices)  # 1 and "1" are the same in a command
        text = f"choices must differ from each other, but got {list(self.choices)}"
        return {
            "choices must have at least one value": not different,
            text: alike or len(different) < len(self.choices),
        }


class Range(Frozen):
    """Any value from low to high, both included."""

    low: float = Field(ge=-1e12, le=1e12)
    high: float = Field(ge=-1e12, le=1e12)
    log: bool = False
    step: float | None = Field(default=None, gt=0)
    affects: ToldAffects | None = None

    def faults(self) -> dict[str, bool]:
        low, high = self.low, self.high
        return {
            f"`low <= high` must hold, but got low={low:g} and high={high:g}": low > high,
            f"`low > 0` must hold with log: true, but got low={low:g}": self.log and low <= 0,
            "step and log: true exclude each other": self.log and self.step is not None,
            f"step must be at least a billionth of high - low, but got {self.step}": self.step is not None
            and self.step < (high - low) / 1e9,
        }


class Fixed(Frozen):
    value: Given


def _domain(raw: Any) -> Any:
    if isinstance(raw, Choices | Range | Fixed):
        return raw
    if isinstance(raw, bool | int | float | str):
        return Fixed(value=raw)
    if isinstance(raw, dict):
        if "choices" in raw and {"low", "high"} & raw.keys():
            raise ValueError("must have either choices, or low and high, but has both")
        if raw.keys() == {"value"}:  # as a stored study has it
            return Fixed(**raw)
        return Range.model_validate(raw, strict=True) if {"low", "high"} & raw.keys() else Choices(**raw)
    raise ValueError(f"must be a single value, {{choices: [...]}} or {{low: .., high: .., log: true}}, but got {raw!r}")


Domain = Annotated[Choices | Range | Fixed, BeforeValidator(_domain)]  # of a dimension


def values_of(domain: Domain | None) -> tuple[Scalar, ...]:
    """Those that it can have; none of one that is left out, or that is a range."""
    return (domain.value,) if isinstance(domain, Fixed) else getattr(domain, "choices", ())


def may_be_other_than(domain: Domain | None, value: Scalar) -> bool:
    """Whether it can have another value than this."""
    return any(choice != value for choice in values_of(domain))


def _space_field(name: str) -> tuple[Any, Any]:
    default = DIMENSIONS[name].default
    return Domain | None, None if default is None else Fixed(value=default)


class Space(create_model("Space", __base__=Frozen, **{name: _space_field(name) for name in SEARCHED})):  # type: ignore[misc]
    """The dimensions of the search. One that is left out takes its default; a single value fixes it. Beside the
    table's, a script's user has dimensions of their own; which ones have to be there is the task's to say."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Domain]

    def __getitem__(self, name: str) -> Domain | None:
        # Not by getattr alone: a name of the user's own may be that of a method.
        return getattr(self, name) if name in SEARCHED else self.__pydantic_extra__.get(name)

    def faults(self) -> dict[str, bool]:
        told = [name for name in SEARCHED if getattr(self[name], "affects", None) is not None]
        return {f"affects is for dimensions of your own: what {', '.join(told)} affects is known": bool(told)}

    @property
    def own(self) -> tuple[str, ...]:
        """The names of dimensions that the user has invented."""
        return tuple(self.__pydantic_extra__)

    def domains(self) -> dict[str, Domain]:
        """Of every dimension that has a value, in the table's order, then the user's own."""
        return {name: domain for name in (*SEARCHED, *self.own) if (domain := self[name]) is not None}

    def affects(self) -> dict[str, ToldAffects]:
        """What the user says of dimensions of their own."""
        return {name: domain.affects for name, domain in self.free().items() if domain.affects is not None}

    def free(self) -> dict[str, Choices | Range]:
        """Of those that the search may move."""
        return {name: domain for name, domain in self.domains().items() if not isinstance(domain, Fixed)}


class UnchosenSpace(Space):
    """`space: auto`, until the data is prepared and the space is chosen by it (`core.auto_space`)."""


def _space(raw: Any) -> Any:
    return UnchosenSpace() if raw == AUTO else raw


class Pruning(Frozen):
    # Stop a trial that can't reach the target, by its curve and by what the others have taught. None: as the quality
    # says (Quality.stops_for_target).
    target: bool | None = None
    cap: bool = True  # stop a trial that emits more than the best one that meets the target
    audit: float = Field(default=0.0, ge=0, le=1)  # share of the trials to be stopped that are run to their end instead


class Search(Frozen):
    space: Annotated[Space, BeforeValidator(_space)]
    sampler: Literal["carbon", "tpe", "nsga2", "gp", "random", "grid"] = "carbon"
    goal: Literal["recommend", "front"] = "recommend"  # the cheapest that meets the target, or the whole front
    pruning: Pruning = Pruning()
    probes: bool = True  # measure settings that leave the quality alone by a few steps, and compile before a trial
    learn_from: tuple[Name, ...] = Field(default=(), max_length=20)  # folders of studies of the same or a similar task
    start: dict[str, Given] | None = None  # a known configuration: the first trial, never pruned, and the baseline
    seed: int = Field(default=0, ge=0, lt=2**31)


# ------------------------------------------------------------------------------------------------------ the whole file


def _target_field(quality: Quality) -> tuple[Any, Any]:
    return float | None, Field(default=None, ge=quality.lowest, le=min(quality.highest, 1e9))


class Target(create_model("Target", __base__=Frozen, **{name: _target_field(q) for name, q in QUALITIES.items()})):  # type: ignore[misc]
    """What a trial has to reach: one of the qualities, at most or at least this, as its direction is; or one that a
    script reports by a name of its own, with the bound that says which direction is better."""

    quality: Annotated[Name, AfterValidator(_name_of_a_report)] | None = None
    at_least: float | None = Field(default=None, ge=-1e12, le=1e12)
    at_most: float | None = Field(default=None, ge=-1e12, le=1e12)

    one_of = (*QUALITIES, "quality")

    def faults(self) -> dict[str, bool]:
        bounds = sum(bound is not None for bound in (self.at_least, self.at_most))
        named = self.quality is not None
        return {
            f"quality: {self.quality} must be written as {{{self.quality}: VALUE}}": self.quality in QUALITIES,
            f"quality: {self.quality} needs at_least or at_most beside it, one of them": named and bounds != 1,
            "at_least and at_most go with quality, the name of what a script reports": not named and bounds > 0,
        }

    @property
    def value(self) -> float:
        given = (self.at_least, self.at_most, *(getattr(self, name) for name in QUALITIES))
        return float(next(value for value in given if value is not None))

    def at(self, value: float | None = None) -> QualityTarget:
        """For the same quality another target; None: this one."""
        name = self.quality or next(name for name in QUALITIES if getattr(self, name) is not None)
        quality = quality_of(name, "minimize" if self.at_least is None else "maximize")
        return QualityTarget(quality, self.value if value is None else value)


class Budget(Frozen):
    """The study ends with whichever of these is used up first."""

    trials: int | None = Field(default=None, ge=1, le=1_000_000)
    hours: float | None = Field(default=None, gt=0, le=1_000_000)
    energy_kwh: float | None = Field(default=None, gt=0, le=1e12)
    emissions_kg_co2e: float | None = Field(default=None, gt=0, le=1e12)
    until: Literal["converged"] | None = None  # the next trial would cost more than it saves in `reuses` of the winner
    reuses: int = Field(default=10, ge=1, le=1_000_000_000)

    def faults(self) -> dict[str, bool]:
        endless = not self.model_dump(exclude_none=True, exclude={"reuses"})
        return {"needs at least one of trials, hours, energy_kwh, emissions_kg_co2e, until": endless}


class Confirm(Frozen):
    """After the search, its winner and the runners-up are run again with other seeds."""

    seeds: int = Field(default=3, ge=2, le=100)  # runs of each configuration, the search's own included
    runners_up: int = Field(default=2, ge=0, le=100)  # configurations beside the winner
    baseline: bool = False  # the start configuration, too


class Carbon(Frozen):
    """The reference carbon intensity, and what it is applied to. A value given here wins; else it is looked up, for the
    country and region or for the cloud region, in data that CodeCarbon carries."""

    country: Annotated[str, AfterValidator(_three_letters)] | None = None  # ISO 3166-1 alpha-3
    region: Name | None = None  # state, province or zone, where the bundled data has it
    cloud_provider: Name | None = None  # one that the data has (gcp), or any where the intensity is given
    cloud_region: Name | None = None  # as the provider names it, such as europe-west1
    intensity_g_co2e_per_kwh: float | None = Field(default=None, gt=0, le=5000)
    pue: float = Field(default=1.0, ge=1.0, le=5.0)
    objective: Literal["all", "gpu"] = "all"  # counted: all measured and modelled, or the GPUs' energy counters alone
    trace: Annotated[str, StringConstraints(min_length=1)] | None = None  # a CSV file of other hours' intensities

    def faults(self) -> dict[str, bool]:
        country, cloud, intensity = self.country, self.cloud_region, self.intensity_g_co2e_per_kwh
        one_of_two = (self.cloud_provider is None) != (cloud is None)
        unknown = country is None and cloud is None and intensity is None
        return {
            "cloud_provider and cloud_region go together, but only one of them is given": one_of_two,
            "has both country and cloud_region; give the one that the machine is in": bool(country and cloud),
            "needs country (three letters, such as USA), cloud_provider and cloud_region, "
            "or intensity_g_co2e_per_kwh": unknown,
            "region needs country beside it": self.region is not None and country is None,
        }


# How many trials of a search several workers run at once. Proposals that are made side by side know less, and take more
# energy: "frugal" lets 2 + ended ÷ 6 run, "full" as many as there are workers (see `analysis.haste`).
Haste = Literal["frugal", "full"]


class _Training(Frozen):
    """Trials that train, one rank for each GPU; without GPUs on the CPU. Several run side by side, each in a slot of
    its own, where there are GPUs or workers for them."""

    trains: ClassVar[bool] = True  # from a workload; false: nothing is run, and nothing is spent
    is_local: ClassVar[bool] = False  # on this machine's devices, as it says them
    files: ClassVar[tuple[str, ...]] = ()  # that its trials read beside the workload's

    timeout_s: float = Field(default=900.0, gt=0)  # a trial without any progress for so long is ended
    warm_start: bool = True  # trials are forked from a process that has imported everything; false: each one imports it
    haste: Haste = "frugal"


class _Shared(_Training):
    """On machines whose devices trials may share."""

    gpus_per_trial: int | None = Field(default=None, ge=1)  # that divides the number of GPUs; None: a trial has all
    cpu_ranks: int = Field(default=1, ge=1, le=64)  # of a trial on each machine, without GPUs


class LocalLaunch(_Shared):
    """Trials on this machine."""

    is_local: ClassVar[bool] = True

    kind: Literal["local"] = "local"
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = (0,)  # NVML indices, as nvidia-smi numbers them
    workers: int = Field(default=1, ge=1, le=64)  # trials side by side with `gpus: []`, each on its share of the cores

    def faults(self) -> dict[str, bool]:
        return {
            f"gpus must differ from each other, but got {list(self.gpus)}": len(set(self.gpus)) < len(self.gpus),
            "cpu_ranks goes with gpus: [] only": bool(self.gpus) and self.cpu_ranks > 1,
            "workers goes with gpus: [] only; with GPUs give gpus_per_trial": bool(self.gpus) and self.workers > 1,
            "gpus_per_trial needs GPUs, but launch.gpus is []": not self.gpus and self.gpus_per_trial is not None,
            f"gpus_per_trial must divide the number of gpus, but got {self.gpus_per_trial} and {len(self.gpus)}": bool(
                self.gpus and self.gpus_per_trial and len(self.gpus) % self.gpus_per_trial
            ),
        }

    @property
    def world_size(self) -> int:
        """Ranks of a trial."""
        return self.gpus_per_trial or len(self.gpus) or self.cpu_ranks

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        """As many as a trial may have on each of its machines."""
        return (self.world_size,)

    @property
    def slots(self) -> int:
        """Trials that run side by side, of one command."""
        return len(self.gpus) // self.world_size if self.gpus else self.workers

    @property
    def side_by_side(self) -> int:
        """Trials of the study at once, as far as the study file says."""
        return self.slots

    def of_slot(self, slot: int) -> "LocalLaunch":
        """Of the trials in one slot, as if there were no others."""
        gpus = self.gpus[slot * self.world_size : (slot + 1) * self.world_size]
        return self.model_copy(update={"gpus": gpus, "gpus_per_trial": None, "workers": 1})


def _minutes(text: Any) -> int:
    """Of a time as sbatch takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, dash, rest = str(text).rpartition("-")
    parts = rest.split(":")
    ways = {1: ("h",), 2: ("h", "m"), 3: ("h", "m", "s")} if dash else {1: ("m",), 2: ("m", "s"), 3: ("h", "m", "s")}
    if not re.fullmatch(r"([0-9]{1,6}-)?[0-9]{1,6}(:[0-9]{1,6}){0,2}", str(text)):
        raise ValueError(f"must be a time as sbatch takes it, such as 08:00:00, but got {shortened(text)}")
    in_minutes = {"h": 60.0, "m": 1.0, "s": 1 / 60}
    minutes = sum(in_minutes[unit] * int(part) for unit, part in zip(ways[len(parts)], parts, strict=True))
    return math.ceil(minutes + 24 * 60 * int(days or 0))


class SlurmLaunch(_Shared):
    """Trials in jobs that carbonopt submits to Slurm; where a job runs already, in its allocation."""

    kind: Literal["slurm"]
    nodes: int = Field(default=1, ge=1, le=1000)  # of a job
    nodes_per_trial: int | None = Field(default=None, ge=1)  # that divides `nodes`; None: a trial has all
    gpus_per_node: int = Field(default=1, ge=0, le=64)  # 0: trials on the CPU
    cpus_per_node: int | None = Field(default=None, ge=1)  # None: what the partition gives
    memory_gib: float | None = Field(default=None, ge=0.01, le=1e6)  # of each node; None: what the partition gives
    partition: Name | None = None
    account: Name | None = None
    qos: Name | None = None
    constraint: Name | None = None
    time: Annotated[int, BeforeValidator(_minutes)] = Field(
        default=60, ge=1, le=525_600
    )  # a job's limit; a study goes on after it
    exclusive: bool = False
    workers: int = Field(default=1, ge=1, le=1000)  # jobs that work on the study at once
    setup: tuple[Name, ...] = ()  # lines of shell before the command, such as `module load cuda`

    def faults(self) -> dict[str, bool]:
        gpus, each = self.gpus_per_node, self.gpus_per_trial
        return {
            f"nodes_per_trial must divide nodes, but got {self.nodes_per_trial} and {self.nodes}": bool(
                self.nodes_per_trial and self.nodes % self.nodes_per_trial
            ),
            "gpus_per_trial is for trials within one node; give nodes_per_trial: 1 beside it, or leave it out": bool(
                each and (self.nodes_per_trial or self.nodes) > 1
            ),
            "cpu_ranks goes with gpus_per_node: 0 only": gpus > 0 and self.cpu_ranks > 1,
            "gpus_per_trial needs GPUs, but gpus_per_node is 0": gpus == 0 and each is not None,
            f"gpus_per_trial must divide gpus_per_node, but got {each} and {gpus}": bool(each and gpus % each),
        }

    @property
    def warned_s(self) -> int:
        """How long before its limit a job is told to end what runs, and to store it: half of a short one's time."""
        return min(300, 30 * self.time)

    @property
    def usable_s(self) -> int:
        """Of a job, until it is told so."""
        return 60 * self.time - self.warned_s

    @property
    def gpus(self) -> tuple[int, ...]:
        """As many as a job gets, counted from 0: which, Slurm says in the job."""
        return tuple(range(self.gpus_per_node))

    @property
    def world_size(self) -> int:
        """Ranks of a trial."""
        return sum(self.ranks_of_nodes)

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        """As many as a trial may have on each of its nodes."""
        return (self.gpus_per_trial or self.gpus_per_node or self.cpu_ranks,) * (self.nodes_per_trial or self.nodes)

    @property
    def slots(self) -> int:
        """Trials that run side by side in a job."""
        return self.nodes // (self.nodes_per_trial or self.nodes) * self.slots_of_node

    @property
    def slots_of_node(self) -> int:
        """Trials that run side by side on one node."""
        return self.gpus_per_node // self.gpus_per_trial if self.gpus_per_trial else 1

    @property
    def side_by_side(self) -> int:
        """Trials of the study at once."""
        return self.slots * self.workers

    def on_this_machine(self, gpus: tuple[int, ...]) -> LocalLaunch:
        """In a job, on one of its nodes that has these GPUs."""
        kept = {name: getattr(self, name) for name in _Shared.model_fields}
        return LocalLaunch(**kept, gpus=gpus)


class HostfileLaunch(_Training):
    """Trials over the machines of a hostfile, which are reached by ssh."""

    kind: Literal["hostfile"]
    hostfile: Name
    hosts: tuple[Host, ...] = Field(min_length=1, max_length=MOST_HOSTS)  # that it has: read with the study file
    device: Literal["gpu", "cpu"] = "gpu"  # of a slot
    nodes_per_trial: int | None = Field(default=None, ge=1)  # that divides the number of hosts; None: a trial has all

    def faults(self) -> dict[str, bool]:
        each, slots = self.nodes_per_trial or len(self.hosts), [host.slots for host in self.hosts]
        groups = {tuple(slots[first : first + each]) for first in range(0, len(slots), each)}
        return {
            f"nodes_per_trial must divide the number of hosts, but got {each} and {len(slots)}": len(slots) % each != 0,
            f"the hosts of all trials must have the same slots, but have {slots}": len(groups) > 1,
        }

    @property
    def gpus(self) -> tuple[int, ...]:
        """As many as one host has at most, counted from 0; none for trials on CPUs."""
        return tuple(range(max(self.ranks_of_nodes))) if self.device == "gpu" else ()

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        """As many as a trial may have on each of its machines."""
        return tuple(host.slots for host in self.hosts[: self.nodes_per_trial])

    @property
    def world_size(self) -> int:
        """Ranks of a trial."""
        return sum(self.ranks_of_nodes)

    @property
    def slots(self) -> int:
        """Trials that run side by side."""
        return len(self.hosts) // len(self.ranks_of_nodes)

    @property
    def slots_of_node(self) -> int:
        """Trials that run side by side on one host."""
        return 1

    @property
    def side_by_side(self) -> int:
        """Trials of the study at once."""
        return self.slots

    def on_host(self, number: int) -> LocalLaunch:
        """On one of the hosts alone."""
        kept, slots = {name: getattr(self, name) for name in _Training.model_fields}, self.hosts[number].slots
        if self.device == "cpu":
            return LocalLaunch(**kept, gpus=(), cpu_ranks=slots)
        return LocalLaunch(**kept, gpus=tuple(range(slots)))


class ReplayLaunch(Frozen):
    """Trials from a table of recorded runs, one JSON object a line; with LocalLaunch's properties."""

    trains: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    gpus: ClassVar[tuple[int, ...]] = ()
    world_size: ClassVar[int] = 1
    ranks_of_nodes: ClassVar[tuple[int, ...]] = (1,)
    slots: ClassVar[int] = 1
    side_by_side: ClassVar[int] = 1
    timeout_s: ClassVar[float] = math.inf
    warm_start: ClassVar[bool] = False

    kind: Literal["replay"]
    table: Name
    haste: Haste = "frugal"

    @property
    def files(self) -> tuple[str, ...]:
        return (self.table,)


Launch = LocalLaunch | SlurmLaunch | HostfileLaunch | ReplayLaunch
LAUNCHES: dict[str, type[Launch]] = {get_args(cls.model_fields["kind"].annotation)[0]: cls for cls in get_args(Launch)}


class WandbTracking(Frozen):
    project: Name = "carbonopt"
    entity: Name | None = None
    mode: Literal["online", "offline"] = "offline"


class Track(Frozen):
    wandb: WandbTracking | None = None
    tensorboard: bool = False


_OTHER_TOKENS = (
    "workload.tokenizer: train_bpe learns other tokens than those that workload.model.name_or_path was trained on; "
    "leave it out for the model's own"
)


class StudyConfig(Frozen):
    name: Annotated[Name, AfterValidator(_not_dots_only)]
    workload: Workload | None = None  # a replay needs none
    target: Target
    search: Search
    budget: Budget
    confirm: Confirm | None = None  # none: the answer rests on one run of each configuration
    carbon: Carbon
    launch: Annotated[Launch, Field(discriminator="kind")] = LocalLaunch()
    track: Track = Track()

    def faults(self) -> dict[str, bool]:
        sampler, goal, launch = self.search.sampler, self.search.goal, self.launch
        unexpecting = (
            "budget.until: converged needs search.sampler: carbon and search.goal: recommend, which alone expect "
            f"something of the next trial, but got {sampler} and {goal}; give budget.trials or another limit"
        )
        uncounted = self.carbon.objective == "gpu" and launch.trains and not launch.gpus
        no_baseline = "confirm.baseline repeats search.start, but there is none; give one or leave it out"
        has_start = bool(self.search.start) or isinstance(self.search.space, UnchosenSpace)  # chosen with its start
        return {
            no_baseline: self.confirm is not None and self.confirm.baseline and not has_start,
            "workload is missing; only a replay can do without": self.workload is None and launch.trains,
            _OTHER_TOKENS: self._learns_other_tokens,
            f"search.learn_from goes with search.sampler: carbon, which alone learns from it, but got {sampler}": bool(
                self.search.learn_from
            )
            and sampler != "carbon",
            unexpecting: self.budget.until is not None and (sampler, goal) != ("carbon", "recommend"),
            "carbon.objective: gpu needs GPUs to count, but launch.gpus is []": uncounted,
        }

    @property
    def _learns_other_tokens(self) -> bool:
        """Whether pretrained weights would get a tokenizer whose tokens they have never seen."""
        if self.workload is None or self.workload.model is None or self.workload.tokenizer is None:
            return False
        return self.workload.model.name_or_path is not None and self.workload.tokenizer.train_bpe is not None

    @property
    def quality(self) -> Quality:
        """By which trials are judged."""
        return self.target.at().quality

    @property
    def probes(self) -> bool:
        """Whether settings can be measured by a few steps of a trial: not of a table's, nor of a user's script."""
        return self.search.probes and self.workload is not None and self.launch.trains and not self.workload.is_script

    def compiles(self, params: TrialParams) -> bool:
        """Whether a trial's first step compiles kernels, or loads those that were compiled before it."""
        given = self.workload.training_arguments if self.workload else {}
        if params.torch_compile or any(map(given.get, DIMENSIONS["torch_compile"].arguments)):
            return True
        on_gpu = bool(self.launch.gpus)
        return params.attention_implementation == "flex_attention" or (params.has_fused_output_layer and on_gpu)

    @property
    def may_compile(self) -> bool:
        """Whether trials may use torch's compiler, as far as the space says: fused output layers do on GPUs, where a
        space that is yet to be chosen may have both."""
        space = self.search.space
        on_gpus = isinstance(space, UnchosenSpace) or may_be_other_than(space["output_layer"], "standard")
        return may_be_other_than(space["torch_compile"], False) or (bool(self.launch.gpus) and on_gpus)

    def identity(self) -> dict[str, Any]:
        """What makes two study files the same study: all but budget, confirmation, trackers, trace, the studies that it
        learns from, and how its trials get their devices."""
        launch: dict[str, Any] = dict.fromkeys(("warm_start", "haste"), True)
        if isinstance(self.launch, SlurmLaunch):
            ranks = {"kind", "nodes", "nodes_per_trial", "gpus_per_node", "gpus_per_trial", "cpu_ranks"}
            launch |= dict.fromkeys(SlurmLaunch.model_fields.keys() - ranks, True)
        if isinstance(self.launch, HostfileLaunch):
            launch |= {"hostfile": True, "hosts": {"__all__": {"name"}}}
        parts = {"carbon": {"trace": True}, "search": {"learn_from": True}, "launch": launch}
        return self.model_dump(mode="json", exclude={"budget": True, "confirm": True, "track": True, **parts})
