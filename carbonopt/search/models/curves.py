"""Model of the quality that a configuration will end at: a Gaussian process over learning curves.

It is fitted to the learning curves of all trials. It models the loss of the quality
(`Quality.loss`) on the quality's link. A point of a curve has three coordinates, each a combination
whose exponents are learned with it:

- how far the training is: ln(steps at peak rate) + α ln(learning rate) + β ln(batch): a step at
  twice the rate is worth 2^α steps;
- how noisy it is: ln(learning rate) + γ ln(batch), with a basin in its prior: too high and too low
  are both worse;
- how often the data was seen: ln(steps) + ln(batch), on which overfitting depends;

and the share of the peak rate that is left, since the loss falls when the rate falls. Other
dimensions follow. Each trial has an offset of its own (its seed, and what no coordinate explains)
beside the noise of each evaluation. The parameters are those of highest posterior density under
priors that hold for language models at large. Evaluations that fit badly (a spike of the loss) lose
their weight.

scikit-learn's `GaussianProcessRegressor`, which is used for the costs, could not do this: it takes
no priors for its kernel's parameters, and lowers no evaluation's weight.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from threadpoolctl import threadpool_limits

from carbonopt.core.arrays import Array, Mask
from carbonopt.core.quality import Quality

# Standard deviation of the logarithm of language models' losses over the curves of a study.
_TYPICAL_SPREAD = 0.3
_QUARTILES_APART = 1.349  # distance of a normal distribution's quartiles, in standard deviations
_LEAST_LOSS = 1e-9  # the smallest loss whose logarithm is taken

FIT_ITERATIONS = 40  # largest number of iterations of a fit, unless fewer are asked for

# Columns of a row.
LN_BATCH, LN_RATE, LN_STEPS, RATE_SHARE = range(4)
CORE = 4  # number of these columns; those of other dimensions follow

# Parameters: three length scales, amplitude of the rate's share, amplitude, noise of an evaluation
# and of a trial (logarithms); α, β, γ; then a length scale (logarithm) for each other dimension.
# Priors are normal: mean, standard deviation. On recorded tables trials differ by 0.004 to 0.02,
# evaluations of one by 0.001 to 0.06.
_SHARE, _AMPLITUDE, _NOISE, _TRIAL_NOISE, _ALPHA, _BETA, _GAMMA = range(3, 10)
_CORE_MEANS = (*map(math.log, (1.5, 1.5, 3.0, 0.1, 0.4, 0.0035, 0.007)), 0.6, 0.3, -0.4)
_CORE_SDS = (0.4, 0.4, 0.5, 0.5, 0.5, 0.7, 1.0, 0.25, 0.25, 0.25)
_CORE_PARAMETERS = len(_CORE_MEANS)
_OTHER_PRIOR = (math.log(2.0), 0.5)
# For prior studies: how much one has in common with this one (prior of a length scale, at a
# distance of 1), and the standard deviation of its own offset. With 4 ± 0.7 a study with the
# opposite rates made searches 1.5 times as expensive, with 1.5 ± 0.5 1.3 times; after similar
# studies they cost the same with either.
_EARLIER_PRIOR, _OFFSET_SD = (math.log(1.5), 0.5), 0.5
# The mean of the linked loss is a constant, a slope over the first coordinate, a basin over the
# second and what the full rate adds to it; the last three have a mean and a standard deviation
# each. The effect of the full rate differs between tasks (0.2 on text2sql's table, 0.4 to 0.5 on
# AlexNet's) far more than within one: with 0.1, and 0.1 nearby alone, text2sql's searches cost
# twice as much.
_CONSTANT_SD, _SLOPE, _BASIN, _FULL_RATE = 0.5, (-0.2, 0.15), (0.06, 0.05), (0.15, 0.3)
# Least standard deviation of a linked loss about its curve, since no curve has quite the form that
# is modelled here.
_MISFIT = 0.003
_OUTLIER_SDS = 3.0
# Shares of a trial from which its end is predicted if it is the only trial.
_BEGINNINGS = (1 / 6, 1 / 3, 1 / 2, 2 / 3)
_JITTER = 1e-9  # share of the largest variance; keeps rounded matrices positive definite
_FAR = 12.0  # a logarithm beyond it is not a parameter but a line search gone astray


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread.

    The matrices here are so small that threads cost four times the CPU time, and far more on a busy
    CPU.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        yield


@dataclass(frozen=True)
class Points:
    """Evaluations: their rows, losses, and the trial that each belongs to."""

    rows: Array  # (points, CORE + others)
    losses: Array  # (points,)
    trial: Array  # (points,)
    share: Array  # (points,), share of the trial's steps

    def joined(self, others: "Points") -> "Points":
        pairs = (self.rows, others.rows), (self.losses, others.losses), (self.trial, others.trial)
        return Points(*map(np.concatenate, (*pairs, (self.share, others.share))))

    def after(self, trial: int, shares: Sequence[float]) -> list[Mask]:
        """Return masks of a trial's evaluations after each of these shares.

        Shares that have no evaluation of the trial on both sides are left out.
        """
        of_trial = self.trial == trial
        later = [of_trial & (self.share > share) for share in shares]
        return [mask for mask in later if mask.any() and (of_trial & ~mask).any()]


@dataclass(frozen=True)
class Link:
    """The scale on which losses are modelled.

    It is their logarithm or, if they can have any sign, the losses in a unit of their spread.
    """

    unit: float | None = None  # None: the logarithm
    # number of examples, if each loss is a share of errors: half an error is the least it can show
    examples: float = math.inf

    @classmethod
    def of(cls, quality: Quality, losses: Sequence[float], examples: float = math.inf) -> "Link":
        """Create the link for losses like those that are modelled.

        On its scale they spread as widely as the logarithms of losses for which the priors were
        made.
        """
        if quality.link != "identity":
            return cls(None, examples)
        return cls(
            _spread(losses) / _TYPICAL_SPREAD or max(map(abs, losses), default=0.0) or 1.0, examples
        )

    def linked(self, losses: Array | float) -> Array:
        if self.unit is not None:
            return np.asarray(losses, dtype=float) / self.unit
        return np.asarray(np.log(np.maximum(losses, max(_LEAST_LOSS, 0.5 / self.examples))))

    def loss(self, linked: float) -> float:
        return math.exp(linked) if self.unit is None else linked * self.unit

    def variance(self, linked: Array) -> Array:
        """Return the variance of the logarithms of shares of errors.

        It is that of a binomial share, to the first order (delta method), and 0 for other losses.
        """
        if math.isinf(self.examples):
            return np.zeros_like(linked)
        return np.asarray(np.maximum(0.0, np.exp(-linked) - 1) / self.examples)


class CurveModel:
    """The Gaussian process of learning curves, given evaluations.

    Args:
        centre: the middle of the space in ln(batch) and ln(learning rate), where the basin is
            expected.
        fitted: a model whose parameters, and distrust of outliers among the first points, are kept;
            None: the parameters are fitted.
        effort: iterations of the fit.
        earlier: number of prior studies whose evaluations are among these. The rows' last columns,
            one for each prior study, say which study a row belongs to.
    """

    def __init__(
        self,
        points: Points,
        link: Link,
        centre: tuple[float, float],
        fitted: Self | None = None,
        effort: int = FIT_ITERATIONS,
        earlier: int = 0,
    ) -> None:
        columns = points.rows.shape[1]
        others = [*[_OTHER_PRIOR] * (columns - CORE - earlier), *[_EARLIER_PRIOR] * earlier]
        self._prior = np.array([*zip(_CORE_MEANS, _CORE_SDS, strict=True), *others])
        self._earlier = earlier
        self._link, self._centre, self.points = link, centre, points
        mean_steps = points.rows[:, LN_STEPS].mean() if len(points.rows) else 0.0
        self._origin = np.array([*centre, mean_steps, *[0.0] * (columns - LN_STEPS - 1)])
        self._rows = points.rows - self._origin
        linked = link.linked(points.losses)
        self._level = float(linked.mean()) if len(linked) else 0.0
        self._y = linked - self._level
        self._same = (points.trial[:, None] == points.trial[None, :]).astype(float)
        # The extra variance of each evaluation; it grows for those that fit badly.
        self._distrust = link.variance(linked)
        self.parameters: Array = self._prior[:, 0] if fitted is None else fitted.parameters
        if fitted is not None:
            self._distrust[: len(fitted._distrust)] = fitted._distrust
        if fitted is None and len(self._y):
            self._fit(effort)
        else:
            self._condition()

    def given(self, more: Points) -> "CurveModel":
        """Return the same process with more evaluations and the same parameters.

        This is fast enough for a trial that is running.
        """
        return CurveModel(
            self.points.joined(more), self._link, self._centre, fitted=self, earlier=self._earlier
        )

    @property
    def noise(self) -> float:
        """The standard deviation of one evaluation about its configuration's mean over all seeds.

        It refers to the linked loss.
        """
        return math.sqrt(sum(_noise_variances(self.parameters)))

    def predict(self, rows: Array, trials: Sequence[int] | None = None) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the linked loss of rows, (n, columns).

        Args:
            trials: the trials that the rows belong to, whose own offsets are then known from their
                evaluations. None: new trials.
        """
        z, mean, solved = self._across(rows, trials)
        linear = (self._terms(z) ** 2).sum(1)
        before = (
            math.exp(2 * self.parameters[_AMPLITUDE])
            + math.exp(2 * self.parameters[_SHARE]) * z[:, -1] ** 2
        )
        variance = before + linear + self.noise**2 - (solved**2).sum(0)
        return mean, np.sqrt(np.maximum(variance + self._link.variance(mean), 1e-12))

    def surprise(self, hidden: Mask) -> float:
        """Return how many standard deviations the last hidden evaluation lies above its forecast.

        The forecast is made from the evaluations that are not hidden.
        """
        residual, spread = self._hidden(hidden)
        return residual / spread

    def log_score(self, trials: Collection[int]) -> float:
        """Return how well the model predicts each trial's last evaluation from the other trials.

        A single trial's is predicted from its own evaluations before it. The result is the sum of
        the logarithms of the densities that the model gives the evaluations (pseudo-likelihood).
        """
        if len(trials) == 1:
            hidden = [mask for trial in trials for mask in self.points.after(trial, _BEGINNINGS)]
        else:
            hidden = [self.points.trial == trial for trial in trials]
        known = map(self._hidden, hidden)
        return -sum((residual / spread) ** 2 / 2 + math.log(spread) for residual, spread in known)

    def _hidden(self, hidden: Mask) -> tuple[float, float]:
        """Return the distance of the last hidden evaluation above its forecast, and its spread.

        The spread is a standard deviation. The forecast is made from the evaluations that are not
        hidden (Rasmussen & Williams 2006, section 5.4.2, for several at once).
        """
        block = np.linalg.inv(self._precision[np.ix_(hidden, hidden)])
        return float((block @ self._solved[hidden])[-1]), math.sqrt(block[-1, -1])

    @cached_property
    def _precision(self) -> Array:
        return _inverse(self._root)

    def sample(
        self, rows: Array, count: int, rng: np.random.Generator, *, means: bool = False
    ) -> Array:
        """Draw the linked loss of new trials jointly, (rows, count).

        With `means`, the means over all seeds are drawn.
        """
        z, mean, solved = self._across(rows, None)
        covariance = self._kernel(z, z)[0] + self._linear(z, z)
        noise = (0.0 if means else self.noise**2) + _JITTER * max(
            1.0, covariance.diagonal().max(initial=0.0)
        )
        covariance += noise * np.eye(len(z)) - solved.T @ solved
        if not means:
            covariance += np.diag(self._link.variance(mean))
        return np.asarray(
            mean[:, None] + cholesky(covariance, lower=True) @ rng.standard_normal((len(z), count))
        )

    def _coordinates(self, rows: Array, parameters: Array) -> Array:
        """Return rows' coordinates, (points, three coordinates + others + share of the rate)."""
        batch, rate, steps = rows[:, LN_BATCH], rows[:, LN_RATE], rows[:, LN_STEPS]
        training = steps + parameters[_ALPHA] * rate + parameters[_BETA] * batch
        noise = rate + parameters[_GAMMA] * batch
        return np.column_stack(
            [training, noise, steps + batch, rows[:, CORE:], rows[:, RATE_SHARE]]
        )

    def _kernel(
        self, a: Array, b: Array, parameters: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Return the Matérn 5/2 kernel and the parts that gradients need.

        Its amplitude grows with the share of the rate.
        """
        parameters = self.parameters if parameters is None else parameters
        per_length = math.sqrt(5) * np.exp(-_lengths(parameters))
        r = np.sqrt(cdist(a[:, :-1] * per_length, b[:, :-1] * per_length, "sqeuclidean") + 5e-12)
        fall = np.exp(-r)
        shares = np.outer(a[:, -1], b[:, -1])
        amplitude = math.exp(2 * parameters[_AMPLITUDE]) + math.exp(2 * parameters[_SHARE]) * shares
        near = (1 + r) * fall
        shape = near + r * r / 3 * fall
        return amplitude * shape, shape, amplitude * 5 / 3 * near

    def _linear(self, a: Array, b: Array) -> Array:
        """Return the covariance of the mean."""
        return np.asarray(self._terms(a) @ self._terms(b).T)

    def _terms(self, z: Array) -> Array:
        """Return the terms of the mean, each as large as its standard deviation, (points, terms).

        They are a constant, the slope, the basin, what the full rate adds, and the offset of each
        prior study.
        """
        constant = np.full(len(z), _CONSTANT_SD)
        sloped = _SLOPE[1] * z[:, 0], _BASIN[1] * z[:, 1] ** 2, _FULL_RATE[1] * z[:, -1]
        return np.column_stack(
            [constant, *sloped, _OFFSET_SD * z[:, z.shape[1] - 1 - self._earlier : -1]]
        )

    @staticmethod
    def _prior_mean(z: Array) -> Array:
        return _SLOPE[0] * z[:, 0] + _BASIN[0] * z[:, 1] ** 2 + _FULL_RATE[0] * z[:, -1]

    def _fit(self, effort: int) -> None:
        options = {"maxiter": effort}
        for may_distrust in (True, False):
            fitted = minimize(
                self._objective, self.parameters, jac=True, method="L-BFGS-B", options=options
            )
            self.parameters = fitted.x
            self._condition()
            if not (may_distrust and self._distrust_outliers()):
                return

    def _distrust_outliers(self) -> bool:
        """Raise the variance of outliers; return whether there are any.

        An evaluation is judged by its residual when it is left out of the rest (Rasmussen &
        Williams 2006, eq. 5.12).
        """
        inverse = np.diag(_inverse(self._root))
        residuals = self._solved / inverse
        bad = np.abs(residuals) * np.sqrt(inverse) > _OUTLIER_SDS
        self._distrust[bad] = np.maximum(self._distrust[bad], residuals[bad] ** 2)
        return bool(bad.any())

    def _noise(self, parameters: Array) -> Array:
        per_trial, each = _noise_variances(parameters)
        return np.asarray(per_trial * self._same + np.diag(each + self._distrust))

    def _condition(self) -> None:
        self._z = self._coordinates(self._rows, self.parameters)
        covariance = (
            self._kernel(self._z, self._z)[0]
            + self._linear(self._z, self._z)
            + self._noise(self.parameters)
        )
        self._root = cholesky(covariance, lower=True) if len(self._y) else np.zeros((0, 0))
        residuals = self._y - self._prior_mean(self._z)
        self._solved = cho_solve((self._root, True), residuals) if len(residuals) else residuals

    def _across(self, rows: Array, trials: Sequence[int] | None) -> tuple[Array, Array, Array]:
        """Return the rows' coordinates, their mean, and what is explained of their covariance.

        The last is the root of what the evaluations take from the rows' covariance.
        """
        z = self._coordinates(rows - self._origin, self.parameters)
        across = self._kernel(z, self._z)[0] + self._linear(z, self._z)
        if trials is not None:
            same_trial = np.asarray(trials)[:, None] == self.points.trial[None, :]
            across = across + _noise_variances(self.parameters)[0] * same_trial
        solved = (
            solve_triangular(self._root, across.T, lower=True)
            if len(self._y)
            else np.zeros((0, len(z)))
        )
        return z, across @ self._solved + self._prior_mean(z) + self._level, solved

    def _objective(self, parameters: Array) -> tuple[float, Array]:
        """Return the negative log posterior density of the parameters, and its gradient."""
        scaled = (parameters - self._prior[:, 0]) / self._prior[:, 1]
        if np.abs(parameters).max() > _FAR:
            return 1e10, np.zeros_like(parameters)
        z = self._coordinates(self._rows, parameters)
        kernel, shape, steep = self._kernel(z, z, parameters)
        try:
            root = cholesky(
                kernel + self._linear(z, z) + self._noise(parameters),
                lower=True,
                check_finite=False,
            )
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(parameters)
        residuals = self._y - self._prior_mean(z)
        solved = cho_solve((root, True), residuals)
        value = residuals @ solved / 2 + np.log(np.diag(root)).sum() + (scaled**2).sum() / 2
        # d value / d K, times two; then K's derivatives by each parameter.
        by_kernel = _inverse(root) - np.outer(solved, solved)
        gradient = np.zeros_like(parameters)
        by_distance = by_kernel * steep
        # The sum over all pairs of points of by_distance × (x - x') × (y - y') is x (pull y), for
        # each column.
        pull = 2 * (np.diag(by_distance.sum(1)) - by_distance)
        weights, moved = np.exp(-2 * _lengths(parameters)), z[:, :-1]
        lengths = (moved * (pull @ moved)).sum(0) / 2 * weights
        gradient[:3], gradient[_CORE_PARAMETERS:] = lengths[:3], lengths[3:]
        share = math.exp(2 * parameters[_SHARE]) * np.outer(z[:, -1], z[:, -1])
        gradient[_AMPLITUDE] = math.exp(2 * parameters[_AMPLITUDE]) * (by_kernel * shape).sum()
        gradient[_SHARE] = (by_kernel * shape * share).sum()
        gradient[_NOISE] = math.exp(2 * parameters[_NOISE]) * np.trace(by_kernel)
        gradient[_TRIAL_NOISE] = (
            math.exp(2 * parameters[_TRIAL_NOISE]) * (by_kernel * self._same).sum()
        )

        def by_coordinate(index: int, change: Array) -> float:
            return float(-weights[index] / 2 * (z[:, index] @ pull @ change))

        rate, batch = self._rows[:, LN_RATE], self._rows[:, LN_BATCH]
        slope = _SLOPE[1] ** 2 * (by_kernel @ z[:, 0]) - _SLOPE[0] * solved
        gradient[_ALPHA] = by_coordinate(0, rate) + slope @ rate
        gradient[_BETA] = by_coordinate(0, batch) + slope @ batch
        basin = _BASIN[1] ** 2 * (by_kernel @ z[:, 1] ** 2) - _BASIN[0] * solved
        gradient[_GAMMA] = by_coordinate(1, batch) + basin @ (2 * z[:, 1] * batch)
        return value, gradient + scaled / self._prior[:, 1]


def _spread(losses: Sequence[float]) -> float:
    """Return the standard deviation of losses, estimated from the middle half of them.

    One loss far off then hides no difference of the others. If the ends of that half are equal, all
    losses count. The result is 0 if all are equal.
    """
    # Checked first, since the standard deviation of equal large losses is rounded, and not 0.
    if not len(losses) or min(losses) == max(losses):
        return 0.0
    low, high = np.quantile(losses, (0.25, 0.75))
    return float((high - low) / _QUARTILES_APART if high > low else np.std(losses))


def _noise_variances(parameters: Array) -> tuple[float, float]:
    """Return the variances of a trial's own offset and of each evaluation."""
    return math.exp(2 * parameters[_TRIAL_NOISE]), math.exp(2 * parameters[_NOISE]) + _MISFIT**2


def _lengths(parameters: Array) -> Array:
    """Return the logarithms of the length scales of all coordinates."""
    return np.concatenate([parameters[:3], parameters[_CORE_PARAMETERS:]])


def _inverse(root: Array) -> Array:
    """Return the inverse of the matrix with this lower root.

    It takes a third of the time of solving for the identity.
    """
    upper, _ = dpotri(root.T)
    return np.asarray(np.triu(upper) + np.triu(upper, 1).T)
