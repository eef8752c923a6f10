"""Your own advantage: a pure function of the batch that returns one number per trajectory, or one per token.

plugins: [./examples/best_of_group.py]
algo: {advantage: {kind: best_of_group, margin: 0.1}}
"""

import torch

from drumroll import Batch, register


@register.advantage("best_of_group")
def best_of_group(batch: Batch, *, margin: float = 0.0) -> torch.Tensor:
    """1 for trajectories within `margin` of their group's best, minus the share of such trajectories in the group; [N]."""
    num_groups = int(batch.group_index.max()) + 1 if batch.num_trajectories else 0
    best = torch.full((num_groups,), -torch.inf).scatter_reduce(0, batch.group_index, batch.rewards, "amax")
    is_best = (batch.rewards >= best[batch.group_index] - margin).float()
    size = torch.zeros(num_groups).index_add(0, batch.group_index, torch.ones_like(is_best))
    share = torch.zeros(num_groups).index_add(0, batch.group_index, is_best) / size
    return is_best - share[batch.group_index]
