"""Checkpoint folders in Hugging Face's GPT-2 layout, and the run folder's record of them.

A pre-LN LayerNorm model is a plain GPT2LMHeadModel folder. Any other variant has a model_type of
its own and keeps GPT-2's fields empty, so that other tools refuse it. Two kinds of folder: weights,
and weights with the training state beside them. Only safetensors and JSON, never a pickle.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import tiktoken
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data import loader, tokenizer
from model import GPT, GPTConfig

VARIANT = "gpt2-variant"
# GPT-2's Conv1D keeps its matrices as (inputs, outputs), torch's Linear as (outputs, inputs).
TRANSPOSED = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")
PREFIXES = re.compile(r"^((_orig_mod|module|transformer|model)\.)+")
STEP = re.compile(r"step_\d{8}")
HUB_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FILES = ("config.json", "model.safetensors")


class NotFinite(ValueError):
    """Weights that must not be saved."""


@dataclass
class Checkpoint:
    """What a folder held. `training`: training.json and, under "optimizer", tensors; or None."""

    model: GPT
    encoding: tiktoken.Encoding
    folder: Path
    training: dict | None = None


def _ends(end: int) -> dict:
    return {"bos_token_id": end, "eos_token_id": end}


def _hub_config(config: GPTConfig, end: int) -> dict:
    """config.json as transformers, vLLM and llama.cpp's converter read it."""
    shape = {name: getattr(config, name) for name in ("vocab_size", "n_embd", "n_head", "n_layer")}
    shape |= dict.fromkeys(("n_positions", "n_ctx"), config.block_size)
    tokens = _ends(end)
    plain = not config.post_ln and config.norm == "layernorm" and config.has_final_norm
    if not plain:
        own = {"model_type": VARIANT, "architectures": ["GPT"], "gpt_config": asdict(config)}
        return own | dict.fromkeys(shape) | tokens
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **shape,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": config.init_std,
        "resid_pdrop": config.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **tokens,
    }


