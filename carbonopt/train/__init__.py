"""What runs inside a trial's process: data, workload, DeepSpeed settings, token-weighted perplexity.

Two programs, both started by the study: `python -m carbonopt.train.prepare SPEC.json`, once, and
`python -m carbonopt.train.worker SPEC.json`, one process a rank, for every trial.
"""
