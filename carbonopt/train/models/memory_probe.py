"""Estimate the GPU memory that training a model needs, without a GPU.

A forward and a backward pass run on tensors that have shapes but no numbers (torch's meta device).
Autograd keeps and frees them as it does on a GPU.
"""

import functools
import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig

from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.parallel import in_forks, processes
from carbonopt.core.values import Scalar
from carbonopt.spec.model_memory import (
    PROFILED,
    Activations,
    MemoryAnswer,
    MemoryProfile,
    MemorySpec,
    ModelMemory,
    Moment,
)
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, ends_of, values_of
from carbonopt.train.failures import reason, refused
from carbonopt.train.models import model as models
from carbonopt.train.models.gpu_operations import as_on_a_gpu, tracing_compiler
from carbonopt.train.models.layer_extrapolation import by_layers, few_and_more
from carbonopt.train.models.live_memory import MOST_CPU_S, UNRUNNABLE, LiveMemory
from carbonopt.train.models.memory_shares import Passes, Settings, Share, divided
from carbonopt.train.models.optimizer_memory import muon_step_bytes, optimizer_bytes
from carbonopt.train.optim import muon
from carbonopt.train.speed.float8_layers import train_in_float8
from carbonopt.train.speed.small_evaluations import evaluation_stance
from carbonopt.train.tasks.task import SMALLEST_EVAL_BATCH, task_for
from carbonopt.train.tasks.trainer_task import TrainerTask

# Tokens of an evaluation, where no data is prepared; they decide whether it runs compiled.
_USUAL_EVAL_TOKENS = 100_000
_MOST_COMPILED = 10_000  # versions of a function's code, more than a study has settings
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Fields of ModelMemory, and the settings of DeepSpeed that they are taken from.
_ZERO_KEYS = {
    "reduce_bucket_elements": "reduce_bucket_size",
    "live_parameters": "stage3_max_live_parameters",
    "overlapped": "overlap_comm",
}
# Dimensions whose values some models can't be made with.
_MAKING = ("attention_implementation", "output_layer", "float8", "lora_rank")


def model_memory(
    task: TrainerTask,
    config: PreTrainedConfig,
    space: Space,
    world_size: int,
    eval_batch_size: int | None,
    folder: PreparedFolder | None = None,
    *,
    eval_tokens: int | None,
    processes: int = 1,
) -> ModelMemory:
    """Return the memory profile of a model in all settings of the search space.

    Examples have the length of the longest in the prepared folder or, without one, the longest
    length that the workload allows. `eval_tokens` are as of `TrainerTask.evaluation_tokens`. With
    more than one of the `processes`, forks of this one do the work, see `core.parallel`.

    Raises:
        BadInput: The model can't run without numbers, profiling takes more than a minute of CPU
            time in a process, or the task doesn't say what its batches are.
        CarbonoptError: A fork died.
    """
    if (dropout := space["dropout"]) is not None:  # any value but 0 keeps a mask
        config = models.with_dropout(config, max(map(float, ends_of(dropout))))
    zero = task.workload.deepspeed.get("zero_optimization", {})
    states, in_step = optimizer_bytes(task.workload.training_arguments)
    sentence = f"{config.model_type} can't be run without numbers ({{}})"
    obstacles = _Obstacles(task, config)
    met = [(settings, obstacles.of(settings)) for settings in _settings(space)]
    known = [settings for settings, in_the_way in met if not in_the_way]
    left_out = "; ".join(dict.fromkeys(each for _, in_the_way in met for each in in_the_way))
    if not known:
        raise BadInput(left_out)
    sizes = _micro_batches(space, world_size)
    eval_sizes = {size: eval_batch_size or max(size, SMALLEST_EVAL_BATCH) for size in sizes}
    shares = [Share(settings, sizes, tuple(set(eval_sizes.values()))) for settings in known]
    by_muon = "muon" in values_of(space["optimizer"])

    def measured(configs: Sequence[PreTrainedConfig], shares: Sequence[Share]) -> list[Measured]:
        """Return what passes of these models have taken in the settings of each share."""

        def in_one_process(part: Sequence[Share]) -> list[Measured]:
            with refused(sentence, *UNRUNNABLE):
                probe = Probe(task, config, folder, by_muon=by_muon, eval_tokens=eval_tokens)
                return [probe.measure(share, configs) for share in part]

        parts = divided(shares, processes, lambda settings: _compiles(task, settings))
        if len(parts) > 1:
            with refused(sentence, *UNRUNNABLE):
                _import_for(task, configs[0], [share.settings for share in shares])
        found = [each for part in in_forks(in_one_process, parts) for each in part]
        return [
            functools.reduce(
                Measured.joined, (each for each in found if each.settings == share.settings)
            )
            for share in shares
        ]

    profiles = _profiles(config, shares, eval_sizes, measured)
    return ModelMemory(
        profiles=tuple(profiles),
        optimizer_bytes_per_parameter=states,
        optimizer_step_bytes_per_parameter=in_step,
        left_out=left_out or None,
        **{name: zero[key] for name, key in _ZERO_KEYS.items() if key in zero},
    )


