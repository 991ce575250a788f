"""What a run reports: speeds, losses, metrics.jsonl, loss.png and the lines on a terminal."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import metrics
from data.loader import replace_file
from metrics import Meter, RunLog, Stopwatch, flops_per_token, mfu, n_params
from model import GPT, GPTConfig
from runtime import Processes

START = {"kind": "start", "device": "cpu", "parameters": 28064}


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def meter(**changes) -> Meter:
    settings = {"batch_tokens": 64, "flops": 1000, "peak": 1e6, "processes": Processes()}
    return Meter(**settings | changes)


def row(step: int, **changes) -> dict:
    values = {"kind": "train", "step": step, "tokens": 64 * step, "loss": 4.0 - step / 100}
    values |= {"lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 12345.6, "mfu": None}
    return values | changes


def strict_lines(path) -> list[dict]:
    """The records of a file, each line of which must be JSON in the strict sense."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_gpt2_small_costs_what_the_formula_says():
    config = GPTConfig()
    with torch.device("meta"):
        small = GPT(GPTConfig(vocab_size=50304))
    # The number of the cases counts no biases of linear layers and norms (nanoGPT's bias=False).
    biases = sum(p.numel() for name, p in small.named_parameters() if name.endswith("bias"))
    assert n_params(small)["without_positions"] - biases == 123_587_328
    assert flops_per_token(123_587_328, config) == 854_770_176


@pytest.mark.parametrize(
    ("n", "L", "C", "T", "flops"),
    [(1000, 1, 1, 1, 6012), (0, 2, 3, 5, 360), (27_552, 2, 32, 16, 165_312 + 12_288)],
)
def test_the_cost_of_a_token_is_6n_and_12lct(n, L, C, T, flops):
    config = GPTConfig(n_layer=L, n_head=1, n_embd=C, block_size=T)
    assert flops_per_token(n, config) == flops


def test_utilisation_is_a_share_of_the_peak_and_unknown_without_one():
    assert mfu(100_000, 854_770_176, 312e12) == pytest.approx(0.2740, abs=5e-5)
    assert mfu(100_000, 854_770_176, None) is None


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    replace_file(path, "äß\r\n\n")
    assert path.read_bytes() == "äß\r\n\n".encode()

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(metrics.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "new")
    assert path.read_bytes() == "äß\r\n\n".encode()


def test_a_stopwatch_counts_laps_and_leaves_out_what_is_paused(clock):
    watch = Stopwatch()
    clock.now += 2
    assert watch.lap() == 2
    clock.now += 1
    with watch.paused():
        clock.now += 50
    clock.now += 3
    with watch.paused():
        clock.now += 7
    assert watch.lap() == 4
    clock.now += 0.5
    assert watch.lap() == 0.5


def test_an_evaluation_does_not_lower_the_speed_that_is_reported(clock):
    m = meter(peak=1e6, flops=1000)
    for pause in (0, 5):
        m.add(1e-3, torch.tensor(1.0), torch.tensor(1.0))
        clock.now += 0.25
        with m.watch.paused():
            clock.now += pause
        (record,), _ = m.settle(1)
        assert record["tokens_per_s"] == 64 / 0.25
        assert record["mfu"] == pytest.approx(256 * 1000 / 1e6)


def test_the_steps_between_two_settlings_become_rows_with_their_own_numbers(clock):
    m = meter(peak=None)
    losses, norms = [3.5, 3.25, 3.0], [1.0, 2.0, 0.5]
    for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        m.add(i / 10, torch.tensor(loss), torch.tensor(norm))
    clock.now += 2
    records, stop = m.settle(13)
    assert stop is False
    assert records == [
        {
            "kind": "train",
            "step": step,
            "tokens": step * 64,
            "loss": losses[i],
            "lr": i / 10,
            "grad_norm": norms[i],
            "tokens_per_s": 96.0,
            "mfu": None,
        }
        for i, step in enumerate((11, 12, 13))
    ]
    m.add(0.5, torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor(1.5, dtype=torch.float64))
    clock.now += 1
    ((last,), _) = m.settle(14)
    assert (last["step"], last["loss"], last["grad_norm"]) == (14, 2.5, 1.5)
    assert last["tokens_per_s"] == 64.0


