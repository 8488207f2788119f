"""Real trials of a tiny model on the CPU: what must not change the perplexity, and how a trial
ends.

The test is the parent: it starts one process a rank and answers on the channel, as a study does.
"""

import json
import math
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trial_processes import Run, start

from carbonopt.core.channel import (
    BAD_INPUT_EXIT,
    CHANNEL_FD,
    CRASH_EXIT,
    FINISHED_EXIT,
    OUT_OF_MEMORY_EXIT,
)
from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.events import Failed, Finished, Probed, Progress, StageBegun
from carbonopt.core.files import write_json
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import Phase, Stage, StopReason
from carbonopt.engines.process.processes import Listener
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.trial_spec import Prepared
from carbonopt.train.client import Speaker
from carbonopt.train.data.packing import open_tokens
from carbonopt.train.failures import Diverged, reported

LENGTH = 64
WORKLOAD = {
    "model": {
        "from_config": {
            "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": LENGTH,
            # or each division drops other activations
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }
    },
    "tokenizer": {"train_bpe": 384},
    "dataset": {"builtin": "python-docs"},
    "sequence_length": LENGTH,
    "evaluations": 2,
}  # fmt: skip
PARAMS = {
    "global_batch_size": 8,
    "micro_batch_size_per_gpu": 8,
    "learning_rate": 3e-3,
    "epochs": 0.03,
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    spec = {
        "workload": WORKLOAD,
        "space": {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1},
        "prepared_dir": str(folder / "prepared"),
        "fingerprint": "f",
    }
    run = start("prepare", spec, folder)
    assert run.exit_code == FINISHED_EXIT and run.shape == [Phase.PREPARE, "Finished"]
    assert (
        Prepared(**run.only(Finished).summary) == PreparedFolder(folder / "prepared").read_summary()
    )
    cut_unevenly(PreparedFolder(folder / "prepared"))
    return folder / "prepared"


def cut_unevenly(folder: PreparedFolder) -> None:
    """Leave an odd number of evaluation sequences, the last one ragged."""
    pairs, ragged = 30, 23  # of some thousand: evaluating all of them would take most of a trial
    targets = (2 * pairs - 2) * LENGTH + ragged
    np.save(
        folder.evaluation, open_tokens(folder.evaluation)[: targets + 1].copy(), allow_pickle=False
    )
    changed = {"eval_tokens": targets, "eval_examples": 2 * pairs - 1}
    write_json(folder.summary, folder.read_summary().model_copy(update=changed).model_dump())


@pytest.fixture(scope="module")
def trial(prepared, tmp_path_factory):
    def run(
        workload=WORKLOAD,
        seed=0,
        stop=None,
        save=False,
        cold=False,
        recorded=False,
        probe_s=None,
        **params,
    ) -> Run:
        folder = tmp_path_factory.mktemp("trial")
        params = {**PARAMS, **params}
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": workload,
            "prepared_dir": str(prepared), "trial_dir": str(folder), "probe_s": probe_s,
            "saves_model": save,
        }  # fmt: skip
        environment = {}
        if recorded:
            environment = {
                "forked": "recorded_weights",
                "WEIGHTS_FILE": str(folder / "weights.npy"),
            }
        return start(
            "rank_main", spec, folder, params.get("world_size", 1), stop, cold, **environment
        )

    return run


@pytest.fixture(scope="module")
def reference(trial) -> Run:
    """ZeRO 1, one rank, no accumulation, and not forked, as the others are."""
    return trial(cold=True)


@pytest.fixture(scope="module")
def saved(trial) -> Run:
    """ZeRO 3 on two ranks with accumulation, and its model."""
    return trial(zero_stage=3, world_size=2, micro_batch_size_per_gpu=2, save=True)


