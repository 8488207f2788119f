"""What each parameter does to emissions and to the quality: how much of the variation it explains, and which way.

A Gaussian process (scikit-learn's) learns an objective over the parameters, its logarithm unless it is an
accuracy, from complete trials. On
two tables of recorded H200 runs, 26 of 150 or 200 were enough for it to explain 85 to 100 % of the variance of the
others; for a random forest it was 61 to 97 %. Of the parameters' values it takes logarithms, too, where the study file
asks for it or where all choices tried are above 0.

- The **marginal effect** is scikit-learn's partial dependence (Friedman, Annals of Statistics 29, 2001, sec. 8.1): the
  model's mean over the trials with one parameter set to a value in all of them. As a mean of logarithms it is a
  geometric mean of emissions or perplexities.
- The **importance** is the mean decrease in impurity of a random forest (scikit-learn's) over what the model expects at
  an even sample of the values that were tried, so that where a search has concentrated does not count for more. From 15
  to 30 recorded runs it differed from the exact shares of the parameters in the whole table's variance (half the sum of
  the differences) by up to 1 percentage point for emissions and 4 to 21 for perplexity. Of Optuna's evaluators on the
  trials themselves, mean decrease in impurity differed by 1 to 9 and 12 to 21, fANOVA by 2 to 8 and 12 to 24 in three
  times the time, and PED-ANOVA, which asks what the best tenth of the trials have in common, by 2 to 32 and 25 to 70.
- **Uncertainty** is by bootstrap over configurations (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
  ch. 13: percentile interval): repeats with other seeds come and go together, for they tell of the seeds' noise, not of
  other parameters. The process learns its lengths anew from each resample. From 20 or 30 recorded runs
  (4 draws from each of two tables) the 90 % intervals of effects (and 0.2 % on either side, as seeds make) held the
  exact one in 94 to 100 % of cases; from 10 or 15 in 68 to 98 %, the fewer the less `explained` is. Those of
  importances (and a percentage point) held the exact share, with interactions divided equally (Shapley), in 92 to 100 %
  and in 58 to 100 %.

What this can't tell: two parameters that always changed together from each other; anything beyond the values tried;
what the trials would have shown that were stopped, such as the costliest ones; `gaps` has the values of these.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from carbonopt.analysis.front import objectives
from carbonopt.analysis.parallel import in_forks, processes
from carbonopt.analysis.shortfall import AT_THE_END
from carbonopt.core.arrays import Array, Indices
from carbonopt.core.config import Choices, Range, Space
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord
from carbonopt.core.values import Frozen

if TYPE_CHECKING:  # sklearn and optuna take a second to import, which only reports can spare
    from sklearn.gaussian_process import GaussianProcessRegressor


LEVEL = 0.9
FEWEST = 8  # configurations
FEWEST_PER_PARAMETER = 2
# Of more complete trials, so many are drawn at random to learn from: the process' time grows with their cube.
MOST_TRIALS = 100
RESAMPLES = 200
MOST_VALUES = 6  # of a range, that effects are given at

_FOLDS = 5
_DESIGN = 256  # expected outcomes that importances are read from
_TREES = 4
_REFINEMENTS = 8  # steps of the optimizer from the lengths that all trials gave
_LONGEST_START = 2.0  # of these: at longer ones the likelihood is so flat that the optimizer would stay there
_LENGTHS = (0.1, 100.0)  # of the process, in spans of a parameter
_NOISE = (1e-5, 1.0)  # its variance, as a share of the objective's


class Effect(Frozen):
    """The marginal effect at one value of a parameter: the expected outcome with all others as they were tried."""

    value: int | float | str | bool
    trials: int  # complete trials with this value (with the nearest of the listed ones, where it is a range)
    expected: float  # kg CO2e of a run, or the quality
    lowest: float  # interval at `level`
    highest: float


class Parameter(Frozen):
    name: str
    importance: float  # share of the explained variation, 0 to 1; all parameters add up to 1
    importance_lowest: float
    importance_highest: float
    effects: tuple[Effect, ...]  # by rising value, words as in the study file


class Gap(Frozen):
    """A part of a free dimension where no trial completed, so that an effect there would be extrapolated."""

    name: str
    tried: tuple[int | float | str | bool, ...]  # what complete trials had; of a range its lowest and highest value
    untried: tuple[int | float | str | bool, ...] = ()  # the other choices
    low: float | None = None  # the ends of a range that the space allows
    high: float | None = None


class Influence(Frozen):
    """For one objective."""

    objective: str  # emissions, or the quality's name
    trials: int  # complete ones that this is learned from, MOST_TRIALS at most
    repeats: int = 0  # of these, runs of a configuration that another one of them has, too
    left_out: int = 0  # complete ones beyond MOST_TRIALS, chosen at random
    level: float  # of the intervals
    resamples: int  # bootstrap resamples behind the intervals
    explained: float | None  # share of variance explained on trials left out (cross-validated R²); None: too few trials
    parameters: tuple[Parameter, ...]  # most important first; free dimensions that took two values or more
    gaps: tuple[Gap, ...] = ()  # of the space, where nothing is said


class NotKnown(Frozen):
    """Why the study can't say."""

    objective: str  # emissions, or the quality's name
    trials: int  # complete ones
    repeats: int = 0  # of these, runs of a configuration that another one of them has, too
    needed: int  # configurations; where they are there (it is 2): two different values of a parameter and the outcome


