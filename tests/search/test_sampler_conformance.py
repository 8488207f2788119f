"""Optuna's own tests of samplers, with a second objective beside theirs: CarbonSampler needs two."""

from collections.abc import Callable, Sequence
from typing import Any

import optuna
import pytest
from optuna.study import Study
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

from carbonopt.search.sampler import CarbonSampler

pytestmark = pytest.mark.slow


class TestCarbonSampler(
    BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase
):
    # These two ask for a single objective: a trial's only value, the study's best value.
    test_conditional_sample_independent = None
    test_nan_objective_value = None

    @pytest.fixture
    def sampler(self) -> Callable[[], CarbonSampler]:
        return lambda: CarbonSampler("reward", 0.0)

    @pytest.fixture(autouse=True)
    def two_objectives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        create, optimize, tell = optuna.study.create_study, Study.optimize, Study.tell

        def both(value: Any) -> Sequence[float]:
            return value if isinstance(value, Sequence) else (1.0, value)

        def create_with_two(directions: Sequence[str] | None = None, **settings: Any) -> Study:
            return create(directions=directions or ["minimize", "maximize"], **settings)

        def optimize_both(study: Study, objective: Any, *arguments: Any, **options: Any) -> None:
            optimize(study, lambda trial: both(objective(trial)), *arguments, **options)

        def tell_both(study: Study, trial: Any, values: Any = None, **options: Any) -> Any:
            return tell(study, trial, None if values is None else both(values), **options)

        for module in (optuna, optuna.study):
            monkeypatch.setattr(module, "create_study", create_with_two)
        monkeypatch.setattr(Study, "optimize", optimize_both)
        monkeypatch.setattr(Study, "tell", tell_both)
