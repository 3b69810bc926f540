"""Joinables and join hooks, with the names and signatures of ``torch.distributed.algorithms.join`` (torch 2.13).

torch's joinables pass ``isinstance(..., Joinable)`` here, and stagereg's joinables work in torch's ``Join``. Members
that only stagereg's ``Join`` uses have defaults in these classes, so a subclass overrides only the members it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as _TorchJoinHook
from torch.distributed.algorithms.join import _JoinConfig

from stagereg.errors import JoinableNotInitializedError, JoinError
from stagereg.join.session import JoinSession
from stagereg.kernel.shadow import TorchWire

B = TypeVar("B", bound="BuiltInJoinable")


class JoinHook(_TorchJoinHook):
    """The actions of a rank without data for one joinable.

    A subclass overrides the methods that it needs. From torch: ``main_hook``, in which a rank that left the loop takes
    part in one step of the active ranks, and ``post_hook``, called once on every rank after all ranks have left the
    loop. torch's ``Join`` does not call the methods below. A hook from a config is constructed with its joinable and
    its options.
    """

    def on_exhausted(self) -> None:
        """Called once, when this rank has left its loop and is about to wait for the other ranks."""

    def before_step(self) -> None:
        """Called when a step has begun on ranks with data, on all hooks in order, before the first ``main_hook``."""


class JoinConfig(_JoinConfig):
    """The settings of a joinable in a join. Not torch's class, because torch's ``Join`` never removes its instances."""


class Joinable(ABC):
    """An object that runs its own collectives in every training step.

    A subclass calls this constructor, and calls ``Join.notify_join_context(self)`` before its collectives of each step.
    For the first joinable of a join, this call announces that the rank still has data; for others it does nothing.

    stagereg's ``Join`` calls ``join_hook`` and then :meth:`attach` on entering, and :meth:`detach` on every exit path.
    torch's ``Join`` calls only ``join_hook``, in its constructor.

    Attributes:
        has_no_collectives: whether the object runs no collectives, so that it cannot announce a step.
        may_be_first: whether the object announces every step, as the first joinable of a join must.
        announces_itself: whether the object announces without stagereg's ``Join.notify_join_context``: in the forward
            of a module, or through torch's ``Join``.
        reduces_gradients: whether ranks reduce a model's gradients through this object. Joinables after it in the list
            step only if the gradients were reduced.
        reduced: whether the last shadowed step (a step of other ranks, while this rank had no data) reduced gradients.
        after: the joinable of the model whose gradients this joinable uses. ``None``: the nearest model before it.
        hook: a factory that makes the hook from the joinable. ``None``: :attr:`own_hook`.
        own_hook: the class of the default hook. If the class is registered, the joinable's config has its options.
        session: the join that the joinable is attached to, while stagereg's ``Join`` is entered.
    """

    has_no_collectives: bool = False
    may_be_first: bool = True
    announces_itself: bool = False
    reduces_gradients: bool = False
    reduced: bool = True
    after: Joinable | None = None
    module: nn.Module | None = None
    hook: Callable[..., JoinHook] | None = None
    own_hook: Callable[[Any], JoinHook] | None = None
    session: JoinSession | None = None
    _join_config: Any

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig.construct_disabled_join_config()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one join. All joinables of a join get the same ``kwargs``; each uses those it knows."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the collectives that the join itself runs, if this joinable is the first."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The process group of the collectives; must be equal for all joinables of a join."""

    def attach(self, session: JoinSession) -> None:
        """Called on entering the join, before the first step. ``session`` is valid until :meth:`detach`."""
        self.session = session

    def detach(self) -> None:
        """Undo every change that ``join_hook`` and ``attach`` made outside this object. Idempotent."""
        vars(self).pop("session", None)  # leave no attribute of the join on the object

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        """Return whether a step depends on which ranks are active. If so, the ranks exchange this in every step."""
        return False

    @property
    def has_unfinished_step(self) -> bool:
        """Whether this rank has begun a step that the other ranks cannot finish without this rank."""
        return False

    def make_hook(self, default: Callable[[Any], JoinHook] | None = None) -> JoinHook:
        """Return the hook of this joinable, made by :attr:`hook`, or by ``default`` if :attr:`hook` is ``None``.

        ``default`` defaults to :attr:`own_hook`.

        Raises:
            JoinError: the factory did not return a hook, or there is no factory.
        """
        make = self.hook or default or self.own_hook
        if make is None:
            raise JoinError(f"a {type(self).__name__} has no hook. Set own_hook, or pass a default to make_hook")
        hook = make(self)
        if not callable(getattr(hook, "main_hook", None)) or not callable(getattr(hook, "post_hook", None)):
            raise JoinError(
                f"the hook of a {type(self).__name__} must have main_hook and post_hook, like a JoinHook, but "
                f"{self.hook!r} returned a {type(hook).__name__}"
            )
        return hook

    def is_due(self) -> bool:
        """Return whether this object must step now: whether the active ranks reduced gradients in the current step."""
        model = self.after
        if model is None and self.session is not None:
            listed = self.session.joinables
            model = next((each for each in reversed(listed[: listed.index(self)]) if each.reduces_gradients), None)
        return model is None or model.reduced


