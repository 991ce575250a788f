"""The report's every number and verdict, recomputed by other means, and its figures."""

import csv
import math
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from ablation import figures, initial, report
from model import GPTConfig

ROOT = Path(__file__).parent.parent
STUDENT = {2: 12.706, 3: 4.303}  # 0.975 quantiles for so many seeds
NAMES = {
    "pre": "pre-LN",
    "post": "post-LN",
    "post-final": "post-LN with a final norm",
    "pre-no-final": "pre-LN without a final norm",
    "pre-zero": "pre-LN, branches from zero",
    "pre-plain": "pre-LN, plain branches",
    "pre-rms": "pre-LN with RMSNorm",
}
FIGURES = ("lr_sweep", "depth", "curves", "signal", "gradients")
KEYS = ("arm", "n_layer", "warmup_steps", "lr", "seed")
ENTROPY = 3.1
AXES = {
    "arms": ["pre", "post", "pre-rms"],
    "depths": [6, 12],
    "warmups": [0, 50],
    "lrs": [3e-4, 1e-3, 1e-2],
    "seeds": [1, 2, 3],
}


def made(noise=0.02, seed=0, *, bad=True, **axes) -> list[dict]:
    """Rows as ablate.py measures them; without warm-up and at high rates, some runs are bad."""
    a, rng, rows = AXES | axes, np.random.default_rng(seed), []
    best = dict.fromkeys(NAMES, -2.7)
    best |= {"pre": -2.6, "post": -3.0, "pre-rms": -2.55, "post-final": -2.8}
    for depth in sorted(a["depths"], reverse=True):
        for s in a["seeds"]:
            shared = rng.normal(0, 0.1)
            for lr in a["lrs"]:
                for w in a["warmups"]:
                    for arm in a["arms"]:
                        x = math.log10(lr) - best[arm] - 0.1 * (w > 0)
                        loss = 2 + 0.15 * x**2 - 0.02 * depth + 0.05 * (arm == "post")
                        loss += shared + rng.normal(0, noise)
                        if bad and arm == "post" and lr == max(a["lrs"]):
                            loss = math.nan if (w == 0 and s == 2) else loss + 1.5 * (s < 3)
                        row = dict(zip(KEYS, (arm, depth, w, lr, s), strict=True))
                        row |= {"val_loss": float(loss), "diverged": not loss <= ENTROPY}
                        row |= {"unigram_entropy": ENTROPY, "parameters": 1000000 + 1000 * depth}
                        row |= {"norm_parameters": 1000 + depth + 7 * (arm == "pre")}
                        row |= {"seconds_per_step": float(rng.uniform(0.01, 0.5)), "seconds": 1.0}
                        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def at_start():
    shape = GPTConfig(vocab_size=65, block_size=8, n_layer=6, n_head=2, n_embd=16, init_std=0.1)
    rows = [*initial.lesson(n_layer=4, width=16, tokens=8), *initial.stream(shape, seeds=(0,))]
    return rows + initial.gradients(shape, depths=(2, 3, 6), seeds=(0,))


# The report again, by other means


