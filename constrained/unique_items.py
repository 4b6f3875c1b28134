"""Lark rules of a JSON array whose items are different ones of a few known values.

array_1: "[" first_1::0x0
first_1::_: "]" | item_1::_
rest_1::_: "]" | "," item_1::_ %if bit_count_lt([0:2], 2)
item_1::_: json_2 rest_1::set_bit(0) %if bit_clear(0) | json_3 rest_1::set_bit(1) ...
"""

from __future__ import annotations

from collections.abc import Sequence

from .object_order import MAX_BITS


def unique_items(name: str, values: Sequence[str], least: int, most: int) -> list[str] | None:
    """The rules of the array `name` of at least `least` and at most `most` of `values`, which are
    names of rules; None when those are too many for one parameter."""
    num = len(values)
    if num > MAX_BITS:
        return None
    most = min(most, num)
    if most == 0:
        return [f'{name}: "[" "]"']
    items = [f"{v} rest_{name}::set_bit({i}) %if bit_clear({i})" for i, v in enumerate(values)]
    enough = f" %if bit_count_ge([0:{num}], {least})"
    return [
        f'{name}: "[" first_{name}::0x0',
        f'first_{name}::_: "]"{enough} | item_{name}::_ %if bit_count_lt([0:{num}], {most})',
        f'rest_{name}::_: "]"{enough} | "," item_{name}::_ %if bit_count_lt([0:{num}], {most})',
        f"item_{name}::_: " + " | ".join(items),
    ]
