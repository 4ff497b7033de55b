"""The order of a run's batches and the learning rate of its steps.

Both follow from the configuration, the rows and the number of a step alone, so that a
run that was stopped goes on with exactly what would have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .config import TrainConfig
from .data import Row, make_batches


class Schedule:
    """Iterates over the steps of a run; each is a list of micro-batches of rows.

    Args:
        config: epochs, batch size, seed, learning rate.
        rows: the training rows.
        batches_per_step: micro-batches of one optimizer step, over all ranks. The last
            ones of the run are left out where they do not fill a step.

    Raises:
        ValueError: the whole run does not fill one step.
    """

    def __init__(
        self, config: TrainConfig, rows: Sequence[Row], batches_per_step: int
    ) -> None:
        self.config, self.rows = config, rows
        self.batches_per_step = batches_per_step
        self.num_steps = sum(1 for _ in self._batches()) // batches_per_step
        if self.num_steps == 0:
            raise ValueError(
                f"accumulate: {batches_per_step} micro-batches a step are more than "
                "the whole run has; lower it, or raise epochs"
            )

    def __iter__(self) -> Iterator[list[list[Row]]]:
        step: list[list[Row]] = []
        for batch in self._batches():
            step.append(batch)
            if len(step) == self.batches_per_step:
                yield step
                step = []

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to 0 at the end of the run."""
        warmup = self.config.warmup * self.num_steps
        warm = min(1.0, (step + 1) / (warmup + 1))
        return self.config.learning_rate * warm * (1 - step / self.num_steps)

    def _batches(self) -> Iterator[list[Row]]:
        config = self.config
        whole, part = divmod(config.epochs, 1)
        for epoch in range(int(whole) + (part > 0)):
            seed = config.seed + epoch
            batches = make_batches(self.rows, config.tokens_per_batch, seed)
            yield from batches if epoch < whole else batches[: int(part * len(batches))]
