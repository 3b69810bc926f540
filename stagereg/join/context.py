"""The ``Join`` context manager: ``with Join([model, optimizer]) as join: ...`` around a training loop.

There are two ways to write the loop. In a plain loop, as with torch, a rank that runs out of data leaves the loop and
waits in ``__exit__``. Meanwhile it runs the hooks of the joinables once per step of the active ranks, to take part in
the collectives of that step. With ``join.iterate(loader)``, all ranks run the loop body until no rank has data; ranks
without data get empty batches. In both cases, all ranks then run the post-hooks and continue together.

``Join`` restores all state that it changed, on every exit path.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

import stagereg.base.record as record
from stagereg.base.option_text import constructed, option
from stagereg.base.uncaught import print_once
from stagereg.errors import JoinError, UnevenInputsError, nearest, one_of
from stagereg.join.adapt import ForeignJoinable, adapt, auto, common_group, type_name
from stagereg.join.batches import Layout
from stagereg.join.counts import SampleCounter
from stagereg.join.joinable import Joinable, JoinConfig, notify
from stagereg.join.kinds.reduction import ReducingJoinable
from stagereg.join.loop import Mode, Terms
from stagereg.join.mean_loss import MeanLoss, divided, is_mean, share_of, stays_on_device, sum_losses
from stagereg.join.session import JoinSession
from stagereg.join.tracked import TrackedJoinable
from stagereg.kernel.broken import collectives_of, discard_channels
from stagereg.kernel.channel import resources_of
from stagereg.kernel.shadow import TorchWire
from stagereg.registry import register

Average = Literal["samples", "world", "active"]

_log = logging.getLogger(__name__)

_NOT_A_SUM = (
    "stagereg: join.mean got a loss that is already a mean over %g samples, but requires the sum of their losses. Use "
    'reduction="sum", or pass loss * n.'
)


class Join:
    """Context manager for training on uneven inputs. Construct and enter it on every rank.

    Args:
        joinables: the joinables, in the order in which the training step uses them: a list, or a mapping from names.
            Accepts :class:`Joinable` objects, torch's joinables, FSDP modules, and objects without collectives whose
            state must stay equal on all ranks: a ``torch.optim.Optimizer``, an LR scheduler, or a function. Ranks that
            left the loop call the object's ``step()`` (or the function) once per step, after the step's gradients are
            reduced. The first joinable must signal before each step that its rank still has data, as DDP does. With
            torch's protocol, the join's collectives run on its device.
        enable: False disables the context, for inputs known to be even.
        throw_on_early_termination: when a rank runs out of data, raise on all ranks at the same step.
        mode: how a rank determines which ranks still have data. ``"planned"``: from the lengths of all loaders, without
            a collective per step. ``"counted"``: one asynchronous all-reduce per step; ``"planned"`` also does this if
            a step depends on which ranks are active. ``"auto"``: planned if every loader has a length, otherwise
            counted. ``"torch"``: like torch's ``Join``. ``None``: like torch's ``Join`` in a plain loop, otherwise
            ``"auto"`` (with ``loader`` or :meth:`iterate`).
        loader: the loader of a plain loop; only its length is used.
        timeout: seconds after which all other ranks raise if a rank does not respond or does not reach a step. Must be
            longer than any step. On entering: half an hour. Also sets the process group's timeout during the join.
        average: default of ``over`` in :meth:`mean`: ``"samples"``, ``"world"`` or ``"active"``.
        **kwargs: passed to the hook of every joinable, such as DDP's ``divide_by_initial_world_size``.

    Attributes:
        joinables: the joinables by name, such as ``join.joinables["metrics"]``; in a list, names are indices (``"0"``).

    Raises:
        JoinError: (a ``ValueError``) the list is empty, an option is unknown, process groups differ, the first joinable
            cannot signal its steps, or ranks without data cannot take part in a step.
        ConfigError: (a ``ValueError``) ``mode`` or ``average`` is not a valid value.
        UnevenInputsError: (a ``RuntimeError``) a rank ran out of data, with ``throw_on_early_termination``.
        PeerFailedError: (a ``RuntimeError``) another rank failed, was killed or does not respond. The process group is
            unusable; terminate the process.

    Example::

        model = DistributedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with stagereg.Join([model, optimizer]) as join:
            for x, y in join.iterate(loader):            # as many steps as the longest loader has
                optimizer.zero_grad()
                loss = join.mean(criterion(model(x), y), len(x))   # criterion with reduction="sum"
                loss.backward()
                optimizer.step()
    """

    def __init__(
        self,
        joinables: Sequence[Any] | Mapping[str, Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        mode: str | None = None,
        loader: Any = None,
        timeout: float = 60.0,
        average: str = "samples",
        **kwargs: Any,
    ) -> None:
        constructed("join")
        print_once()
        named = _named(joinables)
        if not named:
            raise JoinError("The join context manager requires at least one joinable")
        if not timeout > 0:
            raise JoinError(f"{option('join.timeout')} must be a number of seconds greater than 0, got {timeout!r}")
        options = [*inspect.signature(Join).parameters][1:-1]
        for name in kwargs:  # a typo would otherwise be passed to the hooks, which ignore it
            if name == "throw" or get_close_matches(name, options, cutoff=0.8):
                raise JoinError(f"Join takes no {name!r}.{nearest(name, options)}")
        adapted = adapt(named)
        foreign = {name: each.joinable for name, each in adapted.items() if isinstance(each, ForeignJoinable)}
        self.joinables: Mapping[str, Any] = {**adapted, **foreign}
        self._joinables = list(adapted.values())
        self._throw = throw_on_early_termination
        self._mode = mode if mode is None else one_of(option("join.mode"), mode, get_args(Mode))
        self._loader = loader
        self._timeout = timeout
        self._average = one_of(option("join.average"), average, get_args(Average))
        self._kwargs = kwargs
        self._divides_by_world = bool(kwargs.get("divide_by_initial_world_size", True))
        self._group = common_group(self._joinables)
        self._enable = enable and self._group is not None  # without a group there are no other ranks
        self._wire = TorchWire(self._group, self._joinables[0].join_device)
        self._configs: list[Any] = []
        self._session: JoinSession | None = None
        self._counter = SampleCounter()
        self._warned = False  # whether the warning about a loss that is not a sum was logged
        self._collectives = 0  # collectives that this rank had run in the group on entering

    def __enter__(self) -> Join:
        if self._enable:
            self._refuse_to_enter()
        self._counter = SampleCounter()
        self._configs = [getattr(joinable, "_join_config", None) for joinable in self._joinables]
        try:
            session = self._start() if self._enable else None
            for i, joinable in enumerate(self._joinables):
                joinable._join_config = JoinConfig(self._enable, self._throw, i == 0)
                if session is not None:
                    joinable.attach(session)
        except BaseException as error:
            if self._session is not None:
                self._session.peers.failed = not isinstance(error, UnevenInputsError)
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        session = self._session
        try:
            if session is not None and error is None:
                try:
                    self._must_have_announced(session)
                    session.finish()
                except BaseException as own:
                    session.give_up(own)
                    raise
            elif session is not None and error is not None:
                session.give_up(error)
        finally:
            self._record()
            self._restore()

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Announce that this rank still has data. A joinable calls this method before its collectives of each step.

        Args:
            joinable: the calling joinable; its constructor has called ``Joinable.__init__``.

        Returns:
            For the first joinable, if the join works like torch's: the handle of an asynchronous all-reduce whose
            result is the number of active ranks. Otherwise None.

        Raises:
            UnevenInputsError: (a ``RuntimeError``) the join was constructed to throw, and a rank has run out of data.
        """
        return notify(joinable)

    def iterate(
        self, loader: Iterable[Any], example: Any = None, batch_dim: int | Mapping[Any, int] = 0
    ) -> Iterator[Any]:
        """Loop over a loader, with as many steps on every rank as the longest loader has.

        Ranks without data run the body on an empty batch: ``batch[:0]``, also for tensors in nested containers. Use
        losses with ``reduction="sum"`` and pass them to :meth:`mean`, and use ``x.flatten(1)``, not
        ``x.view(len(x), -1)``. A batch that the body skips with ``continue`` before the model's forward is not a step.
        A rank that leaves the loop with ``break`` runs the joinables' hooks, as in a plain loop.

        Args:
            loader: this rank's batches. If all loaders have a length, the lengths are exchanged once, not per step.
            example: an empty batch, for loaders whose batches cannot be emptied automatically. Pass it on all ranks.
                Not needed for classes registered with ``stagereg.empty_batch.register(CLASS, function)``.
            batch_dim: the sample dimension of tensors that have such a dimension, such as 1 for
                ``[time, batch, features]``, or a mapping from keys of the batch, ``{"x": 1}``. 0 for all other tensors.

        Raises:
            JoinError: the join was not entered; or a batch, or an example with samples, cannot be emptied.
            UnevenInputsError: a rank ran out of data, with ``throw_on_early_termination``; if planned, before the first
                step.
        """
        if not self._enable or self._mode == "torch":  # torch's protocol supports plain loops only
            for batch in loader:
                self._counter.add(batch)
                yield batch
            return
        if self._session is None:
            raise JoinError("join.iterate requires an entered join: with stagereg.Join(...) as join: ...")
        loop = self._session.enter_loop(loader, iterates=True)
        yield from loop.run(example, Layout.of(loader, batch_dim), self._counter)

    def mean(self, loss_sum: torch.Tensor, n: float | torch.Tensor, over: str | None = None) -> torch.Tensor:
        """Return the mean loss of all ranks. Averaging its gradients over ranks gives the gradient of that mean.

        Collective: all ranks in the loop call it in the same order. Ranks that left the loop do not call it. Runs one
        small all-reduce on the CPU. Losses on CUDA devices are summed by an all-gather of the group, if its backend is
        NCCL: the host does not wait for the device. Otherwise, or once a rank has left a plain loop, the host waits.

        Args:
            loss_sum: the sum of the losses of this rank's samples, a scalar of any floating dtype, such as the result
                of a criterion with ``reduction="sum"``. A mean makes the gradient too small by the batch size; a
                warning is logged if the autograd graph shows a mean.
            n: the number of samples (or tokens, or other units) in ``loss_sum``. The host waits for an ``n`` on an
                accelerator. With an ``n`` of zero, the loss counts as exactly zero, whatever its value. On an empty
                batch ``n`` also counts as zero, with a warning, unless the rank has received samples since this line
                last ran, as in a program that accumulates losses.
            over: ``"samples"``: the sum of all ranks' losses divided by the sum of their ``n``. ``"world"``: the mean
                of the ranks' means, where ranks without data count as zero. ``"active"``: the mean over the ranks with
                data. ``"world"`` and ``"active"`` match torch's ``divide_by_initial_world_size`` True and False.
                ``None``: the join's ``average``.

        Returns:
            The mean, a scalar that is equal on all ranks, for backward and for logs. After a collective that was
            aborted on a CUDA device, the mean is NaN.

        Raises:
            JoinError: called outside the join; or ``n`` may include the samples of an earlier batch.
        """
        over = self._average if over is None else one_of("over", over, get_args(Average))
        count = float(n)
        if not self._warned and count > 1 and is_mean(loss_sum):
            self._warned = True
            _log.warning(_NOT_A_SUM, count)
        if not self._enable or self._group.size() == 1:
            own = share_of(loss_sum, count, count, stays_on_device(loss_sum))
            return MeanLoss.of(loss_sum, own, 1.0 / (count or math.inf))
        session, world = self._session, self._group.size()
        if session is None or session.peers.responder is None:
            counted = option("join.mode", "counted")
            raise JoinError(f"join.mean works only in `with join:`, and requires join.iterate, {counted} or planned.")
        caller = sys._getframe(1)
        call = caller.f_code, caller.f_lineno
        count = self._counter.counted(call, count, lambda: loss_sum.detach().item(), over, loss_sum.requires_grad)
        per_sample = 1.0 if over == "samples" else count
        samples, active, total = sum_losses(session, loss_sum, count, per_sample, self._collectives)
        self._collectives += isinstance(total, torch.Tensor)  # the collective that has summed the losses
        divisor = {"samples": samples, "world": float(world), "active": active}[over]
        ranks = world if self._divides_by_world else active  # the number of ranks by which gradients will be divided
        scale = ranks / (divisor * per_sample) if count and divisor else 0.0
        return MeanLoss.of(loss_sum, divided(total, divisor or 1.0), scale)

    # -- entering

    def _refuse_to_enter(self) -> None:
        for joinable in self._joinables:
            config = getattr(joinable, "_join_config", None)
            if isinstance(config, JoinConfig) and config.enable:  # torch's Join leaves its own config class behind
                raise JoinError(
                    f"a {type_name(joinable)} is already in another active join. Leave that join first, or "
                    "list all objects that the loop uses in one join."
                )
        if resources_of(self._group).aborted:
            raise JoinError(
                "the process group was aborted when a join on it failed. Terminate this process, or create a new group."
            )

    def _start(self) -> JoinSession:
        models = {
            f"{name} ({type(getattr(each.module, 'module', each.module)).__name__})": each
            for name, each in zip(self.joinables, self._joinables, strict=True)
            if isinstance(each, ReducingJoinable)
        }
        needs_active = any(joinable.needs_active_ranks(self._divides_by_world) for joinable in self._joinables)
        foreign = _why_torchs(self._joinables) if isinstance(self._joinables[0], ForeignJoinable) else ""
        terms = Terms(self._mode, self._throw, needs_active, len(models) > 1, foreign)
        session = self._session = JoinSession(self._wire, self._joinables, terms, self._timeout, models)
        names = [type_name(getattr(each, "joinable", each)) for each in self._joinables]
        alike = {"mode": self._mode, "throw": self._throw, "average": self._average, "joinables": ", ".join(names)}
        session.start(self._loader, alike)
        # In reverse, because the hook registered last is called first: the first joinable announces the step.
        session.hooks = [joinable.join_hook(**self._kwargs) for joinable in reversed(self._joinables)][::-1]
        self._collectives = collectives_of(self._group)
        return session

    # -- leaving

    def _must_have_announced(self, session: JoinSession) -> None:
        """Raise if the first joinable ran collectives without announcing its steps, so that other ranks would hang."""
        first = self._joinables[0]
        if session.steps or first.announces_itself or collectives_of(self._group) == self._collectives:
            return
        raise JoinError(
            f"the first joinable, a {type_name(first)}, ran collectives but never signalled its steps, so ranks "
            "without data cannot take part in them. Call stagereg.Join.notify_join_context(self) before its "
            "collectives of each step, or set announces_itself = True if the class announces through torch's Join."
        )

    def _record(self) -> None:
        given = self._counter.given
        counts = {"samples": given.samples} if given.batches and given.samples is not None else {}
        if self._session is not None:
            counts["shadowed"] = self._session.shadowed
            if not self._session.terms.foreign:  # torch's Join announces the steps of foreign joinables
                counts["steps"] = self._session.steps - self._session.shadowed
            record.emit("join", **counts)
        elif given.batches:
            record.emit("join", steps=given.batches, shadowed=0, **counts)

    def _restore(self) -> None:
        session, self._session = self._session, None
        with contextlib.ExitStack() as every:  # runs every callback, even if another one raises
            if session is not None:
                if session.peers.failed:
                    every.callback(discard_channels, self._group)
                every.callback(session.stop)
            for joinable, config in zip(self._joinables, self._configs, strict=True):
                put_back = JoinConfig.construct_disabled_join_config() if config is None else config
                every.callback(setattr, joinable, "_join_config", put_back)
                every.callback(joinable.detach)


