"""What one needs to train with the recommended configuration again: by itself, with other scripts, with carbonopt."""

import json
from importlib import resources
from pathlib import Path

from carbonopt.analysis.recommend import Recommendation
from carbonopt.config import LocalLaunch
from carbonopt.record import StudyData
from carbonopt.report.winner import card, files
from carbonopt.study_file import with_relative_paths

PARAMS = "params.json"
STUDY = "rerun.yaml"
CARD = "model_card.md"
SCRIPT = "run.sh"
TRAIN = "train.py"
WORKLOAD = "workload.yaml"
TRAINING_ARGUMENTS = "training_args.yaml"
ACCELERATE = "accelerate.yaml"
NAMES = (PARAMS, STUDY, CARD, SCRIPT, TRAIN, WORKLOAD, TRAINING_ARGUMENTS, ACCELERATE, files.DEEPSPEED_CONFIG)


def winner_files(
    data: StudyData, recommendation: Recommendation, folder: Path, given: dict[str, str] | None = None
) -> dict[str, str]:
    """Texts by file name, for `folder`; empty without a recommendation. `given`: the trial's own `ds_config.json`,
    which is made from its parameters where it is absent.

    run.sh and train.py, which need no carbonopt, are there unless the study replayed recorded runs: those say nothing
    of the model and the data. The paths in all files lead from `folder`.
    """
    record = next((record for record in data.records if record.trial == recommendation.trial), None)
    if record is None:
        return {}
    texts = {
        PARAMS: json.dumps(record.params.as_record(), indent=2) + "\n",
        STUDY: files.as_yaml(with_relative_paths(files.rerun(data.config, record), folder)),
        TRAINING_ARGUMENTS: files.as_yaml(files.training_arguments(data.config, record)),
        CARD: card.model_card(data, recommendation),
    }
    workload, launch = data.config.workload, data.config.launch
    if workload is None or not isinstance(launch, LocalLaunch):
        return texts
    return {
        **texts,
        files.DEEPSPEED_CONFIG: files.deepspeed_settings(workload, record, on_gpu=bool(launch.gpus)),
        **(given or {}),
        WORKLOAD: files.workload(workload, record, data.prepared, folder),
        ACCELERATE: files.accelerate_settings(record.params),
        SCRIPT: files.script(launch),
        TRAIN: resources.files("carbonopt.train").joinpath("standalone.py").read_text(encoding="utf-8"),
    }
