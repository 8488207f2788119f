"""Text to token ids: the model's own tokenizer, one trained on the text, or one token a character or byte."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from carbonopt.core.config import ModelWorkload
from carbonopt.train.data.packing import Tokens
from carbonopt.train.model import unloadable

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<|unknown|>"

_DOCUMENTS_AT_ONCE = 1000


@dataclass(frozen=True)
class Encoder:
    """A tokenizer in Hugging Face's form, to be saved with the data, and the way to encode many documents."""

    tokenizer: PreTrainedTokenizerBase
    _ids: Callable[[list[str]], Iterable[np.ndarray]]

    def encode(self, documents: list[str]) -> Tokens:
        """All documents in one array, with the end-of-text token between two of them where the tokenizer has one."""
        dtype = np.uint16 if len(self.tokenizer) <= 2**16 else np.uint32
        end = self.tokenizer.eos_token_id
        parts: list[np.ndarray] = []
        for ids in self._ids(documents):
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

    def ids(documents: list[str]) -> Iterable[np.ndarray]:
        for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            batch = documents[start : start + _DOCUMENTS_AT_ONCE]
            encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
            yield from (np.array(document, np.uint32) for document in encoded["input_ids"])

    return Encoder(tokenizer, ids)


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


def untrained_bpe(vocab_size: int) -> PreTrainedTokenizerBase:
    """What `train_bpe` makes, as far as it is known without the text: how many tokens, and which of them is special."""
    vocabulary = {str(index): index for index in range(1, vocab_size)} | {END_OF_TEXT: 0}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary)), eos_token=END_OF_TEXT)


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
