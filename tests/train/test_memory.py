"""The estimate of memory beside what real trainings need: on the CPU tensor by tensor, on GPUs as
it was measured.
"""

import csv
from pathlib import Path

import pytest
import torch
from memory_specs import memory_spec
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config
from trial_processes import start

from carbonopt.analysis import gpu_memory as analysis
from carbonopt.core.channel import FINISHED_EXIT
from carbonopt.core.dimensions import TrainingParams
from carbonopt.core.errors import BadInput
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.spec.model_memory import MemorySpec
from carbonopt.study_file.reader import load_study
from carbonopt.train.models import gpu_operations, memory_probe
from carbonopt.train.models.live_memory import LiveMemory
from carbonopt.train.models.memory_probe import expected_memory
from carbonopt.train.prepare import PrepareSpec, prepare
from carbonopt.train.token_loss import token_nll

ROOT = Path(__file__).parent.parent.parent
LENGTH = 128
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WORKLOAD = {
    "model": {
        "from_config": {
            "model_type": "gpt2",
            "n_layer": 4,
            "n_head": 4,
            "n_embd": 256,
            "n_positions": LENGTH,
        }
    },
    "tokenizer": {"kind": "byte"},
    "dataset": {"builtin": "python-docs", "eval_fraction": 0.004},
    "sequence_length": LENGTH,
    "evaluations": 1,
}
WORKLOAD["model"]["from_config"] |= NO_DROPOUT  # the CPU's keeps another mask than a GPU's
SPACE = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}


def memory_of(workload: dict, **space) -> analysis.ModelMemory:
    return expected_memory(MemorySpec(workload=workload, space=SPACE | space, world_size=1))


def test_live_memory_counts_what_is_there_and_forgets_what_is_freed() -> None:
    live = LiveMemory()
    with live:
        first = torch.zeros(1024)
        second = first.view(32, 32) + 1
        assert live.live_bytes == 2 * 4096
        del first
        assert live.live_bytes == 4096
        with live.one_kernel():
            second = second.double().exp().float()
        assert live.live_bytes == 4096
    assert live.peak_bytes == 2 * 4096


def test_the_model_without_numbers_keeps_what_the_model_with_numbers_keeps() -> None:
    settings = {
        "attention_implementation": "eager",
        "micro_batch_size_per_gpu": {"choices": [3, 6]},
    }
    (profile,) = memory_of(WORKLOAD, **settings).profiles
    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=256, n_positions=LENGTH, vocab_size=256, **NO_DROPOUT
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert (
        profile.parameters
        == profile.trained_parameters
        == sum(p.numel() for p in model.parameters())
    )
    assert profile.largest_parameter == 256 * 1024
    for found in profile.activations:
        live = LiveMemory()
        live.begin((*model.parameters(), *model.buffers()))
        tokens = torch.zeros(found.micro_batch_size, LENGTH, dtype=torch.int64)
        hooks = [
            p.register_post_accumulate_grad_hook(live.gradient_is_made) for p in model.parameters()
        ]
        with live:
            token_nll(model(input_ids=tokens, use_cache=False).logits, tokens, "sum").backward()
        most = [moment.activation_bytes for moment in found.moments]
        gradients = [moment.gradient_elements for moment in found.moments]
        assert gradients == sorted(set(gradients)) and most == sorted(most, reverse=True)
        measured = {moment.gradient_elements: moment.activation_bytes for moment in live.moments}
        assert gradients == list(measured) and most == pytest.approx(
            list(measured.values()), rel=0.01
        )
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)


EXPERTS = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "num_local_experts": 4,
}


