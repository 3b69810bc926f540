"""What takes part in a join, and what a rank without data does for it, under torch's names.

Signatures and behaviour are those of ``torch.distributed.algorithms.join`` (torch 2.13). torch's own joinables are
:class:`Joinable` s here by ``isinstance``, and the ones here go into torch's ``Join``. What stagereg's ``Join`` uses
beyond torch's members is declared here with a default, so a subclass overrides only what it needs.
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
    """What a rank without data does for one joinable.

    A subclass overrides what it needs: torch's ``main_hook``, in which a joined rank takes part in one step of the
    active ranks, torch's ``post_hook``, once on every rank when all have joined, and what torch's ``Join`` does not
    call. A hook that is chosen in a config is constructed with its joinable as first argument, and with its options.
    """

    def on_exhausted(self) -> None:
        """This rank has left its loop and is about to wait for the others. Called once."""

    def before_step(self) -> None:
        """A step has begun on ranks with data. Called on all hooks in order, before the first ``main_hook``."""


class JoinConfig(_JoinConfig):
    """What a joinable has to know of the join it is in; not torch's class, which torch's ``Join`` leaves behind."""


class Joinable(ABC):
    """Something with collectives of its own in every training step.

    A subclass calls this constructor, and calls ``Join.notify_join_context(self)`` before its collectives of each step.
    The first joinable of a join announces the rank through that call; for the others it does nothing.

    stagereg's ``Join`` calls ``join_hook`` and then :meth:`attach` when it is entered, and :meth:`detach` on every way
    out. torch's ``Join`` calls ``join_hook`` alone, in its constructor.

    Attributes:
        has_no_collectives: whether it has no collectives itself, so that it cannot announce the rank.
        may_be_first: whether it announces the rank before each step, as the first of a join must.
        announces_itself: whether it announces in another way than by stagereg's ``Join.notify_join_context``: by the
            forward of a module, or through torch's ``Join``.
        reduces_gradients: whether ranks reduce the gradients of a model by it; what follows steps only where
            they were reduced.
        reduced: whether the step that was shadowed last ended with reduced gradients, if it does reduce some.
        after: the joinable of the model whose gradients this one needs; ``None``: the nearest one listed before it.
        hook: makes its hook when called with the joinable; ``None``: :attr:`own_hook`.
        own_hook: the class of its default hook. If that is registered, its options are in the joinable's config.
        session: the join it is in, while stagereg's ``Join`` has it attached.
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
        """Return the hook for one join. All joinables of a join get the same ``kwargs`` and take what they know."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the join's own collectives put their tensors, if this joinable is the first."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The process group of the collectives; the same for all joinables of a join."""

    def attach(self, session: JoinSession) -> None:
        """The join has been entered. Called before the first step; ``session`` lasts until :meth:`detach`."""
        self.session = session

    def detach(self) -> None:
        """Put back whatever ``join_hook`` and ``attach`` changed outside this object. Twice is harmless."""
        vars(self).pop("session", None)  # no attribute stays behind

    def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool:
        """Whether its step depends on which ranks are active; ranks then exchange that in every step."""
        return False

    @property
    def has_unfinished_step(self) -> bool:
        """Whether this rank has begun a step that the others cannot finish without it."""
        return False

    def make_hook(self, default: Callable[[Any], JoinHook] | None = None) -> JoinHook:
        """Return the hook of this joinable: of :attr:`hook` if that was chosen, else of ``default``.

        ``default`` may be left out: it is :attr:`own_hook` then.

        Raises:
            JoinError: what was chosen makes no hook, or there is no hook.
        """
        make = self.hook or default or self.own_hook
        if make is None:
            raise JoinError(f"a {type(self).__name__} has no hook: set own_hook, or give make_hook the default one")
        hook = make(self)
        if not callable(getattr(hook, "main_hook", None)) or not callable(getattr(hook, "post_hook", None)):
            raise JoinError(
                f"the hook of a {type(self).__name__} must have main_hook and post_hook, as a JoinHook has; "
                f"{self.hook!r} made a {type(hook).__name__}"
            )
        return hook

    def is_due(self) -> bool:
        """Whether the active ranks step their optimizers in the step that is shadowed: not while they accumulate."""
        model = self.after
        if model is None and self.session is not None:
            listed = self.session.joinables
            model = next((each for each in reversed(listed[: listed.index(self)]) if each.reduces_gradients), None)
        return model is None or model.reduced


class BuiltInJoinable(Joinable):
    """A joinable with the device and the process group that it is given.

    Args:
        hook: makes its hook; ``None``: :attr:`own_hook`, the hook of its kind.
        process_group: of its collectives; ``None``: the default group.
        device: of its collectives.
        stands_for: an object of torch's that is in joins by itself, as a DDP module is, and keeps the configuration.
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
    """The hook of one kind of joinable; a ``JoinError`` if it is given another.

    Args:
        joinable: the joinable, of that kind.
    """

    def __init__(self, joinable: B, /) -> None:
        own = joinable.own_hook if isinstance(joinable, BuiltInJoinable) else None
        if not isinstance(own, type) or not isinstance(self, own):
            kind = type(joinable).__name__
            raise JoinError(
                f"a {type(self).__name__} was chosen for a {kind}, of which it is no hook. Choose a join_hook for a "
                f"{kind}, or leave out the hook. In a config: ~join_hook@join.joinables.NAME.hook"
            )
        self.joinable = joinable


Joinable.register(TorchJoinable)  # type: ignore[type-abstract]


def uncompiled(thing: Any) -> Any:
    """Return the module that ``torch.compile`` has made a module of, or else the object itself."""
    return vars(thing)["_modules"].get("_orig_mod", thing) if isinstance(thing, nn.Module) else thing


def is_native(joinable: object) -> TypeGuard[Joinable]:
    """Whether an object has all members of :class:`Joinable` and announces here, which torch's joinables do not."""
    kind = type(joinable)
    return Joinable in kind.__mro__ and TorchJoinable not in kind.__mro__


def notify(joinable: Any, reduces: bool | None = True) -> dist.Work | None:
    """As :meth:`stagereg.Join.notify_join_context`, of a step that ``reduces`` gradients among the ranks or not.

    ``None``: it is not known yet.
    """
    if not hasattr(joinable, "_join_config"):
        raise JoinableNotInitializedError(
            f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor"
        )
    config = joinable._join_config
    work = announce(joinable, reduces) if config.is_first_joinable and config.enable else None
    if is_native(joinable) and joinable.session is not None:
        joinable.session.check_place(joinable)
    return work


def announce(joinable: Any, reduces: bool | None, throws_later: bool = False) -> dist.Work | None:
    """As :func:`notify`, for any joinable. ``throws_later``: off torch's wire the caller stops uneven ranks."""
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
