"""Facts made by hand, for the tests of the paper: what each analysis could say of a small study."""

from carbonopt.analysis.batch import AtBatch, BatchEffect, Spanned
from carbonopt.analysis.comparison import DiminishingReturns, Milestone
from carbonopt.analysis.influence import Effect, Influence, NotKnown, Parameter


def spanned(lowest: float) -> Spanned:
    return Spanned(lowest=lowest, median=1.1 * lowest, highest=1.5 * lowest)


def batch_effect() -> BatchEffect:
    """Least energy at 64, least time at 256, least memory at 16, which is not known of 128."""

    def at(size: int, energy_kwh: float, duration_s: float, memory_gib: float | None) -> AtBatch:
        return AtBatch(
            global_batch_size=size,
            trials=(0, 1),
            duration_s=spanned(duration_s),
            energy_kwh=spanned(energy_kwh),
            emissions_kg_co2e=spanned(energy_kwh * 0.197),
            peak_memory_gib=None if memory_gib is None else spanned(memory_gib),
        )

    return BatchEffect(
        batches=(
            at(16, 2.2e-4, 14.0, 1.9),
            at(32, 1.5e-4, 8.4, 2.2),
            at(64, 1.2e-4, 5.5, 3.0),
            at(128, 1.24e-4, 4.9, None),
            at(256, 1.4e-4, 4.7, 7.4),
        ),
        least_energy=64,
        least_duration=256,
        least_memory=16,
    )


def learned(objective: str, unit: float) -> Influence:
    """Of five parameters; `unit` is what an outcome is about."""

    def effect(value: int | float | str | bool, expected: float) -> Effect:
        return Effect(
            value=value, trials=4, expected=expected, lowest=expected * 0.9, highest=expected * 1.15
        )

    def parameter(name: str, importance: float, *effects: Effect) -> Parameter:
        low, high = importance * 0.7, min(1.0, importance * 1.4)
        return Parameter(
            name=name,
            importance=importance,
            importance_lowest=low,
            importance_highest=high,
            effects=effects,
        )

    rates = [10 ** (-4 + k / 4) for k in range(9)]
    return Influence(
        objective=objective,
        trials=24,
        level=0.9,
        resamples=100,
        explained=0.83,
        parameters=(
            parameter(
                "global_batch_size",
                0.52,
                *(effect(size, unit * (2 - size / 256)) for size in (16, 64, 256)),
            ),
            parameter(
                "learning_rate", 0.3, *(effect(rate, unit * (1 + rate * 80)) for rate in rates)
            ),
            parameter(
                "gradient_checkpointing", 0.11, effect(False, unit), effect(True, 1.2 * unit)
            ),
            parameter(
                "lr_scheduler",
                0.05,
                effect("linear", unit),
                effect("cosine_with_min_lr", 0.95 * unit),
            ),
            parameter("weight_decay", 0.02, effect(0.0, unit), effect(0.1, unit)),
        ),
    )


INFLUENCE = (learned("emissions", 7e-4), learned("perplexity", 5.0))
NOT_KNOWN = tuple(
    NotKnown(objective=objective, trials=1, needed=8) for objective in ("emissions", "perplexity")
)


def returns(trial: int) -> DiminishingReturns:
    """Eight evaluations of a run that overfits at its end."""
    perplexities = (14.0, 9.0, 7.0, 6.1, 5.6, 5.31, 5.28, 5.4)
    points = tuple(
        Milestone(
            step=50 * (k + 1),
            share=(k + 1) / 8,
            energy_kwh=1.2e-4 * (k + 1),
            emissions_kg_co2e=3e-5 * (k + 1),
            value=perplexity,
            gained_per_kg_co2e=None if k == 0 else (perplexities[k - 1] - perplexity) / 3e-5,
        )
        for k, perplexity in enumerate(perplexities)
    )
    return DiminishingReturns(
        trial=trial,
        total_steps=400,
        points=points,
        best=points[6],
        enough=points[5],
        saved_fraction=0.25,
        first_meeting=points[4],
        rate_decays=True,
    )
