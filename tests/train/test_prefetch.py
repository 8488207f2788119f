"""A random model that is drawn before its trial is known: the trial is the same as if it had drawn
it.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, set_seed

from carbonopt.core.channel import FINGERPRINT
from carbonopt.core.dimensions import TrialParams
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.trial_spec import Prepared, TrialSpec
from carbonopt.train import forked_rank
from carbonopt.train.models import model as models
from carbonopt.train.tasks.causal_lm import CausalLM

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "vocab_size": 384}

KIND = CausalLM.model_kind
SUMMARY = Prepared(
    fingerprint="f", train_examples=1, eval_examples=1, train_tokens=9, eval_tokens=9, sequence_length=8,
    vocab_size=384, model_parameters=130_000, versions={},
)  # fmt: skip


@pytest.fixture
def prepared(tmp_path: Path):
    folder = PreparedFolder(tmp_path)
    GPT2Config(**SIZES).save_pretrained(folder.model_config)
    yield folder
    models._prefetched = None


def spec_of(prepared: PreparedFolder, seed: int, attention: str | None = None) -> TrialSpec:
    params = TrialParams(
        global_batch_size=8,
        micro_batch_size_per_gpu=8,
        learning_rate=1e-3,
        epochs=1,
        attention_implementation=attention,
    )
    folder = str(prepared.root)
    return TrialSpec(
        number=0,
        attempt=1,
        seed=seed,
        params=params,
        workload={},
        prepared_dir=folder,
        trial_dir=folder,
    )


def state(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights, and what the generators give next."""
    drawn = torch.tensor([random.random(), np.random.rand()])
    return [*(parameter.detach() for parameter in model.parameters()), drawn, torch.rand(3)]


def test_it_is_the_model_that_the_trial_would_draw_and_so_is_all_that_follows(
    prepared: PreparedFolder,
) -> None:
    set_seed(7)
    expected = state(
        models.random_model(KIND, GPT2Config(**SIZES), attention=None, trust_remote_code=False)
    )
    models.prefetch_model(KIND, prepared, SUMMARY, 7)
    random.random(), np.random.rand(), torch.rand(5)  # whatever the process does until it is told
    set_seed(7)
    model = models.take_prefetched_model(spec_of(prepared, 7))
    assert model is not None and model.training
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(state(model), expected, strict=True)
    )


@pytest.mark.parametrize("other", ["seed", "folder", "attention"])
def test_another_trial_draws_its_own(other: str, prepared: PreparedFolder) -> None:
    models.prefetch_model(KIND, prepared, SUMMARY, 7)
    spec = spec_of(
        PreparedFolder(prepared.root / "other") if other == "folder" else prepared,
        8 if other == "seed" else 7,
        "eager" if other == "attention" else None,
    )
    before = torch.get_rng_state()
    assert models.take_prefetched_model(spec) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_given_once_for_it_will_be_trained(prepared: PreparedFolder) -> None:
    models.prefetch_model(KIND, prepared, SUMMARY, 7)
    assert models.take_prefetched_model(spec_of(prepared, 7)) is not None
    assert models.take_prefetched_model(spec_of(prepared, 7)) is None


def test_one_that_would_fill_the_memory_is_not_drawn(
    prepared: PreparedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_MOST_PREFETCHED", 100_000)
    models.prefetch_model(KIND, prepared, SUMMARY, 7)
    assert models.take_prefetched_model(spec_of(prepared, 7)) is None


def test_a_process_waits_for_its_data_and_no_longer_than_for_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PreparedFolder(tmp_path)
    monkeypatch.setenv(FINGERPRINT, "f")
    gate, opens = os.pipe()
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(forked_rank._prepared, folder, gate)
        folder.summary.write_text(
            SUMMARY.model_copy(update={"fingerprint": "of another workload"}).model_dump_json()
        )
        with pytest.raises(TimeoutError):
            waits.result(timeout=0.5)
        folder.summary.write_text(SUMMARY.model_dump_json())
        assert waits.result(timeout=10) == SUMMARY
        folder.summary.unlink()
        waits = other.submit(forked_rank._prepared, folder, gate)
        os.close(opens)
        assert waits.result(timeout=10) is None
    os.close(gate)


def test_code_from_elsewhere_is_left_to_the_trial(prepared: PreparedFolder) -> None:
    config = GPT2Config(**SIZES, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    config.save_pretrained(prepared.model_config)
    models.prefetch_model(KIND, prepared, SUMMARY, 7)
    assert models.take_prefetched_model(spec_of(prepared, 7)) is None