def influence(data: StudyData, seed: int = 0, resamples: int = RESAMPLES) -> tuple[Influence | NotKnown, ...]:
    """Of the free dimensions on emissions, then on the quality; the same for the same data and seed.

    Of more complete trials than MOST_TRIALS, so many are drawn.

    Returns:
        For each objective what was found, or NotKnown: with fewer configurations that completed than FEWEST or
        FEWEST_PER_PARAMETER for each parameter that took two values; or where no parameter did, or the objective did
        not.
    """
    found = [(record, point) for record in data.records if (point := objectives(record)) and point[0] > 0]
    # At random: evenly spaced ones of a grid that was run in order can all lack the same values.
    drawn = np.sort(np.random.default_rng(seed).permutation(len(found))[:MOST_TRIALS])
    kept = [found[index] for index in drawn]
    records = [record for record, _ in kept]
    columns = _columns(data.config.search.space, records)
    repeats = len(records) - len({record.params for record in records})
    needed = max(FEWEST, FEWEST_PER_PARAMETER * len(columns))
    left_out = len(found) - len(kept)
    gaps = _gaps(data.config.search.space, [record for record, _ in found])
    results: list[Influence | NotKnown] = []
    quality = data.config.target.quality
    for index, (objective, log) in enumerate((("emissions", True), (quality.name, quality.value_of_mean == "exp"))):
        values = np.array([point[index] for _, point in kept])
        outcome = np.log(values) if log else values
        if len(kept) - repeats < needed:
            results.append(NotKnown(objective=objective, trials=len(kept), repeats=repeats, needed=needed))
        elif not columns or np.ptp(outcome) == 0:
            results.append(NotKnown(objective=objective, trials=len(kept), repeats=repeats, needed=2))
        else:
            with threadpool_limits(1, "blas"), warnings.catch_warnings():  # matrices too small to share between threads
                from sklearn.exceptions import ConvergenceWarning

                warnings.simplefilter("ignore", ConvergenceWarning)  # a length at its bound is an answer, too
                learned = _learn(objective, columns, outcome, log, seed, resamples)
                results.append(learned.model_copy(update={"repeats": repeats, "left_out": left_out, "gaps": gaps}))
    return tuple(results)


# ----------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class _Column:
    """One parameter over the trials, as numbers: 0 to 1 for what has an order, else the values' indices."""

    name: str
    codes: Array  # (trials,)
    values: tuple[Any, ...]  # that effects are given at
    places: Array  # their codes, (values,)
    ordered: bool


def _columns(space: Space, records: Sequence[TrialRecord]) -> list[_Column]:
    columns = []
    for name, domain in space.free().items():
        tried = [getattr(record.params, name) for record in records]
        if len(set(tried)) > 1:
            columns.append(_column(name, domain, tried))
    return columns


def _column(name: str, domain: Choices | Range, tried: list[Any]) -> _Column:
    if isinstance(domain, Choices) and isinstance(tried[0], str):
        words = [choice for choice in domain.choices if choice in tried]
        codes = np.array([words.index(word) for word in tried], float)
        return _Column(name, codes, tuple(words), np.arange(len(words), dtype=float), ordered=len(words) == 2)
    values = sorted(set(tried))
    log = domain.log if isinstance(domain, Range) else min(values) > 0
    scale = (lambda numbers: np.log(np.array(numbers, float))) if log else (lambda numbers: np.array(numbers, float))
    low, high = scale([values[0], values[-1]])
    places = (scale(values) - low) / (high - low)
    if isinstance(domain, Range) and len(values) > MOST_VALUES:
        spaced = np.linspace(0, 1, MOST_VALUES)
        nearest = sorted({int(abs(places - place).argmin()) for place in spaced})
        values, places = [values[index] for index in nearest], places[nearest]
    return _Column(name, (scale(tried) - low) / (high - low), tuple(values), places, ordered=True)


