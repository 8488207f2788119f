"""Images as pixels: read, resized by an image processor, and scaled batch by batch."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoImageProcessor, PreTrainedConfig, ViTImageProcessorPil

from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.workload_settings import Model, ModelWorkload
from carbonopt.train.data.examples import Examples
from carbonopt.train.data.labels import Contents, Labelled, Labels
from carbonopt.train.data.packing import Indices
from carbonopt.train.data.rows import Row
from carbonopt.train.failures import as_bad_input, refused
from carbonopt.train.models import model as models

if TYPE_CHECKING:
    from carbonopt.train.models.model_kind import ModelKind

Pixels = npt.NDArray[np.uint8]

_MODES = {1: "L", 3: "RGB"}  # Pillow's modes, by a model's number of channels
# EfficientNet's option to divide by the deviation once more, as some of its models were trained.
_SECOND_DIVISION = "include_top"
_DEEP_MODES = ("I", "F")  # Pillow's modes of more than 8 bits a channel
# Names of files that hold an image processor.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ReadImage(NamedTuple):
    """An image as a viewer shows it: upright, and on white where it is transparent."""

    image: Image.Image
    was_transparent: bool  # True if any pixel was


class ImageExamples(Examples):
    """Labelled images, kept as pixels [images, channels, height, width].

    The model reads pixels × `scale` + `shift`, both float32 [channels, 1, 1].
    """

    def __init__(
        self,
        pixels: Pixels,
        labels: Labels,
        scale: npt.NDArray[np.float32],
        shift: npt.NDArray[np.float32],
    ) -> None:
        super().__init__(np.ones(len(labels), np.int64))
        self._pixels, self._labels, self._scale, self._shift = pixels, labels, scale, shift

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return a batch of the model's inputs with their labels and weights.

        `pixel_values` are float32 [batch, channels, height, width], `labels` int64 [batch] and
        `weights` float32 [batch].
        """
        shown = self._pixels[indices].astype(np.float32) * self._scale + self._shift
        labels = torch.from_numpy(self._labels[indices])
        return {
            "pixel_values": torch.from_numpy(shown),
            "labels": labels,
            "weights": self.weights_of(indices),
        }


def read_images(
    kind: "ModelKind",
    workload: ModelWorkload,
    labelled: Labelled,
    column: str,
    folder: PreparedFolder,
) -> Contents:
    """Return each image's pixels as the model reads them, and save its image processor.

    The image processor goes into `folder`.

    Raises:
        BadInput: if a value is no image, or the model or its image processor can't be loaded.
    """
    with as_bad_input("model"):
        config = models.model_config(kind, workload, None, **labelled.head)
        reader = ImageReader(workload.model, config, column)
    with as_bad_input("dataset"):
        train, evaluation = (
            reader.pixels(labelled.train.rows),
            reader.pixels(labelled.evaluation.rows),
        )
        if train.shape[1:] != evaluation.shape[1:]:
            sizes = (
                f"{train.shape[3]} x {train.shape[2]} and {evaluation.shape[3]} x"
                f" {evaluation.shape[2]}"
            )
            raise BadInput(
                f"images for training and for evaluation must be of one size, but are of {sizes}."
            )
        if len(train) > 1 and all(np.array_equal(image, train[0]) for image in train):
            raise BadInput(
                f"training images must differ, but all {len(train)} are the same as the model sees"
                " them."
            )
        reader.learn_scale(train)
        scale, shift = reader.scale_and_shift(labelled.train.rows[0])
    reader.processor.save_pretrained(folder.image_processor)
    shared = {"scale": scale, "shift": shift}
    return Contents(
        config,
        {"pixels": train, "labels": labelled.train.labels, **shared},
        {"pixels": evaluation, "labels": labelled.evaluation.labels, **shared},
        _notes(reader),
    )


def _notes(reader: "ImageReader") -> tuple[str, ...]:
    if not reader.transparent_images:
        return ()
    images = count_text(reader.transparent_images, "image")
    return (
        (
            f"{images} of the training and evaluation data had transparent parts, and were drawn on"
            " white."
        ),
    )


