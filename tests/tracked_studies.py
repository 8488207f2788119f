"""A small study with trackers, its trials and what is known of it, for tests of trackers."""

from small_studies import study as small_study

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import (
    Durations,
    Energy,
    QualityResult,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study_file.reader import parse_study

PARAMS = TrialParams(
    global_batch_size=16,
    micro_batch_size_per_gpu=8,
    learning_rate=1e-3,
    epochs=2,
    torch_compile=True,
)
POINTS = [
    EvalPoint.of(PERPLEXITY, 400.0 - 10 * i, 100, step=10 * i, tokens=1000 * i).model_copy(
        update={"train_energy_kwh": 1e-6 * i}
    )
    for i in (1, 2, 3)
]


STARTED_AT = "2026-01-05T12:00:00.250+00:00"


def study(**track) -> StudyConfig:
    raw = {
        "name": "tracked",
        "target": {"perplexity": 40.0},
        "search": {"space": {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 2}},
        "budget": {"trials": 2},
        "carbon": {"intensity_g_co2e_per_kwh": 100},
        "launch": {"kind": "replay", "table": "table.jsonl"},
        "track": track,
    }
    return parse_study(raw, "test")


def spec(number: int, attempt: int = 1) -> TrialSpec:
    return TrialSpec(
        number=number,
        attempt=attempt,
        seed=0,
        params=PARAMS,
        workload={},
        prepared_dir="/none",
        trial_dir="/none",
    )


def record(
    number: int,
    state: TrialState = TrialState.COMPLETE,
    stop_reason: StopReason | None = None,
) -> TrialRecord:
    return TrialRecord(
        trial=number,
        state=state,
        stop_reason=stop_reason,
        seed=0,
        params=PARAMS,
        quality=QualityResult(name=PERPLEXITY.name, value=POINTS[-1].value),
        emissions_kg_co2e=3e-7,
        energy_kwh=Energy(train=3e-6, setup=1e-6, eval=1e-6, total=5e-6),
        duration_s=Durations(train=3, setup=1, eval=1, total=5),
        evals=tuple(POINTS),
    )


def study_data(*records: TrialRecord, ended: str | None = None) -> StudyData:
    """What the storage knows of the study."""
    changes = {"config": study(), "id": "0123456789abcdef" * 2, "records": records, "ended": ended}
    return small_study().model_copy(update=changes)
