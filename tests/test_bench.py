"""bench.py: its formulas by hand, and whole runs of a tiny model; no time is asserted."""

import csv
import itertools
import json
import math
import sys

import pytest
import torch

import bench
import config
from config import ModelConfig

TINY = ["--n-layer=2", "--n-head=2", "--n-embd=32", "--block-size=32", "--micro-batch=2"]
TINY += ["--tokenizer=byte", "--repeats=2", "--corpus-tokens=20000", "--sample-tokens=4"]
TINY += ["--device=cpu"]

# A program with nanoGPT's interface, written for this test. It leaves the padded vocabulary out of
# its loss, so that the losses can be compared to the last digit.
CHECKOUT = """
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head = c.n_head
        self.c_attn, self.c_proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)

    def forward(self, x):
        heads = [t.unflatten(2, (self.n_head, -1)) for t in self.c_attn(x).chunk(3, 2)]
        q, k, v = (t.transpose(1, 2) for t in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn = Attention(c)
        fc, proj = nn.Linear(c.n_embd, 4 * c.n_embd), nn.Linear(4 * c.n_embd, c.n_embd)
        self.mlp = nn.ModuleDict({"c_fc": fc, "c_proj": proj})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = config
        assert c.bias and c.dropout == 0.0
        self.transformer = nn.ModuleDict()
        self.transformer["wte"] = nn.Embedding(c.vocab_size, c.n_embd)
        self.transformer["wpe"] = nn.Embedding(c.block_size, c.n_embd)
        self.transformer["h"] = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.transformer["ln_f"] = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        t = self.transformer
        x = t.wte(idx) + t.wpe(torch.arange(idx.size(1)))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        return logits, F.cross_entropy(logits[..., :257].flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert device_type == "cpu"
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}]
        groups += [{"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""


def parsed(*argv: str) -> bench.BenchConfig:
    return config.parse(bench.BenchConfig, [*argv], prog="bench.py", description="", preset=False)


def run(capsys, out_dir, *argv: str) -> tuple[dict, str]:
    """bench.json and what the terminal showed."""
    assert config.run_program(bench.main, [*argv, f"--out-dir={out_dir}"]) == 0
    return json.loads((out_dir / "bench.json").read_text(encoding="utf-8")), capsys.readouterr().out


def refused(capsys, *argv: str) -> str:
    """The message; run_program returns 2 for ours, and tyro exits with it."""
    with pytest.raises(SystemExit, match=r"^2$"):
        raise SystemExit(config.run_program(bench.main, [*argv]))
    return capsys.readouterr().err


# Formulas.


def plan_row(n: int, *options: str, **known) -> dict:
    known = {
        "tokens_per_s": 100_000.0,
        "gradient_bytes": 500_000_000,
        "late_bytes": 0,
        "backward_share": 0.5,
    } | known
    argv = ["--micro-batch=10", "--block-size=1000", "--accumulation=4", "--overlap=0.5", *options]
    return bench.predicted(n, parsed(*argv), **known)


def test_one_gpu_is_as_fast_as_it_was_measured():
    row = plan_row(1, "--network-gb-per-s=0.001")
    assert row["tokens_per_s"] == pytest.approx(100_000)
    assert row["efficiency"] == 1
    assert row["exchange_ms"] == row["exposed_ms"] == 0


def test_64_gpus_by_hand():
    """A micro-batch takes 0.1 s, of which 0.025 s hide the exchange. In a ring over a network of
    5 GB/s, 500 MB take 2 · 63 · (500 MB / 64) / 5 GB/s = 0.196875 s: 63 rounds in which each GPU
    sends a 64th, once to sum and once to spread the sums. A step: 0.4 + 0.171875 s."""
    row = plan_row(64, "--network-gb-per-s=5", "--gpus-per-node=8")
    assert row["exchange_ms"] == pytest.approx(196.875)
    assert row["exposed_ms"] == pytest.approx(171.875)
    assert row["tokens_per_step"] == 64 * 40_000
    assert row["tokens_per_s"] == pytest.approx(64 * 40_000 / 0.571875)
    assert row["efficiency"] == pytest.approx(0.4 / 0.571875)


def test_what_is_ready_last_is_never_hidden():
    """Of 20 ms of exchange between 2 GPUs, 12 are the late gradients' and 8 fit into the 25 ms that
    can hide them; at a tenth of the speed it is 120 ms, and 80 - 25."""
    row = plan_row(2, "--node-gb-per-s=25", late_bytes=300_000_000)
    assert row["exchange_ms"] == pytest.approx(20)
    assert row["exposed_ms"] == pytest.approx(12)
    row = plan_row(2, "--node-gb-per-s=2.5", late_bytes=300_000_000)
    assert row["exposed_ms"] == pytest.approx(120 + 55)


def test_within_a_node_its_own_links_count():
    options = ("--network-gb-per-s=5", "--node-gb-per-s=50", "--gpus-per-node=8")
    assert plan_row(8, *options)["exchange_ms"] == pytest.approx(17.5)
    assert plan_row(16, *options)["exchange_ms"] == pytest.approx(187.5)


def test_more_gpus_do_more_and_each_a_little_less():
    rows = [plan_row(2**k, "--network-gb-per-s=5", "--gpus-per-node=1") for k in range(7)]
    for before, after in itertools.pairwise(rows):
        assert before["tokens_per_s"] < after["tokens_per_s"] < 2 * before["tokens_per_s"] + 1e-6
        assert before["efficiency"] > after["efficiency"]


def test_a_fast_network_or_many_micro_batches_hide_the_exchange():
    slow = ("--gpus-per-node=1", "--network-gb-per-s=5")
    assert plan_row(64, "--gpus-per-node=1", "--network-gb-per-s=1e9")["efficiency"] == 1
    assert plan_row(64, *slow, "--accumulation=4000")["efficiency"] > 0.999
    assert plan_row(64, *slow, "--overlap=1", backward_share=2.0)["exposed_ms"] == 0
    assert plan_row(64, *slow, "--overlap=0")["exposed_ms"] == plan_row(64, *slow)["exchange_ms"]


def test_a_figure_has_medians_quartiles_shares_and_ratios_of_which_more_is_better():
    f = bench.figure("x", "tokens/s", {"here": [4.0, 2.0, 9.0], "other": [2.0, 1.0, 3.0]}, 8.0)
    here = {"q1": 3, "median": 4, "q3": 6.5, "share": 0.5}
    assert f["of"]["here"] == here
    assert f["of"]["other"] == {"q1": 1.5, "median": 2, "q3": 2.5, "share": 0.25, "ratio": 2}
    time = bench.figure("x", "ms", {"here": [4.0, 2.0, 9.0], "other": [2.0, 1.0, 3.0]})
    assert time["of"]["other"]["ratio"] == 0.5
    assert "share" not in time["of"]["here"]


def test_what_is_not_known_is_not_available():
    f = bench.figure("x", "%", {"here": [], "other": []})
    assert f["of"]["here"] == {"q1": None, "median": None, "q3": None}
    assert "ratio" not in f["of"]["other"]
    assert bench.figure_row(f)["here"] == "n/a"
    assert bench.figure("x", "MB", {"here": [7.0]})["of"]["here"] == {"q1": 7, "median": 7, "q3": 7}


def test_contestants_take_turns_and_the_first_round_does_not_count():
    calls = []
    work = {name: lambda n, name=name: calls.append(name + str(n)) or n for name in "ab"}
    assert bench.in_turns(2, work) == {"a": [1, 2], "b": [1, 2]}
    assert calls == ["a0", "b0", "b1", "a1", "a2", "b2"]


@pytest.mark.parametrize(("room", "size"), [(1000, 64), (64, 64), (63, 32), (5, 4), (1, 1)])
def test_the_largest_micro_batch_that_fits_is_found_from_above(room, size):
    tried = []

    def attempt(n):
        tried.append(n)
        if n > room:
            raise torch.OutOfMemoryError("too little")

    assert bench.largest_that_fits(attempt) == size
    assert tried == sorted(tried, reverse=True)
    assert tried[0] == 64


def test_the_grid_has_four_points_an_axis_that_end_at_the_model_asked_for():
    m = ModelConfig()
    points = list(bench.grid(m, 3))
    sizes = [shape for axis, shape, _ in points if axis == "parameters"]
    assert [(s.n_layer, s.n_head, s.n_embd) for s in sizes] == [
        (3, 3, 192),
        (6, 6, 384),
        (9, 9, 576),
        (12, 12, 768),
    ]
    lengths = [(shape.block_size, n) for axis, shape, n in points if axis == "block_size"]
    assert lengths == [(128, 24), (256, 12), (512, 6), (1024, 3)]
    batches = [(shape.block_size, n) for axis, shape, n in points if axis == "micro_batch"]
    assert batches == [(128, 3), (128, 6), (128, 12), (128, 24)]
    assert all(not shape.problems() for _, shape, _ in bench.grid(m, 1))


# Whole runs.


@pytest.fixture
def quick(monkeypatch):
    """The machine's own rates without measuring them."""
    monkeypatch.setattr(bench, "product_rate", lambda *_: lambda _: 2e10)
    monkeypatch.setattr(bench, "read_rate", lambda *_: lambda _: 1e10)


