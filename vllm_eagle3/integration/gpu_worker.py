"""The GPU worker that builds our model runner."""

from __future__ import annotations

from vllm.v1.worker import gpu_worker

from .capture import CapturingWorker
from .model_runner import Eagle3GPUModelRunner


class Eagle3GPUWorker(CapturingWorker, gpu_worker.Worker):
    def _make_model_runner(self) -> Eagle3GPUModelRunner:
        return Eagle3GPUModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """What trees need as scratch is not the block manager's to give."""
        return self.model_runner.without_scratch(super().determine_available_memory())
