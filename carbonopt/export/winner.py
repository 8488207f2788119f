"""The files that one needs to train with the recommended configuration again.

One can train with these files alone, with other scripts, or with carbonopt.
"""

import json
import shlex
from collections.abc import Sequence

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.trial import TrialRecord
from carbonopt.export import copies, inputs, model_card, recorded, settings
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.workload_settings import Workload
from carbonopt.train import rerun
from carbonopt.train.scripts.command import Variable
from carbonopt.train.tasks.script import Script
from carbonopt.train.tasks.task import task_for, task_module

STUDY, CARD, SCRIPT, TRAIN, CHECK = "rerun.yaml", "model_card.md", "run.sh", "train.py", "inputs.py"
TRAINING_ARGUMENTS, ACCELERATE, REQUIREMENTS = (
    "training_args.yaml",
    "accelerate.yaml",
    "requirements.txt",
)
# Each stands in a script's command for a path that run.sh has in a variable, which is named by its
# last word.
_OUTPUT, _CONFIG = "CARBONOPT_OUTPUT", "CARBONOPT_CONFIG"
_MAKE_OUTPUT = 'export OUTPUT="$here/output"\nmkdir -p "$OUTPUT"\n'
_NAME_CONFIG = 'export CONFIG="$here/config/{name}"\n'
_FILL_CONFIG = """\
export CONFIG="$OUTPUT/{name}"
fill='import os, sys; sys.stdout.write(sys.stdin.read().replace(\
"CARBONOPT_OUTPUT", os.environ["OUTPUT"]))'
python3 -c "$fill" < "$here/config/{name}" > "$CONFIG"
"""
COPIES, CONFIG = f"{copies.PACKAGE}/", "config/"  # folders with everything in them
NAMES = (
    *(
        rerun.PARAMS,
        STUDY,
        CARD,
        SCRIPT,
        TRAIN,
        rerun.WORKLOAD,
        TRAINING_ARGUMENTS,
        ACCELERATE,
        REQUIREMENTS,
        CHECK,
    ),
    *(inputs.LIST, settings.DEEPSPEED_CONFIG, COPIES, CONFIG),
)

# The variables of a process that trains alone; the port is torch.distributed's own.
_ONLY_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def winner_files(
    data: StudyData,
    recommendation: Recommendation,
    given: dict[str, str] | None = None,
    caveats: Sequence[str] = (),
) -> dict[str, str]:
    """Return the texts of the winner's files, by name; empty without a recommendation.

    docs/reproducing.md lists them, for a built-in task, for a script and for a replay. No file has
    a path of this machine: each file that the study reads is named `data/NAME`, with the size and
    sha256 that the first trial found.

    Args:
        given: the trial's own `ds_config.json`; where it is absent, it is made from the trial's
            parameters.
        caveats: sentences on the figures for the model card.
    """
    record = next((record for record in data.records if record.trial == recommendation.trial), None)
    if record is None:
        return {}
    study, versions = settings.rerun(data.config, record), data.provenance.versions
    given_workload, noted = dict(study.get("workload", {})), data.inputs or ()
    elsewhere = recorded.elsewhere(given_workload, noted) if "folder" in given_workload else ""
    files = recorded.recorded(study, noted)
    needed = {
        name: parts for name, parts in files.items() if name in recorded.of_workload(study, files)
    }
    texts = {
        rerun.PARAMS: json.dumps(record.params.as_record(), indent=2) + "\n",
        STUDY: settings.STUDY_HEAD + recorded.comment(files) + elsewhere + settings.as_yaml(study),
        TRAINING_ARGUMENTS: settings.training_settings(data.config, record, versions),
        CARD: model_card.model_card(data, recommendation, record, [*needed], caveats),
    }
    workload, launch = data.config.workload, data.config.launch
    if workload is None or not launch.trains:
        return texts
    if needed:
        listed = json.dumps(needed, indent=2, ensure_ascii=False) + "\n"
        texts |= {inputs.LIST: listed, CHECK: settings.filled(CHECK)}
    # A script's command gets the names that files have here; nothing else of the task changes.
    command = {"command": study["workload"]["command"]} if workload.is_script else {}
    task = task_for(workload.model_dump(mode="json") | command)
    if isinstance(task, Script):
        del texts[TRAINING_ARGUMENTS]
        inside = study["workload"]["folder"].removeprefix(f"./{inputs.DATA}").removeprefix("/")
        return {
            **texts,
            **_script(task, record, launch, inside, elsewhere),
            **copies.copies("carbonopt.script").files,
        }
    prepared = data.prepared
    deepspeed = settings.deepspeed_settings(
        data.config, record, prepared, (given or {}).get(settings.DEEPSPEED_CONFIG)
    )
    return {
        **texts,
        settings.DEEPSPEED_CONFIG: deepspeed,
        rerun.WORKLOAD: settings.workload(study, record, prepared, needed),
        **_programs(workload, launch, record.params, versions),
    }


