"""The lines of `carbonopt.script` in Hugging Face's Trainer, accelerate on two ranks, and
Lightning.
"""

import json
from pathlib import Path

import pytest
from commands import within
from test_script import exported, study_of

pytestmark = pytest.mark.slow

TRAINER = """
import sys
import numpy as np
from sklearn.datasets import load_digits
from transformers import AutoConfig, AutoModelForImageClassification, Trainer, TrainingArguments, set_seed
import carbonopt.script as carbon

set_seed(0)
digits = load_digits()
rows = [
    {"pixel_values": image[None].astype(np.float32) / 16, "labels": int(label)}
    for image, label in zip(digits.images, digits.target)
]
config = AutoConfig.for_model(
    "vit", image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1,
    num_attention_heads=2, intermediate_size=32, num_labels=10,
)
arguments = TrainingArguments(
    output_dir=sys.argv[2], learning_rate=float(sys.argv[1]), max_steps=96, per_device_train_batch_size=64,
    eval_strategy="steps", eval_steps=32, save_strategy="no", report_to="none", use_cpu=True, logging_strategy="no",
)
trainer = Trainer(
    AutoModelForImageClassification.from_config(config), arguments, train_dataset=rows[:1500], eval_dataset=rows[1500:],
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    callbacks=[carbon.callback("eval_accuracy")],
)
trainer.train()
print("FINAL", trainer.evaluate()["eval_accuracy"])
"""

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
import carbonopt.script as carbon

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
train = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:1500], y[:1500]), batch_size=5)
test = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[1500:], y[1500:]), batch_size=50)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
with carbon.run(total_steps=2 * len(train)) as run:
    for epoch in range(2):
        for images, labels in train:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            run.step()
        with run.evaluation(), torch.no_grad():
            right = [accelerator.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in test]
            right = torch.cat(right)
        accelerator.print("RANKS", accelerator.num_processes, len(right), float(right.float().mean()))
        if run.report(accuracy=float(right.float().mean()), count=len(right)):
            break
del loss  # with it go the threads of its gradients, before those of the ranks' connections
accelerator.free_memory(model, optimizer)
accelerator.end_training()
"""

LIGHTNING = """
import sys
import lightning as L
import torch
from sklearn.datasets import load_digits
import carbonopt.script as carbon

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

class Linear(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, index):
        self.log("val_accuracy", (self.layer(batch[0]).argmax(1) == batch[1]).float().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=float(sys.argv[1]))

L.seed_everything(0)
loader = lambda part, shuffle: torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x[part], y[part]), batch_size=50, shuffle=shuffle
)
trainer = L.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=True, enable_progress_bar=False,
    callbacks=[carbon.lightning_callback("val_accuracy")], default_root_dir=sys.argv[2],
)
trainer.fit(Linear(), loader(slice(0, 1500), True), loader(slice(1500, None), False))
print("FINAL", float(trainer.callback_metrics["val_accuracy"]))
"""
SPACE = {"my_width": None}
A_ACCURACY = {"quality": "a_accuracy", "at_least": 0.05}


def run(folder: Path, script: str, **changes) -> list[dict]:
    """The records of a study of one trial."""
    study = study_of(folder, script, budget={"trials": 1}, target={"accuracy": 0.05}, **changes)
    done = within("run", study, "--out", folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    return exported(folder / "out")


def logged(folder: Path, word: str) -> list[str]:
    """What follows a word in the trial's log, of each line that begins with it."""
    log = (folder / "out" / "trials" / "0000" / "log-1.txt").read_text()
    return [line.split(maxsplit=1)[1] for line in log.splitlines() if line.startswith(word)]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_hugging_face_trainer(warm: bool, tmp_path: Path) -> None:
    command = "python train.py {learning_rate} {output_dir}"
    (record,) = run(tmp_path, TRAINER, command=command, space=SPACE, workload={"warm": warm})
    assert [point["step"] for point in record["evals"]] == [32, 64, 96]
    assert record["quality"]["count"] == 297 and record["quality"]["value"] == float(
        logged(tmp_path, "FINAL")[0]
    )
    assert record["energy_kwh"]["eval"] >= 0 and record["duration_s"]["eval"] > 0


