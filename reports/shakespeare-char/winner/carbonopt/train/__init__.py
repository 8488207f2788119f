"""What runs inside a trial's process: data, model, DeepSpeed's settings, training, evaluation.

The study starts two of its files: `prepare`, once, and `worker`, one process a rank, for every trial, unless its ranks
are forked from a process that has imported `forked_rank`. The doctor starts `probe`. `rerun` is the winner's: a report
copies it, and all that it imports from here, beside the configuration that it trains.
"""
