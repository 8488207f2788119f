"""What one needs to train with the recommended configuration again: by itself, with other scripts, with carbonopt."""

import json
from importlib import resources
from pathlib import Path

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.config import LocalLaunch
from carbonopt.core.study import StudyData
from carbonopt.export import inputs, recorded, requirements
from carbonopt.export import model_card as card
from carbonopt.export import settings as files

PARAMS = "params.json"
STUDY = "rerun.yaml"
CARD = "model_card.md"
SCRIPT = "run.sh"
TRAIN = "train.py"
OUTPUT_LAYER = "output_layer.py"
BATCHES = "batches.py"
STEPS = "steps.py"
WORKLOAD = "workload.yaml"
TRAINING_ARGUMENTS = "training_args.yaml"
ACCELERATE = "accelerate.yaml"
REQUIREMENTS = "requirements.txt"
CHECK = "inputs.py"
NAMES = (
    *(PARAMS, STUDY, CARD, SCRIPT, TRAIN, STEPS, OUTPUT_LAYER, BATCHES, WORKLOAD, TRAINING_ARGUMENTS),
    *(ACCELERATE, REQUIREMENTS, CHECK, inputs.LIST, files.DEEPSPEED_CONFIG),
)


def winner_files(
    data: StudyData, recommendation: Recommendation, folder: Path, given: dict[str, str] | None = None
) -> dict[str, str]:
    """Texts by file name, for `folder`; empty without a recommendation. `given`: the trial's own `ds_config.json`,
    which is made from its parameters where it is absent.

    run.sh and train.py, which need no carbonopt, are there unless the study replayed recorded runs: those say nothing
    of the model and the data. No file has a path of this machine: what the study reads is named `data/NAME`, with the
    size and sha256 that it has now or had for an older report in `folder`.
    """
    record = next((record for record in data.records if record.trial == recommendation.trial), None)
    if record is None:
        return {}
    reads = recorded.Inputs(files.rerun(data.config, record))
    found = reads.recorded(recorded.of_older_report(folder))
    versions = data.provenance.versions
    needed = {name: parts for name, parts in found.items() if name in recorded.of_workload(reads.study)}
    texts = {
        PARAMS: json.dumps(record.params.as_record(), indent=2) + "\n",
        STUDY: files.study_file(reads.study, found),
        TRAINING_ARGUMENTS: files.training_settings(data.config, record, versions),
        CARD: card.model_card(data, recommendation, record, needed),
    }
    workload, launch = data.config.workload, data.config.launch
    if workload is None or not isinstance(launch, LocalLaunch):
        return texts
    if needed:
        texts |= {inputs.LIST: recorded.as_json(needed), CHECK: _source("carbonopt.export", CHECK)}
    if record.params.has_fused_output_layer:
        texts[OUTPUT_LAYER] = _source("carbonopt.train", OUTPUT_LAYER)
    if launch.gpus:
        texts[BATCHES] = _source("carbonopt.train.data", "prefetch.py")
    own = {name: files.checked_deepspeed_settings(text, record) for name, text in (given or {}).items()}
    return {
        **texts,
        files.DEEPSPEED_CONFIG: files.deepspeed_settings(workload, record, on_gpu=bool(launch.gpus)),
        **own,
        WORKLOAD: files.workload(workload, reads.study, record, data.prepared, needed),
        ACCELERATE: files.accelerate_settings(record.params),
        SCRIPT: files.script(launch, has_inputs=bool(needed)),
        REQUIREMENTS: requirements.requirements(workload, launch, record.params, versions),
        TRAIN: _source("carbonopt.train", "standalone.py"),
        STEPS: _source("carbonopt.train", "fast_step.py"),
    }


def _source(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
