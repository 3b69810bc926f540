"""The session of one join on one rank: its process group, its hooks, its loops, and the ranks that still have data.

``Join`` creates a session on entering, and passes it to each joinable in ``attach``. The session does not depend on the
work that joinables and hooks do in a step.

If a join has loops, all its steps belong to the loop entered last. Without a loop, it uses torch's protocol: each rank
with data signals each step in an all-reduce.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from stagereg.base.option_text import option
from stagereg.errors import JoinError, PeerFailedError, Preempted, StageregError, Stopped, UnevenInputsError
from stagereg.join.loop import Loop, Terms
from stagereg.join.order import ModelOrder
from stagereg.join.peers import Peers
from stagereg.kernel.channel import control_channel, resources_of, wait_for_keys
from stagereg.kernel.membership import Membership, StoreMembership
from stagereg.kernel.shadow import PEER_EXHAUSTED, TorchWire

E = TypeVar("E", bound=BaseException)

_log = logging.getLogger(__name__)

_STEPS = (
    "an optimizer did not step equally often on all ranks of this join, so its state differs between ranks: %s. A rank "
    "without data calls each listed optimizer and function once after each backward that reduces gradients. List the "
    "optimizer, or one function that steps the optimizer, and call it in the loop after exactly these backwards (not "
    "under no_sync). Or loop over join.iterate(loader)."
)

_BETWEEN = (
    "in step {step}, a {kind} runs collectives between the forward and the backward of {model}. A rank without data "
    "runs one hook after the other, so it cannot match them there. Run the whole step of the {kind} before that "
    "forward, and list it before the model; or after the backward, and list it after the model. Or loop over "
    "join.iterate(loader)."
)

_POLL_INTERVAL_S = 0.001

_entered: ContextVar[tuple[JoinSession, ...]] = ContextVar("entered", default=())
"""The active joins of a thread, outermost first. Global, because an inner join has no reference to its outer join."""


class JoinSession:
    """A join on one rank. All ranks construct their sessions in the same order."""

    def __init__(
        self, wire: TorchWire, joinables: Sequence[Any], terms: Terms, timeout_s: float, models: Mapping[str, Any]
    ) -> None:
        self.joinables, self.terms, self._models = joinables, terms, models
        self.peers = Peers(wire, timeout_s, lambda: self.steps)
        self.hooks: Sequence[Any] = ()
        self.loop: Loop | None = None
        self._loops: list[Loop] = []
        self._suspended = False
        self._order: ModelOrder | None = None  # only needed for several models
        if terms.several_models:
            self._order = ModelOrder(models, lambda: self.steps, self._all_are_active)
        self._is_early = False  # whether an evaluation on this batch has already announced the batch's training step
        self._warned = False  # whether the warning about a joinable inside a model's step was logged
        self._announced = 0  # steps that this rank began, with torch's protocol
        self._followed = 0  # steps that other ranks began while this rank had no data, with torch's protocol

    @property
    def membership(self) -> Membership | None:
        """The ranks with data in the current loop; ``None`` if the join has no loop and uses torch's protocol."""
        if self._suspended:
            raise JoinError(
                "a joinable that only the outer join lists was used inside an inner join, where ranks without data do "
                "not take part in its collectives. List every object that the inner loop uses in the inner join."
            )
        return None if self.loop is None else self.loop.membership

    @property
    def all_took_every_step(self) -> bool:
        """Whether, after the loop, all ranks are known to have had data in every step. Equal on all ranks."""
        known = self.loop is not None  # with torch's protocol, ranks do not know this
        return known and all(loop.membership.over and loop.membership.all_took_every_step for loop in self._loops)

    @property
    def steps(self) -> int:
        """The number of steps that have begun in this join, including steps that began while this rank had no data."""
        return self._announced + self._followed + sum(each.steps for each in self._memberships)

    @property
    def shadowed(self) -> int:
        """The number of steps that other ranks began while this rank had no data."""
        return self._followed + sum(each.shadowed for each in self._memberships)

    @property
    def _own_hooks(self) -> list[Any]:
        return [hook for hook in self.hooks if hasattr(hook, "before_step") and hasattr(hook, "on_exhausted")]

    @property
    def _memberships(self) -> list[Membership]:
        return [loop.decided for loop in self._loops if loop.decided is not None]

    def start(self, loader: Any, options: Mapping[str, Any]) -> None:
        """Enter the join, and suspend the outer join. Collective.

        ``loader``: the loader of a plain loop (without ``join.iterate``), if known. ``options`` must be equal on all
        ranks.
        """
        for outer in _entered.get():
            outer._suspended = True
        _entered.set((*_entered.get(), self))
        self.peers.detector.start()
        self.peers.expect_alike(options)
        mode, foreign = self.terms.mode, self.terms.foreign
        if mode == "torch" or (mode is None and loader is None) or (foreign and mode in (None, "auto")):
            self.peers.store.add("entered", 1)
            return
        if foreign or mode != "planned" or loader is not None:  # in mode planned, join.iterate may pass the loader
            self.enter_loop(loader)

    def enter_loop(self, loader: Any, iterates: bool = False) -> Loop:
        """Begin a loop, which ends the previous loop of this rank. Collective."""
        if self.terms.foreign:
            raise JoinError(self.terms.foreign)
        before = self.loop
        if before is not None and before.running:
            raise JoinError(
                "another join.iterate of this join has not ended, but only one can run at a time. Evaluate "
                "after that loop, or loop over the loader itself under torch.no_grad()."
            )
        if self._announced or (before is not None and not before.iterates and before.decided and before.decided.steps):
            raise JoinError(
                "a step of this join has already begun outside join.iterate. Run all steps of a join inside "
                "join.iterate, or none; use a separate join for the other steps."
            )
        if before is not None and before.iterates:
            before.leave()
        elif before is not None:
            self._loops.remove(before)
        self.loop = Loop(len(self._loops), loader, self.terms, self.peers, self.shadow_step, iterates)
        self._loops.append(self.loop)
        if self.terms.throw:
            _ = self.loop.membership
        return self.loop

    def starts_step(self, joinable: Any, trains: bool) -> bool:
        """Return whether this forward begins a step of the join. Called only after the module's previous backward.

        With ``join.iterate``, where all ranks run the loop body, the first forward on a batch begins a step, even in an
        evaluation (``trains`` is False). Each later training forward of the first joinable begins another step.
        """
        is_first = joinable is self.joinables[0]
        if self.loop is not None and self.loop.iterates:
            if self.loop.awaits_step:
                self._is_early = not trains
                return True
            is_early, self._is_early = self._is_early, self._is_early and not is_first
            return is_first and not is_early
        if self._order is None or self.joinables[0] not in self._order.models:
            return is_first
        return joinable in self._order.models and self._order.starts_step(joinable)

    @property
    def order(self) -> ModelOrder | None:
        """The checked order of the models in a step. ``None`` for one model, or if all ranks run the loop body."""
        return None if self.loop is not None and self.loop.iterates else self._order

    def _all_are_active(self) -> bool:
        """Return whether all ranks have data in the last announced step. May wait for the other ranks."""
        membership = self.membership
        if isinstance(membership, StoreMembership):  # this membership contains only the planned lengths
            return membership.steps <= membership.shortest
        if membership is not None:
            return len(membership.read().ranks) == self.peers.group.size()
        if (work := self.peers.announced) is None:  # no step yet
            return True

        def is_known(seconds: float) -> bool:
            limit_s = min(seconds, _POLL_INTERVAL_S)
            return bool(work.is_completed()) or wait_for_keys(self.peers.store, ["lacking"], limit_s)

        self.peers.wait(is_known, "the next step")
        return work.is_completed() and int(work.get_future().value()[0].item()) == self.peers.group.size()

    def check_place(self, joinable: Any) -> None:
        """Check that a joinable does not run its collectives in the middle of a model's step.

        Raises: ``JoinError`` if it does, in a plain loop, and some rank has no data in this step.
        """
        if self.loop is not None and self.loop.iterates:
            return
        place = next(i for i, each in enumerate(self.joinables) if each is joinable)
        for name, model in self._models.items():
            is_before = any(each is model for each in self.joinables[:place])
            if not model.has_unfinished_step or not (is_before or model.has_met):
                continue
            text = _BETWEEN.format(step=self.steps, kind=type(joinable).__name__, model=name)
            if not self._all_are_active():
                raise JoinError(text)
            if not (self._warned or self.terms.throw):
                self._warned = True
                _log.warning("stagereg: this works only while all ranks have data: %s", text)

    def begin(self, reduces: bool | None) -> Membership | None:
        """Begin a step on this rank. Announce it to the other ranks; with torch's protocol, only count it.

        ``reduces``: whether the step reduces gradients. ``None``: not known yet, because an evaluation runs first.
        """
        membership = self.membership
        if (order := self.order) is not None:
            order.step_begins(reduces, is_followed=bool(reduces) or self.loop is None)
        if membership is not None and self.loop is not None:
            self.loop.begin(membership, reduces)
        elif self.terms.mode == "planned":
            raise JoinError(
                f"{option('join.mode', 'planned')} requires the number of batches: loop over "
                "join.iterate(loader), or pass the loader to the join: loader=loader."
            )
        else:
            self._announced += 1
        self.peers.progress = self.peers.progress.begun(self.steps)
        return membership

    def count_reduction(self, joinable: Any) -> None:
        """Record that gradients are reduced in this step. Only the first joinable that reduces gradients counts."""
        if joinable is next(each for each in self.joinables if each.reduces_gradients):
            self.peers.progress = self.peers.progress._replace(reduced=True)

    def shadow_step(self) -> None:
        """Take part in a step without data: run the hooks, and add zeros to the sums of :meth:`stagereg.Join.mean`."""
        self.peers.follow()
        if self.peers.responder is not None:
            self.peers.responder.start()
        self.peers.progress = self.peers.progress.begun(self.steps)
        for hook in self._own_hooks:
            hook.before_step()
        for hook in self.hooks:
            hook.main_hook()
        for joinable in self.joinables:
            if joinable.reduces_gradients and joinable.reduced:
                self.count_reduction(joinable)

    def finish(self) -> None:
        """Leave this rank's loop, which raised no error. Run hooks in the other ranks' steps until no rank has data."""
        passed = self.loop is not None and self.loop.iterates and self.loop.membership.over  # ended on all ranks
        names = {id(model): name for name, model in self._models.items()}
        unfinished = [names.get(id(each), type(each).__name__) for each in self.joinables if each.has_unfinished_step]
        if unfinished and not passed:
            raise JoinError(
                f"this rank leaves the join after a forward without a backward: of {', '.join(unfinished)}. The other "
                "ranks wait for its gradients. Run forwards without a training step under torch.no_grad(). If only "
                "torch.autograd.grad uses the graph of that forward, loop over join.iterate(loader), or remove the "
                "model from the list of joinables if the list has others."
            )
        if (order := self.order) is not None:
            self._leave_step(order)
        for hook in self._own_hooks:
            hook.on_exhausted()
        if self.loop is not None:
            was_last = self.loop.leave()
        else:
            self.peers.follows = True
            while self.terms.mode != "planned" and self.peers.count_active():
                if self.terms.throw:
                    self.peers.wire.raise_if_exhausted(joined=True)
                self._followed += 1
                self.shadow_step()
            was_last = not self._followed
            self.peers.end_loop()
        if self._models and not self._is_even:
            self._compare_optimizer_steps()
        for hook in self.hooks:
            hook.post_hook(was_last)

    @property
    def _is_even(self) -> bool:
        if self.loop is not None or self.terms.foreign:
            return self.all_took_every_step
        return not self._followed and self._all_are_active()

    def _compare_optimizer_steps(self) -> None:
        """Raise on all ranks, or log a warning, if the number of steps of an optimizer differs between ranks."""
        own = {name: each.optimizer_steps() for name, each in self._models.items()}
        # With torch's protocol, some ranks may run torch's Join; these ranks do not take part in the comparison.
        ranks = self.peers.group.size() if self.loop is not None else self.peers.store.add("entered", 0)
        if not (found := self.peers.find_difference("optimizer steps", own, ranks)):
            return
        (one, rank), (other, other_rank) = found
        text = "; ".join(
            f"the optimizer of {name}: {_and(one[name])} on rank {rank}, {_and(other[name])} on rank {other_rank}"
            for name in own
            if one[name] != other[name]
        )
        if any(hasattr(each, "step") for each in self.joinables):
            raise JoinError(_STEPS % text)
        _log.warning(_STEPS, text)

    def _leave_step(self, order: ModelOrder) -> None:
        """Leave a plain loop. Raises: ``JoinError`` if the last step lacks a backward and other ranks continue."""
        missing, refusal, store = order.missing, order.refusal("left the loop"), self.peers.store
        order.end_step("left the loop")
        if not missing:
            return
        others_went_on = False
        try:
            self.peers.progress = self.peers.progress._replace(waits=True)
            if self.loop is not None:
                others_went_on = self.loop.membership.wait_for_next_step() is not None
            else:
                if store.add("lacking", 1) == self.peers.group.size():
                    store.set("all left", "")
                what = f"the end of the loop, after a step without a backward of {missing}"
                self.peers.wait(lambda seconds: wait_for_keys(store, ["all left"], seconds), what)
        except PeerFailedError as error:
            raise refusal from error
        if others_went_on:
            raise refusal

    def give_up(self, error: BaseException) -> None:
        """Leave the join after an error. Publish the error to the other ranks, or raise the failed rank's error."""
        _add_note(error)
        if type(error) is RuntimeError and str(error) == PEER_EXHAUSTED:
            raise _add_note(UnevenInputsError(PEER_EXHAUSTED)) from error  # raised by torch's notify_join_context
        membership = None if self.loop is None else self.loop.decided
        if isinstance(error, UnevenInputsError) and not isinstance(membership, StoreMembership):
            if self.peers.responder is not None:
                self.peers.responder.close()
            return  # All ranks raise this error. With planned lengths, only a rank whose data ended early raises it.
        self.peers.failed = True
        if isinstance(error, (PeerFailedError, Preempted, Stopped)):  # the other ranks leave or fail as well
            return
        if isinstance(error, RuntimeError) and not isinstance(error, JoinError):
            cause = self.peers.detector.explain(error)
            if cause is not None:
                raise _add_note(cause) from (None if isinstance(cause, UnevenInputsError) else error)
        self.peers.detector.report(error)
        is_foreign = isinstance(error, Exception) and not isinstance(error, StageregError)
        if membership is not None and membership.empty and is_foreign:
            error.add_note(
                "This rank has no more data, and join.iterate ran the loop body on an empty batch. Its code must "
                "support batches without samples: x.flatten(1), not x.view(len(x), -1); sums, not means; "
                "pack_padded_sequence only if len(x). If a batch is a list of samples, the empty batch is an empty "
                "list: join.iterate(loader, example=[])."
            )

    def stop(self) -> None:
        """Leave the join, and resume the outer join."""
        _entered.set(tuple(each for each in _entered.get() if each is not self))
        for outer in _entered.get()[-1:]:
            outer._suspended = False
        # Delete the store keys of the previous join, which all ranks have left. The next join deletes this join's keys.
        resources = resources_of(self.peers.group)
        if any(membership.over for membership in self._memberships):
            thread = control_channel(self.peers.group, "membership", self.peers.wait_for_ranks).thread
            for delete in resources.expired:
                thread.submit(delete, wake=False)
            resources.expired = []
        resources.expired += [functools.partial(_delete, each.store, each.keys) for each in self._loops]
        if self.peers.group.rank() == 0:
            resources.expired.append(functools.partial(_delete, self.peers.store, self.peers.keys))
        self.peers.detector.stop()


def _add_note(error: E) -> E:
    if isinstance(error, UnevenInputsError):
        error.add_note("Any forward that is not under torch.no_grad() counts as a training step.")
    return error


def _and(counts: Sequence[int]) -> str:
    return " and ".join(map(str, counts or [0])) + " steps"


def _delete(store: Any, keys: Sequence[str]) -> None:
    with contextlib.suppress(RuntimeError):  # the rendezvous store may be gone
        for key in keys:
            store.delete_key(key)