class BuiltInJoinable(Joinable):
    """A joinable with a given device and process group.

    Args:
        hook: a factory of the hook. ``None``: :attr:`own_hook`.
        process_group: the process group of its collectives. ``None``: the default group.
        device: the device of its collectives.
        stands_for: a torch object that is itself a joinable, such as a DDP module. It stores the join's settings.
    """

    own_hook: Callable[[Any], JoinHook]

    def __init__(
        self,
        hook: Callable[..., JoinHook] | None = None,
        process_group: Any = None,
        device: str | torch.device = "cpu",
        stands_for: Any = None,
    ) -> None:
        self.hook = hook
        self._group = process_group
        self._device = torch.device(device)
        own = SimpleNamespace(_join_config=JoinConfig.construct_disabled_join_config())
        self._keeper = own if stands_for is None else stands_for

    @property
    def _join_config(self) -> Any:
        return self._keeper._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._keeper._join_config = config

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return self._group or dist.group.WORLD

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self.make_hook(self.own_hook)


class BuiltInHook(JoinHook, Generic[B]):
    """The hook of one kind of joinable. Raises: ``JoinError`` if the joinable is of another kind.

    Args:
        joinable: the joinable that the hook acts for.
    """

    def __init__(self, joinable: B, /) -> None:
        own = joinable.own_hook if isinstance(joinable, BuiltInJoinable) else None
        if not isinstance(own, type) or not isinstance(self, own):
            kind = type(joinable).__name__
            raise JoinError(
                f"a {type(self).__name__} was chosen for a {kind}, which it does not support. Choose a join_hook for a "
                f"{kind}, or omit the hook. In a config: ~join_hook@join.joinables.NAME.hook"
            )
        self.joinable = joinable


Joinable.register(TorchJoinable)  # type: ignore[type-abstract]


def uncompiled(thing: Any) -> Any:
    """Return the module that was passed to ``torch.compile``, or the object itself if it is not compiled."""
    return vars(thing)["_modules"].get("_orig_mod", thing) if isinstance(thing, nn.Module) else thing


def is_native(joinable: object) -> TypeGuard[Joinable]:
    """Return whether an object has all members of :class:`Joinable` and is not one of torch's joinables."""
    kind = type(joinable)
    return Joinable in kind.__mro__ and TorchJoinable not in kind.__mro__


def notify(joinable: Any, reduces: bool | None = True) -> dist.Work | None:
    """Announce a step as :meth:`stagereg.Join.notify_join_context` does.

    ``reduces``: whether the step reduces gradients; ``None``: not known yet.
    """
    if not hasattr(joinable, "_join_config"):
        kind = type(joinable)
        raise JoinableNotInitializedError(f"Check that the {kind} constructor calls the ``Joinable`` constructor")
    config = joinable._join_config
    work = announce(joinable, reduces) if config.is_first_joinable and config.enable else None
    if is_native(joinable) and joinable.session is not None:
        joinable.session.check_place(joinable)
    return work


def announce(joinable: Any, reduces: bool | None, throws_later: bool = False) -> dist.Work | None:
    """Announce a step of any joinable. ``throws_later``: the caller itself raises if a rank has no data."""
    throw = joinable._join_config.throw_on_early_termination
    session = joinable.session if is_native(joinable) else None
    if session is not None and (membership := session.begin(reduces)) is not None:
        if throw and not throws_later:
            membership.raise_if_exhausted()
        return None
    wire = TorchWire(joinable.join_process_group, joinable.join_device)
    work = wire.announce()
    if session is not None:
        session.peers.announced = work
    if throw:
        wire.raise_if_exhausted()
    return work
