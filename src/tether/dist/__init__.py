"""Several processes as one: who there is, how they add up, how weights lie over them."""