class Again:
    """The report's numbers in arrays: losses by arm, depth, warm-up, rate and seed."""

    def __init__(self, rows):
        values = [list(dict.fromkeys(r[k] for r in rows)) for k in KEYS]
        self.arms, self.depths, self.warmups, self.lrs, self.seeds = (
            v if k in ("arm", "seed") else sorted(v) for k, v in zip(KEYS, values, strict=True)
        )
        axes = (self.arms, self.depths, self.warmups, self.lrs, self.seeds)
        shape = tuple(map(len, axes))
        self.loss, self.bad, self.speed = np.full(shape, np.nan), np.zeros(shape), np.zeros(shape)
        for r in rows:
            at = tuple(axis.index(r[k]) for axis, k in zip(axes, KEYS, strict=True))
            loss = r["val_loss"]
            self.loss[at] = loss if math.isfinite(loss) else math.inf
            self.bad[at] = not (math.isfinite(loss) and loss <= r["unigram_entropy"])
            self.speed[at] = r["seconds_per_step"]
        assert len(rows) == self.loss.size
        self.mean = self.loss.mean(axis=-1)

    def best(self, a, d):
        """Places of warm-up and rate with the lowest mean."""
        return np.unravel_index(self.mean[a, d].argmin(), self.mean[a, d].shape)

    def difference(self, one, two):
        """Mean, and half of the interval's width where there is one."""
        a, b = self.loss[one], self.loss[two]
        if not np.isfinite(a - b if np.isfinite([*a, *b]).all() else np.nan).all():
            return math.nan, None
        if len(a) == 1:
            return float(a[0] - b[0]), None
        d = a - b
        return float(d.mean()), STUDENT[len(d)] * float(d.std(ddof=1)) / math.sqrt(len(d))

    def width(self, a, d, w):
        """Walk along a fine grid of log rates and count where the line lies below the bound."""
        bound, line = self.mean[a, d].min() + 0.05, self.mean[a, d, w]
        centre = int(line.argmin())
        if not (math.isfinite(bound) and line[centre] <= bound):
            return 0.0, False
        x, total, cut = np.log10(self.lrs), 0.0, False
        for step in (-1, 1):
            i = centre
            while 0 <= i + step < len(x) and line[i + step] <= bound:
                total += abs(x[i + step] - x[i])
                i += step
            if not 0 <= i + step < len(x):
                cut = True
            elif math.isfinite(line[i + step]):
                crossing = np.interp(bound, [line[i], line[i + step]], [x[i], x[i + step]])
                total += abs(crossing - x[i])
        return float(total), cut


def told(x: float) -> str:
    return f"{x:.3f}" if math.isfinite(x) else "not finite"


def cells_of(text: str, title: str) -> list[list[str]]:
    """The rows of the table below a line that starts so, without header and rule."""
    rest = text[text.index(title) :]
    lines = re.search(r"(?:^\|.*\n?)+", rest, re.MULTILINE)[0].splitlines()
    rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines]
    assert set(rows[1]) == {"---"}
    assert len({len(r) for r in rows}) == 1
    return [rows[0], *rows[2:]]


def sentences(text: str, title: str) -> list[str]:
    section = text[text.index(title) :].split("\n## ")[0]
    return [line[2:] for line in section.splitlines() if line.startswith("- ")]


def product_of(again, arms=None):
    for d, depth in enumerate(again.depths):
        for a in range(len(again.arms)) if arms is None else arms:
            for w, warmup in enumerate(again.warmups):
                yield a, d, w, [str(depth), again.arms[a], str(warmup)]


def check_loss_table(again, text):
    header, *rows = cells_of(text, "## Loss at every learning rate")
    assert header == ["layers", "arm", "warm-up", *(f"{lr:g}" for lr in again.lrs)]
    want = []
    for a, d, w, labels in product_of(again):
        marks = ["†" if any(x) else "" for x in again.bad[a, d, w]]
        want.append(labels + [told(m) + k for m, k in zip(again.mean[a, d, w], marks, strict=True)])
    assert rows == want


def check_best_table(again, text, source):
    header, *rows = cells_of(text, "## The best rate of every arm and warm-up")
    assert len(header) == 10
    want = []
    for a, d, w, labels in product_of(again):
        i = int(again.mean[a, d, w].argmin())
        losses, (width, cut) = again.loss[a, d, w, i], again.width(a, d, w)
        spread = ""
        if len(losses) > 1 and np.isfinite(losses).all():
            spread = f" ± {losses.std(ddof=1):.3f}"
        bad = again.bad[a, d, w]
        one = next(
            r for r in source if [str(r["n_layer"]), r["arm"], str(r["warmup_steps"])] == labels
        )
        want.append(
            [
                *labels,
                f"{again.lrs[i]:g}",
                told(losses.mean()) + spread,
                f"{100 * bad.mean():.0f}% of {bad.size}",
                ("≥ " if cut else "") + f"{width:.2f}",
                f"{one['parameters']:,}",
                f"{one['norm_parameters']:,}",
                f"{again.speed[a, d, w].mean():.3f}",
            ]
        )
    assert rows == want


