"""Text to token ids: the model's own tokenizer, one trained on the text, or one token a character or byte."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from carbonopt.core.config import ModelWorkload
from carbonopt.core.errors import BadInput
from carbonopt.train.data.packing import Tokens
from carbonopt.train.model import unloadable

END_OF_TEXT, UNKNOWN, PADDING = "<|endoftext|>", "<|unknown|>", "<|padding|>"

_DOCUMENTS_AT_ONCE = 1000


@dataclass(frozen=True)
class Encoder:
    """A tokenizer in Hugging Face's form, to be saved with the data, and the way to encode many documents."""

    tokenizer: PreTrainedTokenizerBase
    rows: Callable[[list[str]], Iterable[np.ndarray]]  # each document's token ids, without special tokens

    def unknown_share(self, tokens: Tokens) -> float:
        """Of tokens that stand for whatever the tokenizer doesn't know, which are as one and easily predicted."""
        unknown = self.tokenizer.unk_token_id
        return 0.0 if unknown in (None, self.tokenizer.eos_token_id) else float(np.mean(tokens == unknown))

    def encode(self, documents: list[str]) -> Tokens:
        """All documents in one array, with the end-of-text token between two of them where the tokenizer has one."""
        dtype = np.uint16 if len(self.tokenizer) <= 2**16 else np.uint32
        end = self.tokenizer.eos_token_id
        parts: list[np.ndarray] = []
        for ids in self.rows(documents):
            if parts and end is not None:
                parts.append(np.array([end], dtype))
            parts.append(ids.astype(dtype))
        return np.concatenate(parts)


def make_encoder(workload: ModelWorkload, train: list[str], evaluation: list[str]) -> Encoder:
    """The workload's tokenizer; what has to be learnt from text is learnt from the training text alone. Raises BadInput
    if a tokenizer can't be loaded."""
    chosen, model = workload.tokenizer, workload.model
    if chosen is not None and chosen.kind is not None:
        return _characters(train, evaluation) if chosen.kind == "char" else _bytes()
    if chosen is not None and chosen.train_bpe is not None:
        tokenizer = _trained_bpe(train, chosen.train_bpe)
    else:
        name, revision = (model.name_or_path, model.revision) if chosen is None else (chosen.name_or_path, None)
        options = {"revision": revision, "trust_remote_code": model.trust_remote_code}
        with unloadable("tokenizer", str(name)):
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if not tokenizer("any text", add_special_tokens=False)["input_ids"]:  # what transformers makes of no files
            instead = "save it there, too (tokenizer.save_pretrained), or give workload.tokenizer"
            raise BadInput(f"the tokenizer of {name!r} makes no tokens of a text: its files are missing; {instead}.")

    def ids(documents: list[str]) -> Iterable[np.ndarray]:
        for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            batch = documents[start : start + _DOCUMENTS_AT_ONCE]
            encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
            yield from (np.array(document, np.uint32) for document in encoded["input_ids"])

    return Encoder(tokenizer, ids)


def expected_tokenizer(workload: ModelWorkload, texts: Callable[[], Iterable[list[str]]]) -> PreTrainedTokenizerBase:
    """The one of `make_encoder`, as far as it is known without text: `texts`, those for training and for evaluation,
    are read for one of characters alone. Raises as `make_encoder`."""
    chosen = workload.tokenizer
    if chosen is not None and chosen.train_bpe is not None:
        return _untrained_bpe(chosen.train_bpe)
    learns = chosen is not None and chosen.kind == "char"
    return make_encoder(workload, *(texts() if learns else ([], []))).tokenizer


def with_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same one, with a token for the end of shorter rows: its own, or the end of a text, or a new one."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            tokenizer.add_special_tokens({"pad_token": PADDING})
        else:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def token_rows(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], longest: int) -> tuple[list[list[int]], int]:
    """The tokens of each text, with the special ones that the tokenizer puts around it, at most so many; and how many
    texts were cut."""
    rows: list[list[int]] = []
    truncated = 0
    options = {"return_attention_mask": False, "verbose": False}
    for start in range(0, len(texts), _DOCUMENTS_AT_ONCE):
        batch = list(texts[start : start + _DOCUMENTS_AT_ONCE])
        whole = tokenizer(batch, **options)["input_ids"]
        long = [index for index, row in enumerate(whole) if len(row) > longest]
        if long:
            cut = tokenizer([batch[index] for index in long], truncation=True, max_length=longest, **options)
            for index, row in zip(long, cut["input_ids"], strict=True):
                whole[index] = row
        rows += whole
        truncated += len(long)
    return rows, truncated


def complete(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives it what texts that stand for themselves need and it lacks: a padding token, and an end token that it puts
    behind each text. Raises BadInput if it can't be made to."""
    lacking = {"eos_token": END_OF_TEXT, "pad_token": PADDING}
    tokenizer.add_special_tokens({name: token for name, token in lacking.items() if getattr(tokenizer, name) is None})
    end = tokenizer.eos_token_id
    if end in tokenizer(text_target="a")["input_ids"]:
        return
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        kind = type(tokenizer).__name__
        raise BadInput(f"the tokenizer must put its end token behind each text, but {kind} doesn't; give another one.")
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {tokenizer.eos_token}", special_tokens=[(tokenizer.eos_token, end)]
    )


def _trained_bpe(train: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE, as GPT-2's, with at most `vocab_size` tokens, bytes and end of text among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(train, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _untrained_bpe(vocab_size: int) -> PreTrainedTokenizerBase:
    """What `train_bpe` makes, as far as it is known without the text: how many tokens, and which of them is special."""
    vocabulary = {str(index): index for index in range(1, vocab_size)} | {END_OF_TEXT: 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))  # it takes any text
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _characters(train: list[str], evaluation: list[str]) -> Encoder:
    """One token for each distinct character of the training text, in code point order; one more, for what is unknown,
    where the evaluation text has others: who counts 65 in Tiny Shakespeare should find no vocabulary of 66."""
    known = sorted(set().union(*train))
    code_points = np.array([ord(character) for character in known], np.uint32)
    special_tokens = {"unk_token": UNKNOWN} if set().union(*evaluation) - set(known) else {}
    vocabulary = {character: index for index, character in enumerate([*known, *special_tokens.values()])}

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()

    def ids(documents: list[str]) -> Iterable[np.ndarray]:  # hundreds of times faster than through the tokenizer
        for document in documents:
            points = np.frombuffer(document.encode("utf-32-le", "surrogatepass"), np.uint32)
            index = np.minimum(np.searchsorted(code_points, points), len(known) - 1)
            yield np.where(code_points[index] == points, index, len(known))

    return Encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens), ids)


def _bytes() -> Encoder:
    """256 tokens, the id of each its byte."""
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()

    def ids(documents: list[str]) -> Iterable[np.ndarray]:
        return (np.frombuffer(document.encode("utf-8"), np.uint8) for document in documents)

    return Encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ids)
