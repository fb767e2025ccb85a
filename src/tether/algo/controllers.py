"""How beta, the weight of the KL in the reward, moves from one iteration to the next."""


def adaptive_beta(beta: float, kl: float, target: float, rows: int, horizon: int) -> float:
    """Raise beta where the KL is above its target, lower it below, by at most 20% a horizon."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * rows / horizon)
