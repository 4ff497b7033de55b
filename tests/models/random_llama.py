"""F1, a random target that uses its attention, with H1 (overfitted) and H3 (random)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from tests.models.shapes import (
    BYTE_OFFSET,
    HIDDEN,
    head_config,
    llama_config,
    write_head,
    write_target,
)
from vllm_eagle3.draft_head import Eagle3DraftHead

VOCAB = 512
LAYERS = 6
KV_HEADS = 2
TAP_IDS = (1, 3, 5)  # explicit: the default ids repeat below seven layers
REPLY_TOKENS = 40
DRAFT_STEPS = 3
EPOCHS = 80
# Prompt lengths of the mixed batch: sixteen requests, around block boundaries too.
KNOWN_LENGTHS = (3, 8, 17, 32, 33, 64, 128, 300)
OTHER_LENGTHS = (5, 13, 24, 31, 47, 65, 96, 201)


def known_prompts() -> list[list[int]]:
    """The prompts whose greedy replies H1 has learnt by heart."""
    return _random_prompts(KNOWN_LENGTHS, seed=11)


def other_prompts() -> list[list[int]]:
    """Prompts that no head knows."""
    return _random_prompts(OTHER_LENGTHS, seed=14)


def _random_prompts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(BYTE_OFFSET, VOCAB, (n,), generator=generator).tolist()
        for n in lengths
    ]


def build_f1(folder: Path) -> None:
    generator = torch.Generator().manual_seed(10)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        noise = torch.randn(rows, columns, generator=generator)
        return gain * noise / columns**0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN, 3.0),
    }
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        # Peaked attention: the text must depend on far tokens, or KV faults hide.
        weights[f"{attention}q_proj.weight"] = normal(HIDDEN, HIDDEN, 1.5)
        weights[f"{attention}k_proj.weight"] = normal(32 * KV_HEADS, HIDDEN, 1.5)
        weights[f"{attention}v_proj.weight"] = normal(32 * KV_HEADS, HIDDEN, 1.5)
        weights[f"{attention}o_proj.weight"] = normal(HIDDEN, HIDDEN, 1.5)
        weights[f"{mlp}gate_proj.weight"] = normal(256, HIDDEN, 1.5)
        weights[f"{mlp}up_proj.weight"] = normal(256, HIDDEN, 1.5)
        weights[f"{mlp}down_proj.weight"] = normal(HIDDEN, 256, 1.5)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    config = llama_config(vocab_size=VOCAB, layers=LAYERS, kv_heads=KV_HEADS)
    write_target(folder, config, weights)


def build_h3(folder: Path) -> None:
    torch.manual_seed(13)
    write_head(folder, _new_head())


def build_h1(folder: Path, f1_folder: Path) -> None:
    """Overfit a head on F1's greedy replies to `known_prompts()`."""
    torch.manual_seed(12)
    target = LlamaForCausalLM.from_pretrained(f1_folder, dtype=torch.float32).eval()
    head = _new_head()
    batches = _captured_batches(target)
    embedding = target.model.embed_tokens.weight.detach()
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=EPOCHS * len(batches)
    )
    for _ in range(EPOCHS):
        for batch in batches:
            loss = _draft_loss(head, embedding, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    write_head(folder, head)


def _new_head() -> Eagle3DraftHead:
    config = head_config(vocab_size=VOCAB, kv_heads=KV_HEADS, tap_ids=TAP_IDS)
    return Eagle3DraftHead(config)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, taps, is_reply


@torch.no_grad()
def _captured_batches(target: LlamaForCausalLM) -> list[Batch]:
    """Greedy replies and their taps; the short prompts share one padded batch."""
    rows = [_capture(target, prompt) for prompt in known_prompts()]
    return [_pad(rows[:-2]), _pad(rows[-2:-1]), _pad(rows[-1:])]


def _capture(target: LlamaForCausalLM, prompt: list[int]) -> Batch:
    ids, cache, step = torch.tensor([prompt]), None, torch.tensor([prompt])
    for _ in range(REPLY_TOKENS + DRAFT_STEPS):
        out = target(step, past_key_values=cache, use_cache=True)
        cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], dim=1)
    states = target(ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[i] for i in TAP_IDS], dim=-1)
    return ids[0], taps[0], torch.arange(ids.shape[1]) >= len(prompt)


def _pad(rows: list[Batch]) -> Batch:
    """Pad on the right: causal attention never sees it and is_reply is False there."""
    ids, taps, is_reply = (
        torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True)
        for column in zip(*rows, strict=True)
    )
    return ids, taps, is_reply


def _draft_loss(
    head: Eagle3DraftHead,
    embedding: torch.Tensor,  # [vocab, hidden]
    ids: torch.Tensor,  # [batch, tokens]
    taps: torch.Tensor,  # [batch, tokens, 3 * hidden]
    is_reply: torch.Tensor,  # [batch, tokens]
) -> torch.Tensor:
    """Mean cross-entropy of DRAFT_STEPS unrolled draft steps (EAGLE-3, fig. 6).

    Row r of step k reads token r+1+k and predicts token r+2+k; it attends to the
    rows <= r of step 0 and to its own earlier steps.
    """
    rows = ids.shape[1] - DRAFT_STEPS - 1
    embeds = embedding[ids]
    # The first draft of row r follows token r+1, which has to be a reply token.
    live = is_reply[:, 1 : rows + 1] & is_reply[:, DRAFT_STEPS + 1 :]
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        steps.append((k, v))
        scale = q.shape[-1] ** -0.5
        scores = (q @ steps[0][0].transpose(-1, -2)) * scale
        scores = scores.masked_fill(~causal, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) * scale for key, _ in steps[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., :rows] @ steps[0][1]
        for i, (_, value) in enumerate(steps[1:]):
            out = out + weights[..., rows + i, None] * value
        return out

    features = head.fuse(taps[:, :rows])
    total = torch.zeros(())
    for k in range(DRAFT_STEPS):
        hidden = head(
            embeds[:, 1 + k : 1 + k + rows], features, torch.arange(rows) + k, attend
        )
        logits = head.logits(hidden)[live]
        total = total + F.cross_entropy(logits, ids[:, 2 + k : 2 + k + rows][live])
        features = head.feedback(hidden)
    return total / DRAFT_STEPS
