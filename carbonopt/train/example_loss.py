"""The loss and evaluation of independent examples, however they are divided among ranks."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments

from carbonopt.train import ranks
from carbonopt.train.data.examples import ExampleMicroBatches
from carbonopt.train.data.packing import batches_of_rank
from carbonopt.train.tasks.task import TrialRun
from carbonopt.train.training_loop import TrialTrainer

if TYPE_CHECKING:
    from carbonopt.train.tasks.trainer_task import ExampleTask


class ExampleTrainer(TrialTrainer):
    """A Trainer whose loss is the task's sum, divided by the count of a whole global batch."""

    def __init__(
        self, task: "ExampleTask", run: TrialRun, model: Any, arguments: TrainingArguments
    ) -> None:
        batches = ExampleMicroBatches(task.examples(run.folder, "train"), run.division)
        self._task, self._world_size = task, run.spec.params.world_size
        # With a loss function the Trainer does not divide by the accumulation steps once more.
        super().__init__(model, arguments, train_dataset=batches, compute_loss_func=task.loss_sum)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed averages over ranks, so a sum is multiplied by the world size.
        scale = self._world_size / inputs.pop("loss_count").float()
        loss = self._task.loss_sum(model, inputs) * scale
        self.last_loss = loss.detach()
        return loss


@torch.no_grad()
def summed(task: "ExampleTask", run: TrialRun, model: Any) -> list[float]:
    """Return the task's sums over all evaluation examples and all ranks; each counts once.

    The model is left in training mode.
    """
    examples, device = task.examples(run.folder, "eval"), ranks.device()
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    for places in batches_of_rank(
        len(examples), run.eval_batch_size_per_gpu, ranks.rank(), ranks.world_size()
    ):
        indices = examples.order[places]
        indices[places < 0] = -1
        batch = {name: tensor.to(device) for name, tensor in examples.batch(indices).items()}
        total = total + task.sums(model, batch)
    model.train()
    return ranks.summed(total.tolist())