def _read_config(path: Path) -> GPTConfig:
    """The architecture in a config.json. ValueError for what model.py can't be."""
    hub = loader.read_json(path)
    names = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
    try:
        if hub.get("model_type") == VARIANT:
            return _checked(GPTConfig(**hub["gpt_config"]))
        sizes = [hub[name] for name in names]
        config = _checked(GPTConfig(*sizes, dropout=hub.get("resid_pdrop", 0.0)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a GPT-2 ({error})") from None
    fixed = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * config.n_embd),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    for key, allowed in fixed.items():
        if hub.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{path}: {key} is {hub[key]!r}, but GPT-2's is {allowed[0]!r}")
    return config


def _checked(config: GPTConfig) -> GPTConfig:
    """ValueError for fields of another type than the default's, and for impossible values."""
    for field in fields(GPTConfig):
        value = getattr(config, field.name)
        wanted = {float: (float, int), type(None): (bool, type(None))}
        if type(value) not in wanted.get(type(field.default), (type(field.default),)):
            raise ValueError(f"{field.name} can't be {value!r}")
    if problems := config.problems():
        raise ValueError("; ".join(problems))
    return config


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def to_hub(model: GPT) -> dict[str, torch.Tensor]:
    """The model's tensors as GPT-2 files hold them: transposed, the padding cut, no head."""
    tensors = {name: p.detach() for name, p in model.state_dict().items()}
    tensors["wte.weight"] = tensors["wte.weight"][: model.config.vocab_size]
    return {n: (t.t() if TRANSPOSED.search(n) else t).contiguous() for n, t in tensors.items()}


def from_hub(config: GPTConfig, tensors: dict[str, torch.Tensor]) -> GPT:
    """A float32 model from the tensors of a GPT-2 file, in whatever wrappers' names they stand; it
    may share their memory. ValueError that names missing, unexpected, misshapen and not finite
    ones, or a head that is not tied."""
    tensors = {PREFIXES.sub("", name): t for name, t in tensors.items()}
    # Old GPT-2 files carry the causal mask as a buffer.
    tensors = {n: t for n, t in tensors.items() if not n.endswith((".attn.bias", ".masked_bias"))}
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, tensors.get("wte.weight", head)):
        raise ValueError("lm_head.weight differs from wte.weight, but GPT-2's head is tied to it")
    with torch.device("meta"):
        model = GPT(config)
    expected = {name: t.shape for name, t in to_hub(model).items()}
    notes = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    notes += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    notes += [
        f"{name} is {tuple(tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if notes:
        more = f"; and {len(notes) - 8} more" if len(notes) > 8 else ""
        raise ValueError(f"the weights do not fit the config: {'; '.join(notes[:8])}{more}")
    state = {n: (t.t() if TRANSPOSED.search(n) else t).float() for n, t in tensors.items()}
    state = {n: t.contiguous() for n, t in state.items()}
    if bad := [name for name, t in state.items() if not t.isfinite().all()]:
        raise ValueError(f"the weights are not finite (first {bad[0]}): take another checkpoint")
    padding = config.padded_vocab - config.vocab_size
    state["wte.weight"] = torch.nn.functional.pad(state["wte.weight"], (0, 0, 0, padding))
    model.load_state_dict(state, assign=True)
    return model


def save(
    folder: Path,
    model: GPT,
    encoding: tiktoken.Encoding,
    *,
    training: dict | None = None,
    optimizer: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint beside its final name, then rename it: it is there as a whole or not at
    all. NotFinite, a ValueError, before anything is written."""
    tensors = to_hub(model)
    bad = [name for name, t in tensors.items() if not t.isfinite().all()]
    if bad:
        raise NotFinite(f"the weights are not finite (first {bad[0]}): nothing was saved")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    texts = {
        "config.json": json.dumps(_hub_config(model.config, encoding.eot_token), indent=2),
        "generation_config.json": json.dumps(_ends(encoding.eot_token)),
        **tokenizer.hub_files(encoding, model.config.block_size),
    }
    if training is not None:
        texts["training.json"] = json.dumps(training, indent=1, ensure_ascii=False)
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8", newline="")
    state = {name: t.contiguous() for name, t in (optimizer or {}).items()}
    try:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        if optimizer is not None:
            save_file(state, partial / "optimizer.safetensors")
    except (SafetensorError, OSError) as error:
        shutil.rmtree(partial)
        raise OSError(f"{folder} can't be saved ({error}): make room, then --resume") from None
    for path in partial.glob("*.safetensors"):  # written for the owner alone
        shutil.copymode(partial / "config.json", path)
    for path in [*partial.iterdir(), partial]:
        _to_disk(path)
    if folder.exists():  # left by a run that was killed before it recorded it
        shutil.rmtree(folder)
    os.rename(partial, folder)
    _to_disk(folder.parent)


def _to_disk(path: Path) -> None:
    """Wait until the file or folder is on the disk (a folder: its entries)."""
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open folders, and writes their entries through
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_record(out_dir: Path) -> dict:
    """checkpoints.json of a run: {"last", "best", "best_val_loss"}; all None before the first."""
    path = out_dir / "checkpoints.json"
    entry = {"last": None, "best": None, "best_val_loss": None}
    entry |= loader.read_json(path) if path.exists() else {}
    for name in ("last", "best"):
        if entry[name] is not None and not STEP.fullmatch(str(entry[name])):
            raise ValueError(f"{path}: {name} is {entry[name]!r} instead of step_ and 8 digits")
    if entry["best_val_loss"] is not None and not isinstance(entry["best_val_loss"], float | int):
        raise ValueError(f"{path}: best_val_loss is {entry['best_val_loss']!r}, no number")
    return entry


def saved_in(out_dir: Path) -> list[str]:
    """The names of a run's checkpoints, the oldest first."""
    return sorted(p.name for p in out_dir.glob("step_*") if STEP.fullmatch(p.name) and p.is_dir())


def record(out_dir: Path, entry: dict, keep: int) -> None:
    """Replace checkpoints.json, then delete checkpoints that are neither the best one nor among
    the `keep` newest up to the last."""
    loader.replace_file(out_dir / "checkpoints.json", json.dumps(entry) + "\n")
    _to_disk(out_dir)
    saved = [name for name in saved_in(out_dir) if name <= entry["last"]]
    for name in saved[:-keep]:
        if name != entry["best"]:
            shutil.rmtree(out_dir / name)
    for leftover in out_dir.glob(".step_*.partial"):
        shutil.rmtree(leftover)


def find(target: str, which: str = "last") -> Path:
    """The checkpoint folder that is meant: a run's `last` or `best`, a checkpoint folder, or a
    model of the Hub, which is downloaded. ValueError if there is none."""
    path = Path(target)
    if target and ((path / "checkpoints.json").exists() or saved_in(path)):
        name = read_record(path)[which]
        if not name or not (path / str(name)).is_dir():
            raise ValueError(f"{path} has no {which} checkpoint ({name} in its checkpoints.json)")
        return path / name
    if target and (path / "config.json").exists():
        return path
    if target and path.is_dir():
        raise ValueError(f"{path} is no run (checkpoints.json) and no checkpoint (config.json)")
    here = path.parent != Path() and path.parent.is_dir()  # a misspelt folder, no name of the Hub
    if target in HUB_NAMES or (re.fullmatch(r"[\w.-]+/[\w.-]+", target) and not here):
        return _download(target)
    raise ValueError(
        f"no run or checkpoint {target!r}: give a folder, or a model of the Hub, "
        f"{', '.join(HUB_NAMES)} or owner/name"
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [*FILES, "vocab.json", "tokenizer.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # its HTTP client's errors come through as they are
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{name} is no folder here, and the Hub did not give it ({reason}): look at the "
            "connection, or give the folder of a copy"
        ) from None


def load(target: str, which: str = "last") -> Checkpoint:
    """The checkpoint that `find` finds, on the CPU, in float32. ValueError that says what is
    missing, damaged or does not fit."""
    folder = find(target, which)
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
        hint = "; pickles are never read: save it with safetensors" if pickles else ""
        raise ValueError(f"{folder} lacks {', '.join(missing)}{hint}")
    config = _read_config(folder / "config.json")
    encoding = tokenizer.from_folder(folder)
    if encoding.n_vocab != config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {encoding.n_vocab} ids, the model {config.vocab_size}"
        )
    try:
        model = from_hub(config, _read_tensors(folder / "model.safetensors"))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    training = None
    if (folder / "training.json").exists():
        training = loader.read_json(folder / "training.json")
        kinds = {"step": int, "data": dict, "config": dict}
        bad = [k for k, kind in kinds.items() if type(training.get(k)) is not kind]
        if bad or training["step"] < 0 or {"id", "complete", "val", "train"} - {*training["data"]}:
            raise ValueError(f"{folder / 'training.json'} is damaged ({', '.join(bad) or 'data'})")
    return Checkpoint(model, encoding, folder, training)


def load_optimizer(folder: Path) -> dict[str, torch.Tensor]:
    """The optimizer's tensors. ValueError if the folder holds weights alone."""
    if not (folder / "optimizer.safetensors").exists() or not (folder / "training.json").exists():
        raise ValueError(
            f"{folder} holds weights without training state, so it can't be resumed: start a new "
            f"run from it with --init-from {folder}"
        )
    return _read_tensors(folder / "optimizer.safetensors")
