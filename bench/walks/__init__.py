"""The random walks of examples/random_walks, on every side: jobs by scripts/yardstick_walks.py."""
