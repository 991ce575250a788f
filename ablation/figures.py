"""The ablation's figures: an arm has one colour everywhere, and a warm-up one kind of line."""

import math
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ablation.report import COLOURS, NAMES, Results, last_layers, series_of

DASHES = ("--", "-", "-.", ":")  # no warm-up is dashed
NATS = "nats per token"


def _figure(columns: int, rows: int = 1, height: float = 3.4, **options) -> tuple[Figure, list]:
    size = (max(7.2, 3.6 * columns), height * rows + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.grid(alpha=0.25, lw=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)


def _style(r: Results, arm: str, warmup: int) -> dict:
    dash = DASHES[(r.warmups.index(warmup) + (r.warmups[0] > 0)) % len(DASHES)]
    return {"color": COLOURS[arm], "ls": dash, "lw": 1.8}


def _legend(figure: Figure, r: Results, *extra: Line2D) -> None:
    handles = [
        Line2D([], [], label=f"{NAMES[arm]}, warm-up {w}", **_style(r, arm, w))
        for arm in r.arms
        for w in r.warmups
    ]
    handles += extra
    columns = math.ceil(len(handles) / len(r.warmups))  # an arm in each, where there is room
    inches = 0.9 + 0.085 * max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(columns, int(figure.get_figwidth() / inches)))
    rows = math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + 0.25 * max(0, rows - 2))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def lr_sweep(r: Results, path: Path) -> None:
    """Final validation loss over learning rate, a panel per depth."""
    figure, axes = _figure(len(r.depths), sharey=True)
    top = max(row["unigram_entropy"] for row in r.rows)
    finite = [row["val_loss"] for row in r.rows if math.isfinite(row["val_loss"])]
    for ax, depth in zip(axes[0], r.depths, strict=True):
        ax.axhline(top, color="grey", lw=1, ls=(0, (1, 2)))
        for arm in r.arms:
            for w in r.warmups:
                _sweep_line(ax, r, arm, depth, w, ceiling=max([top, *finite]))
        ax.set(xscale="log", xlabel="peak learning rate", title=f"{depth} layers")
        ax.set_xticks(r.lrs, [f"{lr:g}" for lr in r.lrs])
        ax.minorticks_off()
    axes[0, 0].set_ylabel(f"final validation loss ({NATS})")
    cross = Line2D([], [], color="black", marker="x", ls="", label="a run diverged")
    dots = Line2D([], [], color="grey", lw=1, ls=(0, (1, 2)), label="unigram entropy")
    _legend(figure, r, cross, dots)
    _save(figure, path)


def _sweep_line(ax: Axes, r: Results, arm: str, depth: int, warmup: int, ceiling: float) -> None:
    """Mean and spread over seeds; what is not finite lies on the ceiling."""
    losses = [[min(x, ceiling) for x in r.losses(arm, depth, warmup, lr)] for lr in r.lrs]
    style, means = _style(r, arm, warmup), [fmean(x) for x in losses]
    ax.plot(r.lrs, means, marker="o", ms=3.5, **style)
    ax.fill_between(
        r.lrs,
        *zip(*((min(x), max(x)) for x in losses), strict=True),
        alpha=0.18,
        color=style["color"],
        lw=0,
    )
    marked = [
        (lr, m) for lr, m in zip(r.lrs, means, strict=True) if r.diverged(arm, depth, warmup, [lr])
    ]
    if marked:
        ax.plot(*zip(*marked, strict=True), "x", color=style["color"], ms=9, mew=2)


def depth(r: Results, path: Path) -> None:
    """The best loss, and the highest rate that trains, over depth."""
    figure, (axes,) = _figure(2)
    lines = [(arm, w) for arm in r.arms for w in r.warmups]
    for i, (arm, w) in enumerate(lines):
        style = _style(r, arm, w)
        best = [r.losses(arm, d, w, r.best_lr(arm, d, w)) for d in r.depths]
        axes[0].plot(r.depths, [fmean(x) for x in best], marker="o", ms=4, **style)
        spread = [min(x) for x in best], [max(x) for x in best]
        axes[0].fill_between(r.depths, *spread, color=style["color"], alpha=0.18, lw=0)
        # Lines that coincide are set apart, within 6 %, or one would hide the other.
        apart = 1 + 0.12 * ((i + 0.5) / len(lines) - 0.5)
        highest = [(r.highest_lr(arm, d, w) or math.nan) * apart for d in r.depths]
        axes[1].plot(r.depths, highest, marker="o", ms=4, **style)
    axes[0].set(ylabel=f"validation loss at the best rate\n({NATS})")
    axes[1].set(ylabel="highest rate at which no run diverged", yscale="log")
    axes[1].set_ylim(r.lrs[0] / 1.3, r.lrs[-1] * 1.3)
    axes[1].set_yticks(r.lrs, [f"{lr:g}" for lr in r.lrs])
    axes[1].minorticks_off()
    for ax in axes:
        ax.set(xlabel="layers", xscale="log", xlim=(r.depths[0] / 1.1, r.depths[-1] * 1.1))
        ax.set_xticks(r.depths, map(str, r.depths))
        ax.minorticks_off()
    _legend(figure, r)
    _save(figure, path)


