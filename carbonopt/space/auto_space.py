"""The rules that choose the search space of `search: {space: auto}`.

They go by what is known of the task, the model, the data and the GPUs, and were published or
measured. The same facts give the same space.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from carbonopt.core.dimensions import DIMENSION_NAMES, STABLE_DECAY
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.spec.auto_facts import AutoSpace, Draft, Facts
from carbonopt.spec.space_settings import Range

# tokens a parameter that reach a loss with the least compute: Hoffmann et al. 2022, arXiv
# 2203.15556
_TOKENS_A_PARAMETER = 20
# Train on up to so many times those tokens: a small model that is trained for longer is the cheaper
# one to train on.
_PAST_IT = 4
# More passes over the same tokens give little (Muennighoff et al. 2023, arXiv 2305.16264).
_MOST_PASSES = 16
_FEWEST_PASSES = 1 / 16  # fewest passes ÷ most passes
# BERT's authors advise up to 4 passes for fine-tuning (Devlin et al. 2018, arXiv 1810.04805).
_TUNING_PASSES = (
    0.25,
    4.0,
)
# From a quarter of the smallest rate that BERT's authors advise (2e-5) to twice the largest (5e-5),
# which is for large models.
_TUNING_RATES = (5e-6, 1e-4)
# LoRA's best learning rate ÷ that of all weights: Schulman et al. 2025,
# thinkingmachines.ai/blog/lora
_LORA_RATE = 10.0
# DPO's learning rate ÷ that of fine-tuning: 5e-7 to 1e-6 for 7B models (arXiv 2305.18290,
# 2310.16944)
_PREFERENCE_RATE = 0.1
# The range reaches from the law's rates ÷ 3 to those × 3: Step Law was fitted on larger models and
# data, and Muon shares the range.
_AROUND_THE_LAW = 3.0
# Parameters of the smallest models that Step Law was fitted on; for ours of 4 million it gives 3
# times the best rate.
_FITTED_FROM = 60_000_000
_LEAST_SPAN = 10.0  # a decade at least: for a tiny model the law's rates are above the highest
_HIGHEST_RATE = 0.03  # Adam's steps are then about as large as transformers' initial weights (0.02)
# A decade on each side of Adam's own 1e-3 (Kingma & Ba 2015, arXiv 1412.6980).
_UNKNOWN_RATES = (1e-4, 1e-2)
# Bytes a parameter of bf16 training with Adam: 2 + 2 + 12 (Rajbhandari et al. 2020, arXiv
# 1910.02054).
_STATE_BYTES = 16
_WEIGHT_BYTES = 2  # bytes of the weight in bf16; the gradient has as many
# Bytes of activations for each layer, token and unit of width, with attention scores not kept:
# Korthikanti et al. 2022, arXiv 2205.05198.
_LAYER_BYTES = 34
_LOGIT_BYTES = 10  # for each token and vocabulary entry: bf16, and its float32 copy and gradient
_PLANNED_SHARE = 0.8  # share of a GPU's memory that may be planned for; these are rough numbers
# GPT-2 124M on an H200: 2.2 mJ for 6 × 124M FLOP a token (reports/performance.md)
_JOULES_A_FLOP = 3e-12
# Runs that need less don't compile: that took 1.1 to 3.8 kJ on an H100 and an H200, and saves a
# third to two fifths.
_COMPILES_FROM_J = 3_000
# from here on the fused output layer is worth it, as it spares the logits
_LARGE_VOCABULARY = 16_384
# Parameters from which on float8 is tried: OPT-1.3B takes 6 % less energy so, Llama 7B a fifth less
# (reports/real-sizes.md).
_FLOAT8_FROM = 1_000_000_000
_FILLS_A_GPU = 4096  # tokens in a micro batch (steps are expensive below: reports/performance.md)
_FEWEST_STEPS = 8  # steps in an epoch
_RANKS = (16, 64)  # LoRA's ranks: small data needs no higher ones (Schulman et al. 2025)
_WITH_OUTPUT_LAYER = ("causal_lm", "sft")


def best_learning_rate(parameters: float, tokens: float) -> float:
    """Return the best learning rate of training from random weights on so many tokens.

    This is Step Law (Li et al. 2025, arXiv 2503.04715).
    """
    return float(1.79 * parameters**-0.713 * tokens**0.307)


def best_batch_tokens(tokens: float) -> float:
    """Return the best tokens of a global batch, for training from random weights, by Step Law."""
    return float(0.58 * tokens**0.571)


def choose(facts: Facts) -> AutoSpace:
    """Return the space, its start, and the reasons for both."""
    draft = Draft(facts)
    passes = _choose_length(draft)
    sizes = _choose_batch(draft, passes)
    _choose_rate(draft, passes)
    stages = _choose_stage(draft)
    draft.leave("world_size", "a trial has all ranks that the launch has for it")
    draft.leave("learning_rate_scaling", "all trials have as many ranks")
    _choose_memory(draft, sizes, stages)
    _choose_optimizer(draft, stages)
    _choose_regularization(draft, passes)
    _choose_schedule(draft)
    _choose_kernels(draft, passes, stages)
    _choose_task(draft)
    return draft.finished()


def advised(facts: Facts) -> dict[str, float]:
    """Return the batch size and the learning rate that the literature advises, by dimension.

    The result is empty where the literature advises none: for random weights with fewer parameters
    than Step Law was fitted on, and for `rlhf`, whose rates depend on the reward.
    """
    unknown = facts.kind == "scratch" and (
        (facts.parameters or 0) < _FITTED_FROM or not facts.train_tokens
    )
    if unknown or facts.task == "rlhf":
        return {}
    start = choose(facts).start
    return {
        name: float(start[name]) for name in ("global_batch_size", "learning_rate") if name in start
    }


# The extremes of what a preparation can find: models, data sets and GPUs.
_MODELS: tuple[dict[str, Any], ...] = (
    {"parameters": 10**4, "layers": 1, "width": 16, "vocab_size": 50},
    {"parameters": 5 * 10**8, "layers": 24, "width": 1024, "vocab_size": 10**5},
    {"parameters": 10**12, "layers": 100, "width": 10**4, "vocab_size": 10**6},
)
_DATA: tuple[dict[str, Any], ...] = tuple(
    {"train_examples": tokens // 100, "train_tokens": tokens} for tokens in (10**4, 10**7, 10**13)
)
_GPUS: tuple[dict[str, Any], ...] = (
    {"gpu_memory_gib": 16.0, "has_bf16": False},
    {"gpu_memory_gib": 141.0, "has_float8": True},
)


def known_before(facts: Facts) -> frozenset[str]:
    """Return the dimensions that are chosen, or left out, alike whatever the preparation finds."""

    def decided(auto: AutoSpace, name: str) -> tuple[Any, ...]:
        return auto.space[name], auto.why.get(name), auto.left_out.get(name)

    ends = product(_MODELS, _DATA, _GPUS)
    spaces = [choose(facts.model_copy(update=model | data | gpus)) for model, data, gpus in ends]
    return frozenset(
        name
        for name in DIMENSION_NAMES
        if all(decided(auto, name) == decided(spaces[0], name) for auto in spaces)
    )


Passes = tuple[float, ...]  # numbers of passes over the training data, rising


def _choose_length(draft: Draft) -> Passes:
    facts = draft.facts
    if facts.kind != "scratch":
        least, most = _TUNING_PASSES
        why = (
            "fine-tuning takes few passes: BERT's authors advise 2 to 4 (arXiv 1810.04805), and"
            " fewer are cheaper"
        )
    else:
        most, why = (
            _MOST_PASSES,
            f"from {_MOST_PASSES} passes on more give little (arXiv 2305.16264)",
        )
        if facts.parameters and facts.train_tokens:
            enough = _PAST_IT * _TOKENS_A_PARAMETER * facts.parameters / facts.train_tokens
            if enough < most:
                most = enough
                why = (
                    f"{_PAST_IT} times the {_TOKENS_A_PARAMETER} tokens a parameter of arXiv"
                    " 2203.15556 end there"
                )
        least = most * _FEWEST_PASSES
    passes = tuple(_half_octaves(least, most))
    draft.take("epochs", passes, why, start=_middle(passes))
    return passes


def _choose_batch(draft: Draft, passes: Passes) -> tuple[int, ...]:
    """Choose the global batch sizes, and return them for each rank."""
    facts = draft.facts
    start = 32.0
    if facts.kind == "scratch" and facts.train_tokens and facts.tokens_per_example:
        low, mid, high = (
            best_batch_tokens(facts.train_tokens * count) / facts.tokens_per_example
            for count in (passes[0], _middle(passes), passes[-1])
        )
        sizes, start = _octaves(low, 2 * high), mid
        why = (
            f"Step Law (arXiv 2503.04715): 0.58 D^0.571 tokens, which is {low:.3g} to {high:.3g}"
            " examples for the shortest to the longest run; and twice that, which fills a GPU"
            " better"
        )
    elif facts.kind == "scratch":
        sizes, why = (
            _octaves(16, 128),
            "no law is known for such examples: around 32 (arXiv 1804.07612)",
        )
    elif facts.kind == "full":
        sizes, why = (
            _octaves(8, 64),
            "around 16 and 32, which BERT's authors advise (arXiv 1810.04805)",
        )
    else:
        sizes, start = _octaves(4, 32), 16.0
        why = (
            "LoRA bears large batches less well than all weights do (thinkingmachines.ai/blog/lora)"
        )
    ranks = facts.world_size
    most = (facts.train_examples or math.inf) / _FEWEST_STEPS
    if sizes[-1] > most:
        why += f"; none above 1/{_FEWEST_STEPS} of the examples"
    each = tuple(sorted({max(1, _octave(size / ranks)) for size in sizes if size <= most})) or (1,)
    draft.take(
        "global_batch_size",
        tuple(size * ranks for size in each),
        why,
        start=ranks * min(each, key=lambda size: abs(math.log(size * ranks / start))),
    )
    return each


def _choose_rate(draft: Draft, passes: Passes) -> None:
    facts = draft.facts
    law = None
    if facts.parameters and facts.train_tokens:
        law = [
            best_learning_rate(facts.parameters, facts.train_tokens * count)
            for count in (passes[0], _middle(passes), passes[-1])
        ]
    if facts.kind == "scratch" and law is not None:
        low, high = law[0] / _AROUND_THE_LAW, law[2] * _AROUND_THE_LAW
        why = (
            f"Step Law (arXiv 2503.04715): 1.79 N^-0.713 D^0.307, which is {law[0]:.2g} to"
            f" {law[2]:.2g}; a third to three times that, since it was fitted on larger models"
        )
    elif facts.kind == "scratch":
        (low, high), why = (
            _UNKNOWN_RATES,
            "no law is known for such examples: around Adam's 1e-3 (arXiv 1412.6980)",
        )
    else:
        low, high = _TUNING_RATES[0], max(_TUNING_RATES[1], law[2] if law else 0.0)
        why = (
            "from below the 2e-5 of BERT's authors (arXiv 1810.04805) to that of training from"
            " random weights"
        )
        if facts.kind == "lora":
            low, high = low * _LORA_RATE, high * _LORA_RATE
            why += ", both times 10 for LoRA (thinkingmachines.ai/blog/lora)"
        if facts.task == "dpo":
            low, high = low * _PREFERENCE_RATE, high * _PREFERENCE_RATE
            why += ", a tenth of that for preferences (arXiv 2305.18290)"
    if high > _HIGHEST_RATE:
        high, why = (
            _HIGHEST_RATE,
            (
                f"{why}; none above {_HIGHEST_RATE:g}, the size of random weights, and a decade at"
                " least"
            ),
        )
    low = min(low, high / _LEAST_SPAN)
    start = (
        min(law[1], high / _AROUND_THE_LAW)
        if facts.kind == "scratch" and law
        else math.sqrt(low * high)
    )
    low, high, start = (_rounded(rate) for rate in (low, high, start))
    draft.take("learning_rate", Range(low=low, high=high, log=True), why, start=start)


def _choose_stage(draft: Draft) -> tuple[int, ...]:
    """Choose the least ZeRO stage and offload that memory needs, and return the stages."""
    facts = draft.facts
    ranks, memory = facts.world_size, _memory(facts)
    weights = facts.parameters or 0
    trained = _STATE_BYTES - _WEIGHT_BYTES  # gradients and optimizer states of a weight
    if facts.kind == "lora":
        trained = 0  # the few trained parameters have next to none
    # Bytes of weights, gradients and states. ZeRO 1 divides only the states among the ranks, 3 all
    # of them.
    need = {
        0: weights * (_WEIGHT_BYTES + trained),
        1: weights * (2 * _WEIGHT_BYTES + (trained - _WEIGHT_BYTES) / ranks),
        2: weights * (_WEIGHT_BYTES + trained / ranks),
        3: weights * (_WEIGHT_BYTES + trained) / ranks,
    }
    fitting = [
        stage for stage, bytes_ in need.items() if bytes_ <= memory and (ranks > 1 or stage == 0)
    ]
    if 0 in fitting:
        draft.leave(
            "offload",
            "weights and optimizer fit where they are" if facts.on_gpu else "there is no GPU",
        )
        if ranks == 1:
            draft.take(
                "zero_stage",
                0,
                "with one rank there is nothing to divide, and ZeRO's own work costs energy",
            )
            return (0,)
        draft.take(
            "zero_stage",
            (0, 1, 2),
            "all fit; 3 moves weights between the ranks in every pass, for nothing",
        )
        return (0, 1, 2)
    if fitting:
        draft.leave("offload", "weights and optimizer fit, divided among the GPUs")
        draft.take(
            "zero_stage",
            fitting,
            "whole weights and optimizer do not fit into a GPU (arXiv 1910.02054)",
        )
        return tuple(fitting)
    if weights * _WEIGHT_BYTES * (1 + 1 / ranks) <= memory:
        draft.take("zero_stage", 2, "the least whose optimizer can be offloaded with its gradients")
        draft.take("offload", "optimizer", "weights fit into the GPUs, but the optimizer does not")
        return (2,)
    draft.take("zero_stage", 3, "the only one that offloads weights")
    draft.take("offload", "parameters", "the weights alone do not fit into the GPUs")
    return (3,)


def _choose_memory(draft: Draft, sizes: Sequence[int], stages: Sequence[int]) -> None:
    """Choose the micro batch and gradient checkpointing.

    Both depend on how many examples fit into memory beside the weights and the optimizer.
    """
    facts = draft.facts
    if not facts.on_gpu:
        draft.leave("micro_batch_size_per_gpu", "a CPU's memory holds whole batches")
        return draft.leave(
            "gradient_checkpointing", "computing again what memory has room for costs energy"
        )
    per_example = _activation_bytes(facts)
    each = _WEIGHT_BYTES if facts.kind == "lora" else _STATE_BYTES
    held = (facts.parameters or 0) * each / (1 if 0 in stages else facts.world_size)
    free = max(_memory(facts) - held, _memory(facts) / 4)
    fitting = free / per_example if per_example else math.inf
    tokens = fitting * (facts.tokens_per_example or math.inf)
    if tokens < _FILLS_A_GPU:
        on_off = (True,) if fitting < 1 else (False, True)
        draft.take("gradient_checkpointing", on_off, "few examples fit at once otherwise")
    else:
        draft.leave(
            "gradient_checkpointing",
            "enough examples fit at once; to compute again costs a fifth more",
        )
    if fitting >= max(sizes):
        return draft.leave(
            "micro_batch_size_per_gpu", "whole batches fit, and in pieces a step is dearer"
        )
    most = _octave_below(fitting)
    values = tuple(
        sorted(
            {min(size, most) for size in sizes} | {min(size, max(1, most // 2)) for size in sizes}
        )
    )
    why = f"by an estimate {most} examples fit at once; a step is the cheaper the more there are"
    return draft.take("micro_batch_size_per_gpu", values, why, start=_start_of(draft, values))


def _start_of(draft: Draft, micro_batches: Sequence[int]) -> int:
    batch = int(draft.start.get("global_batch_size", 0))
    if not batch:
        batch = int(draft.domains["global_batch_size"].value)  # type: ignore[union-attr]
    return max(size for size in micro_batches if batch % (size * draft.facts.world_size) == 0)


def _choose_optimizer(draft: Draft, stages: Sequence[int]) -> None:
    facts = draft.facts
    if facts.kind == "full":
        why = (
            "Muon makes full fine-tuning of weights worse that Adam has trained (arXiv 2605.10468):"
            " AdamW"
        )
        return draft.leave("optimizer", why)
    if 0 not in stages:
        return draft.leave("optimizer", "Muon needs ZeRO 0, for which there is no memory: AdamW")
    if "offload" in draft.domains:
        return draft.leave("optimizer", "an offloaded optimizer is AdamW")
    why = (
        "Muon needs 0.7 of the steps from random weights at 0.1 billion parameters (arXiv"
        " 2509.02046)"
    )
    if facts.kind == "lora":
        why = "Muon trains adapters as well as AdamW does (arXiv 2605.10468)"
    return draft.take("optimizer", ("adamw", "muon"), why)


def _choose_regularization(draft: Draft, passes: Passes) -> None:
    if draft.facts.kind != "scratch":
        draft.take(
            "dropout",
            0.0,
            "few passes over the data need none, and learn faster (arXiv 2505.24788)",
        )
        return draft.leave("weight_decay", "0, as the libraries have it: few passes over the data")
    draft.take(
        "weight_decay",
        0.1,
        "as GPT-3 (arXiv 2005.14165), Step Law and Muon (arXiv 2502.16982) have it",
    )
    if passes[-1] <= 1:
        return draft.take("dropout", 0.0, "data that is seen once needs none (arXiv 2505.24788)")
    return draft.take(
        "dropout", (0.0, 0.05, 0.1, 0.2), "the more passes over the same data, the more helps"
    )


def _choose_schedule(draft: Draft) -> None:
    facts = draft.facts
    if "lr_scheduler_kwargs" in facts.given:
        draft.leave("lr_scheduler", "workload.training_arguments gives lr_scheduler_kwargs")
    elif facts.kind == "scratch":
        why = "down to zero (arXiv 2502.15938), or late and steeply (arXiv 2405.18392)"
        draft.take("lr_scheduler", ("linear", STABLE_DECAY), why)
    else:
        draft.take("lr_scheduler", "linear", "down to zero (arXiv 2502.15938)")
    draft.leave(
        "weight_averaging", "beside a rate that decays it gave nothing (reports/performance.md)"
    )
    draft.leave("decay_ratio", "0.2: a longer decay gains little (arXiv 2405.18392)")
    if facts.kind == "scratch":
        draft.take("warmup_ratio", 0.05, "short runs need a short one")
    else:
        draft.take("warmup_ratio", 0.06, "as RoBERTa was tuned (arXiv 1907.11692)")


def _choose_kernels(draft: Draft, passes: Passes, stages: Sequence[int]) -> None:
    facts = draft.facts
    draft.leave(
        "attention_implementation",
        "PyTorch's own needs no other package, and is the libraries' choice",
    )
    if facts.kind == "lora":
        draft.take(
            "lora_rank",
            _RANKS,
            "adapters on all layers learn small data as all weights do, for less",
        )
    elif facts.pretrained:
        why = "all weights of a model below a billion parameters are trained"
        draft.leave("lora_rank", facts.lacking.get("lora_rank", why))
    else:
        draft.leave("lora_rank", "random weights can't be adapted")
    if not facts.on_gpu:
        draft.leave("precision", "a CPU trains in float32")
        draft.leave("torch_compile", "compiling takes longer on a CPU than it saves in such runs")
        draft.leave("float8", "there is no GPU")
        return draft.leave("output_layer", "the fused one pays on GPUs")
    if facts.has_bf16:
        draft.take(
            "precision",
            "bf16",
            "half of float32's memory and a fraction of its energy, with its range",
        )
    else:
        draft.leave("precision", "these GPUs have no bf16, and fp16 skips steps: float32")
    per_token = 4 if facts.kind == "lora" else 6  # frozen weights need no gradients
    flop = per_token * (facts.parameters or 0) * (facts.train_tokens or 0) * passes[-1]
    if flop * _JOULES_A_FLOP < _COMPILES_FROM_J:
        draft.leave("torch_compile", "compiling costs more energy than it would save in one run")
    else:
        draft.take(
            "torch_compile", (False, True), "the longer runs are long enough to pay for compiling"
        )
    if not facts.has_float8:
        draft.leave("float8", "these GPUs have none")
    elif "torch_compile" not in draft.domains:
        draft.leave("float8", "it needs torch_compile in the space")
    elif (facts.parameters or 0) < _FLOAT8_FROM:
        draft.leave("float8", "the layers of a smaller model gain little or nothing")
    elif max(stages) == 3:
        draft.leave("float8", "it can't be used with ZeRO 3")
    else:
        draft.take("float8", ("none", "tensorwise"), "large layers take less energy so")
    if facts.task not in _WITH_OUTPUT_LAYER:
        return draft.leave("output_layer", f"the task {facts.task} has no other")
    if (facts.vocab_size or 0) < _LARGE_VOCABULARY:
        return draft.leave("output_layer", "logits of a small vocabulary are small")
    layers = ("standard", "fused", *(("fused_fp8",) if facts.has_float8 else ()))
    return draft.take("output_layer", layers, "spares the logits of a large vocabulary")


def _choose_task(draft: Draft) -> None:
    draft.take("beta", (0.05, 0.1, 0.3), "around its authors' 0.1 (arXiv 2305.18290)", start=0.1)
    draft.leave("label_smoothing", "0: the pairs are taken to be labelled the right way round")


def _memory(facts: Facts) -> float:
    """Return the bytes of a device that training may use; infinity where they are not known."""
    return (
        math.inf
        if facts.gpu_memory_gib is None
        else _PLANNED_SHARE * facts.gpu_memory_gib * BYTES_PER_GIB
    )


def _activation_bytes(facts: Facts) -> float | None:
    """Return the bytes of an example's activations; None where they are not known."""
    if facts.layers is None or facts.width is None or facts.tokens_per_example is None:
        return None
    of_token = _LAYER_BYTES * facts.layers * facts.width + _LOGIT_BYTES * (facts.vocab_size or 0)
    return facts.tokens_per_example * of_token


def _octave(value: float) -> int:
    """Return the power of two that is nearest to a value, at least 1."""
    return int(2 ** max(0, round(math.log2(max(value, 1)))))


def _octave_below(value: float) -> int:
    return int(2 ** max(0, math.floor(math.log2(max(value, 1)))))


def _octaves(low: float, high: float) -> tuple[int, ...]:
    exponents = range(round(math.log2(_octave(low))), round(math.log2(_octave(high))) + 1)
    return tuple(2**exponent for exponent in exponents)


def _half_octaves(low: float, high: float) -> list[float]:
    """Return powers of two, and these times 1.5, that span about `low` to `high`.

    A run's energy is proportional to its length, so coarser steps would give away a third.
    """
    top = 2.0 ** round(math.log2(high))
    values = [top / 2**octave * part for octave in range(16) for part in (1.0, 0.75)]
    return sorted(
        int(value) if value.is_integer() else value for value in values if value >= low * 0.9
    )


def _middle(passes: Passes) -> float:
    return passes[len(passes) // 2]


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")
