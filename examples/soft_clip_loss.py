"""Your own loss: takes log-probabilities with gradient and the batch, returns a loss per token. The trainer does the rest.

plugins: [./examples/soft_clip_loss.py]
algo: {loss: {kind: soft_clip, softness: 0.2}}
"""

import torch

from drumroll import Batch, TokenLoss, register


@register.loss("soft_clip")
def soft_clip(logp_T: torch.Tensor, batch: Batch, *, softness: float = 0.2) -> TokenLoss:
    """Policy gradient whose pull fades smoothly as the ratio to the old policy moves away from 1."""
    assert batch.old_logp is not None
    assert batch.advantages is not None
    log_ratio_T = logp_T - batch.old_logp
    pull_T = softness * torch.tanh(log_ratio_T / softness)
    return TokenLoss(-batch.advantages * pull_T, {"ratio": log_ratio_T.detach().exp()})
