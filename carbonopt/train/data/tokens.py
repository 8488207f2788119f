"""Tokenizers: the model's own, one trained on the text, or one token for a character or byte."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from carbonopt.core.errors import BadInput
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.workload_settings import Model, ModelWorkload
from carbonopt.train.data.packing import Tokens, stored
from carbonopt.train.models.model import copy_code, unloadable

END_OF_TEXT, UNKNOWN, PADDING = "<|endoftext|>", "<|unknown|>", "<|padding|>"

_DOCUMENTS_AT_ONCE = 1000  # number of documents tokenized together
# From this share of unknown tokens on, the tokenizer is not one for the text. It is looked for in
# so many characters of a text.
_MOST_UNKNOWN, _CHARACTERS_READ = 0.5, 2000
_FEWEST_JUDGED = 20  # tokens; fewer may be unknown by chance
# A text of so many of a tokenizer's longest words is tokenized so often, to see whether it draws.
_LONGEST_WORDS, _DRAWS = 50, 8


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer with a fast way to encode many documents.

    The tokenizer has Hugging Face's form and is saved with the data.
    """

    tokenizer: PreTrainedTokenizerBase
    # Returns each document's token ids, without special tokens.
    rows: Callable[[list[str]], Iterable[np.ndarray]]

    def unknown_share(self, tokens: Tokens) -> float:
        """Return the share of tokens that stand for what the tokenizer doesn't know.

        These are all one token, which is easily predicted.
        """
        unknown = self.tokenizer.unk_token_id
        return (
            0.0
            if unknown in (None, self.tokenizer.eos_token_id)
            else float(np.mean(tokens == unknown))
        )

    def encode(self, documents: list[str]) -> Tokens:
        """Return the tokens of all documents in one array.

        Where the tokenizer has an end-of-text token, it stands between documents.
        """
        end = self.tokenizer.eos_token_id
        parts: list[np.ndarray] = []
        for ids in self.rows(documents):
            if parts and end is not None:
                parts.append(np.array([end], np.uint32))
            parts.append(ids)
        return stored(np.concatenate(parts))


def make_encoder(workload: ModelWorkload, train: list[str], evaluation: list[str]) -> TextEncoder:
    """Return the workload's tokenizer with a fast encoder.

    A tokenizer that has to be learnt from text is learnt from the training text alone.

    Raises:
        BadInput: if a tokenizer can't be loaded, draws its tokens at random, or doesn't know most
            of the text.
    """
    encoder = _chosen_encoder(workload, train, evaluation)
    for part, texts in (("training", train), ("evaluation", evaluation)):
        _check_knows(encoder, texts[:_DOCUMENTS_AT_ONCE], part)
    return encoder


def _check_knows(encoder: TextEncoder, texts: list[str], part: str) -> None:
    """Refuse texts most of whose tokens stand for what the tokenizer doesn't know.

    To the model they are all alike.

    Args:
        texts: the first ones, of which the beginnings are read.
        part: what the texts are for.
    """
    unknown = encoder.tokenizer.unk_token_id
    if unknown is None or not texts:
        return
    ids = np.concatenate(list(encoder.rows([text[:_CHARACTERS_READ] for text in texts])))
    if len(ids) < _FEWEST_JUDGED:
        return
    if (share := float(np.mean(ids == unknown))) > _MOST_UNKNOWN:
        raise BadInput(
            f"the tokenizer must know the {part} texts, but {100 * share:.0f} % of their tokens are"
            f" its token for what is unknown, {encoder.tokenizer.unk_token}; give a tokenizer for"
            " this language, with all its files."
        )