def _gaps(space: Space, records: Sequence[TrialRecord]) -> tuple[Gap, ...]:
    gaps = []
    for name, domain in space.domains().items():
        tried = {value for record in records if (value := getattr(record.params, name)) is not None}
        if not tried:
            continue
        if isinstance(domain, Choices):
            untried = tuple(choice for choice in domain.choices if choice not in tried)
            if untried:
                had = tuple(choice for choice in domain.choices if choice in tried)
                gaps.append(Gap(name=name, tried=had, untried=untried))
        elif isinstance(domain, Range) and domain.low < domain.high:
            ends = np.array([domain.low, min(tried), max(tried), domain.high], float)
            low, lowest, highest, high = np.log(ends) if domain.log else ends
            if max(lowest - low, high - highest) > AT_THE_END * (high - low):
                had = tuple(sorted({min(tried), max(tried)}))
                gaps.append(Gap(name=name, tried=had, low=domain.low, high=domain.high))
    return tuple(gaps)


# ------------------------------------------------------------------------------------------------------------- learning


def _learn(objective: str, columns: list[_Column], outcome: Array, log: bool, seed: int, resamples: int) -> Influence:
    """From the objective, (trials,); `log`: from its logarithms."""
    rng = np.random.default_rng(seed)
    codes = np.column_stack([column.codes for column in columns])
    rows, mean, spread = _rows(codes, columns), outcome.mean(), outcome.std()
    y = (outcome - mean) / spread
    whole = _process(rows, y)
    configuration = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    drawn = [np.ones(len(y), int), *(_draw(configuration, rng) for _ in range(resamples))]

    def told(counts: Sequence[Indices]) -> tuple[Array, list[Array]]:
        models = [whole if one is drawn[0] else _resampled(whole, one, y) for one in counts]
        return _importances(models, columns, seed), _effects(models, columns, codes)

    share = math.ceil(len(drawn) / processes())
    parts = in_forks(told, [drawn[start : start + share] for start in range(0, len(drawn), share)])
    shares = np.concatenate([importances for importances, _ in parts])
    parameters = []
    for index, column in enumerate(columns):
        expected = np.concatenate([effects[index] for _, effects in parts])
        nearest = abs(column.codes[:, None] - column.places).argmin(axis=1)
        effects = []
        for place, value in enumerate(column.values):
            outcomes = mean + spread * expected[:, place]
            outcomes = np.exp(outcomes) if log else outcomes
            here = nearest == place
            # A resample that lacks the value would extrapolate to it, which says nothing of the trials that have it.
            lowest, highest = _interval(outcomes[[counts[here].any() for counts in drawn]])
            trials = int(here.sum())
            effects.append(
                Effect(value=value, trials=trials, expected=float(outcomes[0]), lowest=lowest, highest=highest)
            )
        lowest, highest = _interval(shares[:, index])
        parameters.append(
            Parameter(
                name=column.name,
                importance=float(shares[0, index]),
                importance_lowest=lowest,
                importance_highest=highest,
                effects=tuple(effects),
            )
        )
    return Influence(
        objective=objective,
        trials=len(y),
        level=LEVEL,
        resamples=resamples,
        explained=_explained(whole, configuration, y),
        parameters=tuple(sorted(parameters, key=lambda parameter: -parameter.importance)),
    )


def _interval(values: Array) -> tuple[float, float]:
    """The percentile interval of the resamples' values, widened to the first one, that of all trials."""
    low, high = np.percentile(values[1:] if len(values) > 1 else values, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(min(low, values[0])), float(max(high, values[0]))


def _rows(codes: Array, columns: list[_Column]) -> Array:
    """(n, features) of the process from (n, columns): a feature for each value of what has no order."""
    return np.hstack(_blocks(codes, columns))


def _blocks(codes: Array, columns: list[_Column]) -> list[Array]:
    """The features of each column."""
    return [
        codes[:, [index]] if column.ordered else (codes[:, [index]] == column.places) / math.sqrt(2)
        for index, column in enumerate(columns)
    ]


def _process(rows: Array, y: Array) -> "GaussianProcessRegressor":
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.ones(rows.shape[1]), _LENGTHS, nu=2.5)
    return GaussianProcessRegressor(kernel + WhiteKernel(1e-2, _NOISE)).fit(rows, y)


