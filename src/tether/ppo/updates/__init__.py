"""Updates: each takes an iteration's experience and moves one role's weights."""
