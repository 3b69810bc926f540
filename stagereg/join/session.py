"""One join on one rank, from entering to leaving: its ranks, its hooks, its loops, and who still has data in each.

The join's context manager makes a session when it is entered, and a joinable gets it by ``attach``. The session knows
process groups, loaders' lengths and the modes of a join; it does not know what a joinable or a hook does in a step.

All steps of a join belong to the loop that was entered last, or go over torch's wire, where there is no loop.
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
"""The joins that are on in a thread, outermost first. Global, as a nested join does not know the one around it."""


class JoinSession:
    """All ranks construct theirs in the same order."""

    def __init__(
        self, wire: TorchWire, joinables: Sequence[Any], terms: Terms, timeout_s: float, models: Mapping[str, Any]
    ) -> None:
        self.joinables, self.terms, self._models = joinables, terms, models
        self.peers = Peers(wire, timeout_s, lambda: self.steps)
        self.hooks: Sequence[Any] = ()
        self.loop: Loop | None = None
        self._loops: list[Loop] = []
        self._suspended = False
        self._order: ModelOrder | None = None  # not needed for a single model
        if terms.several_models:
            self._order = ModelOrder(models, lambda: self.steps, self._all_are_active)
        self._is_early = False  # whether the step of this batch was announced by an evaluation
        self._warned = False  # of a joinable in the middle of a model's step
        self._announced = 0  # steps, by the first joinable, on torch's wire
        self._followed = 0  # steps of torch's wire, without data

    @property
    def membership(self) -> Membership | None:
        """How this rank knows who has data in the loop that runs; ``None`` where it goes over torch's wire."""
        if self._suspended:
            raise JoinError(
                "a joinable of an outer join was used inside an inner one, where ranks without data do not answer it. "
                "Put all that the inner loop uses in the inner join."
            )
        return None if self.loop is None else self.loop.membership

    @property
    def all_took_every_step(self) -> bool:
        """Once no rank has data any more: whether all are known to have had data in every step; the same on all."""
        known = self.loop is not None  # not on torch's wire
        return known and all(loop.membership.over and loop.membership.all_took_every_step for loop in self._loops)

    @property
    def steps(self) -> int:
        """How many steps have begun in all loops so far, on this rank or on others while it had no data."""
        return self._announced + self._followed + sum(each.steps for each in self._memberships)

    @property
    def shadowed(self) -> int:
        """How many of them came while this rank had no data."""
        return self._followed + sum(each.shadowed for each in self._memberships)

    @property
    def _own_hooks(self) -> list[Any]:
        """The hooks that are stagereg's ``JoinHook``: they have more methods than torch's."""
        return [hook for hook in self.hooks if hasattr(hook, "before_step") and hasattr(hook, "on_exhausted")]

    @property
    def _memberships(self) -> list[Membership]:
        return [loop.decided for loop in self._loops if loop.decided is not None]

    def start(self, loader: Any, options: Mapping[str, Any]) -> None:
        """Enter; the join around this one must not be used from now on. Collective.

        ``loader`` is that of a loop that ranks leave when they run out of data, if it is known. ``options`` are to be
        the same on all ranks.
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
        if foreign or mode != "planned" or loader is not None:  # else there has to be a join.iterate
            self.enter_loop(loader)

    def enter_loop(self, loader: Any, iterates: bool = False) -> Loop:
        """Enter a loop in the place of the one before, which ends now on this rank. Collective."""
        if self.terms.foreign:
            raise JoinError(self.terms.foreign)
        before = self.loop
        if before is not None and before.running:
            raise JoinError(
                "another join.iterate of this join has not come to its end, and only one runs at a time. Evaluate "
                "after it, or loop over the loader itself under torch.no_grad()."
            )
        if self._announced or (before is not None and not before.iterates and before.decided and before.decided.steps):
            raise JoinError(
                "a step of this join has begun outside of join.iterate already. Take all steps of a join inside of "
                "join.iterate, or none; put others in a join of their own."
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
        """Return whether a forward begins a step of the join; the module's previous forward has had its backward.

        If all ranks run the loop's body, the first forward on a batch begins a step, with or without ``trains``. Each
        later training forward of the first joinable begins another step.
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
        """The order of the models; ``None`` with one model, or if all ranks run the loop's body."""
        return None if self.loop is not None and self.loop.iterates else self._order

    def _all_are_active(self) -> bool:
        """Return whether all ranks have data in the last announced step; may wait for the other ranks."""
        membership = self.membership
        if isinstance(membership, StoreMembership):  # which knows the plan alone
            return membership.steps <= membership.shortest
        if membership is not None:
            return len(membership.read().ranks) == self.peers.group.size()
        if (work := self.peers.announced) is None:  # no step yet
            return True

        def is_known(seconds: float) -> bool:
            return bool(work.is_completed()) or wait_for_keys(
                self.peers.store, ["lacking"], min(seconds, _POLL_INTERVAL_S)
            )

        self.peers.wait(is_known, "the next step")
        return work.is_completed() and int(work.get_future().value()[0].item()) == self.peers.group.size()

    def check_place(self, joinable: Any) -> None:
        """Check that the collectives of a joinable, about to run, are not in the middle of a model's step.

        Raises: ``JoinError`` if they are, in a plain loop, and some rank has no data in this step.
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
        """A step begins on this rank, and ``reduces`` gradients or not: announce it; count it on torch's wire.

        ``None``: whether it does is not known yet, as an evaluation comes first on its batch.
        """
        membership = self.membership
        if (order := self.order) is not None:
            order.step_begins(reduces, is_followed=bool(reduces) or self.loop is None)
        if membership is not None and self.loop is not None:
            self.loop.begin(membership, reduces)
        elif self.terms.mode == "planned":
            raise JoinError(
                f"{option('join.mode', 'planned')} has to know how many batches there are: loop over "
                "join.iterate(loader), or give the join the loader: loader=loader."
            )
        else:
            self._announced += 1
        self.peers.progress = self.peers.progress.begun(self.steps)
        return membership

    def count_reduction(self, joinable: Any) -> None:
        """A joinable's gradients are reduced in this step, which begins with the first one that has some."""
        if joinable is next(each for each in self.joinables if each.reduces_gradients):
            self.peers.progress = self.peers.progress._replace(reduced=True)

    def shadow_step(self) -> None:
        """Take part in a step by hooks, and in its :meth:`stagereg.Join.mean` by zeros."""
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
        """This rank has left its loop with nothing wrong: take part until no rank has data any more."""
        passed = self.loop is not None and self.loop.iterates and self.loop.membership.over  # by all ranks together
        names = {id(model): name for name, model in self._models.items()}
        unfinished = [names.get(id(each), type(each).__name__) for each in self.joinables if each.has_unfinished_step]
        if unfinished and not passed:
            raise JoinError(
                f"this rank leaves the join after a forward without a backward: of {', '.join(unfinished)}. The other "
                "ranks wait for its gradients. Run forwards without a training step under torch.no_grad(). If only "
                "torch.autograd.grad uses the graph of that forward, loop over join.iterate(loader), or take the model "
                "off the list of joinables if the list has others."
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
        """Once no rank has data: whether all are known to have had data in every step; the same on all ranks."""
        if self.loop is not None or self.terms.foreign:
            return self.all_took_every_step
        return not self._followed and self._all_are_active()

    def _compare_optimizer_steps(self) -> None:
        """Raise on all ranks if an optimizer did not step equally often on all ranks."""
        own = {name: each.optimizer_steps() for name, each in self._models.items()}
        # On torch's wire, ranks that run torch's Join do not take part.
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
        """Leave a plain loop. Raises: ``JoinError`` if the last step is partial and other ranks continue."""
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
        """This rank leaves with an error: report it to the other ranks, or raise what theirs was."""
        _add_note(error)
        if type(error) is RuntimeError and str(error) == PEER_EXHAUSTED:
            raise _add_note(UnevenInputsError(PEER_EXHAUSTED)) from error  # of torch's notify, inside a torch joinable
        membership = None if self.loop is None else self.loop.decided
        if isinstance(error, UnevenInputsError) and not isinstance(membership, StoreMembership):
            if self.peers.responder is not None:
                self.peers.responder.close()
            return  # all ranks raise it; of a plan, only this rank can know that it ran out too early
        self.peers.failed = True
        if isinstance(error, (PeerFailedError, Preempted, Stopped)):  # by the latter two all ranks leave together
            return
        if isinstance(error, RuntimeError) and not isinstance(error, JoinError):
            cause = self.peers.detector.explain(error)
            if cause is not None:
                raise _add_note(cause) from (None if isinstance(cause, UnevenInputsError) else error)
        self.peers.detector.report(error)
        is_foreign = isinstance(error, Exception) and not isinstance(error, StageregError)
        if membership is not None and membership.empty and is_foreign:
            error.add_note(
                "This rank has no more data, and join.iterate ran the loop body on an empty batch. What the body does "
                "with samples must bear that there are none: x.flatten(1), not x.view(len(x), -1); sums, not means; "
                "pack_padded_sequence only if len(x). If a batch is a list of samples, the empty one is an empty list: "
                "join.iterate(loader, example=[])."
            )

    def stop(self) -> None:
        """Leave; the join around this one goes on."""
        _entered.set(tuple(each for each in _entered.get() if each is not self))
        for outer in _entered.get()[-1:]:
            outer._suspended = False
        # The keys of the join before are deleted once all ranks are past it, and this join's are left to the next one.
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
    """Return an error, with what may be behind it where ranks seem to have different numbers of steps."""
    if isinstance(error, UnevenInputsError):
        error.add_note("Any forward that is not under torch.no_grad() counts as a training step.")
    return error


def _and(counts: Sequence[int]) -> str:
    return " and ".join(map(str, counts or [0])) + " steps"


def _delete(store: Any, keys: Sequence[str]) -> None:
    with contextlib.suppress(RuntimeError):  # the store may be gone
        for key in keys:
            store.delete_key(key)