def assert_the_table_is_in_the_file(report: dict, out: str) -> None:
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    for f in report["figures"]:
        line = lines[f["name"].strip()]
        for of in f["of"].values():
            assert bench.short(of["median"]) in line
            if "ratio" in of:
                assert f"{of['ratio']:.2f} ×" in line
    first, last = (
        next(i for i, l in enumerate(lines) if l.startswith(w)) for w in ("matr", "wrote")
    )
    assert last - first == len(report["figures"])


def test_a_run_alone(tmp_path, capsys):
    """With the real rates of this machine."""
    parts = ["--repeats=1", "--parts", "training", "tokenizing"]
    report, out = run(capsys, tmp_path, *TINY, *parts)
    assert {"device", "cores", "threads", "dtype", "torch"} <= report["machine"].keys()
    assert report["options"]["n_embd"] == 32
    assert report["options"]["out_dir"] == str(tmp_path)
    figures = {f["name"].strip(): f for f in report["figures"]}
    assert len(figures) == len(report["figures"])
    training = figures["training"]["of"]["here"]
    assert 0 < training["q1"] == training["median"] == training["q3"]
    share = figures["MFU of the measured peak"]["of"]["here"]["median"]
    assert share == pytest.approx(100 * training["share"])
    assert figures["MFU of the data sheet's peak"]["of"]["here"]["median"] is None
    assert figures["tokenizing"]["of"]["here"]["median"] > 0
    assert {*figures["training"]["of"]} == {"here"}
    assert_the_table_is_in_the_file(report, out)