def test_experts_without_numbers_keep_what_experts_with_numbers_keep() -> None:
    spec = memory_spec(
        "causal_lm",
        EXPERTS,
        precision="fp32",
        micro_batch_size_per_gpu=2,
        attention_implementation="eager",
    )
    (profile,) = expected_memory(spec).profiles
    fields = dict(EXPERTS)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    live = LiveMemory()
    live.begin((*model.parameters(), *model.buffers()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(live.gradient_is_made)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with live:
        token_nll(model(input_ids=tokens, use_cache=False).logits, tokens, "sum").backward()
    assert profile.activations[0].moments == live.moments


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_experts_have_an_estimate_with_adapters_and_checkpoints(precision) -> None:
    found = expected_memory(
        memory_spec(
            "causal_lm",
            EXPERTS,
            precision=precision,
            micro_batch_size_per_gpu=2,
            lora_rank={"choices": [0, 4]},
            gradient_checkpointing={"choices": [False, True]},
        )
    )
    assert len(found.profiles) == 4 and found.left_out is None


def test_settings_that_need_torchao_leave_an_estimate_for_the_others(monkeypatch) -> None:
    settings = {"precision": "bf16", "torch_compile": True}
    monkeypatch.setattr(memory_probe, "find_spec", lambda name: None)
    found = memory_of(WORKLOAD, **settings, float8={"choices": ["none", "rowwise"]})
    assert [profile.settings["float8"] for profile in found.profiles] == ["none"]
    assert "carbonopt[float8]" in str(found.left_out)
    with pytest.raises(BadInput, match=r"carbonopt\[float8\]"):
        memory_of(WORKLOAD, **settings, float8="rowwise")


def test_settings_that_the_model_lacks_leave_an_estimate_for_the_others() -> None:
    """No layer of this model is large enough for float8 by rows; all reasons are said."""
    model = {
        "model_type": "t5",
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
        "num_layers": 1,
    }
    found = expected_memory(
        memory_spec(
            "seq2seq",
            model,
            torch_compile=True,
            float8={"choices": ["none", "rowwise"]},
            gradient_checkpointing={"choices": [False, True]},
        )
    )
    (profile,) = found.profiles
    assert (profile.settings["float8"], profile.settings["gradient_checkpointing"]) == (
        "none",
        False,
    )
    left_out = str(found.left_out).split("; ")
    assert len(left_out) == 2
    assert "torch_compile with gradient_checkpointing" in left_out
    assert any("rowwise" in each for each in left_out)


def test_adapters_that_the_model_lacks_leave_an_estimate_without() -> None:
    model = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}
    found = expected_memory(memory_spec("causal_lm", model, lora_rank={"choices": [0, 4]}))
    assert [profile.settings["lora_rank"] for profile in found.profiles] == [0]
    assert "lora_rank: 4" in str(found.left_out)


@pytest.mark.parametrize("attention", [None, "sdpa", "eager", "varlen"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heads_that_attention_can_not_have_get_no_estimate(attention, precision) -> None:
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 5,
    }
    space = {"precision": precision, "micro_batch_size_per_gpu": 2}
    if attention is not None:
        space["attention_implementation"] = attention
    if attention == "varlen":  # a window needs varlen's own kernel
        model |= {"model_type": "mistral", "sliding_window": 4}
    with pytest.raises(BadInput, match="can't be run without numbers"):
        expected_memory(memory_spec("causal_lm", model, **space))
    model["num_key_value_heads"] = 4
    assert expected_memory(memory_spec("causal_lm", model, **space)).profiles


@pytest.mark.parametrize(
    ("query", "key", "mask", "grouped"),
    [
        ((2, 8, 5, 16), (2, 8, 5, 16), None, False),
        ((2, 8, 5, 16), (2, 4, 7, 16), (2, 1, 5, 7), True),
        ((2, 8, 5, 16), (2, 5, 5, 16), None, True),
        ((2, 8, 5, 16), (2, 5, 5, 16), None, False),
        ((2, 8, 5, 16), (2, 8, 5, 8), None, False),
        ((2, 8, 5, 16), (2, 8, 7, 16), (2, 1, 5, 5), False),
        ((2, 8, 5, 16), (3, 8, 5, 16), None, False),
    ],
)
def test_the_stand_in_for_attention_takes_the_shapes_of_the_real_one(query, key, mask, grouped):
    def shape_of(attention, device: str) -> tuple | None:
        tensors = [torch.rand(shape, device=device) for shape in (query, key, key)]
        masked = None if mask is None else torch.zeros(mask, device=device)
        try:
            return tuple(attention(*tensors, attn_mask=masked, enable_gqa=grouped).shape)
        except RuntimeError:
            return None

    real = shape_of(torch.nn.functional.scaled_dot_product_attention, "cpu")
    assert shape_of(gpu_operations.attention, "meta") == real


@pytest.mark.parametrize(
    ("arguments", "states", "in_step"),
    [
        ({}, 8, 0),
        ({"optim": "adamw_torch"}, 8, 4),
        ({"optim": "sgd"}, 0, 0),
        ({"optim": "adagrad"}, 4, 0),
    ],
)
def test_bytes_of_the_optimizers_states(arguments: dict, states: float, in_step: float) -> None:
    found = memory_of({**WORKLOAD, "training_arguments": arguments}, micro_batch_size_per_gpu=1)
    assert found.optimizer_bytes_per_parameter == pytest.approx(states, abs=0.01)
    assert found.optimizer_step_bytes_per_parameter >= in_step


def test_lora_trains_its_adapters_alone() -> None:
    whole, lora = memory_of(
        WORKLOAD, lora_rank={"choices": [0, 4]}, micro_batch_size_per_gpu=1
    ).profiles
    linear = [(256, 768), (256, 256), (256, 1024), (1024, 256)] * 4
    assert lora.trained_parameters == sum(4 * (inputs + outputs) for inputs, outputs in linear)
    assert lora.parameters == whole.parameters + lora.trained_parameters
    assert (whole.smallest_side, lora.smallest_side) == (0, 256)


@pytest.mark.slow
def test_checkpointing_compiling_and_a_fused_layer_keep_less() -> None:
    big_vocabulary = {
        **WORKLOAD,
        "model": {"from_config": {**WORKLOAD["model"]["from_config"], "vocab_size": 8192}},
    }
    settings = {"precision": "bf16", "micro_batch_size_per_gpu": 8}

    def most(**changes) -> int:
        (profile,) = memory_of(big_vocabulary, **settings, **changes).profiles
        return max(moment.activation_bytes for moment in profile.activations[0].moments)

    assert most(gradient_checkpointing=True) < most()
    assert most(output_layer="fused") < most()
    assert most(torch_compile=True) < most()


@pytest.mark.slow
def test_the_last_of_many_compiled_settings_is_compiled_like_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten profiles in one process: torch runs the ninth version of a layer's code uncompiled."""
    monkeypatch.setattr(memory_probe, "MOST_CPU_S", 600.0)  # ten compilations beside other tests
    settings = {"torch_compile": True, "precision": "bf16", "micro_batch_size_per_gpu": 8}
    small = {
        **WORKLOAD,
        "model": {"from_config": {**WORKLOAD["model"]["from_config"], "n_layer": 1}},
    }
    (alone,) = memory_of(small, lora_rank=40, **settings).profiles
    many = memory_of(
        small, lora_rank={"choices": [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]}, **settings
    )
    (last,), (first,) = many.profiles[-1].activations, alone.activations
    assert (last.micro_batch_size, last.moments) == (first.micro_batch_size, first.moments)
    # Evaluation came out with one kibibyte more in one of many runs, for an unknown reason.
    # Uncompiled, a layer keeps several times as much.
    assert last.evaluation_bytes == pytest.approx(first.evaluation_bytes, rel=1e-3)


@pytest.mark.slow
def test_code_that_torch_would_no_longer_compile_is_no_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond its limit torch runs further versions of a function uncompiled, and only logs it."""
    monkeypatch.setattr(memory_probe, "_MOST_COMPILED", 1)
    small = {
        **WORKLOAD,
        "model": {"from_config": {**WORKLOAD["model"]["from_config"], "n_layer": 1}},
    }
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        memory_of(small, torch_compile=True, precision="bf16", micro_batch_size_per_gpu=8)


def test_what_cannot_be_estimated_says_why(tmp_path: Path) -> None:
    absent = {**WORKLOAD, "model": {"name_or_path": str(tmp_path)}, "tokenizer": {"kind": "byte"}}
    with pytest.raises(BadInput, match=r"has no config\.json"):
        memory_of(absent)
    with pytest.raises(BadInput, match="adamw_bnb_8bit"):
        memory_of({**WORKLOAD, "training_arguments": {"optim": "adamw_bnb_8bit"}})


@pytest.mark.parametrize(
    ("study", "report", "gpu_gib", "within", "measured"),
    [
        ("shakespeare-char", "shakespeare-char", 79, 0.05, 19),
        ("sft-dialogue-batch-sweep", "sft-dialogue-batch-sweep", 79, 0.05, 12),
        ("sft-dialogue", "sft-dialogue", 79, 0.05, 19),
        ("digits", "digits-h100", 79, 0.1, 14),
    ],
)
@pytest.mark.slow
def test_estimates_are_near_what_the_trials_of_shipped_reports_needed(
    study: str, report: str, gpu_gib: int, within: float, measured: int, tmp_path: Path
) -> None:
    """On H100s, and the first on an H200: each trial with the GPU memory that it needed, before any
    data is prepared. All but the first study ran when whole steps had no stream, and so no matrix
    products' memory, of their own. In the first, small batches need most in evaluations, which run
    without the compiler.
    """
    shipped = load_study(ROOT / "studies" / f"{study}.yaml")
    workload = shipped.workload.model_dump(mode="json")
    if study == "shakespeare-char":  # whose text, of 65 characters, is not here
        text = tmp_path / "text.txt"
        text.write_text("".join(map(chr, range(48, 48 + 65))) * 100)
        workload["dataset"]["train_files"] = [str(text)]
        workload["eval_batch_size_per_gpu"] = 109  # a quarter of its 436 evaluation sequences
    gpu_bytes = gpu_gib * BYTES_PER_GIB
    spec = MemorySpec(
        workload=workload, space=shipped.search.space, world_size=1, gpu_memory_bytes=gpu_bytes
    )
    found = expected_memory(spec)
    with (ROOT / "reports" / report / "data" / "trials.csv").open() as file:
        trials = [
            row
            for row in csv.DictReader(file)
            if row["peak_memory_gib"] and row["state"] != "infeasible"
        ]
    assert len(trials) == measured
    for trial in trials:
        sizes = ("global_batch_size", "micro_batch_size_per_gpu", "zero_stage")
        given = {name: int(trial[f"params.{name}"]) for name in sizes}
        given |= {
            name: trial[f"params.{name}"]
            for name in ("precision", "optimizer")
            if trial.get(f"params.{name}")
        }
        given |= {"torch_compile": True} if trial.get("params.torch_compile") == "True" else {}
        params = TrainingParams(**given, learning_rate=1e-3, epochs=1)
        peak_gib = analysis.estimate(params, found).peak_gib
        if study != "shakespeare-char" and params.allows_whole_step:
            peak_gib -= analysis._MATRIX_PRODUCTS_BYTES / BYTES_PER_GIB
        assert abs(peak_gib / float(trial["peak_memory_gib"]) - 1) < within


def test_attention_whose_mask_has_gaps_takes_what_it_takes_with_numbers() -> None:
    """No fused kernel of a GPU takes such a mask, as T5's is in transformers 5.17: the rest is
    torch's own.
    """
    shape, bias = (3, 4, 64, 16), (64, 64, 4)

    def most_bytes(attend, device: str) -> int:
        live, query = (
            LiveMemory(),
            torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True),
        )
        mask = torch.zeros(bias, device=device, dtype=torch.bfloat16).permute(2, 0, 1).unsqueeze(0)
        live.begin((query, mask))
        with live:
            attend(query, query, query, attn_mask=mask).sum().backward()
        return live.peak_bytes

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        real = most_bytes(torch.nn.functional.scaled_dot_product_attention, "cpu")
    assert most_bytes(gpu_operations.attention, "meta") == pytest.approx(real, rel=0.05)


GPT2 = {
    **WORKLOAD,
    "model": {"from_config": {"model_type": "gpt2", "vocab_size": 50304, **NO_DROPOUT}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "measured_gib"),
    [
        ({}, 70.6),
        ({"output_layer": "fused"}, 38.6),
        ({"output_layer": "fused_fp8"}, 38.7),
        ({"torch_compile": True}, 32.5),
        ({"torch_compile": True, "output_layer": "fused"}, 25.1),
        ({"torch_compile": True, "output_layer": "fused_fp8"}, 25.2),
    ],
)
def test_estimates_are_within_5_percent_of_gpt2_on_an_h200(
    settings: dict, measured_gib: float
) -> None:
    """reports/performance.md: 2^16 tokens in a micro batch, sequences of 512, ZeRO 1."""
    values = {
        "micro_batch_size_per_gpu": 128,
        "global_batch_size": 1024,
        "precision": "bf16",
        **settings,
    }
    workload = {**GPT2, "sequence_length": 512, "eval_batch_size_per_gpu": 8}
    params = TrainingParams(learning_rate=1e-4, epochs=1, zero_stage=1, **values)
    estimated = analysis.estimate(params, memory_of(workload, **values))
    assert estimated.peak_gib == pytest.approx(measured_gib, rel=0.05)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "prepared"
    prepare(PrepareSpec(workload=WORKLOAD, space=SPACE, prepared_dir=str(folder), fingerprint="f"))
    return folder


def most_live_gib(prepared: Path, folder: Path, params: TrainingParams, workload: dict) -> float:
    """Of rank 0 of a real trial on the CPU."""
    spec = {
        "number": 0, "attempt": 1, "seed": 0, "params": params.model_dump(), "workload": workload,
        "prepared_dir": str(prepared), "trial_dir": str(folder),
    }  # fmt: skip
    peak_file = folder / "peak"
    done = start(
        "rank_main", spec, folder, params.world_size, forked="live_memory", PEAK_FILE=str(peak_file)
    )
    assert done.exit_code == FINISHED_EXIT
    return int(peak_file.read_text()) / BYTES_PER_GIB


SMALL = {
    "global_batch_size": 1,
    "micro_batch_size_per_gpu": 1,
    "epochs": 0.002,
}  # weights and states decide


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 0},
        {"zero_stage": 0, "precision": "bf16", "global_batch_size": 16},
        {"zero_stage": 1, "precision": "bf16"},
        {"zero_stage": 2, "precision": "bf16", "global_batch_size": 16},
        {"zero_stage": 3},
        {"zero_stage": 1, "precision": "bf16", "world_size": 2, "global_batch_size": 16},
        {"zero_stage": 3, "precision": "bf16", "world_size": 2, "global_batch_size": 16},
        {"zero_stage": 0, "precision": "bf16", **SMALL},
        {"zero_stage": 1, "precision": "bf16", **SMALL},
        {"zero_stage": 3, "precision": "bf16", **SMALL},
        {"zero_stage": 0, "precision": "bf16", "weight_averaging": 0.1, **SMALL},
        {
            "zero_stage": 1,
            "precision": "bf16",
            "weight_averaging": 0.1,
            "world_size": 2,
            "global_batch_size": 16,
        },
        {"zero_stage": 0, "weight_averaging": 0.1, **SMALL},
        {"zero_stage": 0, "precision": "bf16", "optimizer": "muon", **SMALL},
        {"zero_stage": 2, "precision": "bf16", "lora_rank": 4},
        {"zero_stage": 0, "precision": "bf16", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_estimates_are_what_a_real_trial_allocates(
    settings: dict, prepared: Path, tmp_path: Path, monkeypatch
) -> None:
    """Each tensor of DeepSpeed's engine is counted, with a small reduction buffer, which would hide
    the rest.
    """
    monkeypatch.setattr(analysis, "_MATRIX_PRODUCTS_BYTES", 0)
    workload = {**WORKLOAD, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1_000_000}}}
    values = {
        "global_batch_size": 8,
        "micro_batch_size_per_gpu": 8,
        "epochs": 0.012,
        "learning_rate": 1e-3,
        **settings,
    }
    params = TrainingParams(**values)
    profiled = {
        name: settings[name]
        for name in ("precision", "lora_rank", "gradient_checkpointing", "optimizer")
        if name in settings
    }
    found = memory_of(
        workload, micro_batch_size_per_gpu=params.micro_batch_size_per_gpu, **profiled
    )
    measured = most_live_gib(prepared, tmp_path / "trial", params, workload)
    within = (
        0.05 if params.optimizer else 0.03
    )  # Muon has bf16 on the GPUs that are estimated, float32 here
    assert analysis.estimate(params, found).peak_gib == pytest.approx(measured, rel=within)
