"""What probes tell, and what they add to a study's energy."""

import pytest
from documents import document_of, rows_of, tables_of
from small_studies import probe, study, trial

from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.probes import probes
from carbonopt.core.trial import Failure, Kernels, StopReason, TrialState
from carbonopt.core.units import kwh_from_joules

FAILED = {"stop_reason": None, "stages": None, "steps_done": None, "peak_memory_gib": None}
FULL = {
    **FAILED,
    "state": TrialState.INFEASIBLE,
    "failure": Failure(kind="out_of_memory", text="too large"),
}
PROBES = (
    probe(0, 200.0, kernels=Kernels.COMPILED),
    probe(1, 100.0, params={"zero_stage": 3}),
    probe(2, 50.0, **FULL),
    probe(3, 50.0, **{**FAILED, "state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED}),
)
DATA = study(trial(0), trial(1, 2e-3, 4.0), probes=PROBES)


def test_a_study_without_probes_has_none() -> None:
    assert probes(study(trial(0))) is None


def test_each_probe_says_what_its_steps_took() -> None:
    found = probes(DATA)
    assert found is not None and found.settings == ("global_batch_size", "zero_stage")
    first, second, *others = found.results
    assert first.step_kwh == pytest.approx(kwh_from_joules(200 * 0.01))
    assert first.first_step_excess_kwh == pytest.approx(kwh_from_joules(200 * 0.49))
    assert (second.params.zero_stage, second.became, second.peak_memory_gib) == (3, "measured", 3.5)
    assert [(other.became, other.step_kwh, other.first_step_excess_kwh) for other in others] == [
        ("infeasible", None, None),
        ("interrupted", None, None),
    ]
    assert found.spent_kwh == pytest.approx(kwh_from_joules(400))
    assert found.spent_share == pytest.approx(found.spent_kwh / DATA.spent_kwh())


def test_they_are_a_part_of_the_study_s_energy_of_their_own() -> None:
    without, spent = footprint(study(*DATA.records)), footprint(DATA)
    assert spent.probes_kwh == pytest.approx(kwh_from_joules(400)) and without.probes_kwh == 0
    assert spent.energy_kwh == pytest.approx(without.energy_kwh + spent.probes_kwh)
    assert spent.by_phase_kwh == without.by_phase_kwh and spent.by_state_kwh == without.by_state_kwh
    parts = [*spent.by_phase_kwh.values(), spent.earlier_attempts_kwh, spent.probes_kwh]
    assert sum(parts) == pytest.approx(spent.energy_kwh)
    shown = rows_of(tables_of(document_of(DATA))["by-state"])
    assert "no trial: probes" in [row["State"] for row in shown]
