"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from shardwise.spec import Recipe


def learning_rate(recipe: Recipe, index: int) -> float:
    """The rate of optimizer step `index`, counted from 0.

    Warm-up is linear and ends at the highest rate. Then, over the steps that are left: cosine falls to floor · lr on
    the last step (arXiv 1608.03983); wsd stays and falls linearly over the last decay_fraction of all steps
    (arXiv 2405.18392); constant stays.
    """
    schedule, total, peak = recipe.schedule, recipe.total_steps, recipe.optimizer.lr
    warmup = min(schedule.warmup_steps, total)
    if index < warmup:
        return peak * (index + 1) / warmup
    if schedule.name == "constant":
        return peak
    falling = total - warmup
    if schedule.name == "wsd":
        falling = min(falling, round(schedule.decay_fraction * total))
    into = index - (total - falling) + 1  # 1 on the first falling step, `falling` on the last
    if into <= 0:
        return peak
    done = into / falling
    share = (1 + math.cos(math.pi * done)) / 2 if schedule.name == "cosine" else 1 - done
    return peak * (schedule.floor + (1 - schedule.floor) * share)
