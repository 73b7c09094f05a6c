"""Names of operations as a program carries them."""

from __future__ import annotations


def primitives(op_name: str) -> list[str]:
    """The operations that a name, or several put together, stand for.

    >>> primitives("jit(f)/jvp()/while/body/dot_general")
    ['dot_general']
    >>> primitives("jit(f)/(transpose(jvp())/scatter-add:jvp()/reduce_sum)")
    ['scatter-add', 'reduce_sum']
    """
    last = (part.rpartition("/")[2].strip("()") for part in op_name.split(":"))
    return list(dict.fromkeys(name for name in last if name))
