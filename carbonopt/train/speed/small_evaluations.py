"""Run small evaluations without the compiler, also where the training's steps are compiled."""

from contextlib import AbstractContextManager, nullcontext

import torch

# Operations of a trial's evaluations from which on they run compiled. Each process has to load the
# compiled forward pass, 180 to 210 J on an H200. That was paid back after 0.8e14 operations of a
# model of 10.8 million parameters, and 2e14 of one of 124 (reports/performance.md).
_COMPILED_FROM_FLOP = 1e14


def evaluation_stance(
    parameters: int | None, tokens: int | None, evaluations: int, attention: str | None
) -> AbstractContextManager[None]:
    """Return a context in which a trial evaluates: without the compiler, if that is little work.

    A forward pass takes 2 operations a parameter and token (Kaplan et al. 2020, Scaling Laws for
    Neural Language Models, arXiv 2001.08361). The rule does not ask whether the trial is a repeat,
    which has one evaluation: all runs of a configuration are evaluated alike.

    Args:
        parameters: The model's parameters; None: not known.
        tokens: The tokens of one evaluation; None: see `TrainerTask.evaluation_tokens`.
        evaluations: The number of evaluations of a trial that is no repeat.
        attention: The attention implementation; flex_attention is made for the compiler.
    """
    is_known = parameters is not None and tokens is not None
    if not is_known or attention == "flex_attention":
        return nullcontext()
    if 2.0 * parameters * tokens * evaluations >= _COMPILED_FROM_FLOP:  # type: ignore[operator]
        return nullcontext()
    eager: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return eager
