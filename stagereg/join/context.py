"""The join itself: ``with Join([model, optimizer]) as join: ...`` around a training loop.

Two ways to write the loop. As with torch, a rank that runs out of data leaves it; it then stays in ``__exit__`` and,
for every step that some rank still takes, runs the hooks of the joinables, which take part in that step's collectives.
Or the loop is over ``join.iterate(loader)``: then its body runs on all ranks for as long as any has data, on an empty
batch where there is none. When no rank is active any more, the post-hooks run and all ranks go on together.

It leaves everything as it was, on every way out. How ranks know of each other is left to :mod:`stagereg.join.session`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from stagereg.join.mean_loss import MeanLoss, is_mean
from stagereg.join.session import JoinSession
from stagereg.join.tracked import TrackedJoinable
from stagereg.kernel.broken import collectives_of, discard_channels
from stagereg.kernel.channel import resources_of
from stagereg.kernel.shadow import TorchWire
from stagereg.registry import register

Average = Literal["samples", "world", "active"]

_log = logging.getLogger(__name__)

_NOT_A_SUM = (
    "stagereg: join.mean got a loss that is a mean already, of %g samples; it takes the sum of their losses: use "
    'reduction="sum", or give it loss * n.'
)


class Join:
    """Context manager for training on uneven inputs. Construct and enter it on every rank.

    Args:
        joinables: what takes part, in the order in which the training step uses it: a list, or a mapping from names.
            Beside any :class:`Joinable`, torch's among them, this takes FSDP modules, and objects that have no
            collectives but must stay equal on all ranks: a ``torch.optim.Optimizer``, an LR scheduler, or a function;
            ranks that left the loop call their ``step()`` (the function itself) once per step, after the gradients of
            that step are there. The first must announce its rank each step, as DDP does. Its device is used for
            torch's wire.
        enable: False makes the context do nothing, for inputs known to be even.
        throw_on_early_termination: when a rank runs out of data, raise on all ranks at the same step.
        mode: how ranks know who still has data. ``"planned"``: by the lengths of loaders, without a collective in a
            step. ``"counted"``: by one asynchronous all-reduce a step; planned counts too if a step depends on who is
            active. ``"auto"``: planned if every loader has a length, otherwise counted. ``"torch"``: as torch's
            ``Join``. ``None``: torch's wire in a plain loop, and ``"auto"`` with ``loader`` or :meth:`iterate`.
        loader: for a plain loop, what it loops over; only its length is used.
        timeout: seconds after which a rank that does not answer, or does not come to a step, is an error on all others;
            on entering, half an hour. It must be longer than any step: it is the process group's timeout meanwhile.
        average: what :meth:`mean` is a mean over, if a call does not say: ``"samples"``, ``"world"`` or ``"active"``.
        **kwargs: handed to the hook of every joinable, such as DDP's ``divide_by_initial_world_size``.

    Attributes:
        joinables: the joinables by name, as in ``join.joinables["metrics"]``; those of a list by their index, ``"0"``.

    Raises:
        JoinError: (a ``ValueError``) no joinables, or joinables with different process groups, or a first one that
            cannot announce, or a step that cannot be shadowed.
        ConfigError: (a ``ValueError``) there is no such mode or average.
        UnevenInputsError: (a ``RuntimeError``) on leaving, or at the step, with ``throw``.
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
            raise JoinError(f"{option('join.timeout')} must be a number of seconds above 0, not {timeout!r}")
        adapted = adapt(named)
        self.joinables: Mapping[str, Any] = {
            name: each.joinable if isinstance(each, ForeignJoinable) else each for name, each in adapted.items()
        }
        self._joinables = list(adapted.values())
        self._throw = throw_on_early_termination
        self._mode = mode if mode is None else one_of(option("join.mode"), mode, get_args(Mode))
        self._loader = loader
        self._timeout = timeout
        self._average = one_of(option("join.average"), average, get_args(Average))
        self._kwargs = kwargs
        self._divides_by_world = bool(kwargs.get("divide_by_initial_world_size", True))
        self._group = common_group(self._joinables)
        self._enable = enable and self._group is not None  # without a group there is no other rank
        self._wire = TorchWire(self._group, self._joinables[0].join_device)
        self._configs: list[Any] = []
        self._session: JoinSession | None = None
        self._counter = SampleCounter()
        self._warned = False  # of a loss that is no sum
        self._collectives = 0  # that this rank had run in the group when it entered

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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

    def iterate(
        self, loader: Iterable[Any], example: Any = None, batch_dim: int | Mapping[Any, int] = 0
    ) -> Iterator[Any]:
        """Loop over a loader, with as many steps on every rank as the longest one has.

        The body runs on ranks without data too, on an empty batch: ``batch[:0]``, nested structures included. Add
        losses up (``reduction="sum"``) and give them to :meth:`mean`, and use ``x.flatten(1)``, not
        ``x.view(len(x), -1)``. A batch that the body skips, by ``continue`` before the model's forward, is not a step.
        After a ``break`` on one rank alone, the hooks of the joinables take part, as in a plain loop.

        Args:
            loader: this rank's batches; with a length on all ranks, they are exchanged once and no step counts.
            example: on all ranks, if batches cannot be cut to none by themselves: an empty one. A class of one's own
                goes without it after ``stagereg.empty_batch.register(CLASS, function)``.
            batch_dim: the dimension of samples in tensors that have it, such as 1 for ``[time, batch, features]``; or
                by keys of the batch, ``{"x": 1}``. The first dimension for all others.

        Raises:
            JoinError: the join was not entered; or a batch, or an example with samples, cannot be emptied.
            UnevenInputsError: with ``throw``, with planned lengths before the first step.
        """
        if not self._enable or self._mode == "torch":  # torch's wire is for loops that ranks leave
            for batch in loader:
                self._counter.add(batch)
                yield batch
            return
        if self._session is None:
            raise JoinError("join.iterate works inside the join: with stagereg.Join(...) as join: ...")
        yield from self._session.enter_loop(loader, iterates=True).run(
            example, Layout.of(loader, batch_dim), self._counter
        )

    def mean(self, loss_sum: torch.Tensor, n: float | torch.Tensor, over: str | None = None) -> torch.Tensor:
        """Return the mean loss of all ranks, with a gradient that DDP and FSDP average to that of the mean.

        All ranks call it in the same order; ranks that left the loop need not. It takes one small sum over the ranks,
        for which a loss on an accelerator is waited for.

        Args:
            loss_sum: the sum of the losses of this rank's samples, of any floating dtype, a scalar: what a criterion
                with ``reduction="sum"`` returns. One that returns their mean gives a loss too small by the batch; it
                is warned of where torch's graph shows it.
            n: how many samples (or tokens, or whatever it is a mean over) that is. A loss with ``n`` of zero counts as
                exactly zero, whatever its value. On an empty batch ``n`` counts as zero too, with a warning, unless the
                rank got samples since this line last ran: then a program that accumulates passes those.
            over: ``"samples"``: the sum of all ranks' losses by the sum of all their ``n``. ``"world"``: the mean of
                the ranks' means, where a rank without data counts as zero; ``"active"``: ... where it does not count.
                These are torch's ``divide_by_initial_world_size`` True and False. ``None``: the join's ``average``.

        Returns:
            A scalar: the mean, the same on all ranks, such as for a log.

        Raises:
            JoinError: outside of the join; or ``n`` may count the samples of an earlier batch again.
        """
        over = self._average if over is None else one_of("over", over, get_args(Average))
        count = float(n)
        if not self._warned and count > 1 and is_mean(loss_sum):
            self._warned = True
            _log.warning(_NOT_A_SUM, count)
        own = loss_sum.detach().item() if count else 0.0
        if not self._enable or self._group.size() == 1:
            return MeanLoss.of(loss_sum, own / (count or 1.0), 1.0 / (count or math.inf))
        session, world = self._session, self._group.size()
        if session is None or session.peers.responder is None:
            counted = option("join.mode", "counted")
            raise JoinError(f"join.mean works inside the join, with join.iterate or with {counted} or planned")
        caller = sys._getframe(1)
        call = caller.f_code, caller.f_lineno
        count = self._counter.counted(call, count, own, over, loss_sum.requires_grad)
        own = own if count else 0.0
        has_data = float(session.loop is None or not session.loop.membership.empty)
        share = own if over == "samples" else own / (count or 1.0)
        samples, active, total = session.peers.responder.request(count, has_data, share)
        divisor = {"samples": samples, "world": float(world), "active": active}[over]
        ranks = world if self._divides_by_world else active  # by which the gradients are going to be divided
        per_sample = 1.0 if over == "samples" else count
        scale = ranks / (divisor * per_sample) if count and divisor else 0.0
        return MeanLoss.of(loss_sum, total / (divisor or 1.0), scale)

    # -- entering

    def _refuse_to_enter(self) -> None:
        for joinable in self._joinables:
            config = getattr(joinable, "_join_config", None)
            if isinstance(config, JoinConfig) and config.enable:  # torch's Join leaves its own kind behind
                raise JoinError(
                    f"a {type_name(joinable)} is in another join already, which is still on; leave that one first, or "
                    "put all that the loop uses in one join"
                )
        if resources_of(self._group).aborted:
            raise JoinError(
                "the process group was aborted when a join over it failed: end this process, or make a new one"
            )

    def _start(self) -> JoinSession:
        models = {
            f"{name} ({type(getattr(each.module, 'module', each.module)).__name__})": each
            for name, each in zip(self.joinables, self._joinables, strict=True)
            if isinstance(each, ReducingJoinable)
        }
        first = self._joinables[0]
        terms = Terms(
            self._mode,
            self._throw,
            any(joinable.needs_active_ranks(self._divides_by_world) for joinable in self._joinables),
            len(models) > 1,
            _why_torchs(self._joinables) if isinstance(first, ForeignJoinable) else "",
        )
        session = self._session = JoinSession(self._wire, self._joinables, terms, self._timeout, models)
        names = [type_name(getattr(each, "joinable", each)) for each in self._joinables]
        alike = {"mode": self._mode, "throw": self._throw, "average": self._average, "joinables": ", ".join(names)}
        session.start(self._loader, alike)
        # In reverse, as what watches a forward last is called first: the first joinable announces the step.
        session.hooks = [joinable.join_hook(**self._kwargs) for joinable in reversed(self._joinables)][::-1]
        self._collectives = collectives_of(self._group)
        return session

    # -- leaving

    def _must_have_announced(self, session: JoinSession) -> None:
        """Refuse a first joinable that ran collectives and never said so; the others would wait for it, or worse."""
        first = self._joinables[0]
        if session.steps or first.announces_itself or collectives_of(self._group) == self._collectives:
            return
        raise JoinError(
            f"the first joinable, a {type_name(first)}, ran collectives but never announced this rank, so ranks "
            "without data do not know of its steps. Call stagereg.Join.notify_join_context(self) before the collectives"
            " of each; a class that announces otherwise, as through torch's Join, says so by announces_itself = True."
        )

    def _record(self) -> None:
        """Record how many steps this rank took in this join, and the samples it was given."""
        given = self._counter.given
        counts = {"samples": given.samples} if given.batches and given.samples is not None else {}
        if self._session is not None:
            counts["shadowed"] = self._session.shadowed
            if not self._session.terms.foreign:  # whose steps are announced elsewhere
                counts["steps"] = self._session.steps - self._session.shadowed
            record.emit("join", **counts)
        elif given.batches:
            record.emit("join", steps=given.batches, shadowed=0, **counts)

    def _restore(self) -> None:
        session, self._session = self._session, None
        with contextlib.ExitStack() as every:  # whatever one of them raises
            if session is not None:
                if session.peers.failed:
                    every.callback(discard_channels, self._group)
                every.callback(session.stop)
            for joinable, config in zip(self._joinables, self._configs, strict=True):
                put_back = JoinConfig.construct_disabled_join_config() if config is None else config
                every.callback(setattr, joinable, "_join_config", put_back)
                every.callback(joinable.detach)


