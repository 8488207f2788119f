"""What each machine had of a study's trials."""

import math

import pytest
from small_studies import on_two_machines, study, trial

from carbonopt.analysis.by_node import by_node


def test_the_machines_readings_add_up_to_the_trials() -> None:
    data = on_two_machines()
    first, second = by_node(data)
    assert [(row.name, row.trials, row.most_ranks, row.gpus) for row in (first, second)] == [
        ("node1", 3, 2, 2),
        ("node2", 2, 2, 2),
    ]
    assert second.train_kwh == pytest.approx(1e-3)
    assert first.train_kwh == pytest.approx(2e-3)
    assert (first.train_gpu_kwh, second.train_gpu_kwh) == pytest.approx((1e-3, 0.5e-3))
    spent_kwh = math.fsum(record.energy_kwh.total for record in data.records)
    assert first.total_kwh + second.total_kwh == pytest.approx(spent_kwh)


def test_a_study_on_one_machine_has_none() -> None:
    data = on_two_machines()
    alone = [record.model_copy(update={"nodes": record.nodes[:1]}) for record in data.records]
    assert by_node(study(*alone)) == by_node(study(trial(0))) == ()


def test_gpus_that_every_trial_leaves_idle_are_none_that_trials_had() -> None:
    data = on_two_machines()
    three = [
        record.model_copy(update={"params": record.params.model_copy(update={"world_size": 3})})
        for record in data.records[:2]
    ]
    found = by_node(data.model_copy(update={"records": tuple(three)}))
    assert [(row.most_ranks, row.gpus) for row in found] == [(2, 2), (1, 1)]