def _chosen_encoder(
    workload: ModelWorkload, train: list[str], evaluation: list[str]
) -> TextEncoder:
    """Return the encoder of `make_encoder`, without a look at the tokens."""
    chosen, model = workload.tokenizer, workload.model
    if chosen is not None and chosen.kind is not None:
        return _characters(train, evaluation) if chosen.kind == "char" else _bytes()
    if chosen is not None and chosen.train_bpe is not None:
        tokenizer = _trained_bpe(train, chosen.train_bpe)
    else:
        name, revision = (
            (model.name_or_path, model.revision) if chosen is None else (chosen.name_or_path, None)
        )
        options = {"revision": revision, "trust_remote_code": model.trust_remote_code}
        with unloadable("tokenizer", str(name)):
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
        # Without the tokenizer's files, transformers makes one that has no tokens.
        if not tokenizer("any text", add_special_tokens=False)["input_ids"]:
            instead = "save it there, too (tokenizer.save_pretrained), or give workload.tokenizer"
            raise BadInput(
                f"the tokenizer of {name!r} makes no tokens of a text: its files are missing;"
                f" {instead}."
            )
        check_draws_nothing(tokenizer, f"the tokenizer of {name!r}")

    def ids(documents: list[str]) -> Iterable[np.ndarray]:
        for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            batch = documents[start : start + _DOCUMENTS_AT_ONCE]
            encoded = tokenizer(
                batch, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            yield from (np.array(document, np.uint32) for document in encoded["input_ids"])

    return TextEncoder(tokenizer, ids)


def check_draws_nothing(tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Refuse a tokenizer that draws the tokens of a text at random, as for subword regularisation.

    The evaluation would read drawn tokens, too, and whoever prepares the data again would get
    others: their figures could not be compared.

    Args:
        tokenizer: The tokenizer.
        what: What it is called in the message.

    Raises:
        BadInput: The tokenizer draws tokens.
    """
    rule = f"{what} must make the same tokens of a text each time"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if dropout := getattr(backend and backend.model, "dropout", None):
        raise BadInput(
            f"{rule}, but has a BPE dropout of {dropout:g}; set dropout of model to null in its"
            " tokenizer.json."
        )
    # Fast tokenizers keep this setting of SentencePiece's, but don't use it.
    sampling = getattr(tokenizer, "sp_model_kwargs", None) or {}
    if not tokenizer.is_fast and sampling.get("enable_sampling"):
        raise BadInput(
            f"{rule}, but has enable_sampling: true; take it out of sp_model_kwargs in its"
            " tokenizer_config.json."
        )
    # Code of the tokenizer's own may draw without a setting. The longest words can be divided into
    # tokens in the most ways.
    added = tokenizer.get_added_vocab()
    ids = {word: index for word, index in tokenizer.get_vocab().items() if word not in added}
    longest = sorted(ids, key=len)[-_LONGEST_WORDS:]
    text = tokenizer.decode([ids[word] for word in longest])
    drawn = {tuple(tokenizer(text, verbose=False)["input_ids"]) for _ in range(_DRAWS)}
    if len(drawn) > 1:
        raise BadInput(
            f"{rule}, but made {len(drawn)} different rows of tokens of one text in {_DRAWS} calls;"
            " give another one."
        )


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, workload: ModelWorkload, folder: PreparedFolder
) -> None:
    """Write the tokenizer that trials read, with its code if it brings its own."""
    tokenizer.save_pretrained(folder.tokenizer)
    if workload.model.trust_remote_code:
        given = (
            workload.model.name_or_path
            if workload.tokenizer is None
            else workload.tokenizer.name_or_path
        )
        if given is not None:
            copy_code(Path(given), folder.tokenizer)


def saved_tokenizer(
    workload: ModelWorkload, folder: PreparedFolder, **options: Any
) -> PreTrainedTokenizerBase:
    """Read the tokenizer that `save_tokenizer` wrote.

    Args:
        options: options of transformers, such as the side on which the tokenizer pads.
    """
    trusted = workload.model.trust_remote_code
    tokenizer: PreTrainedTokenizerBase
    tokenizer = AutoTokenizer.from_pretrained(
        folder.tokenizer, trust_remote_code=trusted, **options
    )
    return tokenizer


def expected_tokenizer(
    workload: ModelWorkload, texts: Callable[[], Iterable[list[str]]]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `make_encoder`, as far as it is known without text.

    Args:
        texts: returns the texts for training and for evaluation; it is called only for a tokenizer
            of characters.

    Raises:
        BadInput: as `make_encoder` does.
    """
    chosen = workload.tokenizer
    if chosen is not None and chosen.train_bpe is not None:
        return _untrained_bpe(chosen.train_bpe)
    learns = chosen is not None and chosen.kind == "char"
    return make_encoder(workload, *(texts() if learns else ([], []))).tokenizer


def with_padding(tokenizer: PreTrainedTokenizerBase, model: Model) -> PreTrainedTokenizerBase:
    """Give the tokenizer of a new model a padding token if it has none, and return it.

    The padding token is the end-of-text token if there is one, else a new one. For a pretrained
    model `padding_id` chooses one.
    """
    if tokenizer.pad_token_id is None and model.from_config is not None:
        if tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        else:
            tokenizer.add_special_tokens({"pad_token": PADDING})
    return tokenizer


def padding_id(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, used: Collection[int] = ()
) -> int:
    """Return the id that fills up shorter texts.

    If the tokenizer has no padding token, it is the model's own padding, unless that stands in a
    text: RoBERTa's kind counts positions from it. Else it is the end of text, or an id that stands
    in no text. The tokenizer gets none but the end of text: it would take the letters of another
    token out of texts.

    Args:
        tokenizer: The tokenizer, from `with_padding`.
        config: The model's configuration.
        used: The ids of the texts. Decoders take the last token that is no padding for a text's
            end, so that no text may have the padding in it.

    Raises:
        BadInput: The tokenizer has no padding token, and no id is left for it.
    """
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    text_config = config.get_text_config()
    free = set(range(text_config.vocab_size)).difference(used)
    own = getattr(text_config, "pad_token_id", None)
    if own in free:
        return int(own)
    if tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
        return int(tokenizer.eos_token_id)
    if not free:
        raise BadInput(
            "the tokenizer must have a padding or an end-of-text token, but has neither, and all"
            f" {text_config.vocab_size} ids of the model stand in texts; add a padding token"
            " (tokenizer.add_special_tokens), give the model an embedding for it"
            " (model.resize_token_embeddings), and save both."
        )
    return max(free)


def token_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], longest: int
) -> tuple[list[list[int]], int]:
    """Tokenize each text, with the special tokens that the tokenizer puts around it.

    Returns:
        Each text's tokens, at most `longest`, and how many texts were cut.
    """
    rows: list[list[int]] = []
    truncated = 0
    options = {"return_attention_mask": False, "verbose": False}
    for start in range(0, len(texts), _DOCUMENTS_AT_ONCE):
        batch = list(texts[start : start + _DOCUMENTS_AT_ONCE])
        whole = tokenizer(batch, **options)["input_ids"]
        long = [index for index, row in enumerate(whole) if len(row) > longest]
        if long:
            cut = cut_rows(tokenizer, [batch[index] for index in long], longest)
            for index, row in zip(long, cut, strict=True):
                whole[index] = row
        rows += whole
        truncated += len(long)
    return rows, truncated


