"""`space: auto`: what is chosen from which facts."""

import itertools

import pytest

from carbonopt.core.dimensions import DIMENSION_NAMES
from carbonopt.space.auto_space import (
    advised,
    best_batch_tokens,
    best_learning_rate,
    choose,
    known_before,
)
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.auto_facts import AutoSpace, Facts, known_facts
from carbonopt.spec.space_settings import Choices, Domain, Fixed, Range, values_of
from carbonopt.spec.workload_settings import Workload

CHARACTERS = Facts(  # nanoGPT's model on Tiny Shakespeare, on an H100
    task="causal_lm",
    pretrained=False,
    on_gpu=True,
    gpu_memory_gib=79.2,
    has_float8=True,
    parameters=10_800_000,
    layers=6,
    width=384,
    vocab_size=65,
    train_examples=3921,
    train_tokens=1_003_854,
)
GPT2 = CHARACTERS.model_copy(
    update={
        "parameters": 124_000_000,
        "layers": 12,
        "width": 768,
        "vocab_size": 50_257,
        "train_examples": 20_000,
        "train_tokens": 10_240_000,
    }
)
LARGE = GPT2.model_copy(  # an 8B model
    update={
        "task": "sft",
        "pretrained": True,
        "parameters": 8_000_000_000,
        "layers": 32,
        "width": 4096,
        "vocab_size": 128_256,
    }
)


def of(**changes) -> AutoSpace:
    base = changes.pop("base", CHARACTERS)
    return choose(base.model_copy(update=changes))


def values(auto: AutoSpace, name: str) -> tuple:
    return values_of(auto.space[name])


def test_step_law() -> None:
    assert best_learning_rate(10.8e6, 16e6) == pytest.approx(2.816e-3, rel=1e-3)
    assert best_batch_tokens(16e6) == pytest.approx(7533, rel=1e-3)  # 29.4 sequences of 256


