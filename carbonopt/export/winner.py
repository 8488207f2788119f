"""What one needs to train with the recommended configuration again: by itself, with other scripts, with carbonopt."""

import json
import shlex
from collections.abc import Sequence

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord
from carbonopt.export import copies, inputs, model_card, recorded, settings
from carbonopt.train import rerun
from carbonopt.train.tasks.base import task_for, task_module
from carbonopt.train.tasks.script import Script

STUDY, CARD, SCRIPT, TRAIN, CHECK = "rerun.yaml", "model_card.md", "run.sh", "train.py", "inputs.py"
TRAINING_ARGUMENTS, ACCELERATE, REQUIREMENTS = "training_args.yaml", "accelerate.yaml", "requirements.txt"
_OUTPUT = "CARBONOPT_OUTPUT"  # stands in a script's command for the folder that it writes into
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
    needed = {name: parts for name, parts in files.items() if name in recorded.of_workload(study, files)}
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
    task = task_for(workload.model_dump(mode="json"))
    # A rank has as many threads as in a trial: sums on a CPU depend on their number.
    sharing = max(launch.ranks_of_nodes) * launch.slots
    if isinstance(task, Script):
        del texts[TRAINING_ARGUMENTS]
        return {
            **texts,
            SCRIPT: _script(task, record, sharing),
            **copies.copies("carbonopt.script").files,
        }
    copied = copies.copies(rerun.__name__, task_module(workload.task))
    own, zero3 = (given or {}).get(settings.DEEPSPEED_CONFIG), record.params.zero_stage == 3
    return {
        **texts,
        settings.DEEPSPEED_CONFIG: settings.deepspeed_settings(data.config, record, own),
        rerun.WORKLOAD: settings.workload(study, record, data.prepared, needed),
        ACCELERATE: settings.filled(ACCELERATE, RANKS=record.params.world_size, ZERO3=str(zero3).lower()),
        SCRIPT: settings.filled(SCRIPT, RANKS=sharing, DEVICE="gpu" if launch.gpus else "cpu"),
        REQUIREMENTS: copies.requirements(workload, launch, record.params, versions, copied.libraries),
        TRAIN: settings.TRAIN,
        **copied.files,
    }


def _script(task: Script, record: TrialRecord, sharing: int) -> str:
    """run.sh of a script: its command for the recommended configuration. `sharing`: ranks that share the cores."""
    world_size = record.params.world_size
    words = task.argv(record.params, record.seed, record.trial, _OUTPUT)
    if world_size > 1 and not task.starts_ranks:
        launcher = ("python3", "-m", "torch.distributed.run", f"--nproc_per_node={world_size}", "--no-python")
        words = [*launcher, *words]
    # A folder only for a command that names it.
    output = 'export OUTPUT="$here/output"\nmkdir -p "$OUTPUT"\n' if any(_OUTPUT in word for word in words) else ""
    return settings.filled("run_script.sh", RANKS=sharing, OUTPUT=output, COMMAND=" ".join(map(_quoted, words)))


def _quoted(word: str) -> str:
    """For a shell, with its variable OUTPUT where a word has `_OUTPUT`."""
    quoted = shlex.quote(word)
    variable = '"$OUTPUT"'
    return quoted.replace(_OUTPUT, f"'{variable}'" if quoted.startswith("'") else variable)
