"""What one needs to train with the recommended configuration again: by itself, with other scripts, with carbonopt."""

import json
from collections.abc import Sequence

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.study import StudyData
from carbonopt.export import copies, inputs, model_card, recorded, settings
from carbonopt.train import rerun
from carbonopt.train.tasks.base import task_module

STUDY, CARD, SCRIPT, TRAIN, CHECK = "rerun.yaml", "model_card.md", "run.sh", "train.py", "inputs.py"
TRAINING_ARGUMENTS, ACCELERATE, REQUIREMENTS = "training_args.yaml", "accelerate.yaml", "requirements.txt"
COPIES = f"{copies.PACKAGE}/"  # a folder with all that is in it
NAMES = (
    *(rerun.PARAMS, STUDY, CARD, SCRIPT, TRAIN, rerun.WORKLOAD, TRAINING_ARGUMENTS, ACCELERATE, REQUIREMENTS, CHECK),
    *(inputs.LIST, settings.DEEPSPEED_CONFIG, COPIES),
)


def winner_files(
    data: StudyData, recommendation: Recommendation, given: dict[str, str] | None = None, caveats: Sequence[str] = ()
) -> dict[str, str]:
    """Texts by file name; empty without a recommendation. `given`: the trial's own `ds_config.json`,
    which is made from its parameters where it is absent. `caveats`: sentences of the model card on its figures.

    run.sh, train.py and the copies of what they need of carbonopt are there unless the study replayed recorded runs:
    those say nothing of the model and the data. No file has a path of this machine: what the study reads is named
    `data/NAME`, with the size and sha256 that the first trial found.
    """
    record = next((record for record in data.records if record.trial == recommendation.trial), None)
    if record is None:
        return {}
    study, versions = settings.rerun(data.config, record), data.provenance.versions
    files = recorded.recorded(study, data.inputs or ())
    needed = {name: parts for name, parts in files.items() if name in recorded.of_workload(study)}
    texts = {
        rerun.PARAMS: json.dumps(record.params.as_record(), indent=2) + "\n",
        STUDY: settings.STUDY_HEAD + recorded.comment(files) + settings.as_yaml(study),
        TRAINING_ARGUMENTS: settings.training_settings(data.config, record, versions),
        CARD: model_card.model_card(data, recommendation, record, [*needed], caveats),
    }
    workload, launch = data.config.workload, data.config.launch
    if workload is None or not launch.trains:
        return texts
    if needed:
        listed = json.dumps(needed, indent=2, ensure_ascii=False) + "\n"
        texts |= {inputs.LIST: listed, CHECK: settings.filled(CHECK)}
    copied = copies.copies(rerun.__name__, task_module(workload.task))
    own, zero3 = (given or {}).get(settings.DEEPSPEED_CONFIG), record.params.zero_stage == 3
    return {
        **texts,
        settings.DEEPSPEED_CONFIG: settings.deepspeed_settings(data.config, record, own),
        rerun.WORKLOAD: settings.workload(study, record, data.prepared, needed),
        ACCELERATE: settings.filled(ACCELERATE, RANKS=record.params.world_size, ZERO3=str(zero3).lower()),
        # A rank has as many threads as in a trial: sums on a CPU depend on their number.
        SCRIPT: settings.filled(SCRIPT, RANKS=launch.world_size, DEVICE="gpu" if launch.gpus else "cpu"),
        REQUIREMENTS: copies.requirements(workload, launch, record.params, versions, copied.libraries),
        TRAIN: settings.TRAIN,
        **copied.files,
    }