def curves(r: Results, histories: dict[tuple, list], path: Path) -> None:
    """Training loss over steps, a panel per rate, at the greatest depth: each seed thin, their mean
    thick. `histories`: losses of all steps by (arm, depth, warmup, lr, seed)."""
    depth = r.depths[-1]
    figure, axes = _figure(len(r.lrs), sharey=True, height=3.0)
    longest = max(len(x) for x in histories.values())
    width = max(1, longest // 40)
    for ax, lr in zip(axes[0], r.lrs, strict=True):
        for arm in r.arms:
            for w in r.warmups:
                seeds = [_smooth(histories[arm, depth, w, lr, s], width) for s in r.seeds]
                style = _style(r, arm, w)
                for points in seeds:
                    ax.plot(*zip(*points, strict=True), color=style["color"], lw=0.5, alpha=0.4)
                means = [(p[0][0], fmean(y for _, y in p)) for p in zip(*seeds, strict=False)]
                ax.plot(*zip(*means, strict=True), **style)
        ax.set(xlabel="step", title=f"{depth} layers, rate {lr:g}")
    axes[0, 0].set_ylabel(f"training loss ({NATS})")
    _legend(figure, r)
    _save(figure, path)


def _smooth(losses: list[float | None], width: int) -> list[tuple[float, float]]:
    """Means of `width` steps one after the other, as (step, loss)."""
    found = []
    for i in range(0, len(losses) - width + 1, width):
        part = [x for x in losses[i : i + width] if x is not None]
        found.append((i + width, fmean(part) if part else math.nan))
    return found


def signal(initial: list[dict], path: Path) -> None:
    """The lesson's picture, signal above and gradient below, a panel per gain; and the stream."""
    gains = ("0.7", "1.0", "1.3")
    figure, axes = _figure(4, 2, height=2.9)
    colours = {"bare": "#000000", "norm": "#E69F00", "skip": "#009E73", "norm and skip": "#0072B2"}
    for row, name in enumerate(("signal", "gradient")):
        series = series_of(initial, name)
        for ax, gain in zip(axes[row], gains, strict=False):
            for wiring, colour in colours.items():
                points = series[f"{wiring}, gain {gain}"]
                ax.plot(*zip(*points, strict=True), color=colour, label=wiring, lw=1.8)
            ax.set(yscale="log", xlabel="layer", title=f"gain {gain}")
        axes[row, 0].set_ylabel(f"rms of the {name}")
    axes[0, 0].legend(frameon=False, fontsize=8)
    for ax, inits in zip(axes[:, 3], (("xavier", "plain"), ("scaled",)), strict=True):
        for (label, points), dash in _streams(initial, inits):
            ax.plot(
                *zip(*points, strict=True),
                color=COLOURS[label.split(",")[0]],
                ls=dash,
                label=label,
                lw=1.8,
            )
        ax.set(xlabel="layer", ylabel="mean square of the stream", title="GPT at its start")
        ax.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _streams(initial: list[dict], inits: tuple[str, ...]) -> list[tuple]:
    series = series_of(initial, "stream")
    return [
        ((f"{arm}, {init}", series[f"{arm}, {init}"]), DASHES[1 - i])
        for i, init in enumerate(inits)
        for arm in ("pre", "post")
    ]


def gradients(initial: list[dict], path: Path) -> None:
    """The last layer's gradient over depth, and by layer in the deepest stack."""
    last = last_layers(initial)
    depths = sorted(next(iter(last.values())))
    layers = series_of(initial, "gradients", depths[-1])
    inits = list(dict.fromkeys(s.split(", ")[1] for s in last))
    figure, axes = _figure(len(inits), 2, height=2.7)
    for column, init in enumerate(inits):
        for arm in ("pre", "post"):
            style, name = {"color": COLOURS[arm], "lw": 1.8, "label": NAMES[arm]}, f"{arm}, {init}"
            axes[0, column].plot(*zip(*last[name].items(), strict=True), marker="o", ms=4, **style)
            axes[1, column].plot(*zip(*layers[name], strict=True), **style)
        axes[0, column].set(title=f"{init} initialisation", xlabel="layers", xscale="log")
        axes[0, column].set_xticks(depths, map(str, depths))
        axes[0, column].minorticks_off()
        axes[1, column].set(xlabel=f"layer of {depths[-1]}")
        for row in (0, 1):
            axes[row, column].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("gradient norm,\nlast layer's 2nd MLP matrix")
    axes[1, 0].set_ylabel("gradient norm,\n2nd MLP matrix")
    axes[0, 0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def draw(folder: Path, r: Results, initial: list[dict], histories: dict[tuple, list]) -> None:
    """All figures of a report."""
    lr_sweep(r, folder / "lr_sweep.png")
    depth(r, folder / "depth.png")
    curves(r, histories, folder / "curves.png")
    signal(initial, folder / "signal.png")
    gradients(initial, folder / "gradients.png")
