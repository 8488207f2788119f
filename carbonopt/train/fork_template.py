"""The fork server's module for carbonopt's own training: `forked_rank`, imported without torchao.

transformers imports torchao where it is installed, which opens a GPU: every trial would then have
to import everything anew, float8 or not. A trial in float8 imports torchao itself.
"""

from carbonopt.train.imports import hidden

with hidden("torchao"):
    from carbonopt.train import forked_rank

run, unfit = forked_rank.run, forked_rank.unfit