@pytest.mark.slow
def test_a_trial_tells_what_it_does(reference, prepared):
    begin, middle, end = reference.shape[:3], reference.shape[3:-2], reference.shape[-2:]
    assert begin == [Phase.TRAIN, Phase.EVAL, "Evaluated"]
    assert middle == [Phase.TRAIN, Phase.EVAL] and end == ["Evaluated", "Finished"]
    assert reference.exit_code == FINISHED_EXIT
    stages = [event.stage for event in reference.events if isinstance(event, StageBegun)]
    assert stages == [Stage.DATA, Stage.MODEL, Stage.ENGINE, Stage.STEPS]

    summary = PreparedFolder(prepared).read_summary()
    steps = round(0.03 * (summary.train_examples // 8))
    first, last = reference.points
    assert (first.step, last.step) == (round(steps / 2), steps)
    assert last.tokens == steps * 8 * LENGTH
    assert first.count == last.count == summary.eval_tokens
    assert last.value < first.value < summary.vocab_size
    finished = reference.only(Finished).summary
    assert (finished["step"], finished["tokens"]) == (last.step, last.tokens)
    assert 0.1 < reference.events[-2].peak_memory_gib < 8
    progress = [event for event in reference.events if isinstance(event, Progress)]
    assert progress[0].step == 1 and 0 <= progress[0].cpu_wait_fraction < 1
    assert {event.cpu_wait_fraction for event in progress if event.step >= first.step} <= {None}, (
        "evaluations say it then"
    )
    assert finished["versions"]["torch"] == version("torch")
    assert (
        json.loads((reference.folder / "ds_config.json").read_text())["zero_optimization"]["stage"]
        == 1
    )


@pytest.mark.slow
def test_the_same_seed_gives_the_same_perplexity_to_the_last_digit(reference, trial):
    assert trial().points == reference.points


@pytest.mark.slow
def test_another_seed_gives_another(reference, trial):
    (final,) = trial(seed=1, stop=StopReason.CAP).points
    assert final.sum != reference.points[0].sum


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"zero_stage": 0}, marks=pytest.mark.slow),
        pytest.param({"zero_stage": 0, "micro_batch_size_per_gpu": 4}, marks=pytest.mark.slow),
        pytest.param({"zero_stage": 1, "micro_batch_size_per_gpu": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"zero_stage": 1, "micro_batch_size_per_gpu": 4, "world_size": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"zero_stage": 2, "micro_batch_size_per_gpu": 2, "offload": "optimizer"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"zero_stage": 3, "offload": "parameters"}, marks=pytest.mark.slow),
        pytest.param(
            {"zero_stage": 3, "micro_batch_size_per_gpu": 4, "output_layer": "fused"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda params: "-".join(str(value) for value in params.values()),
)
def test_how_a_step_is_computed_does_not_change_it(params, reference, trial):
    assert trial(**params).values == pytest.approx(reference.values, rel=1e-6)


@pytest.mark.parametrize(
    ("seconds", "params"),
    [
        (0.0, {}),
        (1e6, {}),
        (0.0, {"world_size": 2, "micro_batch_size_per_gpu": 4}),
    ],
)
@pytest.mark.slow
def test_a_probe_makes_steps_alone(seconds, params, trial):
    """For so long beside the first, and no more than there are; it evaluates nothing."""
    run = trial(probe_s=seconds, epochs=0.06, **params)
    assert run.shape == [Phase.TRAIN, "Probed"] and run.exit_code == FINISHED_EXIT
    probed = run.only(Probed)
    assert probed.step == (1 if seconds == 0 else probed.total_steps) and probed.total_steps > 10
    assert len(probed.rank_peak_memory_gib) == params.get("world_size", 1)
    assert probed.peak_memory_gib == max(probed.rank_peak_memory_gib) > 0.1
    stages = [event.stage for event in run.events if isinstance(event, StageBegun)]
    assert stages == [Stage.DATA, Stage.MODEL, Stage.ENGINE, Stage.STEPS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "optimizer": "muon"},
        {"lora_rank": 4},
        {"precision": "bf16", "world_size": 2, "micro_batch_size_per_gpu": 4},
        {"world_size": 2, "micro_batch_size_per_gpu": 4},
    ],
)
def test_a_whole_step_is_the_engines(more, trial):
    """The engine makes one that searches for infinite gradients or has two micro batches."""
    searching = {**WORKLOAD, "deepspeed": {"bf16": {"check_grad_overflow": True}}}
    halved = {"micro_batch_size_per_gpu": more.get("micro_batch_size_per_gpu", 8) // 2}
    engines = (
        trial(searching, zero_stage=0, **more)
        if "precision" in more
        else trial(zero_stage=0, **{**more, **halved})
    )
    assert trial(zero_stage=0, **more).values == pytest.approx(
        engines.values, rel=2e-3 if "precision" in more else 1e-6
    )


@pytest.mark.slow
def test_a_step_that_deepspeed_shall_look_at_is_its_own(trial, reference, tmp_path):
    profile = tmp_path / "profile.txt"
    watching = {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(profile)}}
    run = trial({**WORKLOAD, "deepspeed": watching}, zero_stage=0)
    assert run.values == pytest.approx(reference.values, rel=1e-6)
    assert "Flops Profiler" in profile.read_text()


