"""Which process does which rows. Everyone works it out for all, so nobody has to ask."""

from collections.abc import Sequence

from tether.dist.world import world


def block(rows: int) -> range:
    """This process's rows out of so many, as one block: neighbours stay together."""
    here = world()
    return range(rows * here.rank // here.size, rows * (here.rank + 1) // here.size)


def balanced(costs: Sequence[int]) -> list[list[int]]:
    """Rows of every replica, of about equal cost: the dearest first, each to who has least."""
    shares: list[list[int]] = [[] for _ in range(world().replicas)]
    loads = [0] * len(shares)
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        least = loads.index(min(loads))
        shares[least].append(row)
        loads[least] += costs[row]
    return [sorted(share) for share in shares]
