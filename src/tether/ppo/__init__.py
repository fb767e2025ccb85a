"""PPO itself: one iteration, its updates, and what it reports."""
