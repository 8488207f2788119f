"""How an estimate of memory is divided among processes, and that they estimate what one does."""

import os
import signal
from typing import Any

import pytest
from memory_specs import memory_spec

from carbonopt.core.errors import BadInput
from carbonopt.spec.model_memory import MemoryAnswer, Moment
from carbonopt.train.models import memory_probe
from carbonopt.train.models.memory_probe import expected_memory
from carbonopt.train.models.memory_shares import Passes, Share, divided

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 9,
    "num_attention_heads": 2,
    "vocab_size": 512,
}
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}


def compiles(settings: dict[str, Any]) -> bool:
    return bool(settings["torch_compile"])


def works(parts: list[list[Share]]) -> list[set[tuple[Any, ...]]]:
    """Return what each process does: settings, without the output layer, the kind and the size."""
    return [
        {
            (share.settings["torch_compile"], share.settings["lora_rank"], kind, size)
            for share in part
            for kind, sizes in (("training", share.sizes), ("evaluation", share.eval_sizes))
            for size in sizes
        }
        for part in parts
    ]


def test_all_is_done_once_and_no_trace_is_made_twice() -> None:
    whole = [
        Share({"torch_compile": compiled, "lora_rank": rank, "output_layer": layer}, (4, 16), (8,))
        for compiled in (False, True)
        for rank in (8, 16)
        for layer in ("standard", "fused")
    ]
    for processes in (1, 2, 3, 16):
        parts = divided(whole, processes, compiles)
        assert len(parts) == min(processes, 12)
        done = [
            (*share.settings.values(), kind, size)
            for part in parts
            for share in part
            for kind, sizes in (("training", share.sizes), ("evaluation", share.eval_sizes))
            for size in sizes
        ]
        assert len(done) == len(set(done)) == len(whole) * 3
        traces = works(parts)
        assert sum(map(len, traces)) == len(set().union(*traces)) == 12


def test_two_processes_share_the_compiled_passes_of_a_single_combination() -> None:
    settings = {"torch_compile": True, "lora_rank": 8, "output_layer": None}
    llama = divided([Share(settings, (4, 16), (8,))], 2, compiles)
    assert works(llama)[0] ^ works(llama)[1] == works(llama)[0] | works(llama)[1]
    assert all(any(kind == "training" for *_, kind, _ in work) for work in works(llama))
    t5 = divided([Share(settings, (16,), (16,))], 2, compiles)
    assert [[(share.sizes, share.eval_sizes) for share in part] for part in t5] == [
        [((16,), ())],
        [((), (16,))],
    ]
    assert divided([], 2, compiles) == []


def test_joined_passes_have_the_activations_of_each_micro_batch() -> None:
    moment = Moment(activation_bytes=5, gradient_elements=0)
    training, evaluation = Passes(7, {4: (moment,)}, {}), Passes(7, {}, {8: 3})
    (found,) = evaluation.joined(training).activations({4: 8})
    assert (found.micro_batch_size, found.moments, found.evaluation_bytes) == (4, (moment,), 3)


PLAIN = memory_spec("causal_lm", LLAMA, gradient_checkpointing={"choices": [False, True]})


def test_forks_estimate_what_one_process_does() -> None:
    assert expected_memory(PLAIN, 2) == expected_memory(PLAIN, 3) == expected_memory(PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model"), [("causal_lm", LLAMA), ("seq2seq", T5)], ids=("llama", "t5")
)
def test_forks_estimate_compiled_settings_as_one_process_does(
    task: str, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_probe, "MOST_CPU_S", 600.0)
    spec = memory_spec(
        task, model, lora_rank={"choices": [4, 8]}, torch_compile={"choices": [False, True]}
    )
    divided_up = expected_memory(spec, 3)
    assert len(divided_up.profiles) == 4
    assert divided_up == expected_memory(spec)


def test_a_forks_reason_for_no_estimate_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_probe, "processes", lambda: 2)
    monkeypatch.setattr(memory_probe, "MOST_CPU_S", 0.0)
    with pytest.raises(BadInput, match="0 s of CPU time"):
        expected_memory(PLAIN, 2)

    parent = os.getpid()

    def killed(*_: Any) -> None:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(memory_probe, "MOST_CPU_S", 60.0)
    monkeypatch.setattr(memory_probe.Probe, "_needs_compiler", killed)
    answer = MemoryAnswer.model_validate_json(memory_probe.answer(PLAIN.model_dump_json()))
    assert answer.memory is None
    assert "-9" in str(answer.why_none)
