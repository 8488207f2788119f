"""Folders of pretrained models: whole ones are loaded, and those that would train from random
numbers are refused.
"""

import importlib.util
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from commands import refusal, within
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from carbonopt.core.errors import BadInput
from carbonopt.spec.space_settings import Space
from carbonopt.spec.workload_settings import Model
from carbonopt.study_file.model_questions import Answers
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.weight_files import check_weights as check_studies
from carbonopt.train import rewards
from carbonopt.train.models import weights
from carbonopt.train.models.model import model_config, parameter_count, with_lora
from carbonopt.train.models.model_kind import CAUSAL_LM, ModelKind
from carbonopt.train.prepare import PrepareSpec, _check_settings, prepare
from carbonopt.train.tasks.causal_lm import CausalLMWorkload
from carbonopt.train.tasks.classification import _IMAGE_KIND, _TEXT_KIND
from carbonopt.train.tasks.seq2seq import Seq2Seq
from carbonopt.train.tasks.task import task_for

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GPT2 = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=256)
LLAMA = LlamaConfig(
    **SMALL, num_key_value_heads=1, vocab_size=256
)  # whose output layer is a tensor of its own
TIED_LLAMA = LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True})
MIXTRAL = MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2, vocab_size=256)
BERT = BertConfig(**SMALL, vocab_size=256, max_position_embeddings=32)
VIT = ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1)
CLIP = CLIPConfig(
    text_config={**SMALL, "vocab_size": 256},
    vision_config={**SMALL, "image_size": 8, "patch_size": 4},
    projection_dim=8,
)
T5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=256)
WHISPER = WhisperConfig(
    d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=256, num_mel_bins=8, max_source_positions=16,
    max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
S2S = Seq2Seq.model_kind
SPEECH = ModelKind(
    "AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", None, "speech model"
)

Tensors = dict[str, torch.Tensor]


def saved(folder: Path, model: PreTrainedModel, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def check(folder: Path, kind: ModelKind = CAUSAL_LM) -> None:
    """As before a study's first trial."""
    weights.check_weights(kind, Model(name_or_path=str(folder)), AutoConfig.from_pretrained(folder))


def loaded(folder: Path, kind: ModelKind = CAUSAL_LM, seed: int = 0) -> PreTrainedModel:
    """As in a trial."""
    config = AutoConfig.from_pretrained(folder)
    return weights.pretrained_model(
        kind, Model(name_or_path=str(folder)), config, attention=None, seed=seed
    )


@pytest.mark.parametrize(
    ("model", "kind", "new"),
    [
        (lambda: GPT2LMHeadModel(GPT2), CAUSAL_LM, set()),
        (lambda: GPT2Model(GPT2), CAUSAL_LM, set()),  # its output layer is tied to the embedding
        (lambda: GPT2Model(GPT2), _TEXT_KIND, {"score"}),
        (lambda: LlamaForCausalLM(LLAMA), CAUSAL_LM, set()),
        (lambda: LlamaForCausalLM(LLAMA), _TEXT_KIND, {"score"}),
        (lambda: BertModel(BERT), _TEXT_KIND, {"classifier"}),
        (
            lambda: BertForMaskedLM(BERT),
            _TEXT_KIND,
            {"classifier", "bert"},
        ),  # BERT's pooler is not saved
        (lambda: BertForSequenceClassification(BERT), _TEXT_KIND, set()),
        (lambda: ViTModel(VIT), _IMAGE_KIND, {"classifier"}),
        (
            lambda: CLIPModel(CLIP),
            _IMAGE_KIND,
            {"classifier"},
        ),  # whose classifier has no base_model
        (lambda: T5ForConditionalGeneration(T5), S2S, set()),
        (lambda: WhisperForConditionalGeneration(WHISPER), SPEECH, set()),
    ],
)
def test_whole_folders_are_loaded_and_nothing_but_a_head_is_new(model, kind, new, tmp_path) -> None:
    model = model()
    folder = saved(tmp_path / "model", model)
    check(folder, kind)
    made, again = loaded(folder, kind), loaded(folder, kind, seed=1)
    own, others = made.state_dict(), again.state_dict()
    assert {
        name.partition(".")[0] for name in own if not torch.equal(own[name], others[name])
    } == new
    trained = {
        name.removeprefix(f"{model.base_model_prefix}."): tensor
        for name, tensor in model.state_dict().items()
    }
    shared = [name for name in own if name.removeprefix(f"{made.base_model_prefix}.") in trained]
    assert len(shared) >= 0.5 * len(own)
    for name in shared:
        assert torch.equal(own[name], trained[name.removeprefix(f"{made.base_model_prefix}.")])


def test_other_forms_of_saving_are_loaded(tmp_path) -> None:
    model = LlamaForCausalLM(LLAMA)
    sharded = saved(tmp_path / "sharded", model, max_shard_size=20_000)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    pickled = saved(tmp_path / "pickled", model)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    for folder in (sharded, pickled):
        check(folder)
        made = loaded(folder)
        assert all(
            torch.equal(own, made.state_dict()[name]) for name, own in model.state_dict().items()
        )
    adapted = with_lora(CAUSAL_LM, loaded(sharded), 2, inputs_need_gradients=False)
    assert (
        0
        < sum(part.requires_grad for part in adapted.parameters())
        < len(list(adapted.parameters()))
    )


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def renamed(tensors: Tensors) -> Tensors:
    return {f"other.{name}": tensor for name, tensor in tensors.items()}


def shorter(tensors: Tensors) -> Tensors:
    return {
        name: tensor[:99].clone() if "wte" in name else tensor for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("model", "kind", "change", "lost"),
    [
        (lambda: GPT2LMHeadModel(GPT2), CAUSAL_LM, without("h.1.attn"), 4),
        (lambda: GPT2LMHeadModel(GPT2), CAUSAL_LM, renamed, 29),
        (lambda: GPT2LMHeadModel(GPT2), CAUSAL_LM, shorter, "99 x 16, not 256 x 16"),
        (
            lambda: GPT2LMHeadModel(GPT2),
            CAUSAL_LM,
            without("wte"),
            2,
        ),  # the output layer is tied to it
        (lambda: LlamaForCausalLM(LLAMA), CAUSAL_LM, without("lm_head"), 1),
        (lambda: BertModel(BERT), _TEXT_KIND, without("layer.1.output"), 4),
        (lambda: BertModel(BERT), _TEXT_KIND, without("pooler"), 2),
        (lambda: BertModel(BERT), _TEXT_KIND, renamed, 39),
        (lambda: BertForSequenceClassification(BERT), _TEXT_KIND, without("classifier.bias"), 1),
        (lambda: CLIPModel(CLIP), _IMAGE_KIND, renamed, 39),
        (lambda: T5ForConditionalGeneration(T5), S2S, without("decoder.block.0.layer.1"), 5),
    ],
)
def test_missing_and_other_tensors_are_refused(model, kind, change, lost, tmp_path) -> None:
    folder = saved(tmp_path / "model", model())
    check(folder, kind)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    for refuses in (check, loaded):  # a trial refuses, too
        with pytest.raises(BadInput, match=f"lack {lost}: " if isinstance(lost, int) else lost):
            refuses(folder, kind)


@pytest.mark.parametrize("field", [{"n_layer": 3}, {"vocab_size": 300}, {"n_embd": 8}])
def test_another_configuration_is_refused(field, tmp_path) -> None:
    folder = saved(tmp_path / "model", GPT2LMHeadModel(GPT2))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | field))
    with pytest.raises(BadInput, match=r"config\.json"):
        check(folder)