def test_losses_are_means_over_the_processes_and_any_wish_to_stop_counts(clock):
    class Three(Processes):
        def sum(self, tensor):
            """As if the two others had losses and norms of 0, and only one of them a wish."""
            others = torch.zeros_like(tensor)
            others[-1] = 1.0
            return tensor.add_(others)

    m = meter(processes=Three(world_size=3), peak=1e6)
    m.add(1e-3, torch.tensor(6.0), torch.tensor(3.0))
    clock.now += 1
    (record,), stop = m.settle(1, stop=False)
    assert stop is True
    assert (record["loss"], record["grad_norm"]) == (2.0, 1.0)
    assert record["mfu"] == pytest.approx(64 * 1000 / 3e6)


@pytest.mark.parametrize("wish", [False, True])
def test_a_wish_to_stop_comes_through(wish, clock):
    m = meter()
    m.add(1e-3, torch.tensor(1.0), torch.tensor(1.0))
    clock.now += 1
    assert m.settle(1, wish)[1] is wish


def test_the_device_is_looked_at_once_per_settling_and_never_in_between(clock, monkeypatch):
    looks = []
    for name in ("tolist", "item", "cpu", "numpy", "__float__", "__bool__", "__int__"):
        before = getattr(torch.Tensor, name)

        def look(self, *args, name=name, before=before, **kwargs):
            looks.append(name)
            return before(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, look)
    m = meter()
    for _ in range(20):
        m.add(1e-3, torch.tensor(1.0), torch.tensor(1.0))
    assert looks == []
    clock.now += 1
    assert len(m.settle(20)[0]) == 20
    assert len(looks) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_steps_in_a_row_are_counted_across_settlings_until_a_good_one(bad, clock):
    m = meter()
    counts = []
    for step, norms in enumerate([[1.0, bad], [bad], [bad, 1.0], [bad, 1.0, bad, bad], [2.0]]):
        for norm in norms:
            m.add(1e-3, torch.tensor(1.0), torch.tensor(norm))
        clock.now += 1
        m.settle(step + 10)
        counts.append(m.bad_in_a_row)
    assert counts == [1, 2, 0, 2, 0]


def test_a_log_begins_with_the_start_and_goes_on_with_rows(tmp_path):
    log = RunLog(tmp_path, START, 20)
    log.train([row(1), row(2)])
    log.validation(2, 3.5)
    log.train([row(3)])
    log.close()
    records = strict_lines(tmp_path / "metrics.jsonl")
    validation = {"kind": "eval", "step": 2, "val_loss": 3.5}
    assert records == [START, row(1), row(2), validation, row(3)]


def test_every_row_is_on_the_disk_before_the_run_ends(tmp_path):
    log = RunLog(tmp_path, START, 20)
    for step in range(1, 21):
        log.train([row(step)])
        assert len(strict_lines(tmp_path / "metrics.jsonl")) == 1 + step
    log.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(bad, tmp_path, capsys):
    log = RunLog(tmp_path, START, 20)
    log.train([row(1, loss=bad, grad_norm=bad)])
    log.validation(1, bad)
    log.close()
    _, train, validation = strict_lines(tmp_path / "metrics.jsonl")
    assert train == row(1, loss=None, grad_norm=None)
    assert validation == {"kind": "eval", "step": 1, "val_loss": None}


def write_old(folder, last_line: str = "") -> None:
    """The log of a run that was killed at step 17, validated every 5 steps."""
    records = [START]
    for step in range(1, 18):
        records.append(row(step))
        if step % 5 == 0:
            records.append({"kind": "eval", "step": step, "val_loss": 3.0})
    text = "".join(json.dumps(r) + "\n" for r in records) + last_line
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8", newline="")


@pytest.mark.parametrize(
    "last_line", ["", '{"kind": "train", "st', json.dumps(row(18)), "\0\0\0\0", "{", "\n"]
)
def test_a_resumed_log_has_every_step_once_and_keeps_what_went_before(last_line, tmp_path):
    """Killed at step 17 after a checkpoint at 10, with a last line that may be incomplete."""
    write_old(tmp_path, last_line)
    old = strict_lines_before(tmp_path, step=10)
    log = RunLog(tmp_path, START | {"device": "other"}, 20, resume_step=10)
    for step in range(11, 21):
        log.train([row(step, loss=1.0)])
    log.validation(20, 2.0)
    log.close()
    records = strict_lines(tmp_path / "metrics.jsonl")
    assert records[: len(old)] == old
    assert records[len(old)] == {
        "kind": "resume",
        "step": 10,
        "device": "other",
        "parameters": 28064,
    }
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 21))
    assert [r["step"] for r in records if r["kind"] == "eval"] == [5, 10, 20]
    assert [r["kind"] for r in records].count("start") == 1
    assert (tmp_path / "loss.png").exists()


