"""What runs inside a trial's process: data, workload, DeepSpeed settings, qualities summed over all ranks.

Two programs, both started by the study: `python -m carbonopt.train.prepare SPEC.json`, once, and
`python -m carbonopt.train.worker SPEC.json`, one process a rank, for every trial. `standalone.py` is none of them: a
report copies it to winner/train.py, where it trains without carbonopt.
"""
