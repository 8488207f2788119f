"""How often a recommendation is in truth above the target, with and without `confirm`, and how often
the saving's interval holds the true saving where the start is repeated, or a converged study's
winner until the interval is narrow, in simulated studies.

    python benchmarks/confirmation.py [STUDIES]

A study has 25 trials; cheaper ones tend to be less accurate. A run's perplexity spreads about its
configuration's true one by a deviation drawn from DEVIATIONS, its emissions by 2 %. What is
repeated and what is then recommended is decided by the code that decides it in a real study.

For the saving a study has two trials, the start and a winner that emits a known share of it.
"""

import itertools
import math
import sys

import numpy as np

from carbonopt.analysis.confirmation import SAVING_WIDTH, confirmation_progress
from carbonopt.analysis.recommend import Recommendation, recommend
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import QualityResult, TrialRecord, TrialState
from carbonopt.spec.search_settings import Confirm
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import Intensity, Provenance, StudyData
from carbonopt.study_file.reader import parse_study

TRIALS, TARGET = 25, 10.0
EMISSIONS_DEVIATION = 0.02
DEVIATIONS = {
    "0.5 % for all": [0.005],
    # Of log perplexity: 8 configurations of a small GPT on an H200, three seeds each.
    "as recorded, 0.5 to 5.7 %": [0.0176, 0.0096, 0.0059, 0.0046, 0.0054, 0.0299, 0.0214, 0.0573],
}


def empty_study() -> StudyData:
    space = {"global_batch_size": 8, "learning_rate": {"low": 1e-4, "high": 1.0}, "epochs": 1}
    raw = {
        "name": "simulated",
        "target": {"perplexity": TARGET},
        "search": {"space": space},
        "budget": {"trials": TRIALS},
        "carbon": {"intensity_g_co2e_per_kwh": 100},
        "launch": {"kind": "replay", "table": "none.jsonl"},
    }
    intensity = Intensity(g_co2e_per_kwh=100, source="simulated")
    provenance = Provenance(
        hardware=None, versions={}, intensity=intensity, energy_source={}, study_file=""
    )
    return StudyData(
        config=parse_study(raw, "benchmark"), records=(), sessions=(), provenance=provenance
    )


class Truth:
    """The configurations of one study as they are, whatever a run of them says."""

    def __init__(self, rng: np.random.Generator, deviations: list[float]) -> None:
        cheapness = rng.normal(0.0, 1.0, TRIALS)
        self.emissions_kg = np.exp(-0.4 * cheapness)
        self.log_over_target = 0.03 + 0.05 * cheapness + rng.normal(0.0, 0.05, TRIALS)
        self._deviation = rng.choice(deviations, TRIALS)
        self._rng = rng

    def run(self, number: int, of: int, seed: int) -> TrialRecord:
        emissions_kg, log_over = self.emissions_kg[of], self.log_over_target[of]
        perplexity = TARGET * math.exp(self._rng.normal(log_over, self._deviation[of]))
        return TrialRecord(
            trial=number,
            state=TrialState.COMPLETE,
            seed=seed,
            repeat_of=None if of == number else of,
            params=TrialParams(
                global_batch_size=8,
                micro_batch_size_per_gpu=8,
                learning_rate=1e-3 * (1 + of),
                epochs=1,
            ),
            quality=QualityResult(name=PERPLEXITY.name, value=perplexity),
            emissions_kg_co2e=emissions_kg * math.exp(self._rng.normal(0.0, EMISSIONS_DEVIATION)),
        )


def with_repeats(
    empty: StudyData, config: StudyConfig, truth: "Truth | TwoTrials", records: list[TrialRecord]
) -> tuple[StudyData, Recommendation]:
    """Return the study with all repeats that the configuration asks for, and its recommendation."""
    records = list(records)
    while True:
        data = empty.model_copy(update={"config": config, "records": tuple(records)})
        due = confirmation_progress(data, lambda seed, params: True).next
        if due is None:
            return data, recommend(data)
        records.append(truth.run(len(records), due.trial, due.seed))


