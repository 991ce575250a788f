"""What an ablation's rows say: statistics, verdicts that follow from them, tables and figures.

Nothing is trained or read here: `rows` are those of results.csv, a dict per run, and `initial`
those of initial.py. All that is told is computed from them.
"""

import csv
import io
import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import correlation, fmean, linear_regression, stdev

NEAR = 0.05  # nats per token: what counts as as good as the best
# Quantiles of Student's t distribution at 0.975 for 1, 2, ... degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
NAMES = {"pre": "pre-LN", "post": "post-LN", "post-final": "post-LN with a final norm"}
NAMES |= {"pre-no-final": "pre-LN without a final norm", "pre-zero": "pre-LN, branches from zero"}
NAMES |= {"pre-plain": "pre-LN, plain branches", "pre-rms": "pre-LN with RMSNorm"}
# Okabe and Ito's palette, which colour-blind people can tell apart.
COLOURS = {"pre": "#0072B2", "post": "#D55E00", "post-final": "#CC79A7", "pre-no-final": "#56B4E9"}
COLOURS |= {"pre-zero": "#009E73", "pre-plain": "#E69F00", "pre-rms": "#000000"}


def to_csv(rows: list[dict]) -> str:
    """The rows, whose keys are the first line. Numbers keep all their digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def interval(differences: list[float]) -> tuple[float, float] | None:
    """Mean and half the width of its 95 % interval, by Student's t over the seeds; None where it
    can't be told: for one seed, or a difference that is not finite."""
    n = len(differences)
    if n < 2 or not all(map(math.isfinite, differences)):
        return None
    # Beyond the table the Cornish-Fisher expansion (Abramowitz & Stegun, 26.7.5), within 0.002.
    quantile = T_975[n - 2] if n - 2 < len(T_975) else 1.96 + 2.37 / (n - 1) + 2.82 / (n - 1) ** 2
    return fmean(differences), quantile * stdev(differences) / math.sqrt(n)


class Results:
    """The runs by what they share. A run that is not finite counts as infinitely bad."""

    def __init__(self, rows: list[dict]):
        self.rows = rows
        self.runs = {
            (r["arm"], r["n_layer"], r["warmup_steps"], r["lr"], r["seed"]): r for r in rows
        }
        self.arms, self.depths, self.warmups, self.lrs, self.seeds = (
            list(dict.fromkeys(values)) for values in zip(*self.runs, strict=True)
        )
        for axis in (self.depths, self.warmups, self.lrs):
            axis.sort()

    def losses(self, arm: str, depth: int, warmup: int, lr: float) -> list[float]:
        """Final validation losses in nats per token, a seed each."""
        found = [self.runs[arm, depth, warmup, lr, seed]["val_loss"] for seed in self.seeds]
        return [x if math.isfinite(x) else math.inf for x in found]

    def diverged(self, arm: str, depth: int, warmup: int, lrs: Iterable[float]) -> float:
        """Share of the runs that diverged."""
        runs = [self.runs[arm, depth, warmup, lr, s] for lr in lrs for s in self.seeds]
        return fmean(r["diverged"] for r in runs)

    def line(self, arm: str, depth: int, warmup: int) -> dict[float, float]:
        """Mean loss over seeds by learning rate."""
        return {lr: fmean(self.losses(arm, depth, warmup, lr)) for lr in self.lrs}

    def best_lr(self, arm: str, depth: int, warmup: int) -> float:
        line = self.line(arm, depth, warmup)
        return min(line, key=line.get)

    def best(self, arm: str, depth: int) -> tuple[int, float]:
        """Warm-up and learning rate with the lowest mean loss."""
        lines = {w: self.line(arm, depth, w) for w in self.warmups}
        return min(((w, lr) for w in lines for lr in self.lrs), key=lambda p: lines[p[0]][p[1]])

    def near(self, arm: str, depth: int, warmup: int) -> tuple[float, bool]:
        """Width, in factors of ten, of the learning rates around the line's best one at which the
        mean loss, straight between the measured rates, is within NEAR of the arm's own best at
        that depth with any warm-up; and whether the range ends with the grid instead."""
        bound = self.line(arm, depth, self.best(arm, depth)[0])
        bound = min(bound.values()) + NEAR
        line = self.line(arm, depth, warmup)
        centre = self.lrs.index(self.best_lr(arm, depth, warmup))
        if not line[self.lrs[centre]] <= bound < math.inf:
            return 0.0, False
        width, cut = 0.0, False
        for side in (self.lrs[centre::-1], self.lrs[centre:]):
            for a, b in pairwise(side):
                step = abs(math.log10(b / a))
                if line[b] > bound:
                    width += step * (bound - line[a]) / (line[b] - line[a])
                    break
                width += step
            else:
                cut = True
        return width, cut

    def highest_lr(self, arm: str, depth: int, warmup: int) -> float | None:
        """The highest rate up to which no run diverged; None: there is none."""
        found = None
        for lr in self.lrs:
            if self.diverged(arm, depth, warmup, [lr]):
                break
            found = lr
        return found

    def paired(self, a: tuple, b: tuple) -> list[float]:
        """Loss of (arm, depth, warmup, lr) a less that of b, seed by seed."""
        both = zip(self.losses(*a), self.losses(*b), strict=True)
        return [x - y if math.isfinite(x) and math.isfinite(y) else math.nan for x, y in both]