def strict_lines_before(folder, step: int) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    return [r for r in map(json.loads, lines) if r.get("step", 0) <= step]


def test_a_log_is_resumed_twice_without_a_step_twice(tmp_path):
    write_old(tmp_path)
    for step in (10, 12):
        log = RunLog(tmp_path, START, 20, resume_step=step)
        log.train([row(s) for s in range(step + 1, step + 6)])
        log.close()
    records = strict_lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 18))
    assert [(r["kind"], r["step"]) for r in records if r["kind"] == "resume"] == [
        ("resume", 10),
        ("resume", 12),
    ]


def test_resuming_where_no_log_is_starts_one(tmp_path):
    RunLog(tmp_path, START, 20, resume_step=10).close()
    assert strict_lines(tmp_path / "metrics.jsonl")[0]["kind"] == "start"


def test_a_new_run_does_not_continue_an_old_log(tmp_path):
    write_old(tmp_path)
    RunLog(tmp_path, START, 20).close()
    assert strict_lines(tmp_path / "metrics.jsonl") == [START]


@pytest.mark.parametrize("loss", [2.5, math.nan])
def test_curves_are_drawn_at_each_validation(loss, tmp_path):
    log = RunLog(tmp_path, START, 20)
    log.train([row(1), row(2, loss=math.nan), row(3)])
    assert not (tmp_path / "loss.png").exists()
    log.validation(3, loss)
    first = (tmp_path / "loss.png").read_bytes()
    log.train([row(4)])
    log.validation(4, 2.0)
    log.close()
    second = (tmp_path / "loss.png").read_bytes()
    for image in (first, second):
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        assert image.endswith(b"IEND\xaeB`\x82")
    assert first != second
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png"}


def test_the_other_processes_write_and_show_nothing(tmp_path, capsys):
    log = RunLog(tmp_path, START, 20, active=False)
    log.train([row(1)])
    log.validation(1, 2.0)
    log.say("hello")
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_step_is_a_plain_line(tmp_path, capsys):
    log = RunLog(tmp_path, START, 20)
    log.train([row(6), row(7, loss=3.21987, grad_norm=1.234)])
    log.validation(7, 3.45678)
    log.close()
    out, err = capsys.readouterr()
    step, validation = out.splitlines()
    assert err == ""
    assert "7/20" in step
    assert "loss 3.2199" in step
    assert "lr 1.00e-03" in step
    assert "|g| 1.23" in step
    assert "12,346 tokens/s" in step
    assert "MFU n/a" in step
    assert "6/20" not in step
    assert "7/20" in validation
    assert "validation loss 3.4568" in validation


def test_a_known_utilisation_is_shown_as_a_percentage(tmp_path, capsys):
    log = RunLog(tmp_path, START, 20)
    log.train([row(1, mfu=0.27396)])
    log.close()
    assert "MFU 27.4%" in capsys.readouterr().out


def test_on_a_terminal_a_bar_shows_the_last_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    log = RunLog(tmp_path, START, 20, resume_step=10)
    assert log.bar.n == 10
    log.train([row(11), row(12)])
    assert log.bar.n == 12
    log.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "loss 3.880" in err
    assert "12/20" in err


def test_weights_and_biases_gets_every_row_at_its_step(tmp_path, monkeypatch):
    logged = []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end")
    )
    monkeypatch.setattr(metrics, "_start_wandb", lambda *_: run)
    log = RunLog(tmp_path, START, 20, wandb_mode="offline")
    log.train([row(1), row(2)])
    log.validation(2, 3.0)
    log.close()
    assert [step for step, _ in logged[:-1]] == [1, 2, 2]
    assert logged[0][1] == {k: v for k, v in row(1).items() if k != "kind"}
    assert logged[2][1] == {"step": 2, "val_loss": 3.0}
    assert logged[-1] == "end"
