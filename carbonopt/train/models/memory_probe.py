"""Estimate the GPU memory that training a model needs, without a GPU.

A forward and a backward pass run on tensors that have shapes but no numbers (torch's meta device).
Autograd keeps and frees them as it does on a GPU.
"""

import functools
import importlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
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
from carbonopt.train.models.layer_extrapolation import by_layers, few_and_more
from carbonopt.train.models.live_memory import MOST_CPU_S, LiveMemory, no_autocast
from carbonopt.train.models.memory_shares import Passes, Settings, Share, divided
from carbonopt.train.optim import muon
from carbonopt.train.speed.float8_layers import train_in_float8
from carbonopt.train.speed.small_evaluations import evaluation_stance
from carbonopt.train.tasks.task import SMALLEST_EVAL_BATCH, task_for
from carbonopt.train.tasks.trainer_task import TrainerTask

_ELEMENTS = 2**20  # size of the parameter on which an optimizer is tried
# Tokens of an evaluation, where no data is prepared; they decide whether it runs compiled.
_USUAL_EVAL_TOKENS = 100_000
_MOST_COMPILED = 10_000  # versions of a function's code, more than a study has settings
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CROSS_ENTROPY = F.cross_entropy
# Fields of ModelMemory, and the settings of DeepSpeed that they are taken from.
_ZERO_KEYS = {
    "reduce_bucket_elements": "reduce_bucket_size",
    "live_parameters": "stage3_max_live_parameters",
    "overlapped": "overlap_comm",
}
# Errors raised by running a model without numbers, where its code or a library's looks at numbers
# or needs a device.
_UNRUNNABLE = (
    ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError,
    AssertionError, ImportError, ZeroDivisionError,
)  # fmt: skip
# Dimensions whose values some models can't be made with.
_MAKING = ("attention_implementation", "output_layer", "float8", "lora_rank")


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention as `scaled_dot_product_attention` does on a GPU, by a fused kernel.

    Fused kernels keep no scores, whereas the meta device has only the implementation that keeps
    them. Flash attention takes half precision without a mask; the memory-efficient kernel takes
    anything but a mask whose last dimension is not contiguous. A boolean mask becomes one that is
    added.

    Raises:
        RuntimeError: The real one can't have tensors of these shapes.
    """
    _check_shapes(query, key, value, attn_mask, enable_gqa)
    operations = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is None and query.dtype in _HALF.values():
        flash = operations._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        return _unfused_attention(query, key, value, attn_mask, dropout_p, scale)
    efficient = operations._scaled_dot_product_efficient_attention
    attended = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    return attended[0]  # type: ignore[no-any-return]


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> None:
    """Raise RuntimeError for shapes that attention can't have; kernels without numbers take any."""
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    batches = [shape[:-2] for shape in shapes]
    if enable_gqa:
        heads, *others = (batch[-1] for batch in batches)
        if others[0] != others[1] or heads % others[0]:
            raise RuntimeError(f"{heads} query heads can't share {others[0]} key and value heads")
        batches = [batch[:-1] for batch in batches]
    try:
        torch.broadcast_shapes(*batches)
        scores = (*batches[0], *shapes[0][len(batches[0]) : -1], shapes[1][-2])
        if mask is not None:
            torch.broadcast_shapes(mask.shape, scores)
        fit = shapes[0][-1] == shapes[1][-1] and shapes[1][-2] == shapes[2][-2]
    except RuntimeError:
        fit = False
    if not fit:
        raise RuntimeError(f"attention can't have query, key and value of the shapes {shapes}")