def check_paired_table(again, text):
    title = "## Differences at the same rate"
    if len(again.arms) == 1:
        assert title not in text
        return
    header, *rows = cells_of(text, title)
    assert header[3:] == [f"{lr:g}" for lr in again.lrs]
    want = []
    for a, d, w, labels in product_of(again, range(1, len(again.arms))):
        row = [labels[0], f"{again.arms[a]} − {again.arms[0]}", labels[2]]
        for i in range(len(again.lrs)):
            mean, half = again.difference((a, d, w, i), (0, d, w, i))
            alone = f"{mean:+.3f}" if math.isfinite(mean) else "not finite"
            row.append(alone if half is None else f"{mean:+.3f} ± {half:.3f}")
        want.append(row)
    assert rows == want


def comparison(again, one, two) -> str:
    """What may be said about arm one beside arm two."""
    a, b = NAMES[again.arms[one[0]]], NAMES[again.arms[two[0]]]
    mean, half = again.difference(one, two)
    if math.isnan(mean):
        return f"{a} or {b} did not stay finite"
    if half is None:
        return f"{a} ends {mean:+.3f} nats from {b}; one seed can't tell whether that is chance"
    low, high = mean - half, mean + half
    numbers = f"(difference {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})"
    if low <= 0 <= high:
        return f"these runs do not decide between {a} and {b} {numbers}"
    return f"{a} ends {'above' if low > 0 else 'below'} {b} {numbers}"


def highest(again, a, d, w) -> str:
    """Rates from the lowest up to the first one where a run diverged."""
    good = [lr for i, lr in enumerate(again.lrs) if not again.bad[a, d, w, : i + 1].any()]
    return f"up to {max(good):g}" if good else "at no rate of the grid"


def depth_sentence(again, a) -> str:
    first, last = (0, 0), (len(again.depths) - 1,) * 2
    d = last[0]
    mean, half = again.difference((a, d, *again.best(a, d)), (a, 0, *again.best(a, 0)))
    if math.isnan(mean):
        change = "is not finite for every seed"
    elif half is None:
        change = f"changes by {mean:+.3f} nats (one seed)"
    else:
        undecided = "" if abs(mean) > half else ", which does not decide its sign"
        change = f"changes by {mean:+.3f} ± {half:.3f} nats{undecided}"
    shares = [100 * again.bad[a, i].mean() for i in (first[0], d)]
    return (
        f"**From {again.depths[0]} to {again.depths[-1]} layers, {NAMES[again.arms[a]]}:** the "
        f"best loss {change}; the share of diverged runs goes from {shares[0]:.0f}% to "
        f"{shares[1]:.0f}%."
    )


def warmup_sentence(again, a) -> str:
    change = again.bad[a, :, -1].sum(axis=-1) - again.bad[a, :, 0].sum(axis=-1)
    helped = [
        f"{again.depths[d]} layers at {again.lrs[i]:g}"
        for d, i in zip(*np.where(change < 0), strict=True)
    ]
    return (
        f"**Warm-up {again.warmups[-1]} instead of {again.warmups[0]}, {NAMES[again.arms[a]]}:** "
        f"fewer runs diverge in {len(helped)} of {change.size} combinations of rate and depth"
        + (f" ({', '.join(helped)})" if helped else "")
        + f", more in {int((change > 0).sum())}."
    )


def check_verdicts(again, text):
    want = []
    for a in range(1, len(again.arms)):
        for d, depth in enumerate(again.depths):
            said = comparison(again, (a, d, *again.best(a, d)), (0, d, *again.best(0, d)))
            want.append(f"**{depth} layers, each at its best rate and warm-up:** {said}.")
        for d, depth in enumerate(again.depths):
            said = [
                f"with warm-up {warmup} {comparison(again, (a, d, w, 0), (0, d, w, 0))}"
                for w, warmup in enumerate(again.warmups)
            ]
            want.append(
                f"**{depth} layers at the lowest rate, {again.lrs[0]:g}:** {'; '.join(said)}."
            )
    for d, depth in enumerate(again.depths):
        said = [
            f"{NAMES[arm]} with warm-up {warmup} trains {highest(again, a, d, w)} "
            f"({100 * again.bad[a, d, w].mean():.0f}% of its runs diverged)"
            for a, arm in enumerate(again.arms)
            for w, warmup in enumerate(again.warmups)
        ]
        want.append(f"**{depth} layers, how high the rate may be:** {'; '.join(said)}.")
    for a in range(len(again.arms)):
        want += [warmup_sentence(again, a)] if len(again.warmups) > 1 else []
        want += [depth_sentence(again, a)] if len(again.depths) > 1 else []
    assert sentences(text, "## What the runs say") == want


