"""Influence of each parameter on emissions and on the quality.

It says how much of the variation a parameter explains, and in which direction.

A Gaussian process learns an objective from complete trials, as a function of the parameters; it
learns the objective's logarithm unless that is an accuracy. It takes logarithms of the parameters'
values, too, where the study file asks for it or where all choices tried are above 0. An effect is a
partial dependence (Friedman, Annals of Statistics 29, 2001, sec. 8.1). An importance is the mean
decrease in impurity of a random forest over what the process predicts at an even sample of the
values tried, so that where a search has concentrated does not count for more. Intervals are
percentiles of a bootstrap over configurations (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, ch. 13). See docs/report.md.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from carbonopt.analysis.front import objectives
from carbonopt.analysis.shortfall import AT_THE_END
from carbonopt.core.arrays import Array, Indices
from carbonopt.core.parallel import in_forks, processes
from carbonopt.core.trial import TrialRecord
from carbonopt.core.values import Frozen
from carbonopt.spec.space_settings import Choices, Range, Space
from carbonopt.spec.study_data import StudyData

# It stands for sklearn's GaussianProcessRegressor: sklearn takes a second to import, which only
# reports can spare.
Process = Any

LEVEL = 0.9
FEWEST = 8  # number of configurations
FEWEST_PER_PARAMETER = 2
# If more trials are complete, this many are drawn at random to learn from: the process' time grows
# with the cube of their number.
MOST_TRIALS = 100
RESAMPLES = 200
MOST_VALUES = 6  # number of values of a range at which effects are given

_FOLDS = 5
_DESIGN = 256  # number of predicted outcomes from which importances are computed
_TREES = 4
_REFINEMENTS = 8  # steps of the optimizer from the length scales that all trials gave
# The longest of these to start from: at longer ones the likelihood is so flat that the optimizer
# would stay there.
_LONGEST_START = 2.0
_LENGTHS = (0.1, 100.0)  # length scales of the process, in spans of a parameter
_NOISE = (1e-5, 1.0)  # variance of its noise, as a share of the objective's


class Effect(Frozen):
    """The marginal effect at one value of a parameter.

    It is the expected outcome with this value and all others as they were tried.
    """

    value: int | float | str | bool
    # number of complete trials with this value (or, for a range, with it as the nearest listed one)
    trials: int
    expected: float  # kg CO2e of a run, or the quality
    # interval at `level`; None: a single configuration has the value, which shows no spread
    lowest: float | None
    highest: float | None


class Parameter(Frozen):
    name: str
    importance: float  # share of the explained variation, 0 to 1; all parameters add up to 1
    importance_lowest: float
    importance_highest: float
    effects: tuple[Effect, ...]  # sorted by value; words in the order of the study file


class Gap(Frozen):
    """A part of a free dimension where no trial completed.

    An effect there would be extrapolated.
    """

    name: str
    # choices that complete trials had, or the lowest and the highest value of a range
    tried: tuple[int | float | str | bool, ...]
    untried: tuple[int | float | str | bool, ...] = ()  # the other choices
    low: float | None = None  # lower end of the range that the space allows
    high: float | None = None


class _Learned(Frozen):
    objective: str  # emissions, or the quality's name
    trials: int  # number of complete trials that this is learned from, at most MOST_TRIALS
    repeats: int = 0  # number of these whose configuration another one of them has, too
    left_out: int = 0  # number of complete trials beyond MOST_TRIALS, chosen at random


class Influence(_Learned):
    """The influence of the parameters on one objective."""

    level: float = LEVEL  # level of the intervals
    resamples: int  # bootstrap resamples behind the intervals
    # share of variance explained on trials left out (cross-validated R²); None: too few trials
    explained: float | None
    # most important first; free dimensions that took two values or more
    parameters: tuple[Parameter, ...]
    gaps: tuple[Gap, ...] = ()  # parts of the space about which nothing is said


class NotKnown(_Learned):
    """The reason why the study can't say anything about one objective.

    There are too few configurations, values did not differ, or the model explains nothing.
    """

    # number of configurations that it takes; 2 where there are enough: then it takes two different
    # values of a parameter and of the outcome
    needed: int
    # like `Influence.explained`; given where it is 0 or less: the model knows no more than the mean
    explained: float | None = None


def influence(
    data: StudyData, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[Influence | NotKnown, ...]:
    """Estimate the influence of the free dimensions on emissions, then on the quality.

    The result is the same for the same data and seed. It is NotKnown if there are fewer complete
    configurations than FEWEST, or than FEWEST_PER_PARAMETER for each parameter that took two
    values; if none did, or the objective did not; or if the model predicts trials that it was not
    given no better than their mean.
    """
    complete = [
        (record, point) for record in data.records if (point := objectives(record)) and point[0] > 0
    ]
    # Drawn at random: evenly spaced ones of a grid that was run in order can all lack the same
    # values.
    drawn = np.sort(np.random.default_rng(seed).permutation(len(complete))[:MOST_TRIALS])
    records = [complete[index][0] for index in drawn]
    points = np.array([complete[index][1] for index in drawn]).reshape(-1, 2)
    space, quality = data.config.search.space, data.config.quality
    columns = [
        _column(name, domain, tried)
        for name, domain in space.free().items()
        if len(set(tried := [record.params.value(name) for record in records])) > 1
    ]
    gaps = tuple(_gaps(space, [record for record, _ in complete]))
    repeats = len(records) - len({record.params for record in records})
    needed = max(FEWEST, FEWEST_PER_PARAMETER * len(columns))
    results: list[Influence | NotKnown] = []
    of_logarithm = {"emissions": True, quality.name: quality.value_of_mean == "exp"}
    for (objective, log), values in zip(of_logarithm.items(), points.T, strict=True):
        outcome, enough = np.log(values) if log else values, len(records) - repeats >= needed
        learned_from: dict[str, Any] = {
            "objective": objective,
            "trials": len(records),
            "repeats": repeats,
        }
        learned_from["left_out"] = len(complete) - len(records)
        # Qualities that differ by rounding alone show no effect of a parameter.
        of_quality = objective == quality.name
        rounded = {quality.rank_to_rounding(value) if of_quality else value for value in values}
        if not enough or not columns or len(rounded) == 1:
            results.append(NotKnown(**learned_from, needed=2 if enough else needed))
        else:
            learned = _learn(columns, outcome, log, seed, resamples)
            if "parameters" in learned:
                results.append(Influence(**learned_from, gaps=gaps, **learned))
            else:
                results.append(NotKnown(**learned_from, needed=needed, **learned))
    return tuple(results)


class _Column(NamedTuple):
    """The values of one parameter over the trials, as numbers.

    They go from 0 to 1 for values that have an order; for others they are the values' indices.
    """

    name: str
    codes: Array  # (trials,)
    values: tuple[Any, ...]  # the values at which effects are given
    places: Array  # codes of these values, (values,)
    ordered: bool


def _column(name: str, domain: Choices | Range, tried: list[Any]) -> _Column:
    kinds = {str if isinstance(value, str) else isinstance(value, bool) for value in tried}
    if isinstance(domain, Choices) and (str in kinds or len(kinds) > 1):
        words = [choice for choice in domain.choices if choice in tried]
        place_of = {word: place for place, word in enumerate(words)}
        codes = np.array([place_of[value] for value in tried], float)
        return _Column(
            name, codes, tuple(words), np.arange(len(words), dtype=float), ordered=len(words) == 2
        )
    values = sorted(set(tried))
    scale = np.log if (domain.log if isinstance(domain, Range) else values[0] > 0) else np.asarray
    on_scale, all_tried = scale(np.array(values, float)), scale(np.array(tried, float))
    low, high = on_scale[0], on_scale[-1]
    places = (on_scale - low) / (high - low)
    if isinstance(domain, Range) and len(values) > MOST_VALUES:
        nearest = sorted(
            {int(abs(places - place).argmin()) for place in np.linspace(0, 1, MOST_VALUES)}
        )
        values, places = [values[index] for index in nearest], places[nearest]
    return _Column(name, (all_tried - low) / (high - low), tuple(values), places, ordered=True)


def _gaps(space: Space, records: Sequence[TrialRecord]) -> Iterator[Gap]:
    for name, domain in space.domains().items():
        tried = {value for record in records if (value := record.params.value(name)) is not None}
        if tried and isinstance(domain, Choices):
            had = tuple(choice for choice in domain.choices if choice in tried)
            if untried := tuple(choice for choice in domain.choices if choice not in tried):
                yield Gap(name=name, tried=had, untried=untried)
        elif tried and isinstance(domain, Range) and domain.low < domain.last:
            ends = np.array([domain.low, min(tried), max(tried), domain.last], float)
            low, lowest, highest, high = np.log(ends) if domain.log else ends
            if max(lowest - low, high - highest) > AT_THE_END * (high - low):
                had = tuple(sorted({min(tried), max(tried)}))
                yield Gap(name=name, tried=had, low=domain.low, high=domain.last)


def _learn(
    columns: list[_Column], outcome: Array, log: bool, seed: int, resamples: int
) -> dict[str, Any]:
    """Return fields of `Influence`, or `explained` alone where it is 0 or less.

    Args:
        columns: the parameters that took two values or more.
        outcome: the objective, or its logarithm, (trials,).
        log: whether it is the logarithm.
        seed: seed of the resamples.
        resamples: number of resamples.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    rng = np.random.default_rng(seed)
    codes = np.column_stack([column.codes for column in columns])
    rows, mean, spread = np.hstack(_features(codes, columns)), outcome.mean(), outcome.std()
    y = (outcome - mean) / spread

    def fitted(counts: Sequence[Indices]) -> tuple[Array, list[Array]]:
        models = [
            whole if drawn is resampled[0] else _resampled(whole, drawn, y) for drawn in counts
        ]
        return _importances(models, columns, seed), _effects(models, columns, codes)

    # One thread: the matrices are too small to share between threads.
    with threadpool_limits(1, "blas"), warnings.catch_warnings():
        # A length scale at its bound is a valid answer.
        warnings.simplefilter("ignore", ConvergenceWarning)
        kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.ones(rows.shape[1]), _LENGTHS, nu=2.5)
        whole = GaussianProcessRegressor(kernel + WhiteKernel(1e-2, _NOISE)).fit(rows, y)
        configuration = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        explained = _explained(whole, configuration, y)
        if explained is not None and explained <= 0:  # checked before the resamples take seconds
            return {"explained": explained}
        # How often each trial is in a resample; the first one has all trials as they are.
        resampled = [np.ones(len(y), int), *_drawn(configuration, resamples, rng)]
        share = math.ceil(len(resampled) / processes())
        parts = in_forks(
            fitted, [resampled[start : start + share] for start in range(0, len(resampled), share)]
        )
    shares = np.concatenate([importances for importances, _ in parts])
    parameters = []
    for index, column in enumerate(columns):
        outcomes = mean + spread * np.concatenate([effects[index] for _, effects in parts])
        effects = tuple(
            _shown(column, np.exp(outcomes) if log else outcomes, resampled, configuration)
        )
        lowest, highest = _interval(shares[:, index])
        ends = {"importance_lowest": lowest, "importance_highest": highest}
        parameters.append(
            Parameter(name=column.name, importance=float(shares[0, index]), effects=effects, **ends)
        )
    parameters.sort(key=lambda parameter: -parameter.importance)
    return {"explained": explained, "resamples": resamples, "parameters": tuple(parameters)}


