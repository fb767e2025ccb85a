"""Signals of the tests that send some."""

import signal

# Under nohup every child would ignore a hangup, also the server from which the tests fork.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
