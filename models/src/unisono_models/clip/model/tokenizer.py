"""The tokenizer: from captions to tokens."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono_models.clip.config import TextConfig
from unisono_models.clip.model.trunks import loading_text_model
from unisono_models.datasets.package_files import find_transformers_folder
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import broadcast_object, raise_together
from unisono_models.training.errors import UserError


class CaptionTokenizer:
    """Maps captions to the tokens that the text tower takes: int64, (n, longest), padded with -1.

    It wraps a `tokenizers.Tokenizer`, like every fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any, *, tokens: int) -> None:
        self.tokenizer, self.tokens = tokenizer, tokens
        special = tokenizer.num_special_tokens_to_add(False)
        if tokens <= special:  # the tokenizer would silently truncate nothing
            raise UserError(
                f"--model.text.tokens {tokens} must be more than the {special} special tokens that the tokenizer adds"
            )
        tokenizer.no_padding()
        tokenizer.enable_truncation(tokens)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        rows = [torch.tensor(found.ids, dtype=torch.int64) for found in self.tokenizer.encode_batch(list(captions))]
        if not any(len(row) for row in rows):
            return torch.full((len(rows), 1), -1, dtype=torch.int64)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def mask_token(self) -> int:
        """The id of [MASK], with which masked language modelling replaces tokens."""
        found = self.tokenizer.token_to_id("[MASK]")
        if found is None:
            found = self.tokenizer.token_to_id("<mask>")
        if found is None:
            raise UserError("--loss.language-weight: the tokenizer has no mask token, which it needs")
        return int(found)

    def fingerprint(self) -> str:
        """Hash the tokenizer: with another one, the trained weights of the text tower mean nothing."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        text: str = self.tokenizer.to_str()
        return text

    @classmethod
    def from_json(cls, text: str, *, tokens: int) -> CaptionTokenizer:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # it raises no other class
            raise ValueError(f"CaptionTokenizer.from_json: this is not a tokenizer: {error}") from error
        return cls(tokenizer, tokens=tokens)


def make_tokenizer(config: TextConfig, captions: Iterable[str]) -> CaptionTokenizer:
    """Load the tokenizer that comes with the text model, or train one on `captions`.

    The same captions give the same tokenizer with the same version of `tokenizers`. So a run saves its own: see
    load_or_make_tokenizer.
    """
    if config.tokenizer == "model":
        if not config.model:
            raise UserError("--model.text.tokenizer model needs a --model.text.model that it comes with")
        from transformers import AutoTokenizer

        with loading_text_model(config.model):
            theirs = AutoTokenizer.from_pretrained(find_transformers_folder(config.model))
        if set(theirs.get_vocab()) <= set(theirs.all_special_tokens):  # what transformers returns if there is none
            raise UserError(f"--model.text.model {config.model}: it has no tokenizer; use --model.text.tokenizer captions")
        return CaptionTokenizer(theirs.backend_tokenizer, tokens=config.tokens)
    return CaptionTokenizer(_train_tokenizer(captions, config.vocabulary), tokens=config.tokens)


def placeholder_tokenizer(vocabulary: int, *, tokens: int) -> CaptionTokenizer:
    """Make a tokenizer of `vocabulary` words that no caption has, for a simulation: only its size matters."""
    from tokenizers import Tokenizer, models

    words = {f"word {number}": number for number in range(1, vocabulary)} | {"[MASK]": 0}
    return CaptionTokenizer(Tokenizer(models.WordLevel(words, unk_token="[MASK]")), tokens=tokens)


def _train_tokenizer(captions: Iterable[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    # Not WordPiece as in BERT: its trainer numbers the pieces in the order of a random hash, which differs between processes.
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace()])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = sorted(set(string.printable.lower()) - set(string.whitespace))
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=characters, show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def load_or_make_tokenizer(config: TextConfig, captions: Iterable[str], path: Path, ranks: Ranks) -> CaptionTokenizer:
    """Load the tokenizer of a run from `path`, or make and save it there. All ranks call it together and get the same one.

    Only rank 0 reads `captions`, and only if a tokenizer must be trained.
    """
    text = ""
    with raise_together("load_or_make_tokenizer"):
        if ranks.first:
            if not path.exists():
                atomic_write(path, make_tokenizer(config, captions).to_json())
            text = path.read_text(encoding="utf-8")
    try:
        return CaptionTokenizer.from_json(broadcast_object(text), tokens=config.tokens)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--run.dir: {path} is damaged: {error}. Restore it, or choose another --run.dir") from error
