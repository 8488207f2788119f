"""Searches that `foreign.py` holds carbon against, under its accounting.

`log-eipc` and `pbgi` need `pip install botorch`; `multifidelity.py` says what `smac` and `mobster`
need, and what they are told. OptunaHub's AutoSampler is not among them: of two
objectives it takes `gp` where all dimensions are numbers, and `tpe` where one is not, for 250
complete trials.
"""

import contextlib
import importlib.util
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import multifidelity
import numpy as np
import optuna
from listed import START, Curve, Prunes, Run, Search, Step, Table, asked, never, played
from scipy.special import log_ndtr

from carbonopt.core.arrays import Array
from carbonopt.search.inner_samplers import INNER


def in_order(
    table: Table,
    target_nll: float,
    order: Sequence[int],
    prunes: Callable[[Run], Prunes] = lambda run: never,
) -> Iterator[Step]:
    """`prunes`: makes each run's rule."""
    cap_j = math.inf
    for index in order:
        ended = played(table.runs[index], cap_j, prunes(table.runs[index]))
        cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, 0.0


def random(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    return in_order(
        table, target_nll, np.random.default_rng(seed).permutation(len(table.runs)).tolist()
    )


def by_cost(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """Cheapest first, knowing what each will cost; runs of one cost by chance."""
    chance = np.random.default_rng(seed).random(len(table.runs))
    return in_order(
        table, target_nll, np.lexsort((chance, [run.energy_j for run in table.runs])).tolist()
    )


def asha(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """ASHA (Li et al. 2020, arXiv 1810.05934) of reduction 3: a trial goes on past a ninth and a
    third of its steps where it is among the best third of those that came there. Stopping variant:
    what it has trained is kept.
    """
    rungs: dict[float, list[float]] = {1 / 9: [], 1 / 3: []}

    def rule(run: Run) -> Prunes:
        passed: set[float] = set()

        def prunes(curve: Curve) -> bool:
            share, nll = curve[-1][0] / run.total_steps, curve[-1][1]
            for rung, seen in rungs.items():
                if share >= rung and rung not in passed:
                    passed.add(rung)
                    seen.append(nll)
                    if nll > sorted(seen)[(len(seen) - 1) // 3]:
                        return True
            return False

        return prunes

    return in_order(
        table, target_nll, np.random.default_rng(seed).permutation(len(table.runs)).tolist(), rule
    )


def optunas(name: str, table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """One of Optuna's samplers, the target as a constraint, see `listed.asked`. Runs that end early
    are told as failed.
    """
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=INNER[name](seed=seed))
    cap_j = math.inf
    for run, seconds, _ in asked(study, table):
        ended = played(run, cap_j, never)
        if ended.state == "complete":
            study.add_trial(table.told(run, target_nll))
        cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, seconds


def cost_aware(
    score: Callable[[Array, Array, float], Array], table: Table, target_nll: float, seed: int
) -> Iterator[Step]:
    """What scores best by the chance to meet the target and what a run costs, which is known
    before. A Gaussian process of the nll, botorch's with its priors; a run that diverged is told as
    the worst one that didn't.
    """
    rows = np.array([table.place(run.params) for run in table.runs])
    costs_j = np.array([run.energy_j for run in table.runs])
    left = np.random.default_rng(seed).permutation(len(table.runs)).tolist()
    told: dict[int, float] = {}
    cap_j = math.inf
    while left:
        began = time.perf_counter()
        finite = [nll for nll in told.values() if math.isfinite(nll)]
        if len(told) >= START and len(set(finite)) > 1:
            known = np.array([min(nll, max(finite)) for nll in told.values()])
            mean, spread = _gaussian_process(rows[list(told)], known, rows[left])
            index = left.pop(
                int(score(log_ndtr((target_nll - mean) / spread), costs_j[left], cap_j).argmax())
            )
        else:
            index = left.pop()
        seconds = time.perf_counter() - began
        run = table.runs[index]
        ended = played(run, cap_j, never)
        if ended.state != "cap":
            told[index] = run.nll
        cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, seconds


def _gaussian_process(known: Array, values: Array, rows: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of new values at rows, by those of the known ones."""
    import torch
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.set_num_threads(1)
    model = SingleTaskGP(torch.as_tensor(known), torch.as_tensor(values)[:, None])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    with torch.no_grad():
        posterior = model.posterior(torch.as_tensor(rows), observation_noise=True)
        return posterior.mean.squeeze(-1).numpy(), posterior.variance.squeeze(-1).sqrt().numpy()


def log_eipc(log_meets: Array, costs_j: Array, best_j: float) -> Array:
    """Logarithm of the expected improvement per cost (Snoek et al. 2012, arXiv 1206.2944; of its
    logarithm Ament et al. 2023, arXiv 2310.20708), where what improves is the energy of one run,
    and an unmet target is no improvement.
    """
    gains = np.maximum(best_j - costs_j, 1e-9 * costs_j) if math.isfinite(best_j) else 1.0
    return log_meets + np.log(gains) - np.log(costs_j)


def pbgi(log_meets: Array, costs_j: Array, best_j: float) -> Array:
    """Pandora's box Gittins index (Xie et al. 2024, arXiv 2406.20062), of boxes that hold a later
    run's energy with the probability to meet the target, and nothing else: g of p · (g - cost) =
    cost, the lowest first.
    """
    return -np.log(costs_j) - np.log1p(np.exp(-log_meets))


SEARCHES: dict[str, Search] = {
    "random": random,
    "cost-order": by_cost,
    "asha": asha,
    **{name: partial(optunas, name) for name in ("tpe", "gp")},
}
WITH_BOTORCH: dict[str, Search] = {
    "log-eipc": partial(cost_aware, log_eipc),
    "pbgi": partial(cost_aware, pbgi),
}
MULTI_FIDELITY: dict[str, Search] = {"smac": multifidelity.smac, "mobster": multifidelity.mobster}
# The modules that a search needs beside carbonopt's own dependencies, and what brings them.
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("log-eipc", "pbgi", "qlognehvi"), (("botorch",), "botorch")),
    "smac": (("smac",), "'smac>=2.4'"),
    "mobster": (
        ("syne_tune.optimizer.schedulers.hyperband", "autograd", "dill", "sortedcontainers"),
        "autograd dill sortedcontainers; pip install --no-deps syne-tune==0.13.0",
    ),
}


def missing(names: Sequence[str]) -> str | None:
    """What has to be installed for the first of these searches that can't run; None: all can."""
    for name in names:
        modules, packages = _NEEDS.get(name, ((), ""))
        if not all(map(_is_there, modules)):
            same = [other for other in names if _NEEDS.get(other) == (modules, packages)]
            need = "needs" if len(same) == 1 else "need"
            module = modules[0].partition(".")[0]
            return f"{' and '.join(same)} {need} {module}: pip install {packages}"
    return None


def _is_there(module: str) -> bool:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # its package may print something
            return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False
