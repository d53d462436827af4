"""S2T's mask from the current policy against the one from the policy before the step: agreement and cost.

    python benchmarks/s2t_statistics.py configs/quickstart.yaml train.mini_batch_size=4 [key.sub=value ...] --out FILE

Runs the training with `objective.s2t.statistics=current`; before each update but the first of a step it makes both
masks (of a preset whose quantile is over the candidates) and times the pass that only `current` needs. Prints a
summary; FILE gets it as JSON.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

from common import now, save

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.config import load_config
from stapo_lite.errors import one_line_errors
from stapo_lite.training import loop as train_module
from stapo_lite.training import update as update_module
from stapo_lite.training.report import mean
from stapo_lite.training.update import Learner

CURRENT = "objective.s2t.statistics=current"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_intermixed_args()
    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        config = load_config(arguments.config, [*arguments.overrides, f"output_dir={folder}/run", CURRENT])
        result = compare(config)
    save(result | {"config": arguments.config, "overrides": arguments.overrides}, arguments.out)


def compare(config) -> dict:
    """Train, and count for each place of an update in its step what the two masks say."""
    counts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    seconds: dict[str, float] = defaultdict(float)
    place = 0
    update = train_module.update

    def update_and_compare(learner: Learner, batch: MiniBatch):
        nonlocal place
        place = 0 if batch.old is None else place + 1
        if batch.old is not None:
            objective, silenced = learner.objective, {}
            for name in ("current", "old"):
                s2t = objective.s2t.model_copy(update={"statistics": name})
                learner.objective = objective.model_copy(update={"s2t": s2t})
                start = now()
                silenced[name] = update_module.find_masks(learner, batch).silenced
                seconds[f"{name} masks"] += now() - start
            learner.objective = objective
            n = counts[place]
            n["tokens"] += len(batch.rows)
            n["silenced by current"] += int(silenced["current"].sum())
            n["silenced by old"] += int(silenced["old"].sum())
            n["silenced by both"] += int((silenced["current"] & silenced["old"]).sum())
            n["differ"] += int((silenced["current"] != silenced["old"]).sum())
        start = now()
        result = update(learner, batch)
        seconds["update" if batch.old is not None else "first update"] += now() - start
        return result

    def all_inputs(completions, objective):
        """What a mask of the policy before the step needs is not measured where the current policy makes the mask."""
        return list(
            dict.fromkeys(old_inputs(completions, objective) + update_module.mask_inputs(completions, objective))
        )

    train_module.update, old_inputs, train_module.old_inputs = update_and_compare, train_module.old_inputs, all_inputs
    metrics = list(train_module.train(config))
    places = {str(k): dict(v) for k, v in sorted(counts.items())}
    total = {name: sum(p[name] for p in places.values()) for name in next(iter(places.values()))}
    return {
        "updates after the first, by place in the step": places,
        "share of tokens on which the masks agree": 1 - total["differ"] / total["tokens"],
        "share of the tokens silenced by either that both silence": total["silenced by both"]
        / max(1, total["silenced by current"] + total["silenced by old"] - total["silenced by both"]),
        "seconds": dict(seconds),
        # The training makes its own masks from the current policy, so the measured pass comes on top of one.
        "mask pass against an update without it": seconds["current masks"]
        / (seconds["update"] - seconds["current masks"]),
        "mask passes against a step without them": seconds["current masks"]
        / (sum(m["seconds_step"] for m in metrics) - 2 * seconds["current masks"]),
        "reward, first and last five steps": [mean(metrics[:5], "reward"), mean(metrics[-5:], "reward")],
    }


if __name__ == "__main__":
    main()