def _profiles(
    config: PreTrainedConfig,
    shares: Sequence[Share],
    eval_sizes: dict[int, int],
    measured: Callable[[Sequence[PreTrainedConfig], Sequence[Share]], "list[Measured]"],
) -> list[MemoryProfile]:
    """Return the memory of the whole model in the settings of each share.

    Args:
        config: The whole model's configuration.
        shares: All passes that are needed in each combination of settings.
        eval_sizes: The batch size of evaluations for each micro batch.
        measured: Returns what passes of models have taken in the settings of each share.
    """
    profiles: dict[int, MemoryProfile] = {}
    smaller = few_and_more(config)
    if smaller is not None:
        for number, found in enumerate(measured(smaller, shares)):
            few, more = (
                (passes.trained, passes.activations(eval_sizes)) for passes in found.passes
            )
            activations = by_layers(config, found.weights_of_whole.trained, few, more)
            if activations is not None:
                profiles[number] = found.profile(activations)
    left = [number for number in range(len(shares)) if number not in profiles]
    for number, found in zip(
        left, measured([config], [shares[number] for number in left]), strict=True
    ):
        profiles[number] = found.profile(found.passes[0].activations(eval_sizes))
    return [profiles[number] for number in range(len(shares))]


def _settings(space: Space) -> Iterator[dict[str, Scalar | None]]:
    """Generate the combinations of the PROFILED dimensions, with both ends of a range.

    Those that can't exist are left out.
    """
    values = [ends_of(space[name]) or (None,) for name in PROFILED]
    for combination in itertools.product(*values):
        settings = dict(zip(PROFILED, combination, strict=True))
        if settings["torch_compile"] or settings["float8"] in (None, "none"):
            yield settings


class _Obstacles:
    """Tells why settings of a model have no estimate."""

    def __init__(self, task: TrainerTask, config: PreTrainedConfig) -> None:
        self._task, self._config = task, config
        self._lacking: dict[tuple[str, Scalar | None], str | None] = {}

    def of(self, settings: Settings) -> list[str]:
        """Return why these settings have no estimate, in words; empty if they have one."""
        found = [self._lack(name, settings[name]) for name in _MAKING]
        in_the_way = [each for each in found if each is not None]
        if _compiles(self._task, settings) and _setting(
            self._task, settings, "gradient_checkpointing"
        ):
            # How the compiler divides a checkpointed layer can't be followed.
            in_the_way.append("torch_compile with gradient_checkpointing")
        return in_the_way

    def _lack(self, name: str, value: Scalar | None) -> str | None:
        """Return why the model can't be made with one setting; None if it can."""
        if value in (None, 0, "none", "standard"):
            return None
        if (name, value) not in self._lacking:
            self._lacking[name, value] = self._lack_of(name, value)
        return self._lacking[name, value]

    def _lack_of(self, name: str, value: Scalar | None) -> str | None:
        if name == "float8" and find_spec("torchao") is None:
            return "float8, which needs torchao; type: pip install 'carbonopt[float8]'"
        error = self._error_of_making({name: value})
        if error is None or self._error_of_making({}) is not None:  # the setting isn't the reason
            return None
        return f"{name}: {value}, which {self._config.model_type} can't have ({reason(error)})"

    def _error_of_making(self, settings: Settings) -> Exception | None:
        try:
            _model(self._task, self._config, dict.fromkeys(PROFILED) | settings)
        except UNRUNNABLE as error:
            return error
        return None