@pytest.mark.usefixtures("quick")
def test_a_run_beside_transformers_and_a_checkout(tmp_path, capsys):
    (tmp_path / "model.py").write_text(CHECKOUT, encoding="utf-8")
    path, out_dir = list(sys.path), tmp_path / "out"
    others = ["--vs=transformers", f"--vs-checkout={tmp_path}", "--plot"]
    report, out = run(capsys, out_dir, *TINY, *others, "--parts", "training", "sampling")
    assert sys.path == path
    assert sys.modules["model"].__file__ != sys.modules["checkout_model"].__file__
    assert "warning" not in out
    figures = [f for f in report["figures"] if "difference" not in f["name"]]
    (apart,) = [f["of"] for f in report["figures"] if "difference" in f["name"]]
    assert {*apart} == {"transformers", "checkout"}
    assert all(v["median"] < 1e-4 for v in apart.values())
    for f in figures:
        here, *there = f["of"]
        assert here == "here"
        assert there in ([], ["transformers"], ["transformers", "checkout"])
    speeds = {f["name"].strip(): f for f in figures}
    assert speeds["training"]["limit"] == pytest.approx(2e10 / (6 * 33_696 + 12 * 2 * 32 * 32))
    # 4 bytes of each weight but the positions', padding and all.
    weights = 4 * (320 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32)
    assert speeds["sampling, batch 16, float32"]["limit"] == pytest.approx(16 * 1e10 / weights)
    assert_the_table_is_in_the_file(report, out)
    assert (out_dir / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert out.endswith(f"wrote bench.json, bench.png into {out_dir}\n")


@pytest.mark.usefixtures("quick")
def test_a_checkout_with_other_weights_is_told(tmp_path, capsys):
    source = CHECKOUT.replace('"ln_f"', '"final"').replace("t.ln_f", "t.final")
    (tmp_path / "model.py").write_text(source, encoding="utf-8")
    others = [f"--vs-checkout={tmp_path}", "--parts", "training"]
    _, out = run(capsys, tmp_path / "out", *TINY, *others)
    assert "warning: checkout: final.weight, final.bias are not ours" in out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("n_layer", "points"), [(4, 12), (1, 10)])  # equal ones are measured once
