"""What the server says of itself: counters, KV use, memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_eagle3.acceptance import DraftCounts

_SPEC = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Counters:
    """What a server has counted, or the difference over a stretch of work."""

    drafts: DraftCounts = field(default_factory=DraftCounts)
    new_tokens: int = 0
    cache_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    cache_hits: int = 0
    preemptions: int = 0

    def __add__(self, other: Counters) -> Counters:
        return self._combine(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._combine(other, -1)

    def _combine(self, other: Counters, sign: int) -> Counters:
        return Counters(
            self.drafts + other.drafts if sign > 0 else self.drafts - other.drafts,
            self.new_tokens + sign * other.new_tokens,
            self.cache_queries + sign * other.cache_queries,
            self.cache_hits + sign * other.cache_hits,
            self.preemptions + sign * other.preemptions,
        )

    @property
    def hit_rate(self) -> float:
        return self.cache_hits / self.cache_queries if self.cache_queries else 0.0


@dataclass(frozen=True)
class Reading:
    """The server at one moment; `kv_use` is the share of its blocks that is taken."""

    counters: Counters
    kv_use: float
    unfinished: int  # requests that run or wait


def read_metrics(text: str) -> Reading:
    """Read the page /metrics of one engine."""
    values: dict[str, float] = defaultdict(float)
    accepted: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{_SPEC}accepted_tokens_per_pos_total":
                accepted[int(sample.labels["position"])] = int(sample.value)
            else:
                values[sample.name] += sample.value
    drafts = DraftCounts(
        drafts=int(values[f"{_SPEC}drafts_total"]),
        draft_tokens=int(values[f"{_SPEC}draft_tokens_total"]),
        accepted_tokens=int(values[f"{_SPEC}accepted_tokens_total"]),
        accepted_per_depth=tuple(accepted[depth] for depth in sorted(accepted)),
    )
    counters = Counters(
        drafts,
        new_tokens=int(values["vllm:generation_tokens_total"]),
        cache_queries=int(values["vllm:prefix_cache_queries_total"]),
        cache_hits=int(values["vllm:prefix_cache_hits_total"]),
        preemptions=int(values["vllm:num_preemptions_total"]),
    )
    unfinished = (
        values["vllm:num_requests_running"] + (values["vllm:num_requests_waiting"])
    )
    return Reading(counters, values["vllm:kv_cache_usage_perc"], int(unfinished))


async def read(http: httpx.AsyncClient, url: str) -> Reading:
    """Ask a server for its metrics.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    reply = await http.get(f"{url}/metrics")
    return read_metrics(reply.raise_for_status().text)