def cut_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], longest: int
) -> list[list[int]]:
    """Return at most `longest` tokens of each text, the special ones around it included.

    The tokenizer forgets the length again. A fast tokenizer would keep it and, saved with the
    model, cut the texts of everybody who reads its file without transformers.
    """
    options = {"return_attention_mask": False, "verbose": False}
    rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=longest, **options)[
        "input_ids"
    ]
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()  # type: ignore[attr-defined]
    return rows


def kept_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return which tokens of a long text `cut_rows` keeps, "first" or "last"."""
    return "last" if tokenizer.truncation_side == "left" else "first"


def complete(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer what independent texts need, where it lacks it.

    This is a padding token, and an end token that it puts after each text. Whatever else the
    tokenizer puts around a text stays there. A tokenizer without an end token that puts its
    separator after each text, as BERT's does, has that for its end token.

    Raises:
        BadInput: if the tokenizer can't be made to put one there.
    """
    # A tokenizer of a few characters may not know an "a".
    letters = [word for word in tokenizer.get_vocab() if len(word) == 1 and word.isalnum()]
    before, after = special_tokens_around(tokenizer, text_target=min(letters, default="a"))
    if tokenizer.eos_token is None and after[-1:] == [tokenizer.sep_token_id]:
        tokenizer.eos_token = tokenizer.sep_token
    lacking = {"eos_token": END_OF_TEXT, "pad_token": PADDING}
    tokenizer.add_special_tokens(
        {name: token for name, token in lacking.items() if getattr(tokenizer, name) is None}
    )
    end = tokenizer.eos_token_id
    if end in after:
        return
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        kind = type(tokenizer).__name__
        raise BadInput(
            f"the tokenizer must put its end token behind each text, but {kind} doesn't; give"
            " another one."
        )
    around = {"before": before, "after": [*after, end]}
    # In a template, a token's own text may not have "$" or ":".
    special_tokens = [
        {"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)}
        for name, ids in around.items()
        if ids
    ]
    backend.post_processor = processors.TemplateProcessing(
        single=["before", "$A", "after"] if before else ["$A", "after"],
        special_tokens=special_tokens,
    )


def special_tokens_around(
    tokenizer: PreTrainedTokenizerBase, **text: str
) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer itself puts before a text, and those after it.

    Args:
        tokenizer: The tokenizer.
        text: The text as the tokenizer's argument, `text` or `text_target`.
    """
    plain = tokenizer(**text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(**text)["input_ids"]
    begins = next(
        start for start in range(len(whole) + 1) if whole[start : start + len(plain)] == plain
    )
    return whole[:begins], whole[begins + len(plain) :]


def _trained_bpe(train: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE like GPT-2's.

    It has at most `vocab_size` tokens, those of the bytes and the end of text included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(train, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _untrained_bpe(vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a stand-in for `_trained_bpe`'s tokenizer, as far as it is known without the text.

    It has the same number of tokens and the same special token.
    """
    vocabulary = {str(index): index for index in range(1, vocab_size)} | {END_OF_TEXT: 0}
    # This model accepts any text.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _characters(train: list[str], evaluation: list[str]) -> TextEncoder:
    """Make a tokenizer with one token for each distinct character of the training text.

    Tokens are in code point order. If the evaluation text has other characters, there is one more
    token for what is unknown, and none otherwise: who counts 65 characters in Tiny Shakespeare
    should find no vocabulary of 66.
    """
    known = sorted(set().union(*train))
    code_points = np.array([ord(character) for character in known], np.uint32)
    special_tokens = {"unk_token": UNKNOWN} if set().union(*evaluation) - set(known) else {}
    vocabulary = {
        character: index for index, character in enumerate([*known, *special_tokens.values()])
    }

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()

    # This is hundreds of times faster than encoding with the tokenizer.
    def ids(documents: list[str]) -> Iterable[np.ndarray]:
        for document in documents:
            points = np.frombuffer(document.encode("utf-32-le", "surrogatepass"), np.uint32)
            index = np.minimum(np.searchsorted(code_points, points), len(known) - 1)
            yield np.where(code_points[index] == points, index, len(known))

    return TextEncoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens), ids)


def _bytes() -> TextEncoder:
    """Make a tokenizer with 256 tokens, whose ids are the bytes that they stand for."""
    tokenizer = Tokenizer(
        models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()

    def ids(documents: list[str]) -> Iterable[np.ndarray]:
        return (np.frombuffer(document.encode("utf-8"), np.uint8) for document in documents)

    return TextEncoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ids)
