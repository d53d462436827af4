"""Draw the memory of card and host in a step, with two copies of the base and with one.

    python benchmarks/memory_figure.py [--figure docs/memory.png]

By the planner's arithmetic, for configs/qwen8b_lora.yaml on a card of 24 GB. Needs matplotlib.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from random_model import qwen3

from stapo_lite.config import load_config
from stapo_lite.extras.planning.choice import apply, choose
from stapo_lite.extras.planning.plan import GIB, Hardware, Plan, make_plan

ROOT = Path(__file__).parent.parent
CARD = Hardware(int(23.5 * GIB), 64 * GIB)
GROUPS = {  # of the planner's parts, by what their names contain
    "the trainer's base": ("trainer: base",),
    "vLLM's weights": ("vLLM: weights",),
    "KV cache": ("KV cache",),
    "activations, LM head": ("activations", "LM head"),
    "adapter, optimiser": ("adapter", "optimiser", "gradients", "snapshots"),
    "the rest": ("",),
}
COLOURS = ["#c44e52", "#4c72b0", "#8172b3", "#55a868", "#dd8452", "#bbbbbb"]


def plan(share_base: str) -> Plan:
    """The plan of the 8B config on CARD."""
    model = qwen3("8B")
    config = load_config(ROOT / "configs/qwen8b_lora.yaml", [f"rollout.share_base={share_base}"])
    return make_plan(apply(config, choose(config, model, CARD)), model, CARD)


def grouped(parts: dict[str, int]) -> list[float]:
    """GiB of each of GROUPS."""
    sizes = dict.fromkeys(GROUPS, 0.0)
    for name, size in parts.items():
        group = next(g for g, words in GROUPS.items() if any(word in name for word in words))
        sizes[group] += max(0, size) / GIB
    return list(sizes.values())


def draw(path: Path) -> None:
    """Write the figure."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    titles = {"off": "two copies that take turns", "on": "one base"}
    for axis, (share_base, title) in zip(axes, titles.items(), strict=True):
        planned = plan(share_base)
        bars = {
            "card,\nrollouts": planned.rollout,
            "card,\nupdates": planned.update,
            "host": planned.host,
        }
        bottoms = [0.0] * len(bars)
        heights = [grouped(parts) for parts in bars.values()]
        for number, group in enumerate(GROUPS):
            values = [height[number] for height in heights]
            axis.bar(list(bars), values, 0.6, bottoms, color=COLOURS[number], label=group)
            bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
        for position, total in enumerate(bottoms):
            axis.text(position, total + 0.7, f"{total:.0f}", ha="center")
        axis.set_title(title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GiB, estimated")
    axes[1].legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/memory.png")
    draw(parser.parse_args().figure)


if __name__ == "__main__":
    main()
