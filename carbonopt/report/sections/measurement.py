"""What the measured figures can't tell. It shows nothing: the tables of energy do."""

from collections.abc import Iterator

from carbonopt.core.trial import LARGEST_DISAGREEMENT
from carbonopt.export.settings import has_own_step
from carbonopt.report.document import Caveat
from carbonopt.report.study_view import StudyView

CLOSURE_TOLERANCE = 0.005


def caveats(study: StudyView) -> Iterator[Caveat]:
    data, spent, rec = study.data, study.spent, study.recommendation
    if data.provenance.is_replay:
        yield study.caveat("replay", quality=study.quality.name)
    else:
        yield from _of_the_meters(study)
    if spent.unmeasured_trials:
        yield study.caveat("unmeasured_trials", trials=spent.unmeasured_trials)
    for key, fraction in (("closure_gpus", spent.gpu_closure), ("closure_whole", spent.closure)):
        if fraction is not None and abs(fraction - 1) > CLOSURE_TOLERANCE:
            yield study.caveat(key, fraction=fraction)
    if rec.params is not None and has_own_step(data.config, rec.params):
        yield study.caveat("own_optimizer_step")
    yield study.caveat("fixed_intensity", pue=data.config.carbon.pue)


def _of_the_meters(study: StudyView) -> Iterator[Caveat]:
    data, known = study.data, study.data.provenance.energy_source
    modelled = " and ".join(name.upper() for name, how in known.items() if how == "modelled")
    if data.config.carbon.objective == "gpu":
        yield study.caveat("gpus_only")
    elif modelled:
        yield study.caveat("modelled_energy" if "gpu" in known else "nothing_measured", components=modelled)
    elif "gpu" not in known:
        yield study.caveat("no_gpu")
    differing = {
        record.trial: record.gpu_disagreement
        for record in data.records
        if record.gpu_disagreement is not None and abs(record.gpu_disagreement) > LARGEST_DISAGREEMENT
    }
    if differing:
        worst = max(differing, key=lambda trial: abs(differing[trial]))
        yield study.caveat("readings_disagree", count=len(differing), trial=worst, difference=differing[worst])
    if study.spent.gpu_by_phase_kwh:
        yield study.caveat("counter_accuracy")
    yield study.caveat("meter_setup")
