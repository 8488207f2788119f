"""What Lightning's Trainer tells its callback: how long the training is, and what is logged."""

from pathlib import Path

import pytest
from test_script_phases import assert_seconds, timed

from carbonopt.core.trial import TrialState

# Each test takes seconds of real time.
pytestmark = [pytest.mark.slow, pytest.mark.timed]

# The hooks in the order in which Trainer.fit calls them, without lightning, which takes seconds to
# import.
HOOKS = """
from types import SimpleNamespace as Having
hooks = carbon.callbacks._LightningHooks("val_accuracy")
trainer = Having(estimated_stepping_batches=TOTAL, world_size=1, global_step=0, optimizers=[1],
    save_checkpoint=lambda *_: None, callback_metrics={}, should_stop=False)
hooks.on_train_start(trainer, None)
for step in range(1, 5):
    wait(0.2)
    trainer.global_step = step
    hooks.on_train_batch_end(trainer)
    if step % 2 == 0:
        hooks.on_validation_start(trainer, None)
        wait(0.3)
        trainer.callback_metrics = {NAME: step / 10}
        hooks.on_validation_end(trainer, None)
hooks.on_train_end(trainer, None)
wait(0.3)
"""


def script(total: str, name: str = "val_accuracy") -> str:
    return f"TOTAL, NAME = {total}, {name!r}\n" + HOOKS


# It is infinite with max_epochs=-1, and -1 where the data has no length, such as an IterableDataset.
@pytest.mark.parametrize("total", ["float('inf')", "-1", "4"])
def test_a_training_without_a_known_end_has_the_study_s_steps(total: str, tmp_path: Path) -> None:
    record = timed(script(total), tmp_path, steps=4)
    assert_seconds(record, {"train": 0.8, "evaluation": 0.6, "after": 0.3})
    assert (record.value, record.total_steps, record.planned_steps) == (0.4, 4, None)


@pytest.mark.parametrize("total", ["float('inf')", "-1"])
def test_a_training_whose_steps_nobody_knows_is_refused(total: str, tmp_path: Path) -> None:
    record = timed(script(total), tmp_path)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "max_steps" in record.failure.text and "workload.steps" in record.failure.text


def test_a_metric_that_is_logged_by_another_name_is_refused(tmp_path: Path) -> None:
    """With two loaders, Lightning adds to the name which one it was."""
    record = timed(script("4", "val_accuracy/dataloader_idx_0"), tmp_path)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "val_accuracy/dataloader_idx_0" in record.failure.text
