"""Log ratios of all pairs by the reference model of DPO, with which training begins."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from carbonopt.train import ranks
from carbonopt.train.client import Speaker
from carbonopt.train.data.examples import ExampleMicroBatches
from carbonopt.train.data.packing import batches_of_rank
from carbonopt.train.tasks.task import TrialRun

if TYPE_CHECKING:
    from carbonopt.train.tasks.dpo import DPO


@torch.no_grad()
def reference_log_ratios(
    task: "DPO", run: TrialRun, model: Any, speaker: Speaker | None
) -> torch.Tensor:
    """Return by how much the model finds each pair's chosen answer likelier, on every rank.

    Returns:
        Log ratios in nats, float32 [pairs], by number of the pair, training pairs first. They are 0
        for pairs that the trial never sees because it is shorter than an epoch.
    """
    train, evaluation = task.examples(run.folder, "train"), task.examples(run.folder, "eval")
    batches = ExampleMicroBatches(train, run.division)
    seen = np.zeros(len(train), bool)
    for index in range(0, len(batches), run.division.accumulation_steps):
        seen[batches.global_batch(index)] = True
    log_ratios = np.zeros(len(train) + len(evaluation))
    model.eval()
    for examples, order in (
        (train, train.order[seen[train.order]]),
        (evaluation, evaluation.order),
    ):
        for places in batches_of_rank(
            len(order), run.eval_batch_size_per_gpu, ranks.rank(), ranks.world_size()
        ):
            indices = np.where(places < 0, -1, order[places])
            batch = {
                name: tensor.to(ranks.device()) for name, tensor in examples.batch(indices).items()
            }
            of_pairs = torch.where(
                batch["weights"] > 0, task.log_ratios(model, batch), 0.0
            )  # 0 for pairs that fill up a batch
            np.add.at(log_ratios, batch["pair"].cpu().numpy(), of_pairs.double().cpu().numpy())
            if speaker is not None:
                speaker.progress(0, run.total_steps)
    model.train()
    return torch.tensor(
        ranks.summed(log_ratios.tolist()), dtype=torch.float32, device=ranks.device()
    )
