"""All of RLHF in one command: SFT, preferences, reward model, PPO, and what came of it."""
