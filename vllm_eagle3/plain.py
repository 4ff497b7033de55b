"""A target and a draft head on plain, dense caches: one request, no engine.

They exist so that `decode` can say the method in one page, and so that the engine has
something independent to be compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .draft_head import Eagle3DraftHead
from .drafter import HeadOutput
from .kv_cache import commit_path
from .vocab import DraftVocab


class PlainTarget:
    """A transformers causal model with a cache that follows accepted paths."""

    def __init__(self, model: Any, tap_ids: tuple[int, ...]) -> None:
        self.model = model.eval()
        self.tap_ids = tap_ids
        self.cache: Any = None

    @classmethod
    def load(
        cls, target_dir: Path | str, tap_ids: tuple[int, ...], dtype: torch.dtype
    ) -> PlainTarget:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            str(target_dir), dtype=dtype, attn_implementation="sdpa"
        )
        return cls(model, tap_ids)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(token_ids)

    @torch.no_grad()
    def forward(
        self,
        token_ids: torch.Tensor,  # [rows]
        depths: torch.Tensor,  # [rows], offset from the first uncommitted position
        visible: torch.Tensor,  # [rows, rows] bool, row i sees row j
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows behind the cache -> (logits [rows, vocab], taps [rows, width])."""
        past = 0 if self.cache is None else self.cache.get_seq_length()
        seen = torch.ones(len(token_ids), past, dtype=torch.bool)
        mask = torch.cat([seen, visible], dim=1)
        out = self.model(
            token_ids[None],
            attention_mask=mask[None, None],
            position_ids=(past + depths)[None],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        self.cache = out.past_key_values
        taps = torch.cat([out.hidden_states[i][0] for i in self.tap_ids], dim=-1)
        return out.logits[0], taps

    def commit(self, num_rows: int, path: torch.Tensor) -> None:
        """Of the last `num_rows` rows keep those of `path` (row 0 is the root)."""
        start = self.cache.get_seq_length() - num_rows
        for layer in self.cache.layers:
            layer.keys = commit_path(layer.keys, start, path)
            layer.values = commit_path(layer.values, start, path)


class PlainHead:
    """A draft head whose cache holds only true features' keys and values.

    `extend` commits rows whose features are the target's; `advance` grows a tree on
    top and leaves no trace of it.
    """

    def __init__(
        self, head: Eagle3DraftHead, vocab: DraftVocab, target: PlainTarget
    ) -> None:
        self.head = head.eval()
        self.to_target_ids = None if vocab.is_full else vocab.to_target_ids
        self.target = target
        # layer -> (k, v), [1, kv_heads, length, head_dim]
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.levels: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
        # [rows, level]: row of each ancestor in its level; the last is the row itself
        self.lineage = torch.empty((0, 0), dtype=torch.int64)

    @property
    def length(self) -> int:
        return self.cache[0][0].shape[2] if self.cache else 0

    @torch.no_grad()
    def extend(self, token_ids: torch.Tensor, taps: torch.Tensor) -> HeadOutput:
        """Run rows of true features; return the head's output on the last one.

        Args:
            token_ids: [rows], the token AFTER each row.
            taps: [rows, num_taps * target_hidden].
        """
        self.levels = []
        positions = self.length + torch.arange(len(token_ids))
        features = self.head.fuse(taps)[None]
        embeds = self.target.embed(token_ids)[None]
        hidden = self.head(embeds, features, positions, self._attend_causally)
        return self._output(hidden[:, -1:])

    @torch.no_grad()
    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,  # [1, rows]
        features: torch.Tensor,  # [1, rows, hidden]
        parent_row: torch.Tensor,  # [1, rows]
    ) -> HeadOutput:
        """Run one level of a tree (an `Advance`)."""
        # Extended rows end at the root's parent position, so level 1 follows them.
        positions = torch.full(token_ids.shape, self.length + level - 1)
        self.levels = [*self.levels[: level - 1], {}]
        own = torch.arange(token_ids.shape[1])[:, None]
        above = own[:, :0] if level == 1 else self.lineage[parent_row[0]]
        self.lineage = torch.cat([above, own], dim=-1)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            self.levels[-1][layer] = (k, v)
            keys, values, visible = self._with_ancestors(layer)
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=visible, enable_gqa=True
            )

        hidden = self.head(self.target.embed(token_ids), features, positions, attend)
        return self._output(hidden)

    def _attend_causally(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if layer in self.cache:
            old_k, old_v = self.cache[layer]
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        self.cache[layer] = (k, v)
        rows, length = q.shape[2], k.shape[2]
        visible = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, enable_gqa=True
        )

    def _with_ancestors(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prefix and all levels side by side; a row sees only its own ancestors."""
        blocks = [self.cache[layer], *(level[layer] for level in self.levels)]
        keys = torch.cat([k for k, _ in blocks], dim=2)
        values = torch.cat([v for _, v in blocks], dim=2)
        rows = len(self.lineage)
        visible = [torch.ones(rows, self.length, dtype=torch.bool)]
        for j, level in enumerate(self.levels):
            width = level[layer][0].shape[2]
            visible.append(self.lineage[:, j, None] == torch.arange(width))
        return keys, values, torch.cat(visible, dim=1)

    def _output(self, hidden: torch.Tensor) -> HeadOutput:
        return HeadOutput(self.head.feedback(hidden), self.head.logits(hidden))
