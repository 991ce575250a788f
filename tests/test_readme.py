"""The README's commands are commands that exist, and its figures of the house are true."""

import re
import shlex
from pathlib import Path

import pytest

import ablate
import bench
import config
import evaluate
import sample
from data import prepare

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
PARSERS = {
    "train.py": (config.TrainConfig, True),
    "sample.py": (sample.SampleConfig, False),
    "evaluate.py": (evaluate.EvaluateConfig, False),
    "ablate.py": (ablate.AblationConfig, True),
    "bench.py": (bench.BenchConfig, False),
    "data.prepare": (prepare.PrepareConfig, False),
}


def commands() -> list[list[str]]:
    """What the README runs: the program's name and its arguments."""
    found = []
    for line in "".join(BLOCKS).splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            at = next((i for i, w in enumerate(words) if w in PARSERS), None)
            if at is not None:
                found.append(words[at:])
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_of_the_readme_is_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    cls, preset = PARSERS[command[0]]
    argv = [w for w in command[1:] if not w.startswith("runs/") or not w.endswith(".toml")]
    parsed = config.parse(cls, argv, prog=command[0], description="", preset=preset)
    if cls is config.TrainConfig:
        assert parsed.problems(8 if "torchrun" in command else 1) == []
    elif hasattr(parsed, "problems"):
        assert parsed.problems() == []


def test_every_program_is_shown():
    assert {command[0] for command in commands()} == PARSERS.keys()


def test_ci_runs_the_readmes_test_command():
    lines = [line for line in README.splitlines() if "-m pytest" in line]
    assert len(lines) == 1
    assert "requirements-dev.txt" in lines[0]
    assert "grep -m 1 -- '-m pytest' README.md" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_every_module_and_preset_is_named():
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in README


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120