# Sentences


def _number(x: float) -> str:
    return f"{x:.3f}" if math.isfinite(x) else "not finite"


def compare(arm: str, reference: str, differences: list[float]) -> str:
    """How an arm ends beside another, and whether the data decide it."""
    found = interval(differences)
    if found is None:
        if not all(map(math.isfinite, differences)):
            return f"{NAMES[arm]} or {NAMES[reference]} did not stay finite"
        return (
            f"{NAMES[arm]} ends {differences[0]:+.3f} nats from {NAMES[reference]}; one seed can't "
            "tell whether that is chance"
        )
    mean, half = found
    told = f"(difference {mean:+.3f}, 95 % interval {mean - half:+.3f} to {mean + half:+.3f})"
    if abs(mean) <= half:
        return f"these runs do not decide between {NAMES[arm]} and {NAMES[reference]} {told}"
    return f"{NAMES[arm]} ends {'above' if mean > 0 else 'below'} {NAMES[reference]} {told}"


def verdicts(r: Results) -> list[str]:
    """The sentences that the tables bear out."""
    found, (reference, *others) = [], r.arms
    for arm in others:
        for depth in r.depths:
            points = [(a, depth, *r.best(a, depth)) for a in (arm, reference)]
            found.append(
                f"**{depth} layers, each at its best rate and warm-up:** "
                + compare(arm, reference, r.paired(*points))
                + "."
            )
        for depth in r.depths:
            low = r.lrs[0]
            said = [
                f"with warm-up {w} "
                + compare(
                    arm, reference, r.paired((arm, depth, w, low), (reference, depth, w, low))
                )
                for w in r.warmups
            ]
            found.append(f"**{depth} layers at the lowest rate, {low:g}:** {'; '.join(said)}.")
    for depth in r.depths:
        said = []
        for arm in r.arms:
            for w in r.warmups:
                highest = r.highest_lr(arm, depth, w)
                share = r.diverged(arm, depth, w, r.lrs)
                said.append(
                    f"{NAMES[arm]} with warm-up {w} trains "
                    + (f"up to {highest:g}" if highest else "at no rate of the grid")
                    + f" ({share:.0%} of its runs diverged)"
                )
        found.append(f"**{depth} layers, how high the rate may be:** {'; '.join(said)}.")
    for arm in r.arms:
        if len(r.warmups) > 1:
            found.append(_warmup_verdict(r, arm))
        if len(r.depths) > 1:
            found.append(_depth_verdict(r, arm))
    return found


def _warmup_verdict(r: Results, arm: str) -> str:
    """What warm-up brings, over all rates and depths."""
    none, most = r.warmups[0], r.warmups[-1]
    cells = [(d, lr) for d in r.depths for lr in r.lrs]
    change = {
        (d, lr): r.diverged(arm, d, most, [lr]) - r.diverged(arm, d, none, [lr]) for d, lr in cells
    }
    helped, hurt = [c for c in cells if change[c] < 0], [c for c in cells if change[c] > 0]
    return (
        f"**Warm-up {most} instead of {none}, {NAMES[arm]}:** fewer runs diverge in {len(helped)} "
        f"of {len(cells)} combinations of rate and depth"
        + (f" ({', '.join(f'{d} layers at {lr:g}' for d, lr in helped)})" if helped else "")
        + f", more in {len(hurt)}."
    )


def _depth_verdict(r: Results, arm: str) -> str:
    """What depth does to the best loss, and to the share of diverged runs."""
    first, last = r.depths[0], r.depths[-1]
    points = [(arm, depth, *r.best(arm, depth)) for depth in (last, first)]
    differences = r.paired(*points)
    mean, found = fmean(differences), interval(differences)
    if found:
        told = f"changes by {mean:+.3f} ± {found[1]:.3f} nats"
        told += ", which does not decide its sign" if abs(mean) <= found[1] else ""
    elif math.isfinite(mean):
        told = f"changes by {mean:+.3f} nats (one seed)"
    else:
        told = "is not finite for every seed"
    shares = [fmean(r.diverged(arm, d, w, r.lrs) for w in r.warmups) for d in (first, last)]
    return (
        f"**From {first} to {last} layers, {NAMES[arm]}:** the best loss {told}; the share of "
        f"diverged runs goes from {shares[0]:.0%} to {shares[1]:.0%}."
    )


