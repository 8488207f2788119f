"""Linear layers of a model's blocks whose products of training are in float8.

A linear layer makes three products in a training step: its output, and the gradients of its inputs
and of its weights. torchao rounds their factors to float8, each scaled by its largest element
(`tensorwise`) or by the largest of each row (`rowwise`, which rounds less and costs more). See
Micikevicius et al., FP8 Formats for Deep Learning, 2022 (arXiv 2209.05433).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


class Float8TrainedLinear(torch.nn.Linear):
    """A linear layer that trains in float8, and evaluates as the layer that it replaces.

    It shares that layer's weights. What is evaluated is thus the model that is saved, which others
    use without float8.
    """

    def __init__(self, layer: torch.nn.Linear, config: Any) -> None:
        from torchao.float8 import convert_to_float8_training

        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        # In a tuple, which hides it from `parameters()`: the weights are this layer's.
        self._in_float8 = (convert_to_float8_training(layer, config=config),)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            return cast(Tensor, self._in_float8[0](hidden))
        return F.linear(hidden, self.weight, self.bias)


def train_in_float8(model: PreTrainedModel, scaling: str) -> None:
    """Replace the linear layers that gain from float8, all but the output layer.

    torchao's own rule says by its shape whether a layer gains.

    Args:
        scaling: "tensorwise" or "rowwise".

    Raises:
        ValueError: No layer of the model gains.
    """
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe

    gains: Callable[[torch.nn.Module, str], bool] = _auto_filter_for_recipe(scaling, [])
    config, outer = Float8LinearConfig.from_recipe_name(scaling), model.get_output_embeddings()
    linear = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear and layer is not outer
    }
    if not linear:  # as in GPT-2, whose layers are transformers' Conv1D
        raise ValueError("it has no torch.nn.Linear beside the output layer")
    layers = {name: layer for name, layer in linear.items() if gains(layer, name)}
    if not layers:
        raise ValueError(f"none of its linear layers is large enough to gain from {scaling} float8")
    for name, layer in layers.items():
        model.set_submodule(name, Float8TrainedLinear(layer, config))
