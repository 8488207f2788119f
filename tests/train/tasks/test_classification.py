"""Classification: which data it takes and refuses, what a model reads of them, and how it is
judged.
"""

import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from small_studies import study
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPImageProcessorPil,
    EfficientNetImageProcessorPil,
    PreTrainedTokenizerFast,
)
from transformers.image_processing_backends import PilBackend

from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import ACCURACY, MACRO_F1
from carbonopt.export.model_card import card_of
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import Model
from carbonopt.study_file.reader import parse_study
from carbonopt.train.data.examples import Rows, open_arrays
from carbonopt.train.data.images import ImageReader
from carbonopt.train.data.labelled_texts import TextExamples
from carbonopt.train.data.rows import Row
from carbonopt.train.tasks.task import task_for

BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 12}
VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
RESNET = {
    "model_type": "resnet", "num_channels": 3, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
    "layer_type": "basic",
}  # fmt: skip
TEXTS = {
    "task": "classification",
    "model": {"from_config": BERT},
    "tokenizer": {"kind": "char"},
    "dataset": {"train_files": ["train.jsonl"]},
    "sequence_length": 16,
}
DIGITS = {"task": "classification", "model": {"from_config": VIT}, "dataset": {"builtin": "digits"}}
ROWS = [
    {"text": f"{word} {number}", "label": word}
    for number in range(10)
    for word in ("sun", "rain", "snow")
]


def parsed(workload: dict, **target: float):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    return parse_study(
        {**raw, "target": target or {"accuracy": 0.5}, "workload": workload}, "study.yaml"
    ).workload


@pytest.mark.parametrize(
    ("workload", "size"),
    [(TEXTS, 1667), ({**TEXTS, "sequence_length": 512}, 64), (DIGITS, None)],
    ids=["short texts", "long texts", "images"],
)
def test_texts_are_evaluated_in_batches_as_large_as_pay(workload: dict, size: int | None) -> None:
    """2^15 tokens in a pass: 64 texts of 512, or 5,000 short ones in three equal passes."""
    task = task_for(parsed(workload).model_dump(mode="json"))
    config = AutoConfig.for_model(**{**BERT, "num_labels": 3})
    assert task.eval_batch_size(config, 80 * 2**30, 5000) == size


def prepared(workload: dict, folder: Path, **space) -> tuple[PreparedFolder, Prepared]:
    made = PreparedFolder(folder)
    made.root.mkdir()
    settings = parsed(workload).model_dump(mode="json")
    dimensions = {"global_batch_size": 4, "learning_rate": 1e-3, "epochs": 1, **space}
    return made, task_for(settings).prepare(Space.model_validate(dimensions), made, "f")


def of_rows(rows: list[dict], folder: Path, **changes) -> dict:
    """A workload of these rows; keys of `changes` that the data set has are its."""
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {key: changes.pop(key) for key in [*changes] if key not in TEXTS}
    return {**TEXTS, "dataset": {"train_files": [str(folder / "train.jsonl")], **own}, **changes}


def classes(folder: PreparedFolder) -> list[str]:
    names = AutoConfig.from_pretrained(folder.model_config).id2label
    return [names[place] for place in range(len(names))]


# -------------------------------------------------------------------------------------------------------
# study files


@pytest.mark.parametrize(
    ("workload", "target", "said"),
    [
        ({**TEXTS, "sequence_length": None}, {}, "workload: sequence_length is missing"),
        ({**TEXTS, "tokenizer": None}, {}, "workload: a model from_config has no tokenizer"),
        ({**DIGITS, "sequence_length": 8}, {}, "workload: images have no sequence_length"),
        ({**DIGITS, "tokenizer": {"kind": "char"}}, {}, "workload: images have no tokenizer"),
        (
            {**DIGITS, "dataset": {"builtin": "mnist"}},
            {},
            "workload.dataset.builtin: input should be 'digits'",
        ),
        (
            {**DIGITS, "dataset": {"builtin": "digits", "image_column": "x"}},
            {},
            "has no columns to be named",
        ),
        (
            {**DIGITS, "dataset": {"train_files": ["a.csv"], "image_column": "x"}},
            {},
            "but got a.csv",
        ),
        (
            {**DIGITS, "dataset": {"name_or_path": "a/b", "image_column": "x", "text_column": "y"}},
            {},
            "must have text_column or image_column, but has both",
        ),
        (
            {**TEXTS, "dataset": {"train_files": ["a.csv"], "label_column": "text"}},
            {},
            "must differ, but both are 'text'",
        ),
        (
            {**DIGITS, "dataset": {"builtin": "digits", "label_colum": "x"}},
            {},
            "did you mean label_column?",
        ),
        (DIGITS, {"perplexity": 3.0}, "target must be accuracy or macro_f1, by which"),
        (DIGITS, {"accuracy": 1.5}, "target.accuracy: "),
    ],
)
def test_a_study_file_that_can_not_be(workload, target, said):
    with pytest.raises(BadInput) as refused:
        parsed(workload, **target)
    assert said in str(refused.value) and str(refused.value).count("\n") == 0