@pytest.mark.slow
def test_zero_3_on_two_ranks_neither(saved, reference):
    assert saved.exit_code == FINISHED_EXIT
    assert saved.values == pytest.approx(reference.values, rel=1e-6)


@pytest.mark.slow
def test_a_stop_ends_all_ranks_and_keeps_the_evaluation(trial, reference):
    run = trial(zero_stage=2, world_size=2, micro_batch_size_per_gpu=4, stop=StopReason.TARGET)
    assert run.exit_code == FINISHED_EXIT
    assert run.shape == [Phase.TRAIN, Phase.EVAL, "Evaluated", "Finished"]
    assert run.only(Finished).summary["step"] == run.points[0].step == reference.points[0].step
    assert run.values == pytest.approx(reference.values[:1], rel=1e-6)


def independent_perplexity(model_folder: Path, tokens: np.ndarray) -> float:
    """Plain transformers: window after window, each with its own shifted labels, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    total, count = 0.0, 0
    for start_at in range(0, len(tokens) - 1, LENGTH):
        window = torch.from_numpy(tokens[start_at : start_at + LENGTH + 1].astype(np.int64))
        with torch.no_grad():
            log_probabilities = model(window[None, :-1]).logits[0].double().log_softmax(-1)
        total -= log_probabilities[torch.arange(len(window) - 1), window[1:]].sum().item()
        count += len(window) - 1
    return PERPLEXITY.value(total, count)


@pytest.mark.slow
def test_perplexity_is_what_plain_transformers_computes_on_the_saved_model(saved, prepared):
    tokens = open_tokens(PreparedFolder(prepared).evaluation)
    sequences = -(-(len(tokens) - 1) // LENGTH)
    assert (len(tokens) - 1) % LENGTH and sequences % 2, (
        "a ragged last sequence, and ranks with unequal shares"
    )
    model = saved.folder / "model"
    assert saved.values[-1] == pytest.approx(independent_perplexity(model, tokens), rel=1e-6)
    assert AutoTokenizer.from_pretrained(model).decode(tokens[:50].tolist())
    assert not list(model.glob("*.bin")), "no pickle"


@pytest.mark.slow
def test_a_pretrained_model_goes_on_from_its_weights(saved, trial):
    """Under ZeRO-3, where loading partitions; a learning rate of nothing leaves the weights as they
    were.
    """
    workload = {
        **WORKLOAD,
        "model": {"name_or_path": str(saved.folder / "model")},
        "evaluations": 1,
    }
    run = trial(
        workload, zero_stage=3, learning_rate=1e-12, epochs=0.01, attention_implementation="eager",
        output_layer="fused", world_size=2, micro_batch_size_per_gpu=4,
    )  # fmt: skip
    assert run.values == pytest.approx(saved.values[-1:], rel=1e-5)


@pytest.mark.slow
def test_every_optional_dimension(trial, reference):
    run = trial(
        gradient_checkpointing=True, precision="bf16", weight_decay=0.1, warmup_ratio=0.2, lr_scheduler="cosine",
        torch_compile=False, attention_implementation="eager", lora_rank=4, output_layer="fused_fp8",
    )  # fmt: skip
    first, last = run.values
    assert reference.values[-1] < last < first, "adapters learn, and learn less than all weights"


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(run.folder / "model").named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"world_size": 2, "micro_batch_size_per_gpu": 2}, {"precision": "bf16"}]
)
def test_a_step_of_muon_is_orthogonal(more, trial):
    """DeepSpeed's own is a step of SGD without ZeRO, whose singular values fall by orders of
    magnitude. In some directions there is no gradient.
    """
    params = {"zero_stage": 0, "optimizer": "muon", "epochs": 1e-3, **more}
    before, after = (
        weights_of(trial(**params, learning_rate=rate, save=True)) for rate in (1e-9, 3e-2)
    )
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_proj.weight"):
        step = (before[name] - after[name]) / (3e-2 * 0.2 * max(before[name].shape) ** 0.5)
        values = torch.linalg.svdvals(step.detach().float())
        assert float(values.quantile(0.2)) > 0.6 and float(values.max()) < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"zero_stage": 3}, {"zero_stage": 0, "precision": "bf16"}])
@pytest.mark.parametrize("scheduler", ["polynomial", "cosine_with_min_lr"])
def test_a_schedule_that_reads_the_optimizers_own_rate(scheduler, params, trial, reference):
    given = (
        {"training_arguments": {"lr_scheduler_kwargs": {"min_lr": 1e-4}}}
        if scheduler.startswith("cos")
        else {}
    )
    run = trial({**WORKLOAD, **given}, lr_scheduler=scheduler, **params)
    assert run.values[-1] == pytest.approx(reference.values[-1], rel=0.05)


@pytest.mark.slow
def test_muon_learns_faster_than_adamw_and_alike_on_two_ranks(trial, reference):
    one = trial(zero_stage=0, optimizer="muon")
    two = trial(zero_stage=0, optimizer="muon", world_size=2, micro_batch_size_per_gpu=2)
    assert two.values == pytest.approx(one.values, rel=1e-3)
    assert one.values[-1] < 0.99 * reference.values[-1]


@pytest.mark.slow
def test_dropout_and_decay_are_those_of_the_dimension(trial, reference):
    """The model's configuration has none, and without one the rate is linear."""
    same, other = trial(dropout=0.0), trial(dropout=0.3)
    assert same.values == pytest.approx(reference.values, rel=1e-6)
    assert abs(other.values[-1] / same.values[-1] - 1) > 1e-3
    linear = trial(lr_scheduler="warmup_stable_decay", decay_ratio=1.0)
    stable = trial(lr_scheduler="warmup_stable_decay", decay_ratio=0.2)
    assert len({linear.values[-1], stable.values[-1], same.values[-1]}) == 3


