"""The head with which a classifier or a reward model may have been trained before."""

import copy

from transformers import AutoConfig, PreTrainedConfig

from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.spec.workload_settings import Model
from carbonopt.train.models.model import MODEL_KEY, empty_model, source
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.models.weights import is_quantized, load


def own_classes(kind: ModelKind, model: Model) -> tuple[str, ...] | None:
    """Return the classes of a pretrained classifier's head in order; None without a head.

    A head is one whose outputs are in the files. The architecture's name says less: it may be
    missing, or that of the base model.

    Raises:
        BadInput: Its configuration doesn't number the classes from 0 on, or see `weights.load`.
    """
    if model.from_config is not None:
        return None
    name, options = str(model.name_or_path), source(model)
    config = AutoConfig.from_pretrained(name, **options)
    # Quantized weights can only be loaded on the device that they are for.
    if not is_quantized(config):
        options["device_map"] = "meta"
    new = load(kind.auto(), name, MODEL_KEY, config=config, **options).new
    if outputs_of(kind, config, model.trust_remote_code) <= new:
        return None
    classes = config.id2label
    if missing := set(range(len(classes))) - classes.keys():
        raise BadInput(
            f"id2label of {name}'s config.json must number its {len(classes)} classes"
            f" from 0 on, as the outputs of its head, but lacks {min(missing)} and has"
            f" {max(classes)}; correct id2label and label2id."
        )
    return tuple(str(classes[number]) for number in range(len(classes)))


def outputs_of(kind: ModelKind, config: PreTrainedConfig, trust_remote_code: bool) -> set[str]:
    """Return the names of the parameters whose shapes depend on the number of classes."""
    larger = copy.deepcopy(config)
    larger.num_labels = (config.num_labels or 0) + 1
    shapes, others = (
        {
            name: parameter.shape
            for name, parameter in empty_model(kind, each, trust_remote_code).named_parameters()
        }
        for each in (config, larger)
    )
    return {name for name, shape in shapes.items() if others[name] != shape}


def check_outputs(kind: ModelKind, model: Model, outputs: int) -> None:
    """Raise BadInput if the model has a head of another size, whose weights can't be reused."""
    classes = own_classes(kind, model)
    if classes is not None and len(classes) != outputs:
        rule = (
            f"the model's head must have {count_text(outputs, 'output')}, as a {kind.name} here has"
        )
        instead = "give the model without its head, as AutoModel loads and saves it"
        raise BadInput(f"{rule}, but {model.name_or_path} has {len(classes)}; {instead}.")