def test_macro_f1_is_the_quality_where_it_is_the_target():
    assert parsed(DIGITS).quality is None and parsed(DIGITS, macro_f1=0.5).quality == "macro_f1"


def test_a_card_is_of_what_is_classified():
    assert card_of(parsed(DIGITS)).pipeline_tag == "image-classification"
    assert card_of(parsed(TEXTS)).pipeline_tag == "text-classification"


# --------------------------------------------------------------------------------------------------------------
# texts


@pytest.mark.parametrize(
    ("labels", "ordered"),
    [
        (["b", "a", "10", "9"], ["10", "9", "a", "b"]),
        ([10, 9, 2], ["2", "9", "10"]),
        (["10", "9", "-1"], ["-1", "9", "10"]),  # as CSV has numbers
    ],
)
def test_classes_are_those_of_the_training_data_in_order(labels, ordered, tmp_path):
    rows = [
        {"text": f"text {number}", "label": labels[number % len(labels)]}
        for number in range(4 * len(labels))
    ]
    folder, summary = prepared(of_rows(rows, tmp_path), tmp_path / "prepared")
    assert classes(folder) == ordered
    assert summary.train_examples == 3 * len(labels) and summary.eval_examples == len(labels)


def test_the_last_rows_of_each_class_are_held_back(tmp_path):
    """The rows of one class may all come after the other's."""
    rows = sorted(ROWS, key=lambda row: row["label"])
    folder, summary = prepared(
        of_rows(rows, tmp_path, eval_fraction=0.25, tokenizer={"kind": "byte"}),
        tmp_path / "prepared",
    )
    assert (summary.train_examples, summary.eval_examples) == (24, 6)
    evaluation = open_arrays(folder.root / "eval")
    assert np.bincount(evaluation["labels"]).tolist() == [2, 2, 2]
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
    ends = evaluation["starts"]
    texts = [
        tokenizer.decode(evaluation["tokens"][ends[i] : ends[i + 1]].tolist()) for i in range(6)
    ]
    assert texts == ["rain 8", "rain 9", "snow 8", "snow 9", "sun 8", "sun 9"]


def test_texts_are_cut_and_counted(tmp_path):
    rows = [{"text": "x" * length, "label": length % 2} for length in range(1, 41)]
    folder, summary = prepared(of_rows(rows, tmp_path, eval_fraction=0.5), tmp_path / "prepared")
    assert (
        open_arrays(folder.root / "train")["starts"][-1]
        == summary.train_tokens
        == sum(min(length, 16) for length in range(1, 21))
    )
    assert [note.split(" had ")[0] for note in summary.notes] == [
        "Of the training data 4 of 20 texts",
        "Of the evaluation data 20 of 20 texts",
    ]


