"""For all tests: Monarch reads its supervision settings when it is imported, which a test module may do first; and
hypothesis judges no example by its time, which on a busy machine says nothing."""

from hypothesis import HealthCheck, settings

from titan_rl.launch.process import prepare_controller

prepare_controller()

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
