"""What `carbonopt check` says of memory."""

import re
from pathlib import Path

import pytest
from commands import within

from carbonopt.cli.check_text import _lengths, _workload
from carbonopt.cli.memory_text import _adapters, _unused_options
from carbonopt.core.dimensions import TrainingParams
from carbonopt.spec.model_memory import MemoryProfile, ModelMemory
from carbonopt.spec.study_config import StudyConfig


def on_gpus(study: dict, **space) -> dict:
    study["launch"] = {"gpus": [97]}
    study["search"]["space"] |= {"precision": "bf16", "global_batch_size": 8, **space}
    return study


@pytest.mark.slow
def test_check_says_what_each_gpu_needs_what_fits_and_how_many_it_takes(
    tiny_study: dict, write_study
) -> None:
    micro_batches, stages = {"choices": [1, 8]}, {"choices": [0, 2]}
    study = write_study(
        on_gpus(tiny_study, micro_batch_size_per_gpu=micro_batches, zero_stage=stages)
    )
    said = within("check", study, "--gpu-memory", 24)
    assert said.returncode == 0, said.stderr
    assert "not here" in said.stdout, "the GPU"
    rows = [
        line.split()
        for line in said.stdout.splitlines()
        if re.match(r" +[1248] +[02] +none ", line)
    ]
    # Without ZeRO all GPUs hold the same: only the launch's number of them is shown.
    assert [(row[0], row[1]) for row in rows] == [
        ("1", "0"),
        ("1", "2"),
        ("2", "2"),
        ("4", "2"),
        ("8", "2"),
    ]
    # A micro batch of 8 on two GPUs would make 16, which is not the global batch.
    assert [row[-1] == "–" for row in rows] == [row[0] != "1" for row in rows]
    for row in rows:
        parameters, gradients, optimizer, activations, at_1, *at_8 = (
            float(cell) for cell in row[3:] if cell != "–"
        )
        assert (
            0
            < at_1
            <= max(at_8, default=at_1)
            < parameters + gradients + optimizer + activations + 0.14
        )
    assert (
        "fits on 1 GPU: all of 4 estimated combinations" in said.stdout
        and "fewest GPUs: 1;" in said.stdout
    )
    # A GPU of 0.1 GiB: DeepSpeed's buffer for gradients alone, of ZeRO 2, takes as much, and a
    # whole step (of one micro batch, without ZeRO) 1/8 GiB for matrix products.
    small = within("check", study, "--gpu-memory", 0.1).stdout
    assert "fits on 1 GPU: 1 of 4 estimated combinations" in small
    assert all(
        row.rstrip(" –").endswith("*")
        for row in small.splitlines()
        if re.match(r" +[1248] +2 +none ", row)
    )


def test_what_lora_trains_and_a_rank_beyond_its_matrices_are_named() -> None:
    def said(rank: int | None) -> list[str]:
        profile = MemoryProfile(
            settings={"lora_rank": rank},
            parameters=2_000_000,
            trained_parameters=11_800,
            largest_parameter=1,
            smallest_side=64,
            buffer_bytes=0,
            activations=(),
        )
        return list(
            _adapters(
                ModelMemory(
                    profiles=(profile,),
                    optimizer_bytes_per_parameter=8,
                    optimizer_step_bytes_per_parameter=0,
                )
            )
        )

    assert said(None) == said(0) == []
    (trained,) = said(64)
    assert "11,800 of 2,000,000" in trained and "0.59 %" in trained
    assert [re.findall(r"65|64", line) for line in said(65)] == [["65"], ["65", "64"]]


def test_only_what_the_space_lacks_is_advised() -> None:
    given = {"learning_rate": 1e-3, "epochs": 1.0, "world_size": 64}

    def advice(micro_batch: int, **settings: object) -> list[str]:
        batches = {
            "micro_batch_size_per_gpu": micro_batch,
            "global_batch_size": 64 * micro_batch,
        }
        params = TrainingParams.model_validate(given | batches | settings)
        return [option.split()[0] for option in _unused_options([params])]

    assert advice(2) == ["smaller", "zero_stage", "offload:"]
    assert advice(1, zero_stage=3) == ["offload:"]
    assert advice(1, zero_stage=3, offload="parameters") == []
    assert advice(1, zero_stage=3, offload="parameters", world_size=1) == ["larger"]


def test_a_space_that_is_still_to_be_chosen_has_no_estimate_and_check_says_so(
    tiny_study: dict, write_study
) -> None:
    tiny_study["search"] = {"space": "auto"}
    said = within("check", write_study(tiny_study), "--gpu-memory", 24)
    assert said.returncode == 0, said.stderr
    (line,) = (line for line in said.stdout.splitlines() if line.startswith("  memory"))
    assert "carbonopt run" in line


def test_check_counts_one_as_one_and_names_both_lengths(tiny_study: dict) -> None:
    workload = tiny_study["workload"] | {"evaluations": 1}
    assert _workload(StudyConfig.model_validate(tiny_study | {"workload": workload})).endswith(
        ", 1 evaluation a trial"
    )
    assert re.findall(r"\d+", _lengths(128, {"max_target_length": 512})) == ["128", "512"]
    assert re.findall(r"\d+", _lengths(128, {})) == ["128"]


def test_check_on_a_cpu_says_nothing_of_gpus(tiny_study: dict, write_study) -> None:
    said = within("check", write_study(tiny_study))
    assert said.returncode == 0
    assert "GPU" not in said.stdout.partition("space")[2]


@pytest.mark.slow
def test_check_of_a_model_that_is_not_here_says_why_there_is_no_estimate(
    tiny_study: dict, write_study
) -> None:
    tiny_study["workload"]["model"] = {"name_or_path": "nobody/has-this-model"}
    said = within("check", write_study(tiny_study), "--gpu-memory", 24)
    assert said.returncode == 0
    (line,) = (line for line in said.stdout.splitlines() if line.startswith("  memory"))
    assert "not estimated" in line and "nobody/has-this-model" in line


def test_a_replay_needs_none(replay_study: dict, write_study) -> None:
    assert "memory" not in within("check", write_study(replay_study)).stdout


def test_memory_must_be_a_number_above_0(tiny_study: dict, write_study, tmp_path: Path) -> None:
    assert within("check", write_study(tiny_study), "--gpu-memory", 0).returncode == 2
