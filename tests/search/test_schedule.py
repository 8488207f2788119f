"""Where a learning rate is over a trial, against the schedulers that the trials really run with."""

import numpy as np
import pytest
import torch
from optuna.distributions import CategoricalDistribution
from transformers import get_scheduler

from carbonopt.core.dimensions import LR_SCHEDULERS, TrialParams
from carbonopt.search.models.features import SpaceEncoder, progress
from carbonopt.search.observation import trial_params

STEPS = 1000
EXTRA = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": STEPS // 5, "decay_type": "1-sqrt"},
}
ENCODER = SpaceEncoder({"epochs": CategoricalDistribution((1, 2, 4))}, 4096)


def real_shares(scheduler: str, warmup: float) -> np.ndarray:
    """Of the peak rate, at each step and after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    real = get_scheduler(
        scheduler,
        optimizer,
        round(warmup * STEPS),
        STEPS,
        scheduler_specific_kwargs=EXTRA.get(scheduler),
    )
    shares = []
    for _ in range(STEPS + 1):
        shares.append(real.get_last_lr()[0])
        optimizer.step()
        real.step()
    return np.array(shares)


def params(scheduler: str | None, warmup: float | None = None, epochs: float = 1) -> TrialParams:
    return TrialParams(
        global_batch_size=8,
        micro_batch_size_per_gpu=8,
        learning_rate=1e-3,
        epochs=epochs,
        lr_scheduler=scheduler,
        warmup_ratio=warmup,
    )


@pytest.mark.parametrize("warmup", [0.0, 0.1])
@pytest.mark.parametrize("scheduler", LR_SCHEDULERS)
def test_every_scheduler_runs_as_transformers_runs_it(scheduler: str, warmup: float) -> None:
    shares = real_shares(scheduler, warmup)
    done = np.array(
        [progress(params(scheduler, warmup), step / STEPS) for step in range(1, STEPS + 1)]
    )
    # Without a warm-up inverse_sqrt falls from the first step on, over 10,000: taken as constant.
    # The decay of the last fifth begins with a fall by 7 % at one step.
    steep = scheduler == "warmup_stable_decay" or (scheduler, warmup) == ("inverse_sqrt", 0.0)
    tolerance = 0.05 if steep else 0.01
    np.testing.assert_allclose(done[:, 1], shares[1:], atol=tolerance)
    np.testing.assert_allclose(done[:, 0], np.cumsum(shares[:-1]) / STEPS, atol=tolerance)


def test_the_shortest_warm_up_is_one() -> None:
    area, share = progress(params("inverse_sqrt", 1e-4), 1.0)
    assert share < 0.05 and area < 0.1


def test_what_a_study_leaves_out_is_linear_without_warm_up() -> None:
    assert progress(params(None), 0.3) == progress(params("linear", 0.0), 0.3)


def test_with_a_constant_rate_a_shorter_trial_is_the_beginning_of_a_longer_one() -> None:
    def row(scheduler: str, epochs: float, share: float) -> list[float]:
        values = params(scheduler, epochs=epochs).model_dump(exclude_none=True)
        return ENCODER._curve_row(values, share)

    assert row("constant", 1, 0.5) == pytest.approx(row("constant", 4, 0.125))
    assert row("constant", 1, 1.0) == pytest.approx(row("constant", 4, 0.25))
    assert row("cosine", 1, 1.0) != pytest.approx(row("cosine", 4, 0.25), abs=0.1)


@pytest.mark.parametrize(("decay", "share"), [(0.1, 1.0), (0.2, 1.0), (0.5, 0.553), (None, 1.0)])
def test_the_models_see_when_a_stable_rate_begins_to_fall(
    decay: float | None, share: float
) -> None:
    values = {
        "global_batch_size": 8,
        "learning_rate": 1e-3,
        "epochs": 1,
        "lr_scheduler": "warmup_stable_decay",
        "decay_ratio": decay,
    }
    assert progress(trial_params(values), 0.6)[1] == pytest.approx(share, abs=1e-3)
