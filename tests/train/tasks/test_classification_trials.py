"""Real trials of small classifiers on the CPU: what must not change the quality, and that it is
what plain transformers computes on the saved model.
"""

import json
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
from commands import within
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertModel,
)
from trial_processes import Run, start

from carbonopt.core.channel import FINISHED_EXIT
from carbonopt.core.events import Failed
from carbonopt.spec.prepared_folder import PreparedFolder

ROOT = Path(__file__).parents[3]
BERT = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "initializer_range": 0.1, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,  # or each division drops other activations
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 20, "initializer_range": 0.1,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "initializer_range": 0.1,
}  # fmt: skip
LENGTH = 20
WORDS = {
    "lights": "lamp bulb bright dim",
    "music": "song tune band loud",
    "weather": "rain sun wind cloud",
}


def spoken(count: int, seed: int) -> list[dict[str, str]]:
    """Texts of 1 to 9 words, of which some tell the class."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        label = list(WORDS)[number % len(WORDS)]
        told = draw.choices(WORDS[label].split(), k=draw.randint(1, 3))
        words = [
            *told,
            *draw.choices(
                ["the", "a", "my", "please", "now", "room", "today"], k=draw.randint(0, 6)
            ),
        ]
        draw.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    return rows


class Prepared:
    """A workload, prepared, and its trials."""

    def __init__(self, folder: Path, workload: dict) -> None:
        self.workload, self.folder = (
            {"task": "classification", "evaluations": 2, **workload},
            folder,
        )
        self.trials = 0
        spec = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
        prepared = {"prepared_dir": str(folder / "prepared"), "fingerprint": "f"}
        run = start("prepare", {"workload": self.workload, "space": spec, **prepared}, folder)
        assert run.exit_code == FINISHED_EXIT, [
            event.text for event in run.events if isinstance(event, Failed)
        ]

    def trial(self, seed: int = 0, save: bool = False, **params) -> Run:
        self.trials += 1
        folder = self.folder / f"trial {self.trials}"
        params = {
            "global_batch_size": 8, "micro_batch_size_per_gpu": 8, "learning_rate": 3e-3, "epochs": 3, **params
        }  # fmt: skip
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": self.workload,
            "prepared_dir": str(self.folder / "prepared"), "trial_dir": str(folder),
            "saves_model": save,
        }  # fmt: skip
        run = start("rank_main", spec, folder, params.get("world_size", 1))
        assert run.exit_code == FINISHED_EXIT, run.events[-1]
        return run


def of_texts(folder: Path, model: dict, tokenizer: dict | None, **dataset) -> dict:
    files = {}
    for part, rows in (("train", spoken(90, 0)), ("eval", spoken(37, 1))):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[f"{part}_files"] = [str(folder / f"{part}.jsonl")]
    own = {} if tokenizer is None else {"tokenizer": tokenizer}
    return {"model": model, **own, "dataset": {**files, **dataset}, "sequence_length": LENGTH}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("encoder")
    return Prepared(folder, of_texts(folder, {"from_config": BERT}, {"train_bpe": 300}))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("decoder")
    return Prepared(folder, of_texts(folder, {"from_config": GPT2}, {"kind": "char"}))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Prepared:
    dataset = {"builtin": "digits", "eval_fraction": 0.9}  # 181 to learn from
    return Prepared(
        tmp_path_factory.mktemp("images"), {"model": {"from_config": VIT}, "dataset": dataset}
    )


def texts_by_plain_transformers(folder: Path) -> tuple[list[str], list[str]]:
    """Labels and predictions: one text at a time, and so without any padding."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    rows, predicted = spoken(37, 1), []
    for row in rows:
        tokens = tokenizer(row["text"], truncation=True, max_length=LENGTH, return_tensors="pt")
        with torch.no_grad():
            predicted.append(
                model.config.id2label[
                    int(model.eval()(input_ids=tokens["input_ids"]).logits.argmax())
                ]
            )
    return [row["label"] for row in rows], predicted