def saved_weights(run: Run) -> np.ndarray:
    """As recorded_weights has them; a model with adapters is saved as these alone, without their
    name.
    """
    if not (adapters := run.folder / "model" / "adapter_model.safetensors").exists():
        weights = weights_of(run)
    else:
        weights = {
            name.replace(".weight", ".default.weight"): each
            for name, each in load_file(adapters).items()
        }
    return np.concatenate(
        [weights[name].detach().float().numpy().ravel() for name in sorted(weights)]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"zero_stage": 0},
        {"zero_stage": 0, "precision": "bf16", "optimizer": "muon"},
        {"zero_stage": 0, "lora_rank": 4},
        {"zero_stage": 0, "world_size": 2},
        {"zero_stage": 1},
        {"zero_stage": 1, "precision": "bf16"},
        {"zero_stage": 1, "world_size": 2},
        {"zero_stage": 2, "world_size": 2, "micro_batch_size_per_gpu": 2},
    ],
    ids=str,
)
def test_weights_are_averaged_beside_a_training_that_stays_the_same(more, trial, prepared):
    more = {
        "micro_batch_size_per_gpu": 8 // more.get("world_size", 1),
        **more,
        "epochs": 0.02,
        "save": True,
    }
    plain, averaged = (trial(**more, weight_averaging=reach, recorded=True) for reach in (0.0, 0.2))
    weights = np.load(averaged.folder / "weights.npy").astype(np.float64)
    assert np.array_equal(np.load(plain.folder / "weights.npy"), weights), (
        "evaluations leave the training alone"
    )
    up_to = (
        np.arange(len(weights) + 1) / len(weights)
    ) ** 4  # what the first steps together count: 1/0.2 - 1
    assert len(weights) == averaged.points[-1].step > 8
    expected, half = np.diff(up_to) @ weights, more.get("precision") == "bf16"
    np.testing.assert_allclose(
        saved_weights(averaged), expected, rtol=2**-8 if half else 1e-5, atol=1e-7
    )
    np.testing.assert_allclose(
        saved_weights(plain), weights[-1], rtol=2**-8 if half else 1e-6, atol=1e-9
    )
    assert np.abs(expected - weights[-1]).max() > 1e-4
    assert len({*plain.values, *averaged.values}) == 4, (
        "in the middle, too, the averaged ones are judged"
    )
    if not half and "lora_rank" not in more:
        tokens = open_tokens(PreparedFolder(prepared).evaluation)
        assert averaged.values[-1] == pytest.approx(
            independent_perplexity(averaged.folder / "model", tokens), rel=1e-6
        )


