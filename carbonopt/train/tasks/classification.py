"""The task of classifying texts or images, judged by accuracy or macro-F1."""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from carbonopt.core.dimensions import LARGEST_INT
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import ACCURACY, MACRO_F1
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, values_of
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import ModelWorkload, SequenceLength
from carbonopt.train.data.labels import Contents, Labelled, LabelledDataset, listed
from carbonopt.train.failures import as_bad_input, refused
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.tasks.task import Card, Evaluation, TrialRun
from carbonopt.train.tasks.trainer_task import ExampleTask, Part

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, TrainingArguments

    from carbonopt.train.data.examples import Examples
    from carbonopt.train.training_loop import TrialTrainer

_TEXT_KIND = ModelKind(
    "AutoModelForSequenceClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "SEQ_CLS",
    "classifier of texts",
)
_IMAGE_KIND = ModelKind(
    "AutoModelForImageClassification",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    None,
    "classifier of images",
)
_TEXT_CARD = Card("text-classification", "Text Classification", "a text classifier")
_IMAGE_CARD = Card("image-classification", "Image Classification", "an image classifier")
_FEWEST_CLASSES = 2
_JUDGED_BY = ("labels", "weights")  # parts of a batch that are not inputs of the model


class ClassificationWorkload(ModelWorkload, extra="forbid"):
    task: Literal["classification"] = "classification"
    dataset: LabelledDataset
    sequence_length: SequenceLength | None = None  # None: images
    """The most tokens kept of a text; left out for images."""

    def violations(self) -> dict[str, bool]:
        images, untokenized = (
            self.dataset.has_images,
            self.tokenizer is None and self.model.name_or_path is None,
        )
        return {
            "images have no sequence_length; leave it out": (
                images and self.sequence_length is not None
            ),
            "images have no tokenizer; leave it out": images and self.tokenizer is not None,
            "sequence_length is missing: it is how many tokens of a text are kept; for images give"
            " dataset.image_column": not images and self.sequence_length is None,
            "a model from_config has no tokenizer: give workload.tokenizer, such as {kind: char}": (
                not images and untokenized
            ),
        }