def main(studies: int) -> None:
    print(
        "| runs spread by | seeds | until | winner of single runs above the target | holds after"
        " repeats | of these above | repeats |"
    )
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    empty = empty_study()
    for (name, deviations), (seeds, until) in itertools.product(
        DEVIATIONS.items(), ((3, None), (6, None), (6, "converged"))
    ):
        budget = empty.config.budget.model_copy(update={"until": until})
        update = {"confirm": Confirm(seeds=seeds), "budget": budget}
        confirmed = empty.config.model_copy(update=update)
        rng = np.random.default_rng(0)
        met = above = holds = holds_above = repeats = 0
        for _ in range(studies):
            truth = Truth(rng, deviations)
            records = [truth.run(number, number, 0) for number in range(TRIALS)]
            single = recommend(empty.model_copy(update={"records": tuple(records)}))
            if single.trial is None:
                continue
            met += 1
            above += truth.log_over_target[single.trial] > 0
            data, answer = with_repeats(empty, confirmed, truth, records)
            repeats += len(data.records) - TRIALS
            if answer.confidence is not None and answer.confidence.confirmed:
                holds += 1
                holds_above += truth.log_over_target[answer.trial] > 0
        print(
            f"| {name} | {seeds} | {until or 'all seeds'} | {above / met:.1%} | {holds / met:.0%} |"
            f" {holds_above / holds:.1%} | {repeats / met:.1f} |"
        )


class TwoTrials:
    """A start, and a winner that emits a known share of it."""

    def __init__(self, rng: np.random.Generator, share: float, deviation: float) -> None:
        self._rng, self._share, self._deviation = rng, share, deviation

    def run(self, number: int, of: int, seed: int) -> TrialRecord:
        kg = (1.0, self._share)[of] * math.exp(self._rng.normal(0.0, self._deviation))
        params = TrialParams(
            global_batch_size=8,
            micro_batch_size_per_gpu=8,
            learning_rate=1e-3 * (1 + of),
            epochs=1,
        )
        return TrialRecord(
            trial=number,
            state=TrialState.COMPLETE,
            seed=seed,
            repeat_of=None if of == number else of,
            params=params,
            quality=QualityResult(name=PERPLEXITY.name, value=TARGET * (1.1, 0.9)[of]),
            emissions_kg_co2e=kg,
        )


def savings(studies: int) -> None:
    print()
    print(
        "| repeated | seeds | spread of emissions | saving | interval holds it | it is at most"
        f" {SAVING_WIDTH:.0%} wide | runs of the repeated one |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    empty = empty_study()
    search = empty.config.search.model_copy(update={"start": {"global_batch_size": 8}})
    until_converged = empty.config.budget.model_copy(update={"until": "converged"})
    for repeated, seeds, deviation, share in itertools.product(
        ("start", "winner"), (3, 6), (0.005, 0.008, 0.013, 0.03), (0.25, 0.31, 0.6)
    ):
        confirm = Confirm(seeds=seeds, runners_up=0, baseline=repeated == "start")
        update = {"confirm": confirm, "search": search}
        if repeated == "winner":
            update["budget"] = until_converged
        config = empty.config.model_copy(update=update)
        rng, holds, narrow, runs = np.random.default_rng(0), 0, 0, 0
        for _ in range(studies):
            truth = TwoTrials(rng, share, deviation)
            records = [truth.run(number, number, 0) for number in range(2)]
            data, answer = with_repeats(empty, config, truth, records)
            assert answer.saving_interval is not None
            lowest, highest = answer.saving_interval
            holds += lowest <= 1 - share <= highest
            narrow += highest - lowest <= SAVING_WIDTH
            trial = 0 if repeated == "start" else 1
            runs += sum(trial in (record.trial, record.repeat_of) for record in data.records)
        print(
            f"| {repeated} | {seeds} | {deviation:.1%} | {1 - share:.0%} | {holds / studies:.1%} |"
            f" {narrow / studies:.0%} | {runs / studies:.2f} |"
        )


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    main(count)
    savings(count)
