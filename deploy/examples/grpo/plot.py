"""Draws the rewards that the examples print, a line for each seed: needs matplotlib (pip install "meshserve[plots]").

python -m meshserve.deploy.examples.grpo.plot rewards.png rewards.jsonl tunix_rewards.jsonl
"""

import argparse
import collections
import json
from pathlib import Path

COLORS = {"plain JAX, meshserve": "tab:green", "Tunix, meshserve": "tab:blue", "Tunix, its own sampler": "tab:orange"}
NAMES = {None: "plain JAX, meshserve", "meshserve": "Tunix, meshserve", "vanilla": "Tunix, its own sampler"}


def read(files: list[Path]) -> dict[tuple[str, int], list[float]]:
    """Returns the rewards of each kind of run and seed, in the order of the steps."""
    found: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for path in files:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[NAMES[row.get("rollout")], row["seed"]].append(row["reward"])
    return dict(found)


def draw(picture: Path, rewards: dict[tuple[str, int], list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    labelled = set()
    for (name, _), values in rewards.items():
        axes.plot(values, color=COLORS[name], linewidth=1.2, alpha=0.8, label=None if name in labelled else name)
        labelled.add(name)
    axes.set(xlabel="step", ylabel='share of words that begin with "s"', ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the rewards of the examples.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    draw(options.picture, read(options.files))