def _unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float, scale: float | None
) -> Tensor:
    """Compute attention in float32 without a fused kernel.

    Follows `_scaled_dot_product_attention_math` in aten/src/ATen/native/transformers/attention.cpp.
    """
    each = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (query.float() * each) @ (key.float().transpose(-2, -1) * each)
    weights = torch.ops.aten._safe_softmax(scores.add_(mask), -1)
    attended: Tensor = _dropout(weights, dropout_p, training=True) @ value.float()
    return attended.to(query.dtype)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout as a GPU does, where the mask that is kept has one byte per element."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _cross_entropy(input: Tensor, target: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Compute the cross entropy by the operation that has a gradient.

    torch 2.13's compiler doesn't find that operation on the meta device.
    """
    if input.dim() != 2 or arguments or options.keys() - {"reduction", "ignore_index"}:
        return _CROSS_ENTROPY(input, target, *arguments, **options)
    reduction = ("none", "mean", "sum").index(options.get("reduction", "mean"))
    nll_loss, ignored = torch.ops.aten.nll_loss_forward, options.get("ignore_index", -100)
    loss: torch.Tensor = nll_loss(F.log_softmax(input, -1), target, None, reduction, ignored)[0]
    return loss


def _compiled(live: LiveMemory, traced: Callable[[], None]) -> Callable[..., Any]:
    """Return a replacement of `torch.compile` that makes no kernels.

    It keeps the compiler's own division between forward and backward pass, which decides what is
    kept and what is recomputed.

    Args:
        live: Counts what the compiled functions keep.
        traced: Is called for each forward or backward pass that has been traced.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def kernels(graph: Any, inputs: Any) -> Any:
        traced()

        def run(arguments: list[Any]) -> Any:
            with live.one_kernel():
                given = tuple(arguments)
                arguments.clear()
                return graph(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=kernels,
        bw_compiler=kernels,
        inference_compiler=kernels,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    own = torch.compile
    return lambda function, **options: own(function, backend=backend, dynamic=False)


@contextmanager
def _as_on_a_gpu(compile_: Callable[..., Any] | None) -> Iterator[None]:
    """Replace what torch does otherwise on the meta device than on a GPU.

    Args:
        compile_: The replacement of `torch.compile`; None: nothing is compiled.
    """
    places: tuple[tuple[Any, str, Any], ...] = (
        (F, "scaled_dot_product_attention", _attention),
        (F, "dropout", _dropout),
        (F, "cross_entropy", _cross_entropy),
        *([(torch, "compile", compile_)] if compile_ is not None else []),
    )
    own = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        with no_autocast():
            yield
    finally:
        for (module, name, _), function in zip(places, own, strict=True):
            setattr(module, name, function)


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
    states, in_step = _optimizer_bytes(task.workload.training_arguments)
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
            with refused(sentence, *_UNRUNNABLE):
                probe = Probe(task, config, folder, by_muon=by_muon, eval_tokens=eval_tokens)
                return [probe.measure(share, configs) for share in part]

        parts = divided(shares, processes, lambda settings: _compiles(task, settings))
        if len(parts) > 1:
            with refused(sentence, *_UNRUNNABLE):
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
        except _UNRUNNABLE as error:
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
        with _as_on_a_gpu(compiler):
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
            self._compile = _compiled(self._live, self._note_trace)
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
            muon_step_bytes=_muon_step_bytes(hidden) if hidden else 0,
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


def _optimizer_bytes(given: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes per parameter of the Trainer's optimizer: its states, and its step's extra.

    Raises:
        BadInput: The optimizer can't be made without a GPU.
    """
    chosen = {key: value for key, value in given.items() if key in ("optim", "optim_args")}
    name = chosen.get("optim", "adamw_torch_fused")
    sentence = f"the optimizer {name} can't be made without a GPU ({{}})"
    with refused(sentence, *_UNRUNNABLE):
        kind, options = _optimizer(chosen)
        fused = options.pop("fused", False)
        weights = torch.nn.Parameter(torch.empty(_ELEMENTS, device="meta"))
        # On a GPU torch's own optimizers take all parameters at once by default, for which they
        # make copies; fused ones don't.
        together = (
            {"foreach": True} if kind.__module__.startswith("torch.optim") and not fused else {}
        )
        optimizer = kind([weights], **options, **together)
        weights.grad = torch.empty_like(weights)
        optimizer.step()
        states = [
            value for value in tree_leaves(dict(optimizer.state)) if isinstance(value, Tensor)
        ]
        live = LiveMemory()
        live.begin((weights, weights.grad, *states))
        with live:
            optimizer.step()
    return sum(state.nbytes for state in states) / _ELEMENTS, (
        0.0 if fused else live.peak_bytes / _ELEMENTS
    )


def _optimizer(chosen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class and the options of the Trainer's optimizer.

    Args:
        chosen: The training arguments that choose it.
    """
    if not chosen:  # adamw_torch_fused; importing the Trainer takes half a second
        return torch.optim.AdamW, {"fused": True}
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused",
        report_to="none",
        use_cpu=True,
        **{"optim": "adamw_torch_fused"} | chosen,
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return kind, options


def _muon_step_bytes(matrices: list[Tensor]) -> int:
    """Return the bytes that a Muon step needs beside the matrices, their gradients and momenta."""
    gradients, momenta = ([torch.empty_like(matrix) for matrix in matrices] for _ in range(2))
    live = LiveMemory()
    live.begin((*matrices, *gradients, *momenta))
    with live:
        muon.step(matrices, gradients, momenta, torch.zeros((), device="meta"), weight_decay=0.1)
    return live.peak_bytes


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
