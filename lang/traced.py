"""What states share while a program is being compiled: options of gens with places in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .expressions import GenArguments, PlannedOptions, RunDefaults
from .host import Host
from .ir import GenOptions, Insert, Quote, Slot, Template
from .placeholders import Arg, Placeholder, Ref, Unknown, plain, refuse
from .state import ProgramState

if TYPE_CHECKING:
    from .compiler import Tracing


class TracedState(ProgramState):
    """The state of a program that was started inside of a compilation."""

    __slots__ = ("returned",)
    returned: object

    @property
    def ret_value(self) -> object:
        return self.returned


class TracingHost(Host):
    """`is_inner`: of a program started inside of another, whose defaults are settled now."""

    __slots__ = ("_is_inner", "_tracing")

    def __init__(
        self,
        tracing: Tracing,
        defaults: RunDefaults,
        *,
        num_spec: int | None = None,
        is_inner: bool = False,
    ) -> None:
        super().__init__(
            reading=tracing,
            session=None,
            chat=lambda: tracing.chat,
            defaults=defaults,
            num_spec=num_spec,
        )
        self._tracing = tracing
        self._is_inner = is_inner
        self.branches = tracing.branches

    def options(self, arguments: GenArguments) -> GenOptions:
        if self.num_spec is not None:
            arguments = arguments._replace(num_api_spec_tokens=self.num_spec)
        arguments = _unmarked(arguments)
        if any(isinstance(value, Placeholder) for value in arguments):  # these have no hash
            return self._planned(arguments)
        key = arguments, self.defaults if self._is_inner else None
        try:
            planned = self._tracing.planned.get(key)
        except TypeError:  # a list where there is no place for one; it is told of below
            return self._planned(arguments)
        if planned is None:
            planned = self._tracing.planned[key] = self._planned(arguments)
        return planned

    def _planned(self, arguments: GenArguments) -> PlannedOptions:
        if self._is_inner:
            arguments = settled(arguments, self.defaults)
        given = GenArguments(*(self._given(name, getattr(arguments, name)) for name in _FIELDS))
        return PlannedOptions.of(given, self.defaults)

    def _given(self, name: str, value: Any) -> Any:
        """The value of one parameter, its placeholders as slots and templates."""
        template = self._tracing.holes.template
        if isinstance(value, Arg):
            value = Slot(value.name, None, True)
            if name in ("n", "grammar"):
                refuse(f"{name} of a gen", "give it to compile() as a constant")
        elif isinstance(value, Placeholder):
            value._refuse()
        elif name == "stop" and value is not None:
            texts = tuple(map(template, (value,) if isinstance(value, str) else value))
            refuse_values(name, texts)
            value = texts[0] if isinstance(value, str) else texts
        elif name == "grammar" and value is not None:
            source = template(value.source)
            value = value if source is value.source else replace(value, source=source)
            refuse_values(name, (source,))
        elif any(isinstance(template(text), Template) for text in _texts_of(value)):
            refuse(f"{name} of a gen", "give it to compile() as a constant")
        return value


def _unmarked(arguments: GenArguments) -> GenArguments:
    """`arguments` with mere texts for all placeholders but arguments that are a whole parameter."""
    changes: dict[str, Any] = {}
    stop, patterns, grammar = arguments.stop, arguments.stop_regex, arguments.grammar
    if patterns is not None and len(patterns) == 1 and isinstance(patterns[0], Arg):
        changes["stop_regex"] = patterns[0]
    for name, texts in (("stop", stop), ("stop_regex", patterns)):
        if name not in changes and isinstance(texts, tuple):
            if any(isinstance(text, Placeholder) for text in texts):
                changes[name] = tuple(map(plain, texts))
    if grammar is not None and isinstance(grammar.source, Placeholder):
        changes["grammar"] = replace(grammar, source=plain(grammar.source))
    for name, value in zip(_FIELDS, arguments, strict=True):
        if isinstance(value, Placeholder) and not isinstance(value, Arg | Ref | Unknown):
            changes[name] = plain(value)
    return arguments._replace(**changes) if changes else arguments


def _texts_of(value: object) -> list[str]:
    items = value if isinstance(value, tuple) else (value,)
    return [item for item in items if isinstance(item, str)]


_FIELDS = GenArguments._fields


def refuse_values(name: str, texts: Sequence[str]) -> None:
    """
    Raises:
        ConcretizationError: a generated text decides what a model is asked for.
    """
    parts = [part for text in texts if isinstance(text, Template) for part in text.parts]
    if any(isinstance(part, Insert | Quote) for part in parts):
        refuse(f"a generated value in {name}")


def settled(arguments: GenArguments, defaults: RunDefaults) -> GenArguments:
    """`arguments` with a run's defaults where they say nothing."""
    missing: dict[str, Any] = {
        name: getattr(defaults, name)
        for name in RunDefaults._fields
        if getattr(arguments, name) is None
    }
    return arguments._replace(**missing)