def _draw(configuration: Indices, rng: np.random.Generator) -> Indices:
    """How often each trial is in a resample: as many configurations, drawn with replacement, each with all its runs."""
    count = configuration.max() + 1
    drawn: Indices = np.bincount(rng.integers(count, size=count), minlength=count)[configuration]
    return drawn


def _resampled(whole: "GaussianProcessRegressor", counts: Indices, y: Array) -> "GaussianProcessRegressor":
    """The process of some trials. Its noise is that of all trials: a trial drawn twice would deny any."""
    from sklearn.base import clone

    kept = counts > 0
    signal, noise = whole.kernel_.k1, whole.kernel_.k2.noise_level
    start = np.append(signal.theta[:1], np.minimum(signal.theta[1:], math.log(_LONGEST_START)))
    model = clone(whole).set_params(
        kernel=signal.clone_with_theta(start), alpha=noise / counts[kept], optimizer=_refine
    )
    return model.fit(whole.X_train_[kept], y[kept])


def _refine(negative_likelihood: Any, start: Array, bounds: Array) -> tuple[Array, float]:
    """An optimizer as scikit-learn's process calls it: a few steps from a good start."""
    from scipy.optimize import minimize

    options = {"maxiter": _REFINEMENTS}
    best = minimize(negative_likelihood, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    return best.x, best.fun


def _expected(models: "list[GaussianProcessRegressor]", rows: Array) -> Array:
    """(n, models): means of the processes. What `predict` checks before costs more than the means do."""
    return np.column_stack([model.kernel_(rows, model.X_train_) @ model.alpha_ for model in models])


# ----------------------------------------------------------------------------------------------------- what it learned


def _effects(models: "list[GaussianProcessRegressor]", columns: list[_Column], codes: Array) -> list[Array]:
    """For each column (models, its values), by partial dependence."""
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.inspection import partial_dependence

    class Models(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
        """All of them, as one regressor of several outputs."""

        def fit(self, rows: Array, y: Array) -> "Models":
            raise NotImplementedError("the models are fitted")

        def predict(self, codes: Array) -> Array:
            return _expected(models, _rows(codes, columns))

        def __sklearn_is_fitted__(self) -> bool:
            return True

    return [
        partial_dependence(
            Models(), codes, [index], kind="average", method="brute", custom_values={index: column.places}
        )["average"]
        for index, column in enumerate(columns)
    ]


def _importances(models: "list[GaussianProcessRegressor]", columns: list[_Column], seed: int) -> Array:
    """(models, columns), by a random forest's mean decrease in impurity over a design in which each value of a column
    is as frequent."""
    from scipy.stats.qmc import Sobol
    from sklearn.ensemble import RandomForestRegressor

    drawn = Sobol(len(columns), seed=seed).random(_DESIGN).T
    design = np.column_stack([_at(column.places, shares) for column, shares in zip(columns, drawn, strict=True)])
    blocks = _blocks(design, columns)
    rows = np.hstack(blocks)
    forest = RandomForestRegressor(_TREES, random_state=seed)
    found = np.array([forest.fit(rows, outcomes).feature_importances_ for outcomes in _expected(models, rows).T])
    ends = np.cumsum([block.shape[1] for block in blocks])[:-1]
    shares = np.column_stack([part.sum(axis=1) for part in np.split(found, ends, axis=1)])
    shares[shares.sum(axis=1) == 0] = 1 / len(columns)  # a model for which nothing makes a difference
    return shares


def _at(places: Array, shares: Array) -> Array:
    """The places at shares, from 0 to below 1, of their number."""
    chosen: Array = places[(shares * len(places)).astype(int)]
    return chosen


def _explained(whole: "GaussianProcessRegressor", configuration: Indices, y: Array) -> float | None:
    """R² over all trials, each predicted from the other folds; repeats of a configuration stay in one fold.

    None: fewer configurations than folds.
    """
    from sklearn.base import clone
    from sklearn.metrics import r2_score
    from sklearn.model_selection import GroupKFold, cross_val_predict

    if configuration.max() + 1 < _FOLDS:
        return None
    predicted = cross_val_predict(clone(whole), whole.X_train_, y, groups=configuration, cv=GroupKFold(_FOLDS))
    return float(r2_score(y, predicted))
