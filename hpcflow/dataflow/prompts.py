"""The prompts of an iteration, as the dataflow function gets them."""

from __future__ import annotations

from collections.abc import Callable

from hpcflow.dataflow.batch import Batch


class Stream:
    """The prompts of a source in the order of the data. ``position``: the next one. Kept with every
    checkpoint, so that a run that goes on takes up where it stopped, however many prompts an iteration
    used."""

    def __init__(self, load: Callable[..., Batch], source: str, count: int, draws: int) -> None:
        self._load, self.source, self.count, self.draws = load, source, count, draws
        self.position = 0

    def next(self) -> Prompts:
        """The next ``count`` prompts, ``draws`` rows each."""
        batch = self._load(
            source=self.source,
            start=self.position,
            count=self.count,
            draws=self.draws,
            rows=self.count * self.draws,
        )
        self.position += self.count
        return Prompts(batch, self)


class Prompts(Batch):
    """A batch of prompts that can be followed by more."""

    def __init__(self, batch: Batch, stream: Stream) -> None:
        super().__init__(batch._controller, batch.rows, batch.columns)
        self._stream = stream

    def more(self) -> Prompts:
        """As many prompts again: those that come next in the data."""
        return self._stream.next()
