"""The kinds of models that tasks train."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelKind:
    """The kind of models that a task trains.

    It is given by names alone, so that reading a task loads none of the libraries that make models.
    """

    auto_class: str  # name of the class in transformers
    mapping: str  # transformers' table of the model types that this class makes
    peft_task_type: str | None  # None: PEFT has no type for this kind
    name: str  # for use in a sentence, such as "causal language model"

    def auto(self) -> Any:
        import transformers

        return getattr(transformers, self.auto_class)

    def model_types(self) -> list[str]:
        from transformers.models.auto import modeling_auto

        return sorted(getattr(modeling_auto, self.mapping))


CAUSAL_LM = ModelKind(
    "AutoModelForCausalLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "CAUSAL_LM",
    "causal language model",
)
