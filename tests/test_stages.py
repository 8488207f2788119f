"""Where the trials' time and energy went, against figures added up by hand."""

import pytest
from small_studies import pruned, study, trial

from carbonopt.analysis.stages import stages
from carbonopt.record import Hardware
from carbonopt.report.build import write_report
from carbonopt.trial import Prepared, Stage, StageCost
from carbonopt.units import kwh_from_joules

PREPARED = Prepared(
    fingerprint="x", train_sequences=100, eval_sequences=10, train_tokens=6401, eval_tokens=640, sequence_length=64,
    vocab_size=100, model_parameters=1_000_000, versions={},
)  # fmt: skip


def cost(duration_s: float, energy_j: float) -> StageCost:
    return StageCost(duration_s=duration_s, energy_kwh=kwh_from_joules(energy_j))


FIRST = {
    Stage.IMPORTS: cost(1.0, 10.0),
    Stage.ENGINE: cost(3.0, 30.0),
    Stage.COMPILE: cost(4.0, 100.0),
    Stage.STEPS: cost(10.0, 400.0),
    Stage.EVALUATION: cost(1.0, 20.0),
    Stage.TEARDOWN: cost(1.0, 0.0),
}
SECOND = {Stage.IMPORTS: cost(3.0, 40.0), Stage.COMPILE: cost(1.0, 5.0), Stage.STEPS: cost(6.0, 395.0)}


def test_shares_add_up_and_keep_their_order():
    found = stages(study(trial(0, stages=FIRST), pruned(1), trial(2, stages=SECOND))).shares
    assert [one.stage for one in found] == [stage for stage in Stage if stage in FIRST]
    by_stage = {one.stage: one for one in found}
    assert by_stage[Stage.IMPORTS].duration_s == 4.0
    assert by_stage[Stage.IMPORTS].median_s == 2.0
    assert by_stage[Stage.STEPS].energy_share == pytest.approx(795 / 1000)
    assert by_stage[Stage.STEPS].duration_share == pytest.approx(16 / 30)
    assert sum(one.energy_share for one in found) == pytest.approx(1)
    assert sum(one.duration_share for one in found) == pytest.approx(1)


def test_speed_leaves_out_the_first_step_and_says_what_it_took():
    fast = trial(0, stages=FIRST, steps_done=5, params={"precision": "bf16"})
    slow = trial(1, stages=SECOND, steps_done=80)
    one_step = trial(2, stages={Stage.COMPILE: cost(4, 9)}, steps_done=1)
    gpus = Hardware(cpu="a CPU", cpu_cores=8, ram_gib=64, gpus=("NVIDIA H100 PCIe", "NVIDIA H200"))
    data = study(fast, slow, one_step, pruned(3), prepared=PREPARED)
    data = data.model_copy(update={"provenance": data.provenance.model_copy(update={"hardware": gpus})})
    first, second = stages(data).speeds
    tokens = 4 * 16 * 64  # steps after the first × sequences × their length
    assert (first.trial, second.trial) == (0, 1)
    assert first.tokens_per_s == tokens / 10
    assert first.millijoules_per_token == pytest.approx(400e3 / tokens)
    assert first.first_step_s == 4.0
    assert first.first_step_excess_kwh == pytest.approx(kwh_from_joules(100 - 400 / 4))
    assert first.flops_utilisation == pytest.approx(6 * 1e6 * tokens / 10 / (756e12 + 989.4e12))
    assert second.first_step_excess_share == pytest.approx((5 - 395 / 79) / 400, abs=1e-12)
    assert second.flops_utilisation is None  # in which precision it trained is not known


@pytest.mark.parametrize("gpus", [(), ("a GPU",), ("NVIDIA H200", "a GPU")])
def test_utilisation_is_said_of_known_gpus_only(gpus: tuple[str, ...]):
    data = study(trial(0, stages=FIRST, steps_done=5, params={"precision": "bf16"}), prepared=PREPARED)
    hardware = Hardware(cpu="a CPU", cpu_cores=8, ram_gib=64, gpus=gpus)
    data = data.model_copy(update={"provenance": data.provenance.model_copy(update={"hardware": hardware})})
    (speed,) = stages(data).speeds
    assert speed.flops_utilisation is None


def test_a_study_that_tells_no_stages_has_no_tables_of_them(tmp_path):
    data = study(trial(0), trial(1, 2e-3))
    assert stages(data).shares == stages(data).speeds == ()
    write_report(data, tmp_path / "without")
    assert "by stage" not in (tmp_path / "without" / "report.md").read_text()
    write_report(study(trial(0, stages=FIRST, steps_done=5), prepared=PREPARED), tmp_path / "with")
    text = (tmp_path / "with" / "report.md").read_text()
    assert "Time and energy of the trials by stage:" in text
    assert "| 0 | 410 | 97.7 | 4.00 | 0 | 0 % |" in text