def _named(joinables: Any) -> Mapping[str, Any]:
    """Return joinables by name; those of a list by their index."""
    if not isinstance(joinables, Iterable):
        raise JoinError(f"joinables must be a list, as in Join([model, optimizer]), not a {type(joinables).__name__}")
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

    Each object is bound to the joinable of its name in ``joinables``; one that has none there is adapted, as in
    :class:`Join`. The objects come first, in the order in which they are given, then joinables that need no object.

    Args:
        objects: the objects in a list, where they need no names.
        joinables: by name, what makes a joinable of the object of that name; ``joinable@join.joinables.model=fsdp2`` on
            the command line. It is called with the object, or, if that is a mapping, with its items as keyword
            arguments, or with nothing if there is none.
        enable: False makes the context do nothing.
        throw: when a rank runs out of data, raise on all ranks at the same step.
        mode: as in :class:`Join`; here "auto" goes for plain loops too, so all ranks have to run stagereg.
        divide_by_initial_world_size: True: gradients are sums over the active ranks divided by the world size;
            False: divided by the number of active ranks.
        average: what ``join.mean`` is a mean over, as in :meth:`Join.mean`.
        timeout: seconds until a rank that does not answer is an error on all others, as in :class:`Join`.
        loader: for a plain loop, what it loops over, so that a length can be planned with.
        **runtime: the program's objects by name.

    Raises:
        JoinError: a joinable has no object and needs one, or an object has no joinable and needs one.
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
    """Return why a join has no loop of ours: its first joinable announces through torch's ``Join``."""
    first = type_name(joinables[0])
    own = next((type_name(each) for each in joinables if isinstance(each, TrackedJoinable)), None)
    advice = f"List the {own} before the {first}" if own else f"Derive {first} from stagereg.Joinable"
    return (
        f"the first joinable, a {first}, announces its steps through torch's Join, which join.iterate and the modes "
        f"counted and planned cannot use. {advice}, or use a plain loop with {option('join.mode', 'torch')}."
    )


def _joinable(name: str, thing: Any, factories: Mapping[str, Callable[..., Joinable]], given: Mapping[str, Any]) -> Any:
    """Return the joinable of one object: of the factory of its name, or else as in a list of bare objects."""
    if name in factories:
        return _make(name, factories[name], given)
    try:
        return auto(thing)
    except JoinError as error:
        close = nearest(name, [*factories, *inspect.signature(configured).parameters])
        raise JoinError(f"the join has no joinable {name!r}.{close} And {error}") from None


def _make(name: str, factory: Callable[..., Joinable], given: Mapping[str, Any]) -> Joinable:
    thing = given.get(name)
    args, kwargs = ((), thing) if isinstance(thing, Mapping) else ((thing,) if name in given else (), {})
    try:
        inspect.signature(factory).bind(*args, **kwargs)
    except TypeError as error:
        close = nearest(name, given) if name not in given else ""
        raise JoinError(
            f"join.joinables.{name} cannot be made: {error}. Give it by name, as in stagereg.instantiate(cfg.join, "
            f"{name}=...).{close} Given: {', '.join(given) or 'nothing'}"
        ) from None
    return factory(*args, **kwargs)
