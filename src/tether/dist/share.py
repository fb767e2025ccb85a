"""Which process does which rows. Everyone works it out for all, so nobody has to ask."""

from collections.abc import Sequence

from tether.dist.world import world


def block(rows: int) -> range:
    """This process's rows out of so many, as one block: neighbours stay together."""
    here = world()
    return range(rows * here.rank // here.size, rows * (here.rank + 1) // here.size)


def balanced(costs: Sequence[int], shares: int) -> list[list[int]]:
    """Numbers of the pieces in each share, of about equal cost: the dearest piece first, each to
    the share that has least."""
    found: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        least = loads.index(min(loads))
        found[least].append(piece)
        loads[least] += costs[piece]
    return [sorted(share) for share in found]
