"""For all tests.

- A test runner in the background ignores Ctrl-C, one under nohup the hang-up, and so would all processes of its tests.
- Monarch reads its supervision settings when it is imported, which a test module may do first.
- hypothesis judges no example by its time, which on a busy machine says nothing.
"""

import signal

from hypothesis import HealthCheck, settings

from titan_rl.launch.process import prepare_controller

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

prepare_controller()

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