def test_tensors_of_the_folder_that_the_model_leaves_unused_are_named(tmp_path) -> None:
    folder = saved(tmp_path / "model", GPT2LMHeadModel(GPT2))
    given = Model(name_or_path=str(folder))

    def said(**changes: object) -> str | None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return weights.check_weights(CAUSAL_LM, given, AutoConfig.from_pretrained(folder))

    assert said() is None
    lacking = said(n_layer=1)
    assert lacking is not None and str(folder) in lacking
    assert re.findall(r"transformer\.h\.(\d)", lacking) == ["1", "1", "1"]  # it names three


def stored_as(dtype: torch.dtype, part: str) -> Callable[[Tensors], Tensors]:
    small = torch.tensor(0, dtype=dtype).element_size() == 1

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor * 100).to(torch.int8).view(dtype) if small else tensor.to(dtype)

    return lambda tensors: {
        name: cast(tensor) if part in name else tensor for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.int8, "int8"),
        (torch.uint8, "uint8"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.int32, "int32"),
        (torch.bool, "bool"),
    ],
)
@pytest.mark.parametrize("form", ["safetensors", "sharded", "pickle"])
def test_quantized_numbers_without_a_quantization_config_are_refused(
    dtype, said, form, tmp_path
) -> None:
    sizes = {"max_shard_size": 20_000} if form == "sharded" else {}
    folder = saved(tmp_path / "model", LlamaForCausalLM(LLAMA), **sizes)
    for file in folder.glob("*.safetensors"):
        tensors = stored_as(dtype, "layers.1.mlp.up_proj")(load_file(file))
        save_file(tensors, file, metadata={"format": "pt"})
    if form == "pickle":
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=rf"1 tensor.*layers\.1\.mlp\.up_proj\.weight \({said}\)"):
        check(folder)