def series_of(initial: list[dict], figure: str, depth: int | None = None) -> dict[str, list]:
    """(layer, value) by series, of one figure of initial.csv."""
    found = {}
    for row in initial:
        if row["figure"] == figure and depth in (None, row["depth"]):
            found.setdefault(row["series"], []).append((row["layer"], row["value"]))
    return found


def last_layers(initial: list[dict]) -> dict[str, dict[int, float]]:
    """Gradient norm of the last layer's second MLP matrix, by series and depth."""
    found = {}
    for row in initial:
        if row["figure"] == "gradients" and row["layer"] == row["depth"]:
            found.setdefault(row["series"], {})[row["depth"]] = row["value"]
    return found


def line_fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Slope of a straight line through the points, and R²."""
    x, y = zip(*points, strict=True)
    return linear_regression(x, y).slope, correlation(x, y) ** 2


def _change(first: float, last: float) -> str:
    ratio = first / last
    if ratio > 1.25:
        return f"falls by a factor of {ratio:.2f}"
    return (
        f"grows by a factor of {1 / ratio:.2f}"
        if ratio < 0.8
        else f"hardly changes (× {1 / ratio:.2f})"
    )


def at_initialisation(initial: list[dict]) -> list[str]:
    """What the measurements before the first step say."""
    signal, gradient = series_of(initial, "signal"), series_of(initial, "gradient")
    n = max(layer for layer, _ in signal["bare, gain 1.0"])
    bare = {g: signal[f"bare, gain {g}"][-1][1] for g in (0.7, 1.3)}
    both = {g: gradient[f"norm and skip, gain {g}"][0][1] for g in (0.7, 1.0, 1.3)}
    alone = {g: gradient[f"norm, gain {g}"][0][1] for g in (0.7, 1.0, 1.3)}
    found = [
        f"**{n} random layers.** Bare, of gain 0.7, they leave {bare[0.7]:.3g} of a signal, of "
        f"gain 1.3 they make it {bare[1.3]:.3g} times as large, and the gradient on its way back "
        "fares alike. A norm before each layer holds the signal whatever the gain. With norm and "
        "skip a gradient of 1 arrives at the input as "
        + ", ".join(f"{x:.3g} (gain {g})" for g, x in both.items())
        + "; with the norm alone, as "
        + ", ".join(f"{x:.3g}" for x in alone.values())
        + "."
    ]
    fits = {s: line_fit(points) for s, points in series_of(initial, "stream").items() if "pre" in s}
    depth = max(r["depth"] for r in initial if r["figure"] == "stream")
    lines = ", ".join(
        f"{k:.3f} a block (R² {r2:.3f}) under `{s[5:]}`" for s, (k, r2) in fits.items()
    )
    found.append(
        f"**The stream** of {depth} pre-LN blocks gains mean square by {lines}. Post-LN's has mean "
        "square 1 after every block, since a norm ends it."
    )
    last = last_layers(initial)
    depths = sorted(next(iter(last.values())))
    a, b = depths[0], depths[-1]
    found.append(
        f"**The gradient** of the last layer's second MLP matrix, from {a} to {b} layers: "
        + "; ".join(
            f"in {NAMES[s.split(', ')[0]]} under `{s.split(', ')[1]}` it {_change(v[a], v[b])}"
            for s, v in last.items()
        )
        + "."
    )
    larger = {}
    for init in dict.fromkeys(s.split(", ")[1] for s in last):
        pre, post = (last[f"{arm}, {init}"][b] for arm in ("pre", "post"))
        larger[init], factor = ("pre-LN", pre / post) if pre > post else ("post-LN", post / pre)
        turned = larger[init] != next(iter(larger.values()))
        found.append(
            f"At {b} layers under `{init}`, {larger[init]}'s is {factor:.1f} times the other's"
            + (f": the reverse of `{next(iter(larger))}`." if turned else ".")
        )
    return found


# Tables


def table(header: list[str], rows: list[list]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def best_table(r: Results) -> list[str]:
    header = ["layers", "arm", "warm-up", "best rate", "validation loss there", "diverged"]
    header += [f"rates within {NEAR} of the arm's best", "parameters", "of them norms", "s/step"]
    rows = []
    for depth in r.depths:
        for arm in r.arms:
            for w in r.warmups:
                lr = r.best_lr(arm, depth, w)
                losses, (width, cut) = r.losses(arm, depth, w, lr), r.near(arm, depth, w)
                runs = [r.runs[arm, depth, w, x, s] for x in r.lrs for s in r.seeds]
                spread = (
                    f" ± {stdev(losses):.3f}" if len(losses) > 1 and max(losses) < math.inf else ""
                )
                seconds = fmean(x["seconds_per_step"] for x in runs)
                row = [depth, arm, w, f"{lr:g}", _number(fmean(losses)) + spread]
                row += [f"{r.diverged(arm, depth, w, r.lrs):.0%} of {len(runs)}"]
                row += [f"{'≥ ' if cut else ''}{width:.2f}", f"{runs[0]['parameters']:,}"]
                rows.append([*row, f"{runs[0]['norm_parameters']:,}", f"{seconds:.3f}"])
    return table(header, rows)


def loss_table(r: Results) -> list[str]:
    """Mean loss at every rate; a cross where some run diverged."""
    rows = []
    for depth in r.depths:
        for arm in r.arms:
            for w in r.warmups:
                marks = ["†" if r.diverged(arm, depth, w, [lr]) else "" for lr in r.lrs]
                means = map(_number, r.line(arm, depth, w).values())
                rows.append([depth, arm, w, *(a + b for a, b in zip(means, marks, strict=True))])
    return table(["layers", "arm", "warm-up", *(f"{lr:g}" for lr in r.lrs)], rows)


def paired_table(r: Results) -> list[str]:
    """Differences from the first arm at the same rate, seed by seed."""
    rows = []
    for depth in r.depths:
        for arm in r.arms[1:]:
            for w in r.warmups:
                cells = []
                for lr in r.lrs:
                    differences = r.paired((arm, depth, w, lr), (r.arms[0], depth, w, lr))
                    found = interval(differences)
                    mean = fmean(differences)
                    alone = f"{mean:+.3f}" if math.isfinite(mean) else "not finite"
                    cells.append(f"{found[0]:+.3f} ± {found[1]:.3f}" if found else alone)
                rows.append([depth, f"{arm} − {r.arms[0]}", w, *cells])
    return table(["layers", "difference", "warm-up", *(f"{lr:g}" for lr in r.lrs)], rows)


def gradient_table(initial: list[dict]) -> list[str]:
    last = last_layers(initial)
    depths = sorted(next(iter(last.values())))
    rows = [[s, *(f"{values[d]:.3f}" for d in depths)] for s, values in last.items()]
    return table(["placement, initialisation", *(f"{d} layers" for d in depths)], rows)


def markdown(rows: list[dict], initial: list[dict], setting: str) -> str:
    """The report as markdown; `setting` says what was trained, on what."""
    r = Results(rows)
    entropy = fmean(row["unigram_entropy"] for row in rows)
    several = len(r.seeds) > 1
    mean = "Mean over seeds" if several else "One seed"
    lines = [
        "# " + " against ".join(NAMES[arm] for arm in r.arms),
        "",
        f"{len(rows)} runs, with {len(r.seeds)} seed(s); all arms of a seed share their initial "
        f"draws and their batches. {setting} Losses are in nats per token of the validation text. "
        f"A run counts as diverged if it is not finite or ends above {entropy:.3f}, the entropy of "
        "that text's own token frequencies: it has learned nothing from the context then, be the "
        "rate too high or the steps too few. Every number here follows from `results.csv` and "
        "`init.csv` beside this file.",
        "",
        "## What the runs say",
        "",
        *(f"- {sentence}" for sentence in verdicts(r)),
        "",
        "![Final validation loss over learning rate](lr_sweep.png)",
        "",
        "## Loss at every learning rate",
        "",
        f"{mean}; † where a run diverged.",
        "",
        *loss_table(r),
        "",
        "## The best rate of every arm and warm-up",
        "",
        f"{mean}{' ± standard deviation' if several else ''}. The range of rates is in factors of "
        "ten; ≥ where it reaches the grid's edge. The share of diverged runs is over all rates.",
        "",
        *best_table(r),
        "",
        "![Best loss and highest rate over depth](depth.png)",
        "",
    ]
    if len(r.arms) > 1:
        lines += [
            "## Differences at the same rate, seed by seed",
            "",
            f"{mean} ± half the width of its 95 % interval (Student's t, {len(r.seeds)} seeds)."
            if several
            else "Of one seed each, which can't tell whether they are chance.",
            "",
            *paired_table(r),
            "",
        ]
    lines += ["![Training curves](curves.png)", "", *start_section(initial)]
    return "\n".join(lines)


def start_section(initial: list[dict]) -> list[str]:
    return [
        "## Before the first step",
        "",
        *(f"- {sentence}" for sentence in at_initialisation(initial)),
        "",
        "![Signal and gradient by layer](signal.png)",
        "",
        "Norm of the loss's gradient by the last layer's second MLP matrix:",
        "",
        *gradient_table(initial),
        "",
        "![Gradients by depth and layer](gradients.png)",
        "",
    ]
