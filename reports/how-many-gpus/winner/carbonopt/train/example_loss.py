"""The loss and the evaluation of examples that stand for themselves, however they are divided among ranks."""

from typing import Any

import torch
from transformers import TrainingArguments

from carbonopt.train import ranks
from carbonopt.train.data.examples import ExampleMicroBatches
from carbonopt.train.data.packing import batches_of_rank
from carbonopt.train.loop import TrialTrainer
from carbonopt.train.tasks.base import TrialRun
from carbonopt.train.tasks.trainer_task import ExampleTask


class ExampleTrainer(TrialTrainer):
    """Its loss is the task's sum over a micro batch, divided by what a whole global batch counts."""

    def __init__(self, task: ExampleTask, run: TrialRun, model: Any, arguments: TrainingArguments) -> None:
        batches = ExampleMicroBatches(task.examples(run.folder, "train"), run.division)
        self._task, self._world_size = task, run.params.world_size
        # That there is a function tells the Trainer not to divide by the accumulation steps once more.
        super().__init__(model, arguments, train_dataset=batches, compute_loss_func=task.loss_sum)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed averages over ranks: a sum counts world-size-fold.
        scale = self._world_size / inputs.pop("loss_count").float()
        loss = self._task.loss_sum(model, inputs) * scale
        self.last_loss = loss.detach()
        return loss


@torch.no_grad()
def summed(task: ExampleTask, run: TrialRun, model: Any) -> list[float]:
    """The task's sums over all evaluation examples and all ranks; each counts once. Leaves the model training."""
    examples, device = task.examples(run.folder, "eval"), ranks.device()
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    for places in batches_of_rank(len(examples), run.eval_batch_size_per_gpu, ranks.rank(), ranks.world_size()):
        indices = examples.order[places]
        indices[places < 0] = -1
        batch = {name: tensor.to(device) for name, tensor in examples.batch(indices).items()}
        total = total + task.sums(model, batch)
    model.train()
    return ranks.summed(total.tolist())
