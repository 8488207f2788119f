"""The task of training sequence-to-sequence models, such as T5, to map source to target texts.

They are judged by the perplexity of the target texts, or by matching what the model generates.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.dimensions import LARGEST_INT
from carbonopt.core.errors import BadInput
from carbonopt.core.extras import check_installed
from carbonopt.core.quality import CANONICAL_MATCH, EXACT_MATCH, EXECUTION_MATCH, PERPLEXITY
from carbonopt.core.trial import Prediction
from carbonopt.spec.base_settings import Name
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, may_be_other_than, values_of
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import Dataset, ModelWorkload, SequenceLength
from carbonopt.train.failures import as_bad_input
from carbonopt.train.matches import CanonicalMatch, ExactMatch, ExecutionMatch, Match, one_spaced
from carbonopt.train.models.model_kind import ModelKind
from carbonopt.train.tasks.task import Card, Evaluation, TrialRun
from carbonopt.train.tasks.trainer_task import ExampleTask, Part

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from carbonopt.train.data.source_target import Encoded, SourceTarget, SourceTargetExamples
    from carbonopt.train.training_loop import TrialTrainer

# Models to be trained in bfloat16: in float16, which lacks its range, activations become infinite
# (transformers #5651, #9295).
_OVERFLOW_IN_FP16 = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
_PREDICTIONS = 12  # number of predictions shown in the report
_SHOWN_CHARACTERS = 300  # longest text of a shown prediction


class Seq2SeqDataset(Dataset, extra="forbid"):
    source_column: Name = "source"
    """The sources' column in jsonl, json, csv, parquet and hub data sets."""

    target_column: Name = "target"
    """The targets' column."""

    database: Name | None = None
    """The SQLite file on which `execution_match` runs queries."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.source_column, self.target_column)

    def violations(self) -> dict[str, bool]:
        same = self.source_column == self.target_column
        return {
            **super().violations(),
            "builtin: python-docs has no sources and targets; give train_files or name_or_path": (
                bool(self.builtin)
            ),
            f"source_column and target_column must differ, but both are {self.source_column!r}": (
                same
            ),
        }


class Seq2SeqWorkload(ModelWorkload, extra="forbid"):
    task: Literal["seq2seq"] = "seq2seq"
    dataset: Seq2SeqDataset
    sequence_length: SequenceLength
    """The most tokens of a source."""

    max_target_length: SequenceLength | None = None
    """Maximum tokens of a target and of a generated text. Left out: `sequence_length`, which is the
    maximum of a source."""

    source_prefix: str | None = None
    """A text put before each source, such as `"translate to SQL: "`."""

    def violations(self) -> dict[str, bool]:
        untokenized = self.tokenizer is None and self.model.name_or_path is None
        return {
            "a model from_config has no tokenizer: give workload.tokenizer, such as {kind: char}": (
                untokenized
            )
        }


class Seq2Seq(ExampleTask):
    settings = Seq2SeqWorkload
    workload: Seq2SeqWorkload
    qualities = (PERPLEXITY, EXACT_MATCH, CANONICAL_MATCH, EXECUTION_MATCH)
    card = Card("text-generation", "Text Generation", "a sequence-to-sequence model")
    model_kind = ModelKind(
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "SEQ_2_SEQ_LM",
        "sequence-to-sequence model",
    )
    masks_attention = True

    @property
    def _target_length(self) -> int:
        return self.workload.max_target_length or self.workload.sequence_length

    def check(self, space: Space, launch: Launch) -> None:
        if self.quality is CANONICAL_MATCH:
            check_installed("sqlglot", "sql", f"target: {CANONICAL_MATCH.name}")
        if self.quality is EXECUTION_MATCH:
            _ = self._match

    @cached_property
    def _match(self) -> Match:
        """The matcher that judges generated texts.

        Raises:
            BadInput: if execution_match has no database, or it can't be read.
        """
        if self.quality is EXECUTION_MATCH:
            if self.workload.dataset.database is None:
                raise BadInput(
                    "target.execution_match needs workload.dataset.database, an SQLite file; give"
                    " one."
                )
            return ExecutionMatch(self.workload.dataset.database)
        return {EXACT_MATCH: ExactMatch, CANONICAL_MATCH: CanonicalMatch}[self.quality]()

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports
        from carbonopt.train.data import source_target, tokens
        from carbonopt.train.models import generation_check, model, weights

        workload, kind, dataset = self.workload, self.model_kind, self.workload.dataset
        if may_be_other_than(space["output_layer"], "standard"):
            raise BadInput(
                "output_layer must be standard for the task seq2seq, which has no fused one; leave"
                " it out."
            )
        with as_bad_input("dataset"):
            columns = (dataset.source_column, dataset.target_column)
            split = source_target.read_pairs(dataset, *columns, workload.source_prefix or "")
        with as_bad_input("tokenizer"):
            texts = (
                [text for pair in part for text in pair[:2]]
                for part in (split.train, split.evaluation)
            )
            tokenizer = tokens.make_encoder(workload, *texts).tokenizer
            tokens.complete(tokenizer)
            self._check_prefix(tokenizer)
            lengths = workload.sequence_length, self._target_length
            train, evaluation = (
                source_target.encode(tokenizer, part, *lengths)
                for part in (split.train, split.evaluation)
            )
        with as_bad_input("model"):
            config = model.model_config(kind, workload, tokenizer)
            self._check_config(config, tokenizer, space)
            weights.check_weights(kind, workload.model, config)
            if self.quality is not PERPLEXITY:
                options = {**generation_check.GREEDY, "tokenizer": tokenizer}
                generation_check.check_generation(kind, workload.model, config, tokenizer, options)
            parameters = model.parameter_count(kind, config, workload.model.trust_remote_code)
        notes = [
            *split.notes,
            *self._cut_notes(train, evaluation),
            *_repeat_notes(split.train, split.evaluation),
        ]
        notes += self._match_notes(split.evaluation, evaluation, tokenizer)
        ids = (tokenizer.pad_token_id, config.decoder_start_token_id)
        source_target.save_pairs(folder.root / "train", split.train, train, *ids)
        source_target.save_pairs(folder.root / "eval", split.evaluation, evaluation, *ids)
        tokens.save_tokenizer(tokenizer, workload, folder)
        model.save_config(config, folder, workload.model)
        return Prepared(
            fingerprint=fingerprint,
            train_examples=len(split.train),
            eval_examples=len(split.evaluation),
            train_tokens=sum(map(len, [*train.sources, *train.targets])),
            eval_tokens=sum(map(len, evaluation.targets)),
            vocab_size=len(tokenizer),
            model_parameters=parameters,
            notes=tuple(notes),
            versions=imports.package_versions() | self._versions(),
            eval_batch_size_per_gpu=self.eval_batch_size_here(config, len(split.evaluation)),
        )

    def _check_prefix(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Check that the prefix leaves room for a token of a source.

        Raises:
            BadInput: if it doesn't.
        """
        prefix, length = self.workload.source_prefix, self.workload.sequence_length
        # The end token that is counted with the prefix is the one that ends the source.
        if prefix and (count := len(tokenizer(prefix)["input_ids"])) >= length:
            rule = (
                f"workload.source_prefix must leave room for a source in sequence_length: {length}"
            )
            raise BadInput(
                f"{rule}, but has {count} tokens with the end token; make it shorter, or the length"
                " larger."
            )

    def _versions(self) -> dict[str, str]:
        """Return versions of packages that decide the quality of this task alone."""
        from importlib.metadata import version

        return {"sqlglot": version("sqlglot")} if self.quality is CANONICAL_MATCH else {}

    def _check_config(
        self, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase", space: Space
    ) -> None:
        """Check that the model can be trained, and complete a configuration from the study file.

        Raises:
            BadInput: if the model can't be trained with this tokenizer, these lengths or precision.
        """
        model_type, written = config.model_type, self.workload.model.from_config
        if model_type in _OVERFLOW_IN_FP16 and "fp16" in values_of(space["precision"]):
            why = "its activations exceed float16's range and become infinite"
            raise BadInput(
                f"precision must be bf16 or fp32 for {model_type}, but got fp16: {why}; use bf16."
            )
        if written is not None:  # some model types' defaults belong to another tokenizer
            defaults = {
                "decoder_start_token_id": tokenizer.pad_token_id,
                "forced_eos_token_id": None,
            }
            for name, default in defaults.items():
                if name not in written:
                    setattr(config, name, default)
        if not isinstance(getattr(config, "decoder_start_token_id", None), int):
            rule = (
                "the model's configuration must have decoder_start_token_id, from which its targets"
                " are predicted"
            )
            raise BadInput(f"{rule}, but that of {model_type} has none; give a model that has one.")
        ends = (
            config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        )
        if tokenizer.eos_token_id not in ends:
            rule = (
                "the model's eos_token_id must be the tokenizer's, or no text that it generates"
                " would end"
            )
            raise BadInput(
                f"{rule}, but got {config.eos_token_id} and {tokenizer.eos_token_id}; use its own"
                " tokenizer."
            )
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and 0 < positions < self._target_length:
            rule = "workload.max_target_length must be at most the model's number of positions"
            raise BadInput(f"{rule}, but got {self._target_length} and {positions}.")

    def _cut_notes(self, train: "Encoded", evaluation: "Encoded") -> list[str]:
        notes = []
        for name, encoded in (("training", train), ("evaluation", evaluation)):
            length = self.workload.sequence_length
            for what, cut, end, most in (
                ("sources", encoded.cut_sources, encoded.kept_end, length),
                ("targets", len(encoded.cut_targets), "first", self._target_length),
            ):
                if cut:
                    notes.append(
                        f"{cut} of {len(encoded.sources)} {name} {what} were cut to their {end}"
                        f" {most} tokens."
                    )
        return notes

    def _match_notes(
        self,
        expected: "Sequence[SourceTarget]",
        encoded: "Encoded",
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[str]:
        """Return a note on expected texts that no generated text can match, if there are any.

        Raises:
            BadInput: if none of the texts can be matched, or the database refuses a query.
        """
        if self.quality is PERPLEXITY:
            return []
        if isinstance(self._match, ExecutionMatch):
            self._match.database.check()
        problems = {
            index: why
            for index, pair in enumerate(expected)
            if (why := self._match.problem(pair.target))
        }
        if problems and self.quality is EXECUTION_MATCH:
            index, why = next(iter(problems.items()))
            rule = "each query of the evaluation rows must run on workload.dataset.database"
            raise BadInput(f"{rule}, but that of {expected[index].where} doesn't: {why}.")
        if isinstance(self._match, ExecutionMatch):
            return _empty_notes(self._match, [pair.target for pair in expected])
        if self.quality is EXACT_MATCH:
            written = tokenizer.batch_decode(
                encoded.targets, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for index, text in enumerate(written):
                if not self._match.matches(expected[index].target, text):
                    cut = index in encoded.cut_targets
                    problems[index] = (
                        "it is cut"
                        if cut
                        else "the tokenizer has no tokens for some of its characters"
                    )
        if not problems:
            return []
        index, why = next(iter(problems.items()))
        sentence = f"{len(problems)} of {len(expected)} evaluation targets can't be matched"
        sentence += f"; of the first, {expected[index].where}: {why}"
        if len(problems) == len(expected):
            raise BadInput(
                "the evaluation targets must be such that a generated text can match them, but"
                f" {sentence}."
            )
        return [f"{sentence}."]

    def eval_batch_size(
        self, config: "PreTrainedConfig", memory_bytes: int, examples: int = LARGEST_INT
    ) -> int:
        """Choose the batch size as for language models, by a source's and a target's tokens."""
        from carbonopt.train.data import packing

        vocab_size, length = (
            config.get_text_config().vocab_size,
            self.workload.sequence_length + self._target_length,
        )
        return packing.batch_size_that_fits(memory_bytes, vocab_size, length, examples)

    def examples(self, folder: PreparedFolder, part: Part) -> "SourceTargetExamples":
        from carbonopt.train.data.source_target import SourceTargetExamples

        return SourceTargetExamples(folder.root / part)

    def loss_sum(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        return self._nll(model, batch, "sum")

    def sums(self, model: Any, batch: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the negative log-likelihood in nats, and the number of target tokens."""
        import torch

        from carbonopt.train.data.packing import IGNORED

        nll = self._nll(model, batch, "none").double().sum()
        return torch.stack([nll, (batch["labels"] != IGNORED).sum().double()])

    def expected_config(self) -> "PreTrainedConfig":
        from carbonopt.train.data import source_target, tokens
        from carbonopt.train.models import model

        workload, dataset = self.workload, self.workload.dataset

        def texts() -> Iterator[list[str]]:
            columns = (dataset.source_column, dataset.target_column)
            split = source_target.read_pairs(dataset, *columns, workload.source_prefix or "")
            return (
                [text for pair in part for text in pair[:2]]
                for part in (split.train, split.evaluation)
            )

        tokenizer = tokens.expected_tokenizer(workload, texts)
        tokens.complete(tokenizer)
        return model.model_config(self.model_kind, workload, tokenizer)

    def largest_batch(self, config: "PreTrainedConfig", size: int) -> dict[str, "torch.Tensor"]:
        import torch

        from carbonopt.train.data.examples import padded_length

        source, target = (
            torch.zeros(size, padded_length(length), dtype=torch.int64)
            for length in (self.workload.sequence_length, self._target_length)
        )
        return {
            "input_ids": source,
            "attention_mask": source,
            "decoder_input_ids": target,
            "labels": target,
        }

    def _nll(self, model: Any, batch: dict[str, "torch.Tensor"], reduction: str) -> "torch.Tensor":
        from carbonopt.train.token_loss import token_nll

        read = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
        return token_nll(model(**read, use_cache=False).logits, batch["labels"], reduction)

    def evaluation(self, sums: list[float]) -> Evaluation:
        return Evaluation(sums[0], round(sums[1]))

    def evaluation_tokens(self, examples: int) -> int | None:
        return None  # texts are generated, too

    def evaluate(self, run: TrialRun, trainer: "TrialTrainer") -> Evaluation:
        """Evaluate perplexity, and matches of generated texts if the quality is a match.

        Perplexity is over all targets; for a match, texts are generated for all sources, and
        perplexity is reported beside it. At the trial's end there are also some predictions,
        whatever the quality.
        """
        from carbonopt.train import ranks
        from carbonopt.train.data.source_target import open_texts
        from carbonopt.train.generation import generated_texts

        evaluation = super().evaluate(run, trainer)
        examples, ends = (
            self.examples(run.folder, "eval"),
            trainer.state.global_step >= run.total_steps,
        )
        shown = _spread(len(examples)) if ends else []
        by_match = self.quality is not PERPLEXITY
        if not by_match and not ends:
            return evaluation
        import numpy as np

        indices = examples.order if by_match else np.array(shown, np.int64)
        generated = generated_texts(run, trainer, examples, indices, self._target_length)
        texts = open_texts(run.folder.root / "eval")
        parts = ranks.gathered({index: generated[index] for index in shown if index in generated})
        said = {index: text for part in parts for index, text in part.items()}
        predictions = tuple(_prediction(*texts[index], said[index]) for index in shown)
        if not by_match:
            return Evaluation(evaluation.sum, evaluation.count, predictions=predictions)
        matches = [
            float(sum(match.matches(texts[index][1], text) for index, text in generated.items()))
            for match in (self._match, ExactMatch())
        ]
        matched, exact = ranks.summed(matches)
        others = {PERPLEXITY.name: PERPLEXITY.value(evaluation.sum, evaluation.count)}
        if self.quality is not EXACT_MATCH:
            others[EXACT_MATCH.name] = exact / len(examples)
        return Evaluation(matched, len(examples), others, predictions)


def _empty_notes(match: ExecutionMatch, queries: Sequence[str]) -> list[str]:
    """Return a note on expected queries without rows, if there are any."""
    empty = sum(match.finds_nothing(query) for query in queries)
    of = f"{empty} of {len(queries)} evaluation queries find no rows"
    return [f"{of}: every query that finds none matches them."] if empty else []


def _repeat_notes(
    train: "Sequence[SourceTarget]", evaluation: "Sequence[SourceTarget]"
) -> list[str]:
    """Return a note on evaluation targets that training rows have, too.

    After a random split of questions with few different answers, all of them can be known by heart.
    """
    known = {one_spaced(pair.target) for pair in train}
    repeated = sum(one_spaced(pair.target) in known for pair in evaluation)
    of = f"{repeated} of {len(evaluation)} evaluation targets"
    return (
        [f"{of} are also targets of training rows: what is matched there may be known by heart."]
        if repeated
        else []
    )


def _spread(count: int) -> list[int]:
    """Return at most _PREDICTIONS indices, evenly spread over the evaluation rows."""
    last, steps = count - 1, min(_PREDICTIONS, count) - 1
    return [round(last * step / max(steps, 1)) for step in range(steps + 1)]


def _prediction(source: str, expected: str, predicted: str) -> Prediction:
    return Prediction(source=_shown(source), expected=_shown(expected), predicted=_shown(predicted))


def _shown(text: str) -> str:
    plain = "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in one_spaced(text)
    )
    return plain if len(plain) <= _SHOWN_CHARACTERS else f"{plain[: _SHOWN_CHARACTERS - 1]}…"
