"""One table of losses, once as perplexities and once as accuracies: the search is the same, to its
last trial.
"""

import itertools
import json
import math
from pathlib import Path

import pytest
from search.test_study import Silent

from carbonopt.analysis.recommend import recommend
from carbonopt.core.quality import ACCURACY, PERPLEXITY
from carbonopt.core.trial import TrialState
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.run_study import run_study
from carbonopt.study.session import Session
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import check

BATCHES, RATES, EPOCHS, SEEDS = (16, 32, 64), (3e-4, 3e-3, 1e-2), (1, 2, 4), (0, 1)
SEQUENCES, EVALUATIONS = 12_800, 5
# Losses are whole numbers of these: exact as floats, and as 1 − loss, too; so many that a share is
# sure.
EXAMPLES = 2**40


def errors(batch: int, rate: float, epochs: int, seed: int, share: float) -> int:
    """Of so many examples, those that are predicted wrong; as a share of them a loss from 0 to 1."""
    off = math.log(rate / (2e-3 * math.sqrt(batch / 32)))
    luck = 1 + 0.004 * math.sin(1 + 7 * seed + batch + 3 * epochs + 1000 * rate)
    return round(
        EXAMPLES * (0.05 + 0.9 * (epochs * SEQUENCES * share / 32) ** -0.4 + 0.02 * off**2) * luck
    )


KEYS = list(itertools.product(BATCHES, RATES, EPOCHS))
TARGET = (
    sorted(errors(*key, 0, 1.0) for key in KEYS)[len(KEYS) // 6] / EXAMPLES + 1e-9
)  # a sixth of them meet it


def ran(folder: Path, quality: str, **changes: object) -> StudyData:
    """A study over the losses as means of a quality: the mean log-likelihood's, or one minus the
    accuracy's.
    """
    folder.mkdir()
    rows = []
    for (batch, rate, epochs), seed in itertools.product(KEYS, SEEDS):
        total = SEQUENCES * epochs // batch
        wrong = [
            (part, errors(batch, rate, epochs, seed, part / EVALUATIONS))
            for part in range(1, EVALUATIONS + 1)
        ]
        rows.append(
            {
                "params": {"global_batch_size": batch, "learning_rate": rate, "epochs": epochs},
                "seed": seed,
                "total_steps": total,
                "joules_per_step": batch**0.7,
                "seconds_per_step": 0.01,
                "joules_per_eval": 1.0,
                "evals": [
                    (
                        {"step": total * part // EVALUATIONS, "nll": number / EXAMPLES}
                        if quality == PERPLEXITY.name
                        else {
                            "step": total * part // EVALUATIONS,
                            "mean": 1 - number / EXAMPLES,
                            "count": EXAMPLES,
                        }
                    )
                    for part, number in wrong
                ],
            }
        )
    table = folder / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    goal, confirm = changes.get("goal", "recommend"), changes.get("confirm")
    study = {
        "name": quality,
        "target": {quality: math.exp(TARGET) if quality == PERPLEXITY.name else 1 - TARGET},
        "search": {
            "space": {
                name: {"choices": sorted({row["params"][name] for row in rows})}
                for name in rows[0]["params"]
            },
            "goal": goal,
            "pruning": {"target": True},
        },
        "budget": {"trials": len(KEYS)},
        "carbon": {"intensity_g_co2e_per_kwh": 500},
        "launch": {"kind": "replay", "table": str(table)},
        **({"confirm": confirm} if confirm else {}),
    }
    paths = StudyPaths(folder / "out")
    paths.root.mkdir()
    return run_study(
        Session(check(parse_study(study, "test")), "", paths, Silent(), Silent(), lambda: False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"confirm": {"seeds": 2, "runners_up": 1}}, {"goal": "front"}])
def test_equal_losses_are_searched_alike_whatever_they_are_called(
    changes: dict, tmp_path: Path
) -> None:
    of_perplexity, of_accuracy = (
        ran(tmp_path / quality.name, quality.name, **changes) for quality in (PERPLEXITY, ACCURACY)
    )
    told = [
        [
            (
                record.params,
                record.seed,
                record.repeat_of,
                record.state,
                record.stop_reason,
                record.steps_done,
            )
            for record in data.records
        ]
        for data in (of_perplexity, of_accuracy)
    ]
    assert told[0] == told[1]
    assert of_perplexity.ended == of_accuracy.ended
    for perplexity_record, other in zip(of_perplexity.records, of_accuracy.records, strict=True):
        losses = [point.loss(PERPLEXITY) for point in perplexity_record.evals]
        assert losses == [point.loss(ACCURACY) for point in other.evals]
        if perplexity_record.state is TrialState.COMPLETE:
            assert perplexity_record.value is not None and other.value is not None
            assert (math.exp(1 - other.value), perplexity_record.emissions_kg_co2e) == (
                pytest.approx(perplexity_record.value),
                other.emissions_kg_co2e,
            )
    first, second = recommend(of_perplexity), recommend(of_accuracy)
    assert first.met and (first.trial, first.pareto_front) == (second.trial, second.pareto_front)
    assert {record.state for record in of_accuracy.records} == {
        TrialState.COMPLETE,
        TrialState.PRUNED,
    }