@pytest.mark.parametrize(
    ("model", "kind", "part"),
    [
        # a base model's folder has no prefix, and a task's model has one
        (lambda: BertModel(BERT), _TEXT_KIND, "layer.0.output.dense.weight"),
        (lambda: GPT2LMHeadModel(GPT2), CAUSAL_LM, "wte"),
        (lambda: MixtralForCausalLM(MIXTRAL), CAUSAL_LM, "experts.1.w1"),
    ],
)
def test_quantized_numbers_are_refused_whatever_the_tensors_are_called(
    model, kind, part, tmp_path
) -> None:
    folder = saved(tmp_path / "model", model())
    check(folder, kind)
    file = folder / "model.safetensors"
    save_file(stored_as(torch.int8, part)(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=rf"{part}.*int8"):
        check(folder, kind)


def test_a_quantization_that_transformers_does_not_know_changes_nothing(tmp_path) -> None:
    folder = saved(tmp_path / "model", GPT2LMHeadModel(GPT2))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "own"}
    (folder / "config.json").write_text(json.dumps(config))
    check(folder)
    file = folder / "model.safetensors"
    save_file(stored_as(torch.int8, "wte")(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"wte\.weight \(int8\)"):
        check(folder)


def test_whole_numbers_that_are_no_weights_are_accepted(tmp_path) -> None:
    folder = saved(tmp_path / "model", GPT2LMHeadModel(GPT2))
    file = folder / "model.safetensors"
    mask = torch.tril(torch.ones(32, 32, dtype=torch.uint8))
    more = {
        "transformer.h.0.attn.bias": mask.view(1, 1, 32, 32),  # as old files of GPT-2 have it
        "steps.weight": torch.tensor(3),  # left unused
    }
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    check(folder)
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    images = saved(tmp_path / "images", ResNetForImageClassification(config))
    stored = load_file(images / "model.safetensors")
    assert any(tensor.dtype == torch.int64 for tensor in stored.values())  # batches tracked
    check(images, _IMAGE_KIND)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        check(saved(tmp_path / str(dtype), LlamaForCausalLM(LLAMA).to(dtype)))


@pytest.mark.parametrize(
    ("model", "kind", "tensor"),
    [
        (lambda: GPT2LMHeadModel(GPT2), CAUSAL_LM, "lm_head.weight"),
        (lambda: T5ForConditionalGeneration(T5), S2S, "decoder.embed_tokens.weight"),
        (lambda: LlamaForCausalLM(TIED_LLAMA), CAUSAL_LM, "lm_head.weight"),
    ],
)
def test_tied_tensors_must_be_stored_with_the_same_numbers(model, kind, tensor, tmp_path) -> None:
    made = model()
    folder = saved(tmp_path / "model", made)
    file = folder / "model.safetensors"
    tensors, own = load_file(file), made.state_dict()[tensor].clone()
    save_file({**tensors, tensor: own}, file, metadata={"format": "pt"})
    check(folder, kind)  # stored twice
    save_file({**tensors, tensor: own + 1}, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=rf"{tensor} and .*tie_word_embeddings"):
        check(folder, kind)


def test_an_output_layer_of_its_own_is_counted_where_the_configuration_says_so(tmp_path) -> None:
    folder = saved(tmp_path / "model", LlamaForCausalLM(TIED_LLAMA))
    file = folder / "model.safetensors"
    head = {"lm_head.weight": torch.rand(256, 16)}
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    check(folder)
    made = loaded(folder)
    trained = sum(parameter.numel() for parameter in made.parameters())
    assert trained == parameter_count(CAUSAL_LM, made.config, trust_remote_code=False)
    assert torch.equal(made.state_dict()["lm_head.weight"], head["lm_head.weight"])


class Touches:
    """Pickled, it writes a file wherever it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_files_that_are_no_weights_are_refused(tmp_path) -> None:
    whole = saved(tmp_path / "whole", LlamaForCausalLM(LLAMA), max_shard_size=20_000)
    second = sorted(whole.glob("*.safetensors"))[1].name
    one = saved(tmp_path / "one", LlamaForCausalLM(LLAMA))
    size = (one / "model.safetensors").stat().st_size

    def refused(of: Path, file: str, content: bytes | None, named: str) -> None:
        folder = shutil.copytree(of, tmp_path / "changed")
        (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
        with pytest.raises(BadInput, match=named):
            check(folder)
        shutil.rmtree(folder)

    whole_file = (one / "model.safetensors").read_bytes()
    refused(one, "model.safetensors", None, "no file named model.safetensors")
    for kept in (0, 50, size - 100):
        refused(
            one, "model.safetensors", whole_file[:kept], r"changed/model\.safetensors can't be read"
        )
    refused(whole, second, None, f"{second}.*copy or save it again")
    refused(whole, second, (whole / second).read_bytes()[:-9], f"{second} can't be read")
    (one / "model.safetensors").unlink()
    refused(one, "training_args.bin", b"no weights", "no file named model.safetensors")
    refused(one, "pytorch_model.bin", b"", r"pytorch_model\.bin can't be read")
    torch.save({"weights": Touches(tmp_path / "touched")}, one / "pytorch_model.bin")
    with pytest.raises(
        BadInput, match=r"pytorch_model\.bin can't be read .*could run a program"
    ) as pickled:
        check(one)
    assert "weights_only" not in str(pickled.value)
    assert not (tmp_path / "touched").exists()


def spoilt(model: PreTrainedModel, tensor: str, value: float) -> PreTrainedModel:
    """Write this value into one number of a tensor."""
    model.state_dict()[tensor].view(-1)[-1] = value
    return model


def check_values(folder: Path, kind: ModelKind = CAUSAL_LM) -> None:
    """As before a study's first trial."""
    weights.check_values(kind, Model(name_or_path=str(folder)), AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_finite_numbers_are_refused(value, dtype, tmp_path) -> None:
    good = saved(tmp_path / "good", LlamaForCausalLM(LLAMA).to(dtype), max_shard_size=20_000)
    check_values(good)
    tensor = "model.layers.1.mlp.down_proj.weight"
    model = spoilt(LlamaForCausalLM(LLAMA), tensor, value).to(dtype)
    with pytest.raises(BadInput, match=rf"in 1 tensor: {tensor};"):
        check_values(saved(tmp_path / "bad", model, max_shard_size=20_000))


def test_values_are_looked_at_in_pickles_heads_and_running_statistics(tmp_path) -> None:
    folder = saved(tmp_path / "pickle", GPT2LMHeadModel(GPT2))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    check_values(folder)
    tensors["transformer.wte.weight"][0, 0] = math.nan
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"1 tensor: transformer\.wte\.weight"):
        check_values(folder)

    folder = saved(
        tmp_path / "head", spoilt(BertForSequenceClassification(BERT), "classifier.bias", math.nan)
    )
    with pytest.raises(BadInput, match=r"1 tensor: classifier\.bias"):
        check_values(folder, _TEXT_KIND)

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    resnet = ResNetForImageClassification(config)
    check_values(saved(tmp_path / "images", resnet), _IMAGE_KIND)
    running = "resnet.embedder.embedder.normalization.running_var"
    with pytest.raises(BadInput, match=rf"1 tensor: {running}"):
        check_values(saved(tmp_path / "images", spoilt(resnet, running, math.nan)), _IMAGE_KIND)


def test_values_that_the_model_does_not_read_may_be_anything(tmp_path) -> None:
    folder = saved(tmp_path / "model", GPT2LMHeadModel(GPT2))
    tensors = load_file(folder / "model.safetensors")
    # an old file's causal mask, and a head of another task
    more = {
        "transformer.h.0.attn.masked_bias": torch.tensor(-math.inf),
        "score.weight": torch.full((2, 16), math.nan),
        "steps": torch.tensor(3),
        "none": torch.zeros(0),
    }
    save_file({**tensors, **more}, folder / "model.safetensors", {"format": "pt"})
    check_values(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"no weights")
    check_values(folder)
    tensors["transformer.ln_f.bias"][0] = math.inf
    save_file({**tensors, **more}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"1 tensor: transformer\.ln_f\.bias"):
        check_values(folder)


def test_a_reward_model_may_have_no_new_head(tmp_path) -> None:
    folder = saved(tmp_path / "base", BertModel(BertConfig(**{**BERT.to_dict(), "num_labels": 1})))
    check(folder, _TEXT_KIND)
    with pytest.raises(BadInput, match=r"workload\.reward\.model: .* lack 2: classifier"):
        rewards.check_weights(str(folder), "reward")
    rewards.check_weights(
        str(saved(tmp_path / "whole", BertForSequenceClassification(BERT))), "reward"
    )


def check_workload(folder: Path) -> None:
    """As before the tokenizer is read."""
    workload = {
        "task": "causal_lm",
        "model": {"name_or_path": str(folder)},
        "dataset": {"builtin": "python-docs"},
        "sequence_length": 8,
    }
    space = Space.model_validate({"global_batch_size": 4, "learning_rate": 1e-3, "epochs": 1})
    _check_settings(task_for(workload), space)
    assert task_for(workload).check_weights(["model"]) is None


@pytest.mark.parametrize("beside_its_model", [True, False])
def test_an_adapter_is_refused(beside_its_model, tmp_path) -> None:
    folder = saved(tmp_path / "model", LlamaForCausalLM(LLAMA))
    check_workload(folder)
    adapted = with_lora(CAUSAL_LM, loaded(folder), 2, inputs_need_gradients=False)
    adapted.save_pretrained(folder if beside_its_model else tmp_path / "adapter")
    given = folder if beside_its_model else tmp_path / "adapter"
    with pytest.raises(BadInput, match=r"adapter_config\.json; merge"):
        check_workload(given)
    with pytest.raises(BadInput, match=r"workload\.reward\.model .*adapter_config\.json"):
        rewards.check_weights(str(given), "reward")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    check_workload(tmp_path / "merged")


@pytest.mark.parametrize("change", [
    {"torch_dtype": "auto"}, {"dtype": "auto"}, {"dtype": "fp16"}, {"text_config": {"torch_dtype": "auto"}},
])  # fmt: skip
def test_a_type_that_torch_lacks_is_refused_by_its_name(change, tmp_path) -> None:
    folder = saved(tmp_path / "model", LlamaForCausalLM(LLAMA))
    config = json.loads((folder / "config.json").read_text())
    for known in ("float32", "bfloat16", "half", None):
        (folder / "config.json").write_text(json.dumps({**config, "dtype": known}))
        check_workload(folder)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BadInput, match=r"config\.json: (text_config\.)?(torch_)?dtype must be"):
        check_workload(folder)


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("model-q4.gguf", "llama"),
        ("consolidated.00.pth", "torch.save"),
        ("tf_model.h5", "Tensor"),
        ("consolidated.safetensors", "not named"),
    ],
)
def test_weights_in_another_format_are_named(file, form, tmp_path) -> None:
    folder = saved(tmp_path / "model", LlamaForCausalLM(LLAMA))
    (folder / file).write_bytes(b"weights")
    check(folder)  # beside the right ones
    (folder / "model.safetensors").rename(folder / file)
    with pytest.raises(BadInput, match=rf"safetensors, but .*{file} \(.*{form}"):
        check(folder)
    with pytest.raises(BadInput, match=rf"name_or_path must be .*{file} is a file"):
        check_workload(folder / file)


