"""The CPU worker that builds our model runner."""

from __future__ import annotations

from vllm.v1.worker import cpu_worker

from .capture import CapturingWorker
from .model_runner import Eagle3CPUModelRunner


class Eagle3CPUWorker(CapturingWorker, cpu_worker.CPUWorker):
    def init_device(self) -> None:
        # vLLM's method names the runner class through its module, and offers no other
        # way in; the name is put back as soon as the runner stands.
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = Eagle3CPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock

    def determine_available_memory(self) -> int:
        """What trees need as scratch is not the block manager's to give."""
        return self.model_runner.without_scratch(super().determine_available_memory())
