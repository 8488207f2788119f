"""What counts as training in Hugging Face's Trainer: neither its evaluations nor its checkpoints
do.
"""

from pathlib import Path

import pytest
from test_script_phases import assert_seconds, timed

from carbonopt.core.trial import TrialState

# Each test takes seconds of real time.
pytestmark = [pytest.mark.slow, pytest.mark.timed]

# The hooks in the order in which Trainer.train calls them, each with the work that lies before it.
HOOKS = """
from types import SimpleNamespace as Having
hooks = carbon.callbacks._TrainerHooks("eval_accuracy")  # without transformers, which takes seconds to import
args, state = Having(eval_on_start=START, world_size=1), Having(max_steps=4, global_step=0)
control = Having(should_evaluate=False, should_save=False, should_training_stop=False)

def evaluated(*names):
    for name in names:
        wait(0.3)
        hooks.on_prediction_step(args, state, control)
        wait(0.2)
        control.should_evaluate = False
        hooks.on_evaluate(args, state, control, metrics={f"eval_{name}accuracy": 0.1 + state.global_step / 10})

def saved():
    wait(0.5)
    control.should_save = False
    hooks.on_save(args, state, control)

hooks.on_train_begin(args, state, control)
if args.eval_on_start:
    evaluated("")
for step in range(1, 5):
    wait(0.2)
    state.global_step = step
    control.should_evaluate = EVALUATES and step % 2 == 0
    control.should_save = SAVES and step % 2 == 0
    hooks.on_step_end(args, state, control)
    if EVALUATES and step % 2 == 0:
        evaluated(*SETS)
    if (SAVES or BEST) and step % 2 == 0:
        saved()
wait(0.5)
hooks.on_train_end(args, state, control)
state.global_step = 4
evaluated(*LATER)
"""
CASES = {
    "an evaluation at the start": ({"START": True}, {"evaluation": 1.5, "after": 0.5}),
    # After the last step a further set is known by its first batch alone: what lies before that is
    # no training.
    "two evaluation sets": ({"SETS": ("", "b_")}, {"evaluation": 1.7, "after": 0.8}),
    "two sets, the second one's metric": ({"SETS": ("b_", "")}, {"evaluation": 1.7, "after": 0.8}),
    "checkpoints": ({"SAVES": True}, {"evaluation": 1.0, "saving": 1.0, "after": 0.5}),
    "checkpoints of the best": ({"BEST": True}, {"evaluation": 1.0, "saving": 0.5, "after": 1.0}),
    "checkpoints after two sets": (
        {"SAVES": True, "SETS": ("", "b_")}, {"evaluation": 1.7, "saving": 1.3, "after": 0.5}
    ),
    "a test after the training": ({"LATER": ("", "")}, {"evaluation": 1.0, "after": 1.5}),
}  # fmt: skip


def script(**changes) -> str:
    settings = {
        "START": False,
        "EVALUATES": True,
        "SAVES": False,
        "BEST": False,
        "SETS": ("",),
        "LATER": (),
    } | changes
    return "\n".join(f"{name} = {value!r}" for name, value in settings.items()) + HOOKS


@pytest.mark.parametrize("case", CASES)
def test_evaluations_and_checkpoints_are_no_training(case: str, tmp_path: Path) -> None:
    changes, seconds = CASES[case]
    record = timed(script(**changes), tmp_path)
    assert_seconds(record, {"train": 0.8, **seconds})
    assert [point.step for point in record.evals] == ([0] if changes.get("START") else []) + [2, 4]
    assert record.value == pytest.approx(0.5), "of the training's own last evaluation"


def test_an_evaluation_by_an_earlier_callback_takes_no_step_with_it(tmp_path: Path) -> None:
    text = script().replace(
        "    state.global_step = step\n",
        "    hooks.on_optimizer_step(args, state, control)\n"
        "    state.global_step = step\n"
        "    evaluated('')\n",
    )
    record = timed(text.replace("EVALUATES = True", "EVALUATES = False"), tmp_path)
    assert_seconds(record, {"train": 0.8, "evaluation": 2.0, "after": 0.5})
    assert [point.step for point in record.evals] == [1, 2, 3, 4]


def test_without_evaluations_while_it_trains_the_first_one_after_it_counts(tmp_path: Path) -> None:
    record = timed(script(EVALUATES=False, LATER=("", "b_")), tmp_path)
    assert (record.state, record.value, record.evals[-1].step) == (
        TrialState.COMPLETE,
        pytest.approx(0.5),
        4,
    )
    assert record.duration_s.train == pytest.approx(0.8, abs=0.25)


def test_a_training_that_goes_on_from_a_checkpoint_is_refused(tmp_path: Path) -> None:
    record = timed(
        script()
        .replace("global_step=0", "global_step=100")
        .replace("max_steps=4", "max_steps=200"),
        tmp_path,
    )
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "101" in record.failure.text


def test_a_trainer_that_sees_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    record = timed(script().replace("world_size=1", "world_size=2"), tmp_path)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "world size is 2" in record.failure.text


def test_a_trainer_that_begins_again_with_a_smaller_batch_is_refused(tmp_path: Path) -> None:
    begins = "hooks.on_train_begin(args, state, control)\n"
    record = timed(script().replace(begins, begins + begins), tmp_path)
    assert (record.state, record.failure.kind) == (TrialState.FAILED, "bad_input")
    assert "auto_find_batch_size" in record.failure.text
