"""The study file: YAML in, frozen models out. Unknown keys, wrong types and impossible values are refused here."""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import yaml
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from carbonopt.errors import BadInput
from carbonopt.trial import Frozen

Name = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True)]
Scalar = bool | int | float | str


# ---------------------------------------------------------------------------------------------------------- workload


class Model(Frozen):
    """A Hugging Face model: by hub name or local folder with its weights, or from a configuration with random ones."""

    name_or_path: Name | None = None
    from_config: dict[str, Any] | None = None  # model_type and the fields of that type's configuration class
    revision: str | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        _exactly_one(self, "name_or_path", "from_config")
        if self.from_config is not None and "model_type" not in self.from_config:
            raise ValueError("from_config needs model_type, such as gpt2 or llama")
        return self


class Tokenizer(Frozen):
    """By name or folder, a byte-level BPE trained on the training text, or one token a character or byte."""

    name_or_path: Name | None = None
    train_bpe: Annotated[int, Field(ge=257, le=1_000_000)] | None = None  # vocabulary size; 256 bytes and end of text
    kind: Literal["char", "byte"] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Tokenizer":
        _exactly_one(self, "name_or_path", "train_bpe", "kind")
        return self


class Dataset(Frozen):
    """Where the text comes from: built in, a hub name or folder, or files (text, jsonl, csv, parquet)."""

    builtin: Literal["python-docs"] | None = None
    name_or_path: Name | None = None
    config: str | None = None  # the hub data set's configuration
    train_split: str = "train"
    eval_split: str = "validation"
    train_files: tuple[str, ...] | None = None
    eval_files: tuple[str, ...] | None = None  # none: the last eval_fraction of the training rows
    text_column: str = "text"
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _one_source(self) -> "Dataset":
        _exactly_one(self, "builtin", "name_or_path", "train_files")
        if self.train_files is not None and not self.train_files:
            raise ValueError("train_files must name at least one file")
        if self.eval_files is not None and self.train_files is None:
            raise ValueError("eval_files needs train_files beside it")
        return self


class Workload(Frozen):
    """What every trial trains and how it is judged; the same for all trials of a study."""

    task: Literal["causal_lm"] = "causal_lm"
    model: Model
    tokenizer: Tokenizer | None = None  # none: the model's own
    dataset: Dataset
    sequence_length: int = Field(ge=2, le=1_048_576)  # tokens
    evaluations: int = Field(default=8, ge=1, le=1000)  # at even fractions of a trial; the last one is at its end
    eval_batch_size_per_gpu: int | None = Field(default=None, ge=1)  # none: the micro batch, at least 8
    training_arguments: dict[str, Any] = Field(default_factory=dict)  # more of transformers.TrainingArguments
    deepspeed: dict[str, Any] = Field(default_factory=dict)  # more of the DeepSpeed configuration

    @model_validator(mode="after")
    def _tokenizer_source(self) -> "Workload":
        if self.tokenizer is None and self.model.name_or_path is None:
            raise ValueError("a model from_config has no tokenizer of its own: give workload.tokenizer")
        return self


# ------------------------------------------------------------------------------------------------------------ search