def test_a_character_model_from_random_weights() -> None:
    auto = of()
    assert values(auto, "global_batch_size") == (8, 16, 32, 64)
    assert auto.space["learning_rate"] == Range(low=4e-4, high=8.5e-3, log=True)
    assert values(auto, "epochs") == (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
    assert values(auto, "optimizer") == ("adamw", "muon")
    assert values(auto, "dropout") == (0.0, 0.05, 0.1, 0.2)
    assert values(auto, "torch_compile") == (False, True)
    assert (auto.space["zero_stage"], auto.space["precision"]) == (
        Fixed(value=0),
        Fixed(value="bf16"),
    )
    assert {
        "micro_batch_size_per_gpu",
        "offload",
        "output_layer",
        "lora_rank",
    } < auto.left_out.keys()
    assert auto.start["global_batch_size"] == 16
    assert auto.start["learning_rate"] == pytest.approx(
        best_learning_rate(10.8e6, 4 * 1_003_854), rel=0.03
    )


def test_the_law_of_a_tiny_model_is_cut_at_the_highest_rate() -> None:
    auto = of(parameters=141_056, train_tokens=200_832, train_examples=1568)  # studies/auto.yaml
    assert auto.space["learning_rate"] == Range(low=3e-3, high=0.03, log=True)
    assert auto.start["learning_rate"] == 0.01


def test_a_large_run_pays_for_compiling_and_a_fused_output_layer() -> None:
    auto = of(base=GPT2)
    assert values(auto, "torch_compile") == (False, True)
    assert values(auto, "output_layer") == ("standard", "fused", "fused_fp8")
    assert values(of(base=GPT2, has_float8=False), "output_layer") == ("standard", "fused")


SEVEN_BILLION = {
    "parameters": 6_738_415_616,
    "layers": 32,
    "width": 4096,
    "vocab_size": 32_000,
    "pretrained": True,
    "train_tokens": 10_000_000,
    "train_examples": 20_000,
}


def test_float8_is_for_large_models_that_compile() -> None:
    auto = of(**SEVEN_BILLION)
    assert auto.facts.kind == "lora" and values(auto, "torch_compile") == (False, True)
    assert values(auto, "float8") == ("none", "tensorwise")
    small = {"parameters": 738_000_000, "layers": 24, "width": 1024}
    for changes in (
        {"has_float8": False},
        small,
        {"train_tokens": 1_000, "train_examples": 10},  # not worth compiling
        {"adapts": False, "world_size": 8, "gpu_memory_gib": 24.0},  # ZeRO 3 alone fits
    ):
        assert "float8" in of(**{**SEVEN_BILLION, **changes}).left_out


@pytest.mark.parametrize(
    ("changes", "has_float8"),
    [
        ({"adapts": False, "world_size": 2, "gpu_memory_gib": 140.0}, True),  # ZeRO 0 to 2 fit
        ({"parameters": 1_315_758_080, "layers": 24, "width": 2048, "adapts": False}, True),
        ({"parameters": 737_668_096, "layers": 48, "width": 1024, "adapts": False}, False),
    ],
    ids=["Llama 7B, all weights", "OPT-1.3B", "T5-large"],
)
def test_float8_is_chosen_where_it_was_measured_to_help(changes: dict, has_float8: bool) -> None:
    """reports/real-sizes.md"""
    auto = of(**{**SEVEN_BILLION, **changes})
    assert (auto.space["float8"] is not None) is has_float8
    if has_float8:
        assert max(values(auto, "zero_stage")) <= 2
        assert True in values(auto, "torch_compile")


def test_much_data_is_not_read_more_often_than_pays() -> None:
    auto = of(
        train_tokens=8_640_000_000, train_examples=33_750_000
    )  # 80 tokens a parameter are a tenth of it
    assert values(auto, "epochs")[-1] == 0.125
    assert auto.space["dropout"] == Fixed(value=0.0)


def test_a_cpu_has_nothing_of_gpus() -> None:
    auto = of(on_gpu=False, gpu_memory_gib=None, has_float8=False, base=GPT2)
    assert {
        "precision",
        "torch_compile",
        "output_layer",
        "offload",
        "gradient_checkpointing",
    } <= auto.left_out.keys()
    assert auto.left_out["precision"] == "a CPU trains in float32"
    assert values(auto, "zero_stage") == (0,)


def test_pretrained_weights_are_tuned_by_adamw_in_a_range_of_their_own() -> None:
    auto = of(base=GPT2, pretrained=True)
    assert auto.space["learning_rate"] == Range(low=5e-6, high=6.6e-4, log=True)
    assert values(auto, "epochs") == (0.25, 0.375, 0.5, 0.75, 1, 1.5, 2, 3, 4)
    assert values(auto, "dropout") == (0.0,)
    assert "2605.10468" in auto.left_out["optimizer"]
    assert auto.left_out.keys() >= {"weight_decay", "lora_rank"}


def test_what_is_advised_is_where_the_chosen_space_starts() -> None:
    start = of(base=LARGE).start
    assert advised(LARGE) == {name: start[name] for name in ("global_batch_size", "learning_rate")}
    full = advised(GPT2.model_copy(update={"pretrained": True}))
    adapted = advised(GPT2.model_copy(update={"pretrained": True, "adapts": True}))
    assert adapted["learning_rate"] == pytest.approx(10 * full["learning_rate"], rel=0.01)
    preferences = advised(GPT2.model_copy(update={"pretrained": True, "task": "dpo"}))
    assert preferences["learning_rate"] == pytest.approx(full["learning_rate"] / 10, rel=0.02)
    assert advised(LARGE.model_copy(update={"task": "rlhf"})) == {}


def test_random_weights_are_advised_by_step_law_where_it_was_fitted() -> None:
    law = advised(GPT2)
    assert law["learning_rate"] == of(base=GPT2).start["learning_rate"]
    assert advised(GPT2.model_copy(update={"parameters": 10_800_000})) == {}
    assert advised(GPT2.model_copy(update={"train_tokens": None})) == {}
    assert advised(GPT2.model_copy(update={"given": ("learning_rate",)})).keys() == {
        "global_batch_size"
    }


def test_large_pretrained_models_get_adapters() -> None:
    full, lora = of(base=LARGE, lacking={"lora_rank": "PEFT can't adapt it"}), of(base=LARGE)
    assert values(lora, "lora_rank") == (16, 64)
    assert values(lora, "global_batch_size") == (4, 8, 16, 32)
    assert values(lora, "optimizer") == ("adamw", "muon")
    assert lora.space["learning_rate"].low == 10 * full.space["learning_rate"].low
    assert lora.space["learning_rate"].high == pytest.approx(10 * full.space["learning_rate"].high)
    assert values(lora, "zero_stage") == (0,)
    assert full.left_out["lora_rank"] == "PEFT can't adapt it"


@pytest.mark.parametrize(
    ("gpus", "stages", "offload"),
    [(1, (3,), "parameters"), (2, (2,), "optimizer"), (4, (3,), None), (8, (2, 3), None)],
)
def test_memory_decides_zero_and_offload(
    gpus: int, stages: tuple[int, ...], offload: str | None
) -> None:
    """8 billion parameters, all trained: 16 GB of weights, as many of gradients, 96 GB of states;
    GPUs of 40 GiB, but one of 16 alone.
    """
    memory = 16 if gpus == 1 else 40
    auto = of(base=LARGE, lacking={"lora_rank": "no"}, world_size=gpus, gpu_memory_gib=memory)
    assert values(auto, "zero_stage") == stages
    assert values(auto, "offload") == ((offload,) if offload else ("none",))
    assert ("offload" in auto.left_out) is (offload is None)
    assert auto.left_out["optimizer"]


def test_what_does_not_fit_at_once_is_cut_into_micro_batches() -> None:
    auto = of(base=GPT2, gpu_memory_gib=16)
    batches, micro_batches = (
        values(auto, "global_batch_size"),
        values(auto, "micro_batch_size_per_gpu"),
    )
    assert max(micro_batches) < max(batches)
    assert auto.start["global_batch_size"] % auto.start["micro_batch_size_per_gpu"] == 0
    assert values(of(base=GPT2, gpu_memory_gib=4), "gradient_checkpointing") == (False, True)


def test_what_the_study_file_gives_or_the_model_lacks_is_left_out() -> None:
    auto = of(
        given=("weight_decay", "lr_scheduler_kwargs", "warmup_steps"),
        lacking={"dropout": "llama has none"},
    )
    for name in ("weight_decay", "lr_scheduler", "warmup_ratio", "dropout"):
        assert auto.space[name] is None
    assert auto.left_out["weight_decay"] == "workload.training_arguments gives weight_decay"
    assert auto.left_out["dropout"] == "llama has none"


@pytest.mark.parametrize(("scheduler", "left_out"), [("constant", True), ("cosine", False)])
def test_a_warm_up_goes_with_the_given_scheduler(scheduler: str, left_out: bool) -> None:
    given = {
        "training_arguments": {"lr_scheduler_type": scheduler},
        "model": {"name_or_path": "gpt2"},
    }
    auto = choose(known_facts(Workload(**given), 1, on_gpu=True))
    assert (auto.space["warmup_ratio"] is None) is left_out
    assert (scheduler in auto.left_out.get("warmup_ratio", "")) is left_out


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("torch_compile_backend", "torch_compile"),
        ("torch_compile_mode", "torch_compile"),
        ("gradient_checkpointing", "gradient_checkpointing"),
        ("activation_checkpointing", "gradient_checkpointing"),
        ("optim_args", "optimizer"),
    ],
)
def test_what_another_training_argument_decides_is_left_out_for_that(
    given: str, name: str, on_gpu: bool
) -> None:
    auto = of(base=GPT2, gpu_memory_gib=4, on_gpu=on_gpu, given=(given,))
    assert auto.space[name] is None
    assert auto.left_out[name] == f"workload.training_arguments gives {given}"