def check_start(rows, text):
    """The section about what is measured before the first step."""
    value = {(r["figure"], r["series"], r["depth"], r["layer"]): r["value"] for r in rows}
    n = max(k[3] for k in value if k[0] == "signal")
    lesson, stream, gradient, *ratios = sentences(text, "## Before the first step")
    numbers = [value["signal", f"bare, gain {g}", n, n] for g in (0.7, 1.3)]
    for wiring in ("norm and skip", "norm"):
        numbers += [value["gradient", f"{wiring}, gain {g}", n, 0] for g in (0.7, 1.0, 1.3)]
    bare, both, alone = numbers[:2], numbers[2:5], numbers[5:]
    assert lesson.startswith(f"**{n} random layers.** Bare, of gain 0.7, they leave {bare[0]:.3g} ")
    assert f"gain 1.3 they make it {bare[1]:.3g} times as large" in lesson
    gains = ", ".join(f"{x:.3g} (gain {g})" for x, g in zip(both, (0.7, 1.0, 1.3), strict=True))
    assert f"With norm and skip a gradient of 1 arrives at the input as {gains}; " in lesson
    assert lesson.endswith(f"as {', '.join(f'{x:.3g}' for x in alone)}.")

    depth = max(k[2] for k in value if k[0] == "stream")
    parts, x = [], np.arange(1, depth + 1)
    for init in ("xavier", "scaled", "plain"):
        y = np.array([value["stream", f"pre, {init}", depth, l] for l in x])
        design = np.stack([np.ones(depth), x], axis=1)
        (_, slope), residual, *_ = np.linalg.lstsq(design, y, rcond=None)
        r2 = 1 - residual[0] / ((y - y.mean()) ** 2).sum()
        parts.append(f"{slope:.3f} a block (R² {r2:.3f}) under `{init}`")
        post = [value["stream", f"post, {init}", depth, l] for l in x]
        assert post == pytest.approx([1] * depth, abs=0.01)
    assert f"**The stream** of {depth} pre-LN blocks gains mean square by {', '.join(parts)}." in (
        stream
    )

    last = {k[1:3]: v for k, v in value.items() if k[0] == "gradients" and k[2] == k[3]}
    depths = sorted({d for _, d in last})
    header, *table = cells_of(text, "Norm of the loss's gradient")
    assert header[1:] == [f"{d} layers" for d in depths]
    series = [f"{arm}, {init}" for arm in ("pre", "post") for init in ("xavier", "scaled", "plain")]
    assert table == [[s, *(f"{last[s, d]:.3f}" for d in depths)] for s in series]
    a, b = depths[0], depths[-1]
    parts = []
    for s in series:
        arm, init = s.split(", ")
        factor = last[s, b] / last[s, a]
        words = f"hardly changes (× {factor:.2f})"
        if factor < 0.8:
            words = f"falls by a factor of {1 / factor:.2f}"
        elif factor > 1.25:
            words = f"grows by a factor of {factor:.2f}"
        parts.append(f"in {NAMES[arm]} under `{init}` it {words}")
    assert gradient == (
        "**The gradient** of the last layer's second MLP matrix, "
        f"from {a} to {b} layers: {'; '.join(parts)}."
    )
    want, first = [], None
    for init in ("xavier", "scaled", "plain"):
        pre, post = (last[f"{arm}, {init}", b] for arm in ("pre", "post"))
        name, factor = ("pre-LN", pre / post) if pre > post else ("post-LN", post / pre)
        first = first or name
        end = "." if name == first else ": the reverse of `xavier`."
        want.append(
            f"At {b} layers under `{init}`, {name}'s is {factor:.1f} times the other's{end}"
        )
    assert ratios == want


