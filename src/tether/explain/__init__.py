"""PPO explained by concrete numbers, made with the functions that train."""
