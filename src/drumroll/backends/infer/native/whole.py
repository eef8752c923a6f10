"""Any causal LM of transformers as it is, over the slot cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drumroll.backends.infer.native.cache import SlotCache
from drumroll.models.loading import as_in_files


class WholeModel:
    """What `slots` asks of a model, by way of the model's own forward."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.dtype: torch.dtype = model.dtype
        self.num_layers: int = model.config.get_text_config().num_hidden_layers

    def fill(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> None:
        """Keys and values of [R, Q] tokens at `positions` [R, Q]; `mask` [R, 1, Q, length] is added to the scores."""
        self._run(self._model.base_model, tokens, positions, mask, cache)

    def next_logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """[R, V] after the last of the tokens; their keys and values are stored as well."""
        logits: Tensor = self._run(self._model, tokens, positions, mask, cache).logits
        return logits[:, -1]

    def weights(self) -> Mapping[str, Tensor]:
        return as_in_files(self._model, self._model.state_dict(keep_vars=True))

    def renew(self) -> None:
        """Weights have changed in place."""

    @torch.inference_mode(False)  # a parameter cannot be pointed at a tensor that was made in inference mode
    def to(self, device: torch.device) -> None:
        self._model.to(device)

    def _run(self, model: Any, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Any:
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