class ImageReader:
    """A converter from rows to pixels of the size that the model reads.

    It uses the model's own image processor. Without one, it resizes images to the `image_size` of
    the model's configuration.

    Raises:
        BadInput: if the model's number of channels is neither 1 nor 3, or its image processor can't
            be loaded.
    """

    def __init__(self, model: Model, config: PreTrainedConfig, column: str) -> None:
        vision = getattr(config, "vision_config", config)
        channels = getattr(vision, "num_channels", 3)
        if channels not in _MODES:
            raise BadInput(
                f"the model's num_channels must be 1 (grey) or 3 (colours), but is {channels}."
            )
        self._mode, self._column = _MODES[channels], column
        self.transparent_images = 0  # number of images read so far that had transparent parts
        self._is_own = _has_processor(model)
        self.processor = (
            _own_processor(model)
            if self._is_own
            else _resizing(getattr(vision, "image_size", None))
        )

    def pixels(self, rows: Sequence[Row]) -> Pixels:
        """Return the rows' pixels, [rows, channels, height, width].

        Raises:
            BadInput: if a value is no image, or the processed images differ in size.
        """
        read: Pixels | None = None
        for index, row in enumerate(rows):
            shown = _image(row, self._column, self._mode)
            self.transparent_images += shown.was_transparent
            one = self._unscaled(shown.image)
            if read is None:
                read = np.empty((len(rows), *one.shape), np.uint8)
            if one.shape != read.shape[1:]:
                height, width = read.shape[2:]
                rule, instead = self._one_size
                raise BadInput(
                    f"{rule}, such as the first's {width} x {height}, but {row.where} has one of"
                    f" {one.shape[2]} x {one.shape[1]}; {instead}."
                )
            read[index] = one
        assert read is not None
        return read

    @property
    def _one_size(self) -> tuple[str, str]:
        """Return the rule that images of several sizes break, and what to do."""
        if not self._is_own:
            rule = "images must be of one size for a model without image_size"
            return rule, "give images of one size"
        return (
            "the model's image processor must make images of one size",
            "set do_center_crop in its preprocessor_config.json, or a height and a width as size",
        )

    def learn_scale(self, train: Pixels) -> None:
        """Set the image processor's mean and standard deviation to those of the training pixels.

        A model's own image processor keeps its values.
        """
        if not self._is_own:
            shares = train.reshape(len(train), train.shape[1], -1).astype(np.float64) / 255
            deviations = shares.std(axis=(0, 2))
            self.processor.image_mean = shares.mean(axis=(0, 2)).tolist()
            self.processor.image_std = np.where(deviations > 0, deviations, 1.0).tolist()

    def scale_and_shift(self, row: Row) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return scale and shift that turn pixels into the output of the image processor.

        Both are float32 [channels, 1, 1].

        Raises:
            BadInput: if the processor does more than that with this row's image.
        """
        processor, image = self.processor, _image(row, self._column, self._mode).image
        pixels = self._unscaled(image)
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, deviation = (
            (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
        )
        mean, deviation = (
            np.broadcast_to(np.asarray(of, np.float64), len(pixels)) for of in (mean, deviation)
        )
        by = factor / deviation, -mean / deviation
        if getattr(processor, _SECOND_DIVISION, False):
            by = by[0] / processor.image_std, by[1] / processor.image_std
        scale, shift = ((of[:, None, None]).astype(np.float32) for of in by)
        if not np.allclose(pixels * scale + shift, self._processed(image), atol=1e-4):
            can = "resize, crop, rescale and normalise"
            raise BadInput(
                f"the model's image processor must {can} only, but {type(processor).__name__} does"
                " more."
            )
        return scale, shift

    def _unscaled(self, image: Image.Image) -> npt.NDArray[Any]:
        """Return the pixels of one image, resized and cropped, [channels, height, width]."""
        names = ("do_rescale", "do_normalize", _SECOND_DIVISION)
        return self._processed(
            image, **{name: False for name in names if hasattr(self.processor, name)}
        )

    def _processed(self, image: Image.Image, **steps: bool) -> npt.NDArray[Any]:
        """Return the processor's output for one image, [channels, height, width]."""
        made: npt.NDArray[Any] = np.asarray(
            self.processor(images=[image], **steps)["pixel_values"][0]
        )
        return made


