"""What runs inside a trial's process: data, model, DeepSpeed's settings, training, evaluation.

The study starts `prepare`, once, and for every trial `worker`, one process a rank, unless its ranks are forked from a
process that has imported `forked_rank`. The doctor starts `probe`. A report copies `rerun`, with all of this that it
imports, beside the winner's configuration.
"""
