"""The stages before PPO: supervised training, a reward model, and all three in a row."""