def expected_shape(model: Model, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return channels, height and width of the images that the model gets.

    Raises:
        BadInput: if only the data decide that.
    """
    shapes = set()
    for size in (64, 96):  # any two sizes
        row = Row({"image": np.zeros((size, size, 3), np.uint8)}, "an empty image")
        shapes.add(ImageReader(model, config, "image").pixels([row]).shape[1:])
    if len(shapes) > 1:
        raise BadInput(
            "the size of the images is not known before they are read: the model takes any"
        )
    return shapes.pop()


def _has_processor(model: Model) -> bool:
    """Return whether the model has an image processor of its own.

    A folder without one holds a model that has never needed one; a model on a hub has one.
    """
    if model.name_or_path is None:
        return False
    folder = Path(model.name_or_path)
    return not folder.is_dir() or any((folder / name).is_file() for name in _PROCESSOR_FILES)


def _own_processor(model: Model) -> Any:
    # The backend is Pillow's, so that pixels don't depend on whether torchvision is installed.
    options: dict[str, Any] = {"backend": "pil", "revision": model.revision}
    with models.unloadable("image processor", str(model.name_or_path)):
        return AutoImageProcessor.from_pretrained(
            model.name_or_path, trust_remote_code=model.trust_remote_code, **options
        )


def _resizing(image_size: Any) -> Any:
    if image_size is None:
        return ViTImageProcessorPil(do_resize=False)
    height, width = image_size if isinstance(image_size, list | tuple) else (image_size, image_size)
    return ViTImageProcessorPil(size={"height": height, "width": width})


def _image(row: Row, column: str, mode: str) -> ReadImage:
    """Read a row's image into a Pillow mode.

    Raises:
        BadInput: if the value is no image.
    """
    value = row.values[column]
    path = value.get("path") if isinstance(value, dict) else None
    where = row.where if path is None else f"{row.where} ({path})"
    must = f"column {column!r} must hold images, but that of {where}"
    open_image = _opener(value)
    if open_image is None:
        has = "none" if value is None else f"the {type(value).__name__} {value!r:.40}"
        raise BadInput(f"column {column!r} must hold an image in every row, but {where} has {has}.")
    unreadable = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
    with (
        refused(f"{must} can't be read: {{}}.", *unreadable),
        refused(f"{must} is none.", UnidentifiedImageError),
    ):
        image = ImageOps.exif_transpose(open_image())
        if image.mode.split(";")[0] in _DEEP_MODES:
            raise BadInput(
                f"images must have 8 bits a channel, but that of {where} is of mode {image.mode}."
            )
        return _on_white(image, mode)


def _on_white(image: Image.Image, mode: str) -> ReadImage:
    """Draw an image on white where it is transparent.

    Pillow's conversion drops the transparency instead and shows the colour behind it: an icon,
    black ink on nothing, would become black all over.
    """
    if not image.has_transparency_data:
        return ReadImage(image.convert(mode), was_transparent=False)
    layer = image.convert("RGBA")
    if layer.getchannel("A").getextrema() == (255, 255):
        return ReadImage(image.convert(mode), was_transparent=False)
    ground = Image.new("RGBA", layer.size, "white")
    ground.alpha_composite(layer)
    return ReadImage(ground.convert(mode), was_transparent=True)


def _opener(value: Any) -> Callable[[], Image.Image] | None:
    """Return a function that opens an image; None if the value is no image.

    The value may be an array, a file's bytes, or {"bytes": .., "path": ..}.
    """
    if isinstance(value, np.ndarray):
        return lambda: Image.fromarray(value)
    content, path = (
        (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    )
    if isinstance(content, bytes):
        return lambda: Image.open(io.BytesIO(content))
    return (lambda: Image.open(path)) if isinstance(path, str) else None