def images_by_plain_transformers(folder: Path) -> tuple[list[str], list[str]]:
    """The last nine tenths of each digit's images, as the saved processor makes them."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    images, digits = load_digits(return_X_y=True)
    labels, predicted = [], []
    for digit in range(10):
        own = images[digits == digit]
        shown = [
            Image.fromarray((image.reshape(8, 8) * 255 / 16).round().astype("uint8"))
            for image in own
        ]
        shown = shown[len(own) - round(0.9 * len(own)) :]
        with torch.no_grad():
            places = (
                model(**processor(images=shown, return_tensors="pt")).logits.argmax(-1).tolist()
            )
        labels += [str(digit)] * len(shown)
        predicted += [model.config.id2label[place] for place in places]
    return labels, predicted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "decoder", "images"])
def test_how_a_step_is_computed_changes_no_quality(name, request):
    """37 texts are an odd number for two ranks and for batches of 8."""
    data: Prepared = request.getfixturevalue(name)
    reference = data.trial()
    whole = data.trial(zero_stage=3, world_size=2, micro_batch_size_per_gpu=2, save=True)
    divisions = [
        whole,
        data.trial(zero_stage=0),  # a whole step
        data.trial(zero_stage=0, micro_batch_size_per_gpu=4),
        data.trial(zero_stage=2, micro_batch_size_per_gpu=4, world_size=2),
    ]
    for run in divisions:
        assert run.values == pytest.approx(reference.values, abs=1e-3)
        for point, expected in zip(run.points, reference.points, strict=True):
            assert point.other_qualities == pytest.approx(expected.other_qualities, abs=1e-3)
            assert point.count == expected.count

    by_transformers = (
        images_by_plain_transformers if name == "images" else texts_by_plain_transformers
    )
    labels, predicted = by_transformers(whole.folder / "model")
    assert len(set(predicted)) > 1, "it has learned something"
    last = whole.points[-1]
    assert (last.count, last.sum) == (
        len(labels),
        sum(a == b for a, b in zip(labels, predicted, strict=True)),
    )
    assert last.value == pytest.approx(accuracy_score(labels, predicted), abs=1e-12)
    assert last.other_qualities["macro_f1"] == pytest.approx(
        f1_score(labels, predicted, average="macro"), abs=1e-12
    )


@pytest.mark.slow
def test_the_seed_decides_all(encoder):
    first, again, other = (
        encoder.trial(epochs=1),
        encoder.trial(epochs=1),
        encoder.trial(epochs=1, seed=1),
    )
    assert first.points == again.points != other.points


@pytest.fixture(scope="module")
def headless(encoder, tmp_path_factory) -> Prepared:
    """Of a model without a head, whose head has two layers."""
    folder = tmp_path_factory.mktemp("headless")
    tokenizer = AutoTokenizer.from_pretrained(PreparedFolder(encoder.folder / "prepared").tokenizer)
    torch.manual_seed(5)
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "vocab_size": len(tokenizer)}
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    DistilBertModel(DistilBertConfig(**sizes, **dropout)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return Prepared(folder, of_texts(folder, {"name_or_path": str(folder / "base")}, None))


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Under the names that transformers has for them now: a file of ZeRO 3 can have old ones, which
    it reads.
    """
    return AutoModelForSequenceClassification.from_pretrained(run.folder / "model").state_dict()


def adapter_weights(run: Run) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run.folder / "model" / "adapter_model.safetensors")


@pytest.mark.slow
def test_a_new_head_is_the_seeds_whatever_the_zero_stage(headless):
    """A learning rate of nothing leaves the weights as they began."""
    tiny = {"learning_rate": 1e-12, "epochs": 0.1, "save": True}
    whole, parted = headless.trial(zero_stage=0, **tiny), headless.trial(zero_stage=3, **tiny)
    spread = headless.trial(zero_stage=3, world_size=2, micro_batch_size_per_gpu=4, **tiny)
    for name, expected in weights(whole).items():
        for run in (parted, spread):
            assert torch.allclose(weights(run)[name], expected, atol=1e-8), name
    other = weights(headless.trial(seed=1, zero_stage=2, **tiny))
    base = safetensors.torch.load_file(headless.folder / "base" / "model.safetensors")
    drawn = {
        name
        for name, expected in weights(whole).items()
        if not torch.allclose(other[name], expected, atol=1e-8)
    }
    assert drawn == {"pre_classifier.weight", "classifier.weight"}
    assert all(
        torch.allclose(other[f"distilbert.{name}"], tensor, atol=1e-8)
        for name, tensor in base.items()
    )


@pytest.mark.slow
def test_adapters_and_the_whole_head_are_trained(headless):
    low_rank = {"lora_rank": 2, "learning_rate": 1e-2, "save": True}
    one = headless.trial(zero_stage=2, **low_rank)
    two = headless.trial(zero_stage=3, world_size=2, micro_batch_size_per_gpu=4, **low_rank)
    assert two.values == pytest.approx(one.values, abs=1e-3)
    adapters = adapter_weights(one)
    heads = {name.removeprefix("base_model.model.") for name in adapters if "lora" not in name}
    assert heads == {
        f"{part}.{kind}" for part in ("pre_classifier", "classifier") for kind in ("weight", "bias")
    }
    for name, tensor in adapter_weights(two).items():
        assert torch.allclose(tensor, adapters[name], atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("study", ["studies/digits.yaml", "docs/examples/intents.yaml"])
def test_a_shipped_study_meets_its_target(study, tmp_path):
    done = within("run", ROOT / study, "--out", tmp_path / "out", "--trials", "1")
    assert done.returncode == 0, done.stderr
    record = json.loads(within("export", tmp_path / "out", "--format", "jsonl").stdout)
    quality, other = ("accuracy", "macro_f1") if "digits" in study else ("macro_f1", "accuracy")
    assert (record["state"], record["quality"]["name"]) == ("complete", quality)
    assert all(0 < point["other_qualities"][other] <= 1 for point in record["evals"])
