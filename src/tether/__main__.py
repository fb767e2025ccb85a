"""`python -m tether` is `tether`."""

from tether.cli.main import main

main()
