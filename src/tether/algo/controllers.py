"""How the weights of the KL terms move from one iteration to the next."""


def adaptive_beta(beta: float, kl: float, target: float, rows: int, horizon: int) -> float:
    """Raise beta where the KL is above its target, lower it below, by at most 20% a horizon."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * rows / horizon)


def adaptive_penalty(coef: float, kl: float, target: float) -> float:
    """PPO-Penalty's rule: halve below target / 1.5, double above target x 1.5."""
    if kl < target / 1.5:
        return coef / 2
    return coef * 2 if kl > target * 1.5 else coef
