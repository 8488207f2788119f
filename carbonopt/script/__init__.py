"""The functions that your own training script calls for a study; outside a study they do nothing.

docs/script.md has the details. A script uses either a trainer's callback, or a run around its loop:

    trainer = Trainer(..., callbacks=[carbonopt.script.callback("eval_accuracy")])

    run = carbonopt.script.run(total_steps=epochs * len(batches))  # on every rank, before the loop
    for epoch in range(epochs):
        for batch in batches:
            train(batch)
            run.step()
        with run.evaluation():
            accuracy = evaluate(model)
        if run.report(accuracy=accuracy):
            break

Nothing heavy is imported here; PyTorch is used where the script has imported it.
"""

from carbonopt.script.callbacks import callback, lightning_callback
from carbonopt.script.run import Run, in_study, run

__all__ = ["Run", "callback", "in_study", "lightning_callback", "run"]
