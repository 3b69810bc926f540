"""Reads the data of one rank from a checkpoint, and loads it into the objects of the program."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import stagereg.checkpoint.load.placing as placing
import stagereg.checkpoint.load.seeding as seeding
import stagereg.checkpoint.load.sharing as sharing
import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.extension import RestoreRequest
from stagereg.checkpoint.format.encoding import fill, marks
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.state.name_map import NameMap
from stagereg.checkpoint.storage.reading import CheckpointFiles, Transfer
from stagereg.errors import CheckpointError, listed, reason

_log = logging.getLogger(__name__)


class Loading:
    """Restores one checkpoint on this rank. All methods run on the training thread, and are not collective.

    ``once``: whether a :class:`.SharedReader` reads all bytes. ``twins``: the result of
    :func:`.seeding.lowest_twins`. ``touched``: an earlier attempt has changed some objects, so this checkpoint must
    have a value for every object.
    """

    files: CheckpointFiles  # the files of the checkpoint; set by :meth:`prepare`
    transfer: Transfer  # the reads into memory of objects; with ``once``, all reads, finished before :meth:`assign`

    def __init__(
        self, chosen: Checkpoint, asked: RestoreRequest, once: bool, twins: Mapping[str, list[int]], touched: bool
    ) -> None:
        self._chosen, self._asked, self._once, self._twins, self._touched = chosen, asked, once, twins, touched
        self._found: dict[str, Any] = {}
        self._seeding: seeding.Seeding | None = None  # set if the checkpoint lacks the RNG states of this rank
        self._sources: dict[int, str] = {}  # other ranks whose RNG states are read instead, with the entry names
        self.left: dict[str, dict[str, Any]] = {}  # saved parameters that this rank does not load, by entry and name
        self.names = NameMap(asked.rename, asked.allow_missing)
        self.missing: Sequence[str] = ()  # parameters of any rank that keep the program's values

    def prepare(self, files: CheckpointFiles) -> None:
        """Plan all reads from ``files``. Read the data that cannot be read directly into the tensors of the program."""
        chosen, asked = self._chosen, self._asked
        self.files = files
        files.match(asked.state, asked.names, self.names)
        if asked.allow_missing:
            self.names.look(placing.names_here(asked.state, asked.names))
        self._found, self.left = placing.find(files, chosen, asked, self.names)
        if entries.rng_name(asked.ranks.rank) not in self._found:
            self._seeding = seeding.Seeding(chosen.manifest, self._twins, asked.ranks.rank, asked.ranks.size)
            self._sources = {rank: entries.rng_name(rank) for rank in self._seeding.sources(self.files.index.state)}
            self._found |= {name: self.files.structure(name) for name in self._sources.values()}
        lacking = (asked.state.keys() - self._found.keys()).union(self.names.all_missing())
        if self._touched and lacking:
            raise CheckpointError(f"it does not have {listed(sorted(lacking))}")
        self._read()

    def take_rests(self, rests: Mapping[str, set[str]], unused: Sequence[str]) -> None:
        """Pass ``rests``, the saved parameters that no rank has requested, to objects that accept additional values.

        Raises: ``CheckpointError`` if names in ``allow_missing`` are ``unused`` on all ranks.
        """
        if unused:
            raise CheckpointError(self.names.no_such())
        for name, rest in self.left.items():
            more = {key: rest[key] for key in rest if key in rests[name]}
            placing.take_rest(self._asked.state, name, self._found[name], more)
        self._read()

    def _read(self) -> None:
        files = self.files
        leaves = [leaf for name, each in self._found.items() for leaf in placing.pair_live(self._asked, each, name)]
        modules, plain = placing.written(self._asked.state, self._found)
        placed = [leaf for leaf in leaves if leaf.in_place]
        sharing.read_apart(dict.fromkeys(itertools.chain(*modules.values(), plain, placed)))
        into = leaves if self._once else [leaf for leaf in leaves if leaf.in_place]
        self.transfer = files.plan(into)
        if not self._once:
            files.open_for(into)
            files.read([leaf for leaf in leaves if not leaf.in_place])
            if self._seeding is None:
                rng.expect_valid(fill(self._found[entries.rng_name(self._asked.ranks.rank)]))

    def assign(self) -> seeding.Seeded | None:
        """Read the remaining data into the objects, and load all values.

        Return which random number generators were seeded, or ``None`` if all continue from their saved state.
        """
        saved_size, state, ranks = self._chosen.manifest.world_size, self._asked.state, self._asked.ranks
        rank = ranks.rank if saved_size == ranks.size else None
        own = [name for name in state if name not in self._found]
        new = [name for name in own if self.names.may_miss(name)]
        if (begun := [*new, *self.missing]) and ranks.rank == 0:
            _log.warning("%s does not contain %s: started from scratch.", self._chosen.path, listed(begun))
        for name in (each for each in state if each in self._found):
            placing.expect_forms(state, name, self._found[name])
        if ranks.rank == 0:
            placing.warn_of_not_filled(self._chosen.path, state, self._found, self._asked.cast)
        merger = placing.merger(state, self._found)
        placing.add_beside(state, self._found)
        try:
            if not self._once:
                self.transfer.run()
        except (OSError, CheckpointError) as error:
            raise CheckpointError(placing.changed_in_part(error)) from error
        changed = [name for name, each in self._found.items() if any(leaf.in_place for leaf in marks(each))]
        last = sharing.buffers_of_ranks(state)
        for name in sorted((each for each in state if each in self._found), key=last.__contains__):
            missing = self.names.missing.get(name, ())
            try:
                placing.assign(self._asked, name, self._found[name], merger, rank, missing)
            except Exception as error:
                raise CheckpointError(placing.refused_late(name, reason(error), changed)) from error
            changed += [name] if name not in changed else []
        if self._seeding is None:
            try:
                rng.restore(fill(self._found[entries.rng_name(ranks.rank)]))
            except CheckpointError as error:  # only with ``once``; otherwise :meth:`_read` has checked the RNG states
                raise CheckpointError(placing.changed_in_part(error)) from error
            return None
        saved = {each: fill(self._found[name]) for each, name in self._sources.items()}
        seeded = self._seeding.apply(state, self._found, saved)
        if rank is None and ranks.rank == 0:
            own = [name for name in own if name not in new and name not in seeded.anew]
            more = f"; {', '.join(own)} (saved per rank) keep the values of the program" if own else ""
            by = f"{saved_size} rank{'s' * (saved_size > 1)}" if saved_size else "plain torch"
            seed = "the checkpoint" if saved_size else "the seed of the program"
            text = "%s was saved by %s: random numbers do not continue; they are seeded from %s, step and rank%s."
            _log.warning(text, self._chosen.path, by, seed, more)
        return seeded