class Choices(Frozen):
    """One of these."""

    choices: tuple[Scalar, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> "Choices":
        if len(set(map(repr, self.choices))) < len(self.choices):
            raise ValueError(f"choices must differ from each other, but got {list(self.choices)}")
        return self


class Range(Frozen):
    """Any value from low to high, both included."""

    low: float
    high: float
    log: bool = False
    step: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> "Range":
        if not self.low <= self.high:
            raise ValueError(f"`low <= high` must hold, but got low={self.low:g} and high={self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"`low > 0` must hold with log: true, but got low={self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("step and log: true exclude each other")
        return self


class Fixed(Frozen):
    """Always this."""

    value: Scalar


def _dimension(raw: Any) -> Any:
    if isinstance(raw, Choices | Range | Fixed):
        return raw
    if isinstance(raw, bool | int | float | str):
        return Fixed(value=raw)
    if isinstance(raw, dict):
        if raw.keys() == {"value"}:  # as a stored study has it
            return Fixed(**raw)
        return (Range if {"low", "high"} & raw.keys() else Choices)(**raw)
    raise ValueError(f"must be a single value, {{choices: [...]}} or {{low: .., high: .., log: true}}, but got {raw!r}")


Dimension = Annotated[Union[Choices, Range, Fixed], BeforeValidator(_dimension)]


class Space(Frozen):
    """The dimensions of the search. One that is left out takes its default; a single value fixes it."""

    global_batch_size: Dimension
    micro_batch_size_per_gpu: Dimension | None = None  # default: global batch ÷ world size
    learning_rate: Dimension
    epochs: Dimension
    zero_stage: Dimension = Fixed(value=1)
    offload: Dimension = Fixed(value="none")
    gradient_checkpointing: Dimension | None = None
    precision: Dimension | None = None
    weight_decay: Dimension | None = None
    warmup_ratio: Dimension | None = None
    lr_scheduler: Dimension | None = None
    torch_compile: Dimension | None = None
    attention_implementation: Dimension | None = None
    lora_rank: Dimension | None = None


class Pruning(Frozen):
    target: bool = True  # stop a trial that can't reach the target even on an optimistic reading of its curve
    cap: bool = True  # stop a trial whose emissions have passed those of the best one that meets the target


class Search(Frozen):
    space: Space
    sampler: Literal["carbon", "tpe", "nsga2", "gp", "random", "grid"] = "carbon"
    pruning: Pruning = Pruning()
    start: dict[str, Scalar] | None = None  # a known configuration: the first trial, never pruned, and the baseline
    seed: int = Field(default=0, ge=0, lt=2**31)


# ------------------------------------------------------------------------------------------------------ the whole file


class Target(Frozen):
    perplexity: float = Field(gt=0)


class Budget(Frozen):
    """The study ends with whichever of these is used up first."""

    trials: int | None = Field(default=None, ge=1)
    hours: float | None = Field(default=None, gt=0)
    energy_kwh: float | None = Field(default=None, gt=0)
    emissions_kg_co2e: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _bounded(self) -> "Budget":
        if not self.model_dump(exclude_none=True):
            raise ValueError("needs at least one of trials, hours, energy_kwh, emissions_kg_co2e")
        return self


class Carbon(Frozen):
    """The reference carbon intensity. A value given here wins; else it is looked up for the country and region."""

    country: Annotated[str, StringConstraints(pattern="^[A-Z]{3}$")] | None = None  # ISO 3166-1 alpha-3
    region: Name | None = None  # state or province, where the bundled data has it (USA, Canada)
    intensity_g_co2e_per_kwh: float | None = Field(default=None, gt=0, le=5000)
    pue: float = Field(default=1.0, ge=1.0, le=5.0)

    @model_validator(mode="after")
    def _known(self) -> "Carbon":
        if self.country is None and self.intensity_g_co2e_per_kwh is None:
            raise ValueError("needs country (three letters, such as USA) or intensity_g_co2e_per_kwh")
        if self.region is not None and self.country is None:
            raise ValueError("region needs country beside it")
        return self


class LocalLaunch(Frozen):
    """Trials on this machine: one rank for each GPU; with `gpus: []` on the CPU."""

    kind: Literal["local"] = "local"
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = (0,)  # NVML indices, as nvidia-smi numbers them
    cpu_ranks: int = Field(default=1, ge=1, le=64)  # with `gpus: []`
    timeout_s: float = Field(default=900.0, gt=0)  # a trial without any progress for so long is ended

    @model_validator(mode="after")
    def _ranks(self) -> "LocalLaunch":
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus must differ from each other, but got {list(self.gpus)}")
        if self.gpus and self.cpu_ranks > 1:
            raise ValueError("cpu_ranks goes with gpus: [] only")
        return self

    @property
    def world_size(self) -> int:
        return len(self.gpus) or self.cpu_ranks


class ReplayLaunch(Frozen):
    """Trials from a table of recorded runs, one JSON object a line."""

    kind: Literal["replay"]
    table: Name

    @property
    def world_size(self) -> int:
        return 1


class WandbTracking(Frozen):
    project: Name = "carbonopt"
    entity: Name | None = None
    mode: Literal["online", "offline"] = "offline"


class Track(Frozen):
    wandb: WandbTracking | None = None
    tensorboard: bool = False


class StudyConfig(Frozen):
    """A study file, checked."""

    name: Name
    workload: Workload | None = None  # a replay needs none
    target: Target
    search: Search
    budget: Budget
    carbon: Carbon
    launch: Annotated[Union[LocalLaunch, ReplayLaunch], Field(discriminator="kind")] = LocalLaunch()
    track: Track = Track()

    @model_validator(mode="after")
    def _has_workload(self) -> "StudyConfig":
        if self.workload is None and not isinstance(self.launch, ReplayLaunch):
            raise ValueError("workload is missing; only a replay can do without")
        return self

    def identity(self) -> dict:
        """What makes two study files the same study: all of it but the budget and the trackers."""
        return self.model_dump(mode="json", exclude={"budget", "track"})


# ----------------------------------------------------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """Safe YAML that also reads 1e-3 as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 wants a dot in a float, so PyYAML reads 1e-3 as text; everybody who writes learning rates means the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_study(path: Path) -> StudyConfig:
    """Reads and checks a study file. Relative paths in it are taken from the file's own folder.

    Raises:
        BadInput: with the key's path, the value found and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"can't read the study file {path}: {reason}.") from error
    try:
        raw = yaml.load(text, Loader=_Loader)  # noqa: S506, the loader is a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise BadInput(f"{path} must hold a study (keys name, workload, target, …), but holds {_shown(raw)}.")
    if isinstance(raw.get("launch"), dict):
        raw["launch"].setdefault("kind", "local")
    return parse_study(_with_absolute_paths(raw, path.resolve().parent), str(path))


def parse_study(raw: dict, origin: str) -> StudyConfig:
    """Checks a study given as plain data; `origin` names it in errors.

    Raises:
        BadInput: as `load_study`.
    """
    try:
        return StudyConfig.model_validate(raw)
    except ValidationError as error:
        raise BadInput(f"{origin}: {_sentence(error, raw)}") from error


def _with_absolute_paths(raw: dict, folder: Path) -> dict:
    """A copy in which the paths that the study file names no longer depend on the working directory."""

    def absolute(text: Any) -> Any:
        return str(folder / Path(text).expanduser()) if isinstance(text, str) and text else text

    def local_folder(text: Any) -> Any:  # a hub name stays; what stands beside the study file becomes its path
        looks_local = isinstance(text, str) and (text.startswith((".", "/", "~")) or (folder / text).is_dir())
        return absolute(text) if looks_local else text

    raw = dict(raw)
    workload = raw.get("workload")
    if isinstance(workload, dict):
        workload = raw["workload"] = dict(workload)
        for part in ("model", "tokenizer", "dataset"):
            if isinstance(workload.get(part), dict) and "name_or_path" in workload[part]:
                workload[part] = {**workload[part], "name_or_path": local_folder(workload[part]["name_or_path"])}
        dataset = workload.get("dataset")
        if isinstance(dataset, dict):
            for key in ("train_files", "eval_files"):
                files = dataset.get(key)
                if isinstance(files, str):
                    files = [files]
                if isinstance(files, list):
                    dataset = workload["dataset"] = {**dataset, key: [absolute(file) for file in files]}
    launch = raw.get("launch")
    if isinstance(launch, dict) and "table" in launch:
        raw["launch"] = {**launch, "table": absolute(launch["table"])}
    return raw


# ------------------------------------------------------------------------------------------------------------ errors


def _exactly_one(model: BaseModel, *keys: str) -> None:
    given = [key for key in keys if getattr(model, key) is not None]
    if len(given) != 1:
        found = "none of them" if not given else " and ".join(given)
        raise ValueError(f"must have exactly one of {', '.join(keys)}, but has {found}")


def _sentence(error: ValidationError, raw: dict) -> str:
    """The first thing that is wrong, in one sentence: key, value found, what is allowed."""
    first = error.errors()[0]
    loc = [part for part in first["loc"] if part not in ("local", "replay", "Choices", "Range", "Fixed")]
    where = ".".join(str(part) for part in loc) or "the study"
    kind = first["type"]
    if kind == "extra_forbidden":
        unknown = str(loc[-1])
        known = _known_keys(loc[:-1], raw)
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}."
        return f"unknown key {where}; {hint}"
    if kind == "missing":
        return f"{where} is missing."
    message = first["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {message}."
    return f"{where}: {message[0].lower()}{message[1:]}, but got {_shown(first['input'])}."


def _known_keys(loc: list, raw: dict) -> list[str]:
    """The keys that the model at `loc` has."""
    model: Any = StudyConfig
    for part in loc:
        if isinstance(part, int):
            continue
        if model is StudyConfig and part == "launch":
            replay = isinstance(raw.get("launch"), dict) and raw["launch"].get("kind") == "replay"
            model = ReplayLaunch if replay else LocalLaunch
            continue
        candidates = _models_in(model.model_fields[part].annotation)
        if candidates == [Choices, Range, Fixed]:
            return ["choices", "low", "high", "log", "step"]
        model = candidates[0]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
