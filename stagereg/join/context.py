"""The join itself: ``with Join([model, optimizer]) as join: ...`` around a training loop.

Two ways to write the loop. As with torch, a rank that runs out of data leaves it; it then stays in ``__exit__`` and,
for every step that some rank still takes, runs the hooks of the joinables, which take part in that step's collectives.
Or the loop is over ``join.iterate(loader)``: then its body runs on all ranks for as long as any has data, on an empty
batch where there is none, and nothing has to be shadowed. When no rank is active any more, the post-hooks run and
everybody goes on together.

In a plain loop the wire is torch's, so ranks with torch's ``Join`` may be among them, unless a mode is chosen that does
without (:mod:`stagereg.join.session`).

What it came to is told on leaving (:mod:`stagereg.record`): the steps this rank took with data and without, and the
samples it was given.

Left as it was found, on every way out: the joinables' configuration, DDP's divisor, and Python's warning filters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import stagereg.join.nesting as nesting
import stagereg.record as record
from stagereg.errors import JoinError, PeerFailedError, Preempted, Stopped, UnevenInputsError
from stagereg.join.adapt import adapt
from stagereg.join.failure import discard_channels, was_aborted
from stagereg.join.iterate import Loop
from stagereg.join.joinable import Joinable, JoinConfig, JoinHook, NotedConfig, notify
from stagereg.join.mean import Average, known_average, weighted
from stagereg.join.samples import Given
from stagereg.join.session import Mode, Wiring, common_group, known_mode
from stagereg.kernel.membership import Membership, StoreMembership
from stagereg.kernel.shadow import PEER_EXHAUSTED, TorchWire
from stagereg.registry import register

__all__ = ["Join", "configured"]

_SKEW = 1000


class Join:
    """Context manager for training on uneven inputs. Construct and enter it on every rank.

    Args:
        joinables: what takes part, in the order in which the training step uses it. Beside any :class:`Joinable`,
            torch's among them, this takes FSDP modules, and objects that have no collectives but must stay equal on all
            ranks: a ``torch.optim.Optimizer``, an LR scheduler, or a function; ranks that left the loop call their
            ``step()`` (the function itself) once per step, after the gradients of that step are there. The first must
            announce its rank each step, as DDP does. Its device is used for torch's wire.
        enable: False makes the context do nothing, for inputs known to be even.
        throw_on_early_termination: when a rank runs out of data, raise on all ranks at the same step.
        mode: how ranks know who still has data. ``"planned"``: the lengths are exchanged on entry, and no step has a
            collective for it. ``"counted"``: one asynchronous all-reduce a step. ``"auto"``: planned where every rank's
            loader has a length, else counted. ``"torch"``: torch's wire, for jobs in which some ranks run torch's
            ``Join``. ``None``: torch's wire in a plain loop, and as ``"auto"`` with ``loader`` or :meth:`iterate`.
            Where a step depends on who is active (a divisor of active ranks, buffers that DDP shares), planned counts
            too.
        loader: for a plain loop, what it loops over; only its length is used.
        timeout: seconds after which a rank that is not heard of, or does not come, is an error on all others. It is
            the process group's timeout too while the join lasts, so it must be longer than any single step.
        average: what :meth:`mean` is a mean over, if it is not told: ``"samples"``, ``"world"`` or ``"active"``.
        process_group: the ranks that train together; ``None``: the joinables' own.
        **kwargs: handed to the hook of every joinable, such as DDP's ``divide_by_initial_world_size``.

    Raises:
        JoinError: (a ``ValueError``) no joinables, or joinables with different process groups, or a first one that
            cannot announce, or a step that cannot be shadowed.
        UnevenInputsError: (a ``RuntimeError``) on leaving, or at the step, if told to throw.
        PeerFailedError: (a ``RuntimeError``) another rank failed, was killed or does not answer. The process group
            cannot be used any more; end the process.

    Example::

        model = DistributedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with stagereg.Join([model, optimizer]) as join:
            for x, y in join.iterate(loader):            # as often as the longest loader has it
                optimizer.zero_grad()
                loss = join.mean(criterion(model(x), y), len(x))   # criterion with reduction="sum"
                loss.backward()
                optimizer.step()
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        mode: str | None = None,
        loader: Any = None,
        timeout: float = 60.0,
        average: str = "samples",
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(joinables, Iterable):
            raise JoinError(
                f"joinables must be a list, as in Join([model, optimizer]), not a {type(joinables).__name__}"
            )
        listed = list(joinables)
        if not listed:
            raise JoinError("The join context manager requires at least one joinable")
        if not timeout > 0:
            raise JoinError(f"join.timeout must be a number of seconds above 0, not {timeout!r}")
        self._joinables = adapt(listed)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._mode = known_mode(mode)
        self._loader = loader
        self._timeout = timeout
        self._average = known_average(average)
        self._kwargs = kwargs
        self._group = common_group(self._joinables, process_group)
        self._wire = TorchWire(self._group, self._joinables[0].join_device)
        self._before: list[Any] | None = None
        self._wiring: Wiring | None = None
        self._plain: Membership | None = None
        self._membership: Membership | None = None
        self._loop: Loop | None = None
        self._given = Given()
        self._sequence = 0
        self._failed = False
        self._asked = 0
        self._on_wire = _WireSteps()
        self._hooks: list[JoinHook] | None = self._make_hooks()

    def __enter__(self) -> Join:
        self._refuse_a_second_join()
        if self._enable and was_aborted(self._group):
            raise JoinError(
                "the process group was aborted when a join over it failed, so nothing can be sent over it any more; "
                "end this process, or make a new process group"
            )
        self._before = [getattr(joinable, "_join_config", None) for joinable in self._joinables]
        self._given, self._on_wire, self._failed = Given(), _WireSteps(), False
        if self._hooks is None:  # entered again, as once an epoch
            self._hooks = self._make_hooks()
        try:
            if self._enable:
                nesting.enter(self._borrow)
                self._wiring = self._wired()
                self._wiring.detector.start()
                self._sequence = _collectives(self._group)
                self._plain = self._wiring.plain(self._loader)
            self._configure(self._plain)
        except BaseException as error:
            self._failed = isinstance(error, PeerFailedError) or not isinstance(error, (JoinError, UnevenInputsError))
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._enable:
                if error is None:
                    self._finish()
                else:
                    self._give_up(error)
        finally:
            self._tell()
            self._restore()

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Say that this rank still has data. A joinable calls it before its collectives of each step.

        Args:
            joinable: the caller, whose constructor has called ``Joinable``'s.

        Returns:
            On torch's wire, for the first joinable of an enabled join, the work of an asynchronous all-reduce whose one
            value ends as the number of active ranks; None for all others, and where nothing is announced that way.

        Raises:
            UnevenInputsError: (a ``RuntimeError``) the join is to throw and some rank has run out of data.
        """
        return notify(joinable)

    def iterate(self, loader: Iterable[Any], example: Any = None) -> Iterator[Any]:
        """Loop over a loader, with as many steps on every rank as the longest one has.

        The body runs on ranks without data too, on an empty batch: ``batch[:0]``, nested structures included. So
        whatever it does with other ranks is matched. Only what it does *with* the samples must bear that there are
        none: add losses up (``reduction="sum"``) and give them to :meth:`mean`, and use ``x.flatten(1)``, not
        ``x.view(len(x), -1)``. A batch that the body skips, by ``continue`` before the model's forward, is no step.

        A rank that leaves the loop alone, by ``break``, goes on as in a plain loop, by the joinables' hooks.

        Args:
            loader: this rank's batches; with a length on all ranks, they are exchanged once and no step counts.
            example: on all ranks, where batches cannot be cut to none by themselves: an empty one, or a batch as the
                loader would give that can be. Not needed where a rank has no batch, if another's can be emptied.

        Raises:
            JoinError: the join was not entered; or a batch cannot be emptied.
            UnevenInputsError: told to throw, with planned lengths before the first step.
        """
        if not self._enable or self._mode == "torch":  # torch's wire is for loops that ranks leave
            yield from self._given.counting(loader)
            return
        if self._wiring is None:
            raise JoinError("join.iterate works inside the join: with stagereg.Join(...) as join: ...")
        if self._loop is not None and self._loop.running:
            raise JoinError(
                "another join.iterate of this join has not come to its end, and only one runs at a time. Evaluate "
                "after it, or loop over the loader itself under torch.no_grad(), with the metrics joinable for what "
                "is told"
            )
        self._leave_loop()
        self._loop = loop = Loop(self._wiring, self._shadow_step, self._given)
        self._configure(loop.start(loader))
        yield from loop.run(loader, example, self._joinables[0].join_device)
        self._configure(self._plain)

    def mean(self, loss_sum: torch.Tensor, n: float | torch.Tensor, over: str | None = None) -> torch.Tensor:
        """Return the loss whose gradients, averaged over the ranks as DDP and FSDP do it, are those of a mean.

        All ranks call it in the same order; ranks that left the loop need not. Averages over samples and over active
        ranks take one small sum over the ranks.

        Args:
            loss_sum: the sum of the losses of this rank's samples, of any floating dtype, a scalar.
            n: how many samples (or tokens, or whatever it is a mean over) that is. A loss with ``n`` of zero counts as
                exactly zero, whatever its value.
            over: ``"samples"``: the sum of all ranks' losses by the sum of all their ``n``. ``"world"``: the mean of
                the ranks' means, where a rank without data counts as zero; ``"active"``: ... where it does not count.
                These are torch's ``divide_by_initial_world_size`` True and False. ``None``: as the join was told.

        Returns:
            A scalar. Its mean over the ranks is the mean; its value on one rank is that rank's share only.
        """
        over = self._average if over is None else known_average(over)
        count = float(n)
        if not self._enable or self._group.size() == 1:
            return weighted(loss_sum, count, 1.0 / max(count, 1e-300))
        if self._wiring is None or self._wiring.sum_responder is None:
            raise JoinError(
                "join.mean works inside the join, with join.iterate, or in a plain loop with join.mode=counted or "
                "planned; on torch's wire (join.mode=torch) there is no room for it"
            )
        world = self._group.size()
        if over == "world" and self._kwargs.get("divide_by_initial_world_size", True):
            return weighted(loss_sum, count, 1.0 / max(count, 1e-300))
        has_data = float(self._loop is None or not self._loop.empty)
        samples, active = self._wiring.sum_responder.request(count, has_data)
        # What the gradients are going to be divided by.
        ranks = world if self._kwargs.get("divide_by_initial_world_size", True) else active
        if over == "samples":
            return weighted(loss_sum, count, ranks / samples if samples else 0.0)
        return weighted(loss_sum, count, ranks / (world if over == "world" else active) / max(count, 1e-300))

    def _wired(self) -> Wiring:
        divide = self._kwargs.get("divide_by_initial_world_size", True)
        counts = any(joinable.counts(divide) for joinable in self._joinables if hasattr(joinable, "counts"))
        return Wiring(self._group, self._joinables, self._mode, self._throw, counts, self._timeout)

    def _make_hooks(self) -> list[JoinHook]:
        return [joinable.join_hook(**self._kwargs) for joinable in self._joinables]

    def _configure(self, membership: Membership | None) -> None:
        self._membership = membership
        self._borrow(membership)

    def _borrow(self, membership: Membership | None) -> None:
        """Give the joinables an membership that is not the join's; with ``None`` its own again."""
        membership = self._membership if membership is None else membership
        self._look_at_wire()
        for i, joinable in enumerate(self._joinables):
            kind = NotedConfig if i == 0 else JoinConfig
            joinable._join_config = kind(self._enable, self._throw, i == 0, membership)
        self._asked = self._times_asked()  # the joinable itself may look, on being told

    def _refuse_a_second_join(self) -> None:
        for joinable in self._joinables:
            config = getattr(joinable, "_join_config", None)
            # torch's Join leaves its own configuration behind.
            if self._enable and isinstance(config, JoinConfig) and config.enable:
                raise JoinError(
                    f"a {type(joinable).__name__} is in another join already, which is still on; leave that one "
                    "first, or put all that the loop uses in one join"
                )

    # -- leaving

    def _finish(self) -> None:
        """This rank leaves the loop with nothing wrong."""
        try:
            for joinable in self._joinables:
                if getattr(joinable, "unfinished", False):
                    raise JoinError(
                        "this rank leaves the join after a forward without a backward, and the others wait for its "
                        "gradients. Run forwards that are no training steps under torch.no_grad()."
                    )
            self._must_have_announced()
            objection = self._shadow()
        except UnevenInputsError as error:
            self._thrown(error)
            raise
        except BaseException as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error
        if objection is not None:
            raise objection

    def _give_up(self, error: BaseException) -> None:
        """The loop body raised on this rank."""
        if type(error) is RuntimeError and str(error) == PEER_EXHAUSTED:
            raise UnevenInputsError(PEER_EXHAUSTED) from error  # raised by torch's notify, inside a torch joinable
        if isinstance(error, UnevenInputsError):
            self._thrown(error)
            return
        told = self._told(error)
        if told is not error:
            raise told from error
        if self._loop is not None and self._loop.empty:
            error.add_note(
                "This rank has no more data, and join.iterate ran the loop body on an empty batch to keep it in step "
                "with the others. What the body does with samples must bear that there are none: x.flatten(1) in "
                "place of x.view(len(x), -1), sums in place of means and maxima."
            )

    def _told(self, error: BaseException) -> BaseException:
        """Return what to raise in place of ``error``: what another rank has failed with, or itself, and tell others."""
        self._failed = True
        if isinstance(error, (PeerFailedError, Preempted, Stopped)):  # by the latter two all ranks leave together
            return error
        if isinstance(error, RuntimeError) and not isinstance(error, JoinError):
            cause = self._detector.explain(error)
            if cause is not None:
                return cause
        self._detector.report(error)
        return error

    def _thrown(self, error: BaseException) -> None:
        """The join has thrown, here only or on all ranks; those go on, with nobody left answering."""
        assert self._wiring is not None
        if self._plan_failed():
            self._failed = True
            self._detector.report(error)
        elif self._wiring.sum_responder is not None:
            self._wiring.sum_responder.close()

    def _plan_failed(self) -> bool:
        """Whether only this rank can know that it ran out of data too early."""
        membership = self._plain if self._loop is None else getattr(self._loop, "membership", None)
        return isinstance(membership, StoreMembership)

    @property
    def _detector(self) -> Any:
        assert self._wiring is not None
        return self._wiring.detector

    def _must_have_announced(self) -> None:
        """Refuse a first joinable that ran collectives and never said so; the others would wait for it, or worse."""
        assert self._wiring is not None
        first = self._joinables[0]
        announced = self._announced or self._wiring.steps > 0
        if announced or hasattr(first, "unfinished") or _collectives(self._group) == self._sequence:
            return
        raise JoinError(
            f"the first joinable, a {type(first).__name__}, ran collectives but never announced this rank, so ranks "
            "without data do not know of its steps. Call Join.notify_join_context(self) before the collectives of each."
        )

    @property
    def _announced(self) -> bool:
        """Whether the first joinable has announced on torch's wire."""
        return self._times_asked() > 0

    def _times_asked(self) -> int:
        return getattr(getattr(self._joinables[0], "_join_config", None), "asked", 0)

    def _look_at_wire(self) -> None:
        """Count what the first joinable has announced on torch's wire since its configuration was made."""
        config = getattr(self._joinables[0], "_join_config", None)
        if isinstance(config, NotedConfig) and config.membership is None:
            self._on_wire.taken += config.asked - self._asked
            self._asked = config.asked

    def _shadow(self) -> Warning | None:
        """Stay until no rank is active any more; return a warning that the user's filters make an error."""
        assert self._hooks is not None
        for hook in self._hooks:
            if (out_of_data := getattr(hook, "out_of_data", None)) is not None:
                out_of_data()
        last = self._leave_loop()
        steps = 0
        objection: Warning | None = None
        while self._goes_on():
            self._shadow_step()
            steps += 1
            self._on_wire.shadowed += self._plain is None
            if steps == _SKEW + 1:
                objection = self._warn_of_skew()
        for hook in self._hooks:
            hook.post_hook(steps == 0 and last)
        if self._plain is not None and self._wiring is not None and self._wiring.sum_responder is not None:
            self._wiring.sum_responder.close()
        return objection

    def _goes_on(self) -> bool:
        """Rank without data in a plain loop: whether some rank takes another step."""
        if self._plain is not None:
            return self._plain.wait_for_next_step() is not None and self._served()
        if not self._wire.count_active():
            return False
        if self._throw:
            self._wire.raise_exhausted()
        return True

    def _leave_loop(self) -> bool:
        """Take part by hooks in what is left of a loop over :meth:`iterate` that this rank has left by itself.

        Returns:
            Whether it had data in the last step, or there was no such loop.
        """
        loop = self._loop
        if loop is None:
            return True
        if loop.leave():
            self._served()
            self._shadow_step()
        while not loop.membership.over and loop.membership.wait_for_next_step() is not None:
            self._served()
            self._shadow_step()
        loop.close()
        return loop.membership.shadowed == 0

    def _served(self) -> bool:
        assert self._wiring is not None
        assert self._wiring.sum_responder is not None
        self._wiring.sum_responder.start()
        return True

    def _shadow_step(self) -> None:
        assert self._hooks is not None
        for hook in self._hooks:
            if (before_step := getattr(hook, "before_step", None)) is not None:
                before_step()
        for hook in self._hooks:
            hook.main_hook()

    def _warn_of_skew(self) -> Warning | None:
        """Warn; what the user's filters make an error is returned, for the other ranks still count on this one."""
        rank = dist.get_rank(self._group)
        try:
            warnings.warn(
                f"Detected uneven input skew of greater than {_SKEW}. This means that rank {rank} has at least {_SKEW} "
                "fewer inputs than other currently-active ranks. This level of skew could lead to performance "
                "degradation during training.",
                stacklevel=5,
            )
        except Warning as error:
            return error
        return None

    def _tell(self) -> None:
        """Tell what this join came to on this rank."""
        given = {} if self._given.samples is None else {"samples": self._given.samples}
        if self._wiring is not None:
            self._look_at_wire()
            shadowed = self._wiring.shadowed
            taken = self._wiring.steps - shadowed + self._on_wire.taken
            record.emit("join", steps=taken, shadowed=shadowed + self._on_wire.shadowed, **given)
        elif self._given.batches:
            record.emit("join", steps=self._given.batches, shadowed=0, **given)

    def _restore(self) -> None:
        self._hooks = None
        wiring, self._wiring = self._wiring, None
        self._plain = self._membership = self._loop = None
        with contextlib.ExitStack() as every:  # whatever one of them raises
            if self._enable:
                every.callback(nesting.leave, self._borrow)
            if wiring is not None:
                if self._failed:
                    every.callback(discard_channels, self._group)
                every.callback(wiring.detector.stop)
            before = self._before or [None] * len(self._joinables)
            for joinable, config in zip(self._joinables, before, strict=True):
                put_back = JoinConfig.construct_disabled_join_config() if config is None else config
                every.callback(setattr, joinable, "_join_config", put_back)
                if (leave := getattr(joinable, "join_exit", None)) is not None:
                    every.callback(leave)


