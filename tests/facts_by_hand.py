"""What the analyses may find, made by hand: for tests of how it is shown."""

from carbonopt.analysis.batch import AtBatch, BatchEffect, Spanned
from carbonopt.analysis.comparison import (
    AtEqualQuality,
    Comparison,
    DiminishingReturns,
    Milestone,
    Saving,
)
from carbonopt.analysis.influence import Effect, Influence, NotKnown, Parameter
from carbonopt.analysis.repricing import InRegion


def spanned(middle: float) -> Spanned:
    return Spanned(lowest=0.9 * middle, median=middle, highest=1.2 * middle)


BATCH = BatchEffect(
    batches=tuple(
        AtBatch(
            global_batch_size=size,
            trials=tuple(range(number, 40, 4)),
            duration_s=spanned(seconds),
            energy_kwh=spanned(1e-6 * seconds * (60 + size / 8)),
            emissions_kg_co2e=spanned(1e-6 * seconds * (60 + size / 8) * 0.23),
            peak_memory_gib=spanned(2 + size / 10) if size != 64 else None,
        )
        for number, (size, seconds) in enumerate(((16, 30.0), (32, 17.0), (64, 11.0), (128, 10.0)))
    ),
    least_energy=64,
    least_duration=128,
    least_memory=16,
)


def influence(objective: str, unit: float) -> Influence:
    values: dict[str, tuple[float | int | str, ...]] = {
        "learning_rate": (1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2),
        "global_batch_size": (16, 32, 64, 128),
        "offload": ("none", "optimizer"),
    }
    shares = {"learning_rate": 0.62, "global_batch_size": 0.30, "offload": 0.08}
    return Influence(
        objective=objective,
        trials=24,
        level=0.9,
        resamples=200,
        explained=0.71 if objective == "emissions" else 0.31,
        parameters=tuple(
            Parameter(
                name=name,
                importance=shares[name],
                importance_lowest=0.8 * shares[name],
                importance_highest=1.1 * shares[name],
                effects=tuple(
                    Effect(
                        value=value,
                        trials=5,
                        expected=unit * (1 + shares[name] * (index - 2) ** 2),
                        lowest=unit * (0.9 + shares[name] * (index - 2) ** 2),
                        highest=unit * (1.2 + shares[name] * (index - 2) ** 2),
                    )
                    for index, value in enumerate(listed)
                ),
            )
            for name, listed in values.items()
        ),
    )


INFLUENCE = (influence("emissions", 2e-4), influence("perplexity", 4.5))
UNKNOWN = tuple(
    NotKnown(objective=objective, trials=3, needed=10) for objective in ("emissions", "perplexity")
)

_POINTS = tuple(
    Milestone(
        step=10 * number,
        share=number / 8,
        energy_kwh=1e-4 * number,
        emissions_kg_co2e=2.53e-5 * number,
        value=4 + 20 / number**2,
        gained_per_kg_co2e=None
        if number == 1
        else (20 / (number - 1) ** 2 - 20 / number**2) / 2.53e-5,
    )
    for number in range(1, 9)
)
RETURNS = DiminishingReturns(
    trial=0,
    total_steps=80,
    points=_POINTS,
    best=_POINTS[-1],
    enough=_POINTS[6],
    saved_fraction=1 / 8,
    first_meeting=_POINTS[3],
    rate_decays=True,
)

REGIONS = tuple(
    InRegion(
        place=place,
        g_co2e_per_kwh=intensity,
        source="CodeCarbon's data, 2023",
        run_kg_co2e=1.1e-6 * intensity,
        study_kg_co2e=4e-5 * intensity,
        is_studys_own=place == "USA",
    )
    for place, intensity in (("Norway", 28.0), ("France", 56.0), ("USA", 230.0), ("Poland", 662.0))
)


def comparison(trial: int, baseline: int) -> Comparison:
    return Comparison(
        trial=trial,
        baseline_trial=baseline,
        value_difference=0.004,
        saving=Saving(
            fraction=0.431, lowest=0.38, highest=0.47, level=0.95, seeds=3, baseline_seeds=3
        ),
        equal_quality=AtEqualQuality(
            baseline_step=300,
            baseline_emissions_kg_co2e=3.1e-4,
            baseline_emissions_before_kg_co2e=2.4e-4,
            saving_fraction=0.22,
            saving_fraction_before=-0.01,
            lowest=-0.09,
            highest=0.28,
        ),
    )
