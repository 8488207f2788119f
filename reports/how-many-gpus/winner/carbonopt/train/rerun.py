"""Trains a configuration once more, as its trial was trained, and says which quality it reaches.

A report puts a copy of this file, and of all that it imports from carbonopt, into the winner's folder. Two files there
are read: params.json, the trial's parameters, and workload.yaml, the study's workload and what was recorded of it.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from carbonopt.core.config import REWARDS, Space
from carbonopt.core.dimensions import SEARCHED, TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.files import PreparedFolder, write_json
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import TrialSpec
from carbonopt.train.failures import Diverged
from carbonopt.train.tasks.base import Trained, TrainingTask, training_task

PARAMS, WORKLOAD, OUTPUT, RESULT = "params.json", "workload.yaml", "output", "result.json"
RECORDED = "recorded"  # in workload.yaml: what the trial reached, and on how much data
DATA_COUNTS = ("train_examples", "eval_examples", "train_tokens", "eval_tokens")  # of the preparation


def rerun(folder: Path, places: dict[str, str]) -> None:
    """Trains and writes the model, its tokenizer and result.json into output/ of `folder`, the winner's; to be called
    on every rank. `places`: where the files and folders that the workload names lie, by those names. Raises SystemExit
    with one sentence if the data isn't what it was, or training can't be done here."""
    workload = yaml.safe_load((folder / WORKLOAD).read_bytes())
    recorded = workload.pop(RECORDED)
    workload["evaluations"] = 1  # the others are for a study that may stop the trial
    workload |= {
        key: _placed(workload[key], places) for key in ("model", "tokenizer", "dataset", *REWARDS) if key in workload
    }
    params = TrialParams.from_record(json.loads((folder / PARAMS).read_bytes()))
    output = folder / OUTPUT
    output.mkdir(exist_ok=True)
    os.chdir(folder)  # relative paths lead from here
    try:
        trained = _trained(training_task(workload), params, recorded, output)
    except (BadInput, Diverged) as error:
        raise SystemExit(str(error)) from error
    if int(os.environ.get("RANK", "0")) != 0:
        return
    last, quality, with_seed = trained.last, recorded["quality"], f"with seed {recorded['seed']}"
    assert last is not None and last.value is not None  # it is no probe, and has not diverged
    value = last.value
    reached = {"name": quality, "value": value, "sum": last.sum, "count": last.count}
    result = {"quality": reached, "steps": last.step}
    if quality == PERPLEXITY.name:  # as in records, for those who read them from before there were other qualities
        result |= {quality: value, "nll_sum": last.sum, "eval_tokens": last.count}
    write_json(output / RESULT, result)
    before = recorded["value"]
    difference = f"{value / before - 1:+.2g} relative" if before else f"{value - before:+.2g}"
    compared = f"recorded {with_seed}: {before:.6g} ({difference})"
    print(f"{quality} {value:.6g} {with_seed}; {compared}. Another seed gives another {quality}.")


def _placed(value: Any, places: dict[str, str]) -> Any:
    """`value` with the places of files and folders instead of their names."""
    if isinstance(value, dict):
        return {key: _placed(part, places) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, places) for part in value]
    if not isinstance(value, str):
        return value
    file, colon, function = value.rpartition(":")  # as a reward's function is named
    return f"{places[file]}:{function}" if colon and file in places else places.get(value.removeprefix("./"), value)


def _trained(task: TrainingTask, params: TrialParams, recorded: dict[str, Any], output: Path) -> Trained:
    import torch

    from carbonopt.train.worker import run_trial

    if torch.cuda.is_available():  # or every rank would open the first one to look at it
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with tempfile.TemporaryDirectory(prefix=".prepared-", dir=output) as aside:  # each rank's own
        prepared_folder = PreparedFolder(Path(aside))
        fixed = {name: value for name, value in params.model_dump(exclude_none=True).items() if name in SEARCHED}
        prepared = task.prepare(Space.model_validate(fixed), prepared_folder, fingerprint="")
        for name in DATA_COUNTS:
            count = getattr(prepared, name)
            if recorded.get(name, count) != count:
                raise BadInput(f"the data set has changed: {name} were {recorded[name]}, now they are {count}.")
        write_json(prepared_folder.summary, prepared.model_dump())
        workload, number, seed = task.workload.model_dump(mode="json"), recorded["trial"], recorded["seed"]
        spec = TrialSpec(
            number=number, attempt=1, seed=seed, params=params, workload=workload, prepared_dir=aside, trial_dir=aside
        )
        trained = run_trial(spec, None)
        trained.save_model(output)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return trained