def test_special_tokens_stay_when_a_text_is_cut(tmp_path):
    """Those of the model's own tokenizer."""
    folder, _ = prepared(of_rows(ROWS, tmp_path), tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
    tokenizer.add_special_tokens({"cls_token": "<cls>", "sep_token": "<sep>"})
    from tokenizers.processors import TemplateProcessing

    around = [("<cls>", tokenizer.cls_token_id), ("<sep>", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<cls> $A <sep>", special_tokens=around
    )
    tokenizer.save_pretrained(tmp_path / "own")
    changes = {"tokenizer": {"name_or_path": str(tmp_path / "own")}, "sequence_length": 5}
    folder, _ = prepared(of_rows(ROWS, tmp_path, **changes), tmp_path / "prepared")
    arrays = open_arrays(folder.root / "train")
    first = arrays["tokens"][: arrays["starts"][1]].tolist()
    assert tokenizer.decode(first).replace(" ", "") == "<cls>sun<sep>" and len(first) == 5


@pytest.mark.parametrize(("side", "kept"), [("left", "last"), ("right", "first")])
def test_the_note_on_cut_texts_says_which_tokens_were_kept(side, kept, tmp_path):
    made, _ = prepared(of_rows(ROWS, tmp_path), tmp_path / "made")
    AutoTokenizer.from_pretrained(made.tokenizer, truncation_side=side).save_pretrained(
        tmp_path / "own"
    )
    changes = {"tokenizer": {"name_or_path": str(tmp_path / "own")}, "sequence_length": 4}
    folder, summary = prepared(of_rows(ROWS, tmp_path, **changes), tmp_path / "prepared")
    arrays = open_arrays(folder.root / "train")
    row = AutoTokenizer.from_pretrained(folder.tokenizer).decode(arrays["tokens"][:4])
    text = ROWS[0]["text"]
    assert row == (text[-4:] if side == "left" else text[:4]) and text[-4:] != text[:4]
    assert summary.notes and all(f"the {kept} were kept" in note for note in summary.notes)


@pytest.mark.parametrize("length", [5, 16])
def test_the_saved_tokenizer_cuts_and_pads_nothing_by_itself(length, tmp_path):
    kept, _ = prepared(of_rows(ROWS, tmp_path), tmp_path / "made")
    own = Tokenizer.from_file(str(kept.tokenizer / "tokenizer.json"))
    own.enable_truncation(6)
    own.enable_padding(length=9)
    AutoTokenizer.from_pretrained(kept.tokenizer).save_pretrained(tmp_path / "own")
    own.save(str(tmp_path / "own" / "tokenizer.json"))
    changes = {"tokenizer": {"name_or_path": str(tmp_path / "own")}, "sequence_length": length}
    folder, summary = prepared(of_rows(ROWS, tmp_path, **changes), tmp_path / "prepared")
    saved = Tokenizer.from_file(str(folder.tokenizer / "tokenizer.json"))
    assert len(saved.encode("sun 1" * 10).ids) == 50
    assert bool(summary.notes) == (length == 5)  # texts were cut to it
    lengths = np.diff(open_arrays(folder.root / "train")["starts"])
    assert lengths.max() == min(length, len("rain 8"))


@pytest.mark.parametrize(("config", "length"), [(BERT, 16), (GPT2, 12)], ids=["encoder", "decoder"])
def test_padding_and_fillers_change_no_logit(config, length, tmp_path):
    rows = [
        {"text": "abcdefghijklmnop"[: 1 + number % 12], "label": number % 2} for number in range(40)
    ]
    workload = of_rows(rows, tmp_path, model={"from_config": config}, sequence_length=length)
    folder, _ = prepared(workload, tmp_path / "prepared")
    task = task_for(parsed(workload).model_dump(mode="json"))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(folder.model_config)
    ).eval()
    examples = task.examples(folder, "train")
    with torch.no_grad():
        batch = examples.batch(np.array([0, 11, -1, 3]))
        together = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        for place, index in ((0, 0), (1, 11), (3, 3)):
            tokens = examples._rows.tokens[
                examples._rows.starts[index] : examples._rows.starts[index + 1]
            ]
            alone = model(input_ids=torch.tensor(tokens[None].astype(np.int64))).logits[0]
            assert together[place].numpy() == pytest.approx(alone.numpy(), abs=1e-6)
        sums = task.sums(model, batch).reshape(3, 2)
    assert batch["weights"].tolist() == [1, 1, 0, 1] and sums[1].sum() == sums[2].sum() == 3


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_encoder_decoder_is_evaluated_on_rows_that_fill_no_batch(kind):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_layers": 1}
    special = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = AutoConfig.for_model(kind, **sizes, **special, vocab_size=9, num_labels=2)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    examples = TextExamples(
        **Rows.of([[5, 2], [6, 7, 2]])._asdict(), labels=np.array([0, 1]), padding=np.array([1])
    )
    task = task_for(parsed(TEXTS).model_dump(mode="json"))
    with torch.no_grad():
        whole, filled = (
            task.sums(model, examples.batch(np.array(rows))) for rows in ([0, 1], [0, 1, -1, -1])
        )
    assert filled.tolist() == whole.tolist()


@pytest.mark.parametrize("pad", [None, 3, 97])  # 97 is an a, which texts have
@pytest.mark.parametrize("settings", [BERT, GPT2], ids=["encoder", "decoder"])
def test_a_model_without_room_for_a_padding_token_is_padded_with_an_unused_one(
    settings, pad, tmp_path
):
    fields = {"vocab_size": 256, "pad_token_id": pad, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(**{**settings, **fields, "num_labels": 2})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    workload = {"model": {"name_or_path": str(tmp_path / "model")}, "tokenizer": {"kind": "byte"}}
    rows = [{"text": "abcdefghijkl"[: 1 + n % 12], "label": n % 2} for n in range(40)]
    workload = of_rows(rows, tmp_path, **workload, sequence_length=12)
    folder, _ = prepared(workload, tmp_path / "prepared")
    padding = AutoConfig.from_pretrained(folder.model_config).pad_token_id
    assert padding == (3 if pad == 3 else 255)
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
    assert tokenizer.pad_token is None and len(tokenizer) == 256
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", config=AutoConfig.from_pretrained(folder.model_config)
    ).eval()
    task = task_for(parsed(workload).model_dump(mode="json"))
    batch = task.examples(folder, "train").batch(np.array([0, 11, 3]))
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        together = model(**inputs).logits
        alone = model(input_ids=batch["input_ids"][:1, :1]).logits[0]
    assert batch["input_ids"][0].tolist() == [97, *[padding] * 11]
    assert together[0].numpy() == pytest.approx(alone.numpy(), abs=1e-6)
    task.expected_config()  # which `check` asks for before it knows the texts


def test_texts_that_leave_no_id_for_the_padding_are_refused(tmp_path):
    config = AutoConfig.for_model(**{**GPT2, "vocab_size": 2, "eos_token_id": None})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    rows = [{"text": "ab"[: 1 + n % 2], "label": n % 2} for n in range(40)]
    workload = {"model": {"name_or_path": str(tmp_path / "model")}, "tokenizer": {"kind": "char"}}
    with pytest.raises(BadInput, match=r"all 2 ids .*resize_token_embeddings"):
        prepared(of_rows(rows, tmp_path, **workload, sequence_length=4), tmp_path / "prepared")


@pytest.mark.parametrize(
    "kind", ["multi_label_classification", "regression", "single_label_classification"]
)
def test_a_model_of_another_kind_of_problem_becomes_a_classifier(kind, tmp_path):
    head = {"num_labels": 3, "problem_type": kind}
    config = AutoConfig.for_model(**{**BERT, "vocab_size": 300, **head})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    workload = {"model": {"name_or_path": str(tmp_path / "model")}, "tokenizer": {"kind": "byte"}}
    folder, _ = prepared(of_rows(ROWS, tmp_path, **workload), tmp_path / "prepared")
    assert (
        AutoConfig.from_pretrained(folder.model_config).problem_type
        == "single_label_classification"
    )


# -------------------------------------------------------------------------------------------------------------
# images


def pictures(count: int, size: tuple[int, int] = (8, 8)) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (*size[::-1], 3), np.uint8)) for _ in range(count)
    ]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def image_folder(root: Path, *splits: str) -> Path:
    for number, image in enumerate(pictures(20)):
        for split in splits:
            path = root / split / ("cat", "dog")[number % 2] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    return root


