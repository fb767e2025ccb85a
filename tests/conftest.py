"""Load the fixtures, but not in the process that only hands tests to its workers.

`pytest --numprocesses 2` runs no test itself: importing torch and tether there would keep both
workers waiting for seconds.
"""

import os
import sys

hands_tests_out = "--numprocesses" in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ
pytest_plugins = [] if hands_tests_out else ["shared_fixtures"]
