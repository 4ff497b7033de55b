"""What drafting does, in vLLM's Prometheus endpoint (`docs/metrics.md` explains it).

The scheduler counts, in the engine's process. Its counts travel to the API server in
the statistics of speculation that vLLM sends anyway, and are added to counters there:

    Eagle3Scheduler -> StepCounts -> DraftingStats -> DraftingProm -> /metrics
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import prometheus_client
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)

PREFIX = "vllm_eagle3:"
_LENGTH_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)


@dataclass
class StepCounts:
    """Counts of one step, in types that vLLM's messages carry.

    Attributes:
        plans: what was planned to be drafted, by kind: off, chain, tree or sampled.
        planned_nodes: for each request.
        drafted, verified: nodes.
        verified_at, accepted_at: nodes by depth, from 1 on.
        lengths: drafts by their tokens, accepted ones and the target's own.
        plain_steps: steps that verified no draft.
        fallbacks: drafts or nodes left out, by reason.
        seconds: by part of the step.
        confidence_error: expected calibration error of the head's confidence.
    """

    plans: dict[str, int] = field(default_factory=Counter)
    planned_nodes: int = 0
    drafted: int = 0
    verified: int = 0
    verified_at: dict[str, int] = field(default_factory=Counter)
    accepted_at: dict[str, int] = field(default_factory=Counter)
    lengths: dict[str, int] = field(default_factory=Counter)
    plain_steps: int = 0
    fallbacks: dict[str, int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    confidence_error: float = 0.0

    def as_plain(self) -> dict[str, Any]:
        """Fields as numbers and plain dictionaries."""
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }

    def verdict(self, depths: list[int], accepted: list[int]) -> None:
        """Count one verified draft: the depth of each node, and the accepted nodes."""
        self.verified += len(depths)
        self.verified_at.update(Counter(map(str, depths)))
        self.accepted_at.update(Counter(str(depths[node]) for node in accepted))
        self.lengths[str(1 + len(accepted))] += 1


@dataclass
class DraftingStats(SpecDecodingStats):
    """vLLM's statistics of a step with ours beside them."""

    vllm_eagle3: dict[str, Any] | None = None

    @classmethod
    def beside(
        cls, stock: SpecDecodingStats | None, num_spec_tokens: int, counts: StepCounts
    ) -> DraftingStats:
        """Ours beside vLLM's, which may be missing."""
        stock = stock or SpecDecodingStats.new(num_spec_tokens)
        return cls(**asdict(stock), vllm_eagle3=counts.as_plain())


class DraftingProm(SpecDecodingProm):
    """vLLM's counters of speculation, and ours."""

    def __init__(
        self,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            speculative_config, labelnames, per_engine_labelvalues, *args, **kwargs
        )
        self._ours: _Metrics | None = None
        if getattr(speculative_config, "method", None) == "eagle3":
            self._ours = _Metrics(labelnames, per_engine_labelvalues)

    def observe(self, stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        super().observe(stats, engine_idx)
        ours = getattr(stats, "vllm_eagle3", None)
        if ours is not None and self._ours is not None:
            self._ours.observe(StepCounts(**ours), engine_idx)


class DraftingLogging(SpecDecodingLogging):
    """vLLM's log line, which divides by the drafts of a step."""

    def observe(self, stats: SpecDecodingStats) -> None:
        if stats.num_drafts:
            super().observe(stats)


class _Metrics:
    def __init__(
        self, labelnames: list[str], labelvalues: dict[int, list[object]]
    ) -> None:
        _unregister()
        self._labelnames, self._labelvalues = labelnames, labelvalues
        self._drafted = self._counter("drafted_nodes", "Nodes the head drafted.")
        self._verified = self._counter("verified_nodes", "Nodes the target verified.")
        self._plain = self._counter("plain_steps", "Steps that verified no draft.")
        self._planned = self._counter(
            "planned_nodes", "Nodes for each request that were planned, over all steps."
        )
        self._plans = self._labelled(
            "plans", "Plans by kind: off, chain, tree, sampled.", "kind"
        )
        self._verified_at = self._labelled(
            "verified_at_depth", "Nodes verified, by depth.", "depth"
        )
        self._accepted_at = self._labelled(
            "accepted_at_depth", "Nodes accepted, by depth.", "depth"
        )
        self._fallbacks = self._labelled(
            "fallbacks", "Drafts that were cut or left out, by reason.", "reason"
        )
        self._seconds = self._labelled(
            "seconds",
            "Seconds of steps, by part: verify, commit, draft.",
            "part",
        )
        self._lengths = create_metric_per_engine(
            prometheus_client.Histogram(
                name=f"{PREFIX}acceptance_length",
                documentation="Tokens of a verified draft, the target's own included.",
                buckets=_LENGTH_BUCKETS,
                labelnames=labelnames,
            ),
            labelvalues,
        )
        self._error = create_metric_per_engine(
            prometheus_client.Gauge(
                name=f"{PREFIX}confidence_error",
                documentation="Expected calibration error of the head's confidence.",
                labelnames=labelnames,
            ),
            labelvalues,
        )

    def observe(self, counts: StepCounts, engine: int) -> None:
        self._drafted[engine].inc(counts.drafted)
        self._verified[engine].inc(counts.verified)
        self._plain[engine].inc(counts.plain_steps)
        self._planned[engine].inc(counts.planned_nodes)
        self._error[engine].set(counts.confidence_error)
        for length, count in counts.lengths.items():
            for _ in range(count):
                self._lengths[engine].observe(int(length))
        for metric, values in (
            (self._plans, counts.plans),
            (self._verified_at, counts.verified_at),
            (self._accepted_at, counts.accepted_at),
            (self._fallbacks, counts.fallbacks),
            (self._seconds, counts.seconds),
        ):
            for label, value in values.items():
                metric.labels(*self._labelvalues[engine], label).inc(value)

    def _counter(self, name: str, documentation: str) -> dict[int, Any]:
        counter = prometheus_client.Counter(
            name=PREFIX + name, documentation=documentation, labelnames=self._labelnames
        )
        return create_metric_per_engine(counter, self._labelvalues)

    def _labelled(self, name: str, documentation: str, label: str) -> Any:
        return prometheus_client.Counter(
            name=PREFIX + name,
            documentation=documentation,
            labelnames=[*self._labelnames, label],
        )


def _unregister() -> None:
    """Drop the metrics of an earlier engine of this process, as vLLM drops its own."""
    registry = prometheus_client.REGISTRY
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            registry.unregister(collector)


def install() -> None:
    """Let vLLM carry and show these statistics; call once per process."""
    # What the API server decodes the engine's messages to.
    SchedulerStats.__annotations__["spec_decoding_stats"] = DraftingStats | None
    loggers.PrometheusStatLogger._spec_decoding_cls = DraftingProm
    loggers.SpecDecodingLogging = DraftingLogging