def _named(joinables: Any) -> Mapping[str, Any]:
    if not isinstance(joinables, Iterable):
        raise JoinError(f"joinables must be a list, such as Join([model, optimizer]), got a {type(joinables).__name__}")
    return joinables if isinstance(joinables, Mapping) else {str(i): each for i, each in enumerate(joinables)}


@register("join", "default")
def configured(
    objects: Sequence[Any] | None = None,
    joinables: Mapping[str, Callable[..., Joinable]] | None = None,
    enable: bool = True,
    throw: bool = False,
    mode: Mode = "auto",
    divide_by_initial_world_size: bool = True,
    average: Average = "samples",
    timeout: float = 60.0,
    loader: Any = None,
    **runtime: Any,
) -> Join:
    """Make a :class:`Join` from configuration: ``stagereg.instantiate(cfg.join, model=model, optimizer=optimizer)``.

    An object whose name is in ``joinables`` gets that joinable; other objects are adapted as in :class:`Join`. The join
    lists the objects first, in the given order, then the joinables that need no object.

    Args:
        objects: a list of objects that need no names.
        joinables: factories of joinables, by the name of the object; on the command line,
            ``joinable@join.joinables.model=fsdp2``. A factory is called with the object of its name. If the object is a
            mapping, its items are passed as keyword arguments. Without such an object, no arguments are passed.
        enable: False disables the context.
        throw: when a rank runs out of data, raise on all ranks at the same step.
        mode: see :class:`Join`. Here "auto" also applies to plain loops, so all ranks must use stagereg's ``Join``.
        divide_by_initial_world_size: True: gradients are sums over the active ranks divided by the world size; False:
            divided by the number of active ranks.
        average: default of ``over`` in :meth:`Join.mean`.
        timeout: seconds after which all other ranks raise if a rank does not respond; see :class:`Join`.
        loader: the loader of a plain loop; its length is used for planning.
        **runtime: the program's objects by name.

    Raises:
        JoinError: a joinable requires an object that was not passed, or an object requires a joinable.
    """
    factories = dict(joinables or {})
    given = {**_named(objects or ()), **runtime}
    made = {name: _joinable(name, thing, factories, given) for name, thing in given.items()}
    made |= {name: _make(name, factory, given) for name, factory in factories.items() if name not in given}
    return Join(
        made,
        enable=enable,
        throw_on_early_termination=throw,
        mode=mode,
        loader=loader,
        timeout=timeout,
        average=average,
        divide_by_initial_world_size=divide_by_initial_world_size,
    )


