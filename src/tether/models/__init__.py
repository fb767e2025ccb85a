"""The networks behind the roles: loading, the forward pass, the heads over it."""