COLOURS = {"model": {"from_config": {**VIT, "num_channels": 3}}}


def test_digits_are_scikit_learns(tmp_path):
    folder, summary = prepared(DIGITS, tmp_path / "prepared")
    images, labels = load_digits(return_X_y=True)
    assert summary.train_examples + summary.eval_examples == 1797 == len(labels)
    train = open_arrays(folder.root / "train")
    first = np.flatnonzero(labels == 3)[0]
    place = np.flatnonzero(train["labels"] == 3)[0]
    assert train["pixels"][place, 0] == pytest.approx(
        np.rint(images[first].reshape(8, 8) * 255 / 16)
    )
    shown = (
        task_for(parsed(DIGITS).model_dump(mode="json"))
        .examples(folder, "train")
        .batch(np.arange(1000))
    )
    assert float(shown["pixel_values"].mean()) == pytest.approx(0, abs=0.03)
    assert float(shown["pixel_values"].std()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("source", ["folder", "unsplit", "parquet", "hub"])
def test_every_source_gives_the_same_images(source, tmp_path):
    column = {"image_column": "image"}
    if source in ("folder", "unsplit"):
        splits, named = (
            (("train", "validation"), {})
            if source == "folder"
            else (("",), {"eval_split": "train"})
        )
        dataset = {
            "name_or_path": str(image_folder(tmp_path / "images", *splits)),
            **named,
            **column,
        }
    elif source == "parquet":
        rows = [
            {"image": {"bytes": png(image), "path": None}, "label": n % 2}
            for n, image in enumerate(pictures(20))
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "images.parquet")
        files = [str(tmp_path / "images.parquet")]
        dataset = {"train_files": files, "eval_files": files, **column}
    else:
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])}
        )
        columns = {"image": pictures(20), "label": [1 - number % 2 for number in range(20)]}
        rows = datasets.Dataset.from_dict(columns, features)
        for split in ("train", "validation"):
            (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
            rows.to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
        dataset = {"name_or_path": str(tmp_path / "hub"), **column}
    folder, summary = prepared({**DIGITS, **COLOURS, "dataset": dataset}, tmp_path / "prepared")
    names = {
        "folder": ["cat", "dog"],
        "unsplit": ["cat", "dog"],
        "parquet": ["0", "1"],
        "hub": ["dog", "cat"],
    }
    assert classes(folder) == names[source]
    expected = {png(image): number % 2 for number, image in enumerate(pictures(20))}
    arrays = open_arrays(folder.root / "train")
    assert (summary.train_examples, summary.eval_examples) == (
        (18, 2) if source == "unsplit" else (20, 20)
    )
    for pixels, label in zip(arrays["pixels"], arrays["labels"], strict=True):
        number = expected[png(Image.fromarray(np.moveaxis(pixels, 0, -1)))]
        assert number == (1 - label if source == "hub" else label)


def test_images_are_what_the_saved_processor_makes_of_them(tmp_path):
    """Resized to the configuration's size; colours, shifted and scaled."""
    rows = [
        {"image": {"bytes": png(image)}, "label": n % 2}
        for n, image in enumerate([*pictures(5), *pictures(5, (20, 13))])
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "images.parquet")
    files = [str(tmp_path / "images.parquet")]
    workload = {
        **DIGITS,
        **COLOURS,
        "dataset": {"train_files": files, "eval_files": files, "image_column": "image"},
    }
    folder, _ = prepared(workload, tmp_path / "prepared")
    processor = AutoImageProcessor.from_pretrained(folder.image_processor, backend="pil")
    batch = (
        task_for(parsed(workload).model_dump(mode="json"))
        .examples(folder, "eval")
        .batch(np.arange(10))
    )
    expected = processor(images=[Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows])[
        "pixel_values"
    ]
    assert batch["pixel_values"].numpy() == pytest.approx(np.stack(expected), abs=1e-5)


@pytest.fixture
def image_rows() -> list[Row]:
    """Two images, of different shapes."""
    images = (*pictures(1, (12, 12)), *pictures(1, (20, 13)))
    return [Row({"image": np.asarray(image)}, f"row {n}") for n, image in enumerate(images)]


def reader_with(processor: PilBackend, folder: Path) -> ImageReader:
    """Return a reader for a model with this image processor."""
    processor.save_pretrained(folder)
    config = AutoConfig.for_model(**{**VIT, "num_channels": 3})
    return ImageReader(Model(name_or_path=str(folder)), config, "image")


@pytest.mark.parametrize(
    "options", [{}, {"include_top": False}, {"do_rescale": False}, {"do_normalize": False}]
)
def test_the_second_division_of_efficientnet(options, image_rows, tmp_path):
    processor = EfficientNetImageProcessorPil(size={"height": 8, "width": 8}, **options)
    reader = reader_with(processor, tmp_path)
    scale, shift = reader.scale_and_shift(image_rows[0])
    expected = processor(images=[row.values["image"] for row in image_rows])["pixel_values"]
    assert reader.pixels(image_rows) * scale + shift == pytest.approx(
        np.stack(expected), rel=1e-4, abs=1e-4
    )


def test_images_that_their_processor_leaves_in_several_sizes(image_rows, tmp_path):
    """It is the processor's doing, whatever the model's image_size."""
    reader = reader_with(
        CLIPImageProcessorPil(size={"shortest_edge": 8}, do_center_crop=False), tmp_path
    )
    with pytest.raises(BadInput, match=r"8 x 8.* row 1 .*; set do_center_crop"):
        reader.pixels(image_rows)


# ------------------------------------------------------------------------------------------------------------
# refusals


def in_ink(colour: int, place: int, mode: str) -> Image.Image:
    """A bar on nothing, as icons and signatures are drawn."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:, place] = 255
    shape = np.full((8, 8), colour, np.uint8)
    layer = Image.fromarray(np.stack([shape, shape, shape, alpha], axis=-1))
    if mode == "RGB":  # with a colour that stands for nothing, as PNG can have it
        seen = np.where(alpha[..., None] > 0, np.uint8(colour), np.uint8(7)).repeat(3, axis=-1)
        image = Image.fromarray(seen)
        image.info["transparency"] = (7, 7, 7)
        return image
    return layer.quantize() if mode == "P" else layer.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_is_drawn_on_white_and_said(mode, tmp_path):
    inks = [in_ink(0, number % 8, mode) for number in range(16)]
    assert Image.open(io.BytesIO(png(inks[0]))).mode == mode
    rows = [{"image": {"bytes": png(ink)}, "label": number % 2} for number, ink in enumerate(inks)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "inks.parquet")
    dataset = {
        "train_files": [str(tmp_path / "inks.parquet")],
        "image_column": "image",
        "eval_fraction": 0.25,
    }
    folder, summary = prepared({**DIGITS, "dataset": dataset}, tmp_path / "prepared")
    pixels = open_arrays(folder.root / "train")["pixels"][:, 0]
    assert {int(np.flatnonzero(image[0] == 0)[0]) for image in pixels} == set(range(8))
    assert all(sorted(set(image.flat)) == [0, 255] for image in pixels)
    assert any("16 images" in note and "white" in note for note in summary.notes)


def test_an_image_without_a_transparent_pixel_stays_as_it_is(tmp_path):
    rows = [{"image": {"bytes": png(image)}, "label": n % 2} for n, image in enumerate(pictures(8))]
    with_alpha = [
        {**row, "image": {"bytes": png(image.convert("RGBA"))}}
        for row, image in zip(rows, pictures(8), strict=True)
    ]
    read = []
    for name, given in (("plain", rows), ("alpha", with_alpha)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), tmp_path / f"{name}.parquet")
        dataset = {
            "train_files": [str(tmp_path / f"{name}.parquet")],
            "image_column": "image",
            "eval_fraction": 0.25,
        }
        folder, summary = prepared({**DIGITS, **COLOURS, "dataset": dataset}, tmp_path / name)
        assert not any("white" in note for note in summary.notes)
        read.append(np.array(open_arrays(folder.root / "train")["pixels"]))
    assert np.array_equal(*read)


def test_images_of_which_the_model_sees_no_difference_are_refused(tmp_path):
    rows = [
        {"image": {"bytes": png(in_ink(255, n % 8, "RGBA"))}, "label": n % 2} for n in range(16)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "white.parquet")
    dataset = {"train_files": [str(tmp_path / "white.parquet")], "image_column": "image"}
    with pytest.raises(BadInput, match="training images must differ"):
        prepared({**DIGITS, "dataset": dataset}, tmp_path / "prepared")


@pytest.mark.parametrize("text", ["all the same", "a long text whose end differs: {}"])
def test_texts_of_which_the_model_sees_no_difference_are_refused(text, tmp_path):
    rows = [{"text": text.format(number), "label": number % 2} for number in range(16)]
    with pytest.raises(BadInput, match="training texts must differ"):
        prepared(of_rows(rows, tmp_path), tmp_path / "prepared")


@pytest.mark.parametrize(
    ("known", "is_right"), [("", False), ("abcd", False), ("rsuno wain", True)]
)
def test_texts_that_the_tokenizer_does_not_know_are_refused(known, is_right, tmp_path):
    letters = {letter: place for place, letter in enumerate(["[UNK]", *known])}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    own.save_pretrained(tmp_path / "own")
    workload = of_rows(ROWS, tmp_path, tokenizer={"name_or_path": str(tmp_path / "own")})
    if is_right:
        assert prepared(workload, tmp_path / "prepared")[1].train_examples > 0
        return
    with pytest.raises(BadInput, match=r"unknown, \[UNK\]"):
        prepared(workload, tmp_path / "prepared")


def changed(position: int, **values) -> list[dict]:
    return [{**row, **(values if number == position else {})} for number, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        (changed(4, label=None), {}, "must hold a label in every row, but"),
        (changed(4, label=""), {}, "line 5 has none"),
        (changed(4, label=1.5), {}, "line 5 has the float 1.5"),
        (changed(4, label=True), {}, "line 5 has True"),
        (changed(4, label=7), {}, "line 5 has 7"),
        (changed(4, text="  "), {}, "line 5 is empty"),
        (changed(4, text=7), {}, "must hold text, but"),
        ([{"text": row["text"], "label": "sun"} for row in ROWS], {}, "two classes at least, but"),
        ([{"text": row["text"]} for row in ROWS], {}, "has no column 'label'"),
        (ROWS, {"text_column": "body"}, "has no column 'body'"),
        (
            [{"text": str(number), "label": number} for number in range(5)],
            {},
            "but every class has one",
        ),
        (ROWS, {"model": {"from_config": {**BERT, "num_labels": 3}}}, "can't have num_labels"),
        (ROWS, {"model": {"from_config": {**BERT, "id2label": {0: "a"}}}}, "can't have id2label"),
        (
            ROWS,
            {"model": {"from_config": VIT}},
            "must be a classifier of texts that transformers knows",
        ),
        (
            ROWS,
            {"model": {"from_config": GPT2}},
            "sequence_length must be at most the model's number of positions",
        ),
        (
            ROWS,
            {"model": {"from_config": {"model_type": "xlnet", "d_model": 16, "n_head": 2}}},
            "different lengths",
        ),
        (
            ROWS,
            {
                "model": {
                    "from_config": {**BERT, "model_type": "roberta", "max_position_embeddings": 20}
                }
            },
            "the positions that the model has for tokens, but got 6 and ",
        ),
        (
            ROWS,
            {"model": {"from_config": {"model_type": "bart", "d_model": 16}}},
            "one end-of-text token",
        ),
    ],
)
def test_texts_that_can_not_be_classified(rows, changes, said, tmp_path):
    with pytest.raises(BadInput) as refused:
        prepared(of_rows(rows, tmp_path, **changes), tmp_path / "prepared")
    assert said in str(refused.value) and str(refused.value).count("\n") == 0


def test_an_evaluation_text_needs_a_position_for_each_token_too(tmp_path):
    short = [{"text": letter, "label": number % 2} for number, letter in enumerate("abcdefgh")]
    (tmp_path / "eval.jsonl").write_text(
        '{"text": "a longer text", "label": 0}\n{"text": "b", "label": 1}\n'
    )
    roberta = {**BERT, "model_type": "roberta", "max_position_embeddings": 20}
    given = {
        "model": {"from_config": roberta},
        "eval_files": [str(tmp_path / "eval.jsonl")],
    }
    with pytest.raises(BadInput, match="the positions that the model has for tokens"):
        prepared(of_rows(short, tmp_path, **given), tmp_path / "prepared")


def test_an_evaluation_label_that_training_lacks(tmp_path):
    (tmp_path / "eval.jsonl").write_text(
        '{"text": "a", "label": "sun"}\n{"text": "b", "label": "hail"}\n'
    )
    with pytest.raises(
        BadInput, match="line 2 has 'hail', which the training data lacks: rain, snow, sun"
    ):
        prepared(
            of_rows(ROWS, tmp_path, eval_files=[str(tmp_path / "eval.jsonl")]),
            tmp_path / "prepared",
        )


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"output_layer": "fused"}, "can't be fused"),
        ({"global_batch_size": 1000}, "at most the training set's 27 examples, but got 1000"),
    ],
)
def test_a_space_that_no_trial_can_have(space, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        prepared(of_rows(ROWS, tmp_path), tmp_path / "prepared", **space)


def test_a_label_out_of_the_hubs_range(tmp_path):
    """A hub's test split often has −1 for what it doesn't tell."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    for split, labels in (("train", [0, 1]), ("validation", [0, -1])):
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": labels}, features)
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    workload = {**TEXTS, "dataset": {"name_or_path": str(tmp_path / "hub")}}
    with pytest.raises(BadInput, match=r"labels from 0 to 1, but .* row 2 has -1"):
        prepared(workload, tmp_path / "prepared")
    workload["dataset"]["eval_split"] = "test"
    with pytest.raises(
        BadInput,
        match=r"has no split 'test'; .*; eval_split: train sets eval_fraction of that aside",
    ):
        prepared(workload, tmp_path / "again")


@pytest.mark.parametrize(
    ("cells", "model", "space", "said"),
    [
        ([b"no image"], VIT, {}, "row 1 is none"),
        ([{"bytes": b"no image", "path": "a/5.png"}], VIT, {}, "row 1 (a/5.png) is none"),
        ([{"bytes": None, "path": None}], VIT, {}, "must hold an image in every row, but"),
        ([{"bytes": png(pictures(1)[0])[:60]}], VIT, {}, "row 1 can't be read: "),
        (
            [png(Image.fromarray(np.zeros((8, 8), np.uint16)))],
            VIT,
            {},
            "must have 8 bits a channel",
        ),
        (
            [png(image) for image in (*pictures(3), *pictures(1, (9, 8)))],
            RESNET,
            {},
            "has one of 9 x 8",
        ),
        (
            [png(image) for image in pictures(4)],
            {**VIT, "num_channels": 2},
            {},
            "must be 1 (grey) or 3 (colours)",
        ),
        (
            [png(image) for image in pictures(4)],
            {**VIT, "image_size": 2},
            {},
            "can't classify images of 1 x 2 x 2",
        ),
        ([png(image) for image in pictures(4)], RESNET, {"lora_rank": 4}, "has no linear layers"),
        (
            [png(image) for image in pictures(4)],
            BERT,
            {},
            "must be a classifier of images that transformers knows",
        ),
    ],
)
def test_images_that_can_not_be_classified(cells, model, space, said, tmp_path):
    cells = [*cells, *(cells[:1] * (4 - len(cells)))]
    rows = [{"image": cell, "label": number // 2} for number, cell in enumerate(cells)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "images.parquet")
    dataset = {
        "train_files": [str(tmp_path / "images.parquet")],
        "image_column": "image",
        "eval_fraction": 0.5,
    }
    workload = {"task": "classification", "model": {"from_config": model}, "dataset": dataset}
    with pytest.raises(BadInput) as refused:
        prepared(workload, tmp_path / "prepared", **{"global_batch_size": 1, **space})
    assert said in str(refused.value) and str(refused.value).count("\n") == 0


def test_batch_normalisation_is_noted(tmp_path):
    workload = {**DIGITS, "model": {"from_config": {**RESNET, "num_channels": 1}}}
    _, summary = prepared(workload, tmp_path / "prepared")
    assert any("batch normalisation" in note for note in summary.notes)


# -------------------------------------------------------------------------------------------------------------
# quality


@pytest.mark.parametrize("target", [ACCURACY, MACRO_F1], ids=lambda quality: quality.name)
def test_quality_is_what_scikit_learn_computes(target):
    """From counts that are summed over two parts; of the last class there is no example."""
    task = task_for(parsed(DIGITS, **{target.name: 0.5}).model_dump(mode="json"))
    random, count = np.random.default_rng(1), 200
    logits = torch.from_numpy(random.normal(size=(count, 5)))
    labels = torch.from_numpy(random.integers(0, 4, count))
    logits[torch.arange(count), labels] += 1

    class Model:
        dtype = torch.float32

        def __call__(self, logits):
            return type("Output", (), {"logits": logits})

    parts = [
        task.sums(
            Model(),
            {
                "logits": logits[part],
                "labels": labels[part],
                "weights": torch.ones(len(labels[part])),
            },
        )
        for part in (slice(0, 77), slice(77, None))
    ]
    evaluation = task.evaluation((parts[0] + parts[1]).tolist())
    predicted = logits.argmax(-1)
    expected = {
        "accuracy": float((predicted == labels).double().mean()),
        "macro_f1": f1_score(labels, predicted, labels=range(5), average="macro", zero_division=0),
    }
    assert target.value(evaluation.sum, evaluation.count) == pytest.approx(
        expected.pop(target.name), rel=1e-12
    )
    assert evaluation.others == pytest.approx(expected, rel=1e-12)
    assert evaluation.count == (count if target is ACCURACY else 5)


def test_a_model_of_no_numbers_has_no_quality():
    task = task_for(parsed(DIGITS).model_dump(mode="json"))
    logits = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [float("inf"), 0.0]])

    def point(*rows: int) -> EvalPoint:
        batch = {"logits": logits[list(rows)], "labels": torch.zeros(len(rows), dtype=torch.int64)}
        model = lambda logits: type("Output", (), {"logits": logits})  # noqa: E731
        found = task.evaluation(
            task.sums(model, {**batch, "weights": torch.ones(len(rows))}).tolist()
        )
        return EvalPoint.of(ACCURACY, found.sum, found.count, step=1, tokens=None, **found.others)

    assert point(0).value == 1.0 and point(0).other_qualities == {"macro_f1": 0.5}
    assert (
        point(0, 1).value is None
        and point(0, 2).value is None
        and point(0, 1).other_qualities == {}
    )