def _micro_batches(space: Space, world_size: int) -> tuple[int, ...]:
    """Return the smallest and the largest micro batch size, or the only one that is given.

    Where the space gives none, another number of GPUs has another size: these are then two, which
    tell what grows with the micro batch from what does not.
    """
    if given := [int(size) for size in ends_of(space["micro_batch_size_per_gpu"])]:
        return tuple(sorted({min(given), max(given)}))
    sizes = [max(1, int(size) // world_size) for size in ends_of(space["global_batch_size"])]
    smallest, largest = min(sizes), max(sizes)
    if smallest == largest:
        smallest, largest = max(1, smallest // 2), max(2, largest)
    return smallest, largest


class Probe:
    """Runs models without numbers in one setting after another, in one process.

    All settings have one compiler, so that a layer that several of them have is traced once.

    Args:
        task: The task that trains the model.
        config: The whole model's configuration.
        folder: The prepared folder whose longest examples are meant, see `model_memory`.
        by_muon: Whether Muon may be the optimizer.
        eval_tokens: As of `TrainerTask.evaluation_tokens`; None: evaluations run compiled.
    """

    def __init__(
        self,
        task: TrainerTask,
        config: PreTrainedConfig,
        folder: PreparedFolder | None = None,
        *,
        by_muon: bool = False,
        eval_tokens: int | None = None,
    ) -> None:
        self._eval_tokens, self._by_muon = eval_tokens, by_muon
        self._task, self._config, self._folder = task, config, folder
        self._live = LiveMemory(task.masks_attention, time.process_time() + MOST_CPU_S)
        self._compile: Callable[..., Any] | None = None
        self._traced = 0  # forward and backward passes that the compiler has traced so far
        self._weights: dict[tuple[Any, ...], _Weights] = {}

    def measure(self, share: Share, configs: Sequence[PreTrainedConfig]) -> "Measured":
        """Return what the share's passes of each of these models have taken."""
        found = []
        for config in configs:
            before = self._traced
            passes = self.passes(config, share)
            if self._traced > before and config is not self._config:
                # Tracing leaves a few kibibytes behind, which would break the rule by layers.
                passes = self.passes(config, share)
            found.append(passes)
        # Evaluations have needed the whole model's weights, so that these cost nothing here.
        weights = self._weights_of(share.settings) if share.eval_sizes else None
        return Measured(share.settings, tuple(found), weights)

    def passes(self, config: PreTrainedConfig, share: Share) -> Passes:
        """Return what the share's passes of a model have taken."""
        settings = share.settings
        compiles = _compiles(self._task, settings)
        compiler = self._compiler() if self._needs_compiler(settings) else None
        with as_on_a_gpu(compiler):
            model = _model(self._task, config, settings)
            if compiles:
                from accelerate.utils.other import compile_regions_deepspeed

                # Compile layer by layer, as accelerate does where `train.optim.arguments` asks for
                # it.
                compile_regions_deepspeed(model)
            moments = {size: self._moments(model, size, compiles) for size in share.sizes}
            model.eval()
            evaluations = {
                size: self._evaluation_bytes(model, size, settings) for size in share.eval_sizes
            }
        trained = sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
        return Passes(trained, moments, evaluations)

    def _needs_compiler(self, settings: dict[str, Any]) -> bool:
        fused = settings["output_layer"] not in (None, "standard")
        flexible = settings["attention_implementation"] == "flex_attention"
        return fused or flexible or _compiles(self._task, settings)

    def _compiler(self) -> Callable[..., Any]:
        """Return the one replacement of `torch.compile`, whose traces later settings find again."""
        if self._compile is None:
            # A process otherwise compiles at most eight versions of one function's code and runs
            # the ninth uncompiled.
            config = torch._dynamo.config  # type: ignore[attr-defined]
            config.recompile_limit = config.accumulated_recompile_limit = _MOST_COMPILED
            config.fail_on_recompile_limit_hit = True
            self._compile = tracing_compiler(self._live, self._note_trace)
        return self._compile

    def _note_trace(self) -> None:
        self._traced += 1

    def _moments(self, model: Any, size: int, compiles: bool) -> tuple[Moment, ...]:
        """Return the moments of a forward and a backward pass of a micro batch."""
        live = self._live
        live.begin(itertools.chain(model.parameters(), model.buffers()))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hooks = [
            parameter.register_post_accumulate_grad_hook(live.gradient_is_made)
            for parameter in trained
        ]
        with live:
            model.train()
            self._task.largest_loss(model, size, compiles, self._folder).backward()
            moments = live.moments
            for parameter in trained:
                parameter.grad = None
        for hook in hooks:
            hook.remove()
        return moments

    def _evaluation_bytes(self, model: Any, size: int, settings: Settings) -> int:
        """Return the most bytes of activations at once in an evaluation's forward pass."""
        self._live.begin(itertools.chain(model.parameters(), model.buffers()))
        stance = evaluation_stance(
            self._weights_of(settings).parameters,
            self._eval_tokens,
            self._task.workload.evaluations,
            settings["attention_implementation"],
        )
        with stance, self._live, torch.no_grad():
            self._task.largest_evaluation(model, size, self._folder)
        return self._live.peak_bytes

    def _weights_of(self, settings: dict[str, Any]) -> "_Weights":
        """Return the whole model's weights; settings that have the same ones share them.

        A fused output layer has the weights of the layer that it replaces.
        """
        key = settings["float8"], settings["lora_rank"]
        if key not in self._weights:
            self._weights[key] = _Weights.of(
                _model(self._task, self._config, settings), self._by_muon
            )
        return self._weights[key]


@dataclass(frozen=True)
class _Weights:
    """The numbers and bytes of a whole model's parameters and buffers, see MemoryProfile."""

    parameters: int
    trained: int
    largest: int
    smallest_side: int
    hidden: int
    muon_step_bytes: int
    buffer_bytes: int

    @classmethod
    def of(cls, model: Any, by_muon: bool) -> "_Weights":
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        matrices = muon.hidden_matrices(model) if by_muon else []
        hidden = [torch.empty(matrix.shape, device="meta") for matrix in matrices]
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained=sum(trained),
            largest=max(trained),
            smallest_side=_smallest_side(model),
            hidden=sum(matrix.numel() for matrix in hidden),
            muon_step_bytes=muon_step_bytes(hidden) if hidden else 0,
            buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        )


@dataclass(frozen=True)
class Measured:
    """The memory that passes in one combination of settings have taken.

    Args:
        settings: The combination.
        passes: The passes of each of the models that ran.
        weights: Those of the whole model. None: not needed by these passes.
    """

    settings: Settings
    passes: tuple[Passes, ...]
    weights: _Weights | None

    def joined(self, other: "Measured") -> "Measured":
        """Return these passes and further ones of the same models in the same settings."""
        pairs = zip(self.passes, other.passes, strict=True)
        return Measured(
            self.settings,
            tuple(ours.joined(theirs) for ours, theirs in pairs),
            self.weights or other.weights,
        )

    @property
    def weights_of_whole(self) -> _Weights:
        """The whole model's weights, which are known once evaluations have run."""
        assert self.weights is not None
        return self.weights

    def profile(self, activations: Sequence[Activations]) -> MemoryProfile:
        """Return the memory of the whole model, whose activations are given."""
        weights = self.weights_of_whole
        return MemoryProfile(
            settings=self.settings,
            parameters=weights.parameters,
            trained_parameters=weights.trained,
            largest_parameter=weights.largest,
            smallest_side=weights.smallest_side,
            hidden_parameters=weights.hidden,
            muon_step_bytes=weights.muon_step_bytes,
            buffer_bytes=weights.buffer_bytes,
            activations=tuple(activations),
        )


def _smallest_side(model: Any) -> int:
    """Return the fewest rows or columns of a matrix that has low-rank adapters; 0: none has any."""
    sides = []
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            sides.append(parameter.shape[1])
        elif ".lora_B." in name:
            sides.append(parameter.shape[0])
    return min(sides, default=0)


def _model(task: TrainerTask, config: PreTrainedConfig, settings: dict[str, Any]) -> Any:
    """Make the model on the meta device as `training_loop.train` and DeepSpeed's engine would."""
    kind, workload, given = task.model_kind, task.workload, task.workload.training_arguments
    checkpointing = bool(_setting(task, settings, "gradient_checkpointing"))
    with torch.device("meta"):
        attention, trusted = settings["attention_implementation"], workload.model.trust_remote_code
        model = models.random_model(kind, config, attention, trusted)
        if settings["output_layer"] not in (None, "standard"):
            models.fuse_output_layer(model, str(settings["output_layer"]), compiled=True)
        if settings["float8"] not in (None, "none"):
            train_in_float8(model, str(settings["float8"]))
        if settings["lora_rank"]:
            model = models.with_lora(kind, model, int(settings["lora_rank"]), checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable(given.get("gradient_checkpointing_kwargs"))
    if (dtype := _HALF.get(settings["precision"])) is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    model.config.use_cache = False
    return model


def _import_for(task: TrainerTask, config: PreTrainedConfig, settings: list[Settings]) -> None:
    """Import what models in these settings import, 0.7 s, so that no fork has to do it again."""
    if any(_compiles(task, each) for each in settings):
        importlib.import_module("torch._inductor.compile_fx")
    _model(task, config, settings[-1])


def _compiles(task: TrainerTask, settings: Settings) -> bool:
    """Return whether the model's layers are compiled."""
    return bool(_setting(task, settings, "torch_compile"))


def _setting(task: TrainerTask, settings: dict[str, Any], name: str) -> Any:
    """Return an on/off dimension's value, which may stand in `training_arguments` instead."""
    value = settings[name]
    given = task.workload.training_arguments
    return any(map(given.get, DIMENSIONS[name].arguments)) if value is None else value


def expected_memory(spec: MemorySpec, processes: int = 1) -> ModelMemory:
    """Return the memory that a study's model needs, before anything is prepared.

    Args:
        spec: The study's model and space.
        processes: As of `model_memory`.

    Raises:
        BadInput: There can be no estimate.
        CarbonoptError: A fork died.
    """
    task = task_for(spec.workload)
    if not isinstance(task, TrainerTask):
        raise BadInput(f"what the task {task.workload.task} trains is not known")
    config, eval_batch_size = task.expected_config(), task.workload.eval_batch_size_per_gpu
    if eval_batch_size is None and spec.gpu_memory_bytes is not None:
        eval_batch_size = task.eval_batch_size(config, spec.gpu_memory_bytes)
    eval_tokens = task.evaluation_tokens(_USUAL_EVAL_TOKENS // (task.workload.sequence_length or 1))
    return model_memory(
        task,
        config,
        spec.space,
        spec.world_size,
        eval_batch_size,
        eval_tokens=eval_tokens,
        processes=processes,
    )


def answer(question: str) -> str:
    """Return a MemoryAnswer to a MemorySpec, both in JSON.

    Forks of this process, one for each core, do the work: nothing but imports may have run here.
    """
    spec = MemorySpec.model_validate_json(question)
    try:
        answer = MemoryAnswer(memory=expected_memory(spec, processes()))
    except (CarbonoptError, OSError) as error:
        answer = MemoryAnswer(why_none=reason(error))
    return answer.model_dump_json()
