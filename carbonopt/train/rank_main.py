"""Run one rank of one trial: python -m carbonopt.train.rank_main SPEC.json.

SPEC.json is a `spec.trial_spec.TrainingSpec`. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT are in the environment, as torchrun sets them; rank 0 inherits the channel.
"""

import os
import sys
from pathlib import Path

import torch

from carbonopt.core.channel import CHANNEL_FD
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Stage
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.trial_spec import TrainingSpec
from carbonopt.train import ranks
from carbonopt.train.client import Speaker
from carbonopt.train.data.packing import total_steps
from carbonopt.train.failures import reported
from carbonopt.train.imports import import_all, package_versions
from carbonopt.train.tasks.task import Trained, TrialRun, training_task


def run_trial(spec: TrainingSpec, speaker: Speaker | None) -> Trained:
    """Train and evaluate a trial on this rank; raises what `TrainingTask.train` does."""
    import_all()  # a fork has done so already
    if speaker is not None:
        speaker.stage(Stage.DATA)
    task = training_task(spec.workload)
    params = spec.params
    folder = PreparedFolder(Path(spec.prepared_dir))
    prepared = folder.read_summary()
    if params.world_size != (processes := ranks.world_size()):
        raise BadInput(
            f"world_size must be the number of processes, but got {params.world_size} and"
            f" {processes}."
        )
    ranks.check_devices()
    # completions: num_generations for each prompt
    examples = prepared.train_examples * (params.num_generations or 1)
    steps = total_steps(examples, params.global_batch_size, params.epochs)
    return task.train(TrialRun(spec, task.workload, folder, prepared, steps), speaker)


def main(spec_json: str) -> int:
    """Train the trial of a TrainingSpec in JSON on this rank, and return the exit code."""
    speaker = Speaker.inherited() if CHANNEL_FD in os.environ else None

    def work() -> None:
        spec = TrainingSpec.model_validate_json(spec_json)
        trained = run_trial(spec, speaker)
        if spec.saves_model:
            trained.save_model(Path(spec.trial_dir) / "model")
        if speaker is not None and trained.last is not None:
            reached = {"step": trained.last.step, "tokens": trained.last.tokens}
            speaker.finished({**reached, "versions": package_versions()})

    exit_code = reported(work, speaker, ranks.peak_memory_gib)
    if torch.distributed.is_initialized() and exit_code == 0:
        torch.distributed.destroy_process_group()
    return exit_code


if __name__ == "__main__":
    code = main(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is reported and written; taking down the interpreter would cost another second.
    os._exit(code)
