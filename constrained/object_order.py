r"""Lark rules of one JSON object whose keys come in any order, or in the declared one.

Any order is a rule with a parameter of 64 bits, one for each declared key, the required first:

    object_1: "{" first_1::0x0
    first_1::_: "}" %if is_ones([0:1]) | needed_1::_ | free_1::_
    rest_1::_: "}" %if is_ones([0:1]) | "," needed_1::_ %if not(is_ones([0:1])) | "," free_1::_
    needed_1::_: "\"id\"" ":" value_2 rest_1::set_bit(0) %if bit_clear(0)
    free_1::_: "\"tag\"" ":" value_3 rest_1::set_bit(1) %if bit_clear(1)
             | OTHER_1 ":" value_4 rest_1::_

No declared key comes twice, none that is required is missing at the end, and the number of keys
is counted: each text is allowed exactly when every order of its keys is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BITS = 64  # of the parameter


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """What one object may hold. Values are names of rules."""

    required: Sequence[tuple[str, str]]  # key -> value
    optional: Sequence[tuple[str, str]]
    declared: Sequence[str]  # the order of both
    others: Sequence[tuple[str, str]]  # rule or terminal of a key -> value
    minimum: int
    maximum: int | None


def any_order(name: str, keys: ObjectKeys) -> list[str] | None:
    """The rules of an object called `name`; None when the keys are too many for one parameter."""
    num_required, num = len(keys.required), len(keys.required) + len(keys.optional)
    # How many keys there may and must be beside those that are required.
    spare = None if keys.maximum is None else keys.maximum - num_required
    least = max(0, keys.minimum - num_required)
    width = 0
    if keys.others and (least or spare is not None):
        width = max(least, spare or 0).bit_length()
    if num + width > MAX_BITS:
        return None
    has_all = f"is_ones([0:{num_required}])" if num_required else ""
    is_enough, has_room = "", ""
    if width:
        step = f"incr([{num}:{num + width}])"
        is_enough = f"ge([{num}:{num + width}], {least})" if least else ""
        has_room = f"lt([{num}:{num + width}], {spare})" if spare is not None else ""
    else:
        step = "_"
        beside = f"[{num_required}:{num}]"
        is_enough = f"bit_count_ge({beside}, {least})" if least else ""
        if keys.optional and not keys.others:
            limit = len(keys.optional) if spare is None else min(spare, len(keys.optional))
            has_room = f"bit_count_lt({beside}, {limit})"
    needed = [_way(name, i, *pair) for i, pair in enumerate(keys.required)]
    free = [_way(name, i, *pair) for i, pair in enumerate(keys.optional, num_required)]
    free += [f'{key} ":" {value} rest_{name}::_' for key, value in keys.others]
    may_close = _when(_all(has_all, is_enough))
    starts, goes_on = [f'"}}"{may_close}'], [f'"}}"{may_close}']
    lines = [f'object_{name}: "{{" first_{name}::0x0']
    if needed:
        lines.append(f"needed_{name}::_: " + " | ".join(needed))
        starts.append(f"needed_{name}::_")
        goes_on.append(f'"," needed_{name}::_ %if not({has_all})')
    if free and (spare is None or spare > 0):
        lines.append(f"free_{name}::_: " + " | ".join(free))
        starts.append(f"free_{name}::{step}{_when(has_room)}")
        goes_on.append(f'"," free_{name}::{step}{_when(has_room)}')
    if len(starts) == 1:
        return [f'object_{name}: "{{" "}}"']
    lines += [f"first_{name}::_: " + " | ".join(starts), f"rest_{name}::_: " + " | ".join(goes_on)]
    return lines


def _way(name: str, i: int, key: str, value: str) -> str:
    return f"{_text(key)} {value} rest_{name}::set_bit({i}) %if bit_clear({i})"


def declared_order(name: str, keys: ObjectKeys) -> list[str]:
    """As `any_order`, with the declared keys first and in their order; any number of them.

    The parameter counts the keys that are not required, as far as it matters.
    """
    num_required = len(keys.required)
    spare = None if keys.maximum is None else keys.maximum - num_required
    least = max(0, keys.minimum - num_required)
    width = max(least, spare or 0).bit_length()
    start, at, step = ("::0x0", "::_", f"::incr([0:{width}])") if width else ("", "", "")
    has_room = "" if spare is None or not width else f"lt([0:{width}], {spare})"
    is_enough = f"ge([0:{width}], {least})" if least else ""
    takes_more = spare is None or spare > 0
    values = dict([*keys.required, *keys.optional])
    required = {key for key, _ in keys.required}
    order = [key for key in keys.declared if key in required or takes_more]
    others = keys.others if takes_more else ()
    lines = [f'object_{name}: "{{" none_{name}_0{start}']
    num_left = len([key for key in order if key not in required])
    for i, key in enumerate(order):
        pair = f"{_text(key)} {values[key]} some_{name}_{i + 1}"
        if key in required:
            lines.append(f"none_{name}_{i}{at}: {pair}{at}")
            lines.append(f'some_{name}_{i}{at}: "," {pair}{at}')
            continue
        num_left -= 1
        must_take = least - num_left if least and not others else 0
        skip = _when(f"ge([0:{width}], {must_take})" if must_take > 0 else "")
        take = f"{pair}{step}{_when(has_room)}"
        lines.append(f"none_{name}_{i}{at}: {take} | none_{name}_{i + 1}{at}{skip}")
        lines.append(f'some_{name}_{i}{at}: "," {take} | some_{name}_{i + 1}{at}{skip}')
    none, some = f"none_{name}_{len(order)}", f"some_{name}_{len(order)}"
    # A rule with a parameter has to look at it.
    close = _when(is_enough or (f"ge([0:{width}], 0)" if width else ""))
    starts, goes_on = [f'"}}"{close}'], [f'"}}"{close}']
    for key, value in others:
        pair = f'{key} ":" {value} {some}{step}{_when(has_room)}'
        starts.append(pair)
        goes_on.append(f'"," {pair}')
    lines += [f"{none}{at}: " + " | ".join(starts), f"{some}{at}: " + " | ".join(goes_on)]
    return lines


def _text(key: str) -> str:
    return f'{json.dumps(json.dumps(key, ensure_ascii=False), ensure_ascii=False)} ":"'


def _all(*conditions: str) -> str:
    present = [condition for condition in conditions if condition]
    return f"and({', '.join(present)})" if len(present) > 1 else "".join(present)


def _when(condition: str) -> str:
    return f" %if {condition}" if condition else ""
