"""Texts with a class label, as rows of tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.workload_settings import ModelWorkload
from carbonopt.train.data.examples import Examples, Rows
from carbonopt.train.data.labels import Contents, Labelled, Labels, filled_text
from carbonopt.train.data.packing import Indices, Tokens
from carbonopt.train.data.rows import Row
from carbonopt.train.data.tokens import (
    kept_end,
    make_encoder,
    padding_id,
    save_tokenizer,
    token_rows,
    with_padding,
)
from carbonopt.train.failures import as_bad_input
from carbonopt.train.models import model as models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from carbonopt.train.models.model_kind import ModelKind

# Models whose result for a text depends on how much padding follows it: XLNet's head reads the last
# position, and FNet has no attention mask.
_READING_PADDING = ("fnet", "xlnet")


class TextExamples(Examples):
    """Labelled texts, whose tokens are stored as in `Rows`."""

    def __init__(self, tokens: Tokens, starts: Indices, labels: Labels, padding: Indices) -> None:
        self._rows, self._labels, self._padding = Rows(tokens, starts), labels, int(padding[0])
        super().__init__(np.ones(len(labels), np.int64), self._rows.lengths)

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return a batch of the model's inputs with their labels and weights.

        `input_ids` and `attention_mask` are int64 [batch, longest], `labels` int64 [batch] and
        `weights` float32 [batch]. A filler is the first text with a weight of 0, since an
        encoder-decoder needs an end token in every row.
        """
        tokens, mask = self._rows.padded(
            np.maximum(indices, 0), self._padding, longest=int(self._rows.lengths.max())
        )
        labels = torch.from_numpy(self._labels[indices])
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": labels,
            "weights": self.weights_of(indices),
        }


def read_texts(
    kind: "ModelKind",
    workload: ModelWorkload,
    labelled: Labelled,
    column: str,
    folder: PreparedFolder,
) -> Contents:
    """Return at most `sequence_length` tokens of each text, and save the tokenizer in `folder`.

    Raises:
        BadInput: if a text is empty, all texts are the same, the model or the tokenizer can't be
            loaded, or they don't go with each other.
    """
    longest = workload.sequence_length
    assert longest is not None
    parts = {"training": labelled.train.rows, "evaluation": labelled.evaluation.rows}
    texts = dict(zip(parts, texts_of(labelled, column), strict=True))
    arrays, notes = {}, []
    with as_bad_input("tokenizer"):
        tokenizer = make_encoder(workload, *texts.values()).tokenizer
        tokenizer = with_padding(tokenizer, workload.model)
        for part, labels in zip(
            texts, (labelled.train.labels, labelled.evaluation.labels), strict=True
        ):
            rows, truncated = token_rows(tokenizer, texts[part], longest)
            _check_tokens(rows, parts[part], part)
            if truncated:
                share = f"{truncated:,} of {count_text(len(rows), 'text')}"
                notes.append(
                    f"Of the {part} data {share} had more than {longest} tokens, of which the"
                    f" {kept_end(tokenizer)} were kept."
                )
            arrays[part] = {**Rows.of(rows)._asdict(), "labels": labels}
    with as_bad_input("model"):
        config = models.model_config(kind, workload, tokenizer, **labelled.head)
        used = np.unique(np.concatenate([kept["tokens"] for kept in arrays.values()]))
        padding = padding_id(tokenizer, config, used.tolist())
        # Decoders use the padding token to find a text's last token.
        config.get_text_config().pad_token_id = padding
    for kept in arrays.values():
        kept["padding"] = np.array([padding])
    if config.model_type in _READING_PADDING:
        raise BadInput(
            f"{config.model_type} can't classify texts of different lengths in one batch; use"
            " another model."
        )
    if config.is_encoder_decoder:
        _check_ends(arrays, config)
    save_tokenizer(tokenizer, workload, folder)
    train = arrays["training"]
    return Contents(
        config, train, arrays["evaluation"], tuple(notes), len(train["tokens"]), len(tokenizer)
    )


def _check_tokens(tokens_of: Sequence[list[int]], rows: Sequence[Row], part: str) -> None:
    """Check that every text has a token, and that the training texts are not all the same.

    Args:
        tokens_of: the texts' tokens.
        rows: the rows in which the texts stand.
        part: what they are for.

    Raises:
        BadInput: if one has none, or they are.
    """
    for row, tokens in zip(rows, tokens_of, strict=True):
        if not tokens:
            raise BadInput(
                f"every text must have a token, but the tokenizer finds none in that of"
                f" {row.where}."
            )
    first = tokens_of[0]
    if part == "training" and len(rows) > 1 and all(tokens == first for tokens in tokens_of):
        raise BadInput(
            f"training texts must differ, but all {len(rows)} are the same as the model sees them."
        )


def texts_of(labelled: Labelled, column: str) -> tuple[list[str], list[str]]:
    """Return the texts for training and those for evaluation.

    Raises:
        BadInput: if a text is empty.
    """
    train, evaluation = (
        [filled_text(row, column) for row in part.rows]
        for part in (labelled.train, labelled.evaluation)
    )
    return train, evaluation


def _check_ends(arrays: dict[str, dict[str, np.ndarray]], config: "PreTrainedConfig") -> None:
    """Check that every text has one end token, since an encoder-decoder's head reads its place.

    Raises:
        BadInput: if a text has none or several.
    """
    for part in arrays.values():
        ends = np.add.reduceat(
            part["tokens"] == config.eos_token_id, part["starts"][:-1], dtype=np.int64
        )
        if (ends != 1).any():
            must = f"{config.model_type} needs one end-of-text token in every text"
            raise BadInput(
                f"{must}, but its tokenizer makes {int(ends[ends != 1][0])}; use the model's own"
                " tokenizer."
            )


def check_positions(model: "PreTrainedModel", longest: int) -> None:
    """Check that the model has a position for each token of the longest text.

    Only models that number positions from their padding token on, as RoBERTa does, are checked.

    Raises:
        BadInput: if the text has more tokens than there are positions left.
    """
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and isinstance(module, torch.nn.Embedding)
            and module.padding_idx is not None
        ):
            positions = module.num_embeddings - module.padding_idx - 1
            if longest > positions:
                rule = (
                    "workload.sequence_length must be at most the positions that the model has for"
                    " tokens"
                )
                raise BadInput(f"{rule}, but got {longest} and {positions}.")
