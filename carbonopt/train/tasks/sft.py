"""The task of supervised fine-tuning on prompts with responses, or on chats.

The model learns to predict the tokens of responses alone. It is judged by perplexity, again over
the tokens of responses alone.
"""

from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.dimensions import LARGEST_INT
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, values_of
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import Dataset, ModelWorkload, SequenceLength
from carbonopt.train.data.rows import Row
from carbonopt.train.failures import as_bad_input
from carbonopt.train.models.model_kind import CAUSAL_LM
from carbonopt.train.tasks.task import Card, Evaluation
from carbonopt.train.tasks.trainer_task import ExampleTask, Part

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from carbonopt.train.data.chat import Chat
    from carbonopt.train.data.responses import Responses
    from carbonopt.train.token_loss import TokenLoss

# Paragraphs of a topic of Python's help that make a response: its heading, and about as much text
# as a short answer has.
_PARAGRAPHS = 3


class ResponseDataset(Dataset, extra="forbid"):
    builtin: Literal["python-docs"] | None = None
    prompt_column: str = "prompt"
    """The prompts' column in jsonl, csv, parquet and hub data sets."""

    response_column: str = "response"
    """The responses' column."""

    messages_column: str | None = None  # None: the data has prompts and responses
    """Replaces these two: a column with lists of messages, each with a `role` and a `content`."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (
            (self.prompt_column, self.response_column)
            if self.messages_column is None
            else (self.messages_column,)
        )

    def violations(self) -> dict[str, bool]:
        prompt, response, messages = self.prompt_column, self.response_column, self.messages_column
        files = (*(self.train_files or ()), *(self.eval_files or ()))
        csv = [
            file for file in files if file.lower().removesuffix(".gz").endswith((".csv", ".tsv"))
        ]
        both = messages is not None and (prompt, response) != ("prompt", "response")
        return {
            **super().violations(),
            f"prompt_column and response_column must differ, but both are {prompt!r}": (
                prompt == response
            ),
            "messages_column goes without prompt_column and response_column; give one or the"
            " others": both,
            "messages_column needs a data set with messages, which python-docs has not": bool(
                messages and self.builtin
            ),
            "messages_column needs files that can hold lists, such as jsonl, which"
            f" {csv[:1]} can't": bool(messages and csv),
        }


class SFTWorkload(ModelWorkload, extra="forbid"):
    task: Literal["sft"]
    dataset: ResponseDataset
    sequence_length: SequenceLength
    packing: bool = False
    """Puts several examples into one sequence."""

    def violations(self) -> dict[str, bool]:
        untokenized = self.tokenizer is None and self.model.name_or_path is None
        untemplated = self.tokenizer is not None and self.tokenizer.name_or_path is None
        return {
            "a model from_config has no tokenizer: give workload.tokenizer, such as"
            " {train_bpe: 1024}": untokenized,
            "dataset.messages_column needs a tokenizer that has a chat template: give"
            " tokenizer.name_or_path, or prompt_column and response_column": (
                untemplated and self.dataset.messages_column is not None
            ),
        }


class SFT(ExampleTask):
    settings = SFTWorkload
    workload: SFTWorkload
    qualities = (PERPLEXITY,)
    card = Card("text-generation", "Text Generation", "a language model that responds to prompts")
    model_kind = CAUSAL_LM
    _loss: "TokenLoss"  # the loss for the model that `begin` was given
    _attention: str  # that model's attention

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports
        from carbonopt.train.data import chat, responses, templates, tokens
        from carbonopt.train.models import model, weights

        workload, length, kind = self.workload, self.workload.sequence_length, self.model_kind
        with as_bad_input("dataset"):
            train, evaluation = _chats(workload.dataset)
        with as_bad_input("tokenizer"):
            tokenizer = tokens.make_encoder(
                workload, chat.texts_of(train), chat.texts_of(evaluation)
            ).tokenizer
            plain = tokenizer.chat_template is None
            if plain and not all(each.are_texts for each in (*train, *evaluation)):
                raise BadInput(
                    "a data set of messages needs a tokenizer that has a chat template, but this"
                    " one has none; give another one, or prompts and responses that are text."
                )
            kept = responses.keep(train, tokenizer, plain, length, "training")
            eval_kept = responses.keep(evaluation, tokenizer, plain, length, "evaluation")
        with as_bad_input("model"):
            config = model.model_config(kind, workload, tokenizer)
            self._check(space, config)
            weights.check_weights(kind, workload.model, config)
            parameters = model.parameter_count(kind, config, workload.model.trust_remote_code)
        packed_to = length if workload.packing else None
        rows = responses.save_responses(folder.root / "train", kept.examples, packed_to)
        eval_rows = responses.save_responses(folder.root / "eval", eval_kept.examples)
        tokens.save_tokenizer(tokenizer, workload, folder)
        model.save_config(config, folder, workload.model)
        dated = "" if plain else templates.note(tokenizer)
        packed = (
            f"{len(kept.examples)} training examples were packed into {rows} rows."
            if packed_to
            else ""
        )
        return Prepared(
            fingerprint=fingerprint,
            train_examples=rows,
            eval_examples=eval_rows,
            train_tokens=kept.tokens,
            eval_tokens=eval_kept.response_tokens,
            vocab_size=len(tokenizer),
            model_parameters=parameters,
            notes=tuple(note for note in (kept.note, eval_kept.note, packed, dated) if note),
            versions=imports.package_versions(),
            eval_batch_size_per_gpu=self.eval_batch_size_here(config, eval_rows),
        )

    def _check(self, space: Space, config: "PreTrainedConfig") -> None:
        """Check that the model can have each value of the dimensions, and packing if it is on.

        Raises:
            BadInput: if it can't.
        """
        from carbonopt.train.models import model
        from carbonopt.train.models.model_check import check_output_layer
        from carbonopt.train.models.packing_check import check_packing

        trusted = self.workload.model.trust_remote_code
        for layer in values_of(space["output_layer"]):
            check_output_layer(self.model_kind, config, str(layer), trusted)
        if self.workload.packing:
            dropouts = [float(value) for value in values_of(space["dropout"])]
            changed = model.with_dropout(config, max(dropouts, default=None))
            for attention in values_of(space["attention_implementation"]) or (None,):
                check_packing(
                    self.model_kind, changed, None if attention is None else str(attention), trusted
                )

    def examples(self, folder: PreparedFolder, part: Part) -> "Responses":
        from carbonopt.train.data.responses import Responses

        return Responses(folder.root / part, self.workload.sequence_length)

    def begin(self, model: Any, compiled: bool) -> None:
        from carbonopt.train.token_loss import TokenLoss

        self._loss = TokenLoss(model, compiled)
        self._attention = model.config._attn_implementation

    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        inputs, targets = self._divided(batch)
        self._loss.expect(targets)
        return self._loss.sum(model(**inputs).logits, targets)

    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the negative log-likelihood in nats, and the number of target tokens."""
        import torch

        from carbonopt.train.data.packing import IGNORED

        inputs, targets = self._divided(batch)
        nll = self._loss.of_each(model(**inputs).logits, targets).double().sum()
        return torch.stack([nll, (targets != IGNORED).sum()])

    def _divided(self, batch: dict[str, "torch.Tensor"]) -> tuple[dict[str, Any], "torch.Tensor"]:
        """Return the arguments of the model's forward pass, and the targets.

        The cache is off: with one, models take the positions of a packed row for those of one
        example.
        """
        from carbonopt.train.models import varlen_attention

        arguments: dict[str, Any] = {**batch, "use_cache": False}
        targets = arguments.pop("targets")
        starts = arguments.pop("example_starts", None)
        if starts is not None and self._attention == varlen_attention.VARLEN:
            length = batch["input_ids"].shape[1]
            arguments["cu_seq_lens_q"] = varlen_attention.sequence_ends(starts, length)
        return arguments, targets

    def evaluation(self, sums: list[float]) -> Evaluation:
        return Evaluation(sums[0], round(sums[1]))

    def eval_batch_size(
        self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT
    ) -> int:
        from carbonopt.train.data import packing

        vocab_size, length = config.get_text_config().vocab_size, self.workload.sequence_length
        return packing.batch_size_that_fits(memory_bytes, vocab_size, length, examples)

    @property
    def masks_attention(self) -> bool:
        return self.workload.packing

    def expected_config(self) -> "PreTrainedConfig":
        from carbonopt.train.data import chat, tokens
        from carbonopt.train.models import model

        tokenizer = tokens.expected_tokenizer(
            self.workload, lambda: map(chat.texts_of, _chats(self.workload.dataset))
        )
        return model.model_config(self.model_kind, self.workload, tokenizer)

    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        import torch

        length = self.workload.sequence_length
        names = ["input_ids", "targets"] + ["position_ids"] * self.workload.packing
        batch = {name: torch.zeros(size, length, dtype=torch.int64) for name in names}
        if self.workload.packing:
            batch["example_starts"] = torch.tensor([[0, length]] * size, dtype=torch.int32)
        return batch