def _programs(
    workload: Workload, launch: Launch, params: TrialParams, versions: dict[str, str]
) -> dict[str, str]:
    """Return the files that train a model of a built-in task, and what they need."""
    copied = copies.copies(rerun.__name__, task_module(workload.task))
    zero3 = str(params.zero_stage == 3).lower()
    # A rank has as many threads as in a trial, as sums on a CPU depend on their number.
    sharing = max(launch.ranks_of_nodes) * launch.slots
    return {
        ACCELERATE: settings.filled(ACCELERATE, RANKS=params.world_size, ZERO3=zero3),
        SCRIPT: settings.filled(SCRIPT, RANKS=sharing, DEVICE="gpu" if launch.gpus else "cpu"),
        REQUIREMENTS: copies.requirements(workload, launch, params, versions, copied.libraries),
        TRAIN: settings.TRAIN,
        **copied.files,
    }


def _script(
    task: Script, record: TrialRecord, launch: Launch, inside: str, elsewhere: str
) -> dict[str, str]:
    """Return run.sh of a script, and the script's configuration file, if it has one.

    run.sh has the script's command for the recommended configuration.

    Args:
        inside: the folder below data/ in which the command runs; empty: data/ itself.
        elsewhere: a comment on what the script reads from elsewhere.
    """
    world_size, in_shell = record.params.world_size, task.command.needs_shell
    values = task.values(record.params, record.seed, record.trial, _OUTPUT, _OUTPUT)
    template = task.template({**values, "config": ""})
    config = None if template is None else template.filled({**values, "config": template.copy_name})
    if in_shell:
        output = Variable("OUTPUT")
        values |= {"output_dir": output, "checkpoint_dir": output, "config": Variable("CONFIG")}
    else:
        values["config"] = _CONFIG
    words = task.command.argv(values)
    if world_size > 1 and not task.starts_ranks:
        launcher = (
            "python3",
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={world_size}",
            "--no-python",
        )
        words = [*launcher, *words]
    # Make the output folder only for a command that names it.
    named = {"output_dir", "checkpoint_dir"} & set(task.command.names)
    needs_output = bool(named) or (config is not None and _OUTPUT in config)
    lines = _MAKE_OUTPUT if needs_output else ""
    if template is not None and config is not None:
        lines += (_FILL_CONFIG if _OUTPUT in config else _NAME_CONFIG).format(
            name=template.copy_name
        )
    command = " ".join(map(_quoted, words))
    variables = "".join(
        f"export {name}={value}\n" for name, value in _variables(task, record, launch).items()
    )
    places = {
        "INSIDE": shlex.quote(inside),
        "ELSEWHERE": elsewhere,
        "OUTPUT": lines,
        "VARIABLES": variables,
    }
    places["PROGRAM"] = _quoted(words[0])
    sharing = max(launch.ranks_of_nodes) * launch.slots
    script = {SCRIPT: settings.filled("run_script.sh", RANKS=sharing, **places, COMMAND=command)}
    return (
        script
        if template is None or config is None
        else {**script, f"{CONFIG}{template.copy_name}": config}
    )


def _variables(task: Script, record: TrialRecord, launch: Launch) -> dict[str, str]:
    """Return the variables that choose a script's device and ranks, as they are in a trial."""
    variables = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if not launch.gpus:
        variables["DS_ACCELERATOR"] = "cpu"
    if record.params.world_size > 1:
        is_accelerate_s = not launch.gpus and not task.uses_deepspeed
        return variables | ({"ACCELERATE_USE_CPU": "true"} if is_accelerate_s else {})
    return variables | _ONLY_RANK if task.uses_deepspeed and not task.starts_ranks else variables


def _quoted(word: str) -> str:
    """Quote a word for a shell.

    `_OUTPUT` and `_CONFIG` in it become the shell's variables OUTPUT and CONFIG.
    """
    quoted = shlex.quote(word)
    for mark in (_OUTPUT, _CONFIG):
        variable = f'"${mark.removeprefix("CARBONOPT_")}"'
        quoted = quoted.replace(mark, f"'{variable}'" if quoted.startswith("'") else variable)
    return quoted
