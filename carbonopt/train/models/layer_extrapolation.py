"""Extend the memory of models with three and five layers to the same model with more layers.

Layers of one kind add the same activations and the same gradients. A pass over 32 layers without
numbers takes seconds, passes over eight less than one.
"""

import copy
from collections.abc import Sequence

from transformers import PreTrainedConfig

from carbonopt.spec.model_memory import Activations, Moment

FEW, MORE = 3, 5  # layers of the models that run

# The bytes and the gradients of a moment.
Point = tuple[int, int]


def few_and_more(config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedConfig] | None:
    """Return copies of the configuration with FEW and with MORE layers.

    None if its layers are of several kinds, or too few for a shortcut.
    """
    few, more = with_layers(config, FEW), with_layers(config, MORE)
    return None if few is None or more is None else (few, more)


def by_layers(
    config: PreTrainedConfig,
    trained: int,
    few: tuple[int, list[Activations]],
    more: tuple[int, list[Activations]],
) -> list[Activations] | None:
    """Return the activation memory of a model from that of three and of five of its layers.

    Args:
        config: The whole model's configuration.
        trained: The number of the whole model's trained parameters.
        few: The trained parameters of the model with FEW layers, and its memory for each micro
            batch.
        more: Those of the model with MORE layers.

    Returns:
        The memory for each micro batch. None: the layers are not all alike, so that the whole has
        to run.
    """
    layers = config.get_text_config().num_hidden_layers
    trained_a_layer = (more[0] - few[0]) / (MORE - FEW)
    if few[0] + (layers - FEW) * trained_a_layer != trained:
        return None
    of_all = [extended(*pair, layers) for pair in zip(few[1], more[1], strict=True)]
    return None if None in of_all else [memory for memory in of_all if memory is not None]


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig | None:
    """Return a copy of the configuration with fewer layers.

    None if its layers are of several kinds, or too few for a shortcut.
    """
    text = config.get_text_config()
    own = getattr(text, "num_hidden_layers", None)
    kinds = getattr(text, "layer_types", None) or ()
    if config.is_encoder_decoder or not isinstance(own, int) or own <= FEW + MORE:
        return None
    if len(set(kinds)) > 1:
        return None
    small = copy.deepcopy(config)
    small.get_text_config().num_hidden_layers = layers
    if kinds:
        small.get_text_config().layer_types = list(kinds[:layers])
    return small


def extended(few: Activations, more: Activations, layers: int) -> Activations | None:
    """Return the activation memory of a model with `layers` layers.

    Args:
        few: That of the model with FEW layers.
        more: That of the model with MORE layers.

    Returns:
        The memory. None if no rule by layers gives `more` from `few`, to the byte.
    """
    points, known = _points(few.moments), _points(more.moments)
    repeated, rest = divmod(len(known) - len(points), MORE - FEW)
    bytes_a_layer, rest_bytes = divmod(known[0][0] - points[0][0], MORE - FEW)
    gradients_a_layer, rest_gradients = divmod(known[-1][1] - points[-1][1], MORE - FEW)
    evaluation_a_layer, rest_evaluation = divmod(
        more.evaluation_bytes - few.evaluation_bytes, MORE - FEW
    )
    if repeated < 1 or rest or rest_bytes or rest_gradients or rest_evaluation:
        return None

    def by_rule(head: int, count: int) -> list[Point]:
        """Return the moments with `count` layers: a head, all layers but two alike, and an end.

        Args:
            head: The number of moments before those of the first layer.
        """
        added = count - FEW
        begin, layer = points[:head], points[head : head + repeated]
        end = points[
            head + repeated :
        ]  # with the two layers that are the last to get their gradients
        return [
            *((size + added * bytes_a_layer, gradients) for size, gradients in begin),
            *(
                (size + (added - index) * bytes_a_layer, gradients + index * gradients_a_layer)
                for index in range(count - FEW + 1)
                for size, gradients in layer
            ),
            *((size, gradients + added * gradients_a_layer) for size, gradients in end),
        ]

    heads = range(len(points) - repeated + 1)
    head = next((head for head in heads if by_rule(head, MORE) == known), None)
    if head is None:
        return None
    return Activations(
        micro_batch_size=few.micro_batch_size,
        moments=tuple(
            Moment(activation_bytes=size, gradient_elements=gradients)
            for size, gradients in by_rule(head, layers)
        ),
        evaluation_bytes=few.evaluation_bytes + (layers - FEW) * evaluation_a_layer,
    )


def _points(moments: Sequence[Moment]) -> list[Point]:
    return [(moment.activation_bytes, moment.gradient_elements) for moment in moments]