TASKS = ("causal_lm", "sft", "reward", "dpo", "seq2seq", "classification")
RANKS, GIB, PARAMETERS = (
    (1, 2, 3, 8),
    (None, 8.0, 80.0),
    (None, 100_000, 124_000_000, 8_000_000_000),
)
DATA = ((None, None), (1797, None), (60, 6000), (10**7, 10**10))


@pytest.mark.parametrize("task", TASKS)
def test_no_space_is_refused(task: str) -> None:
    """Nor is a start; each dimension is in it or left out, with a reason."""
    for pretrained, ranks, gib, parameters, (examples, tokens) in itertools.product(
        (False, True), RANKS, GIB, PARAMETERS, DATA
    ):
        facts = GPT2.model_copy(
            update={
                "task": task,
                "pretrained": pretrained,
                "world_size": ranks,
                "on_gpu": gib is not None,
                "gpu_memory_gib": gib,
                "parameters": parameters,
                "train_examples": examples,
                "train_tokens": tokens,
            }
        )
        auto = choose(facts)
        space = SearchSpace(auto.space, ranks, facts.on_gpu)
        space.start_values(auto.start)
        if examples is not None:
            space.check_fits(examples)
        assert auto.why.keys() | {"offload"} == auto.space.domains().keys() | {"offload"}
        assert not auto.why.keys() & auto.left_out.keys()
        of_rlhf = {"num_generations", "max_completion_length", "kl_coefficient"}
        of_dpo = set() if task == "dpo" else {"beta", "label_smoothing"}
        without = {"dropout", "weight_averaging", "float8"} if task == "dpo" else set()
        assert (
            auto.why.keys() | auto.left_out.keys()
            == set(DIMENSION_NAMES) - of_rlhf - of_dpo - without
        )
        assert size_of(auto) <= 20_000


def size_of(auto: AutoSpace) -> int:
    """The combinations of its choices."""
    size = 1
    for domain in auto.space.free().values():
        size *= number_of(domain)
    return size


def number_of(domain: Domain) -> int:
    return len(domain.choices) if isinstance(domain, Choices) else 1


def test_the_same_facts_give_the_same_space_and_json_keeps_it() -> None:
    auto = of()
    assert of() == auto
    assert AutoSpace.model_validate_json(auto.model_dump_json()) == auto


def test_before_the_data_is_prepared_only_what_nothing_can_change_is_known() -> None:
    tuned = known_before(Facts(task="causal_lm", pretrained=True, on_gpu=True))
    assert {"warmup_ratio", "lr_scheduler", "weight_averaging"} <= tuned
    by_size = {
        "global_batch_size",
        "learning_rate",
        "zero_stage",
        "offload",
        "lora_rank",
        "optimizer",
        "output_layer",
    }
    assert not tuned & (
        by_size
        | {"micro_batch_size_per_gpu", "torch_compile", "gradient_checkpointing", "precision"}
    )
    scratch = known_before(Facts(task="causal_lm", pretrained=False, on_gpu=False))
    assert {"lora_rank", "torch_compile", "weight_decay"} <= scratch and not scratch & {
        "epochs",
        "dropout",
    }
