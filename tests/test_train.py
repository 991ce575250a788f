"""The loop: what a run does, whatever interrupts it."""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import config
import evaluate
import metrics
import run as run_module
import runtime
import train
from data import loader, prepare, tokenizer

ROOT = Path(__file__).parent.parent
TINY = {
    "tokenizer": "byte",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "init_std": 0.1,
    "dropout": 0.1,
    "lr": 1e-2,
    "warmup_steps": 2,
    "steps": 20,
    "batch_tokens": 64,
    "micro_batch": 2,
    "eval_every": 1000,
    "eval_tokens": 256,
    "save_every": 1000,
    "log_every": 1,
    "sample_tokens": 0,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text of 20,480 train bytes or so, prepared once for all tests of this file."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "see", "it"]
    rng = random.Random(1)
    text = " ".join(rng.choice(words) for _ in range(7000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare.ensure(str(folder / "text.txt"), "byte", folder / "prepared")
    return {"corpus": folder / "text.txt", "data_dir": folder / "prepared"}


def arguments(text, out_dir, **options) -> list[str]:
    pairs = TINY | text | {"out_dir": out_dir} | options
    return [f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in pairs.items()]


def tiny(text, out_dir, **options) -> config.TrainConfig:
    argv = arguments(text, out_dir, **options)
    return config.parse(config.TrainConfig, argv, prog="train.py", description="")


def rows(out_dir, kind="train") -> list[dict]:
    lines = (Path(out_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def losses(out_dir) -> list[float]:
    return [r["loss"] for r in rows(out_dir)]


def weights(out_dir, which="last") -> dict[str, torch.Tensor]:
    return checkpoint.load(str(out_dir), which).model.state_dict()


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stop_after(monkeypatch, *steps):
    """SIGTERM arrives during these steps."""
    original = train.update

    def update(run):
        result = original(run)
        if run.step in steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(train, "update", update)


def resume(out_dir, **options) -> dict:
    extra = [f"--{k}={v}" for k, v in options.items()]
    argv = [str(Path(out_dir) / "config.toml"), "--resume", *extra]
    return train.train(config.parse(config.TrainConfig, argv, prog="train.py", description=""))


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """The folder of an uninterrupted run."""
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    result = train.train(tiny(corpus, out_dir))
    assert result["step"] == 20
    return out_dir


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_with_two_stops_equals_one_without_bit_for_bit(
    corpus, tmp_path, monkeypatch, optimizer
):
    train.train(tiny(corpus, tmp_path / "whole", optimizer=optimizer))
    stop_after(monkeypatch, 7, 13)
    first = train.train(tiny(corpus, tmp_path / "parts", optimizer=optimizer))
    assert (first["step"], first["stopped_by"]) == (7, signal.SIGTERM)
    assert resume(tmp_path / "parts")["step"] == 13
    assert resume(tmp_path / "parts")["step"] == 20
    assert [r["step"] for r in rows(tmp_path / "parts")] == list(range(1, 21))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(set(losses(tmp_path / "whole"))) == 20
    assert_same_weights(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_a_resumed_run_sees_the_batches_that_it_would_have_seen(corpus, tmp_path, monkeypatch):
    seen = []
    original = loader.Tokens.read

    def read(self, windows):
        x, y = original(self, windows)
        seen.append(hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest())
        return x, y

    monkeypatch.setattr(evaluate, "validation_loss", lambda *_, **__: 1.0)
    monkeypatch.setattr(loader.Tokens, "read", read)
    # The trial before the loop reads the first micro-batch of the next step once more.
    monkeypatch.setattr(train, "prepare_loss", lambda run: _plain_loss(run))
    monkeypatch.setattr(evaluate, "summary", lambda *_: "")
    train.train(tiny(corpus, tmp_path / "whole"))
    whole, seen = list(seen), seen.clear() or seen
    stop_after(monkeypatch, 10)
    train.train(tiny(corpus, tmp_path / "parts"))
    resume(tmp_path / "parts")
    assert seen == whole
    assert len(set(whole)) == 40  # 20 steps of 2 micro-batches, none twice within an epoch


def _plain_loss(run) -> float:
    run.fast = run.loss = runtime.Loss(run.model)
    return 0.0


def test_evaluating_and_logging_more_often_changes_nothing(corpus, straight, tmp_path):
    often = tiny(corpus, tmp_path / "run", eval_every=5, log_every=7, save_every=3, eval_tokens=48)
    train.train(often)
    assert losses(tmp_path / "run") == losses(straight)
    assert_same_weights(weights(tmp_path / "run"), weights(straight))
    assert [r["step"] for r in rows(tmp_path / "run", "eval")] == [5, 10, 15, 20]


def test_the_best_and_the_last_checkpoint_are_kept_apart(corpus, tmp_path, monkeypatch):
    values = {5: 3.0, 10: 2.0, 15: 2.5, 17: 2.6}
    original = train.validation_loss

    def fake(run):
        assert original(run) > 0
        return values[run.step]

    monkeypatch.setattr(train, "validation_loss", fake)
    memory = {}
    save = checkpoint.save

    def remember(folder, model, encoding, **rest):
        memory[folder.name] = {k: v.clone() for k, v in model.state_dict().items()}
        save(folder, model, encoding, **rest)

    monkeypatch.setattr(checkpoint, "save", remember)
    result = train.train(tiny(corpus, tmp_path, steps=17, eval_every=5))
    record = json.loads((tmp_path / "checkpoints.json").read_text())
    expected = {"last": "step_00000017", "best": "step_00000010", "best_val_loss": 2.0}
    assert record == expected
    assert result["best_val_loss"] == 2.0
    assert_same_weights(weights(tmp_path), memory["step_00000017"])
    assert_same_weights(weights(tmp_path, "best"), memory["step_00000010"])
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000010", "step_00000017"]
    values |= {20: 2.5}
    resume(tmp_path, steps=20)
    record = json.loads((tmp_path / "checkpoints.json").read_text())
    assert record == {"last": "step_00000020", "best": "step_00000010", "best_val_loss": 2.0}


def test_a_validation_loss_that_is_no_number_is_never_the_best(corpus, tmp_path, monkeypatch):
    values = iter([float("nan"), 2.0, float("nan")])
    monkeypatch.setattr(train, "validation_loss", lambda run: next(values))
    with pytest.raises(train.Diverged, match="validation loss is nan at the end"):
        train.train(tiny(corpus, tmp_path, steps=6, eval_every=2))
    assert json.loads((tmp_path / "checkpoints.json").read_text())["last"] == "step_00000006"
    assert json.loads((tmp_path / "checkpoints.json").read_text())["best"] == "step_00000004"
    assert [r["val_loss"] for r in rows(tmp_path, "eval")] == [None, 2.0, None]


def test_a_short_run_leaves_a_checkpoint_and_all_files_of_its_folder(corpus, tmp_path):
    train.train(tiny(corpus, tmp_path, steps=3))
    names = {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")}
    files = {"config.toml", "metrics.jsonl", "loss.png", "checkpoints.json", "step_00000003"}
    assert names == files
    start = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert start["kind"] == "start"
    assert start["parameters"]["total"] == 34208  # 28,064 of TINY, and 192 rows more of 32
    assert start["device"] == "cpu"
    plain = [v.split("+")[0] for v in (start["versions"]["torch"], torch.__version__)]
    assert plain[0] == plain[1]
    keys = ["kind", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu"]
    assert list(rows(tmp_path)[0]) == keys
    assert [r["tokens"] for r in rows(tmp_path)] == [64, 128, 192]


def test_n_steps_are_n_updates_and_a_finished_run_makes_no_more(corpus, tmp_path, monkeypatch):
    count = []
    step = run_module.Optimizer.step
    monkeypatch.setattr(
        run_module.Optimizer, "step", lambda self, lr: count.append(lr) or step(self, lr)
    )
    train.train(tiny(corpus, tmp_path, steps=10))
    assert len(count) == 10
    assert checkpoint.load(str(tmp_path)).training["step"] == 10
    before = (tmp_path / "checkpoints.json").read_text()
    argv = [str(tmp_path / "config.toml"), "--resume"]
    assert config.run_program(train.main, argv) == 0
    assert len(count) == 10
    assert (tmp_path / "checkpoints.json").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_program_with_its_code(corpus, straight, tmp_path, number):
    out_dir = tmp_path / "run"
    argv = arguments(corpus, out_dir, steps=100000)
    process = subprocess.Popen(
        [sys.executable, "train.py", *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step      3/"):
            break
    process.send_signal(number)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number
    assert "--resume" in rest
    done = checkpoint.load(str(out_dir)).training["step"]
    assert [r["step"] for r in rows(out_dir)] == list(range(1, done + 1))


def kill_after(step: int, cfg: config.TrainConfig) -> None:
    """Start a run that ends without a word in the step after this one."""
    original = train.update

    def update(run):
        if run.step == step:
            raise KeyboardInterrupt
        return original(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", update)
        with pytest.raises(KeyboardInterrupt):
            train.train(cfg)


def test_a_killed_run_repeats_no_step_in_its_metrics(corpus, straight, tmp_path):
    """Killed in step 18, after a save at 10: nothing of steps 11 to 17 may be counted twice."""
    kill_after(17, tiny(corpus, tmp_path / "run", save_every=10))
    with open(tmp_path / "run" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')
    assert len(rows_or_broken(tmp_path / "run")) == 17
    assert resume(tmp_path / "run")["step"] == 20
    assert [r["step"] for r in rows(tmp_path / "run")] == list(range(1, 21))
    assert losses(tmp_path / "run") == losses(straight)
    assert [r["step"] for r in rows(tmp_path / "run", "resume")] == [10]


def rows_or_broken(out_dir) -> list[dict]:
    return [r for r in metrics.read_records(out_dir / "metrics.jsonl") if r["kind"] == "train"]


def test_a_run_killed_before_its_first_checkpoint_can_be_resumed_too(corpus, straight, tmp_path):
    kill_after(2, tiny(corpus, tmp_path / "run"))
    resume(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(straight)


def test_a_used_folder_is_refused_and_nothing_in_it_changes(corpus, straight, capsys):
    before = {p: p.read_bytes() for p in straight.rglob("*") if p.is_file()}
    assert config.run_program(train.main, arguments(corpus, straight)) == 2
    assert "--resume" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in straight.rglob("*") if p.is_file()}


def test_a_second_process_in_the_same_folder_is_refused(corpus, tmp_path):
    cfg, alone = tiny(corpus, tmp_path), runtime.Processes()
    with (
        run_module.claimed(cfg, alone),
        pytest.raises(ValueError, match="another process"),
        run_module.claimed(cfg, alone),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": True}, "no run in"),
        ({"batch_tokens": 1000}, "992 or 1024"),
        ({"n_head": 3, "lr": -1}, "n_head 3"),
        ({"corpus": "nowhere"}, "no corpus"),
        ({"block_size": 8192, "batch_tokens": 16384, "eval_tokens": 8192}, "too few"),
        ({"init_from": "nowhere"}, "no run or checkpoint"),
        ({"device": "cuda:99"}, "CUDA"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_what_can_not_be_run_is_refused_before_anything_is_written(
    corpus, tmp_path, capsys, options, message
):
    out_dir = tmp_path / "run"
    assert config.run_program(train.main, arguments(corpus, out_dir, **options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not (out_dir / "config.toml").exists()


def test_all_problems_are_told_at_once(corpus, tmp_path, capsys):
    argv = arguments(corpus, tmp_path / "run", n_head=3, lr=-1, steps=0)
    assert config.run_program(train.main, argv) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ("n_head", "lr", "steps"))


def test_other_options_on_resume_are_refused_or_told(corpus, tmp_path, capsys):
    train.train(tiny(corpus, tmp_path, steps=4))
    with pytest.raises(ValueError, match="block_size was 16, is 8"):
        resume(tmp_path, block_size=8)
    capsys.readouterr()
    resume(tmp_path, steps=6, lr=0.5)
    out = capsys.readouterr().out
    assert "lr was 0.01, is 0.5; steps was 4, is 6" in out


def test_other_data_on_resume_is_told(corpus, tmp_path, capsys):
    text = tmp_path / "own.txt"
    text.write_text(corpus["corpus"].read_text(encoding="utf-8"), encoding="utf-8")
    own = {"corpus": text, "data_dir": tmp_path / "prepared"}
    train.train(tiny(own, tmp_path / "run", steps=3))
    text.write_text("X" + text.read_text(encoding="utf-8")[1:], encoding="utf-8")
    with pytest.raises(ValueError, match="--force"):
        resume(tmp_path / "run", steps=5)
    argv = [str(text), "--tokenizer", "byte", "--data-dir", str(tmp_path / "prepared"), "--force"]
    assert prepare.main(argv) == 0
    capsys.readouterr()
    resume(tmp_path / "run", steps=5)
    assert "different data" in capsys.readouterr().out


def test_weights_alone_can_start_a_run_but_not_continue_one(corpus, straight, tmp_path, capsys):
    model = checkpoint.load(str(straight)).model
    checkpoint.save(tmp_path / "weights", model, tokenizer.load("byte"))
    argv = arguments(corpus, tmp_path / "new", steps=3, init_from=tmp_path / "weights", n_layer=7)
    assert config.run_program(train.main, argv) == 0
    assert [r["step"] for r in rows(tmp_path / "new")] == [1, 2, 3]
    assert losses(tmp_path / "new")[0] < losses(straight)[0] - 1
    assert "n_layer = 2" in (tmp_path / "new" / "config.toml").read_text()
    record = json.loads((tmp_path / "new" / "checkpoints.json").read_text())
    last = tmp_path / "new" / record["last"]
    (last / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match="--init-from"):
        resume(tmp_path / "new", steps=5)


def test_starting_from_weights_can_shorten_the_context_but_not_lengthen_it(
    corpus, straight, tmp_path
):
    short = tiny(corpus, tmp_path / "a", init_from=straight, block_size=8, steps=2)
    train.train(short)
    loaded = checkpoint.load(str(tmp_path / "a")).model
    assert loaded.config.block_size == 8
    assert loaded.wpe.weight.shape == (8, 32)
    assert not torch.equal(loaded.wpe.weight, weights(straight)["wpe.weight"][:8])
    with pytest.raises(ValueError, match="longer than the 16"):
        train.train(tiny(corpus, tmp_path / "b", init_from=straight, block_size=32))


def test_a_shortened_model_reads_short_sequences_as_before_and_learns_its_positions(
    corpus, straight, tmp_path
):
    source, idx = checkpoint.load(str(straight)), torch.arange(18).view(2, 9)
    before, order = (
        source.model.eval()(idx[:, :8]),
        [name for name, _ in source.model.named_parameters()],
    )
    cfg = tiny(corpus, tmp_path, block_size=8)
    model, _, cfg = run_module.build_model(cfg, source)
    assert torch.equal(model(idx[:, :8]), before)
    assert model.config == cfg.model
    assert cfg.model.block_size == 8
    assert model.wpe.weight.untyped_storage().nbytes() == 4 * 8 * 32  # not a view of the old one
    assert [name for name, _ in model.named_parameters()] == order
    with pytest.raises(ValueError, match=r"\b9\b.*\b8\b"):
        model(idx)
    optimizer, positions = (
        run_module.Optimizer(model, cfg.optimizer),
        model.wpe.weight.detach().clone(),
    )
    model.loss(idx[:, :8], idx[:, 1:]).backward()
    optimizer.step(lr=1e-2)
    assert (model.wpe.weight != positions).any(1).all()


def test_a_model_of_another_tokenizer_is_refused_with_both_named(corpus, tmp_path):
    big = tmp_path / "gpt2"
    small = dataclasses.replace(
        config.ModelConfig(), vocab_size=50257, n_layer=1, n_head=1, n_embd=4, block_size=16
    )
    checkpoint.save(big, run_module.GPT(small), tokenizer.load("gpt2"))
    with pytest.raises(ValueError, match=r"byte \(257 ids.*gpt2 \(50257 ids"):
        train.train(tiny(corpus, tmp_path / "run", init_from=big))


@pytest.mark.parametrize("content", [None, "{}", '{"last": null}'])
def test_a_run_without_its_record_is_resumed_from_its_newest_checkpoint(
    corpus, straight, tmp_path, content, capsys
):
    """It once started again from step 0, over the old run."""
    train.train(tiny(corpus, tmp_path / "run", save_every=6, keep=5, steps=12))
    path = tmp_path / "run" / "checkpoints.json"
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    (tmp_path / "run" / "step_00000012").rename(tmp_path / "run" / "step_mine")
    resume(tmp_path / "run", steps=12)
    assert [r["step"] for r in rows(tmp_path / "run")] == list(range(1, 13))
    assert [r["step"] for r in rows(tmp_path / "run", "resume")] == [6]
    assert "resuming from the newest, step_00000006" in capsys.readouterr().out
    assert (tmp_path / "run" / "step_mine").is_dir()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("checkpoints.json", '{"last": ["x"]}', "checkpoints.json"),
        ("checkpoints.json", '{"last": "step_00000004", "best_val_loss": "x"}', "best_val_loss"),
        ("metrics.jsonl", '{"kind": "start"}\nbroken\n{"kind": "x"}\n', "line 2"),
        ("metrics.jsonl", '{"kind": "start"}\n[]\n{"kind": "x"}\n', "line 2"),
        ("step_00000004/training.json", '{"step": "4"}', "training.json"),
        ("step_00000004/training.json", '{"step": 4, "config": {}, "data": {}}', "training.json"),
        ("step_00000004/config.json", '{"model_type": "gpt2", "n_embd": "x"}', "config.json"),
        ("step_00000004/model.safetensors", "", "model.safetensors"),
        ("step_00000004/optimizer.safetensors", "x", "optimizer.safetensors"),
    ],
)
def test_a_damaged_file_ends_a_resume_with_its_name_and_changes_nothing(
    corpus, tmp_path, capsys, file, content, message
):
    train.train(tiny(corpus, tmp_path, steps=4))
    (tmp_path / file).write_text(content, encoding="utf-8")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    argv = [str(tmp_path / "config.toml"), "--resume", "--steps=6"]
    assert config.run_program(train.main, argv) == 2
    assert message in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_a_start_that_fails_leaves_no_folder(corpus, tmp_path):
    argv = arguments(corpus, tmp_path / "run", init_from="nowhere")
    assert config.run_program(train.main, argv) == 2
    assert not (tmp_path / "run").exists()


def test_a_damaged_shard_is_found_on_request(corpus, tmp_path, capsys):
    shutil.copytree(corpus["data_dir"], tmp_path / "prepared")
    shard = next((tmp_path / "prepared").glob("*/train_000000.bin"))
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    own = corpus | {"data_dir": tmp_path / "prepared"}
    argv = arguments(own, tmp_path / "run", steps=2, verify_data=True)
    assert config.run_program(train.main, argv) == 2
    assert "train_000000.bin is damaged" in capsys.readouterr().err


def test_other_validation_text_on_resume_makes_the_old_best_count_no_more(corpus, tmp_path, capsys):
    train.train(tiny(corpus, tmp_path, steps=4))
    path = tmp_path / "checkpoints.json"
    record = json.loads(path.read_text()) | {"best_val_loss": 0.1}
    path.write_text(json.dumps(record))
    resume(tmp_path, steps=6, eval_tokens=128)
    assert "other validation text" in capsys.readouterr().out
    assert json.loads(path.read_text())["best"] == "step_00000006"


def test_a_reader_who_leaves_does_not_end_the_run(corpus, tmp_path):
    """`python train.py ... | head -1`."""
    argv = arguments(corpus, tmp_path, steps=200)
    process = subprocess.Popen(
        [sys.executable, "train.py", *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert checkpoint.load(str(tmp_path)).training["step"] == 200


def inject_nan(monkeypatch, steps):
    """The gradient of one tensor becomes NaN in these (1-based) steps."""
    original = run_module.Optimizer.step
    count = []

    def step(self, lr):
        count.append(lr)
        if len(count) in steps:
            p = next(p for p, name in self.names.items() if name == "h.0.mlp.c_fc.weight")
            p.grad[0, 0] = float("nan")
            before = {name: q.detach().clone() for q, name in self.names.items()}
            norm = original(self, lr)
            for q, name in self.names.items():
                assert torch.equal(q, before[name]), name
            return norm
        return original(self, lr)

    monkeypatch.setattr(run_module.Optimizer, "step", step)


def test_a_step_that_is_not_finite_is_skipped_and_training_goes_on(corpus, tmp_path, monkeypatch):
    inject_nan(monkeypatch, {7})
    train.train(tiny(corpus, tmp_path))
    got = rows(tmp_path)
    assert len(got) == 20
    assert [r["step"] for r in got if r["grad_norm"] is None] == [7]
    assert got[-1]["loss"] < got[0]["loss"]


def test_a_run_that_stays_not_finite_ends_and_its_checkpoint_is_good(
    corpus, tmp_path, monkeypatch, capsys
):
    inject_nan(monkeypatch, range(7, 1000))
    argv = arguments(corpus, tmp_path, steps=100, save_every=4)
    assert config.run_program(train.main, argv) == 3
    error = capsys.readouterr().err
    assert "since step 7" in error
    assert "h.0.mlp.c_fc.weight" in error
    assert all(t.isfinite().all() for t in weights(tmp_path).values())
    assert len(rows(tmp_path)) == 6 + train.BAD_STEPS_IN_A_ROW


def test_a_cpu_run_asks_cuda_nothing(corpus, tmp_path, monkeypatch):
    asked = []

    def watched(function):
        def call(*args, **options):
            caller = Path(sys._getframe(1).f_code.co_filename)
            asked.append(caller) if caller.parent in (ROOT, ROOT / "data") else None
            return function(*args, **options)

        return call

    for name in ("is_available", "device_count", "get_device_capability", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, watched(getattr(torch.cuda, name)))
    train.train(tiny(corpus, tmp_path, steps=2))
    assert not asked


def test_the_compiled_loss_sees_one_shape_only(corpus, tmp_path, monkeypatch):
    """With validation whose last batch is odd, and a sample at the end."""
    shapes = []

    def compiled(module):
        def call(x, y):
            shapes.append((tuple(x.shape), tuple(y.shape)))
            return module(x, y)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    cfg = tiny(corpus, tmp_path, steps=4, eval_every=2, eval_tokens=7 * 16, sample_tokens=5)
    train.train(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, compile="true")))
    assert set(shapes) == {((2, 16), (2, 16))}


def test_a_compiler_that_fails_is_left_out_on_auto_and_told_on_true(
    corpus, straight, tmp_path, monkeypatch, capsys
):
    def compiled(module):
        def call(x, y):
            raise RuntimeError("no C compiler\nand a long trace")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(runtime, "wants_compile", lambda requested, _: requested != "false")
    train.train(tiny(corpus, tmp_path / "auto", compile="auto"))
    out = capsys.readouterr().out
    assert out.count("no C compiler") == 1
    assert losses(tmp_path / "auto") == losses(straight)
    argv = arguments(corpus, tmp_path / "true", compile="true")
    assert config.run_program(train.main, argv) == 2
    assert "--compile=false" in capsys.readouterr().err


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_accumulated_gradients_are_those_of_the_one_big_batch(corpus, tmp_path, micro_batch):
    runs = []
    for n in (8, micro_batch):
        cfg = tiny(corpus, tmp_path / str(n), batch_tokens=128, micro_batch=n, dropout=0.0)
        run = run_module.set_up(cfg, runtime.Processes(), torch.device("cpu"))
        run_module.prepare_loss(run)
        runs.append(run)
    for step in range(3):
        figures = [train.update(run) for run in runs]
        lr, loss, norm = zip(*figures, strict=True)
        assert lr[0] == lr[1]
        assert abs(loss[0] - loss[1]) < 1e-12
        assert abs(norm[0] - norm[1]) < 1e-12
        pairs = zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True)
        for a, b in pairs:
            if step == 0:
                assert (a.grad - b.grad).abs().max() < 1e-12
            assert (a - b).abs().max() < 1e-10


def test_the_logged_loss_is_the_mean_over_all_micro_batches(corpus, tmp_path, monkeypatch):
    values = iter([1.0, 2.0, 3.0, 6.0])

    def stub(run):
        run.fast = run.loss = lambda x, y: run.model.wte.weight.sum() * 0 + next(values)
        return 0.0

    monkeypatch.setattr(train, "prepare_loss", stub)
    monkeypatch.setattr(train, "validation_loss", lambda run: 1.0)
    train.train(tiny(corpus, tmp_path, steps=1, micro_batch=1, warmup_steps=1))
    assert losses(tmp_path) == [3.0]


def test_figures_come_from_the_device_once_per_log_line(corpus, tmp_path, monkeypatch):
    count = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: count.append(1) or original(t))
    monkeypatch.setattr(torch.Tensor, "item", lambda t: count.append(1) or original(t))
    monkeypatch.setattr(train, "validation_loss", lambda run: 1.0)
    monkeypatch.setattr(evaluate, "summary", lambda *_: "")
    train.train(tiny(corpus, tmp_path, log_every=5))
    assert len(count) == 4
    assert [r["step"] for r in rows(tmp_path)] == list(range(1, 21))


@pytest.mark.parametrize(
    "options",
    [
        {"post_ln": True},
        {"norm": "rmsnorm"},
        {"final_norm": False},
        {"branch_init": "zero"},
        {"optimizer": "muon"},
        {"attention": "math"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_every_variant_learns(corpus, tmp_path, options):
    cfg = tiny(corpus, tmp_path, dropout=0.0, steps=60, micro_batch=4, **options)
    result = train.train(cfg)
    assert losses(tmp_path)[0] > 5
    assert result["val_loss"] < 3.2
    again = evaluate_folder(tmp_path, corpus)
    assert again == pytest.approx(result["val_loss"], abs=0.02)


def evaluate_folder(out_dir, corpus) -> float:
    folder = prepare.folder_of(str(corpus["corpus"]), "byte", corpus["data_dir"])
    tokens = loader.Tokens(folder, "val", 16)
    model = checkpoint.load(str(out_dir)).model
    return evaluate.validation_loss(model, tokens, windows=16, micro_batch=5)


def test_one_batch_can_be_learned_by_heart(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(loader.Batches, "windows", lambda self, step: torch.arange(4).numpy())
    train.train(tiny(corpus, tmp_path, dropout=0.0, steps=200, weight_decay=0.0))
    assert losses(tmp_path)[-1] < 0.15


def test_the_start_says_what_will_be_done(corpus, tmp_path, capsys):
    train.train(tiny(corpus, tmp_path, steps=5, post_ln=True, dropout=0.0))
    out = capsys.readouterr().out
    for words in (
        "torch.float32 (cpu is used with full precision)",
        "post-LN, 34,144 parameters",
        "norms 256 (0.75%)",
        "64 tokens = 1 process(es) × 2 micro-batches × 2 windows of 16",
        "steps 0 to 5",
        "bits per byte (gzip -9",
    ):
        assert words in out


def test_a_warm_up_longer_than_the_run_is_told_and_followed(corpus, tmp_path, capsys):
    train.train(tiny(corpus, tmp_path, steps=4, warmup_steps=10))
    assert "the learning rate ends at 4.00e-03" in capsys.readouterr().out
    assert [r["lr"] for r in rows(tmp_path)] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])


def test_epochs_are_told(tmp_path, capsys):
    """20,480 training tokens, 1,024 a step, 100 steps: 5.0 epochs, in 16 micro-batches a step."""
    rng = random.Random(3)
    text = "".join(rng.choice("abc \n") for _ in range(22754))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    own = {"corpus": tmp_path / "text.txt", "data_dir": tmp_path}
    cfg = tiny(own, tmp_path / "run", batch_tokens=1024, micro_batch=4, steps=100)
    run = run_module.set_up(cfg, runtime.Processes(), torch.device("cpu"))
    assert run.batches.tokens.n_tokens == 20479
    text = "\n".join(run_module.describe(run, "cpu", 0.06))
    assert "5.0 epochs" in text
    assert "16 micro-batches × 4 windows" in text
    assert "about 1.6 minutes" in text


def test_the_default_run_says_what_it_needs_and_what_to_run_instead(tmp_path, capsys):
    argv = [f"--data-dir={tmp_path}", f"--out-dir={tmp_path / 'run'}", "--device=cpu"]
    assert config.run_program(train.main, argv) == 2
    error = capsys.readouterr().err
    assert "python -m data.prepare fineweb_edu" in error
    assert "config/quickstart.toml" in error
    assert "124M parameters" in error
    assert error.count("\n") <= 6


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_two_processes_train_as_one_does(corpus, tmp_path, monkeypatch, dtype, tolerance):
    """Two gloo processes under torchrun, two micro-batches a step on each, beside one process with
    four: the same losses, with dropout, the same weights on both, files from the first alone."""
    options = {"dropout": 0.1, "eval_every": 10, "log_every": 3, "micro_batch": 1}
    runs, original = [], train.set_up
    monkeypatch.setattr(train, "set_up", lambda *args: runs.append(original(*args)) or runs[0])
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        train.train(tiny(corpus, tmp_path / "one", **options))
    finally:
        torch.set_default_dtype(torch.float32)
    argv = arguments(corpus, tmp_path / "two", **options)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "tests/ddp_worker.py", str(tmp_path), dtype, *argv],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=tolerance)
    values = [[r["val_loss"] for r in rows(tmp_path / d, "eval")] for d in ("one", "two")]
    assert values[1] == pytest.approx(values[0], abs=tolerance)
    assert done.stdout.count("device     cpu") == 1
    first, second = (load_file(tmp_path / f"rank{n}.safetensors") for n in (0, 1))
    assert_same_weights(first, second)
    if dtype == "float64":  # float32's rounding makes steps of Adam where a gradient is zero
        for name, p in runs[0].model.named_parameters():
            assert (p - first[name]).abs().max() < tolerance, name


@pytest.mark.slow
def test_wandb_offline_writes_into_the_runs_folder(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    argv = arguments(corpus, tmp_path, steps=3, wandb="offline")
    done = subprocess.run(
        [sys.executable, "train.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*"))
