"""Messages of a chat in a program: text with the markers of the model's template around it."""

from __future__ import annotations

from typing import NoReturn

from .expressions import Expr, RoleBegin, RoleEnd, Sum, as_expr


def system(expr: Expr | str | None = None) -> Expr:
    """`expr` as the system message, which says how the model is to behave.

    The markers of the model's chat template stand around it; so in `user` and `assistant`.

    >>> s += pm.system("Answer in one word.")
    >>> s += pm.user("Which is the largest planet?")
    """
    return _role("system", expr)


def user(expr: Expr | str | None = None) -> Expr:
    """`expr` as a message of the user.

    >>> s += pm.user("Which is the largest planet?")
    >>> s += pm.assistant(pm.gen("answer", max_tokens=8))
    """
    return _role("user", expr)


def assistant(expr: Expr | str | None = None) -> Expr:
    """`expr` as a message of the model, mostly with a gen() in it.

    >>> s += pm.user("Name a colour.")
    >>> s += pm.assistant("A colour is" + pm.gen("colour", max_tokens=8))
    """
    return _role("assistant", expr)


def system_begin() -> Expr:
    """The marker that opens what `system` puts around its text."""
    return RoleBegin("system")


def system_end() -> Expr:
    """The marker that closes what `system` puts around its text."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """The marker that opens what `user` puts around its text."""
    return RoleBegin("user")


def user_end() -> Expr:
    """The marker that closes what `user` puts around its text."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """The marker that opens what `assistant` puts around its text."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """The marker that closes what `assistant` puts around its text."""
    return RoleEnd("assistant")


def image(path: str | bytes) -> NoReturn:
    """Raises ValueError: no model that runs here takes images."""
    raise ValueError("image: the models that run here take text only")


def video(path: str, num_frames: int) -> NoReturn:
    """Raises ValueError: no model that runs here takes videos."""
    raise ValueError("video: the models that run here take text only")


def _role(role: str, expr: Expr | str | None) -> Expr:
    return Sum((RoleBegin(role), as_expr("" if expr is None else expr), RoleEnd(role)))