@dataclass
class _WireSteps:
    """Steps of this rank on torch's wire: those that it announced, and those that others did while it had no data."""

    taken: int = 0
    shadowed: int = 0


def _collectives(group: Any) -> int:
    """Return how many collectives the group has run on this rank; 0 where it does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0


@register("join", "default")
def configured(
    joinables: Sequence[Any],
    enable: bool = True,
    throw: bool = False,
    mode: Mode = "auto",
    divide_by_initial_world_size: bool = True,
    average: Average = "samples",
    timeout: float = 60.0,
    loader: Any = None,
) -> Join:
    """Make a :class:`Join` from configuration: ``stagereg.instantiate(cfg.join, [model, optimizer])``.

    Args:
        joinables: as in :class:`Join`.
        enable: False makes the context do nothing.
        throw: when a rank runs out of data, raise on all ranks at the same step.
        mode: as in :class:`Join`; here "auto" goes for plain loops too, so all ranks have to run stagereg.
        divide_by_initial_world_size: True: gradients are sums over the active ranks divided by the world size;
            False: divided by the number of active ranks.
        average: what ``join.mean`` is a mean over, as in :meth:`Join.mean`.
        timeout: seconds until a rank that is not heard of is an error on all others, as in :class:`Join`.
        loader: for a plain loop, what it loops over, so that a length can be planned with.
    """
    return Join(
        joinables,
        enable=enable,
        throw_on_early_termination=throw,
        mode=mode,
        loader=loader,
        timeout=timeout,
        average=average,
        divide_by_initial_world_size=divide_by_initial_world_size,
    )