def check(rows, at_start, text):
    again = Again(rows)
    assert text.startswith("# " + " against ".join(NAMES[a] for a in again.arms) + "\n")
    entropy = rows[0]["unigram_entropy"]
    assert f"{len(rows)} runs, with {len(again.seeds)} seed(s);" in text
    assert f"ends above {entropy:.3f}, the entropy" in text
    check_loss_table(again, text)
    check_best_table(again, text, rows)
    check_paired_table(again, text)
    check_verdicts(again, text)
    check_start(at_start, text)
    if len(again.seeds) > 1 and len(again.arms) > 1:
        assert f"95 % interval (Student's t, {len(again.seeds)} seeds)" in text
    for figure in FIGURES:
        assert text.count(f"]({figure}.png)") == 1


# The tests


@pytest.mark.parametrize(
    ("axes", "noise", "bad"),
    [
        ({}, 0.02, True),
        ({"arms": ["pre", "post"]}, 0.02, True),
        ({"arms": ["post", "pre"]}, 0.001, False),
        ({"seeds": [1, 2]}, 0.001, True),
        ({"seeds": [4]}, 0.02, True),
        ({"arms": ["post"]}, 0.02, True),
        ({"arms": ["pre"], "seeds": [1], "depths": [6], "warmups": [50]}, 0.02, False),
        ({"depths": [12]}, 0.02, True),
        ({"lrs": [1e-3]}, 0.02, True),
        ({"warmups": [0]}, 0.1, True),
        ({"lrs": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1]}, 0.005, True),
    ],
    ids=str,
)
def test_every_number_and_verdict_follows_from_the_rows(axes, noise, bad, at_start):
    rows = made(noise, bad=bad, **axes)
    check(rows, at_start, report.markdown(rows, at_start, "Each: little."))


def test_the_rows_of_these_tests_have_all_cases():
    rows = made()
    assert any(math.isnan(r["val_loss"]) for r in rows)
    assert any(r["diverged"] and math.isfinite(r["val_loss"]) for r in rows)
    again = Again(rows)
    places = [(a, d, w) for a in range(3) for d in range(2) for w in range(2)]
    widths = [again.width(*p) for p in places]
    assert {cut for _, cut in widths} == {True, False}
    assert any(0 < width < 1 for width, _ in widths)


def test_the_committed_report_follows_from_its_tables():
    """results/ablation/: every number of report.md from results.csv and init.csv."""
    folder = ROOT / "results" / "ablation"
    rows, at_start = read(folder / "results.csv"), read(folder / "init.csv")
    check(rows, at_start, (folder / "report.md").read_text(encoding="utf-8"))


def read(path: Path) -> list[dict]:
    """Words, whole numbers, numbers and truths of a table as ablate.py writes it."""
    whole = {"n_layer", "warmup_steps", "seed", "parameters", "norm_parameters", "depth", "layer"}
    words = {"arm", "figure", "series"}
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for key, value in row.items():
            if key == "diverged":
                row[key] = {"True": True, "False": False}[value]
            elif key not in words:
                row[key] = int(value) if key in whole else float(value)
    return rows


def test_a_table_on_disk_gives_the_same_report(tmp_path, at_start):
    rows = made()
    for name, content in (("results.csv", rows), ("init.csv", at_start)):
        (tmp_path / name).write_text(report.to_csv(content), encoding="utf-8", newline="")
    again = [read(tmp_path / name) for name in ("results.csv", "init.csv")]
    assert list(again[0][0]) == list(rows[0])
    assert report.markdown(*again, "x") == report.markdown(rows, at_start, "x")


def set_losses(rows, arm, values) -> None:
    for row in rows:
        if row["arm"] == arm:
            row["val_loss"] = values[row["seed"]]


