"""The networks behind the roles: loading, the forward pass and the heads on it."""