class Classification(ExampleTask):
    settings = ClassificationWorkload
    workload: ClassificationWorkload
    qualities = (ACCURACY, MACRO_F1)
    masks_attention = True  # needed for texts; images have no mask

    @property
    def card(self) -> Card:
        return _IMAGE_CARD if self.workload.dataset.has_images else _TEXT_CARD

    @property
    def model_kind(self) -> ModelKind:
        return _IMAGE_KIND if self.workload.dataset.has_images else _TEXT_KIND

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports
        from carbonopt.train.data import images, labelled_texts, labels, packing
        from carbonopt.train.data.examples import save_arrays
        from carbonopt.train.models import model, pretrained_head, weights

        workload, kind = self.workload, self.model_kind
        if any(layer != "standard" for layer in values_of(space["output_layer"])):
            raise BadInput(
                "output_layer: a classifier's can't be fused; use standard, or leave it out."
            )
        with as_bad_input("dataset"):
            labelled = labels.read_labelled(workload.dataset)
        with as_bad_input("model"), model.unloadable("model", str(workload.model.name_or_path)):
            own_classes = pretrained_head.own_classes(kind, workload.model)
        labelled, class_notes = labels.in_model_order(labelled, own_classes)
        if sizes := values_of(space["global_batch_size"]):
            packing.total_steps(len(labelled.train.rows), min(map(int, sizes)), 1)
        read = images.read_images if workload.dataset.has_images else labelled_texts.read_texts
        contents = read(kind, workload, labelled, workload.dataset.content_column, folder)
        with as_bad_input("model"):
            weights.check_weights(kind, workload.model, contents.config)
            empty = model.empty_model(kind, contents.config, workload.model.trust_remote_code)
            _check_model(empty, space, contents)
        for part, arrays in (("train", contents.train), ("eval", contents.evaluation)):
            save_arrays(folder.root / part, **arrays)
        model.save_config(contents.config, folder, workload.model)
        return Prepared(
            fingerprint=fingerprint,
            train_examples=len(labelled.train.rows),
            eval_examples=len(labelled.evaluation.rows),
            train_tokens=contents.train_tokens,
            vocab_size=contents.vocab_size,
            model_parameters=sum(parameter.numel() for parameter in empty.parameters()),
            notes=(*contents.notes, *class_notes, *_notes(labelled, empty)),
            versions=imports.package_versions(),
            eval_batch_size_per_gpu=self.eval_batch_size_here(
                contents.config, len(labelled.evaluation.rows)
            ),
        )

    def eval_batch_size(
        self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT
    ) -> int | None:
        """Choose the batch size of texts by their tokens; see `TrainerTask.eval_batch_size`.

        Images are evaluated as in a micro batch: the tokens of one depend on the model.
        """
        from carbonopt.train.data import packing

        length = self.workload.sequence_length
        if self.workload.dataset.has_images or length is None:
            return None
        classes = int(config.num_labels or 1)
        return packing.batch_size_that_fits(memory_bytes, classes, length, examples)

    def examples(self, folder: PreparedFolder, part: Part) -> "Examples":
        from carbonopt.train.data.examples import open_arrays
        from carbonopt.train.data.images import ImageExamples
        from carbonopt.train.data.labelled_texts import TextExamples

        of: Any = ImageExamples if self.workload.dataset.has_images else TextExamples
        examples: Examples = of(**open_arrays(folder.root / part))
        return examples

    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        if run.spec.params.world_size > 1 and _has_batch_norm(model):
            why = "its batch normalisation would have statistics of its own on every rank"
            raise BadInput(
                f"{model.config.model_type} can't be trained on several ranks: {why}; use one GPU."
            )
        return super().trainer(run, model, arguments)

    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the sum of the examples' cross entropies in nats."""
        import torch.nn.functional as F

        losses = F.cross_entropy(_logits(model, batch), batch["labels"], reduction="none")
        return (losses * batch["weights"]).sum()

    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Count each class's correct predictions, all predictions of it, and examples of it.

        If a logit isn't finite, the numbers of correct predictions are NaN.
        """
        import torch

        logits = _logits(model, batch)
        counted = batch["weights"][:, None] > 0
        classes = torch.arange(logits.shape[-1], device=logits.device)
        predicted, present = (
            of[:, None].eq(classes) & counted for of in (logits.argmax(-1), batch["labels"])
        )
        sums = torch.stack([of.sum(0).double() for of in (predicted & present, predicted, present)])
        finite = (torch.isfinite(logits) | ~counted).all()
        sums[0] += torch.where(finite, 0.0, torch.nan)
        return sums.flatten()

    def expected_config(self) -> "PreTrainedConfig":
        from carbonopt.train.data import labelled_texts, labels, tokens
        from carbonopt.train.models import model

        workload = self.workload
        if workload.dataset.has_images:
            return model.model_config(self.model_kind, workload, None, num_labels=_FEWEST_CLASSES)

        def texts() -> tuple[list[str], list[str]]:
            return labelled_texts.texts_of(
                labels.read_labelled(workload.dataset), workload.dataset.content_column
            )

        tokenizer = tokens.with_padding(tokens.expected_tokenizer(workload, texts), workload.model)
        config = model.model_config(
            self.model_kind, workload, tokenizer, num_labels=_FEWEST_CLASSES
        )
        config.get_text_config().pad_token_id = tokens.padding_id(tokenizer, config)
        return config

    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        import torch

        from carbonopt.train.data.images import expected_shape

        judged_by = {"labels": torch.zeros(size, dtype=torch.int64), "weights": torch.zeros(size)}
        if (length := self.workload.sequence_length) is None:
            shape = expected_shape(self.workload.model, config)
            return {"pixel_values": torch.zeros(size, *shape), **judged_by}
        tokens = torch.zeros(size, length, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": tokens, **judged_by}

    def evaluation(self, sums: list[float]) -> Evaluation:
        """Compute accuracy and macro-F1 from the counts of all classes.

        A class's F1 is 2 × right ÷ (predicted + present), the harmonic mean of precision and
        recall. It is 0 for a class that is neither predicted nor present.
        """
        right, predicted, present = np.reshape(sums, (3, -1))
        f1 = 2 * right / np.maximum(predicted + present, 1)
        found = {ACCURACY: (right.sum(), present.sum()), MACRO_F1: (f1.sum(), len(f1))}
        others = {
            quality.name: quality.value(*of)
            for quality, of in found.items()
            if quality is not self.quality
        }
        total, count = found[self.quality]
        return Evaluation(float(total), int(count), others)


def _logits(model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
    """Return the model's logits, float32 [batch, classes]."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in _JUDGED_BY}
    if "pixel_values" in inputs:  # they need the type of the weights, which may be half precision
        inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
    logits: torch.Tensor = model(**inputs).logits
    return logits.float()


def _check_model(empty: Any, space: Space, contents: Contents) -> None:
    """Check that the model can be trained on these data.

    Raises:
        BadInput: if it takes no images of their size, has fewer positions than a text has tokens,
            or lacks what a dimension of the search needs.
    """
    import torch

    from carbonopt.train.data.labelled_texts import check_positions

    model_type = contents.config.model_type
    if "pixels" in contents.train:
        shape = contents.train["pixels"].shape[1:]
        sentence = (
            f"{model_type} of this configuration can't classify images of"
            f" {' x '.join(map(str, shape))}: {{}}."
        )
        with (
            refused(sentence, ValueError, TypeError, RuntimeError, AttributeError),
            torch.no_grad(),
        ):
            empty(pixel_values=torch.zeros(2, *shape, device="meta"))
    else:
        parts = contents.train, contents.evaluation
        check_positions(empty, max(int(np.diff(part["starts"]).max()) for part in parts))
    linear = [
        name
        for name, part in empty.base_model.named_modules()
        if type(part).__name__ in ("Linear", "Conv1D")
    ]
    if any(values_of(space["lora_rank"])) and not linear:
        raise BadInput(f"lora_rank: {model_type} has no linear layers for adapters; leave it out.")


def _has_batch_norm(model: Any) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(part, _BatchNorm) for part in model.modules())


def _notes(labelled: Labelled, model: Any) -> tuple[str, ...]:
    notes = []
    present = set(labelled.evaluation.labels.tolist())
    absent = [name for place, name in enumerate(labelled.classes) if place not in present]
    if absent:
        notes.append(
            f"{len(absent)} of {len(labelled.classes)} classes have no evaluation example"
            f" ({listed(absent)}); for macro-F1 they count as 0."
        )
    if _has_batch_norm(model):
        notes.append(
            "The model has batch normalisation: its quality depends on the micro batch, too."
        )
    return tuple(notes)