def _why_torchs(joinables: Sequence[Joinable]) -> str:
    """If the first joinable announces steps through torch's ``Join``, return why ``join.iterate`` is unavailable."""
    first = type_name(joinables[0])
    own = next((type_name(each) for each in joinables if isinstance(each, TrackedJoinable)), None)
    advice = f"List the {own} before the {first}" if own else f"Derive {first} from stagereg.Joinable"
    return (
        f"the first joinable, a {first}, announces its steps through torch's Join, which join.iterate and the modes "
        f"counted and planned cannot use. {advice}, or use a plain loop with {option('join.mode', 'torch')}."
    )


def _joinable(name: str, thing: Any, factories: Mapping[str, Callable[..., Joinable]], given: Mapping[str, Any]) -> Any:
    if name in factories:
        return _make(name, factories[name], given)
    try:
        return auto(thing)
    except JoinError as error:
        close = nearest(name, [*factories, *inspect.signature(configured).parameters])
        raise JoinError(f"the join has no joinable {name!r}.{close} In addition, {error}") from None


def _make(name: str, factory: Callable[..., Joinable], given: Mapping[str, Any]) -> Joinable:
    thing = given.get(name)
    args, kwargs = ((), thing) if isinstance(thing, Mapping) else ((thing,) if name in given else (), {})
    try:
        inspect.signature(factory).bind(*args, **kwargs)
    except TypeError as error:
        close = nearest(name, given) if name not in given else ""
        raise JoinError(
            f"join.joinables.{name} cannot be made: {error}. Pass the object by name: stagereg.instantiate(cfg.join, "
            f"{name}=...).{close} Passed: {', '.join(given) or 'nothing'}"
        ) from None
    return factory(*args, **kwargs)
