"""The house: which module may import which, and how large things may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Imports go downward only: to a module with a smaller number.
FLOORS = {
    "model": 0,
    "data.tokenizer": 0,
    "config": 1,
    "data.corpora": 1,
    "data.loader": 1,
    "runtime": 1,
    "data.writer": 2,
    "data.prepare": 3,
    "checkpoint": 2,
    "optim": 2,
    "metrics": 2,
    "evaluate": 4,
    "sample": 4,
    "run": 5,
    "train": 6,
    "ablation.initial": 1,
    "ablation.report": 1,
    "ablation.figures": 2,
    "ablate": 7,
    "bench": 7,
}
FOLDERS = (".", "config", "data", "ablation")
PATHS = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


MODULES = {module_name(p): p for p in PATHS}


def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def our_imports(name: str) -> set[str]:
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return (found & MODULES.keys()) - {"data", "ablation"}


def test_there_are_the_files_that_users_rely_on():
    programs = ["train.py", "sample.py", "evaluate.py", "data/prepare.py"]
    names = ["model.py", "checkpoint.py", "requirements.txt", "requirements-dev.txt", "README.md"]
    for name in [*programs, *names, "LICENSE", "config/__init__.py", ".ci/run"]:
        assert (ROOT / name).is_file(), name
    presets = ["gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "quickstart", "shakespeare"]
    for name in presets:
        assert (ROOT / "config" / f"{name}.toml").is_file(), name


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"data", "ablation"}))
def test_imports_go_downward_only(name):
    for imported in our_imports(name):
        assert FLOORS[imported] < FLOORS[name], f"{name} imports {imported}"


def test_the_model_imports_nothing_of_ours():
    assert not our_imports("model")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_happens_at_import(name):
    """Top level holds definitions and constants: no call for its effect, no loop, no global."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
    allowed += (ast.AnnAssign, ast.AugAssign)
    for node in tree(name).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        assert isinstance(node, allowed) or docstring or guard, ast.unparse(node)
    assert not [n for n in ast.walk(tree(name)) if isinstance(n, ast.Global)]


def test_importing_every_module_prints_nothing_and_leaves_the_random_state_alone():
    code = (
        "import torch; before = torch.get_rng_state()\n"
        f"import {', '.join(sorted(MODULES))}\n"
        "assert torch.equal(before, torch.get_rng_state())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["datasets", "wandb", "matplotlib", "transformers"])
def test_heavy_packages_load_only_when_they_are_used(name):
    code = (
        f"import train, sample, evaluate, data.prepare, bench, sys; print({name!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_the_model_fits_250_lines():
    assert len(MODULES["model"].read_text(encoding="utf-8").splitlines()) <= 250


def code_lines(name: str) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    source = MODULES[name].read_text(encoding="utf-8")
    texts = [
        range(node.lineno, node.end_lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    prose = {line for lines in texts for line in lines}
    lines = enumerate(source.splitlines(), start=1)
    return sum(1 for i, l in lines if l.strip() and l.strip()[0] != "#" and i not in prose)


def test_the_product_stays_small():
    """What trains and samples, and beside it the two programs that measure."""
    measuring = {name for name in MODULES if name.startswith(("ablat", "bench"))}
    assert sum(map(code_lines, MODULES.keys() - measuring)) <= 2960
    assert sum(map(code_lines, measuring)) <= 1550


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_function_is_longer_than_60_lines_and_the_loop_fits_a_screen(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = 50 if (name, node.name) == ("train", "loop") else 60
            assert node.end_lineno - node.lineno + 1 <= limit, f"{name}.{node.name}"


def test_no_module_is_a_drawer_for_the_rest():
    assert not {"utils", "common", "helpers", "misc"} & {n.split(".")[-1] for n in MODULES}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_loop_and_its_neighbours_do_not_know_where_norms_stand(name):
    """Only the model decides by post_ln; others print, save or pass it on."""
    if name in ("model", "checkpoint", "run", "config", "ablate", "ablation.initial"):
        return
    assert "post_ln" not in MODULES[name].read_text(encoding="utf-8").replace("--post-ln", "")


def test_no_pickle_is_read_or_written():
    for path in PATHS:
        source = path.read_text(encoding="utf-8")
        for word in ("import pickle", "torch.load", "torch.save", "weights_only"):
            assert word not in source, f"{path.name}: {word}"


def test_every_text_file_is_opened_as_utf8():
    for name in MODULES:
        for node in ast.walk(tree(name)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            text = called.endswith((".read_text", ".write_text"))
            if called == "open":
                mode = next((ast.unparse(a) for a in node.args[1:]), "'r'")
                text = "b" not in mode
            if text:
                assert "encoding" in {k.arg for k in node.keywords}, ast.unparse(node)
