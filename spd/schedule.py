"""The learning rate's course over a run."""

import math


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate at `step`: a linear rise, then half a cosine down to 0 at the end."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
