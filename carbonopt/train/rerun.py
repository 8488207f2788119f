"""Train a configuration again, as its trial was trained, and print the quality that it reaches.

A report puts a copy of this file, and of all that it imports from carbonopt, into the winner's
folder. It reads two files there: params.json, the trial's parameters, and workload.yaml, the
study's workload and the trial's recorded results.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from carbonopt.core.dimensions import DIMENSION_NAMES, TrainingParams, TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.files import write_json
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import TrainingSpec
from carbonopt.spec.workload_settings import REWARDS
from carbonopt.train.failures import Diverged
from carbonopt.train.tasks.task import Trained, TrainingTask, training_task

PARAMS, WORKLOAD, OUTPUT, RESULT = "params.json", "workload.yaml", "output", "result.json"
RECORDED = "recorded"  # key in workload.yaml: what the trial reached, and on how much data
# counts of the preparation that must be the recorded ones
DATA_COUNTS = ("train_examples", "eval_examples", "train_tokens", "eval_tokens")


def rerun(folder: Path, places: dict[str, str]) -> None:
    """Train, and write the model, its tokenizer and result.json into the winner's output/ folder.

    It must be called on every rank.

    Args:
        folder: The winner's folder.
        places: The paths of the files and folders that the workload names, by these names.

    Raises:
        SystemExit: The data isn't what it was, or training can't be done here; the text is one
            sentence.
    """
    workload = yaml.safe_load((folder / WORKLOAD).read_bytes())
    recorded = workload.pop(RECORDED)
    workload["evaluations"] = 1  # the others are for a study that may stop the trial
    workload |= {
        key: _placed(workload[key], places)
        for key in ("model", "tokenizer", "dataset", *REWARDS)
        if key in workload
    }
    params = TrialParams.from_record(json.loads((folder / PARAMS).read_bytes()))
    output = folder / OUTPUT
    output.mkdir(exist_ok=True)
    os.chdir(folder)  # relative paths start from here
    try:
        trained = _trained(training_task(workload), params, recorded, output)
    except (BadInput, Diverged) as error:
        raise SystemExit(str(error)) from error
    if int(os.environ.get("RANK", "0")) != 0:
        return
    last, quality, with_seed = trained.last, recorded["quality"], f"with seed {recorded['seed']}"
    assert last is not None and last.value is not None  # it is no probe and has not diverged
    value = last.value
    reached = {"name": quality, "value": value, "sum": last.sum, "count": last.count}
    result = {"quality": reached, "steps": last.step}
    write_json(output / RESULT, result)
    before = recorded["value"]
    difference = f"{value / before - 1:+.2g} relative" if before else f"{value - before:+.2g}"
    compared = f"recorded {with_seed}: {before:.6g} ({difference})"
    print(f"{quality} {value:.6g} {with_seed}; {compared}. Another seed gives another {quality}.")


def _placed(value: Any, places: dict[str, str]) -> Any:
    """Return `value` with paths of files and folders instead of their names."""
    if isinstance(value, dict):
        return {key: _placed(part, places) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, places) for part in value]
    if not isinstance(value, str):
        return value
    file, colon, function = value.rpartition(":")  # a reward's function is named FILE:FUNCTION
    return (
        f"{places[file]}:{function}"
        if colon and file in places
        else places.get(value.removeprefix("./"), value)
    )


def _trained(
    task: TrainingTask, params: TrialParams, recorded: dict[str, Any], output: Path
) -> Trained:
    import torch

    from carbonopt.train.rank_main import run_trial

    if torch.cuda.is_available():  # otherwise every rank would open the first GPU to look at it
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # a folder of each rank's own
    with tempfile.TemporaryDirectory(prefix=".prepared-", dir=output) as aside:
        prepared_folder = PreparedFolder(Path(aside))
        fixed = {
            name: value
            for name, value in params.model_dump(exclude_none=True).items()
            if name in DIMENSION_NAMES
        }
        prepared = task.prepare(Space.model_validate(fixed), prepared_folder, fingerprint="")
        for name in DATA_COUNTS:
            count = getattr(prepared, name)
            if recorded.get(name, count) != count:
                raise BadInput(
                    f"the data set has changed: {name} were {recorded[name]}, now they are {count}."
                )
        write_json(prepared_folder.summary, prepared.model_dump())
        workload, number, seed = (
            task.workload.model_dump(mode="json"),
            recorded["trial"],
            recorded["seed"],
        )
        spec = TrainingSpec(
            number=number,
            attempt=1,
            seed=seed,
            params=TrainingParams.of(params),
            workload=workload,
            prepared_dir=aside,
            trial_dir=aside,
        )
        trained = run_trial(spec, None)
        trained.save_model(output)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return trained
