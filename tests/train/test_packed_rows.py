"""Packed rows: what is in them, and that no example reads another."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from carbonopt.core.errors import BadInput
from carbonopt.train.data.chat import Marked
from carbonopt.train.data.packing import IGNORED
from carbonopt.train.data.responses import Responses, pack, save_responses
from carbonopt.train.models.model import random_model
from carbonopt.train.models.model_check import cut_down
from carbonopt.train.models.packing_check import check_packing
from carbonopt.train.models.varlen_attention import _mask, sequence_ends
from carbonopt.train.tasks.sft import SFT, SFTWorkload
from carbonopt.train.token_loss import token_nll

LENGTH, VOCABULARY = 24, 50
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
}
GATED = {"num_key_value_heads": 1, "intermediate_size": 48}
SPECIAL = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
CONFIGS = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.5},
    "llama": {**GATED, "initializer_range": 0.5},
    "qwen2": {**GATED, "initializer_range": 0.5},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "initializer_range": 0.5,
    },
    "mistral": {**GATED, "sliding_window": 4, "initializer_range": 0.5},
}
LEAKING = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {},
    "mamba": {},
}
WORKLOAD = SFTWorkload.model_validate(
    {
        "task": "sft",
        "model": {"name_or_path": "of-the-test"},
        "dataset": {"builtin": "python-docs"},
        "sequence_length": LENGTH,
        "packing": True,
    }
)


def config_of(model_type: str):
    return AutoConfig.for_model(
        model_type, **SHAPE, **SPECIAL, **{**CONFIGS, **LEAKING}[model_type]
    )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_every_example_is_in_one_row_and_no_row_is_too_long(lengths):
    rows = pack(lengths, 20)
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[example] for example in row) for row in rows)
    assert filled[-1] <= 20
    assert len(filled) < 2 or filled[0] + filled[1] > 20, "no two rows could be one"


def test_the_longest_come_first_each_into_the_fullest_row_with_room():
    assert pack([3, 7, 5, 4, 1], 10) == [[1, 0], [2, 3, 4]]


@pytest.fixture(scope="module")
def examples() -> list[Marked]:
    """Of different lengths; the beginning of each, at least a token, is its prompt."""
    random = np.random.default_rng(0)
    marked = []
    for length in (3, 9, 14, 5, 6, 11, 21):
        in_response = np.arange(length) >= random.integers(1, length - 1)
        marked.append(Marked(random.integers(1, VOCABULARY, length), in_response))
    return marked


@pytest.fixture(scope="module")
def batches(examples, tmp_path_factory) -> dict[bool, dict[str, torch.Tensor]]:
    """All examples, a row each and packed."""
    folder = tmp_path_factory.mktemp("rows")
    made = {}
    for packed in (False, True):
        count = save_responses(folder / str(packed), examples, LENGTH if packed else None)
        rows = Responses(folder / str(packed), LENGTH)
        assert len(rows) == count == (3 if packed else len(examples))
        made[packed] = rows.batch(np.arange(count))
        assert rows.weights.tolist() == (made[packed]["targets"] != IGNORED).sum(1).tolist()
    return made


def test_packed_rows_have_all_targets_and_positions_begin_anew(examples, batches):
    packed, alone = batches[True], batches[False]
    assert packed["input_ids"].shape == packed["position_ids"].shape == (3, LENGTH)
    begins = (packed["position_ids"] == 0).sum()
    fillers = 3 * LENGTH - sum(len(example.tokens) - 1 for example in examples)
    assert begins == len(examples) + fillers
    targets = [
        batch["targets"][batch["targets"] != IGNORED].sort().values.tolist()
        for batch in (packed, alone)
    ]
    assert targets[0] == targets[1]
    assert len(targets[0]) == sum(example.in_response[1:].sum() for example in examples)


ATTENTIONS = {
    **dict.fromkeys(CONFIGS, ("sdpa", "eager", "varlen")),
    "gpt_neo": ("eager",),
    "opt": ("varlen",),
}  # those a model type has and that keep its examples apart


@pytest.mark.parametrize(
    ("model_type", "attention"), [(of, name) for of in ATTENTIONS for name in ATTENTIONS[of]]
)
def test_the_loss_of_packed_examples_is_theirs_and_no_gradient_crosses(
    model_type, attention, batches
):
    config = config_of(model_type)
    check_packing(SFT.model_kind, config, attention, False)
    torch.manual_seed(0)
    model = random_model(SFT.model_kind, config, attention, False).train()
    task = SFT(WORKLOAD)
    task.begin(model, compiled=False)
    losses = {packed: task.loss_sum(model, batch).item() for packed, batch in batches.items()}
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)

    batch = batches[True]
    arguments, _ = task._divided(batch)
    embeddings = model.get_input_embeddings()(arguments.pop("input_ids")).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, **arguments).logits
    example = (batch["position_ids"] == 0).cumsum(1)
    for row in range(len(example)):
        for own in example[row].unique():
            of_own = torch.where(example[row] == own, batch["targets"][row], IGNORED)
            if (of_own == IGNORED).all():
                continue
            nll = token_nll(logits[row : row + 1], of_own[None], "sum")
            (gradient,) = torch.autograd.grad(nll, embeddings, retain_graph=True)
            inside = torch.zeros_like(example, dtype=torch.bool)
            inside[row] = example[row] == own
            assert gradient[inside].any() and not gradient[~inside].any()


@pytest.mark.parametrize("model_type", LEAKING)
def test_a_model_that_lets_examples_read_each_other_is_refused(model_type):
    with pytest.raises(
        BadInput, match=f"packing: {model_type} lets an example read those before it"
    ):
        check_packing(SFT.model_kind, config_of(model_type), None, False)


FOUR = {**SHAPE, **SPECIAL, **GATED, "num_hidden_layers": 4}
LAST_READS_ON = {
    "lfm2": {"layer_types": ["full_attention"] * 3 + ["conv"]},
    "qwen3_next": {"head_dim": 16, "layer_types": ["full_attention"] * 3 + ["linear_attention"]},
    "bamba": {"attn_layer_indices": [0, 1, 2], "mamba_n_heads": 4, "mamba_d_head": 16,
              "mamba_n_groups": 1},
    "recurrent_gemma": {"block_types": ["attention"] * 2 + ["recurrent"]},
    "minimax": {"num_local_experts": 2,
                "layer_types": ["full_attention"] * 3 + ["linear_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("model_type", LAST_READS_ON)
def test_a_later_layer_of_another_kind_is_checked_too(model_type):
    config = AutoConfig.for_model(model_type, **FOUR, **LAST_READS_ON[model_type])
    with pytest.raises(BadInput, match=f"packing: {model_type} lets an example read"):
        check_packing(SFT.model_kind, config, None, False)


def test_layers_of_each_kind_are_counted_and_equal_ones_are_not():
    for model_type, fields, layers in (
        ("llama", {}, [2]),
        ("lfm2", LAST_READS_ON["lfm2"], [2, 4]),
        (
            "gemma3_text",
            {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
            [2, 3],
        ),
    ):
        config = AutoConfig.for_model(model_type, **FOUR, **fields)
        cuts = list(cut_down(SFT.model_kind, config, False))
        assert [cut.num_hidden_layers for cut in cuts] == layers


def test_varlen_is_refused_where_it_would_compute_something_else():
    dropout = AutoConfig.for_model("gpt2", **SHAPE, **SPECIAL)  # GPT-2's own dropout is 0.1
    with pytest.raises(BadInput, match=r"attention dropout of 0\.1"):
        check_packing(SFT.model_kind, dropout, "varlen", False)
    capped = AutoConfig.for_model("gemma2", **SHAPE, **SPECIAL, **GATED, head_dim=16)
    with pytest.raises(BadInput, match="softcap"):
        check_packing(SFT.model_kind, capped, "varlen", False)
    for model_type in ("bloom", "mamba"):
        with pytest.raises(BadInput):
            check_packing(SFT.model_kind, config_of(model_type), "varlen", False)


@given(st.data(), st.integers(1, 4), st.integers(1, 12), st.none() | st.integers(1, 12))
def test_a_query_reads_its_own_example_up_to_itself(data, batch, length, window):
    starts = [sorted(data.draw(st.sets(st.integers(1, length), max_size=4))) for _ in range(batch)]
    most = 1 + max(map(len, starts))
    filled = torch.tensor([[0, *row, *[length] * (most - 1 - len(row))] for row in starts])
    ends = sequence_ends(filled.int(), length)
    assert (ends.diff() >= 0).all() and ends[0] == 0 and ends[-1] == batch * length
    mask = _mask(ends, batch, length, window)
    for row, begins in enumerate(starts):
        example = [sum(begin <= place for begin in begins) for place in range(length)]
        for query in range(length):
            for key in range(length):
                near = window is None or query - key < window
                reads = example[query] == example[key] and key <= query and near
                assert mask[row, 0, query, key] == reads


def test_what_can_not_be_told_is_refused():
    for attention, said in (
        ("flash_attention_2", "one row alone"),
        ("flex_attention", "can't be told"),
    ):
        with pytest.raises(BadInput, match=said):
            check_packing(SFT.model_kind, config_of("gpt2"), attention, False)
