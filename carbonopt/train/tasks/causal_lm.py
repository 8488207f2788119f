"""The task of causal language modelling on plain text, judged by perplexity.

Every token is predicted except the first of the text.
"""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from carbonopt.core.dimensions import LARGEST_INT
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, values_of
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import ModelWorkload, SequenceLength
from carbonopt.train.data.text import TextDataset
from carbonopt.train.failures import as_bad_input
from carbonopt.train.models.model_kind import CAUSAL_LM
from carbonopt.train.tasks.task import Card, Evaluation, TrialRun
from carbonopt.train.tasks.trainer_task import TrainerTask

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

    from carbonopt.train.training_loop import TrialTrainer


_MOST_UNKNOWN = 0.1  # largest accepted share of unknown tokens in the evaluation text


class CausalLMWorkload(ModelWorkload, extra="forbid"):
    task: Literal["causal_lm"] = "causal_lm"
    dataset: TextDataset
    sequence_length: SequenceLength

    def violations(self) -> dict[str, bool]:
        untokenized = self.tokenizer is None and self.model.name_or_path is None
        return {
            "a model from_config has no tokenizer: give workload.tokenizer, such as {kind: char}": (
                untokenized
            )
        }


class CausalLM(TrainerTask):
    settings = CausalLMWorkload
    workload: CausalLMWorkload
    qualities = (PERPLEXITY,)
    card = Card("text-generation", "Text Generation", "a causal language model")
    model_kind = CAUSAL_LM

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports
        from carbonopt.train.data import packing, text, tokens
        from carbonopt.train.models import model, model_check, weights

        workload, length, kind = self.workload, self.workload.sequence_length, self.model_kind
        with as_bad_input("dataset"):
            documents = text.read_text(workload.dataset)
        with as_bad_input("tokenizer"):
            encoder = tokens.make_encoder(workload, *documents)
            train, evaluation = (
                encoder.encode(documents.train),
                encoder.encode(documents.evaluation),
            )
        with as_bad_input("model"):
            config = model.model_config(kind, workload, encoder.tokenizer)
            for layer in values_of(space["output_layer"]):
                model_check.check_output_layer(
                    kind, config, str(layer), workload.model.trust_remote_code
                )
            weights.check_weights(kind, workload.model, config)
            parameters = model.parameter_count(kind, config, workload.model.trust_remote_code)
        train_examples = packing.sequence_count(len(train), length, keep_tail=False)
        if train_examples == 0:
            rule = (
                f"the training text must have at least one sequence of {length} tokens and one"
                " token more"
            )
            more = "give more text or a smaller workload.sequence_length"
            raise BadInput(f"{rule}, but has {len(train)} tokens; {more}.")
        unknown = encoder.unknown_share(evaluation)
        _check_evaluation(len(evaluation), unknown)
        eval_examples = packing.sequence_count(len(evaluation), length, keep_tail=True)
        np.save(folder.train, train, allow_pickle=False)
        np.save(folder.evaluation, evaluation, allow_pickle=False)
        tokens.save_tokenizer(encoder.tokenizer, workload, folder)
        model.save_config(config, folder, workload.model)
        return Prepared(
            fingerprint=fingerprint,
            train_examples=train_examples,
            eval_examples=eval_examples,
            train_tokens=len(train),
            eval_tokens=len(evaluation) - 1,
            sequence_length=length,
            vocab_size=len(encoder.tokenizer),
            model_parameters=parameters,
            versions=imports.package_versions(),
            eval_batch_size_per_gpu=self.eval_batch_size_here(config, eval_examples),
            notes=(
                (f"{100 * unknown:.2f} % of the evaluation's tokens are unknown to the tokenizer.",)
                if unknown
                else ()
            ),
        )

    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> "TrialTrainer":
        from carbonopt.train.token_training import TokenTrainer

        return TokenTrainer(run, model, arguments)

    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> Evaluation:
        """Sum the negative log-likelihood in nats, and count the target tokens."""
        from carbonopt.train.token_training import evaluate

        return Evaluation(*evaluate(run, trainer))

    def eval_batch_size(
        self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT
    ) -> int:
        from carbonopt.train.data import packing

        vocab_size, length = config.get_text_config().vocab_size, self.workload.sequence_length
        return packing.batch_size_that_fits(memory_bytes, vocab_size, length, examples)

    def example_loss(self, model: "PreTrainedModel", folder: PreparedFolder) -> "torch.Tensor":
        return self.largest_loss(model, 2)

    def expected_config(self) -> "PreTrainedConfig":
        from carbonopt.train.data import text, tokens
        from carbonopt.train.models import model

        tokenizer = tokens.expected_tokenizer(
            self.workload, lambda: text.read_text(self.workload.dataset)
        )
        return model.model_config(self.model_kind, self.workload, tokenizer)

    def largest_loss(
        self, model: Any, size: int, compiled: bool = False, folder: PreparedFolder | None = None
    ) -> "torch.Tensor":
        import torch

        from carbonopt.train.speed.output_layer import FusedOutputLayer
        from carbonopt.train.token_loss import token_nll

        tokens, output_layer = self._tokens(model, size), model.get_output_embeddings()
        if isinstance(output_layer, FusedOutputLayer) and model.training:
            output_layer.targets = tokens
            nll_sum: torch.Tensor = model(input_ids=tokens).logits
            return nll_sum
        nll = torch.compile(token_nll) if compiled else token_nll
        return nll(model(input_ids=tokens).logits, tokens, "sum")

    def largest_evaluation(
        self, model: Any, size: int, folder: PreparedFolder | None = None
    ) -> "torch.Tensor":
        from carbonopt.train.token_loss import token_nll

        tokens = self._tokens(model, size)
        return token_nll(model(input_ids=tokens).logits, tokens, "none").double().sum()

    def _tokens(self, model: Any, size: int) -> "torch.Tensor":
        import torch

        return torch.zeros(
            size, self.workload.sequence_length, dtype=torch.int64, device=model.device
        )


def _check_evaluation(tokens: int, unknown: float) -> None:
    """Refuse an evaluation text that is too short, or that the tokenizer can't read.

    Args:
        tokens: its number of tokens.
        unknown: the share of them that are unknown to the tokenizer.

    Raises:
        BadInput: if either is beyond its limit.
    """
    if tokens < 2:
        rule = f"the evaluation text must have at least 2 tokens, but has {tokens}"
        raise BadInput(f"{rule}; give more text or eval_files.")
    if unknown > _MOST_UNKNOWN:
        rule = (
            f"at most {100 * _MOST_UNKNOWN:.0f} % of the evaluation's tokens may be unknown to the"
            " tokenizer"
        )
        raise BadInput(
            f"{rule}, which takes them all for one, but {100 * unknown:.0f} % are; give a text like"
            " the training's."
        )