@pytest.mark.parametrize(
    ("post", "words"),
    [
        ({1: 2.1, 2: 2.12, 3: 2.11}, "post-LN ends above pre-LN (difference +0.110"),
        ({1: 1.9, 2: 1.92, 3: 1.91}, "post-LN ends below pre-LN (difference -0.090"),
        ({1: 2.1, 2: 1.92, 3: 2.01}, "these runs do not decide between post-LN and pre-LN"),
        ({1: 2.0, 2: 2.0, 3: 2.0}, "these runs do not decide between post-LN and pre-LN"),
        ({1: 2.1, 2: math.nan, 3: 2.11}, "post-LN or pre-LN did not stay finite"),
    ],
    ids=str,
)
def test_above_and_below_are_said_only_where_the_interval_leaves_out_zero(post, words, at_start):
    rows = made(arms=["pre", "post"], lrs=[1e-3], warmups=[0], depths=[6], bad=False)
    set_losses(rows, "pre", {1: 2.0, 2: 2.0, 3: 2.0})
    set_losses(rows, "post", post)
    text = report.markdown(rows, at_start, "")
    best, lowest, *_ = sentences(text, "## What the runs say")
    assert words in best
    assert words in lowest
    for other in ("ends above", "ends below", "do not decide", "did not stay finite"):
        assert (other in best) == (other in words), other


def test_one_seed_claims_no_interval(at_start):
    text = report.markdown(made(seeds=[1]), at_start, "")
    before = text.split("## Before the first step")[0]
    for word in ("±", "interval", "Student", "Mean over", "ends above p", "ends below p"):
        assert word not in before, word
    assert "one seed can't tell whether that is chance" in before


def test_the_highest_rate_lies_below_the_first_one_where_a_run_diverged(at_start):
    rows = made(arms=["pre"], bad=False)
    for row in rows:
        if (row["lr"], row["warmup_steps"], row["seed"]) == (1e-3, 0, 2):
            row |= {"val_loss": ENTROPY + 0.5, "diverged": True}
    text = report.markdown(rows, at_start, "")
    check(rows, at_start, text)
    assert "pre-LN with warm-up 0 trains up to 0.0003 (11% of its runs diverged)" in text
    assert "pre-LN with warm-up 50 trains up to 0.01 (0% of its runs diverged)" in text


def test_an_arm_that_is_never_finite_has_no_range_of_good_rates(at_start):
    rows = made(arms=["pre", "post"])
    set_losses(rows, "post", dict.fromkeys((1, 2, 3), math.nan))
    for row in rows:
        row["diverged"] |= row["arm"] == "post"
    text = report.markdown(rows, at_start, "")
    check(rows, at_start, text)
    _, *table = cells_of(text, "## The best rate of every arm and warm-up")
    assert {(r[4], r[5], r[6]) for r in table if r[1] == "post"} == {
        ("not finite", "100% of 9", "0.00")
    }
    assert "nan" not in text
    assert "post-LN with warm-up 0 trains at no rate of the grid" in text


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 14, 15, 20, 40])
def test_the_quantile_is_students(n):
    """Its density integrated numerically from 0 to the quantile holds 47.5 %."""
    half = report.interval([float(i % 2) for i in range(n)])[1]
    spread = np.std([i % 2 for i in range(n)], ddof=1) / math.sqrt(n)
    nu = n - 1
    x = np.linspace(0, half / spread, 200001)
    constant = math.gamma((nu + 1) / 2) / math.gamma(nu / 2) / math.sqrt(nu * math.pi)
    density = constant * (1 + x**2 / nu) ** (-(nu + 1) / 2)
    area = ((density[1:] + density[:-1]) / 2 * np.diff(x)).sum()
    assert area == pytest.approx(0.475, abs=2e-4)


def histories_of(rows) -> dict[tuple, list]:
    """Training losses of 100 steps; fewer where a run diverged, and some not finite."""
    found = {}
    for r in rows:
        losses = [r["val_loss"] + 3 * math.exp(-i / 20) for i in range(100)]
        if not math.isfinite(r["val_loss"]):
            losses = [5.0, 6.0, None, None, None]
        found[tuple(r[k] for k in KEYS)] = losses
    return found


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"arms": ["pre"], "depths": [6], "lrs": [1e-3], "seeds": [1], "warmups": [0]},
    ],
    ids=str,
)
def test_five_figures_are_drawn(tmp_path, at_start, axes):
    rows = made(**axes)
    figures.draw(tmp_path, report.Results(rows), at_start, histories_of(rows))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"{f}.png" for f in FIGURES)
    for path in tmp_path.iterdir():
        image = matplotlib.image.imread(path)
        assert path.stat().st_size > 8000
        assert image.shape[1] > 900
        assert image[..., :3].std() > 0.02


