"""How near a walk is to the shortest one, as trlx scores it: 1 = shortest, 0 = not a walk to a."""

MAX_NODES = 10


def optimality(prompt: str, response: str, edges: list[str], shortest: int) -> float:
    """Return (10 - nodes) / (10 - fewest); what comes after node a is not read."""
    walk = prompt + response
    allowed = set(edges)
    for position, node in enumerate(walk):
        if position and walk[position - 1] + node not in allowed:
            return 0.0
        if node == "a":
            return max(0.0, (MAX_NODES - position - 1) / (MAX_NODES - shortest))
    return 0.0
