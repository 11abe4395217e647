"""A worker group: a model on its ranks, as an object whose primitives are methods."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcflow.dataflow.batch import Batch, Handle, Origin
from hpcflow.dataflow.protocols import plan, protocol
from hpcflow.mpi.messages import Call, Stamp
from hpcflow.reshard.layout import Layout
from hpcflow.workers.primitive import Primitive

if TYPE_CHECKING:
    from hpcflow.dataflow.world import World


class WorkerGroup:
    """``ranks`` in training order. ``version``: weight version after all calls issued so far."""

    def __init__(
        self,
        world: World,
        name: str,
        ranks: tuple[int, ...],
        layout: Layout,
        primitives: dict[str, Primitive],
    ) -> None:
        self.world, self.name, self.ranks, self.layout = world, name, ranks, layout
        self.primitives = primitives
        self.version = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        primitives = self.__dict__.get("primitives", {})
        if name not in primitives:
            near = difflib.get_close_matches(name, primitives, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(primitives))}"
            raise AttributeError(f"model {self.__dict__.get('name')} has no primitive {name!r}{hint}")
        return lambda batch=None, **arguments: self.call(primitives[name], batch, arguments)

    def call(self, primitive: Primitive, batch: Batch | None, arguments: dict[str, Any]) -> Batch | Handle:
        """Issue one call and return at once: a `Batch` when the primitive writes columns, else a `Handle`.

        ``rows=n`` among the arguments says how many rows a call without a batch makes; the method then gets
        ``parts``, rank -> (lo, hi). ValueError when the batch lacks a column that the primitive reads.
        """
        if batch is not None and primitive.reads:
            self._check_columns(primitive, batch)
            present = tuple(name for name in primitive.optional if name in batch.columns)
            extra = tuple(name for name, needed in primitive.written_with if needed in present)
            primitive = dataclasses.replace(
                primitive, reads=primitive.reads + present, writes=primitive.writes + extra
            )
        place = self.world.place(f"{self.name}.{primitive.name}")
        make = lambda: self.issue(primitive, batch, arguments, place)
        if self.world.recorded is not None:
            rows = batch.rows if batch is not None else arguments.get("rows", 0)
            known = self.world.recorded.instead_of(self, primitive, batch, rows, place, make)
            if known is not None:
                return known
        return make()

    def issue(
        self, primitive: Primitive, batch: Batch | None, arguments: dict[str, Any], place: str
    ) -> Batch | Handle:
        """Issue one call with exactly the columns that ``primitive`` names."""
        makes_rows = batch is None and "rows" in arguments
        arguments = dict(arguments)
        rows = arguments.pop("rows", 0) if batch is None else batch.rows
        layout = plan(protocol(primitive.protocol), self.layout, self.ranks, rows)
        inputs = ()
        if batch is not None and primitive.reads:
            if primitive.kind == "advancing":
                self.world.before_advance(batch)
            inputs = batch.transfers(primitive.reads, layout.readers)
        elif makes_rows:
            arguments = {**arguments, "parts": {part.rank: (part.lo, part.hi) for part in layout.readers}}
        number = self.world.controller.number()
        call = Call(
            number=number,
            model=self.name,
            method=primitive.name,
            iteration=self.world.iteration,
            version=self.version,
            ranks=self.ranks,
            args=arguments,
            inputs=inputs,
            writes=primitive.writes,
            outputs=layout.owners if primitive.writes else (),
            kind=primitive.kind,
            place=place,
        )
        self.world.issue(call)
        if primitive.kind == "advancing":
            self.version += 1
        handle = Handle(self.world.controller, number, layout.keepers)
        if not primitive.writes:
            return handle
        stamp = Stamp(call.iteration, self.name, self.version)
        origin = Origin(handle, layout.owners, stamp, self.world.release, place)
        made = Batch(self.world.controller, rows, dict.fromkeys(primitive.writes, origin))
        joined = batch | made if primitive.joins and batch is not None else made
        self.world.made(primitive, joined)
        return joined

    def _check_columns(self, primitive: Primitive, batch: Batch) -> None:
        missing = [name for name in primitive.reads if name not in batch.columns]
        if missing:
            raise ValueError(
                f"{self.name}.{primitive.name} reads column {', '.join(missing)}, which the batch does not have; it has "
                f"{', '.join(batch.columns)}. Call the primitive that writes it first"
            )