def test_scaling_writes_a_table_and_a_picture(n_layer, points, tmp_path, capsys):
    size = ["--n-embd=16", f"--n-layer={n_layer}"]
    report, out = run(capsys, tmp_path, *TINY, "--scaling", *size, "--repeats=1")
    with open(tmp_path / "scaling.csv", encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(report["scaling"]) == points
    assert [float(r["tokens_per_s"]) for r in table] == [
        r["tokens_per_s"] for r in report["scaling"]
    ]
    assert {r["axis"] for r in table} == {"parameters", "block_size", "micro_batch"}
    assert out.count("\nparameters ") == points - 8
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert out.endswith(f"wrote bench.json, scaling.csv, scaling.png into {tmp_path}\n")


@pytest.mark.usefixtures("quick")
def test_a_plan_from_a_given_and_from_a_measured_speed(tmp_path, capsys):
    argv = ["--plan", "--tokens-per-s=450000"]
    report, out = run(capsys, tmp_path, *argv)
    assert [row["gpus"] for row in report["plan"]] == [1, 2, 4, 8, 16, 32, 64]
    assert report["known"]["gradient_bytes"] == 4 * (124_439_808 + 47 * 768)
    assert report["plan"][0]["tokens_per_s"] == pytest.approx(450_000)
    assert "450,000" in out
    report, out = run(capsys, tmp_path, *TINY, "--plan")
    measured = {f["name"].strip(): f["of"]["here"]["median"] for f in report["figures"]}
    assert report["plan"][0]["tokens_per_s"] == pytest.approx(measured["training"])
    share = report["known"]["backward_share"]
    assert share == pytest.approx(measured["backward"] / 1e3 / (2 * 32 / measured["training"]))


def test_the_runs_of_full_train_both_kinds_of_blocks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = bench.both_norms(parsed(*TINY, "--n-embd=16", "--out-dir=out"), steps=2)
    assert [(r["blocks"], r["corpus"], r["step"]) for r in rows] == [
        ("pre", "stdlib", 2),
        ("post", "stdlib", 2),
    ]
    assert all(math.isfinite(r["val_loss"]) for r in rows)
    texts = [(tmp_path / "out" / n / "config.toml").read_text("utf-8") for n in ("pre", "post")]
    assert ["post_ln = true" in text for text in texts] == [False, True]


@pytest.mark.usefixtures("quick")
def test_start_up_is_that_of_whole_programs_with_options_that_exist(tmp_path, capsys, monkeypatch):
    commands = []

    def note(command, **how):
        assert how["check"]
        assert command[0] == sys.executable
        commands.append(command[1:])

    monkeypatch.setattr(bench.subprocess, "run", note)
    report, out = run(capsys, tmp_path, *TINY, "--parts", "startup", "--repeats=1")
    assert [f["name"] for f in report["figures"][2:]] == [
        f"start-up: {name}"
        for name in (
            "import torch",
            "train.py --help",
            "sample.py --help",
            "quickstart, one step, validated and saved",
        )
    ]
    assert commands[:3] == [["-c", "import torch"], ["train.py", "--help"], ["sample.py", "--help"]]
    program, preset, *options = commands[3]
    assert program == "train.py"
    monkeypatch.chdir(bench.ROOT)
    cfg = config.parse(config.TrainConfig, [preset, *options], prog=program, description="")
    assert (cfg.run.steps, cfg.data.corpus, cfg.problems()) == (1, "stdlib", [])
    assert_the_table_is_in_the_file(report, out)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_memory_is_that_of_new_processes(tmp_path, capsys):
    """Weights, gradients and two moments of 1.6M parameters at least, and nothing of this one's."""
    wide = ["--n-embd=256", "--n-head=4", "--vs=transformers", "--parts", "memory"]
    big = torch.ones(2**27)
    report, out = run(capsys, tmp_path, *TINY, *wide)
    sizes = report["figures"][2]["of"]
    assert {*sizes} == {"here", "transformers"}
    assert all(26 < of["median"] < big.nbytes / 1e6 for of in sizes.values())
    assert_the_table_is_in_the_file(report, out)


# Refusals.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--vs=jax"], ["jax", "transformers"]),
        (["--vs-checkout=nowhere"], ["nowhere", "model.py", "nanoGPT"]),
        (["--repeats=0", "--node-gb-per-s=nan", "--overlap=2"], ["repeats", "node_gb", "overlap"]),
        (["--plan", "--scaling"], ["scaling, plan", "one at a time"]),
        (["--plan", "--tokens-per-s=1e-310"], ["tokens_per_s", "1e-06"]),
        (["--plan", "--n-layer=100000000"], ["fits no machine"]),
        (["--plan", "--tokens-per-s=1", "--out-dir="], ["out_dir", "empty"]),
        (["--plan", "--plot"], ["plot"]),
        (["--full", "--vs=transformers"], ["full, transformers", "one at a time"]),
        (["--vs=transformers", "--norm=rmsnorm"], ["transformers", "variant"]),
        (["--vs=transformers", "--post-ln"], ["transformers", "variant"]),
        (["--block-size=32", "--sample-tokens=17"], ["sample_tokens", "16"]),
        (["--full", "--device=cpu"], ["--full", "CUDA"]),
        (["--parts", "training", "speed"], ["speed"]),
        (["--parts", "training", "training"], ["parts", "once"]),
        (["--parts"], ["parts", "at least one"]),
    ],
    ids=" ".join,
)
def test_what_can_not_be_measured_is_refused(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    error = refused(capsys, *argv)
    for word in words:
        assert word in error
    assert not list(tmp_path.glob("**/bench.json"))


def test_full_without_a_gpu_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA device" in refused(capsys, "--full", f"--out-dir={tmp_path / 'new'}")
    assert not (tmp_path / "new").exists()


def test_full_does_not_train_into_an_old_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tmp_path / "post").mkdir()
    assert "holds post already" in refused(capsys, "--full", f"--out-dir={tmp_path}")