@pytest.mark.parametrize(
    ("quantization", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
    ],
)
def test_quantized_weights_that_need_a_package_name_it(quantization, package, tmp_path) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    folder = saved(tmp_path / "model", LlamaForCausalLM(LLAMA))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"{package}.*before it was quantized") as refused:
        check(folder)
    assert "copy or save" not in str(refused.value)


@pytest.mark.parametrize("field", ["num_attention_heads", "num_hidden_layers"])
def test_a_size_of_zero_in_a_folder_is_refused_by_its_name(field, tmp_path) -> None:
    folder = saved(tmp_path / "model", LlamaForCausalLM(LLAMA))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: 0}))
    workload = CausalLMWorkload.model_validate(
        {
            "model": {"name_or_path": str(folder)},
            "dataset": {"builtin": "python-docs"},
            "sequence_length": 8,
        }
    )
    with pytest.raises(BadInput, match=rf"{field} must be at least 1, but got 0\."):
        model_config(CAUSAL_LM, workload, None)


@pytest.fixture
def damaged_study(tiny_study: dict, tmp_path: Path) -> dict:
    folder = saved(tmp_path / "model", GPT2LMHeadModel(GPT2))
    tensors = load_file(folder / "model.safetensors")
    save_file(without("h.1.attn")(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    tiny_study["workload"] |= {"model": {"name_or_path": str(folder)}, "sequence_length": 32}
    return tiny_study


@pytest.mark.slow
def test_check_refuses_before_it_says_anything(damaged_study, write_study) -> None:
    assert "lack 4: transformer.h.1.attn" in refusal("check", write_study(damaged_study))


def check_preparation(study: dict, said: str, tmp_path: Path) -> None:
    config = parse_study(study, "test")
    assert config.workload is not None
    spec = PrepareSpec(
        workload=config.workload.model_dump(mode="json"),
        space=config.search.space,
        prepared_dir=str(tmp_path / "prepared"),
        fingerprint="f",
    )
    with pytest.raises(BadInput, match=said):
        prepare(spec)
    assert not (tmp_path / "prepared").exists()


def test_the_preparation_refuses(damaged_study, tmp_path) -> None:
    check_preparation(damaged_study, "lack 4", tmp_path)


def test_the_preparation_refuses_values(damaged_study, tmp_path) -> None:
    bad = spoilt(GPT2LMHeadModel(GPT2), "transformer.ln_f.weight", math.nan)
    saved(Path(damaged_study["workload"]["model"]["name_or_path"]), bad)
    check_preparation(damaged_study, r"1 tensor: transformer\.ln_f\.weight", tmp_path)


def test_a_model_that_a_step_before_hands_on_is_not_looked_at(damaged_study) -> None:
    with Answers() as answers:
        check_studies([(parse_study(damaged_study, "test"), {"model"})], answers)


@pytest.mark.slow
def test_run_refuses_before_the_first_trial(damaged_study, tmp_path) -> None:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(damaged_study))
    done = within("run", tmp_path / "study.yaml", "--out", tmp_path / "out")
    assert done.returncode == 2 and "lack 4" in done.stderr
    assert not list((tmp_path / "out").glob("trials/*"))
