"""The code in a trial's process: data, model, DeepSpeed's settings, training, evaluation.

The study starts `prepare` once, and `rank_main` for every trial, one process per rank, unless its
ranks are forked from a process that has imported `fork_template`. The doctor starts `probe`. A
report copies `rerun`, and all modules of this package that it imports, beside the winner's
configuration.
"""