@pytest.mark.parametrize(("returns", "quality"), [(" return kept", True), ("", False)])
def test_other_data_that_a_callback_evaluates_are_not_the_quality(
    returns: str, quality: bool, tmp_path: Path
) -> None:
    """Without the copy of `control`, the Trainer makes no evaluation of its own."""
    tests = (
        "import copy\nfrom transformers import TrainerCallback\n"
        "class Tests(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        kept = copy.deepcopy(control)\n"
        f"        if state.global_step % 32 == 0: trainer.evaluate(rows[:10]);{returns or ' pass'}\n"
    )
    script = TRAINER.replace("set_seed(0)\n", f"{tests}set_seed(0)\n", 1)
    script = script.replace('callback("eval_accuracy")', 'callback("eval_accuracy"), Tests()')
    study = study_of(
        tmp_path,
        script,
        command="python train.py {learning_rate} {output_dir}",
        space=SPACE,
        budget={"trials": 1},
        target={"accuracy": 0.05},
    )
    within("run", study, "--out", tmp_path / "out")
    (record,) = exported(tmp_path / "out")
    if quality:
        assert [(point["step"], point["count"]) for point in record["evals"]] == [
            (32, 297),
            (64, 297),
            (96, 297),
        ]
    else:
        assert (record["state"], record["evals"]) == ("failed", [])
        assert record["failure"]["kind"] == "bad_input"
        assert "eval_dataset" in record["failure"]["text"]


def test_accelerate_on_two_ranks(tmp_path: Path) -> None:
    command = "python train.py {learning_rate}"
    (record,) = run(tmp_path, ACCELERATE, command=command, space=SPACE, launch={"cpu_ranks": 2})
    assert logged(tmp_path, "RANKS") == [f"2 297 {point['value']}" for point in record["evals"]]
    assert [point["step"] for point in record["evals"]] == [150, 300]


def test_a_launcher_starts_two_ranks_itself(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node {world_size} train.py {learning_rate}"
    (record,) = run(tmp_path, ACCELERATE, command=command, space=SPACE, launch={"cpu_ranks": 2})
    assert logged(tmp_path, "RANKS")[-1] == f"2 297 {record['quality']['value']}"


def test_a_trainers_evaluations_and_checkpoints_are_no_training(tmp_path: Path) -> None:
    slow = "def metrics(found):\n    import time\n    time.sleep(1)\n    return {"
    script = TRAINER.replace(
        "config = Auto", slow + '"accuracy": 1.0 - found.label_ids.size / 1e4}\nconfig = Auto', 1
    )
    head, _, tail = script.partition("    compute_metrics=lambda")
    script = head + "    compute_metrics=metrics,\n" + tail.partition("\n")[2]
    script = script.replace(
        'save_strategy="no"', 'save_strategy="steps", save_steps=32, eval_on_start=True'
    )
    script = script.replace(
        "eval_dataset=rows[1500:]", 'eval_dataset={"a": rows[1500:], "b": rows[:100]}'
    )
    script = script.replace('callback("eval_accuracy")', 'callback("eval_a_accuracy")')
    script = script.replace('trainer.evaluate()["eval_accuracy"]', "trainer.evaluate(rows[:10])")
    command = "python train.py {learning_rate} {output_dir}"
    study = study_of(
        tmp_path, script, command=command, space=SPACE, budget={"trials": 1}, target=A_ACCURACY
    )
    done = within("run", study, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = exported(tmp_path / "out")
    assert [point["step"] for point in record["evals"]] == [0, 32, 64, 96]
    assert record["quality"]["value"] == pytest.approx(1.0 - 297 / 1e4), (
        "not that of the test afterwards"
    )
    stages = {name: cost["duration_s"] for name, cost in record["stages"].items()}
    assert stages["evaluation"] > 8 and stages["saving"] > 0 and stages["after"] > 1
    assert record["duration_s"]["train"] == pytest.approx(
        stages["compile"] + stages["steps"], abs=0.1
    )
    assert record["duration_s"]["eval"] == pytest.approx(stages["evaluation"], abs=0.1)


def test_lightnings_checkpoints_and_later_validations_are_no_training(tmp_path: Path) -> None:
    later = LIGHTNING + "trainer.validate(Linear(), loader(slice(0, 50), False))\n"
    (record,) = run(
        tmp_path, later, command="python train.py {learning_rate} {output_dir}", space=SPACE
    )
    assert [point["step"] for point in record["evals"]] == [30, 60, 90]
    assert record["quality"]["value"] == float(logged(tmp_path, "FINAL")[0])
    assert json.dumps(record["evals"][0]["value"])
    assert (
        record["stages"]["saving"]["duration_s"] > 0 and record["stages"]["after"]["duration_s"] > 0
    )
