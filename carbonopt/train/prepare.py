"""Everything that trials share, done once before the first: text to token arrays, the checks, DeepSpeed's ops.

    python -m carbonopt.train.prepare SPEC.json

SPEC.json: {"workload": config.Workload, "space": config.Space, "prepared_dir": a path, "fingerprint": of the workload}.
"""

import gc
import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from carbonopt.core.config import Space, Workload, may_be_other_than, values_of
from carbonopt.core.errors import BadInput
from carbonopt.core.files import PreparedFolder, write_json
from carbonopt.core.trial import Phase, Prepared
from carbonopt.core.values import Frozen
from carbonopt.train.client import Speaker
from carbonopt.train.failures import reported

# What takes seconds to import.
_IMPORTED_AHEAD = ("deepspeed.runtime.config", "transformers.training_args", "transformers.models.auto.modeling_auto")


class PrepareSpec(Frozen):
    workload: Workload
    space: Space
    prepared_dir: str
    fingerprint: str


def prepare(spec: PrepareSpec) -> Prepared:
    """Makes the prepared folder, or takes it as it is when it was made for the same workload; DeepSpeed's operators are
    loaded in any case, and compiled where they aren't there.

    Raises:
        BadInput: for whatever in the workload would make every trial fail.
    """
    folder = PreparedFolder(Path(spec.prepared_dir))
    if (found := folder.made_for(spec.fingerprint)) is not None:
        _load_ops(spec)
        return found
    if folder.root.exists() and not folder.root.is_dir():
        raise BadInput(f"{folder.root} must be a folder, but is a file; move it away.")
    if folder.root.exists() and not folder.summary.is_file() and any(folder.root.iterdir()):
        raise BadInput(f"{folder.root} must be empty or a prepared data set, but holds other files; move them away.")
    aside = PreparedFolder(folder.root.with_name(f".{folder.root.name}.{os.getpid()}.part"))
    try:
        aside.root.mkdir(parents=True)
        prepared = _make(spec, aside)
        prepared = prepared.model_copy(update={"files": aside.sizes()})
        write_json(aside.summary, prepared.model_dump())
        _replace(folder.root, aside.root)
    finally:
        shutil.rmtree(aside.root, ignore_errors=True)
    return prepared


def _make(spec: PrepareSpec, folder: PreparedFolder) -> Prepared:
    from carbonopt.train import ranks
    from carbonopt.train.arguments import check_training_arguments
    from carbonopt.train.data.packing import sequence_count
    from carbonopt.train.data.text import read_text
    from carbonopt.train.data.tokens import make_encoder
    from carbonopt.train.deepspeed_keys import check_deepspeed_keys
    from carbonopt.train.model import check_model, check_output_layer, fetch_weights, model_config, parameter_count
    from carbonopt.train.versions import package_versions

    workload = spec.workload
    ranks.check_devices()
    check_deepspeed_keys(workload.deepspeed)
    check_training_arguments(workload.training_arguments, spec.space)
    with as_bad_input("dataset"):
        text = read_text(workload.dataset)
    with as_bad_input("tokenizer"):
        encoder = make_encoder(workload, *text)
        train, evaluation = encoder.encode(text.train), encoder.encode(text.evaluation)
    with as_bad_input("model"):
        config = model_config(workload.model, encoder.tokenizer, encoder.vocab_size)
        check_model(config, workload, encoder.vocab_size)
        for kind in values_of(spec.space["output_layer"]):
            check_output_layer(config, str(kind), workload.model.trust_remote_code)
        fetch_weights(workload.model)
        parameters = parameter_count(config, workload.model.trust_remote_code)

    length = workload.sequence_length
    train_sequences = sequence_count(len(train), length, keep_tail=False)
    if train_sequences == 0:
        raise BadInput(
            f"the training text must have at least one sequence of {length} tokens and one token more, "
            f"but has {len(train)} tokens; give more text or a smaller workload.sequence_length."
        )
    if len(evaluation) < 2:
        raise BadInput(f"the evaluation text must have at least 2 tokens, but has {len(evaluation)}.")
    eval_sequences = sequence_count(len(evaluation), length, keep_tail=True)
    np.save(folder.train, train, allow_pickle=False)
    np.save(folder.evaluation, evaluation, allow_pickle=False)
    encoder.tokenizer.save_pretrained(folder.tokenizer)
    config.save_pretrained(folder.model_config)
    _load_ops(spec)
    return Prepared(
        fingerprint=spec.fingerprint,
        train_sequences=train_sequences,
        eval_sequences=eval_sequences,
        train_tokens=len(train),
        eval_tokens=len(evaluation) - 1,
        sequence_length=length,
        vocab_size=encoder.vocab_size,
        model_parameters=parameters,
        versions=package_versions(),
        eval_batch_size_per_gpu=_eval_batch_size(config.get_text_config().vocab_size, length, eval_sequences),
    )


def _load_ops(spec: PrepareSpec) -> None:
    from carbonopt.train.deepspeed_ops import load_ops

    load_ops(with_cpu_adam=may_be_other_than(spec.space["offload"], "none"))


def _eval_batch_size(vocab_size: int, sequence_length: int, eval_sequences: int) -> int | None:
    import torch

    from carbonopt.train.evaluation import batch_size_that_fits

    if not torch.cuda.is_available():
        return None
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return batch_size_that_fits(memory_bytes, vocab_size, sequence_length, eval_sequences)


@contextmanager
def as_bad_input(part: str) -> Iterator[None]:
    """What a library raises while it reads what the user gave is about that: one sentence, traceback in the log."""
    try:
        yield
    except (BadInput, OSError, MemoryError):
        raise
    except Exception as error:
        traceback.print_exc()
        what = " ".join(str(error).split())[:300]
        raise BadInput(f"workload.{part} can't be used: {type(error).__name__}: {what}") from error


def _replace(target: Path, made: Path) -> None:
    """Puts `made` in `target`'s place; a reader finds a whole folder there or none."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    made.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def main(spec_path: str) -> int:
    speaker = Speaker.inherited()
    with reported(speaker) as outcome:
        gc.disable()  # as in launch.template
        for module in _IMPORTED_AHEAD:
            importlib.import_module(module)
        gc.enable()
        speaker.phase(Phase.PREPARE)  # from its answer on the GPUs' idle power is known, and they may be touched
        raw = json.loads(Path(spec_path).read_text(encoding="utf-8"))
        speaker.finished(prepare(PrepareSpec(**raw)).model_dump())
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