def test_an_ablation_without_a_finite_run_has_figures_too(tmp_path):
    rows = made(arms=["post"], depths=[6], warmups=[0], seeds=[1, 2])
    rows = [r | {"val_loss": math.nan, "diverged": True} for r in rows]
    r = report.Results(rows)
    figures.lr_sweep(r, tmp_path / "lr_sweep.png")
    figures.depth(r, tmp_path / "depth.png")
    figures.curves(r, histories_of(rows), tmp_path / "curves.png")
    assert all(p.stat().st_size > 4000 for p in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 3


def test_an_arm_has_one_colour_in_every_figure_and_a_warm_up_one_kind_of_line(
    at_start, monkeypatch, tmp_path
):
    drawn = {}
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.update({path.stem: figure}))
    rows = made(bad=False)
    figures.draw(tmp_path, report.Results(rows), at_start, histories_of(rows))
    assert drawn.keys() == set(FIGURES)
    colours = [report.COLOURS[a].upper() for a in AXES["arms"]]
    assert len(set(map(str.upper, report.COLOURS.values()))) == len(report.COLOURS) == 7
    for name in ("lr_sweep", "depth", "curves"):
        axes: list[Axes] = drawn[name].axes
        for ax in axes:
            lines = [l for l in ax.lines if l.get_linewidth() == 1.8]
            got = [(to_hex(l.get_color()).upper(), l.get_linestyle()) for l in lines]
            assert got == [(c, ls) for c in colours for ls in ("--", "-")], name
        (legend,) = drawn[name].legends
        for handle, label in zip(legend.get_lines(), legend.get_texts(), strict=False):
            arm, _, warmup = label.get_text().partition(", warm-up ")
            if warmup:
                own = next(a for a in AXES["arms"] if NAMES[a] == arm)
                assert to_hex(handle.get_color()).upper() == report.COLOURS[own].upper()
                assert handle.get_linestyle() == {"0": "--", "50": "-"}[warmup]
    pair = [report.COLOURS[a].upper() for a in ("pre", "post")]
    for ax in drawn["gradients"].axes:
        assert [to_hex(l.get_color()).upper() for l in ax.lines] == pair
    for ax in (drawn["signal"].axes[3], drawn["signal"].axes[7]):
        for l in ax.lines:
            arm = l.get_label().split(",")[0]
            assert to_hex(l.get_color()).upper() == report.COLOURS[arm].upper()


def test_the_sweep_shows_the_means_and_marks_what_diverged(at_start, monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.update({path.stem: figure}))
    rows = made()
    figures.lr_sweep(report.Results(rows), tmp_path / "lr_sweep.png")
    again = Again(rows)
    ceiling = max(ENTROPY, again.loss[np.isfinite(again.loss)].max())
    for d, ax in enumerate(drawn["lr_sweep"].axes):
        lines = [l for l in ax.lines if l.get_linewidth() == 1.8]
        want = np.minimum(again.loss, ceiling).mean(axis=-1)[:, d].reshape(6, 3)
        assert np.allclose([l.get_ydata() for l in lines], want)
        crosses = [l for l in ax.lines if l.get_marker() == "x"]
        assert sum(len(l.get_xdata()) for l in crosses) == again.bad[:, d].any(axis=-1).sum() > 0


def test_names_and_colours_are_there_for_each_arm():
    import ablate

    assert report.NAMES.keys() == report.COLOURS.keys() == ablate.ARMS.keys()
    assert len(set(report.NAMES.values())) == 7


@pytest.mark.parametrize("depths", [[6], [6, 12]])
@pytest.mark.parametrize("arms", [["pre"], ["pre", "post", "pre-rms"], [*NAMES]])
def test_no_legend_is_wider_than_its_figure(arms, depths, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(figures, "_save", lambda figure, _: found.append(figure))
    rows = made(bad=False, arms=arms, depths=depths)
    for row in rows:
        row["diverged"] = False
    figures.lr_sweep(report.Results(rows), tmp_path / "x.png")
    figures.depth(report.Results(rows), tmp_path / "x.png")
    for figure in found:
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
    assert len(found) == 2
