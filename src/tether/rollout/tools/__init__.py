"""Tools that the policy may call, and the environments that may answer it."""