def _drawn(configuration: Indices, resamples: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Draw configurations, with all their runs; yield how often each trial is in a resample.

    Args:
        configuration: the number of each trial's configuration, (trials,).
    """
    count = configuration.max() + 1
    for _ in range(resamples):
        drawn = np.bincount(rng.integers(count, size=count), minlength=count)
        yield drawn[configuration]


def _shown(
    column: _Column, outcomes: Array, resampled: Sequence[Indices], configuration: Indices
) -> Iterator[Effect]:
    """Yield the effects of a parameter at its values.

    Args:
        outcomes: (models, values).
    """
    nearest = abs(column.codes[:, None] - column.places).argmin(axis=1)
    for place, value in enumerate(column.values):
        here = nearest == place
        # A resample that lacks the value would extrapolate to it, which says nothing about the
        # trials that have it.
        of_resamples = outcomes[[counts[here].any() for counts in resampled], place]
        is_alone = len(np.unique(configuration[here])) == 1
        lowest, highest = (None, None) if is_alone else _interval(of_resamples)
        yield Effect(
            value=value,
            trials=int(here.sum()),
            expected=float(outcomes[0, place]),
            lowest=lowest,
            highest=highest,
        )


def _interval(values: Array) -> tuple[float, float]:
    """Return the percentile interval of the resamples' values.

    It is widened to include the first value, that of all trials.
    """
    low, high = np.percentile(
        values[1:] if len(values) > 1 else values, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]
    )
    return float(min(low, values[0])), float(max(high, values[0]))


def _features(codes: Array, columns: list[_Column]) -> list[Array]:
    """Return the features of the process, by column, from codes (n, columns).

    A column without an order has a feature for each value.
    """
    return [
        codes[:, [index]] if column.ordered else (codes[:, [index]] == column.places) / math.sqrt(2)
        for index, column in enumerate(columns)
    ]


def _resampled(whole: Process, counts: Indices, y: Array) -> Process:
    """Fit the process to a resample of the trials.

    Its noise is that of all trials: a trial that was drawn twice would suggest that there is none.
    """
    from sklearn.base import clone

    kept = counts > 0
    signal, noise = whole.kernel_.k1, whole.kernel_.k2.noise_level
    start = np.append(signal.theta[:1], np.minimum(signal.theta[1:], math.log(_LONGEST_START)))
    kernel, alpha = signal.clone_with_theta(start), noise / counts[kept]
    model = clone(whole).set_params(kernel=kernel, alpha=alpha, optimizer=_refine)
    return model.fit(whole.X_train_[kept], y[kept])


def _refine(negative_likelihood: Any, start: Array, bounds: Array) -> tuple[Array, float]:
    """Optimize by a few steps from a good start, as scikit-learn's process calls an optimizer."""
    from scipy.optimize import minimize

    options = {"maxiter": _REFINEMENTS}
    best = minimize(
        negative_likelihood, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options
    )
    return best.x, best.fun


def _expected(models: Sequence[Process], features: Sequence[Array]) -> Array:
    """Return the means of the processes, (n, models).

    The checks that `predict` makes before cost more than the means do.
    """
    rows = np.hstack(features)
    return np.column_stack([model.kernel_(rows, model.X_train_) @ model.alpha_ for model in models])


def _effects(models: Sequence[Process], columns: list[_Column], codes: Array) -> list[Array]:
    """Return, for each column, its effects by partial dependence, (models, its values)."""

    def at(index: int, place: float) -> Array:
        moved = codes.copy()
        moved[:, index] = place
        return np.asarray(_expected(models, _features(moved, columns)).mean(axis=0))

    return [
        np.column_stack([at(index, place) for place in column.places])
        for index, column in enumerate(columns)
    ]


def _importances(models: Sequence[Process], columns: list[_Column], seed: int) -> Array:
    """Return the columns' importances, (models, columns).

    They are a random forest's mean decrease in impurity over a design in which each value of a
    column is equally frequent.
    """
    from scipy.stats.qmc import Sobol
    from sklearn.ensemble import RandomForestRegressor

    drawn = Sobol(len(columns), seed=seed).random(_DESIGN).T  # from 0 to below 1
    design = [
        column.places[(at * len(column.places)).astype(int)]
        for column, at in zip(columns, drawn, strict=True)
    ]
    features = _features(np.column_stack(design), columns)
    rows, forest = np.hstack(features), RandomForestRegressor(_TREES, random_state=seed)
    by_feature = [
        forest.fit(rows, outcomes).feature_importances_
        for outcomes in _expected(models, features).T
    ]
    ends = np.cumsum([feature.shape[1] for feature in features])[:-1]
    shares = np.column_stack(
        [part.sum(axis=1) for part in np.split(np.array(by_feature), ends, axis=1)]
    )
    # For a model in which nothing makes a difference, all columns count the same.
    shares[shares.sum(axis=1) == 0] = 1 / len(columns)
    return shares


def _explained(whole: Process, configuration: Indices, y: Array) -> float | None:
    """Return R² over all trials, each predicted from the other folds.

    Repeats of a configuration stay in one fold. None: there are fewer configurations than folds.
    """
    from sklearn.base import clone
    from sklearn.metrics import r2_score
    from sklearn.model_selection import GroupKFold, cross_val_predict

    if configuration.max() + 1 < _FOLDS:
        return None
    predicted = cross_val_predict(
        clone(whole), whole.X_train_, y, groups=configuration, cv=GroupKFold(_FOLDS)
    )
    return float(r2_score(y, predicted))