@pytest.mark.slow
def test_a_diverging_trial_says_so(trial):
    run = trial(learning_rate=1e6)
    failed = run.only(Failed)
    assert failed.kind == "diverged" and "loss was not finite at step" in failed.text
    assert run.exit_code == FINISHED_EXIT


@pytest.mark.slow
def test_parameters_that_the_data_set_cannot_serve(trial):
    run = trial(global_batch_size=10**6, micro_batch_size_per_gpu=10**6)
    failed = run.only(Failed)
    assert failed.kind == "bad_input" and "examples, but got 1000000" in failed.text
    assert run.exit_code == BAD_INPUT_EXIT


# ----------------------------------------------------------------------------------------------------------
# failures


def allocate_a_petabyte():
    torch.empty(2**50, dtype=torch.uint8)


def raising(error: Exception):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("body", "kind", "exit_code"),
    [
        (allocate_a_petabyte, "out_of_memory", OUT_OF_MEMORY_EXIT),
        (
            raising(torch.OutOfMemoryError("CUDA out of memory.")),
            "out_of_memory",
            OUT_OF_MEMORY_EXIT,
        ),
        (
            raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")),
            "out_of_memory",
            OUT_OF_MEMORY_EXIT,
        ),
        (raising(Diverged("the loss was not finite.")), "diverged", FINISHED_EXIT),
        (raising(BadInput("too large.")), "bad_input", BAD_INPUT_EXIT),
        (raising(ValueError("shapes differ")), "crash", CRASH_EXIT),
    ],
)
def test_what_ends_a_process_is_reported(body, kind, exit_code, capfd):
    ours, theirs = socket.socketpair()
    exit_of_process = reported(body, Speaker(theirs), lambda: 1.5)
    listener = Listener(ours)
    failed = listener.receive(timeout_s=1)
    listener.close()
    assert isinstance(failed, Failed) and failed.kind == kind
    assert exit_of_process == exit_code
    assert failed.peak_memory_gib == (1.5 if kind == "out_of_memory" else None)
    if kind == "crash":
        assert failed.text == "ValueError: shapes differ"
        assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("error", ["ValueError", "Diverged", "BadInput"])
def test_what_ends_a_process_is_reported_also_where_the_log_is_full(error):
    script = f"""
from carbonopt.train.client import Speaker
from carbonopt.train.failures import BadInput, Diverged, reported
def work():
    raise {error}("not as it should be")
reported(work, Speaker.inherited())
"""
    ours, theirs = socket.socketpair()
    with Path("/dev/full").open("wb", buffering=0) as full, theirs:
        number = theirs.fileno()
        env = os.environ | {CHANNEL_FD: str(number)}
        subprocess.run([sys.executable, "-c", script], stderr=full, env=env, pass_fds=[number])
    listener = Listener(ours)
    assert listener.receive(timeout_s=1).text.endswith("not as it should be")
    listener.close()


def test_perplexity_of_a_divergence_is_no_number():
    point = EvalPoint.of(PERPLEXITY, math.nan, 1, step=1, tokens=1)
    assert point.value is point.sum is None and math.isnan(point.loss(PERPLEXITY))
