"""The learning-curve model: its gradient, and that it knows what it knows."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from carbonopt.search.models.curves import CORE, CurveModel, Link, Points

CENTRE = (math.log(32), math.log(1e-3))
SHARES = np.arange(1, 9) / 8


def power_law(
    batch: float, rate: float, steps: float, kind: np.ndarray, optimum: float, rng=None
) -> float:
    """A loss: an irreducible part, a power of the steps, a basin over the rate; noise of half a
    percent.
    """
    off = math.log(rate / (1e-3 * optimum * math.sqrt(batch / 32)))
    loss = 1.8 + 6.0 * (steps * batch / 32) ** -0.35 + 0.08 * off**2 + 0.02 * kind.sum()
    return loss * (1.0 if rng is None else math.exp(0.005 * rng.standard_normal()))


def trials(rng: np.random.Generator, count: int, others: int = 0, noisy: bool = True) -> Points:
    """Evaluations of random trials at a constant rate."""
    optimum = math.exp(0.5 * rng.standard_normal())
    rows, losses, trial, shares = [], [], [], []
    for number in range(count):
        batch, rate = 2.0 ** rng.integers(3, 8), 10 ** rng.uniform(-4, -2)
        kind, total = rng.random(others), 4096 * rng.choice([1, 2, 4]) / batch * 8
        for share in SHARES:
            rows.append([math.log(batch), math.log(rate), math.log(total * share), 1.0, *kind])
            losses.append(
                power_law(batch, rate, total * share, kind, optimum, rng if noisy else None)
            )
            trial.append(number)
            shares.append(share)
    return Points(np.array(rows), np.array(losses), np.array(trial), np.array(shares))


def subset(points: Points, which: np.ndarray) -> Points:
    return Points(
        points.rows[which], points.losses[which], points.trial[which], points.share[which]
    )


@pytest.mark.parametrize("others", [0, 2])
def test_the_gradient_is_that_of_the_objective(others: int) -> None:
    rng = np.random.default_rng(others)
    model = CurveModel(trials(rng, 5, others), Link(), CENTRE, effort=3)
    for _ in range(4):
        place = model._prior[:, 0] + 0.7 * model._prior[:, 1] * rng.standard_normal(
            len(model.parameters)
        )
        _, gradient = model._objective(place)
        for index in range(len(place)):
            change = np.zeros_like(place)
            change[index] = 1e-5
            slope = (
                model._objective(place + change)[0] - model._objective(place - change)[0]
            ) / 2e-5
            assert gradient[index] == pytest.approx(slope, rel=1e-3, abs=1e-3), f"parameter {index}"


def test_predictions_go_through_what_was_measured_and_know_less_away_from_it() -> None:
    points = trials(np.random.default_rng(0), 8, noisy=False)
    model = CurveModel(points, Link(), CENTRE)
    mean, spread = model.predict(points.rows, points.trial)
    np.testing.assert_allclose(np.exp(mean), points.losses, rtol=0.02)
    away = points.rows[-1] + np.array([[0, index, 0, 0] for index in range(6)])
    assert (np.diff(model.predict(away)[1]) > 0).all(), "further in the rate"
    assert model.predict(points.rows)[1].min() >= spread.min(), (
        "another seed is less certain than the trial itself"
    )


def test_nothing_measured_is_the_prior() -> None:
    nothing = Points(np.zeros((0, CORE)), np.zeros(0), np.zeros(0, dtype=int), np.zeros(0))
    model = CurveModel(nothing, Link(), CENTRE)
    rows = np.array([[*CENTRE, math.log(100), 1.0], [*CENTRE, math.log(1000), 1.0]])
    mean, spread = model.predict(rows)
    assert mean[1] < mean[0], "more steps, less loss"
    assert (spread > 0.3).all()
    assert model.sample(rows, 5, np.random.default_rng(0)).shape == (2, 5)


def test_draws_are_spread_as_predictions_are() -> None:
    model = CurveModel(trials(np.random.default_rng(3), 6), Link(), CENTRE)
    rows = trials(np.random.default_rng(4), 3).rows[7::8]
    mean, spread = model.predict(rows)
    drawn = model.sample(rows, 20_000, np.random.default_rng(5))
    np.testing.assert_allclose(drawn.mean(1), mean, atol=0.05 * spread.max())
    np.testing.assert_allclose(drawn.std(1), spread, rtol=0.05)


def test_a_spike_does_not_spoil_its_neighbours() -> None:
    points = trials(np.random.default_rng(7), 8)
    spiked = replace(points, losses=points.losses.copy())
    place = 8 * 3 + 4  # in the middle of the fourth trial
    spiked.losses[place] *= 1.5
    others = np.delete(np.arange(len(points.losses)), place)
    mean, _ = CurveModel(spiked, Link(), CENTRE).predict(points.rows[others], points.trial[others])
    np.testing.assert_allclose(np.exp(mean), points.losses[others], rtol=0.04)


def test_what_a_running_trial_shows_of_itself_is_taken_in_and_old_spikes_stay_distrusted() -> None:
    points = trials(np.random.default_rng(1), 6)
    known = subset(points, points.trial < 5)
    own = subset(points, (points.trial == 5) & (SHARES[np.arange(len(points.losses)) % 8] <= 0.5))
    spiked = replace(known, losses=known.losses.copy())
    spiked.losses[8 * 3 + 4] *= 1.5
    end = points.rows[-1:]
    truth = math.log(points.losses[-1])
    clean, model = CurveModel(known, Link(), CENTRE), CurveModel(spiked, Link(), CENTRE)
    mean, spread = model.given(own).predict(end, [5])
    assert spread < model.predict(end)[1], "its own curve tells something"
    assert spread < 2 * clean.given(own).predict(end, [5])[1], (
        "the spike doesn't count as noise of all"
    )
    assert mean == pytest.approx(truth, abs=0.03)


def left_out() -> Iterator[float]:
    """How many standard deviations the ends of trials lie off, told from 10 others and half their
    own curve or none.
    """
    for seed in range(12):
        points = trials(np.random.default_rng([99, seed]), 16)
        known = CurveModel(subset(points, points.trial < 10), Link(), CENTRE)
        for number in range(10, 16):
            own = (points.trial == number) & (np.arange(len(points.losses)) % 8 < 4)
            end = np.flatnonzero(points.trial == number)[-1:]
            for mean, spread in (
                known.predict(points.rows[end]),
                known.given(subset(points, own)).predict(points.rows[end], [number]),
            ):
                yield float((math.log(points.losses[end[0]]) - mean[0]) / spread[0])


def test_ninety_percent_intervals_hold_about_as_many() -> None:
    off = np.abs(np.array(list(left_out())))
    assert 0.75 <= (off < 1.645).mean() <= 0.99


def test_few_errors_tell_little() -> None:
    """Shares of errors are counts: of k wrong examples, the logarithm has a standard deviation of
    about 1/√k.
    """
    points = trials(np.random.default_rng(5), 8)
    losses = 0.02 * np.exp(
        points.losses - points.losses.max()
    )  # far below the noise of 100 examples
    shares = replace(points, losses=losses)
    exact = CurveModel(shares, Link(), CENTRE)
    model = CurveModel(shares, Link(examples=100), CENTRE)
    mean, spread = model.predict(points.rows)
    assert (spread >= np.sqrt((np.exp(-mean) - 1) / 100)).all()
    assert spread.min() > 3 * exact.predict(points.rows)[1].max()
    assert Link(examples=100).linked(0.0) == math.log(0.5 / 100) == Link(examples=100).linked(1e-4)