def _chats(dataset: ResponseDataset) -> tuple[list["Chat"], list["Chat"]]:
    """Return the chats for training and those for evaluation."""
    from carbonopt.train.data import chat, rows

    prompt, response, messages = (
        dataset.prompt_column,
        dataset.response_column,
        dataset.messages_column,
    )
    if dataset.builtin is not None:
        split = rows.split_rows(_python_docs(prompt, response), dataset.eval_fraction)
    else:
        split = rows.read_rows(dataset, dataset.columns)
    if messages is not None:
        train, evaluation = ([chat.chat_messages(row, messages) for row in part] for part in split)
    else:
        train, evaluation = (
            [chat.prompt_and_response(row, prompt, response) for row in part] for part in split
        )
    return train, evaluation


def _python_docs(prompt_column: str, response_column: str) -> list[Any]:
    """Return rows that ask for a topic of Python's help() and respond with the text's beginning.

    The topics are in the order of their names.
    """
    from pydoc_data.topics import topics

    beginnings = {
        name: "\n\n".join(topics[name].split("\n\n")[:_PARAGRAPHS]) for name in sorted(topics)
    }
    return [
        Row(
            {
                prompt_column: f"What does Python's help say about {name!r}?\n\n",
                response_column: text,
            },
            name,
        )
        for name, text in beginnings.items()
    ]