@pytest.mark.parametrize("code", [0, 1])
def test_full_tests_measures_and_trains(code, tmp_path, monkeypatch, capsys):
    """Its parts stand in for what only a GPU can do."""
    asked = []

    def tests(command, **how):
        asked.append(command[1:])
        return bench.subprocess.CompletedProcess(command, code)

    def measure(cfg):
        asked.append(cfg.parts)
        return {"options": {"micro_batch": 48}, "figures": []}

    def both_norms(cfg, steps):
        asked.append((cfg.micro_batch, steps))
        return [{"blocks": "pre", "val_loss": 1.25}, {"blocks": "post", "val_loss": None}]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bench.subprocess, "run", tests)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "both_norms", both_norms)
    assert config.run_program(bench.main, ["--full", f"--out-dir={tmp_path}"]) == code
    out = capsys.readouterr().out
    assert asked == [
        ["-m", "pytest", "-m", "cuda"],
        ("memory", "training", "sampling"),
        (16, 300),
    ]
    assert f"CUDA tests: {'failed' if code else 'passed'}" in out
    assert "1.25" in out
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [r["val_loss"] for r in report["runs"]] == [1.25, None]


def test_missing_transformers_are_refused_with_the_command_that_installs_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install -r requirements-dev.txt" in refused(capsys, *TINY, "--vs=transformers")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import a_module_that_nobody_has", "can't be imported (ModuleNotFoundError"),
        ("raise SystemExit(7)", "can't be imported (SystemExit"),
        ("class GPT: pass", "lacks nanoGPT's interface"),
        (CHECKOUT.replace("def configure_optimizers", "def other"), "lacks nanoGPT's interface"),
        (CHECKOUT.replace("def forward", "def other"), "interface (NotImplementedError"),
        (CHECKOUT + "\nGPT.forward = lambda self, x, y: (x, None)", "interface (AttributeError"),
        (CHECKOUT + "\nGPT.forward = lambda self, x, y: self.no(x)", "interface (AttributeError"),
        (CHECKOUT + "\nGPT.configure_optimizers = lambda *_, **__: None", "(AttributeError"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_checkout_of_another_kind_is_refused(source, words, tmp_path, capsys):
    (tmp_path / "model.py").write_text(source, encoding="utf-8")
    argv = [f"--vs-checkout={tmp_path}", f"--out-dir={tmp_path}", "--parts", "training"]
    assert words in refused(capsys, *TINY, *argv)
